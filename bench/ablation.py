"""FlashAttention-3's ablation (table 2 of its paper) with v3's kernel: ping-pong and overlap, each on and off.

`python -m bench.ablation` times the four at the paper's size, fp16, {batch 4, seqlen 8448, hidden 2048}, without a mask, for
head dims 64, 128 and 256, with the tiles that v3 has for them; further arguments are `bench.run`'s. Each of the four is
registered as a version of its own, so each is held to the oracle like any other.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import Tensor

import flashzoo
from bench import run
from flashzoo import Problem
from flashzoo.v3 import SPEC
from flashzoo.v3.config import kernel_for
from flashzoo.v3.launch import ForwardLaunch

SWITCHES = {
    "v3_ping_pong_overlap": {"ping_pong": True, "overlap": True},
    "v3_overlap": {"ping_pong": False, "overlap": True},
    "v3_ping_pong": {"ping_pong": True, "overlap": False},
    "v3_serial": {"ping_pong": False, "overlap": False},
}
SIZE = ["--passes", "fwd", "--dtype", "fp16", "--tokens", "33792", "--seqlens", "8448", "--hidden", "2048", "--causal", "0"]
_launches: dict[Any, ForwardLaunch] = {}


def __getattr__(name: str) -> Any:
    """The implementation of one of `SWITCHES`."""
    if name not in SWITCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float) -> tuple[Tensor, Tensor]:
        key = (name, problem, q.stride(), k.stride(), v.stride(), q.get_device())
        if key not in _launches:
            kernel = kernel_for(problem)
            kernel = replace(kernel, tiles=replace(kernel.tiles, **SWITCHES[name]))
            _launches[key] = ForwardLaunch(problem, kernel, *key[2:])
        return _launches[key](q, k, v, softmax_scale)

    return attention


def main(argv: list[str] | None = None) -> int:
    """Register the four, run the benchmark."""
    for name in SWITCHES:
        flashzoo.register(replace(SPEC, name=name, title=f"v3, {SWITCHES[name]}", impl=f"{__name__}:{name}"))
    given = sys.argv[1:] if argv is None else argv
    # No workers: a process that compiles ahead would not know the four.
    chosen = ["--head-dims", "64,128,256", "--workers", "0", "--impls", ",".join(SWITCHES)]
    return run.main([*SIZE, *chosen, *given])


if __name__ == "__main__":
    # By its own name: the registry imports the implementations from the module of that name, not from __main__.
    from bench import ablation

    raise SystemExit(ablation.main())
