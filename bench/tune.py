"""Find the tiles of v1, v2 and v3 on this GPU: every candidate checked, then timed. `python -m bench.tune --help`

One entry of a version's table is replaced at a time, and the version is called as users call it: a candidate that the
`bench.referee` refuses, or that does not compile or fit, gets no time. Prints the fastest for each entry and
length, to be put into `config.py`; nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from bench.cells import Cell
from bench.contenders import Contender
from bench.progress import progress
from bench.referee import Referee
from flashzoo.call.problem import Problem
from flashzoo.gpu import SHARED_LIMIT
from flashzoo.inputs import inputs
from flashzoo.tiles import Tiles, block_d
from flashzoo.timing import Clock, Timing
from flashzoo.v1 import config as v1_config
from flashzoo.v1 import launch as v1_launch
from flashzoo.v2 import config as v2_config
from flashzoo.v2 import launch as v2_launch
from flashzoo.v3 import config as v3_config
from flashzoo.v3 import launch as v3_launch
from flashzoo.v3 import traits as v3_traits
from flashzoo.workloads import hardware

KERNELS = {"v1": ("forward", "backward"), "v2": ("forward", "dkdv", "dq"), "v3": ("forward",)}
REGISTERS, SHARED_BYTES = 255, SHARED_LIMIT[90]
BLOCKS, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3, 4)


def candidates(version: str, kernel: str, width: int) -> Iterator[Any]:
    """Tiles whose accumulators and scores fit the registers and whose operands fit shared memory, by a rough count."""
    if version == "v3":
        yield from _v3_candidates(width)
        return
    for block_q, block_kv, warps, stages in product(BLOCKS, BLOCKS, WARPS, STAGES):
        by_queries = kernel in ("forward", "dq")
        owned, streamed = (block_q, block_kv) if by_queries else (block_kv, block_q)
        accumulators = owned * width * (1 if by_queries else 2)
        scores = block_q * block_kv * (1 if kernel == "forward" else 2)
        shared = 2 * width * (owned * (1 if kernel == "forward" else 2) + streamed * 2 * stages)
        if (accumulators + scores) / (32 * warps) > REGISTERS or shared > SHARED_BYTES or owned < 64 * warps // 8:
            continue
        if version == "v1":
            yield v1_config.Tiles(block_q, block_kv, warps, stages, "measured")
        else:
            yield Tiles(block_q, block_kv, warps, stages)
            for registers in range(2 if kernel == "forward" else 3):
                yield Tiles(block_q, block_kv, warps, stages, tma=True, registers=registers)


def _v3_candidates(width: int) -> Iterator[v3_traits.Tiles]:
    for consumers, block_kv, stages, q_stages, ping_pong in product(
        (2, 3), range(48, 209, 16), (2, 3, 4), (1, 2), (True, False)
    ):
        tiles = v3_traits.Tiles(consumers, block_kv, stages, q_stages, ping_pong)
        kernel = v3_traits.Kernel("bf16", width, width, False, True, tiles)
        registers = (block_kv + width + block_kv // 2) // 2  # of S, O and P, of a thread's two rows
        if kernel.shared_bytes <= SHARED_BYTES and registers < {2: 230, 3: 150}[consumers]:
            yield tiles


@contextmanager
def entry(version: str, kernel: str, problem: Problem, tiles: Any) -> Iterator[None]:
    """The version's table with this one entry replaced."""
    width = max(64, block_d(problem.head_dim))
    tables = {"v1": v1_config.HOPPER, "v2": v2_config.HOPPER, "v3": v3_config.HOPPER}
    table: dict[Any, Any] = tables[version]
    if version == "v1":
        key, launches = (kernel, width), (v1_launch.forward_launch, v1_launch.backward_launch)
    elif version == "v3":
        key, launches = v3_config.widths_of(problem), (v3_launch.forward_launch,)
    else:
        key = (kernel, width, problem.span[1] is not None)
        launches = (v2_launch.forward_launch, v2_launch.dkdv_launch, v2_launch.dq_launch)
    alternatives: dict[Any, Any] = v3_config.OTHERS if version == "v3" else {}
    before, others = table[key], alternatives.pop(key, None)
    try:
        table[key] = tiles
        for launch in launches:
            launch.cache_clear()
        yield
    finally:
        table[key] = before
        if others is not None:
            alternatives[key] = others
        for launch in launches:
            launch.cache_clear()


def tune(version: str, kernel: str, cell: Cell, clock: Clock, ms_each: float) -> list[tuple[float, Any]]:
    """Milliseconds and tiles of every candidate that is right, fastest first."""
    tensors = inputs(cell.problem, device=cell.problem.device)
    referee = Referee(cell, tensors)
    found, tried = [], list(candidates(version, kernel, cell.problem.head_dim))
    with progress(len(tried), f"{version} {kernel} {cell}") as say:
        for tiles in tried:
            with entry(version, kernel, cell.problem, tiles):
                try:
                    contender = Contender(version, cell, tensors)
                    referee.errors(version, contender.result())
                except Exception as error:
                    # a wrong result, or whatever a compiler raises: a candidate's failure is not the search's
                    first_line = (str(error).splitlines() or [""])[0]
                    say(f"{tiles}: {type(error).__name__}: {first_line[:100]}")
                    continue
                times = clock.measure({"candidate": contender.run}, ms_each)["candidate"]
                found.append((Timing.of(times).ms, tiles))
                say(f"{tiles}: {found[-1][0]:.3f} ms")
    return sorted(found, key=lambda pair: pair[0])


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--version", choices=KERNELS, default="v2")
    parser.add_argument("--kernel", help="one of the version's kernels; all where not given")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 2048, 16384])
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds of measuring for each candidate")
    parser.add_argument("--top", type=int, default=3, help="how many to print")
    args = parser.parse_args(argv)
    clock = Clock("cuda")
    for kernel, head_dim, causal in product(
        [args.kernel] if args.kernel else KERNELS[args.version], args.head_dims, (False, True)
    ):
        for seqlen in args.seqlens:
            heads = 2048 // head_dim
            problem = Problem(
                16384 // seqlen, seqlen, seqlen, heads, heads, head_dim, causal=causal, grad=kernel != "forward"
            )
            cell = Cell(replace(problem, **hardware("cuda")))
            found = tune(args.version, kernel, cell, clock, args.ms)
            print(f"{args.version} {kernel} {cell}, the fastest of {len(found)}:")
            for ms, tiles in found[: args.top]:
                print(f"  {ms:.3f} ms  {tiles}", flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
