"""What autograd may ask, and what traces a call."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashzoo
from flashzoo import UnsupportedError
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.inputs import descales
from flashzoo.reference import Result, visible
from flashzoo.spec import TRANSFORMS
from flashzoo_suite.support import (
    DEVICE,
    accept,
    as_arguments,
    as_operator,
    both,
    detached,
    draw,
    forward,
    lazily_negated,
    seen_by,
    sinks_of,
)

asks = pytest.mark.asks


# What autograd may ask.


@asks(grad=True, heads=4, heads_kv=2, seqlen_k=70)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_inputs_require_grad(version, problem, wanted):
    """Seen in FA #906, PyTorch #136101."""
    tensors, dout, dlse = draw(problem)
    inputs_by_name = dict(zip("qkv", tensors, strict=True))
    leaves = {name: inputs_by_name[name].requires_grad_() for name in wanted}
    result = forward(version, tensors, problem)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), given)
    found = Result(*detached(result), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)})
    accept(Judge(*tensors, problem, dout, dlse), found)


@asks(grad=True, lse=True, causal=True, seqlen_k=70)
def test_gradient_through_lse_alone(version, problem):
    """Seen in the review of cudnn-frontend PR 554: the gradient of a returned LSE was dropped."""
    tensors, dout, dlse = draw(problem)
    leaves = tuple(x.clone().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem)
    gradients = torch.autograd.grad(result.lse, leaves, dlse)
    judge = Judge(*tensors, problem, torch.zeros_like(dout), dlse)
    accept(judge, Result(result.out.detach(), result.lse.detach(), *gradients))


@asks(grad=True, dtype="fp32", lse=False)
def test_double_backward_raises_or_is_right(version, problem):
    """Seen in PyTorch #116350: an autograd.Function gives a wrong second derivative with no error."""
    tensors, dout, _ = draw(problem)

    def second_derivative(attention, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(attention(*leaves), leaves, dout.to(leaves[0].dtype), create_graph=True)
        # Each leaf is in the second loss itself too, so a first derivative that autograd lost track of raises no error.
        return torch.autograd.grad([(x * leaf).sum() for x, leaf in zip(first, leaves, strict=True)], leaves)

    def dense(q, k, v):
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * problem.head_dim**-0.5, -1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    expected = second_derivative(dense, [x.double() for x in tensors])
    try:
        found = second_derivative(lambda q, k, v: flashzoo.attention(q, k, v, version=version), tensors)
    except (NotImplementedError, RuntimeError):
        return
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right.float(), rtol=1e-3, atol=1e-3)


def transformed(kind: str, attention: Callable[[Tensor], Tensor], q: Tensor, tangent: Tensor) -> Tensor:
    """What comes out of a transform of `attention` as a function of q alone."""
    if kind == "dual":
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(attention(forward_ad.make_dual(q, tangent))).tangent
            return torch.full_like(q, torch.nan) if found is None else found
    if kind == "jvp":
        return torch.func.jvp(attention, (q,), (tangent,))[1]
    if kind == "vmap":
        return torch.func.vmap(attention)(torch.stack([q, tangent]))
    if kind == "grad":
        return torch.func.grad(lambda q: (attention(q) * tangent).sum())(q)
    return torch.func.functionalize(attention)(q)


@asks(
    {"plain": {}, "causal": {"causal": True, "seqlen_k": 70}, "gqa": {"heads": 4, "heads_kv": 2}},
    fp8=("fp8",),
    lse=False,
)
@pytest.mark.parametrize("kind", ["dual", "jvp", "vmap", "grad", "functionalize"])
def test_transforms_are_right_or_refused(version, problem, kind):
    """A kernel reads no tangent: v1, v2 and v3 lost them with no error."""
    (q, k, v), tangent, _ = draw(problem)
    spec, name = flashzoo.versions()[version], "jvp" if kind == "dual" else kind
    arguments = as_arguments(problem)

    def dense(q: Tensor) -> Tensor:
        group = problem.heads // problem.heads_kv
        of_keys, of_values = (x.double().repeat_interleave(group, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, of_keys) * problem.head_dim**-0.5
        seen = visible(problem, q.device)
        weights = torch.softmax(scores if seen is None else scores.masked_fill(~seen, -math.inf), -1)
        return torch.einsum("bhij,bjhd->bihd", weights, of_values)

    try:
        found = transformed(kind, lambda q: flashzoo.attention(q, k, v, version=version, **arguments), q, tangent)
    except UnsupportedError as error:
        assert name not in spec.transforms or problem.precision
        if kind == "grad" and spec.backward is None:
            assert f"{version}: has no backward pass" in str(error)
        else:
            assert f"version {version!r} does not support {TRANSFORMS[name].split()[0]}" in str(
                error
            ) and "got q under it" in str(error)
        return
    assert name in spec.transforms, "works, and is not declared"
    expected = transformed(kind, dense, q.double(), tangent.double())
    tolerance = 1e-4 if problem.dtype in ("fp32", "fp64") else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@asks(grad=True, causal=True, lse=False, fp8=("fp8",))
def test_a_dual_gradient_is_right_or_refused(version, problem):
    """The backward pass is linear in it, so its tangents are the gradients of the tangent."""
    tensors, dout, _ = draw(problem)
    tangent = dout.flip(1)
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem)
    with forward_ad.dual_level():
        try:
            found = torch.autograd.grad(result.out, leaves, forward_ad.make_dual(dout, tangent))
        except NotImplementedError:
            return
        found = [forward_ad.unpack_dual(x).tangent for x in found]
    expected = both(version, tensors, problem, tangent)
    torch.testing.assert_close(found, [expected.dq, expected.dk, expected.dv])


@asks({"plain": {}, "mask": {"block_mask": MaskForm(causal=True)}}, both=True, fp8=("fp8",), heads=4, heads_kv=2)
def test_lazily_negated_numbers(version, problem):
    """`z.conj().imag` lies in memory with the other sign, and a kernel reads memory."""
    tensors, dout, dlse = draw(problem)
    lazy, lazy_dout = tuple(lazily_negated(x) for x in tensors), lazily_negated(dout)
    lazy_dlse = None if dlse is None else lazily_negated(dlse)
    judge = Judge(
        *tensors, problem, dout if problem.grad else None, dlse if problem.grad else None, mask=seen_by(problem)
    )
    accept(judge, both(version, lazy, problem, lazy_dout, lazy_dlse))
    assert all(x.is_neg() for x in (*lazy, lazy_dout))


@asks(
    {"fp32": {"dtype": "fp32"}, "fp8": {"dtype": "fp16", "precision": "fp8"}, "e4m3": {"dtype": "e4m3"}},
    both=True,
    causal=True,
)
def test_autocast_changes_nothing(version, problem):
    """Seen in musubi-tuner #1037, diffusers #14104; torch's own attention and matmul round to 16 bits there."""
    tensors, dout, dlse = draw(problem)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        result = both(version, tensors, problem, dout, dlse)
    accept(Judge(*tensors, problem, dout, dlse), result)


@asks(grad=True, causal=True, seqlen_k=70)
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_activation_checkpointing(version, problem, reentrant):
    """The forward pass runs a second time inside the backward pass, in autograd's thread."""
    tensors, dout, dlse = draw(problem)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor, **options):
        return checkpoint(lambda *x: flashzoo.attention(*x, **options), q, k, v, use_reentrant=reentrant)

    # The reentrant kind records nothing of its own, so autograd.grad can't ask it: backward() does.
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem, attention=checkpointed)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    torch.autograd.backward(outputs, given)
    accept(Judge(*tensors, problem, dout, dlse), Result(*detached(result), *(x.grad for x in leaves)))


@asks()
def test_inference_mode(version, problem):
    with torch.inference_mode():
        tensors, *_ = draw(problem)
        result = forward(version, tensors, problem)
    accept(Judge(*tensors, problem), result)


# What traces a call: see test_ops for what no version decides.


BACKENDS = ("aot_eager", "inductor")
TRACED = {
    "plain": {},
    "causal": {"causal": True, "heads": 4, "heads_kv": 2, "seqlen_k": 70},
    "wide_values": {"head_dim_v": 24},
    "sinks": {"sinks": True, "seqlen_k": 70},
}


@pytest.mark.covering(2, "version", "backend")
@asks(TRACED, both=True)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(version, problem, backend):
    """One graph, forward and backward, and the numbers of any other call."""
    torch.compiler.reset()
    tensors, dout, dlse = draw(problem)
    scales = descales(problem, "block" if problem.dtype == "e4m3" else None, device=DEVICE)
    given = (dout, dlse) if problem.grad else (None, None)
    judge = Judge(*tensors, problem, *given, scales, sinks=sinks_of(problem))
    compiled = torch.compile(flashzoo.attention, backend=backend, fullgraph=True)
    for _ in range(2):
        accept(judge, both(version, tensors, problem, dout, dlse, scales, compiled))


@pytest.mark.covering(2, "version", "layout")
@asks(TRACED | {"small": {"seqlen_q": 1, "seqlen_k": 3}}, both=True)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed", "expanded"])
def test_operators_are_what_their_fakes_say(version, problem, layout):
    """Shapes, dtypes and strides; and by `opcheck` that they change no input,
    and that a traced backward pass is the eager one."""
    torch.compiler.reset()
    tensors, dout, dlse = draw(problem, layout=layout)
    arguments, backward_arguments = as_operator(version, tensors, problem, dout, dlse)
    check = torch.library.opcheck
    # The rest of opcheck multiplies, which e4m3 tensors have no kernels for, and takes long.
    whole = layout == "bshd" and problem.dtype != "e4m3"
    tests = {"rtol": 1e-2, "atol": 1e-3} if whole else {"test_utils": "test_faketensor"}
    check(torch.ops.flashzoo.attention.default, (), arguments, **tests)
    if problem.grad:
        check(torch.ops.flashzoo.attention_backward.default, (), backward_arguments, **tests)


@pytest.mark.parametrize("version", ["standard", "sdpa"])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (3, None)}], ids=str)
def test_packed_calls_under_functionalize(version, how):
    q = torch.randn(6, 4, 16, device=DEVICE)
    begins = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)

    def attention(q: Tensor) -> Tensor:
        return flashzoo.attention(q, q, q, cu_seqlens_q=begins, version=version, **how)

    torch.testing.assert_close(torch.func.functionalize(attention)(q), attention(q))


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_vmap_of_descales(name):
    q = torch.randn(2, 3, 4, 16, device=DEVICE, dtype=torch.float16)
    k, v = (torch.randn(2, 40, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv")
    scales = torch.rand(3, 2, 2, device=DEVICE) + 0.5

    def attention(scale: Tensor) -> Tensor:
        return flashzoo.attention(q, k, v, **{name: scale}, version="standard")

    torch.testing.assert_close(torch.func.vmap(attention)(scales), torch.stack([attention(x) for x in scales]))
