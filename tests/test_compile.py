"""Every tile table entry, compiled for real GPUs on a machine with none: it compiles, fits, and spills nothing.

All of them with `--every-case`, else a covering array of them (see flashzoo_suite/plugin.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import product

import cutlass.cute as cute
import pytest
import torch

from flashzoo import Problem
from flashzoo._cute.compile import compile_for
from flashzoo._cute.hopper.wgmma import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from flashzoo._sass import Resources, read
from flashzoo._triton import packed
from flashzoo._triton.append import append_launch
from flashzoo._triton.compile import resources
from flashzoo._triton.tiles import DELTA_BLOCK
from flashzoo.blocksparse import launch as blocksparse
from flashzoo.blocksparse.config import tiles_for as blocksparse_tiles
from flashzoo.call.forms import MaskForm
from flashzoo.decode import launch as decode
from flashzoo.decode.config import kernel_for as decode_hopper_kernel
from flashzoo.decode.programs import program as decode_program
from flashzoo.gpu import RAGGED_ROWS, SHARED_LIMIT, WARPGROUP
from flashzoo.v1 import launch as v1
from flashzoo.v2 import kernels as v2_kernels
from flashzoo.v2 import launch as v2
from flashzoo.v2.config import tiles_for as v2_tiles
from flashzoo.v3.config import BACKWARD, FP8, LONG, SPARSE, kernel_backward_for, kernel_fp8_for
from flashzoo.v3.config import HOPPER as V3_TILES
from flashzoo.v3.config import HOPPER_SHORT as V3_SHORT
from flashzoo.v3.config import kernel_for as v3_kernel
from flashzoo.v3.explain import refusals
from flashzoo.v3.fp8 import REGISTERS
from flashzoo.v3.programs import ARCH, PROGRAMS, arguments_of, program
from flashzoo.v3.traits import (
    Kernel,
    KernelBackward,
    KernelBackwardPacked,
    KernelBackwardSparse,
    KernelFp8,
    KernelFp8Packed,
    KernelPacked,
    KernelSparse,
    TilesBackward,
)

pytestmark = pytest.mark.compiles

ARCHS = (80, 89, 90, 100)
WIDTHS = (64, 128, 256)
TENSOR_CORES = {"HMMA", "HGMMA", "UTCHMMA"}


# Bytes of stack of a thread where a kernel is known to spill with Triton 3.6 or 3.9; anything beyond fails. Arch 0
# stands for float32. Hopper: measured faster, spills and all, than every candidate tried that does not spill;
# blocksparse's are v2's. float32: a product on the CUDA cores holds whole rows of both operands in registers, whatever
# the tile.
KNOWN_STACK = {
    ("v1", "forward", 80, 64): 16,
    ("v1", "forward", 90, 256): 384,
    ("v1", "forward", 0, 256): 272,
    ("v1", "backward", 90, 128): 384,
    ("v1", "backward", 90, 256): 24,
    ("v1", "backward", 0, 128): 496,
    ("v1", "backward", 0, 256): 504,
    ("v2", "forward", 90, 256): 184,
    ("v2", "dkdv", 90, 128): 136,
    ("v2", "dkdv", 90, 256): 440,
    ("v2", "dq", 90, 256): 192,
    ("v2", "dq", 0, 128): 8,
    ("v2", "dq", 0, 256): 240,
    ("blocksparse", "forward", 80, 64): 24,
    ("blocksparse", "forward", 89, 64): 16,
    ("blocksparse", "forward", 100, 64): 8,
    ("blocksparse", "forward", 90, 256): 240,
    ("blocksparse", "forward", 0, 256): 32,
    ("blocksparse", "dkdv", 90, 128): 256,
    ("blocksparse", "dkdv", 90, 256): 576,
    ("blocksparse", "dq", 100, 128): 8,
    ("blocksparse", "dq", 90, 256): 136,
    ("blocksparse", "dq", 0, 256): 256,
}

KNOWN_STACK_BY_LENGTHS = {("dkdv", 80, 128): 8, ("dkdv", 90, 64): 32, ("dkdv", 90, 128): 168, ("dkdv", 90, 256): 488}
"""The same of v2's kernels of packed sequences and caches, where they need more."""


# How each kernel is launched: by which function, with strides of how many tensors and what else; its tensor parameters
# (h in the problem's dtype, o in that of out, f in float32, i in int32, b bits, t the table of packed
# sequences, u how much of caches is used, s sinks, g their gradient's parts) and how many floats follow them.
MASK_SIZES = (0, 1, 32, 100)
LAUNCHES = {
    ("v1", "forward"): (v1.forward_launch, 5, (), "hhhoffff", 1),
    ("v1", "backward"): (v1.backward_launch, 8, (False,), "hhhhhfhhff", 2),
    ("v2", "forward"): (v2.forward_launch, 4, (True,), "hhhoftus", 1),
    ("v2", "delta"): (v2.delta_launch, 2, (True,), "oofffftsg", 0),
    ("v2", "dkdv"): (v2.dkdv_launch, 6, (True,), "hhhhhhfftu", 2),
    ("v2", "dq"): (v2.dq_launch, 5, (True,), "hhhhhfftu", 2),
    ("blocksparse", "forward"): (blocksparse.forward_launch, 4, (True, MASK_SIZES), "hhhofiiiiib", 1),
    ("blocksparse", "dkdv"): (blocksparse.dkdv_launch, 6, (True, MASK_SIZES), "hhhhhhffiiiiib", 2),
    ("blocksparse", "dq"): (blocksparse.dq_launch, 5, (True, MASK_SIZES), "hhhhhffiiiiib", 2),
}


def compiled(version: str, kernel: str, problem: Problem) -> Resources:
    """The launch that this problem would get, compiled for its architecture."""
    launch, tensors, more, parameters, floats = LAUNCHES[version, kernel]
    strides = (
        problem.seqlen_q * problem.heads * problem.head_dim,
        problem.heads * problem.head_dim,
        problem.head_dim,
    ) * tensors
    kinds = {"h": problem.dtype, "o": problem.out_dtype, "f": "fp32", "i": "i32", "b": "u8"}
    kinds |= {
        name: "i32" if feature in problem.features else None for name, feature in (("t", "packed"), ("u", "cache"))
    }
    kinds |= dict.fromkeys("sg", "fp32" if problem.sinks else None)
    types = tuple(kinds[parameter] for parameter in parameters)
    return resources(launch(problem, strides, *more), types, floats, problem.arch or 0)


def cases() -> Iterator[tuple[str, str, int, int, str, bool]]:
    in_three = ("forward", "dkdv", "dq")
    for version, kernels in (("v1", ("forward", "backward")), ("v2", in_three), ("blocksparse", in_three)):
        for kernel in kernels:
            for width in WIDTHS:
                for arch in ARCHS:
                    yield version, kernel, arch, width, "bf16", True
                yield version, kernel, 90, width, "bf16", False
                if kernel == "forward":
                    yield version, kernel, 90, width, "bf16 to fp32", True
                yield version, kernel, 80, width, "fp32", True


@pytest.mark.covering(2)
@pytest.mark.parametrize(("version", "kernel", "arch", "head_dim", "dtype", "causal"), [*cases()])
def test_compiles_and_does_not_spill(
    version: str, kernel: str, arch: int, head_dim: int, dtype: str, causal: bool
) -> None:
    dtype, _, out_dtype = dtype.partition(" to ")
    problem = Problem(
        2, 4096, 4096, 16, 16, head_dim, dtype=dtype, causal=causal, grad=True, arch=arch, out_dtype=out_dtype or dtype
    )
    if version == "blocksparse":
        problem = dataclasses.replace(problem, causal=False, block_mask=MaskForm(heads=16, bits=causal))
    read = compiled(version, kernel, problem)
    known = KNOWN_STACK.get((version, kernel, arch if dtype != "fp32" else 0, head_dim), 0)
    assert read.stack <= known, (
        f"{read.stack} bytes of stack, {read.spills} spill instructions; known are {known} bytes"
    )
    assert known or read.spills == 0
    assert read.shared <= SHARED_LIMIT[arch]
    if dtype != "fp32":
        assert TENSOR_CORES & read.opcodes.keys(), "the products must run on the tensor cores"


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_v2_streams_through_tma_on_hopper(kernel: str, head_dim: int) -> None:
    problem = Problem(2, 4096, 4096, 16, 16, head_dim, grad=True, arch=90)
    assert v2_tiles(kernel, problem).tma
    assert {"UTMALDG", "HGMMA"} <= compiled("v2", kernel, problem).opcodes.keys()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "form", [MaskForm(64, 64), MaskForm(128, 64, causal=True), MaskForm(64, 128, batch=2, bits=True)], ids=str
)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_blocksparse_streams_through_tma_on_hopper(kernel: str, head_dim: int, form: MaskForm) -> None:
    """Which block comes next is read from memory, and still nothing waits for anything but TMA.
    Every shape of block compiles."""
    problem = Problem(2, 4096, 4096, 16, 4, head_dim, grad=True, arch=90, block_mask=form)
    assert blocksparse_tiles(kernel, problem).tma
    read = compiled("blocksparse", kernel, problem)
    assert {"UTMALDG", "HGMMA"} <= read.opcodes.keys()
    assert read.stack <= KNOWN_STACK.get(("blocksparse", kernel, 90, head_dim), 0) and read.shared <= SHARED_LIMIT[90]


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_v2_short_problems_on_hopper(head_dim: int) -> None:
    problem = Problem(2, 128, 128, 16, 16, head_dim, causal=True, arch=90)
    assert not v2_tiles("forward", problem).tma
    read = compiled("v2", "forward", problem)
    assert read.stack <= KNOWN_STACK.get(("v2", "forward", 90, head_dim), 0) and read.shared <= SHARED_LIMIT[90]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("arch", [80, 90])
def test_v2_of_packed_sequences_and_caches(kernel: str, head_dim: int, arch: int) -> None:
    """TMA stops where a packed sequence does, and reads no caches."""
    for lengths in ({"sequences": 9}, {"used_k": True}):
        problem = Problem(1, 8192, 8192, 16, 4, head_dim, **lengths, causal=True, grad=True, arch=arch)
        read = compiled("v2", kernel, problem)
        assert ("UTMALDG" in read.opcodes) == (arch == 90 and "sequences" in lengths) and read.shared <= SHARED_LIMIT[
            arch
        ]
        known = KNOWN_STACK.get(("v2", kernel, arch, head_dim), 0)
        assert read.stack <= KNOWN_STACK_BY_LENGTHS.get((kernel, arch, head_dim), known), lengths


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [{}, {"sequences": 9}, {"used_k": True}], ids=["batch", "packed", "caches"])
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("arch", [80, 90])
def test_v2_with_sinks(head_dim: int, arch: int, lengths: dict) -> None:
    """They join at the end of a row: the products are as many, and nothing spills that did not."""
    problem = Problem(1, 8192, 8192, 16, 4, head_dim, **lengths, causal=True, grad=True, arch=arch)
    for kernel in ("forward", "delta"):
        plain, read = (compiled("v2", kernel, dataclasses.replace(problem, sinks=sinks)) for sinks in (False, True))
        assert all(plain.opcodes.get(name) == read.opcodes.get(name) for name in TENSOR_CORES)
        assert read.stack <= plain.stack and read.shared <= SHARED_LIMIT[arch]
        assert plain.opcodes["MUFU"] < read.opcodes["MUFU"] if kernel == "forward" else "MUFU" in read.opcodes


@pytest.mark.parametrize("arch", [80, 90])
def test_append_compiles_and_does_not_spill(arch: int) -> None:
    for page_size, table in ((0, None), (16, "i32")):
        launch = append_launch(
            torch.int16, (4, 1, 8, 128), 128, (1 << 20, 1 << 10, 128) * 4, (8192, 4096, 512), page_size
        )
        for bits in ("u8", "i16", "i32"):
            assert resources(launch, (*[bits] * 4, "i32", table), 0, arch).stack == 0


DECODE_STACK = 16
"""Bytes of stack of a thread: some kernels with pages keep a page number or two there."""


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
    for found in (
        resources(decode.split_launch(problem, strides), (*[dtype] * 3, "fp32", "fp32", "i32", None, None), 1, arch),
        resources(
            decode.split_launch(paged, strides, (512, 4096)),
            (*[dtype] * 3, "fp32", "fp32", "i32", "i32", None),
            1,
            arch,
        ),
        resources(decode.split_launch(problem, strides), (*[dtype] * 3, "fp32", "fp32", "i32", None, "fp32"), 1, arch),
        resources(decode.merge_launch(problem, of_q), ("fp32", "fp32", dtype, "fp32", "fp32"), 0, arch),
    ):
        assert found.stack <= DECODE_STACK and found.shared <= SHARED_LIMIT[arch]


def hopper_decode_cases() -> Iterator[tuple[int, dict, int]]:
    for head_dim in (64, 128, 192, 256):
        for how in (
            {},
            {"causal": True},
            {"window": (128, 64)},
            {"page_size": 16, "causal": True},
            {"page_size": 256, "out_dtype": "fp32"},
        ):
            for batch in (1, 128):
                yield head_dim, how, batch


RESERVED_SHARED = 1 << 10
"""Bytes of a multiprocessor's shared memory that CUDA keeps for each thread block;
the limit of one block is without its own."""


@pytest.mark.covering(1)
@pytest.mark.parametrize(("head_dim", "how", "batch"), [*hopper_decode_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_decode_on_hopper_compiles_and_does_not_spill(head_dim: int, how: dict, batch: int, host_code) -> None:
    """With one thread block on a multiprocessor and with two, which have fewer registers; parts want the most."""
    problem = Problem(batch, 1, 8192, 64, 8, head_dim, dtype="bf16", used_k=True, arch=90, **how)
    kernel = dataclasses.replace(decode_hopper_kernel(problem), split=True)
    found = read(compile_for(ARCH, *decode_program(kernel)).cubin, kernel.shared_bytes)
    assert found.stack == 0 and {"UTMALDG", "HGMMA"} <= found.opcodes.keys()
    assert kernel.blocks_per_sm * (kernel.shared_bytes + RESERVED_SHARED) <= SHARED_LIMIT[90] + RESERVED_SHARED


def test_v2_knows_what_the_host_does() -> None:
    assert (v2_kernels.RAGGED_ROWS.value, v2_kernels.DELTA_BLOCK.value) == (RAGGED_ROWS, DELTA_BLOCK)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_table_of_packed_sequences(arch: int) -> None:
    for causal, used, block_kv in product((False, True), (False, True), (0, 64)):
        problem = Problem(1, 8192, 8192, 16, 4, 64, sequences=9, causal=causal, used_k=used, arch=arch)
        tensors = ("i32", "i32", "i32" if used else None, "i32", "i32" if block_kv else None)
        launch, *_ = packed._launch(problem, 128, block_kv)
        assert resources(launch, tensors, 0, arch).stack <= 16


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("window", [(128, None), (128, 128), (None, 64)])
def test_v2_windows_and_groups_compile(kernel: str, window: tuple[int | None, int | None]) -> None:
    problem = Problem(2, 4096, 4096, 16, 4, 96, window=window, grad=True, arch=90)
    assert compiled("v2", kernel, problem).stack <= KNOWN_STACK.get(("v2", kernel, 90, 128), 0)


PACKED = 0
"""In place of a length: packed sequences."""
V3_MASKS = {"full": {}, "left": {"window": (128, None)}, "causal": {"causal": True}, "window": {"window": (128, 64)}}
V3_FALL_BACK = ((64, 128), (128, 64), (96, 192), (256, 64))
"""Widths without tiles of their own, which get those of the wider one."""


def v3_cases() -> Iterator[tuple[str, int, int, int, str, dict[str, bool]]]:
    for seqlen_q, tiles in ((LONG, V3_TILES), (LONG - 1, V3_SHORT)):
        for (width, width_v), mask in product(tiles, V3_MASKS):
            yield "bf16", seqlen_q, width, width_v, mask, {}
    for width in WIDTHS:
        yield "fp16", LONG, width, width, "causal", {}
    for width, width_v in V3_FALL_BACK:
        yield "bf16", LONG, width, width_v, "causal", {}
    for overlap, ping_pong in product((False, True), repeat=2):  # the ablations, one of which is the default again
        yield "bf16", LONG, 128, 128, "causal", {"overlap": overlap, "ping_pong": ping_pong}
    for (width, width_v), mask in product(V3_TILES, V3_MASKS):
        yield "bf16", PACKED, width, width_v, mask, {}


@pytest.fixture
def host_code(monkeypatch) -> list[str]:
    """The host code of everything that CuTe DSL compiles, as LLVM's text."""
    compiler, found = cute.compile, []

    def compile_and_tell(*arguments, **options):
        compiled = compiler(*arguments, **options)
        found.append(str(compiled.ir_module))
        return compiled

    monkeypatch.setattr(cute, "compile", compile_and_tell)
    return found


def too_little_shared(code: str) -> bool:
    """Whether the launch asks for less shared memory than the kernel lays out.

    CuTe DSL adds up what a kernel allocates, and its host code, which we never run, prints a message where a launch
    asks for less. It is a constant condition: where it is false the message is defined and used by nothing.
    """
    (message,) = re.findall(r"@(\w+)\(.*shared memory usage in .* may exceed available memory", code)
    return f"addressof @{message} " in code


def v3_compiled(kernel: Kernel | KernelBackward) -> Resources:
    return read(compile_for(ARCH, *program(kernel)).cubin, kernel.shared_bytes)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "seqlen_q", "width", "width_v", "mask", "ablated"), [*v3_cases()], ids=str)
@pytest.mark.filterwarnings("error")  # users would see them at their first call
def test_v3_compiles_and_does_not_spill(
    dtype: str, seqlen_q: int, width: int, width_v: int, mask: str, ablated: dict[str, bool], host_code
) -> None:
    sizes = (2, seqlen_q) if seqlen_q != PACKED else (1, 4096)
    sequences = None if seqlen_q != PACKED else 9
    problem = Problem(
        *sizes, 4096, 16, 16, width, head_dim_v=width_v, dtype=dtype, sequences=sequences, arch=90, **V3_MASKS[mask]
    )
    kernel = v3_kernel(problem)
    assert isinstance(kernel, KernelPacked) == (seqlen_q == PACKED)
    kernel = dataclasses.replace(kernel, tiles=dataclasses.replace(kernel.tiles, **ablated))
    compiled = v3_compiled(kernel)
    assert compiled.stack == 0 and compiled.spills == 0, (
        f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    )
    assert compiled.opcodes.keys() >= {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"}, (
        "WGMMA, TMA both ways, registers by role"
    )
    assert "HMMA" not in compiled.opcodes
    consumers = kernel.tiles.consumers
    wanted = PRODUCER_REGISTERS[consumers] + consumers * CONSUMER_REGISTERS[consumers]
    assert WARPGROUP * wanted <= kernel.threads * compiled.registers, "the consumers would wait for registers for ever"
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


SPARSE_MASKS = {
    "full": {},
    "bits": {"bits": True},
    "causal": {"causal": True},
    "left": {"window": (128, None)},
    "bits_and_window": {"bits": True, "window": (128, 64)},
}
"""What partial blocks apply."""


def sparse_cases() -> Iterator[tuple[int, int, int, str]]:
    for widths_and_block in SPARSE:
        for mask in (
            SPARSE_MASKS if widths_and_block in ((128, 128, 128), (256, 256, 128)) else ("full", "bits_and_window")
        ):
            yield *widths_and_block, mask


@pytest.mark.covering(1)
@pytest.mark.parametrize(("width", "width_v", "block_kv", "mask"), [*sparse_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_sparse_compiles_and_does_not_spill(width: int, width_v: int, block_kv: int, mask: str, host_code) -> None:
    form = MaskForm(128, block_kv, **SPARSE_MASKS[mask])
    kernel = v3_kernel(Problem(2, 4096, 4096, 16, 16, width, head_dim_v=width_v, arch=90, block_mask=form))
    assert isinstance(kernel, KernelSparse) and kernel.tiles == SPARSE[width, width_v, block_kv]
    compiled = v3_compiled(kernel)
    assert compiled.stack == 0 and compiled.spills == 0, (
        f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    )
    assert compiled.opcodes.keys() >= {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"}, (
        "WGMMA, TMA both ways, registers by role"
    )
    loads = [instruction for instruction in compiled.code if f"LDG.E.{kernel.tiles.block_kv} " in instruction]
    assert bool(loads) == kernel.bits, "a row's bits are one load"
    consumers = kernel.teams * kernel.tiles.consumers
    wanted = PRODUCER_REGISTERS[consumers] + consumers * CONSUMER_REGISTERS[consumers]
    assert WARPGROUP * wanted <= kernel.threads * compiled.registers, "the consumers would wait for registers for ever"
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


# Bytes of stack of a thread where an FP8 kernel is known to spill, by width: with 128 columns of O, as many of a
# product and P a consumer has all of its 160 registers in use, and measured faster so than without. None is in the loop
# over unmasked blocks.
FP8_STACK = {64: 0, 128: 24, 256: 0}
ONE_LEVEL_STACK = {64: 0, 128: 96, 256: 32}


def fp8_cases() -> Iterator[tuple[int, str, bool, bool, dict[str, object]]]:
    for width, mask, block_scales, transposed in product(FP8, ("full", "causal"), (False, True), (False, True)):
        yield width, mask, block_scales, transposed, {}
    for width, mask in product(FP8, ("left", "window")):
        yield width, mask, True, False, {}
    for width in FP8:
        yield width, "causal", False, False, {"two_level": False}
        yield width, "full", True, True, {"out": "fp16"}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("width", "mask", "block_scales", "transposed", "changes"), [*fp8_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_fp8_compiles_and_spills_no_more_than_known(
    width: int, mask: str, block_scales: bool, transposed: bool, changes: dict[str, object], host_code
) -> None:
    problem = Problem(2, 4096, 4096, 16, 16, width, dtype="e4m3", arch=90, **V3_MASKS[mask])
    kernel = dataclasses.replace(kernel_fp8_for(problem, block_scales, transposed), **changes)
    compiled = v3_compiled(kernel)
    known = (FP8_STACK if kernel.two_level else ONE_LEVEL_STACK)[width]
    assert compiled.stack <= known, f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    assert compiled.opcodes.keys() >= {"QGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"}, (
        "FP8 WGMMA, TMA both ways, registers by role"
    )
    assert not {"HMMA", "HGMMA"} & compiled.opcodes.keys()
    assert ({"LDSM"} <= compiled.opcodes.keys()) is not transposed, "V is transposed on chip, or comes so"
    consumers = kernel.tiles.consumers
    producer, consumer = (
        (PRODUCER_REGISTERS[consumers], CONSUMER_REGISTERS[consumers]) if transposed else REGISTERS[consumers]
    )
    assert WARPGROUP * (producer + consumers * consumer) <= kernel.threads * compiled.registers
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", FP8)
@pytest.mark.parametrize("mask", V3_MASKS)
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("error")
def test_v3_fp8_packed_compiles_and_spills_no_more_than_known(width: int, mask: str, out_dtype: str, host_code) -> None:
    asked = {"dtype": "e4m3", "out_dtype": out_dtype, "sequences": 9, "arch": 90}
    kernel = kernel_fp8_for(Problem(1, 4096, 4096, 16, 16, width, **asked, **V3_MASKS[mask]), False, False)
    assert isinstance(kernel, KernelFp8Packed)
    compiled = v3_compiled(kernel)
    assert compiled.stack <= FP8_STACK[width], f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    assert compiled.opcodes.keys() >= {"QGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "LDSM"}
    assert not {"HMMA", "HGMMA"} & compiled.opcodes.keys()
    producer, consumer = program(kernel)[0].registers
    assert WARPGROUP * (producer + kernel.tiles.consumers * consumer) <= kernel.threads * compiled.registers
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


def backward_cases() -> Iterator[tuple[str, int, str, bool]]:
    for width, mask, deterministic in product(BACKWARD, V3_MASKS, (False, True)):
        yield "bf16", width, mask, deterministic
    for width, mask in product(BACKWARD, ("full", "causal")):
        yield "fp16", width, mask, mask == "causal"


def packed_backward_cases() -> Iterator[tuple[str, int, str, bool]]:
    for width, mask, deterministic in product(BACKWARD, V3_MASKS, (False, True)):
        yield "bf16", width, mask, deterministic


def of_consumers(code: tuple[str, ...]) -> list[str]:
    """What can run once a consumer has asked for its registers:
    the producer and the writers give theirs up, and end for themselves."""
    places = {instruction: at for at, instruction in enumerate(code)}
    reached: set[int] = set()
    ahead = [at for at, instruction in enumerate(code) if "USETMAXREG.TRY_ALLOC" in instruction]
    while ahead:
        at = ahead.pop()
        if at not in reached and at < len(code):
            reached.add(at)
            ahead += [places[label] for label in re.findall(r"`\((\.L_\w+)\)", code[at])]
            ahead += [] if re.match(r"(BRA|EXIT)\b", code[at]) else [at + 1]
    return [code[at] for at in sorted(reached)]


def serialised(code: tuple[str, ...]) -> int:
    """How many WGMMAs of a product wait for the one before, as all of a kernel do where ptxas finds too few registers
    or a branch that may divide a warp: it says so nowhere but in its log, and they take a third longer.
    """
    found, sum_before, waited = 0, "", False
    for instruction in code:
        if "WARPGROUP.DEPBAR" in instruction:
            waited = True
        elif wgmma := re.search(r"GMMA\S* (R\d+), .*?(R\d+|RZ)(?:, gsb0|, !?UPT)*$", instruction):
            found += waited and sum_before == wgmma[1] == wgmma[2]
            sum_before, waited = wgmma[1], False
    return found


# Bytes of stack of a thread where the producer is known to spill, with its 24 registers, by width. It is where no side
# is bounded; a consumer never does.
BACKWARD_STACK = {64: 48, 128: 48, 256: 32}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "width", "mask", "deterministic"), [*backward_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_backward_compiles_and_its_consumers_do_not_spill(
    dtype: str, width: int, mask: str, deterministic: bool, host_code
) -> None:
    asked = {"dtype": dtype, "grad": True, "deterministic": deterministic, "arch": 90}
    kernel = kernel_backward_for(Problem(2, 4096, 4096, 16, 16, width, **asked, **V3_MASKS[mask]))
    held_to_its_registers(kernel, BACKWARD_STACK[width] if mask == "full" else 0, host_code)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "width", "mask", "deterministic"), [*packed_backward_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_packed_backward_compiles_and_does_not_spill(
    dtype: str, width: int, mask: str, deterministic: bool, host_code
) -> None:
    asked = {"dtype": dtype, "grad": True, "deterministic": deterministic, "sequences": 9, "arch": 90}
    kernel = kernel_backward_for(Problem(1, 4096, 4096, 16, 16, width, **asked, **V3_MASKS[mask]))
    assert isinstance(kernel, KernelBackwardPacked)
    held_to_its_registers(kernel, 0, host_code)


SPARSE_BACKWARD_STACK = {64: 0, 128: 0, 256: 0}


def sparse_backward_cases() -> Iterator[tuple[str, int, int, str]]:
    for width, block_kv in ((64, 128), (128, 128), (256, 128), (256, 64)):
        for mask in SPARSE_MASKS if block_kv == 128 else ("full", "bits_and_window"):
            yield "bf16", width, block_kv, mask
    for width in BACKWARD:
        yield "fp16", width, 128, "bits_and_window"


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "width", "block_kv", "mask"), [*sparse_backward_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_sparse_backward_compiles_and_its_consumers_do_not_spill(
    dtype: str, width: int, block_kv: int, mask: str, host_code
) -> None:
    form = MaskForm(128, block_kv, **SPARSE_MASKS[mask])
    problem = Problem(2, 4096, 4096, 16, 16, width, dtype=dtype, grad=True, arch=90, block_mask=form)
    kernel = kernel_backward_for(problem)
    assert isinstance(kernel, KernelBackwardSparse) and kernel.tiles == BACKWARD[width] and not refusals(problem)
    held_to_its_registers(kernel, SPARSE_BACKWARD_STACK[width], host_code)


def held_to_its_registers(kernel: KernelBackward, known: int, host_code: list[str]) -> None:
    """A backward kernel compiles to what it is meant to, its consumers within their registers;
    `known` is the producer's stack."""
    compiled = v3_compiled(kernel)
    spills = [instruction for instruction in of_consumers(compiled.code) if re.search(r"\b(STL|LDL)\b", instruction)]
    assert not spills, f"{len(spills)} spill instructions in the consumers' code"
    assert compiled.stack <= known, (
        f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions; known are {known} bytes"
    )
    assert serialised(compiled.code) == 0
    assert compiled.opcodes.keys() >= {"HGMMA", "UTMALDG", "UBLKCP", "UTMASTG", "USETMAXREG"}, (
        "WGMMA, TMA both ways, registers by role"
    )
    assert "HMMA" not in compiled.opcodes
    bulk, fours = "UBLKRED" in compiled.opcodes, any("REDG.E.ADD.F32x4" in instruction for instruction in compiled.code)
    assert (bulk, fours) == (not kernel.tiles.by_gradient, kernel.tiles.by_gradient), (
        "dQ is added to by TMA, or from registers by fours"
    )
    consumers = kernel.tiles.consumers
    wanted = PRODUCER_REGISTERS[consumers] + consumers * CONSUMER_REGISTERS[consumers]
    assert WARPGROUP * wanted <= kernel.threads * compiled.registers, "the consumers would wait for registers for ever"
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


def test_a_serialised_kernel_is_seen() -> None:
    """With 128 queries at a time a consumer has too few registers at this width."""
    compiled = v3_compiled(KernelBackward("bf16", 128, 128, False, False, False, TilesBackward(128)))
    products = 5
    assert serialised(compiled.code) == compiled.opcodes["HGMMA"] - products
    assert any("STL" in instruction for instruction in of_consumers(compiled.code))


KINDS = {
    Kernel: v3_kernel,
    KernelFp8: lambda problem: kernel_fp8_for(problem, True, False),
    KernelFp8Packed: lambda problem: kernel_fp8_for(dataclasses.replace(problem, batch=1, sequences=2), False, False),
    KernelSparse: lambda problem: v3_kernel(dataclasses.replace(problem, block_mask=MaskForm())),
    KernelPacked: lambda problem: v3_kernel(dataclasses.replace(problem, batch=1, sequences=2)),
    KernelBackward: kernel_backward_for,
    KernelBackwardSparse: lambda problem: kernel_backward_for(
        dataclasses.replace(problem, grad=True, block_mask=MaskForm())
    ),
    KernelBackwardPacked: lambda problem: kernel_backward_for(
        dataclasses.replace(problem, grad=True, batch=1, sequences=2)
    ),
}
"""The kernel of a kind for a problem."""


def parameters_fit(kernel: object, entry: str) -> bool:
    """Whether a kernel's PTX declares what its launch packs, by number and size;
    where they lie, the driver says when it has loaded a kernel."""
    scalars = {"u32": 4, "f32": 4, "u64": 8, "b32": 4, "b64": 8}
    declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\n]*?(?:\[(\d+)\])?,?\n", entry)
    sizes = [int(size) if size else scalars[kind] for kind, size in declared]
    return sizes == [size for _, size in arguments_of(kernel).places]


def with_parameters(kernel, folder) -> Resources:
    """A kernel, compiled, whose launch packs what it takes."""
    device, examples = program(kernel)
    compiled = cute.compile(device, *examples, options=f"--gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {folder}")
    assert parameters_fit(kernel, compiled.artifacts.PTX.partition(".entry")[2].partition("{")[0])
    return read(compiled.artifacts.CUBIN, kernel.shared_bytes)


@pytest.mark.parametrize(
    "kind", [kind for kind in PROGRAMS if not issubclass(kind, Kernel)], ids=lambda kind: kind.__name__
)
def test_v3_backward_has_the_parameters_that_its_launch_packs(kind, tmp_path) -> None:
    kernel = KINDS[kind](Problem(2, 4096, 4096, 16, 16, 64, arch=90))
    assert type(kernel) is kind
    with_parameters(kernel, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "kind", [kind for kind in PROGRAMS if issubclass(kind, Kernel)], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("width", WIDTHS)
def test_v3_has_the_parameters_that_its_launch_packs_with_sinks_and_without(kind, width: int, tmp_path) -> None:
    """Sinks join in the epilogue: as many products, for each of a thread's two rows four more exponentials and the
    like, no spills."""
    problem = Problem(2, 4096, 4096, 16, 4, width, causal=True, arch=90)
    kernels = [KINDS[kind](dataclasses.replace(problem, sinks=sinks)) for sinks in (False, True)]
    assert [(type(kernel), "sinks" in arguments_of(kernel).names) for kernel in kernels] == [
        (kind, False),
        (kind, True),
    ]
    plain, read = (with_parameters(kernel, tmp_path) for kernel in kernels)
    assert all(plain.opcodes.get(name) == read.opcodes.get(name) for name in ("HGMMA", "QGMMA"))
    assert read.opcodes["MUFU"] == plain.opcodes["MUFU"] + 2 * 4
    assert read.stack == read.spills == 0 and read.registers == plain.registers


def shared_cases() -> Iterator[tuple[str, int, bool]]:
    yield "forward", 64, False
    yield "sparse", 64, False
    yield "packed", 64, False
    yield "packed_fp8", 64, False
    for width in BACKWARD:
        yield from (
            ("backward", width, False),
            ("backward", width, True),
            ("sparse_backward", width, False),
            ("packed_backward", width, False),
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "width", "deterministic"), [*shared_cases()])
def test_v3_asks_for_no_more_shared_memory_than_it_lays_out(kind, width, deterministic, host_code, monkeypatch) -> None:
    """One mbarrier less is too little, and that is seen."""
    form = MaskForm() if "sparse" in kind else None
    sequences = 9 if "packed" in kind else None
    problem = Problem(
        1, 4096, 4096, 16, 16, width, arch=90, deterministic=deterministic, block_mask=form, sequences=sequences
    )
    kernel = kernel_backward_for(problem) if "backward" in kind else v3_kernel(problem)
    if kind == "packed_fp8":
        kernel = kernel_fp8_for(dataclasses.replace(problem, dtype="e4m3", out_dtype=None), False, False)
    enough = kernel.shared_bytes
    monkeypatch.setattr(type(kernel), "shared_bytes", enough - 8)
    v3_compiled(kernel)
    assert too_little_shared(host_code[0])
