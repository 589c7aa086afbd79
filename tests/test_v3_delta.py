"""What runs before v3's backward pass and after it: delta, the gradient of sinks, dQ from registers' order, and parts
of dK and dV added."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

import pytest
import torch
import triton
from test_v3_backward import PLAIN
from torch import Tensor
from triton import knobs

from flashzoo import Problem
from flashzoo._triton import Launch
from flashzoo._triton.compile import resources
from flashzoo.gpu import WARPGROUP
from flashzoo.inputs import LAYOUTS
from flashzoo.v3 import launch
from flashzoo.v3.config import BACKWARD
from flashzoo.v3.traits import (
    KernelBackward,
    KernelBackwardAllKeys,
    KernelBackwardByHead,
    KernelBackwardSparse,
    TilesBackward,
)
from flashzoo.workloads import hardware
from flashzoo_suite.support import DEVICE, same_bits, storage_of

KERNELS = {
    **{
        f"table_{width}_{width_v}": KernelBackward("fp16", width, width_v, False, True, True, tiles)
        for (width, width_v), tiles in BACKWARD.items()
    },
    "by_rows": KernelBackward("fp16", 64, 64, False, False, False, TilesBackward(128)),
    "by_columns": KernelBackward("fp16", 128, 128, False, False, True, TilesBackward(64)),
    "by_gradient": KernelBackward("fp16", 256, 256, False, False, True, TilesBackward(64, 64)),
    "sparse": KernelBackwardSparse("fp16", 128, 128, False, False, False, TilesBackward(64), 128, False),
}
on_kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
ROUNDING = {
    "all_keys": KernelBackwardAllKeys("fp16", 64, 64, False, False, False, TilesBackward(128)),
    "by_head": KernelBackwardByHead("fp16", 64, 64, False, False, False, TilesBackward(128)),
}
"""Those that round dQ themselves."""
on_kernels_and_rounding = pytest.mark.parametrize("kernel", (KERNELS | ROUNDING).values(), ids=KERNELS | ROUNDING)
"""The last has no sums of dQ."""


def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Memory with more of it on both sides, and all of it: NaN, or the lowest integer."""
    size = math.prod(shape)
    whole = torch.full(
        (size + 128,), torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype, device=DEVICE
    )
    return whole[64:-64].view(shape), whole


@pytest.mark.covering(2)
@on_kernels_and_rounding
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "offset"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("seqlen_q", [1, 64, 130])
def test_delta_and_zeros(kernel, layout, with_dlse, seqlen_q):
    """Delta is rowsum(dO O) - dLSE; LSE is in log2 units, +inf past the end and of rows that saw nothing;
    sums and turns begin at 0."""
    problem = Problem(2, seqlen_q, 77, 3, 3, kernel.width - 24, dtype="fp16", lse=True, **hardware(DEVICE))
    shape = 2, seqlen_q, 3, problem.head_dim
    out, dout = (LAYOUTS[layout](torch.randn(shape, device=DEVICE).half()) for _ in range(2))
    lse, dlse = torch.randn(2, 3, seqlen_q, device=DEVICE), torch.randn(2, 3, seqlen_q, device=DEVICE)
    lse[1, 2, seqlen_q // 2] = -math.inf
    block_q, blocks = kernel.tiles.block_q, kernel.blocks_q(seqlen_q)
    (delta, all_delta), (lse_log2, all_lse) = (guarded(2, 3, blocks * block_q) for _ in range(2))
    dq_sum, all_sums = guarded(2, 3, blocks * block_q * kernel.width)
    turns, all_turns = guarded(2, 3, blocks, kernel.semaphores, dtype=torch.int32)
    run = launch.delta_launch(problem, kernel, out.stride(), dout.stride(), with_dlse)
    run((out, dout, lse, dlse if with_dlse else lse, delta, lse_log2, dq_sum, turns, None, None, None), ())
    expected = (out.double() * dout.double()).sum(3).transpose(1, 2) - (dlse.double() if with_dlse else 0)
    torch.testing.assert_close(delta[..., :seqlen_q].double(), expected, rtol=1e-5, atol=1e-4)
    assert not delta[..., seqlen_q:].any()
    found = lse_log2[..., :seqlen_q].double()
    blind = lse == -math.inf
    torch.testing.assert_close(found[~blind], (lse.double() / math.log(2))[~blind], rtol=1e-6, atol=1e-6)
    assert (found[blind] == math.inf).all() and (lse_log2[..., seqlen_q:] == math.inf).all()
    assert not dq_sum.any() if kernel.dq_sums else dq_sum.isnan().all()
    assert not turns.any() if kernel.deterministic else (turns == torch.iinfo(torch.int32).min).all(), (
        "there may be no memory behind them"
    )
    for whole in (all_delta, all_lse, all_sums):
        assert whole[:64].isnan().all() and whole[-64:].isnan().all()
    assert (all_turns[:64] < 0).all() and (all_turns[-64:] < 0).all()


@on_kernels
@pytest.mark.parametrize("seqlen_q", [1, 64, 130])
def test_the_gradient_of_sinks(kernel, seqlen_q):
    """Each block of queries has its share, of heads that have a sink and of one that has none;
    rows that saw nothing have none."""
    problem = Problem(2, seqlen_q, 77, 3, 3, kernel.width - 24, dtype="fp16", lse=True, sinks=True, **hardware(DEVICE))
    out, dout = (torch.randn(2, seqlen_q, 3, problem.head_dim, device=DEVICE).half() for _ in range(2))
    lse, dlse = torch.randn(2, 3, seqlen_q, device=DEVICE), torch.randn(2, 3, seqlen_q, device=DEVICE)
    sinks = torch.tensor([0.5, -2.0, -math.inf], device=DEVICE)
    lse[1, 2, seqlen_q // 2] = -math.inf
    block_q, blocks = kernel.tiles.block_q, kernel.blocks_q(seqlen_q)
    delta, lse_log2 = torch.empty(2, 2, 3, blocks * block_q, device=DEVICE)
    dq_sum = torch.empty(2, 3, blocks * block_q * kernel.width, device=DEVICE)
    turns = torch.empty(2, 3, blocks, kernel.semaphores, dtype=torch.int32, device=DEVICE)
    dsinks, all_dsinks = guarded(2, 3, blocks)
    run = launch.delta_launch(problem, kernel, out.stride(), dout.stride(), True)
    run((out, dout, lse, dlse, delta, lse_log2, dq_sum, turns, None, sinks, dsinks), ())
    of_rows = (out.double() * dout.double()).sum(3).transpose(1, 2) - dlse.double()
    p = torch.exp(sinks.double()[:, None] - lse.double().masked_fill(lse == -math.inf, 0))
    of_blocks = (
        torch.nn.functional.pad(-p * of_rows, (0, blocks * block_q - seqlen_q)).unflatten(2, (blocks, block_q)).sum(3)
    )
    torch.testing.assert_close(dsinks.double(), of_blocks, rtol=1e-4, atol=1e-3)
    assert not dsinks[:, 2].any() and all_dsinks[:64].isnan().all() and all_dsinks[-64:].isnan().all()


def places_of_wgmma(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column, and place in memory of every number of a part.

    By index from where WGMMA leaves element (m, n) of its 64 x N result (PTX, "register fragments of wgmma"): in a
    thread of the warp of 16 rows, which has two rows 8 apart and of every eight columns two. A part lies by fours of
    registers, then by thread.
    """
    m, n = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    thread = m // 16 * 32 + m % 8 * 4 + n % 8 // 2
    register = n // 8 * 4 + m // 8 % 2 * 2 + n % 2
    at = register // 4 * (4 * WARPGROUP) + thread * 4 + register % 4
    assert sorted(at.flatten().tolist()) == [*range(rows * columns)]
    return m, n, at


def as_registers(dq: Tensor, kernel: KernelBackward) -> Tensor:
    """What the backward kernel leaves of dQ `(batch, seqlen_q, heads, head_dim)`:
    (batch, heads, blocks, parts of a block, numbers of a part)."""
    tiles, (rows, columns) = kernel.tiles, kernel.dq_part
    blocks = kernel.blocks_q(dq.shape[1])
    padding = (0, kernel.width - dq.shape[3], 0, 0, 0, blocks * tiles.block_q - dq.shape[1])
    whole = (
        torch.nn.functional.pad(dq, padding)
        .permute(0, 2, 1, 3)
        .reshape(dq.shape[0], dq.shape[2], blocks, tiles.block_q, kernel.width)
    )
    m, n, at = places_of_wgmma(rows, columns)
    parts = []
    for part in range(kernel.dq_parts):
        row, column = (m + rows * part, n) if kernel.dq_by_rows else (m, n + columns * part)
        numbers = torch.empty(*whole.shape[:3], rows * columns, dtype=dq.dtype, device=dq.device)
        numbers[..., at.flatten()] = whole[..., row.flatten(), column.flatten()]
        parts.append(numbers)
    return torch.stack(parts, 3).contiguous()


@pytest.mark.covering(2)
@on_kernels
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "padded"])
@pytest.mark.parametrize(("seqlen_q", "narrower"), [(1, 0), (64, 8), (300, 56)])
def test_dq_is_rounded_from_where_registers_lay(kernel, layout, seqlen_q, narrower):
    head_dim = kernel.width - min(narrower, kernel.width - 8)
    problem = Problem(2, seqlen_q, 77, 3, 3, head_dim, dtype="fp16", **hardware(DEVICE))
    expected = torch.randn(2, seqlen_q, 3, problem.head_dim, device=DEVICE)
    dq = LAYOUTS[layout](torch.full(expected.shape, torch.nan, device=DEVICE).half())
    run = launch.round_and_sum_launch(problem, kernel, 2, 1, *[dq.stride()] * 3)
    run((as_registers(expected, kernel), dq, *[None] * 6), (0.37,))
    wanted = LAYOUTS[layout]((expected * torch.tensor(0.37)).half())
    assert same_bits(dq, wanted)
    assert torch.equal(storage_of(dq), storage_of(wanted)), "what lies between was written"


def parts_of_keys(parts: Tensor, kernel: KernelBackward, width: int) -> Tensor:
    """What tiles leave of parts of dK or dV `(splits, batch, seqlen_k, heads_kv, head_dim)`:
    (batch, heads_kv, splits, blocks, 64 keys of a block, numbers)."""
    keys, blocks = kernel.tiles.block_kv, kernel.blocks_kv(parts.shape[2])
    padding = (0, width - parts.shape[4], 0, 0, 0, blocks * keys - parts.shape[2])
    whole = torch.nn.functional.pad(parts, padding).permute(1, 3, 0, 2, 4)
    whole = whole.reshape(*whole.shape[:3], blocks, keys // 64, 64, width)
    m, n, at = places_of_wgmma(64, width)
    numbers = torch.empty(*whole.shape[:5], 64 * width, dtype=parts.dtype, device=parts.device)
    numbers[..., at.flatten()] = whole[..., m.flatten(), n.flatten()]
    return numbers


@pytest.mark.covering(2)
@on_kernels_and_rounding
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "padded"])
@pytest.mark.parametrize("splits", [2, 3, 6])
@pytest.mark.parametrize(("seqlen_k", "narrower"), [(1, 0), (64, 8), (300, 56)])
def test_parts_of_dk_and_dv_are_added_in_order(kernel, layout, splits, seqlen_k, narrower):
    """In the launch that rounds dQ, unless a tile has stored it."""
    narrower = min(narrower, kernel.width - 8)
    head_dims = kernel.width - narrower, kernel.width_v - narrower // 2
    sizes = {"head_dim_v": head_dims[1], "dtype": "fp16", "grad": True}
    problem = Problem(2, 77, seqlen_k, 12, 2, head_dims[0], **sizes, **hardware(DEVICE))
    of_dq = torch.randn(2, 77, 12, problem.head_dim, device=DEVICE)
    parts = [torch.randn(splits, 2, seqlen_k, 2, head_dim, device=DEVICE) for head_dim in head_dims]
    shapes = of_dq.shape, *[x.shape[1:] for x in parts]
    dq, *gradients = [LAYOUTS[layout](torch.full(shape, torch.nan, device=DEVICE).half()) for shape in shapes]
    strides = [x.stride() for x in (dq, *gradients)]
    run = launch.round_and_sum_launch(problem, kernel, kernel.blocks_kv(seqlen_k), splits, *strides)
    left = [parts_of_keys(x, kernel, width) for x, width in zip(parts, (kernel.width, kernel.width_v), strict=True)]
    run((as_registers(of_dq, kernel), dq, None, *left, *gradients, None), (0.37,))
    of_dq = of_dq if kernel.dq_sums else torch.full_like(of_dq, torch.nan)
    totals = [of_dq] + [reduce(torch.add, x) for x in parts]
    for total, found, scale in zip(totals, (dq, *gradients), (0.37, 0.37, 1.0), strict=True):
        wanted = LAYOUTS[layout]((total * torch.tensor(scale)).half())
        assert same_bits(found, wanted)
        assert torch.equal(storage_of(found), storage_of(wanted)), "what lies between was written"


class Compiled:
    """What Triton gives for a kernel that it has compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launched: list[tuple]) -> None:
        self.run = lambda *arguments: launched.append(arguments)
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *arguments, stream: self._launched.append((grid, stream, *arguments))


def test_a_profilers_hooks_are_called(monkeypatch):
    """By Triton, who is asked for them at each launch."""
    launched, hook = [], lambda metadata: None
    run = Launch({(3, 1, 1): lambda *_, **how: Compiled(launched)}, 3, (), {}, num_warps=4, num_stages=1, dtypes=())
    run.at(0, 5, ())
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(hook)
        run.at(0, 5, ())
        hooks.remove(hook)
        run.at(0, 5, ())
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", hook)
    run.at(0, 5, ())
    monkeypatch.undo()
    run.at(0, 5, ())
    without = (3, 1, 1, 5, "function", "metadata", None, None, None)
    assert launched == [((3, 1, 1), 5), without] * 3


@pytest.mark.parametrize("aligned", [False, True])
def test_a_launch_takes_addresses(aligned):
    """Compiled for tensors of the dtypes that it was told, and for each alignment unless all are aligned."""
    compiled, launched = [], []

    def compile_(*arguments, **how):
        compiled.append(([(x.data_ptr(), x.dtype) for x in arguments[:2]], arguments[2:], how))
        return Compiled(launched)

    dtypes = torch.float16, torch.float32, torch.int32
    how = {"num_warps": 4, "num_stages": 1, "aligned": aligned, "dtypes": dtypes}
    run = Launch({(3, 1, 1): compile_}, 3, (7,), {"SIZE": 8}, **how)
    for address in (512, 1024, 1028):
        run.at(0, 5, (4096, address, None), (0.5,))
    anew = [512] if aligned else [512, 1028]
    rest = (None, 0.5, 7), {"SIZE": 8, **run.options}
    assert compiled == [([(4096, torch.float16), (address, torch.float32)], *rest) for address in anew]
    again = [address for address in (1024, 1028) if address not in anew]
    given = [(4096, address, None, 0.5, 7, 8) for address in again]
    assert launched == [(3, 1, 1, 5, "function", "metadata", None, None, None, *arguments) for arguments in given]


@pytest.mark.covering(1)
@on_kernels
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_all_compile_for_hopper(kernel, dtype):
    kernel, strides = replace(kernel, dtype=dtype), (4096 * 16 * kernel.width, 16 * kernel.width, kernel.width)
    for sequences, table in ((None, None), (9, "i32")):
        problem = Problem(1, 4096, 4096, 16, 16, kernel.width, dtype=dtype, sequences=sequences, arch=90)
        before = launch.delta_launch(problem, kernel, strides, strides, True)
        for compiled in (
            resources(before, (dtype, dtype, *["fp32"] * 5, "i32", table, None, None), 0, 90),
            resources(before, (dtype, dtype, *["fp32"] * 5, "i32", table, "fp32", "fp32"), 0, 90),
            *[
                resources(after, ("fp32", dtype, table, "fp32", "fp32", dtype, dtype, table), 1, 90)
                for after in [launch.round_and_sum_launch(problem, kernel, 40, n, *[strides] * 3) for n in (1, 4)]
            ],
        ):
            assert compiled.stack == 0, f"{compiled.stack} bytes of stack"


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
def test_one_kernel_serves_every_length(with_dlse, monkeypatch):
    """And every batch and number of heads: 1 and what 16 divides are not kinds of their own."""
    sources, compiled, compile_once = [], {}, triton.compile

    def noted(source, **how):
        sources.append(source.hash())
        if sources[-1] not in compiled:
            compiled[sources[-1]] = compile_once(source, **how)
        return compiled[sources[-1]]

    monkeypatch.setattr(triton, "compile", noted)
    kernel, strides = KERNELS["table_128_128"], (4096 * 16 * 128, 16 * 128, 128)
    for sizes in ({"seqlen_q": 1}, {"seqlen_q": 16}, {"seqlen_q": 17}, {"seqlen_q": 2048}, {"heads": 1}, {"heads": 3}):
        problem = replace(PLAIN, **{"heads": 16, "heads_kv": 1, "head_dim": 128, "head_dim_v": None} | sizes)
        before = launch.delta_launch(problem, kernel, strides, strides, with_dlse)
        resources(before, ("fp16", "fp16", *["fp32"] * 5, "i32", None, None, None), 0, 90)
        after = launch.round_and_sum_launch(problem, kernel, 2 * problem.seqlen_q, 2, *[strides] * 3)
        resources(after, ("fp32", "fp16", None, "fp32", "fp32", "fp16", "fp16", None), 1, 90)
    assert len(sources) == 12 and len(set(sources)) == 2
