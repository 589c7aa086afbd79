"""The kernels of decode, in Triton and in CuTe DSL, compiled for real GPUs on a machine with none.

All of them with `--every-case`, else a covering array of them (see flashzoo_suite/plugin.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from flashzoo import Problem
from flashzoo._cute.compile import compile_for
from flashzoo._sass import read
from flashzoo._triton.compile import resources
from flashzoo.decode import launch as decode
from flashzoo.decode.config import E4M3_ARCH, by_hopper
from flashzoo.decode.config import kernel_for as decode_hopper_kernel
from flashzoo.decode.launch_merge import merge_launch
from flashzoo.decode.programs import program as decode_program
from flashzoo.decode.traits import Kernel, Merging
from flashzoo.gpu import SHARED_LIMIT
from flashzoo.v3.programs import ARCH

pytestmark = pytest.mark.compiles

ARCHS = (80, 89, 90, 100)
WIDTHS = (64, 128, 256)
DECODE_STACK = 16
"""Bytes of stack of a thread: some kernels with pages keep a page number or two there."""

DECODE_STACK_PACKED = 32
"""And where their queries are."""
DECODE_STACK_E4M3 = 56
"""Of 64 rows 128 and 256 wide on Hopper: products with V are beside O, as descales of blocks want."""


@pytest.mark.covering(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("seqlen_q", [1, 8, 512])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (128, 64)}], ids=str)
def test_decode_compiles_and_does_not_spill(arch: int, head_dim: int, dtype: str, seqlen_q: int, mask: dict) -> None:
    how = {"dtype": dtype, "used_k": True, "arch": arch, **mask}
    of_q, of_k = (
        (heads * head_dim * seqlen, heads * head_dim, head_dim) for heads, seqlen in ((64, seqlen_q), (8, 8192))
    )
    strides = (*of_q, *of_k, *of_k, *of_q, 1 << 24, 1 << 16)
    problem, paged = (
        Problem(4, seqlen_q, 8192, 64, 8, head_dim, page_size=page_size, **how) for page_size in (None, 16)
    )
    parts = ("fp32", "fp32")
    for found in (
        resources(
            decode.split_launch(problem, strides), (*[dtype] * 3, *parts, "i32", None, None, None, None, None), 1, arch
        ),
        resources(
            decode.split_launch(paged, strides, (512, 4096)),
            (*[dtype] * 3, *parts, "i32", "i32", None, None, None, None),
            1,
            arch,
        ),
        resources(
            decode.split_launch(problem, strides),
            (*[dtype] * 3, *parts, "i32", None, "fp32", None, None, None),
            1,
            arch,
        ),
        *[
            resources(merge_launch(merged, of_q, splits), ("fp32", "fp32", dtype, "fp32", "fp32"), 0, arch)
            for splits in (3, 264)
            for merged in (problem, dataclasses.replace(problem, batch=1024))  # few columns, and whole rows
        ],
    ):
        assert found.stack <= DECODE_STACK and found.shared <= SHARED_LIMIT[arch]


@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= E4M3_ARCH])
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("seqlen_q", [1, 512])
def test_decode_on_e4m3_compiles_and_does_not_spill(arch: int, head_dim: int, dtype: str, seqlen_q: int) -> None:
    """And converts no number at the rate of exponentials (F2F)."""
    problem = Problem(4, seqlen_q, 8192, 64, 8, head_dim, dtype=dtype, dtype_kv="e4m3", arch=arch, page_size=16)
    of_q, of_k = ((heads * head_dim * 512, heads * head_dim, head_dim) for heads in (64, 8))
    launch = decode.split_launch(problem, (*of_q, *of_k, *of_k, *of_q, 1 << 24, 1 << 16), (512, 4096))
    descale = ("fp32", 8, 1, 0)
    types = (dtype, *["fp8e4nv"] * 2, "fp32", "fp32", None, "i32", None, descale, descale, None)
    found = resources(launch, types, 1, arch)
    assert found.stack <= DECODE_STACK_E4M3 and found.shared <= SHARED_LIMIT[arch] and "F2F" not in found.opcodes


@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (128, 64)}], ids=str)
def test_decode_of_packed_queries_compiles_and_does_not_spill(arch: int, head_dim: int, dtype: str, mask: dict) -> None:
    how = {"dtype": dtype, "arch": arch, "page_size": 16, "used_k": True, **mask}
    problem = Problem(1, 512, 8192, 64, 8, head_dim, sequences=32, packed_q=True, **how)
    of_q, of_k = ((heads * head_dim * 512, heads * head_dim, head_dim) for heads in (64, 8))
    launch = decode.split_launch(problem, (*of_q, *of_k, *of_k, *of_q, 1 << 24, 1 << 16), (512, 4096))
    given = ("i32", "i32", None, None, None, "i32")
    found = resources(launch, (*[dtype] * 3, "fp32", "fp32", *given), 1, arch)
    assert found.stack <= DECODE_STACK_PACKED and found.shared <= SHARED_LIMIT[arch]


@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16])
def test_mla_compiles_and_does_not_spill(arch: int, heads: int, seqlen_q: int, page_size: int | None) -> None:
    how = {"dtype": "bf16", "used_k": True, "arch": arch, "causal": True, "page_size": page_size}
    problem = Problem(4, seqlen_q, 8192, heads, 1, 576, head_dim_v=512, latent=True, **how)
    of_q, of_k, of_out = (
        (rows * width, of_row * width, width)
        for rows, of_row, width in ((seqlen_q * heads, heads, 576), (8192, 1, 576), (seqlen_q * heads, heads, 512))
    )
    pages, table = ((0, 0), None) if page_size is None else ((512, 4096), "i32")
    given = (*["bf16"] * 3, "fp32", "fp32", "i32", table, None, None, None, None)
    launch = decode.split_launch(problem, (*of_q, *of_k, *of_k, *of_out, 1 << 24, 1 << 16), pages)
    for found in (
        resources(launch, given, 1, arch),
        resources(
            merge_launch(problem, of_out, 264, programmatic=arch >= 90), ("fp32", "fp32", "bf16", "fp32", None), 0, arch
        ),
    ):
        assert found.stack <= DECODE_STACK and found.shared <= SHARED_LIMIT[arch]


def merged(problem: Problem, merging: Merging) -> Kernel:
    """The kernel of a problem where that merges."""
    kernel = decode_hopper_kernel(dataclasses.replace(problem, out_dtype=None, sinks=False))
    if merging is Merging.KERNEL:  # which has what it writes in float32, and joins no sinks
        return dataclasses.replace(kernel, merging=merging, out_dtype="fp32")
    return dataclasses.replace(kernel, merging=merging, out_dtype=problem.out_dtype, sinks=problem.sinks)


def hopper_decode_cases() -> Iterator[tuple[int, dict, int, Merging]]:
    for head_dim in (64, 128, 192, 256):
        for how in (
            {},
            {"causal": True},
            {"window": (128, 64)},
            {"page_size": 16, "causal": True},
            {"page_size": 256, "out_dtype": "fp32"},
        ):
            for batch in (1, 128):
                for merging in Merging:
                    if batch == 1 or merging is not Merging.CLUSTER:
                        yield head_dim, how, batch, merging


STACK_LATENT = 32
"""Of MLA with pages on Hopper: numbers of the item that the producer and the scheduler keep."""

STACK_WIDE = 160
"""Bytes of stack of a thread where heads are wider than 128 and keys e4m3: numbers of the item, beside all of O."""

RESERVED_SHARED = 1 << 10
"""Bytes of a multiprocessor's shared memory that CUDA keeps for each thread block;
the limit of one block is without its own."""


@pytest.mark.covering(1)
@pytest.mark.parametrize(("head_dim", "how", "batch", "merging"), [*hopper_decode_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_decode_on_hopper_compiles_and_does_not_spill(head_dim: int, how: dict, batch: int, merging: Merging) -> None:
    """With one thread block on a multiprocessor and with two, which have fewer registers; parts want the most."""
    problem = Problem(batch, 1, 8192, 64, 8, head_dim, dtype="bf16", used_k=True, arch=90, **how)
    kernel = merged(problem, merging)
    found = read(compile_for(ARCH, *decode_program(kernel)).cubin, kernel.shared_bytes)
    assert found.stack == 0 and {"UTMALDG", "HGMMA"} <= found.opcodes.keys()
    assert kernel.blocks_per_sm * (kernel.shared_bytes + RESERVED_SHARED) <= SHARED_LIMIT[90] + RESERVED_SHARED


@pytest.mark.covering(1)
@pytest.mark.parametrize(("head_dim", "how", "batch", "merging"), [*hopper_decode_cases()], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("error")
def test_decode_of_e4m3_on_hopper_compiles_and_does_not_spill(
    head_dim: int, how: dict, batch: int, merging: Merging, queries: int, dtype: str
) -> None:
    """And converts no number at the rate of exponentials (F2F)."""
    problem = Problem(
        batch, queries, 8192, 64, 8, head_dim, dtype=dtype, dtype_kv="e4m3", used_k=True, arch=90, sinks=True, **how
    )
    kernel = merged(problem, merging)
    found = read(compile_for(ARCH, *decode_program(kernel)).cubin, kernel.shared_bytes)
    assert found.stack <= (STACK_WIDE if head_dim > 128 else 0) and "F2F" not in found.opcodes
    assert {"UTMALDG", "HMMA", "LDSM", "F2FP"} <= found.opcodes.keys()
    assert kernel.blocks_per_sm * (kernel.shared_bytes + RESERVED_SHARED) <= SHARED_LIMIT[90] + RESERVED_SHARED


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": True},
        {"window": (128, 64)},
        {"page_size": 16, "causal": True},
        {"page_size": 256, "out_dtype": "fp32", "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("merging", Merging)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("error")
def test_mla_on_hopper_compiles_and_does_not_spill(how: dict, merging: Merging, dtype: str) -> None:
    """One thread block on a multiprocessor has all of its shared memory, and its consumers most of the registers."""
    problem = Problem(1, 4, 8192, 16, 1, 576, dtype=dtype, head_dim_v=512, latent=True, used_k=True, arch=90, **how)
    kernel = merged(problem, merging)
    found = read(compile_for(ARCH, *decode_program(kernel)).cubin, kernel.shared_bytes)
    assert found.stack <= STACK_LATENT and {"UTMALDG", "HGMMA", "STSM"} <= found.opcodes.keys()
    assert kernel.shared_bytes <= SHARED_LIMIT[90]


def test_rows_beyond_32_bits_are_left_to_the_kernel_in_triton():
    """out has strides in the order of q's, which may lie row behind row over the whole batch."""
    problem = Problem(1 << 17, 1, 4096, 128, 8, 128, dtype="bf16", arch=90)
    assert not by_hopper(problem) and by_hopper(dataclasses.replace(problem, batch=1 << 16))
