"""v3's forward kernel with stamps of the clock in it, for `bench.trace`. No line of the kernel changes: CuTe DSL
compiles a program by running it, so the functions that it calls are wrapped for as long as it compiles.

A stamp is the multiprocessor's clock at the end of a phase, written to memory by one thread of each warpgroup of the
launch's first thread block. Its place says which warpgroup's it is, of which block of keys, and of which phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from bench.ablation import launch_of
from bench.phases import (
    BATCH,
    BLOCKS,
    DTYPE,
    HEAD_DIM,
    HEADS,
    PHASES,
    ROW,
    SEQLEN,
    SWITCHES,
    TILE,
    TRACE,
    Order,
    lanes_of,
    written,
)
from bench.rows import gpu_name, head_commit, version_of
from flashzoo import Problem
from flashzoo._cute.cache import Image
from flashzoo._cute.compile import compile_for
from flashzoo._cute.driver import Function
from flashzoo._cute.hopper.pipeline import Pipeline, PipelineState
from flashzoo._cute.scale import in_log2
from flashzoo.gpu import WARPGROUP
from flashzoo.inputs import inputs
from flashzoo.integers import cdiv
from flashzoo.timing import Clock, Timing
from flashzoo.v3 import forward, launch
from flashzoo.v3.config import kernel_for
from flashzoo.v3.forward import Consumer, Forward, SharedStorage
from flashzoo.v3.product import Product
from flashzoo.v3.programs import ARCH, arguments_of, program
from flashzoo.v3.softmax import Softmax
from flashzoo.v3.traits import Kernel

LAUNCHES, MS_EACH = 20, 100
"""Launches before the one whose stamps are read, and milliseconds that each kernel is timed for."""
Run = Callable[..., Any]


@cute.jit
def write_clock(address: Int64, wanted: Boolean):
    """The clock, to memory. It is read where `wanted` is known, and no sooner."""
    if wanted:
        cute.arch.inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[address, cute.arch.clock()])


def kept(x: Any) -> Any:
    """The number in a register, and not made anew for each stamp."""
    bits = x.width
    return cute.arch.inline_ptx(f"mov.b{bits} {{$w0}}, {{$r0}};", write_only_types=[type(x)], read_only_args=[x])


class Stamps:
    """What is known at the place of the program that is being compiled, and what is called in place of the kernel's
    functions: with the function itself, and with what it is given.

    Args:
        address: of the stamps, int32 (warpgroups, `BLOCKS`, `PHASES`).

    Attributes:
        storage: shared memory.
        first: address of the warpgroup's stamps.
        blocks: how many of them it has stamps of; of a thread that writes none 0.
        inside: whether the place is in a step or a load, whose phases are stamped.
        waited, scored: the blocks that were last waited for, and whose scores are at hand.
        issued: products that have been issued and not been waited for: names and blocks.
        used: blocks up to the end of the tile.
    """

    storage: SharedStorage
    first: Int64
    blocks: Int32
    waited: Int32
    scored: Int32
    used: Int32

    def __init__(self, address: int) -> None:
        self.address, self.inside = address, False
        self.issued: list[tuple[str, Int32]] = []

    def write(self, phase: str, block: Int32, *after: Float32) -> None:
        """A stamp at the end of a phase, once `after` is computed: numbers that are not negative."""
        wanted = block < self.blocks
        for x in after:
            wanted &= x >= 0.0
        write_clock(self.first + (Int64(block) * ROW + 4 * PHASES.index(phase)), wanted)

    @contextmanager
    def within(self) -> Iterator[None]:
        """What is compiled here is stamped."""
        self.inside = True
        yield
        self.inside = False

    def name(self, pipeline: Pipeline) -> str:
        """K or V."""
        return {id(self.storage.k_pipeline): "K", id(self.storage.v_pipeline): "V"}[id(pipeline)]

    def role(self, run: Run, self_: Forward, params: Any, storage: SharedStorage, *more: Any) -> None:
        thread = cute.arch.thread_idx()[0]
        writes = (thread % WARPGROUP == 0) & (cute.arch.block_idx()[0] == 0)
        self.storage, self.blocks = storage, kept(Int32(writes) * BLOCKS)
        self.first = kept(Int64(self.address) + Int64(thread // WARPGROUP * (BLOCKS * ROW)))
        run(self_, params, storage, *more)

    def acquire(self, run: Run, pipeline: Pipeline, n: Int32) -> None:
        run(pipeline, n)
        if self.inside:
            self.write(f"{self.name(pipeline)} free", n)

    def load(self, run: Run, self_: Forward, tma: Any, stages: Any, pipeline: Pipeline, n: Int32, origin: Any) -> None:
        with self.within():
            run(self_, tma, stages, pipeline, n, origin)
        self.write(f"{self.name(pipeline)} ordered", n)

    def step(self, run: Run, *given: Any) -> Any:
        with self.within():
            return run(*given)

    def wait(self, run: Run, pipeline: Pipeline, used: Int32 | PipelineState) -> None:
        run(pipeline, used)
        if self.inside:
            self.waited = pipeline.state(used).n
            self.write(self.name(pipeline), self.waited)

    def turn(self, run: Run, self_: Forward, wg_idx: Int32) -> None:
        run(self_, wg_idx)
        if self.inside and self_.tiles.ping_pong:
            self.write("turn", self.waited)

    def scores(self, run: Run, consumer: Consumer, used: PipelineState) -> cute.Tensor:
        s = run(consumer, used)
        self.write("S issued", used.n)
        self.issued.append(("S", used.n))
        return s

    def product(self, run: Run, self_: Product, consumer: Consumer, used: PipelineState) -> cute.Tensor | None:
        product = run(self_, consumer, used)
        self.write("PV issued", used.n)
        self.issued.append(("PV", used.n))
        return product

    def wait_group(self, left: int) -> None:
        warpgroup.wait_group(left)
        while len(self.issued) > left:
            what, n = self.issued.pop(0)
            self.write(what, n)
            if what == "S":
                self.scored = n

    def softmax(self, run: Run, softmax: Softmax, *given: Any) -> Any:
        found = run(softmax, *given)
        self.write("softmax", self.scored, softmax.row_sum[0], softmax.row_sum[1])
        return found

    def rescale(self, run: Run, *given: Any) -> None:
        run(*given)
        self.write("P", self.scored)

    def tile(self, run: Run, *given: Any) -> PipelineState:
        used: PipelineState = run(*given)
        self.used = used.n
        return used

    def epilogue(self, run: Run, *given: Any) -> None:
        run(*given)
        self.write("O", self.used - 1)


def stamped(kernel: Kernel, address: int) -> Image:
    """The kernel with stamps: int32 (`1 + consumers`, `BLOCKS`, `PHASES`) at that address of the GPU's memory."""
    stamps = Stamps(address)
    wrapped: list[tuple[type, str, Run]] = [
        *((Forward, name, stamps.role) for name in ("produce", "consume")),
        *((Forward, f"step_{name}", stamps.step) for name in ("serial", "overlapped")),
        *((Forward, name, stamps.step) for name in ("first_scores", "last_product")),
        *((Forward, "load_block", stamps.load), (Forward, "warp_scheduler_barrier_sync", stamps.turn)),
        *((Forward, "mainloop", stamps.tile), (Forward, "epilogue", stamps.epilogue)),
        *((Pipeline, "producer_acquire", stamps.acquire), (Pipeline, "consumer_wait", stamps.wait)),
        *((Consumer, "issue_scores", stamps.scores), (Product, "issue", stamps.product)),
        *((Softmax, "step", stamps.softmax), (Product, "rescale", stamps.rescale)),
    ]
    with ExitStack() as stack:
        for owner, name, instead in wrapped:
            stack.enter_context(mock.patch.object(owner, name, _around(getattr(owner, name), instead)))
        stack.enter_context(
            mock.patch.object(
                forward, "warpgroup", SimpleNamespace(**vars(warpgroup) | {"wait_group": stamps.wait_group})
            )
        )
        return compile_for(ARCH, *program(kernel))


def _around(run: Run, instead: Run) -> Run:
    return lambda *given: instead(run, *given)


def measure(out: Path) -> None:
    """Run v3 with and without stamps on this machine's Hopper GPU, and write what was found to a file of that folder.

    Raises:
        RuntimeError: a kernel with stamps does not give what it gives without, bit by bit.
    """
    problem = Problem(BATCH, SEQLEN, SEQLEN, HEADS, HEADS, HEAD_DIM, dtype=DTYPE, arch=90)
    q, k, v = inputs(problem, device="cuda")[:3]
    where, tiles = (q.stride(), k.stride(), v.stride(), q.get_device()), kernel_for(problem).tiles
    stamps, calls = {}, {}
    for name, switches in SWITCHES.items():
        stamps[name] = torch.zeros(1 + tiles.consumers, BLOCKS, ROW // 4, dtype=torch.int32, device="cuda")
        kernel = replace(kernel_for(problem), tiles=replace(tiles, **switches))
        image = stamped(kernel, stamps[name].data_ptr())
        function = Function(image, kernel.threads, kernel.shared_bytes, arguments_of(kernel))
        with mock.patch.object(launch, "function_for", return_value=function):
            with_stamps = launch.ForwardLaunch(problem, kernel, *where)
        for stamping, run in enumerate((launch_of(problem, *where, **switches), with_stamps)):
            calls[name, stamping] = partial(run, q, k, v, in_log2(problem.scale))
        if not all(map(torch.equal, calls[name, 0](), calls[name, 1]())):
            raise RuntimeError(f"{kernel.tiles}: expected the same out and LSE with stamps as without, got others")
    ms = {call: round(Timing.of(times).ms, 5) for call, times in Clock("cuda").measure(calls, MS_EACH).items()}
    orders: dict[str, Order] = {}
    for name, written_to in stamps.items():
        for _ in range(LAUNCHES):
            calls[name, 1]()
        written_to.zero_()
        calls[name, 1]()
        lanes = lanes_of(written_to.cpu(), cdiv(SEQLEN, tiles.block_kv))
        orders[name] = {"ms": ms[name, 0], "stamped_ms": ms[name, 1], "lanes": lanes}
    today = datetime.now(timezone.utc).date()
    found = {
        **{"run": f"h200-{today:%Y%m%d}-trace", "date": f"{today}", "commit": head_commit(), "gpu": gpu_name("cuda")},
        **{"torch": torch.__version__, "triton": version_of("triton"), "cutlass_dsl": version_of("nvidia-cutlass-dsl")},
        **{"dtype": DTYPE, "batch": BATCH, "seqlen": SEQLEN, "heads": HEADS, "head_dim": HEAD_DIM},
        **{"block_kv": tiles.block_kv, "tile": TILE, "orders": orders},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / TRACE.name).write_text(written(found))
