"""The quantiser of FP8 attention: what it rounds, what it keeps, what it lays out for the kernel,
and that it compiles for Hopper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo._triton.compile import resources
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.gpu import SHARED_LIMIT
from flashzoo.inputs import LAYOUTS
from flashzoo.v3.quantize import (
    SAMPLE,
    Plan,
    Quantized,
    quantize,
    quantize_for,
    rotation,
    transpose_launch,
    transpose_v,
)
from flashzoo.v3.quantize_kernels import FIND_AND_USE
from flashzoo_suite.support import DEVICE, lazily_negated, same_bits, storage_of

LARGEST = 448.0
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter is wrong in bfloat16
SHAPES = {  # batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim
    "one block": (1, 128, 128, 1, 1, 64),
    "ragged": (2, 130, 257, 2, 2, 64),
    "gqa": (1, 40, 150, 6, 2, 128),
    "d256": (1, 200, 100, 1, 1, 256),
    "d16": (2, 20, 33, 1, 1, 16),
    "d80": (1, 30, 140, 2, 1, 80),
    "d192": (1, 70, 15, 1, 1, 192),
    "one row": (1, 1, 1, 1, 1, 64),
    "a sample": (1, 30, 700, 2, 1, 128),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

Shape = tuple[int, int, int, int, int, int]


def draw(shape: Shape, dtype: torch.dtype = torch.float16, offset: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with outliers, and k with an offset in every column."""
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = shape

    def one(*size: int) -> Tensor:
        x = torch.randn(size, device=DEVICE)
        return x + 10 * torch.randn(size, device=DEVICE) * (torch.rand(size, device=DEVICE) < 1e-3)

    q = one(batch, seqlen_q, heads, head_dim)
    k = one(batch, seqlen_k, heads_kv, head_dim) + offset * torch.randn(batch, 1, heads_kv, head_dim, device=DEVICE)
    return q.to(dtype), k.to(dtype), one(batch, seqlen_k, heads_kv, head_dim).to(dtype)


def problem_of(q: Tensor, k: Tensor) -> Problem:
    batch, seqlen_q, heads, head_dim = q.shape
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    return Problem(batch, seqlen_q, k.shape[1], heads, k.shape[2], head_dim, dtype=dtype, device=DEVICE)


def rows_of(descale: Tensor, x: Tensor) -> Tensor:
    """A descale for every row of x, `(batch, seqlen, heads, 1)`: descales are for blocks, or for a group of heads."""
    if descale.ndim == 2:
        return (
            descale.double()
            .repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]
            .expand(*x.shape[:3], 1)
        )
    return descale.double().repeat_interleave(DESCALE_BLOCK, 2)[:, :, : x.shape[1]].transpose(1, 2)[..., None]


def dequantize(x8: Tensor, descale: Tensor) -> Tensor:
    return x8.double() * rows_of(descale, x8)


def mean_of_sample(k: Tensor) -> Tensor:
    """`(batch, 1, heads_kv, head_dim)`, of as many keys as are looked at."""
    blocks = k.split(64, 1)
    most = SAMPLE // 64
    sample = [blocks[i * len(blocks) // most] for i in range(most)] if len(blocks) > most else blocks
    return torch.cat(list(sample), 1).mean(1, keepdim=True)


def wanted(q: Tensor, k: Tensor, v: Tensor, rotate: bool = True, smooth: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """What the quantised tensors stand for."""
    q, k, v = q.double(), k.double(), v.double()
    if smooth:
        k = k - mean_of_sample(k)
    matrix = rotation(q.shape[3]).to(DEVICE) if rotate else torch.eye(q.shape[3], dtype=torch.float64, device=DEVICE)
    return q @ matrix, k @ matrix, v


def largest_of_blocks(x: Tensor) -> Tensor:
    """`(batch, heads, blocks)`."""
    batch, seqlen, heads, head_dim = x.shape
    blocks = torch.nn.functional.pad(x.abs(), (0, 0, 0, 0, 0, -seqlen % DESCALE_BLOCK)).view(
        batch, -1, DESCALE_BLOCK, heads, head_dim
    )
    return blocks.amax((2, 4)).transpose(1, 2)


def assert_rounded(x8: Tensor, descale: Tensor, x: Tensor) -> None:
    """Off by half a step of e4m3 at most (2^-4 of a value, 2^-10 of a descale near 0),
    and float32's rounding on the way."""
    step = torch.maximum(x.abs() / 16, rows_of(descale, x) / 1024)
    assert ((dequantize(x8, descale) - x).abs() <= step + 1e-5 * LARGEST * rows_of(descale, x)).all()


def keys_in_order(v8: Tensor) -> Tensor:
    """Transposed v by plain indexing, as bytes."""
    seqlen_k = v8.shape[1]
    position = torch.arange(-(-seqlen_k // 16) * 16, device=v8.device)
    key = 16 * (position // 16) + 2 * (position % 16 // 4) + position % 2 + 8 * (position // 2 % 2)
    return torch.nn.functional.pad(v8.view(torch.uint8), (0, 0, 0, 0, 0, len(position) - seqlen_k))[:, key].permute(
        0, 2, 3, 1
    )


def assert_same(left: Quantized, right: Quantized) -> None:
    for a, b in zip(left, right, strict=True):
        assert a is b is None or same_bits(a, b)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 192, 256])
def test_the_rotation_is_orthogonal_and_spreads(head_dim):
    with torch.device("meta"):  # which is no matter to it
        matrix = rotation(head_dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-12)
    n = head_dim & -head_dim
    assert (
        torch.allclose(matrix[matrix != 0].abs(), torch.tensor(n**-0.5, dtype=torch.float64))
        and (matrix != 0).sum() == n * head_dim
    )
    assert (matrix < 0).any() and matrix.sum(0).abs().max() < n**0.5, "a constant row is spread too"


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["block", "head"])
def test_rounding_and_scales(shape, dtype, scales):
    tensors = draw(shape, dtype)
    before = [storage_of(x) for x in tensors]
    result = quantize(*tensors, scales=scales)
    assert all(torch.equal(storage_of(x), stored) for x, stored in zip(tensors, before, strict=True)), (
        "inputs are modified"
    )
    for x8, descale, x in zip(result[:3], result[3:6], wanted(*tensors), strict=True):
        assert x8.dtype == torch.float8_e4m3fn and x8.is_contiguous() and descale.dtype == torch.float32
        largest = (
            largest_of_blocks(x) if scales == "block" else x.reshape(*x.shape[:2], shape[4], -1).abs().amax((1, 3))
        )
        ones = largest <= 1e-6  # of one key nothing is left when its mean is gone, but for rounding
        assert torch.allclose(descale.double()[~ones], largest[~ones] / LARGEST, rtol=1e-4)
        assert_rounded(x8, descale, x)


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shift_restores_the_lse(shape, dtype):
    q, k, v = draw(shape, dtype)
    shift = quantize(q, k, v).lse_shift
    group = shape[3] // shape[4]
    mean = mean_of_sample(k.double())[:, 0].repeat_interleave(group, 1)
    assert shift.dtype == torch.float32
    assert torch.allclose(shift.double(), torch.einsum("bqhd,bhd->bhq", q.double(), mean), rtol=1e-4, atol=1e-3)
    plain = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(group, 2))
    q_rotated, k_smooth, _ = wanted(q, k, v)
    smooth = torch.einsum("bqhd,bkhd->bhqk", q_rotated, k_smooth.repeat_interleave(group, 2))
    assert torch.allclose(smooth.softmax(3), plain.softmax(3), atol=1e-9)
    assert torch.allclose(smooth.logsumexp(3) + shift, plain.logsumexp(3), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_each_can_be_switched_off(rotate, smooth, head_dim):
    tensors = draw((1, 70, 140, 2, 1, head_dim))
    result = quantize(*tensors, rotate=rotate, smooth=smooth)
    assert (result.lse_shift is None) != smooth
    for x8, descale, x in zip(result[:3], result[3:6], wanted(*tensors, rotate, smooth), strict=True):
        assert_rounded(x8, descale, x)


def test_outliers_cost_less_when_rotated_and_offsets_when_smoothed():
    """In the scores, which are what is wanted of q and k."""
    q, k, v = draw((1, 128, 256, 1, 1, 128))
    q[..., 5] *= 100
    k[..., 7] += 50

    def error(**how) -> float:
        result = quantize(q, k, v, scales="head", **how)
        _, kept, _ = wanted(q, k, v, rotate=False, smooth=how["smooth"])
        scores = torch.einsum(
            "bqhd,bkhd->bhqk", dequantize(result.q, result.q_descale), dequantize(result.k, result.k_descale)
        )
        true = torch.einsum("bqhd,bkhd->bhqk", q.double(), kept)
        return ((scores - true) - (scores - true).mean(3, keepdim=True)).pow(2).mean().sqrt().item()

    assert error(rotate=True, smooth=True) < 0.8 * error(rotate=True, smooth=False)


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_reads_is_what_the_caller_would_get(shape, dtype):
    q, k, v = draw(shape, dtype)
    public, inner = quantize(q, k, v), quantize_for(q, k, v, problem_of(q, k), True)
    assert_same(inner._replace(v=public.v, v_descale=public.v_descale), public)
    assert torch.allclose(inner.v_descale, public.v_descale, rtol=1e-6)
    expected = keys_in_order(public.v)
    assert inner.v.is_contiguous() and inner.v.shape == expected.shape
    assert same_bits(inner.v.view(torch.uint8), expected)
    without = quantize_for(q, k, v, problem_of(q, k), False)
    assert without.lse_shift is None
    assert_same(without, inner._replace(lse_shift=None))


@EVERY_SHAPE
@pytest.mark.parametrize("strided", [False, True])
def test_transpose_v(shape, strided):
    batch, _, seqlen_k, _, heads_kv, head_dim = shape
    size = (batch, heads_kv, seqlen_k, head_dim + 16) if strided else (batch, seqlen_k, heads_kv, head_dim)
    v = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    v8 = (v[..., 16:].transpose(1, 2) if strided else v).view(torch.float8_e4m3fn)
    assert same_bits(transpose_v(v8).view(torch.uint8), keys_in_order(v8.contiguous()))


MOVED = [name for name in LAYOUTS if name not in ("bshd", "expanded")]


@pytest.mark.parametrize("head_dim", [64, 80, 256] if DEVICE == "cuda" else [80])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", MOVED if DEVICE == "cuda" else ["packed", "offset"])
def test_where_a_tensor_lies_changes_its_last_bits_at_most(layout, dtype, head_dim):
    """What the kernel reads, and what is public: a sum in another order may round another way, and no more. Where a
    thread has the elements of V one by one, one byte of nine was wrong once."""
    tensors = draw((2, 130, 270, 4, 2, head_dim), dtype)
    ways = [lambda *x: quantize_for(*x, problem_of(*x[:2]), True), partial(quantize, scales="head")]
    for quantized in ways if DEVICE == "cuda" else ways[:1]:
        expected = quantized(*tensors)
        for at in range(3):
            moved = [LAYOUTS[layout](x) if i == at else x for i, x in enumerate(tensors)]
            before = storage_of(moved[at])
            found = quantized(*moved)
            for mine, right in zip(found[:3], expected[:3], strict=True):
                mine, right = mine.float(), right.float()
                assert ((mine - right).abs() <= right.abs() / 8 + 2.0**-9).all() and (
                    mine != right
                ).float().mean() < 0.01
            for mine, right in zip(found[3:], expected[3:], strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
            assert torch.equal(storage_of(moved[at]), before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("layout", MOVED)
def test_transpose_v_of_any_layout(layout, head_dim):
    v = torch.randint(0, 127, (2, 150, 3, head_dim), dtype=torch.uint8, device=DEVICE)
    moved = LAYOUTS[layout](v.view(torch.float8_e4m3fn))
    assert same_bits(transpose_v(moved).view(torch.uint8), keys_in_order(v.view(torch.float8_e4m3fn)))


def test_strided_views_and_views_off_16_bytes():
    q, k, v = draw((2, 40, 140, 4, 2, 64))

    def strided(x: Tensor) -> Tensor:  # (b, h, s, d), within wider rows, 2 bytes off
        wide = torch.full(
            (x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 9), torch.nan, dtype=x.dtype, device=x.device
        )
        view = wide[..., 1:65].transpose(1, 2)
        return view.copy_(x)

    assert_same(quantize(strided(q), strided(k), strided(v)), quantize(q, k, v))
    broadcast = v[:, :1].expand_as(v)
    assert_same(quantize(q, broadcast, broadcast), quantize(q, broadcast.contiguous(), broadcast.contiguous()))


@pytest.mark.parametrize("scales", ["block", "head"])
def test_zeros(scales):
    zeros = torch.zeros(1, 300, 2, 64, dtype=torch.float16, device=DEVICE)
    result = quantize(zeros, zeros, zeros, scales=scales)
    assert all((x8.float() == 0).all() for x8 in result[:3])
    assert all((descale == 1).all() for descale in result[3:6])
    assert (result.lse_shift == 0).all()
    v = torch.randn_like(zeros)
    v[:, :DESCALE_BLOCK] = 0
    result = quantize(zeros, zeros, v)
    assert (result.v_descale[:, :, 0] == 1).all() and (result.v_descale[:, :, 1:] < 1).all()


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest"),
    [(torch.float16, 65504.0, 6e-8), pytest.param(torch.bfloat16, 3.38e38, 1e-38, marks=pytest.mark.gpu)],
    ids=["fp16", "bf16"],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scales", ["block", "head"])
def test_extremes_stay_finite(dtype, largest, smallest, head_dim, scales):
    signs = torch.where(rotation(head_dim)[:, 0] < 0, -1.0, 1.0).to(DEVICE)  # which the rotation adds up
    x = (largest * signs.float()).expand(1, 150, 1, head_dim).to(dtype).contiguous()
    x[:, 75:] *= -1
    for q in (x, torch.full_like(x, smallest), torch.where(torch.rand_like(x.float()) < 0.01, x, torch.zeros_like(x))):
        result = quantize(q, q, q, scales=scales)
        assert all(part.float().isfinite().all() for part in result[:6])
        assert all((descale > 0).all() for descale in result[3:6])
        if smallest < q.abs().max():
            for x8, descale, want in zip(result[:3], result[3:6], wanted(q, q, q), strict=True):
                assert_rounded(x8, descale, want)


def test_one_huge_outlier_spoils_its_block_only():
    q, k, v = draw((1, 256, 256, 1, 1, 64), offset=0.0)
    v[0, 0, 0, 0] = 6e4
    result = quantize(q, k, v)
    assert result.v_descale[0, 0, 0] > 100 and result.v_descale[0, 0, 1] < 1
    assert_rounded(result.v, result.v_descale, v.double())


@EVERY_SHAPE
def test_the_same_bits_every_time(shape):
    q, k, v = draw(shape)
    first = quantize_for(q, k, v, problem_of(q, k), True)
    for _ in range(2 if DEVICE == "cpu" else 20):
        assert_same(quantize_for(q, k, v, problem_of(q, k), True), first)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
@pytest.mark.parametrize("scales", ["block", "head"])
def test_empty(empty, scales):
    shape = {"batch": (0, 8, 9, 2, 1, 64), "seqlen_q": (2, 0, 9, 2, 1, 64), "seqlen_k": (2, 8, 0, 2, 1, 64)}[empty]
    q, k, v = draw(shape)
    result = quantize(q, k, v, scales=scales)
    assert [x.shape for x in result[:3]] == [q.shape, k.shape, v.shape]
    assert result.lse_shift.shape == (shape[0], shape[3], shape[1]) and not result.lse_shift.isnan().any()
    vt = quantize_for(q, k, v, problem_of(q, k), True).v
    assert vt.shape == transpose_v(result.v).shape == (shape[0], shape[4], 64, -(-shape[2] // 16) * 16)


def test_malformed_arguments_say_what_is_wrong():
    q, k, v = draw((1, 8, 9, 4, 2, 64))
    for arguments, error, words in [
        ((q, k, v[:, :8]), ValueError, ["v", "(1, 9, 2, 64)", "(1, 8, 2, 64)"]),
        ((q, k[..., :32], v), ValueError, ["k", "head_dim", "64", "(1, 9, 2, 32)"]),
        ((q[:, :, :3], k, v), ValueError, ["heads", "3", "2"]),
        ((q[0], k, v), ValueError, ["q", "4 dimensions", "(8, 4, 64)"]),
        ((q.float(), k, v), TypeError, ["q", "float16 or bfloat16", "float32"]),
        ((q, k.bfloat16(), v), ValueError, ["k", "q's dtype", "bfloat16"]),
        ((q, k, "v"), TypeError, ["v", "tensor", "str"]),
        (
            (q[..., :40].contiguous(), k[..., :40].contiguous(), v[..., :40].contiguous()),
            ValueError,
            ["head_dim", "16", "40"],
        ),
        ((q, k.transpose(1, 3).contiguous().transpose(1, 3), v), ValueError, ["k", "contiguous", "strides"]),
    ]:
        with pytest.raises(error) as raised:
            quantize(*arguments)
        assert all(word in str(raised.value) for word in ["quantize", *words]), str(raised.value)
    with pytest.raises(ValueError, match="scales must be 'block' or 'head', got 'row'"):
        quantize(q, k, v, scales="row")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        (
            {"k": torch.zeros(8, 16).half().to_sparse_csr()},
            TypeError,
            "k must be a dense tensor .* got torch.sparse_csr",
        ),
        (
            {"v": torch.nested.nested_tensor([torch.randn(9, 2, 64).half()])},
            TypeError,
            "v must be a dense tensor .* got a nested one",
        ),
        (
            {name: torch.empty(1, 8, 2, 64, device="meta").half() for name in "qkv"},
            ValueError,
            "must have data, got device meta",
        ),
        ({"rotate": "no"}, TypeError, "rotate must be a bool, got 'no'"),
        ({"smooth": 1}, TypeError, "smooth must be a bool, got 1"),
    ],
    ids=["a list", "sparse", "nested", "no data", "rotate", "smooth"],
)
def test_what_the_public_name_refuses(change, error, text):
    with pytest.raises(error, match=text):
        flashzoo.quantize(**dict(zip("qkv", draw((1, 8, 9, 4, 2, 64)), strict=True)) | change)


@pytest.mark.parametrize("rotate", [False, True])
def test_nan_stays_nan(rotate):
    q, k, v = draw((1, 8, 9, 4, 2, 64))
    q[0, 1, 0, 3], v[0, 2, 1, 5] = torch.nan, torch.nan
    found = flashzoo.quantize(q, k, v, rotate=rotate)
    assert found.q[0, 1, 0].float().isnan().any()
    assert found.v[0, 2, 1, 5].float().isnan() and found.v.float().isnan().sum() == 1
    out = flashzoo.attention(
        *found[:3], q_descale=found.q_descale, k_descale=found.k_descale, v_descale=found.v_descale
    )
    assert out[0, :, 2:, 5].isnan().all() and out[0, 1, 0].isnan().any()


def test_lazy_negatives_are_resolved():
    tensors = draw((1, 8, 9, 4, 2, 64))
    found, expected = flashzoo.quantize(*(lazily_negated(x) for x in tensors)), flashzoo.quantize(*tensors)
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(found, expected, strict=True))


def test_lazily_negated_heads_that_overlap():
    """As `resolve_neg` lays them, too, their columns have gaps, which are refused of who has made them."""
    x = draw((1, 9, 9, 1, 1, 80))[0].squeeze(2).unfold(2, 64, 1)
    lazy = torch._neg_view(x)  # pyright: ignore[reportPrivateImportUsage]
    found, expected = flashzoo.quantize(lazy, lazy, lazy), flashzoo.quantize(*(-x.contiguous(),) * 3)
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(found, expected, strict=True))


def test_is_for_outside_of_transforms():
    q, k, v = draw((2, 8, 9, 4, 2, 64))
    with pytest.raises(
        NotImplementedError,
        match=r"flashzoo.quantize does not support q under torch.func.vmap: call it outside of that",
    ):
        torch.func.vmap(lambda q: flashzoo.quantize(q, k, v).q_descale)(torch.stack([q, q]))


@pytest.mark.skipif(DEVICE != "cpu", reason="says how the interpreter is refused")
def test_bfloat16_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="float16"):
        quantize(*(x.bfloat16() for x in draw((1, 8, 9, 4, 2, 64))))


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_compiles_for_hopper_and_does_not_spill(head_dim, dtype):
    heads = 2048 // head_dim
    strides = (4096 * heads * head_dim, heads * head_dim, head_dim)
    plan = Plan(
        Problem(4, 4096, 4096, heads, heads, head_dim, dtype=dtype, arch=90), strides * 3, True, True, True, True
    )
    launches = {
        "scores": (plan.scores, (dtype, dtype, "fp8e4nv", "fp8e4nv", "fp32", "fp32", "fp32", "fp32")),
        "values": (plan.values, (dtype, dtype, "fp8e4nv", "fp32", "fp32")),
        "transpose": (transpose_launch((4, 4096, heads, head_dim), strides), ("fp8e4nv", "fp8e4nv")),
    }
    for name, (launch, types) in launches.items():
        compiled = resources(launch, types, 0, 90)
        assert compiled.stack == 0, f"{name}: {compiled.stack} bytes of stack"
        assert compiled.shared <= SHARED_LIMIT[90]
        if name == "scores":
            assert "HGMMA" in compiled.opcodes, "the rotation runs on the tensor cores"


def test_other_ways_compile_for_hopper():
    problem, strides = Problem(4, 4096, 4096, 16, 4, 128, arch=90), (4096 * 2048, 2048, 128)
    for rotate, smooth in ((False, True), (True, False), (False, False)):
        plan = Plan(problem, strides * 3, rotate, smooth, True, False)
        for launch, types in zip(plan._launches(FIND_AND_USE), ("hh8ff", "hh88ffff"), strict=True):
            kinds = {"h": "bf16", "8": "fp8e4nv", "f": "fp32"}
            assert resources(launch, tuple(kinds[kind] for kind in types), 0, 90).shared <= SHARED_LIMIT[90]
