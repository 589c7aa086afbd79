"""Every kernel of v3, compiled for Hopper on a machine with none: it compiles, fits, spills no more than is known, and
takes what its launch gives.

All of them with `--every-case`, else a covering array of them (see flashzoo_suite/plugin.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch

from flashzoo import Problem
from flashzoo._cute.compile import compile_for
from flashzoo._cute.hopper.tma import tma_atom
from flashzoo._cute.hopper.wgmma import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from flashzoo._sass import Resources, read
from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.gpu import SHARED_LIMIT, WARPGROUP
from flashzoo.v3 import backward, launch
from flashzoo.v3.config import (
    BACKWARD,
    FP8,
    ONE_LEVEL,
    OTHERS,
    PAIRS_FROM,
    SPARSE,
    UNSPLIT_WITH_A_MASK,
    kernel_backward_for,
    kernel_fp8_for,
)
from flashzoo.v3.config import HOPPER as V3_TILES
from flashzoo.v3.config import kernel_for as v3_kernel
from flashzoo.v3.explain import refusals
from flashzoo.v3.fp8 import REGISTERS
from flashzoo.v3.programs import ARCH, PROGRAMS, arguments_of, program
from flashzoo.v3.traits import (
    Kernel,
    KernelBackward,
    KernelBackwardAllKeys,
    KernelBackwardByHead,
    KernelBackwardPacked,
    KernelBackwardPairs,
    KernelBackwardSparse,
    KernelFp8,
    KernelFp8Packed,
    KernelPacked,
    KernelSparse,
    TilesBackward,
)
from flashzoo.workloads import SCORE_ALIBI, SCORE_BIAS

pytestmark = pytest.mark.compiles

WIDTHS = (64, 128, 256)
LONG, PACKED = 4096, 0
"""A length, and in place of one: packed sequences."""
V3_MASKS = {"full": {}, "left": {"window": (128, None)}, "causal": {"causal": True}, "window": {"window": (128, 64)}}
V3_FALL_BACK = ((64, 128), (128, 64), (96, 192), (256, 64))
"""Widths without tiles of their own, which get those of the wider one."""


def v3_cases() -> Iterator[tuple[str, int, int, int, str, dict[str, int]]]:
    for (width, width_v), mask in product(V3_TILES, V3_MASKS):
        yield "bf16", LONG, width, width_v, mask, {}
    for (width, width_v), others in OTHERS.items():
        for tiles, mask in product(others, ("full", "causal")):
            yield "bf16", LONG, width, width_v, mask, dataclasses.asdict(tiles)
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
    dtype: str, seqlen_q: int, width: int, width_v: int, mask: str, ablated: dict[str, int], host_code
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


# Bytes of stack of a thread where an FP8 kernel is known to spill, by width: at 128 with O, as many columns of products
# and P a consumer has all of its 160 registers in use, and measured faster so than without; at 256 with O, 64
# columns of products and scores all of its 240. In the loop over unmasked blocks are none, but under a causal mask with
# scales for blocks three at 256. The most at 128 is of packed sequences with a window bounded on the left.
FP8_STACK = {64: 0, 128: 24, 256: 24}
ONE_LEVEL_STACK = {64: 0, 128: 96, 256: 32}


def fp8_cases() -> Iterator[tuple[int, str, bool, bool, dict[str, object]]]:
    for width, mask, block_scales, transposed in product(FP8, ("full", "causal"), (False, True), (False, True)):
        yield width, mask, block_scales, transposed, {}
    for width, mask in product(FP8, ("left", "window")):
        yield width, mask, True, False, {}
    for width, mask, block_scales in product(ONE_LEVEL, V3_MASKS, (False, True)):
        yield width, mask, block_scales, True, {"fast_accum": True}
    for width in FP8:
        yield width, "causal", False, False, {"two_level": False}
        yield width, "full", True, True, {"out": "fp16"}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("width", "mask", "block_scales", "transposed", "changes"), [*fp8_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_fp8_compiles_and_spills_no_more_than_known(
    width: int, mask: str, block_scales: bool, transposed: bool, changes: dict[str, object], host_code
) -> None:
    how, fast_accum = {"dtype": "e4m3", "arch": 90, **V3_MASKS[mask]}, "fast_accum" in changes
    problem = Problem(2, 4096, 4096, 16, 16, width, fast_accum=fast_accum, **how)
    kernel = kernel_fp8_for(problem, block_scales, transposed)
    assert kernel.two_level is not fast_accum
    kernel = kernel if fast_accum else dataclasses.replace(kernel, **changes)
    compiled = v3_compiled(kernel)
    known = 0 if fast_accum else (FP8_STACK if kernel.two_level else ONE_LEVEL_STACK)[width]
    assert compiled.stack <= known, f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    if "two_level" not in changes:  # of a block that overlaps the next, the last product follows the one before
        assert serialised(compiled.code) <= kernel.tiles.overlap
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
    assert serialised(compiled.code) == 0
    assert compiled.opcodes.keys() >= {"QGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "LDSM"}
    assert not {"HMMA", "HGMMA"} & compiled.opcodes.keys()
    producer, consumer = program(kernel)[0].registers
    assert WARPGROUP * (producer + kernel.tiles.consumers * consumer) <= kernel.threads * compiled.registers
    assert compiled.shared <= SHARED_LIMIT[90]
    assert not too_little_shared(host_code[0])


Widths = tuple[int, int]


def backward_cases() -> Iterator[tuple[str, Widths, int, str, bool]]:
    for widths, mask, deterministic in product(BACKWARD, V3_MASKS, (False, True)):
        yield "bf16", widths, keys_of(widths, mask), mask, deterministic
    for widths, mask in product(BACKWARD, ("full", "causal")):
        yield "fp16", widths, keys_of(widths, mask), mask, mask == "causal"
    for widths, mask in product(PAIRS_FROM, V3_MASKS):
        yield "bf16", widths, keys_of(widths, mask) - 1, mask, False
    for widths, mask in product(ALL_KEYS, V3_MASKS):
        yield "bf16", widths, FEW, mask, False


ALL_KEYS = [widths for widths, tiles in BACKWARD.items() if not tiles.by_gradient]
FEW = 100
"""Widths whose tiles may have all keys, and so many keys."""


def keys_of(widths: Widths, mask: str) -> int:
    """Where thread blocks work in pairs, of the least keys with which they do."""
    return PAIRS_FROM[widths][mask != "full"] if widths in PAIRS_FROM else LONG


def packed_backward_cases() -> Iterator[tuple[str, Widths, str, bool]]:
    for widths, mask, deterministic in product(BACKWARD, V3_MASKS, (False, True)):
        yield "bf16", widths, mask, deterministic


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


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "widths", "seqlen_k", "mask", "deterministic"), [*backward_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_backward_compiles_and_its_consumers_do_not_spill(
    dtype: str, widths: Widths, seqlen_k: int, mask: str, deterministic: bool, host_code
) -> None:
    asked = {"dtype": dtype, "head_dim_v": widths[1], "grad": True, "deterministic": deterministic, "arch": 90}
    seqlen_q = min(4096, seqlen_k)
    kernel = kernel_backward_for(Problem(2, seqlen_q, seqlen_k, 16, 16, widths[0], **asked, **V3_MASKS[mask]))
    pairs = widths in PAIRS_FROM and seqlen_k >= keys_of(widths, mask) and not deterministic
    assert isinstance(kernel, KernelBackwardPairs) == pairs
    assert isinstance(kernel, KernelBackwardAllKeys) == (seqlen_k == FEW)
    held_to_its_registers(kernel, host_code)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("widths", ALL_KEYS, ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_backward_by_head_compiles_and_does_not_spill(widths: Widths, mask: str, host_code) -> None:
    """What it rounds it adds to the sums in a loop of its own: branches in front of a product's end serialise it."""
    asked = {"head_dim_v": widths[1], "grad": True, "arch": 90, **V3_MASKS[mask]}
    kernel = kernel_backward_for(Problem(66, 200, 200, 16, 16, widths[0], **asked))
    assert isinstance(kernel, KernelBackwardByHead)
    held_to_its_registers(kernel, host_code)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "widths", "mask", "deterministic"), [*packed_backward_cases()], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_packed_backward_compiles_and_does_not_spill(
    dtype: str, widths: Widths, mask: str, deterministic: bool, host_code
) -> None:
    asked = {"dtype": dtype, "head_dim_v": widths[1], "grad": True, "deterministic": deterministic, "arch": 90}
    kernel = kernel_backward_for(Problem(1, 4096, 4096, 16, 16, widths[0], sequences=9, **asked, **V3_MASKS[mask]))
    assert isinstance(kernel, KernelBackwardPacked)
    held_to_its_registers(kernel, host_code)


SPLIT_SPARSE_STACK = {32: 8, 48: 16, 64: 8}
"""Bytes of stack of the producer's, by width, where heads of a block mask are split over tiles."""


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "kind", ["dense", "left", "short", "all_keys", "deterministic", "packed", "sparse", "one_head"]
)
@pytest.mark.parametrize("widths", [*BACKWARD], ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_backward_of_split_groups_compiles_and_does_not_spill(kind: str, widths: Widths, host_code) -> None:
    """Its dK and dV leave in float32, from registers."""
    how = {
        "packed": {"sequences": 1},
        "sparse": {"block_mask": MaskForm(128, 128)},
        "deterministic": {"deterministic": True},
        "one_head": {"causal": False, "heads": 1},
        "left": {"causal": False, "window": (128, None)},
        "all_keys": {"causal": False},
    }
    asked = {"heads": 16, "head_dim_v": widths[1], "causal": kind != "sparse", "grad": True, "arch": 90}
    asked |= how.get(kind, {})
    keys = keys_of(widths, "full" if kind == "sparse" else "causal") - (kind == "short")
    keys = FEW if kind == "all_keys" else keys
    kernel = kernel_backward_for(Problem(1, 4096, keys, heads_kv=1, head_dim=widths[0], **asked))
    paired = kind in ("dense", "left", "one_head") and widths in PAIRS_FROM
    assert isinstance(kernel, KernelBackwardPairs) == paired
    assert isinstance(kernel, KernelBackwardAllKeys) == (kind == "all_keys" and widths in ALL_KEYS)
    assert kernel.split_queries == (kind != "sparse" or widths not in UNSPLIT_WITH_A_MASK)
    held_to_its_registers(kernel, host_code, SPLIT_SPARSE_STACK.get(widths[0], 0) if kind == "sparse" else 0)


def sparse_backward_cases() -> Iterator[tuple[str, int, int, str]]:
    widths = [width for width, width_v in BACKWARD if width == width_v]
    for width, block_kv in (*product(widths, (128,)), (256, 64)):
        for mask in SPARSE_MASKS if block_kv == 128 else ("full", "bits_and_window"):
            yield "bf16", width, block_kv, mask
    for width in widths:
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
    assert isinstance(kernel, KernelBackwardSparse) and kernel.tiles == BACKWARD[width, width] and not refusals(problem)
    held_to_its_registers(kernel, host_code)


def held_to_its_registers(kernel: KernelBackward, host_code: list[str], of_producer: int = 0) -> None:
    """A backward kernel compiles to what it is meant to, each role within its registers, but for so many bytes of
    stack that its producer is known to have."""
    compiled = v3_compiled(kernel)
    assert compiled.stack <= of_producer, f"{compiled.stack} bytes of stack, {compiled.spills} spill instructions"
    assert not any("STL" in instruction for instruction in of_consumers(compiled.code))
    assert serialised(compiled.code) == 0
    assert compiled.opcodes.keys() >= {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG"}, "WGMMA, TMA, registers by role"
    all_keys = isinstance(kernel, KernelBackwardAllKeys)
    assert ("UTMASTG" in compiled.opcodes) == (all_keys or not kernel.split_queries), (
        "dK and dV leave by TMA, but for parts of them, and of a tile of all keys dQ"
    )
    assert "HMMA" not in compiled.opcodes
    multicast = sum("UTMALDG.4D.MULTICAST" in instruction for instruction in compiled.code)
    assert bool(multicast) == (kernel.cluster > 1) == ("STAS" in compiled.opcodes), "pairs load and claim for both"
    read = sum(re.search(r"\bLDS R", instruction) is not None for instruction in compiled.code)
    behind_fences = re.findall(r"CGAERRBAR\n.*ARRIVE.TRANS64.RED", "\n".join(compiled.code))
    assert len(behind_fences) == (read if kernel.cluster > 1 else 0), (
        "who has read a pair's next tile tells the other thread block when it has it, and not while it loads it"
    )
    copied = any("UBLKCP.S.S" in instruction for instruction in compiled.code)
    assert copied == (kernel.cluster > 1 and kernel.tiles.by_gradient), "of a pair each copies its dS to the other"
    bulk, fours = "UBLKRED" in compiled.opcodes, any("REDG.E.ADD.F32x4" in instruction for instruction in compiled.code)
    assert (bulk, fours) == (not kernel.tiles.by_gradient and not all_keys, kernel.tiles.by_gradient), (
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
    KernelBackward: lambda problem: kernel_backward_for(dataclasses.replace(problem, seqlen_k=255)),
    KernelBackwardAllKeys: lambda problem: kernel_backward_for(dataclasses.replace(problem, seqlen_k=FEW)),
    KernelBackwardByHead: lambda problem: kernel_backward_for(
        dataclasses.replace(problem, batch=66, seqlen_q=200, seqlen_k=200)
    ),
    KernelBackwardPairs: lambda problem: kernel_backward_for(dataclasses.replace(problem, seqlen_k=8192)),
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


def with_launch(kernel: Kernel | KernelBackward, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Resources:
    """A kernel, compiled, whose launch packs what it takes, and asks for no more shared memory than it lays out:
    one mbarrier less is too little, and that is seen."""
    device, examples = program(kernel)
    enough = kernel.shared_bytes
    with monkeypatch.context() as patch:
        patch.setattr(type(kernel), "shared_bytes", enough - 8)
        compiled = cute.compile(
            device, *examples, options=f"--gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {folder}"
        )
    assert too_little_shared(str(compiled.ir_module))
    assert parameters_fit(kernel, compiled.artifacts.PTX.partition(".entry")[2].partition("{")[0])
    return read(compiled.artifacts.CUBIN, enough)


SCORE_MODS = {
    "softcap": ScoreForm(),
    "alibi": ScoreForm(SCORE_ALIBI, (("f32", (16,)),)),
    "bias": ScoreForm(SCORE_BIAS, (("bf16", (2, 1, 4096, 4096)),)),
}
SCORE_STACK = {
    **{("softcap", 48, False): 16, ("softcap", 80, False): 8, ("bias", 64, False): 80, ("bias", 96, False): 72},
    **{("softcap", 48, True): 16, ("softcap", 64, True): 104, ("softcap", 80, True): 120},
    **{("bias", 48, True): 8, ("bias", 64, True): 104, ("bias", 80, True): 216},
}
"""Bytes of stack where a kernel with a function on scores is known to spill: function, width, backward. At these widths
a warpgroup has the most scores at a time, and nothing to spare."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("width", sorted({width for width, _ in V3_TILES}))
@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.filterwarnings("error")
def test_v3_with_a_function_on_scores_spills_no_more_than_known(name, width, grad, tmp_path, monkeypatch) -> None:
    problem = Problem(2, 4096, 4096, 16, 4, width, causal=True, grad=grad, arch=90, score_mod=SCORE_MODS[name])
    kernel = kernel_backward_for(problem) if grad else v3_kernel(problem, (True,) if name == "bias" else ())
    compiled = with_launch(kernel, tmp_path, monkeypatch)
    known = SCORE_STACK.get((name, width, grad), 0)
    assert compiled.stack <= known, f"{compiled.stack} bytes of stack; known are {known}"
    assert not grad or serialised(compiled.code) == 0


BY_HEAD_STACK = {(128, 128): 8, (160, 160): 16, (192, 128): 8}
"""The same by head, with alibi, by widths."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("widths", ALL_KEYS, ids=str)
@pytest.mark.filterwarnings("error")
def test_v3_by_head_with_a_function_on_scores_spills_no_more_than_known(widths, mask, tmp_path, monkeypatch) -> None:
    asked = {"head_dim_v": widths[1], "grad": True, "arch": 90, "score_mod": SCORE_MODS["alibi"], **V3_MASKS[mask]}
    kernel = kernel_backward_for(Problem(66, 200, 200, 16, 16, widths[0], **asked))
    assert isinstance(kernel, KernelBackwardByHead)
    compiled = with_launch(kernel, tmp_path, monkeypatch)
    assert compiled.stack <= BY_HEAD_STACK.get(widths, 0) and serialised(compiled.code) == 0


def backward_launches() -> Iterator[tuple[type, Widths, bool]]:
    for widths in BACKWARD:
        for kind in PROGRAMS:
            by_keys = dict.fromkeys((KernelBackwardAllKeys, KernelBackwardByHead), ALL_KEYS)
            of_widths = ({KernelBackwardPairs: PAIRS_FROM} | by_keys).get(kind, BACKWARD)
            if not issubclass(kind, Kernel) and widths in of_widths:
                yield kind, widths, False
        yield KernelBackward, widths, True


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "widths", "deterministic"), [*backward_launches()], ids=str)
def test_v3_backward_takes_what_its_launch_gives(kind, widths, deterministic, tmp_path, monkeypatch) -> None:
    sizes = (2, 4096, 4096, 16, 16, widths[0])
    kernel = KINDS[kind](Problem(*sizes, head_dim_v=widths[1], arch=90, deterministic=deterministic))
    assert type(kernel) is kind
    for split in (False,) if kernel.by_head else (False, True):
        with_launch(dataclasses.replace(kernel, split_queries=split), tmp_path, monkeypatch)


@pytest.mark.parametrize(("batch", "seqlen_k"), [(2, FEW), (2, 200), (66, 200)], ids=["all_keys", "", "by_head"])
@pytest.mark.parametrize("widths", [*BACKWARD], ids=str)
def test_v3_backward_swizzles_as_tma_is_told(widths: Widths, batch: int, seqlen_k: int, monkeypatch) -> None:
    """The rows that its launch's descriptors have on chip are those of the kernel's layouts, tensor by tensor."""
    laid_out = []

    def noted(operation, x, layout, cluster):
        laid_out.append(16 << layout.inner.num_bits)
        return tma_atom(operation, x, layout, cluster)

    monkeypatch.setattr(backward, "tma_atom", noted)
    problem = Problem(batch, 200, seqlen_k, 4, 4, widths[0], head_dim_v=widths[1], grad=True, arch=90)
    kernel = kernel_backward_for(problem)
    assert kernel.by_head == (batch == 66 and widths in ALL_KEYS)
    compile_for(ARCH, *program(kernel))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "function_for", lambda kernel: SimpleNamespace(bind=lambda *given, cluster: None))
    q, k, v, dout = (
        torch.empty(batch, seqlen, 4, width, device="meta").stride()
        for seqlen, width in ((200, widths[0]), (seqlen_k, widths[0]), (seqlen_k, widths[1]), (200, widths[1]))
    )
    launched = launch.BackwardLaunch(problem, kernel, (q, k, v, dout), dout, False, 0)
    names = ["q", "k", "v", "dout", "dk", "dv", *["dq"] * (not kernel.dq_sums)]
    given = [getattr(launched, f"_{name}") for name in names]
    assert [x.row_bytes for x in given] == laid_out


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "kind", [kind for kind in PROGRAMS if issubclass(kind, Kernel)], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("width", WIDTHS)
def test_v3_takes_what_its_launch_gives_with_sinks_and_without(kind, width, tmp_path, monkeypatch) -> None:
    """Sinks join in the epilogue: as many products, for each of a thread's two rows four more exponentials and the
    like, no more spills than known."""
    problem = Problem(2, 4096, 4096, 16, 4, width, causal=True, arch=90)
    kernels = [KINDS[kind](dataclasses.replace(problem, sinks=sinks)) for sinks in (False, True)]
    assert [(type(kernel), "sinks" in arguments_of(kernel).names) for kernel in kernels] == [
        (kind, False),
        (kind, True),
    ]
    plain, read = (with_launch(kernel, tmp_path, monkeypatch) for kernel in kernels)
    assert all(plain.opcodes.get(name) == read.opcodes.get(name) for name in ("HGMMA", "QGMMA"))
    assert read.opcodes["MUFU"] == plain.opcodes["MUFU"] + 2 * 4
    known = FP8_STACK[width] if kind in (KernelFp8, KernelFp8Packed) else 0
    assert read.stack <= known and (known or read.spills == 0) and read.registers == plain.registers
