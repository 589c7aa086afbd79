"""Every tile table entry, compiled for real GPUs on a machine with none: it compiles, fits, and spills nothing.

All of them with `--every-case`, else a covering array of them (see flashzoo_suite/plugin.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from flashzoo import Problem
from flashzoo._sass import Resources
from flashzoo._triton import append_kernels, packed
from flashzoo._triton import scores as triton_scores
from flashzoo._triton.append import append_launch
from flashzoo._triton.compile import resources
from flashzoo._triton.merge import merge_launch
from flashzoo._triton.tiles import DELTA_BLOCK
from flashzoo.blocksparse import launch as blocksparse
from flashzoo.blocksparse.config import tiles_for as blocksparse_tiles
from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.decode import kernels as decode_kernels
from flashzoo.gpu import RAGGED_ROWS, SHARED_LIMIT
from flashzoo.scores.program import parsed
from flashzoo.v1 import launch as v1
from flashzoo.v2 import kernels as v2_kernels
from flashzoo.v2 import launch as v2
from flashzoo.v2.config import apart
from flashzoo.v2.config import tiles_for as v2_tiles
from flashzoo.workloads import SCORE_ALIBI, SCORE_BIAS

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
# sequences, u how much of caches is used, s sinks, g their gradient's parts, m what a function on scores reads, r that
# and where its gradients are summed, p where a bias's is put, d dropout's seed) and how many floats follow them, of
# which the last are for such a function and for dropout.
MASK_SIZES = (0, 1, 32, 100)
LAUNCHES = {
    ("v1", "forward"): (v1.forward_launch, 5, (), "hhhoffffmd", 3),
    ("v1", "backward"): (v1.backward_launch, 8, (False,), "hhhhhfhhffrd", 4),
    ("v2", "forward"): (v2.forward_launch, 4, (True,), "hhhoftusmd", 3),
    ("v2", "delta"): (v2.delta_launch, 2, (True,), "oofffftsg", 0),
    ("v2", "dkdv"): (v2.dkdv_launch, 6, (True,), "hhhhhhfftumd", 4),
    ("v2", "dq"): (v2.dq_launch, 5, (True,), "hhhhhffturd", 4),
    ("v2", "dbias"): (lambda *how: v2.dbias_launch(*how)[0], 4, (True, 0), "hhhhpffmd", 3),
    ("blocksparse", "forward"): (blocksparse.forward_launch, 4, (True, MASK_SIZES), "hhhofiiiiibm", 2),
    ("blocksparse", "dkdv"): (blocksparse.dkdv_launch, 6, (True, MASK_SIZES), "hhhhhhffiiiiibm", 3),
    ("blocksparse", "dq"): (blocksparse.dq_launch, 5, (True, MASK_SIZES), "hhhhhffiiiiibr", 3),
}


def types_of(form: ScoreForm | None, sums: bool = False) -> tuple[str | int, ...] | None:
    """Triton's element type of each tensor in the tuple, and the numbers, of tensors without gaps, for who compiles
    without any."""
    if form is None or not form.reads:
        return None
    triton_names = {"f32": "fp32", "f16": "fp16", "f64": "fp64", "bool": "i1"}
    found: list[str | int] = []
    for dtype, shape in form.reads:
        found += [triton_names.get(dtype, dtype), *shape, *(math.prod(shape[d + 1 :]) for d in range(len(shape)))]
    return *found, *["fp32"] * (len(form.grads) if sums else 0)


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
    summed = apart(problem)[0].score_mod if version == "v2" else problem.score_mod
    kinds |= {"m": types_of(problem.score_mod), "r": types_of(summed, sums=True), "p": "bf16"}
    kinds["d"] = "i64" if problem.dropout_p else None
    types = tuple(kinds[parameter] for parameter in parameters)
    absent = {"m": problem.score_mod is None, "r": problem.score_mod is None, "d": not problem.dropout_p}
    numbers = [parameter for parameter in parameters if parameter in absent]  # each has a float, which are the last
    left_out = tuple(floats - len(numbers) + i for i, parameter in enumerate(numbers) if absent[parameter])
    return resources(launch(problem, strides, *more), types, floats, problem.arch or 0, left_out)


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


@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel", [kernel for kernel in LAUNCHES if kernel[1] != "dbias"], ids="-".join)
@pytest.mark.parametrize("head_dim", [40, 72, 88])
@pytest.mark.parametrize("arch", [80, 90])
def test_rows_of_strides_that_16_does_not_divide(kernel: tuple[str, str], head_dim: int, arch: int) -> None:
    """They are multiples of 16 bytes, and so many are moved at once, as of a width that is a power of two."""
    problem = Problem(2, 4096, 4096, 16, 16, head_dim, grad=True, arch=arch)
    if kernel[0] == "blocksparse":
        problem = dataclasses.replace(problem, block_mask=MaskForm(heads=16))
    moved = [line for line in compiled(*kernel, problem).code if re.search(r"\b(LDG|STG|LDGSTS)\b", line)]
    assert any(".128" in line for line in moved) and not any(re.search(r"\.[US]16\b", line) for line in moved)


@pytest.mark.parametrize("more", [{}, {"used_k": True}, {"sinks": True}, {"dropout_p": 0.1}], ids=str)
def test_v2_takes_none_for_aligned_but_what_it_looked_at(more: dict) -> None:
    """Tensors of lengths, sinks and seeds may start anywhere."""
    problem = Problem(1, 64, 64, 1, 1, 64, dtype="fp16", arch=90, **more)
    made = v2.forward_launch(problem, (64, 64, 64) * 4, True)
    assert made._aligned is not bool(more)


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


BIAS = ScoreForm(SCORE_BIAS, (("bf16", (2, 1, 4096, 4096)),), (0,))
SCORE_FORMS = {"softcap": ScoreForm(), "alibi": ScoreForm(SCORE_ALIBI, (("f32", (16,)),), (0,)), "bias": BIAS}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", [kernel for kernel in LAUNCHES if kernel[1] != "delta"], ids="-".join)
@pytest.mark.parametrize("form", SCORE_FORMS)
@pytest.mark.parametrize(("arch", "head_dim"), [(80, 64), (90, 64)])
def test_a_function_on_scores(kernel: tuple[str, str], form: str, arch: int, head_dim: int) -> None:
    """It compiles and fits, and has atomics only where what it reads has its gradient summed, but v2 for a bias."""
    if kernel[1] == "dbias" and form != "bias":
        return
    problem = Problem(
        2, 4096, 4096, 16, 4, head_dim, deterministic=True, grad=True, arch=arch, score_mod=SCORE_FORMS[form]
    )
    if kernel[0] == "blocksparse":
        problem = dataclasses.replace(problem, block_mask=MaskForm(bits=True))
    read = compiled(*kernel, problem)
    assert TENSOR_CORES & read.opcodes.keys() and read.shared <= SHARED_LIMIT[arch]
    atomics = {"RED", "REDG", "ATOM", "ATOMG"} & read.opcodes.keys()
    summing = kernel[1] in ("dq", "backward") and (form == "alibi" or (form == "bias" and kernel[0] != "v2"))
    assert bool(atomics) == summing


def test_triton_divides_float32_as_ieee_does():
    """Its `/` does not. Of float64 it does, and has no other."""
    language = triton_scores._language(triton_scores._Places(ScoreForm()))
    of_f32 = {"div": "tl.div_rn", "floordiv": "floor_div_f32", "remainder": "remainder_f32"}
    for operation, name in of_f32.items():
        for dtype, quotient in (("f32", f"{name}(score, x0)"), ("f64", "score / x0")):
            text = f"x0: {dtype} = exp(score)\nx1: {dtype} = {operation}(score, x0)\nreturn x1"
            *_, line = language.lines(parsed(text), ["x1"])
            assert quotient in line


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_whole_quotients_of_float32_compile(kernel: str) -> None:
    text = "x0: f32 = remainder(score, 0.7)\nx1: f32 = floordiv(x0, 0.1)\nx2: f32 = add(x0, x1)\nreturn x2"
    problem = Problem(2, 4096, 4096, 16, 4, 64, grad=True, arch=90, score_mod=ScoreForm(text))
    assert {"DFMA", "HGMMA"} <= compiled("v2", kernel, problem).opcodes.keys()


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [*WIDTHS, 40])
def test_v2_sums_gradients_of_a_bias_by_tma_on_hopper(head_dim: int) -> None:
    """Of any width the same tiles, whose rare spills lie around the loops' products."""
    bias = ScoreForm(SCORE_BIAS, (("bf16", (1, 16, 4096, 4096)),), (0,))
    problem = Problem(2, 4096, 4096, 16, 4, head_dim, causal=True, grad=True, arch=90, score_mod=bias)
    read = compiled("v2", "dbias", problem)
    assert {"UTMALDG", "HGMMA"} <= read.opcodes.keys() and read.shared <= SHARED_LIMIT[90]
    assert read.stack <= 296


def test_v2_with_dropout() -> None:
    """Random numbers are made where they are needed, transposed too: none goes through shared memory or another
    thread."""
    problem = Problem(2, 4096, 4096, 16, 4, 64, causal=True, grad=True, arch=90)
    plain, read = (compiled("v2", "dkdv", dataclasses.replace(problem, dropout_p=p)) for p in (0.0, 0.1))
    for name in (*TENSOR_CORES, "STS", "LDS", "SHFL", "STSM", "LDSM", "BAR"):
        assert plain.opcodes.get(name) == read.opcodes.get(name), name
    assert plain.opcodes["IMAD"] + 100 < read.opcodes["IMAD"] and read.shared <= SHARED_LIMIT[90]


@pytest.mark.parametrize("arch", [80, 90])
def test_append_compiles_and_does_not_spill(arch: int) -> None:
    for page_size, table in ((0, None), (16, "i32")):
        launch = append_launch(
            torch.int16, (4, 1, 8, 128), 128, (1 << 20, 1 << 10, 128) * 4, (8192, 4096, 512), page_size
        )
        for bits in ("u8", "i16", "i32"):
            assert resources(launch, (*[bits] * 4, "i32", table, None, None), 0, arch).stack == 0
        descale = ("fp32", 8, 1, 0)
        rounding = resources(launch, (*["u8"] * 2, *["bf16"] * 2, "i32", table, descale, None), 0, arch)
        assert rounding.stack == 0


@pytest.mark.parametrize("arch", [80, 90])
def test_merge_compiles_and_does_not_spill(arch: int) -> None:
    strides = (1 << 20, 1 << 12, 128) * 2 + (1 << 20, 1 << 15, 1) * 2
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        launch = merge_launch((dtype, dtype, torch.bfloat16), (1, 1 << 15, 32, 128), strides)
        assert resources(launch, (name, name, "fp32", "fp32", "bf16", "fp32"), 0, arch).stack == 0


def test_kernels_know_what_the_host_does() -> None:
    for kernels in (decode_kernels, append_kernels):
        assert kernels.DESCALE_BLOCK.value == DESCALE_BLOCK
    assert (v2_kernels.RAGGED_ROWS.value, v2_kernels.DELTA_BLOCK.value) == (RAGGED_ROWS, DELTA_BLOCK)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_table_of_packed_sequences(arch: int) -> None:
    for causal, used, block_kv in product((False, True), (False, True), (0, 64)):
        problem = Problem(1, 8192, 8192, 16, 4, 64, sequences=9, causal=causal, used_k=used, arch=arch)
        tensors = ("i32", "i32", "i32" if used else None, "i32", "i32" if block_kv else None)
        launch, *_ = packed._launch(problem, 128, block_kv)
        assert resources(launch, tensors, 0, arch).stack <= 16
    caches = Problem(1, 8192, 8192, 16, 4, 64, sequences=9, packed_q=True, arch=arch)
    assert resources(packed._launch(caches, 64, 0, 4)[0], ("i32", None, None, "i32", None), 0, arch).stack <= 16


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("window", [(128, None), (128, 128), (None, 64)])
def test_v2_windows_and_groups_compile(kernel: str, window: tuple[int | None, int | None]) -> None:
    problem = Problem(2, 4096, 4096, 16, 4, 96, window=window, grad=True, arch=90)
    assert compiled("v2", kernel, problem).stack <= KNOWN_STACK.get(("v2", kernel, 90, 128), 0)
