"""`flashzoo.flash_attn`: signatures, values and errors of flash-attention's functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashzoo
from flashzoo import flash_attn
from flashzoo_suite.support import DEVICE, same_bits

HOW = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
CACHE = (
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
    "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False "
    "cu_seqlens_q=None max_seqlen_q=None"  # which are FlashAttention-3's
)
# As flash-attn 2.8 has them.
SIGNATURES = {
    "flash_attn_func": f"q k v {HOW}",
    "flash_attn_kvpacked_func": f"q kv {HOW}",
    "flash_attn_qkvpacked_func": f"qkv {HOW}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {HOW} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {HOW}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {HOW}",
    "flash_attn_with_kvcache": CACHE,
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=True)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.fixture(autouse=True)
def _standard():
    """In float32 to the last digits, on a GPU too."""
    with flashzoo.use("standard"):
        yield


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    told = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    assert " ".join(told) == SIGNATURES[name] and name in flash_attn.__all__
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_a_batch_is_torchs():
    q, k, v = drawn(2, 9, 4, 16), drawn(2, 9, 2, 16), drawn(2, 9, 2, 16)
    out, lse, dropped = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, return_attn_probs=True)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*turned, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert lse.shape == (2, 4, 9) and dropped.numel() == 0
    gradients = (torch.autograd.grad(x.sin().sum(), (q, k, v), retain_graph=True) for x in (out, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_packed_tensors_are_their_parts():
    qkv = drawn(2, 9, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0))
    assert same_bits(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(3, 0)), out)
    assert same_bits(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True, window_size=(3, 0)), out)
    rows, cu_seqlens = qkv.flatten(0, 1), numbers(0, 9, 18)
    out = flash_attn.flash_attn_varlen_func(*rows.unbind(1), cu_seqlens, cu_seqlens, 9, 9, causal=True)
    torch.testing.assert_close(out.view(q.shape), flash_attn.flash_attn_func(q, k, v, causal=True))
    assert same_bits(flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, 9, causal=True), out)
    how = (cu_seqlens, cu_seqlens, 9, 9)
    assert same_bits(flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], *how, causal=True), out)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float, slopes: Tensor | None) -> Tensor:
    """What flash-attention's documentation says, for one of a batch, `(seqlen, heads, head_dim)`."""
    s = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * 0.4
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(len(q), device=DEVICE)[:, None], torch.arange(len(k), device=DEVICE)
    distance = i + len(k) - len(q) - j
    s = s if slopes is None else s - slopes[:, None, None] * distance.abs()
    s = s.masked_fill(distance < 0, -torch.inf) if causal else s
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def hold(out: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [9, 4])
def test_softcap_and_alibi(by_batch, softcap, causal, seqlen_q):
    q, k, v, slopes = drawn(2, seqlen_q, 4, 16), drawn(2, 9, 2, 16), drawn(2, 9, 2, 16), drawn(2, 4)
    given = slopes if by_batch else slopes[0]
    out = flash_attn.flash_attn_func(q, k, v, 0.0, 0.4, causal, softcap=softcap, alibi_slopes=given)
    each = given.expand(2, 4)
    hold(out, torch.stack([formula(*(x[b] for x in (q, k, v)), causal, softcap, each[b]) for b in range(2)]), q, slopes)
    out = flash_attn.flash_attn_func(q, k, v, 0.0, 0.4, causal, softcap=softcap)
    hold(out, torch.stack([formula(*(x[b] for x in (q, k, v)), causal, softcap, None) for b in range(2)]), q, k, v)


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_graph_may_break_at_alibi(by_batch):
    q, k, v, slopes = drawn(2, 4, 4, 16), drawn(2, 9, 2, 16), drawn(2, 9, 2, 16), drawn(2, 4)

    def attention(q, slopes):
        given = slopes if by_batch else slopes[0]
        return flash_attn.flash_attn_func(q + 0, k, v, causal=True, softcap=0.7, alibi_slopes=given) * 2

    hold(torch.compile(attention, backend="aot_eager")(q, slopes), attention(q, slopes), q, slopes)


@pytest.mark.parametrize("lengths_q", [(3, 6), (1, 4)])
@pytest.mark.parametrize("by_batch", [False, True])
def test_softcap_and_alibi_of_packed_sequences(lengths_q, by_batch):
    lengths_k = (3, 6)
    q, k, v, slopes = drawn(sum(lengths_q), 4, 16), drawn(9, 2, 16), drawn(9, 2, 16), drawn(2, 4)
    given, each = (slopes, slopes) if by_batch else (slopes[0], slopes[:1].expand(2, 4))
    cu_q, cu_k = (numbers(0, n[0], sum(n)) for n in (lengths_q, lengths_k))
    how = {"softmax_scale": 0.4, "causal": True, "softcap": 0.7, "alibi_slopes": given}
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9, **how)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), each, strict=True)
    hold(out, torch.cat([formula(*part, True, 0.7, its) for *part, its in parts]), q, k, v, slopes)


def test_alibi_of_lengths_that_end_elsewhere_in_k_than_in_q():
    """They are cut off at the tensors' ends, those of keys too where one tensor says both."""
    q, k, v, slopes = drawn(10, 4, 16), drawn(8, 2, 16), drawn(8, 2, 16), drawn(4)
    both, of_k = numbers(0, 4, 10), numbers(0, 4, 8)
    found, wanted = (
        flash_attn.flash_attn_varlen_func(q, k, v, both, cu_k, 6, 6, alibi_slopes=slopes) for cu_k in (both, of_k)
    )
    assert same_bits(found, wanted)


@pytest.mark.parametrize("used", [None, (4, 7)])
def test_softcap_and_alibi_of_a_cache(used):
    q, k, v, slopes = (drawn(2, *sizes).detach() for sizes in ((3, 4, 16), (9, 2, 16), (9, 2, 16), (4,)))
    how = {"softmax_scale": 0.4, "causal": True, "softcap": 0.7, "alibi_slopes": slopes}
    cache_seqlens = None if used is None else numbers(*used)
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens, return_softmax_lse=True, **how)
    for b, n in enumerate(used or (9, 9)):
        torch.testing.assert_close(out[b], formula(q[b], k[b, :n], v[b, :n], True, 0.7, slopes[b]))
    assert lse.shape == (2, 4, 3)
    pages = numbers(1, 0).view(2, 1)
    turned = (x.flip(0) for x in (k, v))
    paged = flash_attn.flash_attn_with_kvcache(q, *turned, cache_seqlens=cache_seqlens, block_table=pages, **how)
    torch.testing.assert_close(paged, out)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_on_caches_and_pages(paged):
    """Through both functions that take them, by the lengths of each sequence, in ALiBi too."""
    q, caches = drawn(9, 4, 16).detach(), [drawn(2, 16, 2, 16).detach() for _ in "kv"]
    cu_q, used, table = numbers(0, 1, 9), numbers(13, 8), numbers(3, 0, 1, 2).view(2, 2) if paged else None
    given = caches
    if table is not None:
        given = [torch.empty(4, 8, 2, 16, device=DEVICE) for _ in caches]
        for pages, x in zip(given, caches, strict=True):
            pages[table.long().flatten()] = x.view(4, 8, 2, 16)
    how = {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.4, 4, device=DEVICE), "softcap": 3.0}
    found = flash_attn.flash_attn_with_kvcache(
        q, *given, cache_seqlens=used, block_table=table, cu_seqlens_q=cu_q, max_seqlen_q=8, **how
    )
    for b, (first, end) in enumerate(((0, 1), (1, 9))):
        alone = [x[b : b + 1, : int(used[b])] for x in caches]
        torch.testing.assert_close(
            found[None, first:end], flash_attn.flash_attn_func(q[None, first:end], *alone, **how)
        )
    if table is not None:
        cu_k = numbers(0, 13, 21)
        again = flash_attn.flash_attn_varlen_func(q, *given, cu_q, cu_k, 8, 13, block_table=table, **how)
        torch.testing.assert_close(again, found)
    with pytest.raises(flashzoo.UnsupportedError, match="k and v must be None with cu_seqlens_q, got a tensor"):
        flash_attn.flash_attn_with_kvcache(q, *given, q, q, cache_seqlens=used, cu_seqlens_q=cu_q)
    seven = flash_attn.flash_attn_with_kvcache(q, *given, cache_seqlens=7, block_table=table, cu_seqlens_q=cu_q)
    assert seven.shape == q.shape


def test_malformed_slopes():
    q = drawn(2, 5, 4, 16)
    with pytest.raises(TypeError, match=r"alibi_slopes must be float32, got torch.float64"):
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(4, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(1, 4\)"):
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(1, 4, device=DEVICE))


@pytest.mark.parametrize("slopes", [False, True])
def test_lengths_that_lie_are_cut_off(slopes):
    """ALiBi's distances go by them too; a cache that is full, with new rows that had no room, is such a call."""
    q, k, v = (drawn(*shape).detach() for shape in ((6, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16)))
    how = {"causal": True, "alibi_slopes": torch.rand(4, device=DEVICE) if slopes else None}

    def packed(begins: Tensor, begins_k: Tensor) -> Any:
        return flash_attn.flash_attn_varlen_func(q, k[0], v[0], begins, begins_k, 4, 30, **how)

    def cached(q: Tensor, used: Tensor, **more: Tensor) -> Any:
        return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **how, **more)

    same = torch.testing.assert_close
    same(packed(numbers(0, 2, 90), numbers(0, 10, 400)), packed(numbers(0, 2, 6), numbers(0, 10, 40)))
    same(cached(q.view(2, 3, 4, 16), numbers(7, 60)), cached(q.view(2, 3, 4, 16), numbers(7, 40)))
    lying = cached(q, numbers(7, 60), cu_seqlens_q=numbers(0, 2, 90))
    same(lying, cached(q, numbers(7, 40), cu_seqlens_q=numbers(0, 2, 6)))
    full = flash_attn.flash_attn_with_kvcache(
        q.view(2, 3, 4, 16), k, v, k[:, :3] + 1, v[:, :3] + 1, cache_seqlens=numbers(40, 40), **how
    )
    same(full, cached(q.view(2, 3, 4, 16), numbers(40, 40)))


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cu_seqlens_q": numbers(0, 1, 1, 2)}, "cache_seqlens must have 3 rows, as cu_seqlens_q says"),
        ({"cu_seqlens_q": numbers()}, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(0,\)"),
        ({"cu_seqlens_q": numbers(0, 1, 2).to("meta")}, "cu_seqlens_q must be on q's device"),
    ],
)
def test_lengths_that_do_not_go_together(given, text, slopes):
    q, cache = drawn(2, 4, 16), drawn(2, 8, 4, 16)
    how = {"alibi_slopes": torch.rand(4, device=DEVICE) if slopes else None, "cache_seqlens": numbers(1, 1), **given}
    with pytest.raises(ValueError, match=text):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, **how)


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf"), "1", True])
def test_a_malformed_softcap(softcap):
    q = drawn(2, 5, 4, 16)
    with pytest.raises(ValueError, match=f"softcap must be 0, or from 1e-30 to 1e\\+30, got {softcap!r}"):
        flash_attn.flash_attn_func(q, q, q, softcap=softcap)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"cache_seqlens": [3, 3]}, TypeError, "cache_seqlens must be a torch.Tensor, got list"),
        ({"cache_seqlens": torch.tensor([3, 3])}, TypeError, "cache_seqlens must be of dtype torch.int32, got .*int64"),
        ({"cache_seqlens": numbers(3)[0]}, ValueError, r"cache_seqlens must have shape \(batch,\), got \(\)"),
        ({"block_table": torch.zeros(2, 1)}, TypeError, "block_table must be of dtype torch.int32, got .*float32"),
        ({"block_table": numbers(0, 1)}, ValueError, r"block_table must have shape \(batch, pages .*, got \(2,\)"),
        ({"block_table": numbers(0, 1)[:, None][:1]}, ValueError, "block_table must have 2 rows, as q says"),
        ({"cache_seqlens": numbers(3)}, ValueError, "cache_seqlens must have 2 rows, as q says"),
        (
            {"k_cache": drawn(2, 9, 4, 8), "k": drawn(2, 1, 4, 8), "v": drawn(2, 1, 4, 16)},
            ValueError,
            "k_cache must have q's head_dim 16, got 8",
        ),
    ],
)
def test_errors_of_caches_have_the_names_of_flash_attention(given, error, text):
    cache = drawn(2, 5, 4, 16)
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_with_kvcache(cache, **{"k_cache": cache, "v_cache": cache, "cache_seqlens": 3} | given)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_takes_new_keys_and_is_attended_to(paged):
    q, k, v = (drawn(2, 3, 2, 16).detach() for _ in "qkv")
    old = [drawn(2, 16, 2, 16).detach() for _ in "kv"]
    table = numbers(3, 0, 1, 2).view(2, 2) if paged else None
    caches = [torch.empty(4, 8, 2, 16, device=DEVICE) if paged else x.clone() for x in old]
    if table is not None:
        for cache, x in zip(caches, old, strict=True):
            cache[table.long().flatten()] = x.view(4, 8, 2, 16)
    used = numbers(4, 13)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=used, block_table=table, causal=True, return_softmax_lse=True
    )
    for b, first in enumerate(used.tolist()):
        keys, values = (torch.cat([x[b, :first], new[b]])[None] for x, new in zip(old, (k, v), strict=True))
        wanted, its = flashzoo.attention(q[b : b + 1], keys, values, causal=True, return_lse=True)
        torch.testing.assert_close(out[b : b + 1], wanted)
        torch.testing.assert_close(lse[b : b + 1], its)
    if not paged:
        again = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=7, rotary_interleaved=False)
        torch.testing.assert_close(again, flashzoo.attention(q, *(cache[:, :7] for cache in caches)))
        assert same_bits(flash_attn.flash_attn_with_kvcache(q, *caches), flashzoo.attention(q, *caches))


@pytest.mark.parametrize("name", [name for name in SIGNATURES if "cache" not in name])
def test_dropout_is_by_a_seed_that_is_drawn(name):
    packed, cu_seqlens = "varlen" in name, numbers(0, 3, 9)
    tensors = [drawn(*([9] if packed else [2, 9]), 2, 16) for _ in "qkv"]
    if "kvpacked" in name and "qkv" not in name:
        tensors = [tensors[0], torch.stack(tensors[1:], -3)]
    elif "qkvpacked" in name:
        tensors = [torch.stack(tensors, -3)]
    lengths = () if not packed else (cu_seqlens, 9) if "qkv" in name else (cu_seqlens, cu_seqlens, 9, 9)

    def out(p: float, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return getattr(flash_attn, name)(*tensors, *lengths, dropout_p=p)

    assert torch.equal(out(0.5, 1), out(0.5, 1))
    assert not torch.equal(out(0.5, 1), out(0.5, 2)) and torch.equal(out(0.0, 1), out(0.0, 2))


def test_keys_are_not_split_where_the_error_says():
    q, cache = drawn(1, 1, 2, 16), drawn(1, 40, 2, 16)
    with pytest.raises(flashzoo.UnsupportedError, match=r"with flashzoo\.use\('v2'\) they aren't, without pages"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, num_splits=1)
    with flashzoo.use("v2"):
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7)
        assert same_bits(out, flashzoo.attention(q, cache, cache, seqused_k=numbers(7), version="v2"))
        with pytest.raises(flashzoo.UnsupportedError, match="v2: does not support page_table"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, block_table=numbers(0)[None])


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [
        ("flash_attn_with_kvcache", "rotary_cos", torch.ones(2)),
        ("flash_attn_with_kvcache", "cache_batch_idx", torch.ones(2)),
        ("flash_attn_with_kvcache", "cache_leftpad", torch.ones(2)),
        ("flash_attn_with_kvcache", "num_splits", 2),
    ],
)
def test_what_is_not_supported_is_an_error_by_name(function, argument, value):
    call = getattr(flash_attn, function)
    needed = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
    with pytest.raises(flashzoo.UnsupportedError, match=f"{function}: {argument} must be .*, got"):
        call(*(None for _ in needed), **{argument: value})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: flash_attn.flash_attn_qkvpacked_func(x),
            r"qkv must have shape \(batch, seqlen, 3, heads, head_dim\)",
        ),
        (lambda x: flash_attn.flash_attn_varlen_kvpacked_func(x, x, *[None] * 4), r"kv must have shape \(total, 2,"),
        (lambda x: flash_attn.flash_attn_with_kvcache(x, x, x, x), "k and v must be given together, got k alone"),
        (lambda x: flash_attn.flash_attn_with_kvcache(x, x, x, x, x), "cache_seqlens must say where"),
        (lambda x: flash_attn.flash_attn_func(x[0, 0], x, x, alibi_slopes=x), "q must have 3 dimensions or more"),
        (lambda x: flash_attn.flash_attn_with_kvcache(x, x[0], x, cache_seqlens=3), "k_cache must have 4 dimensions"),
        (
            lambda x: flash_attn.flash_attn_with_kvcache(x, x, x, x, x[0, 0], cache_seqlens=3),
            "v must have 3 dimensions",
        ),
        (
            lambda x: flash_attn.flash_attn_varlen_func(x, x, x, numbers(0, 4), numbers(4)[0], 4, 4),
            r"cu_seqlens_k must have shape \(sequences \+ 1,\), got \(\)",
        ),
        (
            lambda x: flash_attn.flash_attn_with_kvcache(x[0], x, x, cu_seqlens_q=numbers(3)[0], cache_seqlens=3),
            r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(\)",
        ),
        (
            lambda x: flash_attn.flash_attn_with_kvcache(*[x[:1]] * 3, cu_seqlens_q=numbers(0, 3), cache_seqlens=4),
            r"q must have shape \(total_q, heads, head_dim\) with cu_seqlens_q, got \(1, 5, 4, 16\)",
        ),
    ],
)
def test_malformed(call, text):
    with pytest.raises(ValueError, match=text):
        call(drawn(2, 5, 4, 16))
    with pytest.raises(TypeError, match=r"qkv must be a torch.Tensor, got list"):
        flash_attn.flash_attn_qkvpacked_func([])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cache_seqlens": -1}, "cache_seqlens must be from 0 to 8, what the cache has room for, got -1"),
        ({"cache_seqlens": 9}, "cache_seqlens must be from 0 to 8"),
        ({"cache_seqlens": True}, "got True"),
        ({"cache_seqlens": 7, "k": 2, "v": 2}, "cache_seqlens must be from 0 to 6, .* got 7"),
        ({"cache_seqlens": 5, "max_seqlen_q": 3}, "max_seqlen_q goes with cu_seqlens_q, got 3 alone"),
    ],
)
def test_a_cache_has_no_room(given, text):
    """What the host knows is looked at; a number on the device is cut off."""
    q, k_cache, v_cache = drawn(1, 2, 2, 16), drawn(1, 8, 2, 16), drawn(1, 8, 2, 16)
    given = {name: drawn(1, x, 2, 16) if name in "kv" else x for name, x in given.items()}
    with pytest.raises(ValueError, match=text):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **given)


def test_what_is_no_tensor():
    q = drawn(5, 4, 16)
    slopes = torch.ones(4, device=DEVICE)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_varlen_func(q, q, q, None, None, 5, 5, alibi_slopes=slopes)
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor, got list"):
        flash_attn.flash_attn_func([1], q, q, alibi_slopes=slopes)
