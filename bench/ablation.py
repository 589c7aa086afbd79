"""FlashAttention-3's ablation (table 2 of its paper) with v3's kernel: ping-pong and overlap, each on and off.

`python -m bench.ablation` times the four at the paper's size, fp16, {batch 4, seqlen 8448, hidden 2048}, without a
mask, for head dims 64, 128 and 256, with the tiles that v3 has for them; further arguments are `bench.run`'s. Each of
the four is registered as a version of its own, so each is held to the oracle like any other.

`python -m bench.ablation --fp8` times v3_fp8 beside itself with two-level accumulation switched off, on e4m3 inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

import flashzoo
from bench import run
from flashzoo import Problem, Spec
from flashzoo._cute.scale import in_log2
from flashzoo.call.operands import Operands
from flashzoo.v3 import FP8_SPEC, SPEC
from flashzoo.v3.config import kernel_for
from flashzoo.v3.launch import ForwardLaunch

SIZE = [
    "--passes",
    "fwd",
    "--dtype",
    "fp16",
    "--tokens",
    "33792",
    "--seqlens",
    "8448",
    "--hidden",
    "2048",
    "--causal",
    "0",
]
FP8_SIZE = ["--passes", "fwd", "--dtype", "e4m3", "--seqlens", "4096,16384"]

Ints = tuple[int, ...]


@lru_cache
def launch_of(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int, **switches: bool
) -> ForwardLaunch:
    """v3's launch with these switches of its tiles set."""
    kernel = kernel_for(problem)
    kernel = replace(kernel, tiles=replace(kernel.tiles, **switches))
    return ForwardLaunch(problem, kernel, q_strides, k_strides, v_strides, device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands, **switches: bool
) -> tuple[Tensor, Tensor]:
    """v3 with these switches of its tiles set, on tensors that TMA reads where they lie."""
    launch = launch_of(problem, q.stride(), k.stride(), v.stride(), q.get_device(), **switches)
    return launch(q, k, v, in_log2(problem.scale))


v3_ping_pong_overlap = partial(attention, ping_pong=True, overlap=True)
v3_overlap = partial(attention, ping_pong=False, overlap=True)
v3_ping_pong = partial(attention, ping_pong=True, overlap=False)
v3_serial = partial(attention, ping_pong=False, overlap=False)
NAMES = ("v3_ping_pong_overlap", "v3_overlap", "v3_ping_pong", "v3_serial")

ONE_LEVEL = "v3_fp8_one_level"


@lru_cache
def fp8_launch_of(
    problem: Problem, strides: tuple[Ints, Ints, Ints], of_blocks: bool, transposed: bool, device: int, **switches: bool
) -> ForwardLaunch:
    """v3_fp8's launch with these switches of its kernel set."""
    from flashzoo.v3.config import kernel_fp8_for
    from flashzoo.v3.launch_fp8 import SCALING

    return ForwardLaunch(
        problem, replace(kernel_fp8_for(problem, of_blocks, transposed), **switches), *strides, device, SCALING
    )


def v3_fp8_one_level(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """v3_fp8 with O summed by the tensor core alone, on tensors that TMA reads where they lie."""
    from flashzoo.v3.config import prepares
    from flashzoo.v3.launch_fp8 import or_one, scaling_of
    from flashzoo.v3.quantize import transpose_v

    transposed = prepares(problem)
    v = transpose_v(v) if transposed else v
    of_blocks = any(descale is not None and descale.ndim == 3 for descale in operands.descales[1:])
    launch = fp8_launch_of(
        problem, (q.stride(), k.stride(), v.stride()), of_blocks, transposed, q.get_device(), two_level=False
    )
    given = or_one(operands.descales, q.get_device())
    return launch(q, k, v, *scaling_of(problem, given))


VARIANTS = [
    replace(SPEC, name=name, title=f"v3: {name.removeprefix('v3_').replace('_', ' ')}", impl=f"{__name__}:{name}")
    for name in NAMES
]
ONE_LEVEL_SPEC = replace(
    FP8_SPEC,
    name=ONE_LEVEL,
    title="v3_fp8 without two-level accumulation",
    impl=f"{__name__}:{ONE_LEVEL}",
    quantizes=(),
    fp8_rms=(),
    auto=(),
)
"""It takes e4m3 inputs alone."""


@contextmanager
def registered(*specs: Spec) -> Iterator[None]:
    """These are versions for as long as the block runs."""
    for spec in specs:
        flashzoo.register(spec)
    try:
        yield
    finally:
        for spec in specs:
            flashzoo.unregister(spec.name)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark with the four, or with `--fp8` the one."""
    given = sys.argv[1:] if argv is None else argv
    specs, size, names = VARIANTS, SIZE, NAMES
    if "--fp8" in given:
        specs, size, names = [ONE_LEVEL_SPEC], FP8_SIZE, (FP8_SPEC.name, ONE_LEVEL)
    # No workers: a process that compiles ahead would not know them.
    chosen = ["--head-dims", "64,128,256", "--workers", "0", "--impls", ",".join(names)]
    with registered(*specs):
        return run.main([*size, *chosen, *(word for word in given if word != "--fp8")])


if __name__ == "__main__":
    raise SystemExit(main())
