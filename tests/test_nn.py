"""`flashzoo.nn.DotProductAttention`: the layout and the arguments of Megatron's core attention."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashzoo
from flashzoo.nn import DotProductAttention
from flashzoo_suite.support import DEVICE, same_bits


class Kind(Enum):
    """As Megatron's, by name."""

    causal = 1
    no_mask = 2


def drawn(heads: int = 4, seqlen: int = 12) -> Tensor:
    return torch.randn(seqlen, 2, heads, 16, device=DEVICE, requires_grad=True)


def torchs(q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
    turned = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(*turned, enable_gqa=True, **how).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("kind", ["causal", Kind.no_mask])
def test_a_batch(kind):
    q, k, v = drawn(), drawn(2), drawn(2)
    attend = DotProductAttention(None, 1, kind, "self", softmax_scale=0.3, version="standard")
    out, expected = attend(q, k, v), torchs(q, k, v, is_causal=kind == "causal", scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not list(attend.parameters())


def test_a_rank_has_some_of_the_heads():
    q, k, v = drawn(), drawn(2), drawn(2)
    attend = DotProductAttention(version="standard")
    ranks = [attend(q[:, :, 2 * r : 2 * r + 2], k[:, :, r : r + 1], v[:, :, r : r + 1]) for r in range(2)]
    torch.testing.assert_close(torch.cat(ranks, -1), attend(q, k, v))


def test_masks_hide_what_is_true():
    q, k, v = drawn(), drawn(), drawn()
    hidden = torch.zeros(2, 1, 1, 12, dtype=torch.bool, device=DEVICE)
    hidden[1, ..., 7:] = True
    attend = DotProductAttention(attn_mask_type="padding", version="standard")
    torch.testing.assert_close(attend(q, k, v, hidden), torchs(q, k, v, attn_mask=~hidden), rtol=1e-4, atol=1e-5)
    seen = ~hidden & torch.ones(12, 12, dtype=torch.bool, device=DEVICE).tril()
    torch.testing.assert_close(
        attend(q, k, v, hidden, "padding_causal"), torchs(q, k, v, attn_mask=seen), rtol=1e-4, atol=1e-5
    )
    hidden = torch.rand(1, 4, 12, 12, device=DEVICE) < 0.4
    torch.testing.assert_close(
        attend(q, k, v, hidden, "arbitrary"), torchs(q, k, v, attn_mask=~hidden), rtol=1e-4, atol=1e-5
    )


def test_packed_sequences():
    q, k, v = (x.detach()[:, 0] for x in (drawn(), drawn(), drawn()))
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    lengths = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    attend = DotProductAttention(SimpleNamespace(window_size=(3, 0)), version="standard")
    out = attend(q, k, v, packed_seq_params=lengths)
    wanted = flashzoo.attention(q, k, v, cu_seqlens_q=cu_seqlens, causal=True, window_size=(3, 0), version="standard")
    assert out.shape == (12, 64) and same_bits(out, wanted.flatten(1))
    with pytest.raises(ValueError, match="attention_mask must be None beside packed_seq_params"):
        attend(q, k, v, torch.ones(1, 1, 1, 12), packed_seq_params=lengths)


@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
def test_how_other_lengths_of_keys_are_aligned_has_to_be_said(kind):
    """Dense and packed alike: by Transformer Engine's names with "bottom_right" queries see up to the last key."""
    q, k, v = drawn(seqlen=3), drawn(), drawn()
    wanted = flashzoo.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, version="standard")
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (3, 12))
    packed = [x[:, 0] for x in (q, k, v)]
    wanted_packed = flashzoo.attention(
        *packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, version="standard"
    ).flatten(1)
    lengths = SimpleNamespace(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)
    attend, at_the_end = (
        DotProductAttention(attn_mask_type=of, version="standard") for of in (kind, f"{kind}_bottom_right")
    )
    assert same_bits(at_the_end(q, k, v), wanted.transpose(0, 1).flatten(2))
    assert same_bits(at_the_end(*packed, packed_seq_params=lengths), wanted_packed)
    for given, how in (((q, k, v), {}), (packed, {"packed_seq_params": lengths})):
        with pytest.raises(ValueError, match="causal goes with equal lengths, got"):
            attend(*given, **how)
    lengths.cu_seqlens_kv = cu_q.clone()
    attend(*(x[:3] for x in packed), packed_seq_params=lengths)
    with pytest.raises(ValueError, match="attn_mask_type must be one of"):
        attend(q, k, v, attn_mask_type="no_mask_bottom_right")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"cu_seqlens_q_padded": torch.zeros(3)},
            flashzoo.UnsupportedError,
            r"cu_seqlens_q_padded must be None, .*\(3,\)",
        ),
        ({"cu_seqlens_kv_padded": torch.zeros(3)}, flashzoo.UnsupportedError, "cu_seqlens_kv_padded must be None"),
        ({"qkv_format": "sbhd"}, flashzoo.UnsupportedError, "qkv_format must be 'thd', got 'sbhd'"),
        ({"cu_seqlens_kv": None}, ValueError, "packed_seq_params must have cu_seqlens_kv"),
    ],
)
def test_packed_sequences_of_another_form(given, error, text):
    """Their lengths alone would say where sequences begin, and padding between them would be read as rows."""
    q, cu_seqlens = drawn()[:, 0], torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    lengths = SimpleNamespace(**{"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens} | given)
    with pytest.raises(error, match=text):
        DotProductAttention()(q, q, q, packed_seq_params=lengths)


@pytest.mark.parametrize(("skip", "windowed"), [(None, (1, 2, 3)), (2, (1, 3)), ([1, 0, 0], (1,))])
def test_layers_without_the_window(skip, windowed):
    config = SimpleNamespace(window_size=(2, 0), window_attn_skip_freq=skip)
    for layer in (1, 2, 3):
        attend = DotProductAttention(config, layer)
        assert attend.window_size == ((2, 0) if layer in windowed else None)
    assert DotProductAttention(config, 2, window_size=(3, 0)).window_size == (3, 0)


def test_deterministic_mode():
    q = drawn()
    attend = DotProductAttention(SimpleNamespace(deterministic_mode=True), version="v1")
    assert attend.deterministic and not DotProductAttention().deterministic
    with pytest.raises(flashzoo.UnsupportedError, match="deterministic"):
        DotProductAttention(SimpleNamespace(deterministic_mode=True), version="sdpa")(q, q, q)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sizes", [None, (2, 4, 12, 12), (1, 4, 12, 12), (2, 1, 1, 12)])
def test_softcap_and_bias(softcap, sizes):
    q, k, v = drawn(), drawn(2), drawn(2)
    bias = None if sizes is None else torch.randn(sizes, device=DEVICE, requires_grad=True)
    attend = DotProductAttention(SimpleNamespace(attn_logit_softcapping=softcap), version="standard", softmax_scale=0.4)
    out = attend(q, k, v, attention_bias=bias)
    s = torch.einsum("ibhd,jbhd->bhij", q, k.repeat_interleave(2, 2)) * 0.4
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = (s if bias is None else s + bias).masked_fill(torch.ones(12, 12, device=DEVICE).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhij,jbhd->ibhd", s.softmax(-1), v.repeat_interleave(2, 2)).flatten(2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    leaves = [x for x in (q, k, v, bias) if x is not None]
    gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{"config": SimpleNamespace(attention_dropout=0.5)}, {"attention_dropout": 0.5}])
def test_dropout_while_it_trains(given):
    attend, (q, k, v) = DotProductAttention(**given), (drawn() for _ in "qkv")
    torch.manual_seed(3)
    out = attend(q, k, v)
    torch.manual_seed(3)
    wanted = flashzoo.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, dropout_p=0.5)
    torch.testing.assert_close(out, wanted.transpose(0, 1).flatten(2))
    assert not torch.equal(out, attend(q, k, v))
    torch.testing.assert_close(attend.eval()(q, k, v), DotProductAttention()(q, k, v))


def test_softcap_of_packed_sequences():
    q, k, v = (x.detach()[:, :1] for x in (drawn(), drawn(), drawn()))
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    lengths = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    attend = DotProductAttention(SimpleNamespace(attn_logit_softcapping=0.7), version="standard")
    out = attend(*(x[:, 0] for x in (q, k, v)), packed_seq_params=lengths)
    parts = [attend(*(x[part] for x in (q, k, v)))[:, 0] for part in (slice(5), slice(5, 12))]
    torch.testing.assert_close(out, torch.cat(parts))


@pytest.mark.parametrize(
    ("config", "given", "text"),
    [
        ({"context_parallel_size": 2}, {}, "config.context_parallel_size must be 1, got 2"),
        ({"softmax_type": "learnable"}, {}, "config.softmax_type must be 'vanilla', got 'learnable'"),
        ({}, {"k_channels": 8}, "k_channels must be None, got 8"),
    ],
)
def test_what_is_not_supported_is_an_error_by_name(config, given, text):
    with pytest.raises(flashzoo.UnsupportedError, match=text):
        DotProductAttention(SimpleNamespace(**config), **given)


@pytest.mark.parametrize(
    ("skip", "layer", "text"),
    [
        (0, 1, "window_attn_skip_freq must be from 1 on, or a list, got 0"),
        ([1, 0], 3, "window_attn_skip_freq must have layer 3, got 2 layers"),
        ([1, 0], 0, "layer_number must be from 1 on, got 0"),
    ],
)
def test_what_says_nothing_of_a_layer(skip, layer, text):
    config = SimpleNamespace(window_size=(2, 0), window_attn_skip_freq=skip)
    with pytest.raises(ValueError, match=text):
        DotProductAttention(config, layer)


def test_malformed():
    q, short = drawn(), drawn(seqlen=7)
    with pytest.raises(TypeError, match=r"query must be a torch.Tensor, got list"):
        DotProductAttention()([1], q, q)
    with pytest.raises(ValueError, match=r"key must be \(seqlen, batch, heads, head_dim\), got shape \(12, 4, 16\)"):
        DotProductAttention()(q, q[:, 0], q)
    with pytest.raises(ValueError, match=r"attention_mask must spread to \(2, 4, 12, 12\), got \(3, 1, 12, 12\)"):
        DotProductAttention()(q, q, q, torch.zeros(3, 1, 12, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask_type must be one of no_mask, causal, .*, got 'diagonal'"):
        DotProductAttention(attn_mask_type="diagonal")
    attend = DotProductAttention()
    for name in ("attention_mask", "attention_bias"):
        with pytest.raises(TypeError, match=rf"{name} must be a torch.Tensor, got list"):
            attend(q, q, q, **{name: [1]})
    with pytest.raises(ValueError, match="causal goes with equal lengths, got 12 queries and 7 keys"):
        attend(q, short, short)
    with pytest.raises(ValueError, match="attention_mask must be given where attn_mask_type is 'arbitrary'"):
        attend(q, q, q, attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="attention_mask must be bool, of 4 dimensions"):
        attend(q, q, q, torch.zeros(12, 12))
    with pytest.raises(ValueError, match=r"attention_bias must spread to \(2, 4, 12, 12\), got \(1, 3, 12, 12\)"):
        attend(q, q, q, attention_bias=torch.zeros(1, 3, 12, 12))
    cu_seqlens = torch.tensor([0, 12], dtype=torch.int32, device=DEVICE)
    lengths = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    with pytest.raises(flashzoo.UnsupportedError, match="attention_bias must be None beside packed_seq_params, got a"):
        attend(*[q[:, 0]] * 3, attention_bias=torch.zeros(1, 4, 12, 12), packed_seq_params=lengths)
