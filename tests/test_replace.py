"""`flashzoo.replace_sdpa`: torch's attention, answered by a version: the same numbers, and a report that is true."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flashzoo
from flashzoo import replace
from flashzoo_suite.support import DEVICE, same_bits


def drawn(*shape: int, **how) -> Tensor:
    return torch.randn(shape, device=DEVICE, **how)


def true(*shape: int, share: float = 0.6) -> Tensor:
    return torch.rand(shape, device=DEVICE) < share


def keys_of(batch: int, *lengths: int) -> Tensor:
    """Which keys are no padding, `(batch, 1, 1, keys)`."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).view(batch, 1, 1, -1).to(DEVICE)


def numbers(masked: float) -> Tensor:
    mask = drawn(2, 1, 20, 11)
    mask[:, :, 3:, 2:5] = masked
    return mask.requires_grad_()


def tensors(seqlen_k: int = 20, heads_kv: int = 4) -> list[Tensor]:
    return [drawn(2, h, n, 16, requires_grad=True) for h, n in ((4, 20), (heads_kv, seqlen_k), (heads_kv, seqlen_k))]


SAME = {
    "plain": (20, lambda: {}, ""),
    "scale": (20, lambda: {"scale": 0.3}, ""),
    "causal": (20, lambda: {"is_causal": True}, ""),
    "causal, more keys": (30, lambda: {"is_causal": True}, "without the keys that nothing sees"),
    "causal, fewer keys": (11, lambda: {"is_causal": True}, "by a window"),
    "keys": (11, lambda: {"attn_mask": keys_of(2, 11, 4)}, "seqused_k"),
    "keys with holes": (11, lambda: {"attn_mask": true(2, 1, 1, 11)}, "seqused_k"),
    "keys of all": (11, lambda: {"attn_mask": true(1, 11)}, "seqused_k"),
    "keys, spread": (11, lambda: {"attn_mask": true(2, 1, 1, 11).expand(2, 4, 20, 11)}, "seqused_k"),
    "mask": (11, lambda: {"attn_mask": true(20, 11)}, "block_mask"),
    "mask by batch": (11, lambda: {"attn_mask": true(2, 1, 20, 11)}, "block_mask"),
    "mask by head": (11, lambda: {"attn_mask": true(1, 4, 20, 11)}, "block_mask"),
    "numbers": (11, lambda: {"attn_mask": drawn(2, 4, 20, 11)}, "score_mod"),
    "numbers for all": (11, lambda: {"attn_mask": drawn(20, 11)}, "score_mod"),
    "numbers of keys": (11, lambda: {"attn_mask": drawn(2, 1, 1, 11).expand(2, 4, 20, 11)}, "score_mod"),
    "numbers that mask": (11, lambda: {"attn_mask": numbers(-torch.inf)}, "score_mod"),
    "the least numbers mask": (11, lambda: {"attn_mask": numbers(torch.finfo().min)}, "score_mod"),
    "mask of one key": (1, lambda: {"attn_mask": true(2, 4, 20, 1)}, "block_mask"),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_the_same_as_torch(name, heads_kv):
    seqlen_k, asked, why = SAME[name]
    how = asked() | {"enable_gqa": heads_kv != 4}
    inputs = tensors(seqlen_k, heads_kv)
    expected = F.scaled_dot_product_attention(*inputs, **how)
    with flashzoo.replace_sdpa("standard") as seen:
        out = F.scaled_dot_product_attention(*inputs, **how)
    ((_, who, reason, count),) = seen.calls
    assert (who, count) == ("standard", 1) and why in reason
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    inputs += [x for x in how.values() if isinstance(x, Tensor) and x.requires_grad]
    gradients = (torch.autograd.grad(x.sin().sum(), inputs) for x in (out, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_dropout_is_a_versions():
    q, k, v = tensors(20, 4)
    with flashzoo.replace_sdpa() as seen:
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
    torch.manual_seed(1)
    wanted = flashzoo.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, dropout_p=0.5)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert "dropout_p=0.5" in str(seen) and seen.calls[0].answered_by != "torch"


@pytest.mark.parametrize("shape", [(20, 11), (1, 20, 11), (2, 20, 11), (2, 1, 11)], ids=str)
@pytest.mark.parametrize("make", [drawn, true])
def test_tensors_of_three_dimensions(make, shape):
    q, k, v = (drawn(2, n, 16) for n in (20, 11, 11))
    mask = make(*shape)
    with flashzoo.replace_sdpa("standard") as seen:
        out = F.scaled_dot_product_attention(q, k, v, mask)
        with pytest.raises(RuntimeError, match="shape"):
            F.scaled_dot_product_attention(q, k, v, mask.expand(2, 20, 11)[:, None])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask), rtol=1e-4, atol=1e-5)
    assert [call.answered_by for call in seen.calls] == ["standard", "torch"]


LEFT_TO_TORCH = {
    "dropout_p=1.0": {"dropout_p": 1.0},
    "dropout_p=0.5 beside a mask of pairs": {"dropout_p": 0.5, "attn_mask": torch.ones(20, 20).tril().bool()},
    "as many heads": {"heads_kv": 1},
    "of a subclass|is a Marked": {"marked": True},
    "dimensions": {"ndim": 5},
    "sizes that are broadcast": {"batch_k": 1},
    "beside is_causal": {"attn_mask": torch.ones(20, 20).bool(), "is_causal": True},
    "version 'v2' can't take": {"version": "v2", "head_dim": 264},
}


class Marked(Tensor):
    """A subclass with an attention of its own, for all that is known."""


def _out_or_error(*inputs: Tensor, **how: Any) -> Any:
    """torch 2.14 refuses what 2.13 takes."""
    try:
        return F.scaled_dot_product_attention(*inputs, **how)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("reason", LEFT_TO_TORCH)
def test_what_is_left_to_torch_says_why(reason):
    given = dict(LEFT_TO_TORCH[reason])
    head_dim, version = given.pop("head_dim", 16), given.pop("version", "auto")
    q, k, v = (drawn(2, 4, 20, head_dim) for _ in "qkv")
    if "heads_kv" in given:
        k, v = k[:, : given["heads_kv"]], v[:, : given["heads_kv"]]
    if "batch_k" in given:
        k, v = k[:1], v[:1]
    if "marked" in given:
        q = q.as_subclass(Marked)
    if "ndim" in given:
        q, k, v = q[None], k[None], v[None]
    how = {
        name: x.to(DEVICE) if isinstance(x, Tensor) else x
        for name, x in given.items()
        if name[-2:] in ("sk", "_p", "al")
    }
    torch.manual_seed(0)
    expected = _out_or_error(q, k, v, **how)
    torch.manual_seed(0)
    with flashzoo.replace_sdpa(version) as seen:
        out = _out_or_error(q, k, v, **how)
    if isinstance(out, str):
        assert out == expected and reason == "beside is_causal"
    else:
        assert same_bits(out.as_subclass(Tensor), expected.as_subclass(Tensor))
    (call,) = seen.calls
    assert call.answered_by == "torch" and any(text in call.why for text in reason.split("|")), str(call)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout):
    rows = [drawn(n, 4, 16) if layout == torch.jagged else drawn(4, n, 16) for n in (5, 7)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    x = x.transpose(1, 2) if layout == torch.jagged else x
    expected = F.scaled_dot_product_attention(x, x, x)
    with flashzoo.replace_sdpa() as seen:
        out = F.scaled_dot_product_attention(x, x, x)
    assert all(same_bits(a, b) for a, b in zip(out.unbind(), expected.unbind(), strict=True))
    (call,) = seen.calls
    assert call.answered_by == "torch" and "query is" in call.why and "ested" in str(call)


def test_torchs_own_errors_are_torchs():
    q, k, v = (drawn(2, 4, 20, 16) for _ in "qkv")
    for dtype in (torch.float64, torch.int64):
        with flashzoo.replace_sdpa() as seen, pytest.raises(RuntimeError, match="dtype"):
            F.scaled_dot_product_attention(q, k, v, torch.ones(20, 20, dtype=dtype, device=DEVICE))
        assert f"attn_mask of {dtype} beside torch.float32" in str(seen)
    with flashzoo.replace_sdpa() as seen, pytest.raises(RuntimeError, match="size"):
        F.scaled_dot_product_attention(q, k[..., :8], v)
    (call,) = seen.calls
    assert call.answered_by == "torch" and "k must have q's head_dim 16, got 8" in call.why
    with flashzoo.replace_sdpa("v2") as seen:
        F.scaled_dot_product_attention(*[x.double() for x in (q, k, v)])
    assert "v2: takes dtype" in seen.calls[0].why
    with pytest.raises(ValueError, match="version must be 'auto' or one of"):
        flashzoo.replace_sdpa("v9")


def test_a_mask_is_worked_out_once_until_it_changes():
    q, k, v = (drawn(2, 4, 20, 16) for _ in "qkv")
    mask, keys = true(2, 1, 20, 20), keys_of(2, 20, 7)
    with flashzoo.replace_sdpa("standard") as seen:
        for attn_mask in (mask, keys):
            F.scaled_dot_product_attention(q, k, v, attn_mask)
            kept = list(seen._masks.values())[-1]
            F.scaled_dot_product_attention(q, k, v, attn_mask)
            assert list(seen._masks.values())[-1] is kept
            attn_mask.logical_not_()
            F.scaled_dot_product_attention(q, k, v, attn_mask)
            kept = list(seen._masks.values())[-1]
            attn_mask.data = ~attn_mask  # which torch does not count
            out = F.scaled_dot_product_attention(q, k, v, attn_mask)
            assert list(seen._masks.values())[-1] is not kept
            torch.testing.assert_close(out, flashzoo.attention(*_turned(q, k, v), **_as(attn_mask)).transpose(1, 2))
        assert [call.count for call in seen.calls] == [4, 4]
        for _ in range(20):
            F.scaled_dot_product_attention(q, k, v, true(20, 20))
        assert len(seen._masks) <= 8


BACKWARD = {
    "Tensor.backward": lambda loss, leaves: loss.backward(),
    "autograd.backward": lambda loss, leaves: torch.autograd.backward(loss),
    "autograd.grad": lambda loss, leaves: [
        setattr(x, "grad", gradient) for x, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True)
    ],
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("begin", BACKWARD)
@pytest.mark.parametrize("how", [{}, {"dropout_p": 0.4}], ids=["plain", "dropout"])
def test_a_checkpoint_in_a_backward_pass_computes_the_same_again(begin, reentrant, how):
    if reentrant and begin == "autograd.grad":
        pytest.skip("torch's reentrant checkpoints are for backward")

    def gradients(checkpointed: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        leaves = tensors()

        def attend(*inputs: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True, **how)

        with flashzoo.replace_sdpa("standard") as seen:
            out = checkpoint(attend, *leaves, use_reentrant=reentrant) if checkpointed else attend(*leaves)
            BACKWARD[begin](out.square().sum(), leaves)
        assert {call.answered_by for call in seen.calls} == {"standard"}
        return [x.grad for x in leaves]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_a_model_without_data_is_torchs():
    layer = nn.MultiheadAttention(32, 4, batch_first=True, device="meta")
    x = torch.empty(2, 7, 32, device="meta")
    with flashzoo.replace_sdpa() as seen:
        assert layer(x, x, x, need_weights=False)[0].shape == x.shape
    (call,) = seen.calls
    assert call.answered_by == "torch" and "query has no data" in call.why


def _turned(*inputs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in inputs]


def _as(mask: Tensor) -> dict:
    mask = mask.expand(2, 1, 20, 20)
    return {"block_mask": flashzoo.BlockMask.from_dense(mask.contiguous()), "version": "standard"}


def test_autocast_casts_as_torchs_does():
    q, k = (drawn(2, 4, 20, 16) for _ in "qk")
    v = drawn(2, 4, 20, 16, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v)
        with flashzoo.replace_sdpa("standard") as seen:
            out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == expected.dtype == torch.bfloat16 and seen.calls[0].answered_by == "standard"
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo().min, -1e4])
def test_a_mask_of_numbers_is_cast_by_autocast(masked):
    q, k, v = (drawn(2, 4, 20, 16) for _ in "qkv")
    mask = drawn(2, 1, 20, 20)
    mask[..., 3:9] = masked
    mask.requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        with sdpa_kernel(SDPBackend.MATH):  # torch's cuDNN refuses the gradient of such a mask
            expected = F.scaled_dot_product_attention(q, k, v, mask)
        with flashzoo.replace_sdpa("standard") as seen:
            out = F.scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == expected.dtype == torch.bfloat16 and seen.calls[0].answered_by == "standard"
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    found, wanted = (torch.autograd.grad(x.float().sin().sum(), mask)[0] for x in (out, expected))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


def test_a_row_that_a_mask_of_numbers_hides_gives_0():
    q = drawn(2, 4, 20, 16)
    for masked in (-torch.inf, torch.finfo().min):
        mask = torch.zeros(20, 20, device=DEVICE)
        mask[3] = masked
        with flashzoo.replace_sdpa("standard"):
            out = F.scaled_dot_product_attention(q, q, q, mask)
        assert (out[:, :, 3] == 0).all() and (out[:, :, 4] != 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_modules_of_torch_run_unchanged(training):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).to(DEVICE).train(training)
    x = drawn(2, 9, 32)
    expected = layer(x)
    with flashzoo.replace_sdpa("standard") as seen:
        out = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-5)
    assert [call.answered_by for call in seen.calls] == ["standard"]
    heads = nn.MultiheadAttention(32, 4, batch_first=True).to(DEVICE).train(training)
    how = {"need_weights": False, "key_padding_mask": ~keys_of(2, 9, 4)[:, 0, 0]}
    expected, _ = heads(x, x, x, **how)
    with flashzoo.replace_sdpa("standard") as seen:
        heads(x, x, x, need_weights=False)
        out, _ = heads(x, x, x, **how)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-5)
    assert [call.answered_by for call in seen.calls] == ["standard", "standard"]
    assert "score_mod" in seen.calls[1].why


def test_a_version_that_is_named_is_not_replaced():
    """Not `sdpa` either, which is the function that is."""
    q, k, v = (x.transpose(1, 2).detach() for x in tensors())
    alone = flashzoo.attention(q, k, v, version="sdpa")
    with flashzoo.replace_sdpa("standard") as calls:
        assert same_bits(flashzoo.attention(q, k, v, version="sdpa"), alone)
    assert calls.calls == ()


def test_modules_of_torch_may_be_compiled():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).to(DEVICE)
    x = drawn(2, 9, 32)
    with flashzoo.replace_sdpa("standard"):
        out = torch.compile(layer, backend="aot_eager")(x)
    torch.testing.assert_close(out, layer(x), rtol=1e-3, atol=1e-5)


def test_compiled_in_one_graph():
    def attend(x):
        q, k, v = x.view(2, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    x, graphs = drawn(2, 20, 192), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    expected = attend(x)
    with flashzoo.replace_sdpa("standard"):
        out = torch.compile(attend, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1 and "flashzoo.attention" in graphs[0] and "scaled_dot" not in graphs[0]


def test_a_mask_of_numbers_in_a_graph_is_left_to_torch():
    q, mask, graphs = drawn(2, 4, 20, 16), drawn(20, 20), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    expected = F.scaled_dot_product_attention(q, q, q, mask)
    with flashzoo.replace_sdpa("standard"):
        out = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend=backend)(q, q, q, mask)
    torch.testing.assert_close(out, expected)
    assert len(graphs) == 1 and "scaled_dot" in graphs[0]


def test_it_ends_where_it_ends_and_is_of_its_thread():
    q, k, v = (drawn(2, 4, 20, 16) for _ in "qkv")
    function = F.scaled_dot_product_attention
    with flashzoo.replace_sdpa() as seen:
        other = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, k, v))
        other.start()
        other.join()
        assert F.scaled_dot_product_attention is function
    F.scaled_dot_product_attention(q, k, v)
    assert seen.calls == () and str(seen) == "no call of scaled_dot_product_attention"


def test_a_backward_pass_enters_no_mode_anew():
    q = drawn(2, 4, 20, 16).requires_grad_()
    with flashzoo.replace_sdpa() as outer:
        with flashzoo.replace_sdpa("standard") as inner:
            out = F.scaled_dot_product_attention(q, q, q)
        out.sum().backward()
    assert flashzoo.last_calls() == inner.calls != outer.calls


def test_kinds_of_call_are_told_apart_up_to_a_number(monkeypatch):
    monkeypatch.setattr(replace, "MOST_KINDS", 2)
    with flashzoo.replace_sdpa() as seen:
        for seqlen in (1, 2, 3, 4, 1):
            x = drawn(1, 1, seqlen, 8)
            F.scaled_dot_product_attention(x, x, x)
    assert [call.count for call in seen.calls] == [2, 1, 2] and "further kinds" in str(seen.calls[-1])


def test_install_and_uninstall():
    q, k, v = (drawn(2, 4, 20, 16) for _ in "qkv")
    flashzoo.uninstall()
    flashzoo.install("standard")
    try:
        F.scaled_dot_product_attention(q, k, v)
        (call,) = flashzoo.last_calls()
        assert call.answered_by == "standard" and "query (2, 4, 20, 16)" in str(call)
        flashzoo.install("standard")
        assert flashzoo.last_calls() == ()
        with flashzoo.replace_sdpa(), pytest.raises(RuntimeError, match="expected the mode that install"):
            flashzoo.uninstall()
    finally:
        flashzoo.uninstall()
    F.scaled_dot_product_attention(q, k, v)
    assert flashzoo.last_calls() == ()


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"enable_gqa": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("version", ["auto", "standard", "sdpa"])
def test_gradcheck_through_sdpa(version, how):
    """In float64, with gradients that are not defined among them, and batches of gradients."""
    inputs = [
        torch.randn(1, 1 if how.get("enable_gqa") and name != "q" else 2, 3, 2, dtype=torch.float64, device=DEVICE)
        for name in "qkv"
    ]
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda q, k, v: flashzoo.sdpa(q, k, v, version=version, **how), inputs, check_batched_grad=True
    )
