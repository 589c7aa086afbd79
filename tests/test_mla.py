"""MLA: values that are the first columns of keys, seen in a call's tensors and by `decode` alone at 576 and 512."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem, UnsupportedError
from flashzoo_suite.support import DEVICE, draw, forward, lazily_negated, same_bits

DEEPSEEK = Problem(3, 1, 190, 16, 1, 576, head_dim_v=512, latent=True, dtype="fp16", device="cpu", used_k=True)
ON_HOPPER = replace(DEEPSEEK, batch=8, seqlen_k=8192, dtype="bf16", device="cuda", arch=90)


def cache(**how) -> Tensor:
    return torch.randn(2, 70, 1, 576, **how)


def latent(k: Tensor, v: Tensor) -> bool:
    q = torch.empty(*k.shape[:1], 1, 16, k.shape[3], dtype=k.dtype, device=k.device)
    return flashzoo.explain(q, k, v).problem.latent


class TestWhatIsSeen:
    @pytest.mark.parametrize("how", [{}, {"device": "meta"}, {"dtype": torch.float16}], ids=str)
    def test_a_view_of_the_first_columns(self, how):
        k = cache(**how)
        assert latent(k, k[..., :512]) and latent(k, k.detach()[..., :64]) and latent(k[1:, 3:], k[1:, 3:, :, :512])

    @pytest.mark.parametrize("how", [{}, {"device": "meta"}], ids=str)
    def test_nothing_else(self, how):
        k = cache(**how)
        others = (k, k[..., 64:], k[..., :512].clone(), cache(**how)[..., :512], k.flip(1)[..., :512])
        assert not any(latent(k, v) for v in others)
        assert not latent(k[:, :69], k[:, 1:, :, :512])

    def test_a_view_of_the_other_sign_is_none(self):
        k = cache()
        assert not latent(k, torch._neg_view(k)[..., :512])  # pyright: ignore[reportPrivateImportUsage]

    def test_it_is_part_of_what_is_told(self):
        k = cache()
        assert "head_dim 576/512, fp32, v in k" in str(flashzoo.explain(k[:, :1], k, k[..., :512]).problem)

    def test_values_as_wide_as_keys_are_not_their_first_columns(self):
        with pytest.raises(ValueError, match="head_dim_v must be less than head_dim 576 where latent, got 576"):
            replace(DEEPSEEK, head_dim_v=576)


class TestWhoTakesIt:
    def test_v_of_its_own_is_told_what_is_taken(self):
        (q, k, v), *_ = draw(DEEPSEEK)
        text = (
            r"decode: takes head_dim and head_dim_v 576 and 512 where v is a view of k, k\[..., :512\], got another v"
        )
        with pytest.raises(UnsupportedError, match=text):
            flashzoo.attention(q, k, v.clone(), version="decode")

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"head_dim": 64, "head_dim_v": 32}, "576 and 512 where v is k's first columns, got 64 and 32"),
            ({"dtype": "fp32"}, "takes dtype fp16 or bf16 where v is k's first columns, got fp32"),
            ({"dtype_kv": "e4m3"}, "takes e4m3 k and v that have numbers of their own"),
            ({"head_dim": 576, "head_dim_v": None, "latent": False}, "takes head_dim 1 to 256, got 576"),
        ],
        ids=str,
    )
    def test_decode_refuses_others(self, fields, text):
        reasons = flashzoo.versions()["decode"].unsupported(replace(ON_HOPPER, out_dtype=None, **fields))
        assert any(text in reason for reason in reasons)

    @pytest.mark.parametrize("version", ["v3", "sdpa", "standard"])
    def test_who_takes_any_width_takes_it_too(self, version):
        narrow = replace(ON_HOPPER, head_dim=64, head_dim_v=32, used_k=False)
        assert not flashzoo.versions()[version].unsupported(narrow)
        assert not flashzoo.versions()[version].unsupported(replace(narrow, latent=False))

    @pytest.mark.parametrize("arch", [80, 90, 100])
    def test_auto_takes_decode(self, arch):
        assert flashzoo.explain(replace(ON_HOPPER, arch=arch)).chosen == "decode"


class TestOnHopper:
    @pytest.mark.parametrize(("heads", "queries", "rows"), [(16, 1, 16), (16, 4, 64), (48, 1, 48), (128, 1, 64)])
    def test_a_tile_is_of_64_rows_at_most(self, heads, queries, rows):
        told = str(flashzoo.explain(replace(ON_HOPPER, heads=heads, seqlen_q=queries)))
        assert f"{rows} rows by 64 keys, 1 thread block a multiprocessor, in CuTe DSL" in told
        assert "values are read with the keys that they lie in, once" in told and "padded" not in told

    @pytest.mark.parametrize(
        "fields", [{"page_size": 12, "seqlen_k": 8184}, {"packed_q": True, "sequences": 8, "batch": 1}], ids=str
    )
    def test_the_rest_is_for_triton(self, fields):
        told = flashzoo.explain(replace(ON_HOPPER, **fields))
        assert told.chosen == "decode" and "32 rows by 32 keys, 8 warps, 2 stages, in Triton" in str(told)


def on_device(**fields) -> Problem:
    arch = 10 * torch.cuda.get_device_capability()[0] if DEVICE == "cuda" else None
    return replace(DEEPSEEK, device=DEVICE, arch=arch, lse=True, **fields)


@pytest.mark.parametrize("page_size", [None, 10])
def test_what_is_not_used_is_not_read(page_size):
    problem = on_device(page_size=page_size)
    (q, k, v), *_ = draw(problem)
    used = torch.tensor([150, 0, 65], dtype=torch.int32, device=DEVICE)
    plain = forward("decode", (q, k, v), problem, seqused_k=used)
    k[torch.arange(problem.seqlen_k, device=DEVICE) >= used[:, None]] = torch.nan
    found = forward("decode", (q, k, k[..., :512]), problem, seqused_k=used)
    assert all(same_bits(x, plain.items()[name]) for name, x in found.items().items())


def test_lazily_negated_keys_and_values_are_as_any():
    problem = on_device(used_k=False)
    (q, k, v), *_ = draw(problem)
    negated = lazily_negated(k)
    found = forward("decode", (q, negated, negated[..., :512]), problem)
    assert same_bits(found.out, forward("decode", (q, k, v), problem).out)


def test_a_compiled_call_sees_the_view():
    problem = on_device(used_k=False)
    (q, k, _), *_ = draw(problem)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return flashzoo.attention(q, k, k[..., :512], version="decode")

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(q, k), attend(q, k))


@pytest.mark.parametrize("version", ["sdpa", "standard"])
def test_gradients_of_both_uses_add_up(version):
    q, k = (torch.randn(1, n, 1, 24, dtype=torch.float64, requires_grad=True) for n in (3, 9))
    apart = k.detach().requires_grad_(), k.detach()[..., :16].clone().requires_grad_()
    dout = torch.randn(1, 3, 1, 16, dtype=torch.float64)
    flashzoo.attention(q, k, k[..., :16], version=version).backward(dout)
    flashzoo.attention(q, *apart, version=version).backward(dout)
    expected = apart[0].grad.clone()
    expected[..., :16] += apart[1].grad
    torch.testing.assert_close(k.grad, expected)
