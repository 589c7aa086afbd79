"""What a call means, and what bad input gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashzoo
from flashzoo import UnsupportedError
from flashzoo.call.problem import DTYPES
from flashzoo.workloads import TORCH_DTYPES
from flashzoo_suite.support import CALLS, lazily_negated, toy


@pytest.fixture(autouse=True)
def _apart(registry_as_it_was):
    """Set up before what a class registers for its tests."""


def _changed(**changes):
    """q, k, v of a good call with these in place of the good ones."""
    return {name: torch.randn(2, 6, 4, 8) for name in "qkv"} | changes


def _fp8(**changes):
    """The same in e4m3."""
    return {name: torch.randn(2, 6, 4, 8).to(torch.float8_e4m3fn) for name in "qkv"} | changes


def _nested(layout):
    return torch.nested.nested_tensor([torch.randn(5, 4, 8), torch.randn(6, 4, 8)], layout=layout)


BAD_INPUT = {
    "q is no tensor": ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor, got list"),
    "k is no tensor": ({"k": None}, TypeError, r"k must be a torch.Tensor, got NoneType"),
    "v is an array": ({"v": np.zeros((2, 6, 4, 8), np.float32)}, TypeError, r"v must be a torch.Tensor, got ndarray"),
    "v is sparse": (
        {"v": torch.zeros(2, 6, 4, 8).to_sparse()},
        TypeError,
        r"v must be a dense tensor .* got torch.sparse_coo",
    ),
    "q is sparse by rows": (
        {"q": torch.zeros(6, 8).to_sparse_csr()},
        TypeError,
        r"q must be a dense tensor \(torch.strided\), got torch.sparse_csr: call to_dense\(\)",
    ),
    "k is sparse by columns": (
        {"k": torch.zeros(6, 8).to_sparse_csc()},
        TypeError,
        r"k must be a dense tensor .* got torch.sparse_csc",
    ),
    "v is nested": (
        {"v": _nested(torch.strided)},
        TypeError,
        r"v must be a dense tensor .* got a nested one .*: pad it with",
    ),
    "q alone is nested by offsets": (
        {"q": _nested(torch.jagged)},
        TypeError,
        r"k must be a nested tensor of layout torch.jagged, as all three or none, got Tensor torch.strided",
    ),
    "no data": (
        dict.fromkeys("qkv", torch.empty(2, 6, 4, 8, device="meta")),
        ValueError,
        r"q, k and v must have data, got device meta: flashzoo.explain answers about such tensors",
    ),
    "q has rank 3": ({"q": torch.randn(6, 4, 8)}, ValueError, r"q must have 4 dimensions .* got shape \(6, 4, 8\)"),
    "k has rank 5": (
        {"k": torch.randn(1, 2, 6, 4, 8)},
        ValueError,
        r"k must have 4 dimensions .* got shape \(1, 2, 6, 4, 8\)",
    ),
    "v has rank 0": ({"v": torch.tensor(1.0)}, ValueError, r"v must have 4 dimensions .* got shape \(\)"),
    "batches differ": (
        {"q": torch.randn(3, 6, 4, 8)},
        ValueError,
        r"k must have q's batch 3, got 2 .*q \(3, 6, 4, 8\)",
    ),
    "k and v batches differ": (
        {"v": torch.randn(1, 6, 4, 8)},
        ValueError,
        r"v must have k's batch, seqlen and heads \(2, 6, 4\), got \(1, 6, 4\) \(q .*, k .*, v \(1, 6, 4, 8\)\)",
    ),
    "k and v lengths differ": (
        {"v": torch.randn(2, 5, 4, 16)},
        ValueError,
        r"v must have k's batch, seqlen and heads \(2, 6, 4\), got \(2, 5, 4\) \(q .*, k .*, v \(2, 5, 4, 16\)\)",
    ),
    "k and v heads differ": (
        {"v": torch.randn(2, 6, 2, 8)},
        ValueError,
        r"v must have k's batch, seqlen and heads \(2, 6, 4\), got \(2, 6, 2\)",
    ),
    "head dims differ": ({"q": torch.randn(2, 6, 4, 16)}, ValueError, r"k must have q's head_dim 16, got 8"),
    "heads do not divide": (
        {"q": torch.randn(2, 6, 6, 8)},
        ValueError,
        r"q's heads must be a multiple of k's, got 6 and 4",
    ),
    "more key heads than query heads": (
        {"q": torch.randn(2, 6, 2, 8)},
        ValueError,
        r"q's heads must be a multiple of k's, got 2 and 4",
    ),
    "no heads": (dict.fromkeys("qkv", torch.randn(2, 6, 0, 8)), ValueError, r"heads and head_dim must be at least 1"),
    "no head dim": (
        dict.fromkeys("qkv", torch.randn(2, 6, 4, 0)),
        ValueError,
        r"heads and head_dim must be at least 1",
    ),
    "no head dim of v": (
        {"v": torch.randn(2, 6, 4, 0)},
        ValueError,
        r"heads and head_dim must be at least 1, got .* v \(2, 6, 4, 0\)",
    ),
    "integers": (
        dict.fromkeys("qkv", torch.zeros(2, 6, 4, 8, dtype=torch.int32)),
        TypeError,
        r"must be of dtype fp16, .* got q torch.int32",
    ),
    "complex": (
        dict.fromkeys("qkv", torch.zeros(2, 6, 4, 8, dtype=torch.complex64)),
        TypeError,
        r"must be of dtype fp16, .* got q torch.complex64",
    ),
    "q and k dtypes differ": (
        {"q": torch.randn(2, 6, 4, 8).half()},
        TypeError,
        r"must have one dtype, got q torch.float16, k torch.float32, v torch.float32",
    ),
    "v dtype differs": (
        {"v": torch.randn(2, 6, 4, 8).bfloat16()},
        TypeError,
        r"must have one dtype, got .* v torch.bfloat16",
    ),
    "devices differ": (
        {"k": torch.empty(2, 6, 4, 8, device="meta")},
        ValueError,
        r"must be on one device, got q cpu, k meta, v cpu",
    ),
    "q's last dimension is strided": (
        {"q": torch.randn(2, 6, 8, 4).transpose(2, 3)},
        ValueError,
        r"q must be contiguous in its last dimension \(stride 1\), got stride 4",
    ),
    "v's last dimension is expanded": (
        {"v": torch.randn(2, 6, 4, 1).expand(2, 6, 4, 8)},
        ValueError,
        r"v must be contiguous in its last dimension \(stride 1\), got stride 0",
    ),
    "scale is NaN": ({"softmax_scale": math.nan}, ValueError, r"softmax_scale must be finite, got nan"),
    "scale is too large": (
        {"softmax_scale": -1e31},
        ValueError,
        r"softmax_scale must be at most 1e\+30 in size, got -1e\+31",
    ),
    "scale is infinite": ({"softmax_scale": -math.inf}, ValueError, r"softmax_scale must be finite, got -inf"),
    "scale is a string": ({"softmax_scale": "0.1"}, TypeError, r"softmax_scale must be a float or None, got str"),
    "scale is a tensor": (
        {"softmax_scale": torch.tensor(0.1)},
        TypeError,
        r"softmax_scale must be a float or None, got Tensor",
    ),
    "scale is a list": ({"softmax_scale": [0.1]}, TypeError, r"softmax_scale must be a float or None, got list"),
    "scale is past floats": (
        {"softmax_scale": 10**400},
        ValueError,
        r"softmax_scale must be at most 1e\+30 in size, got 10000",
    ),
    "scale is a bool": ({"softmax_scale": True}, TypeError, r"softmax_scale must be a float or None, got bool"),
    "causal is a number": ({"causal": 1}, TypeError, r"causal must be a bool, got 1"),
    "causal is a word": ({"causal": "False"}, TypeError, r"causal must be a bool, got 'False'"),
    "causal is a list": ({"causal": [True]}, TypeError, r"causal must be a bool, got \[True\]"),
    "causal is a tensor": ({"causal": torch.tensor(True)}, TypeError, r"causal must be a bool, got tensor\(True"),
    "causal is NumPy's": ({"causal": np.bool_(True)}, TypeError, r"causal must be a bool, got (np\.)?True"),
    "causal is None": ({"causal": None}, TypeError, r"causal must be a bool, got None"),
    "deterministic is a string": ({"deterministic": "yes"}, TypeError, r"deterministic must be a bool, got 'yes'"),
    "deterministic is a list": ({"deterministic": []}, TypeError, r"deterministic must be a bool, got \[\]"),
    "return_lse is a list": ({"return_lse": [True]}, TypeError, r"return_lse must be a bool, got \[True\]"),
    "return_lse is a number": ({"return_lse": 1}, TypeError, r"return_lse must be a bool, got 1"),
    "window is a number": ({"window_size": 4}, ValueError, r"window_size must be None or a pair .* got 4"),
    "window has three sides": (
        {"window_size": (1, 2, 3)},
        ValueError,
        r"window_size must be None or a pair .* got \(1, 2, 3\)",
    ),
    "window is below -1": (
        {"window_size": (-2, 0)},
        ValueError,
        r"window_size must be None or a pair .* got \(-2, 0\)",
    ),
    "window is past 64 bits": (
        {"window_size": (0, 2**63)},
        ValueError,
        r"window_size must be .* from 0 to 2\*\*63 - 1, got \(0, 9223372036854775808\)",
    ),
    "window is fractional": (
        {"window_size": (1.5, 0)},
        ValueError,
        r"window_size must be None or a pair .* got \(1.5, 0\)",
    ),
    "window is whole, but fractional": (
        {"window_size": (1.0, 0)},
        ValueError,
        r"window_size must be None or a pair .* got \(1.0, 0\)",
    ),
    "window of bools": (
        {"window_size": (True, 0)},
        ValueError,
        r"window_size must be None or a pair .* got \(True, 0\)",
    ),
    "window far past 64 bits": (
        {"window_size": (1 << 200, 0)},
        ValueError,
        r"window_size must be .* from 0 to 2\*\*63 - 1, got \(16069",
    ),
    "mask is dense": (
        {"block_mask": torch.ones(6, 6, dtype=torch.bool)},
        TypeError,
        r"block_mask must be a flashzoo.BlockMask or None, got Tensor",
    ),
    "mask is a list": ({"block_mask": [1]}, TypeError, r"block_mask must be a flashzoo.BlockMask or None, got list"),
    "mask is a class": (
        {"block_mask": flashzoo.BlockMask},
        TypeError,
        r"block_mask must be a flashzoo.BlockMask or None, got type",
    ),
    "version is unknown": ({"version": "v9"}, ValueError, r"version must be 'auto' or one of .*, got 'v9'"),
    "version is None": ({"version": None}, ValueError, r"version must be 'auto' or one of .*, got None"),
    "precision is unknown": ({"precision": "int8"}, ValueError, r"precision must be None or 'fp8', got 'int8'"),
    "precision is a list": ({"precision": ["fp8"]}, ValueError, r"precision must be None or 'fp8', got \['fp8'\]"),
    "precision is a dtype": (
        {"precision": torch.float8_e4m3fn},
        ValueError,
        r"precision must be None or 'fp8', got torch.float8_e4m3fn",
    ),
    "precision of fp32": (
        {"precision": "fp8"},
        TypeError,
        r"precision='fp8' quantises fp16 or bf16 inputs, got q torch.float32",
    ),
    "precision of e4m3": (
        _fp8(precision="fp8"),
        TypeError,
        r"precision='fp8' quantises fp16 or bf16 inputs, got q torch.float8_e4m3fn",
    ),
    "out_dtype is a string": (
        _fp8(out_dtype="bf16"),
        TypeError,
        r"out_dtype must be None or a torch.dtype of fp16, .*, got 'bf16'",
    ),
    "out_dtype is a list": (_fp8(out_dtype=[]), TypeError, r"out_dtype must be None or .* got \[\]"),
    "out_dtype of e4m3": (
        _fp8(out_dtype=torch.float32),
        TypeError,
        r"out_dtype of torch.float8_e4m3fn inputs must be None, torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "out_dtype of fp32": (
        {"out_dtype": torch.float16},
        TypeError,
        r"out_dtype of torch.float32 inputs must be None or torch.float32, got torch.float16",
    ),
    "a descale of fp32": (
        {"q_descale": torch.ones(2, 4)},
        ValueError,
        r"q_descale is for e4m3 inputs .* got it with fp32 ones",
    ),
    "a descale is a number": (_fp8(v_descale=1.0), TypeError, r"v_descale must be a torch.Tensor or None, got float"),
    "a descale of another dtype": (
        _fp8(k_descale=torch.ones(2, 4).half()),
        TypeError,
        r"k_descale must be of dtype torch.float32, got torch.float16",
    ),
    "a descale elsewhere": (
        _fp8(k_descale=torch.ones(2, 4, device="meta")),
        ValueError,
        r"k_descale must be on q's device cpu, got meta",
    ),
    "a descale with a gradient": (
        _fp8(q_descale=torch.ones(2, 4, requires_grad=True)),
        ValueError,
        r"q_descale has no gradient",
    ),
    "a descale of another batch": (
        _fp8(q_descale=torch.ones(1, 4)),
        ValueError,
        r"q_descale must have shape \(batch, heads_kv\) \(2, 4\), or \(batch, heads, blocks of 128 rows\) \(2, 4, 1\), "
        r"got \(1, 4\)",
    ),
    "a descale for each row": (
        _fp8(v_descale=torch.ones(2, 4, 6)),
        ValueError,
        r"v_descale must have shape .*heads_kv, .* got \(2, 4, 6\)",
    ),
    "a single descale": (_fp8(k_descale=torch.ones(())), ValueError, r"k_descale must have shape .* got \(\)"),
    "sinks are numbers": ({"sinks": [0.0] * 4}, TypeError, r"sinks must be a torch.Tensor or None, got list"),
    "sinks of another dtype": (
        {"sinks": torch.zeros(4, dtype=torch.int32)},
        TypeError,
        r"sinks must be of dtype torch.float32, torch.bfloat16, torch.float16, torch.float64, got torch.int32",
    ),
    "sinks wider than the inputs": (
        {"sinks": torch.zeros(4, dtype=torch.float64)},
        TypeError,
        r"sinks of dtype torch.float64 go with inputs of fp64, got them with fp32 ones",
    ),
    "sinks of other heads": (
        {"sinks": torch.zeros(2)},
        ValueError,
        r"sinks must have shape \(heads,\) \(4,\), got \(2,\)",
    ),
    "sinks for each batch": (
        {"sinks": torch.zeros(2, 4)},
        ValueError,
        r"sinks must have shape \(heads,\) \(4,\), got \(2, 4\)",
    ),
    "sinks elsewhere": (
        {"sinks": torch.zeros(4, device="meta")},
        ValueError,
        r"sinks must be on q's device cpu, got meta",
    ),
    "e4m3 mixed": (_fp8(v=torch.randn(2, 6, 4, 8).half()), TypeError, r"must have one dtype, got .* v torch.float16"),
    "an argument nobody knows": ({"dropout_p": 0.1}, TypeError, r"unexpected keyword argument 'dropout_p'"),
}


class TestBadInput:
    @pytest.mark.parametrize("case", BAD_INPUT)
    def test_is_refused_before_any_launch(self, case):
        changes, error, text = BAD_INPUT[case]
        flashzoo.register(toy(dtypes=DTYPES, cpu_dtypes=DTYPES, quantizes=("fp16", "bf16")), before="v3")
        with pytest.raises(error, match=text):
            flashzoo.attention(**_changed(**changes))
        assert CALLS == []

    @pytest.mark.parametrize(
        ("good", "bad"),
        [
            ({"causal": True}, {"causal": 1}),
            ({"causal": False}, {"causal": 0}),
            ({"deterministic": True}, {"deterministic": 1.0}),
            ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ],
        ids=str,
    )
    def test_is_refused_after_an_equal_good_call(self, good, bad):
        """1 == True, so a cache keyed on equality lets the second call through."""
        flashzoo.register(toy(), before="v3")
        flashzoo.attention(**_changed(**good))
        with pytest.raises((TypeError, ValueError)):
            flashzoo.attention(**_changed(**bad))

    @pytest.mark.parametrize("case", [case for case in BAD_INPUT if case not in ("no data", "k is no tensor")])
    def test_is_refused_by_explain(self, case):
        changes, error, text = BAD_INPUT[case]
        with pytest.raises(error, match=text):
            flashzoo.explain(**_changed(**changes))

    def test_a_window_of_64_bits_is_unbounded(self, qkv):
        for version in ("sdpa", "standard"):
            found = flashzoo.attention(*qkv, window_size=((1 << 63) - 1, (1 << 63) - 1), version=version)
            assert torch.equal(found, flashzoo.attention(*qkv, version=version))

    def test_is_refused_again(self):
        for _ in range(2):
            with pytest.raises(ValueError, match="got 'v9'"):
                flashzoo.attention(**_changed(version="v9"))

    def test_mixed_dtypes_under_autocast_are_refused_not_cast(self, qkv):
        q, k, v = qkv
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="must have one dtype"):
            flashzoo.attention(q, k, v.bfloat16())

    def test_tensors_are_positional_and_options_are_not(self, qkv):
        with pytest.raises(TypeError, match="positional"):
            flashzoo.attention(*qkv, True)

    def test_a_last_dimension_of_one_has_no_stride(self):
        q = torch.randn(1, 3, 2, 4)[..., ::4]
        assert flashzoo.attention(q, q, q).shape == (1, 3, 2, 1)


class TestMeaning:
    """What arguments are taken to mean, by whichever version answers."""

    def test_scale_defaults_to_one_over_root_head_dim(self, qkv):
        flashzoo.register(toy())
        assert torch.equal(flashzoo.attention(*qkv, version="toy"), qkv[0] * (1 / math.sqrt(8)))

    @pytest.mark.parametrize("scale", [0.0, -0.0, 1e-46, -1e-300])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_at_a_scale_of_zero_every_key_that_is_seen_counts_alike(self, dtype, scale):
        """By default, which is torch, whose masks that scale must not reach; what is not 0 here is in 32 bits."""
        q, k, v = (torch.randn(2, 24, 4, 16).to(dtype).requires_grad_() for _ in range(3))
        out = flashzoo.attention(q, k, v, causal=True, softmax_scale=scale)
        seen = torch.arange(1, 25)[:, None, None]
        torch.testing.assert_close(out.double(), v.double().cumsum(1) / seen, rtol=0, atol=4 * torch.finfo(dtype).eps)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert max(dq.abs().max(), dk.abs().max()) <= 100 * abs(scale)
        expected = (1 / seen.double()).flip(0).cumsum(0).flip(0).expand_as(v)
        torch.testing.assert_close(dv.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)

    def test_v_sets_the_width_of_out_and_not_the_scale(self, qkv):
        q, k, _ = qkv
        v = torch.randn(2, 6, 4, 32)
        out = flashzoo.attention(q, k, v)
        assert out.shape == v.shape
        torch.testing.assert_close(out, flashzoo.attention(q, k, v, softmax_scale=8**-0.5))
        assert flashzoo.explain(q, k, v).problem.head_dim_v == 32

    @pytest.mark.parametrize("window", [None, (None, None), (-1, -1), (-1, None), [-1, None]], ids=str)
    def test_none_and_minus_one_both_mean_unbounded(self, window, qkv):
        flashzoo.register(toy())
        flashzoo.attention(*qkv, window_size=window, version="toy")
        assert CALLS[0].window == (None, None)

    def test_defaults_are_their_explicit_values(self, qkv):
        explicit = {
            "causal": False,
            "softmax_scale": 8**-0.5,
            "window_size": (None, None),
            "deterministic": False,
            "return_lse": False,
        }
        assert torch.equal(flashzoo.attention(*qkv), flashzoo.attention(*qkv, **explicit, version="auto"))

    def test_grad_is_asked_for_only_where_autograd_records(self, qkv):
        flashzoo.register(toy())
        q, k, v = qkv
        flashzoo.attention(q, k, v, version="toy")
        flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        with torch.no_grad():
            flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        with torch.inference_mode():
            flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        assert [problem.grad for problem in CALLS] == [False, True, False, False]


class TestTransforms:
    """What every version is held to there is in THE suite."""

    @pytest.fixture(autouse=True)
    def _toys(self):
        flashzoo.register(toy("plain"))
        flashzoo.register(toy("composed", transforms=frozenset({"jvp", "vmap"})))

    def test_a_version_that_declares_none_is_refused_with_those_that_would_do(self, qkv):
        q, k, v = qkv
        text = (
            r"version 'plain' does not support torch.func.vmap, got q, v under it\nversions that would: "
            r"sdpa, standard, composed"
        )
        with pytest.raises(UnsupportedError, match=text):
            torch.func.vmap(lambda q: flashzoo.attention(q, k, q, version="plain"))(torch.stack([q, q]))
        assert CALLS == []
        torch.func.vmap(lambda q: flashzoo.attention(q, k, v, version="composed"))(torch.stack([q, q]))
        assert len(CALLS) == 1

    def test_tensors_beside_a_transform_are_not_under_it(self, qkv):
        with torch.autograd.forward_ad.dual_level():
            flashzoo.attention(*qkv, version="plain")
        torch.func.vmap(lambda x: flashzoo.attention(*qkv, version="plain").sum() + x)(torch.ones(2))
        assert len(CALLS) == 2

    def test_auto_names_who_would_do(self, qkv):
        q, k, v = qkv
        with pytest.raises(
            UnsupportedError, match=r"version 'sdpa' does not support forward-mode AD .*\nversions that would: standard"
        ):
            torch.func.jvp(lambda q: flashzoo.attention(q, k, v), (q,), (q,))

    def test_where_nobody_would_do(self, qkv):
        with pytest.raises(UnsupportedError, match="no registered version would: call it outside of that"):
            torch.func.hessian(lambda q: flashzoo.attention(q, *qkv[1:]).sum())(qkv[0])

    def test_an_input_that_requires_grad_within_torch_func(self, qkv):
        k = qkv[1].requires_grad_()
        text = "version 'standard' does not support gradients within torch.func .*, got inputs that require grad"
        with pytest.raises(UnsupportedError, match=text):
            torch.func.vmap(lambda x: x * flashzoo.attention(k, k, k, version="standard").sum())(torch.ones(2))

    @pytest.mark.parametrize("precision", ["fp8", None])
    def test_no_tangent_goes_through_fp8(self, precision):
        x = torch.randn(1, 6, 2, 16).half()
        with torch.autograd.forward_ad.dual_level():
            if precision:
                arguments = {"q": torch.autograd.forward_ad.make_dual(x, x), "k": x, "v": x, "precision": precision}
            else:
                scale = torch.autograd.forward_ad.make_dual(torch.ones(1, 2), torch.ones(1, 2))
                arguments = dict.fromkeys("qkv", x.to(torch.float8_e4m3fn)) | {"k_descale": scale}
            with pytest.raises(
                UnsupportedError, match=r"'standard' does not support forward-mode AD .*, got (q|k_descale) under it"
            ):
                flashzoo.attention(**arguments)


DESCALES_SEEN = []


def record_descales(q, k, v, problem, operands):
    CALLS.append(problem)
    DESCALES_SEEN.append(operands.descales)
    return q.to(TORCH_DTYPES[problem.out_dtype]), None


class TestFp8:
    @pytest.fixture(autouse=True)
    def _registered(self):
        """Versions that note what they get."""
        DESCALES_SEEN.clear()
        flashzoo.register(toy("fp8", impl=f"{__name__}:record_descales", dtypes=("e4m3",), cpu_dtypes=("e4m3",)))
        flashzoo.register(toy("quantizing", quantizes=("fp16", "bf16")))

    @pytest.mark.parametrize("kind", [None, "head", "block"])
    def test_a_version_gets_the_descales_as_they_are(self, kind):
        shapes = {None: [None] * 3, "head": [(2, 4)] * 3, "block": [(2, 4, 1)] * 3}[kind]
        given = tuple(None if shape is None else torch.rand(shape) for shape in shapes)
        names = dict(zip(("q_descale", "k_descale", "v_descale"), given, strict=True))
        out = flashzoo.attention(**_fp8(**names), version="fp8")
        assert out.dtype == torch.bfloat16 and len(DESCALES_SEEN) == 1
        assert all(found is x for found, x in zip(DESCALES_SEEN[0], given, strict=True))

    def test_lazy_negatives_are_resolved_before_a_version_gets_them(self):
        given = dict(
            zip(
                ("q_descale", "k_descale", "v_descale"),
                (lazily_negated(torch.rand(2, 4)) for _ in range(3)),
                strict=True,
            )
        )
        flashzoo.attention(**_fp8(**given), version="fp8")
        assert not any(found.is_neg() for found in DESCALES_SEEN[0])
        assert all(torch.equal(found, x) for found, x in zip(DESCALES_SEEN[0], given.values(), strict=True))

    def test_the_shapes_of_descales_follow_heads_and_lengths(self):
        q, k = (torch.zeros(1, seqlen, heads, 16).to(torch.float8_e4m3fn) for seqlen, heads in ((257, 6), (128, 2)))
        good = {"q_descale": (1, 6, 3), "k_descale": (1, 2, 1), "v_descale": (1, 2)}
        flashzoo.attention(q, k, k, **{name: torch.ones(shape) for name, shape in good.items()}, version="fp8")
        for name, shape in (
            ("q_descale", (1, 6)),
            ("q_descale", (1, 2, 3)),
            ("k_descale", (1, 6, 1)),
            ("v_descale", (1, 2, 2)),
        ):
            with pytest.raises(ValueError, match=f"{name} must have shape"):
                flashzoo.attention(q, k, k, **{name: torch.ones(shape)}, version="fp8")

    def test_explain_refuses_the_same(self):
        with pytest.raises(ValueError, match="q_descale must have shape"):
            flashzoo.explain(**_fp8(q_descale=torch.ones(3)))
        with pytest.raises(ValueError, match="precision must be None or 'fp8', got 'fp4'"):
            flashzoo.explain(**_fp8(precision="fp4"))
        with pytest.raises(ValueError, match="k_descale is for e4m3 inputs"):
            flashzoo.explain(**_changed(k_descale=torch.ones(2, 4)))

    def test_explain_says_what_was_asked(self):
        tensors = dict.fromkeys("qkv", torch.zeros(2, 6, 4, 16).to(torch.float8_e4m3fn))
        asked = flashzoo.explain(**tensors, out_dtype=torch.float16, q_descale=torch.ones(2, 4), arch=90)
        assert asked.problem.out_dtype == "fp16" and asked.chosen == "v3_fp8"
        half = {name: x.half() for name, x in _changed().items()}
        asked = flashzoo.explain(**half, precision="fp8", arch=90)
        assert asked.problem.precision == "fp8" and "fp16 in fp8" in str(asked)

    def test_precision_and_out_dtype_reach_the_problem_and_are_not_remembered(self):
        half = {name: x.half() for name, x in _changed().items()}
        for precision in (None, "fp8", None):
            flashzoo.attention(**half, precision=precision, version="quantizing")
        assert [problem.precision for problem in CALLS] == [None, "fp8", None]
        CALLS.clear()
        for out_dtype in (None, torch.float16, torch.bfloat16):
            flashzoo.attention(**_fp8(), out_dtype=out_dtype, version="fp8")
        assert [problem.out_dtype for problem in CALLS] == ["bf16", "fp16", "bf16"]

    def test_a_negative_scale_turns_the_sign_of_every_number(self):
        tensors = _fp8()
        tensors["q"][0, 0, 0, :3] = torch.tensor([0.0, 2**-9, math.nan])
        out = flashzoo.attention(**tensors, softmax_scale=-1.0, version="fp8").float()
        expected = -tensors["q"].float()
        assert torch.equal(out.nan_to_num(), expected.nan_to_num()) and torch.equal(out.isnan(), expected.isnan())

    def test_out_and_lse_have_their_dtypes(self):
        for out_dtype in (torch.float16, torch.bfloat16):
            out, lse = flashzoo.attention(**_fp8(), out_dtype=out_dtype, return_lse=True)
            assert out.dtype == out_dtype and lse.dtype == torch.float32
        half = {name: x.half() for name, x in _changed().items()}
        assert flashzoo.attention(**half, precision="fp8").dtype == torch.float16

    def test_e4m3_has_no_gradients(self):
        tensors = {name: x.requires_grad_() for name, x in _fp8().items()}
        with pytest.raises(UnsupportedError, match="standard: e4m3 inputs have no gradients"):
            flashzoo.attention(**tensors)
        with torch.no_grad():
            assert flashzoo.attention(**tensors).shape == (2, 6, 4, 8)

    def test_no_other_version_drops_the_precision(self):
        half = {name: x.half() for name, x in _changed().items()}
        for name in ("v1", "v2", "sdpa"):
            with pytest.raises(UnsupportedError, match=f"{name}: does not support precision='fp8'"):
                flashzoo.attention(**half, precision="fp8", version=name)

    def test_quantize_is_a_public_name(self):
        with pytest.raises((TypeError, ValueError)):
            flashzoo.quantize(*(torch.randn(1, 16, 2, 16, dtype=torch.float64) for _ in range(3)))


class TestSdpaAdapter:
    @pytest.fixture
    def bhsd(self):
        return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
    def test_is_torch(self, options, bhsd):
        torch.testing.assert_close(flashzoo.sdpa(*bhsd, **options), scaled_dot_product_attention(*bhsd, **options))

    def test_groups_heads_where_told(self, bhsd):
        q, k, v = bhsd[0], bhsd[1][:, :2], bhsd[2][:, :2]
        torch.testing.assert_close(
            flashzoo.sdpa(q, k, v, enable_gqa=True), scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )
        with pytest.raises(
            ValueError, match="enable_gqa: expected True where head counts differ, got False with 4 and 2 heads"
        ):
            flashzoo.sdpa(q, k, v)

    def test_takes_values_of_another_width(self, bhsd):
        q, k, v = *bhsd[:2], torch.randn(2, 4, 6, 16)
        torch.testing.assert_close(flashzoo.sdpa(q, k, v), scaled_dot_product_attention(q, k, v))

    def test_refuses_the_two_meanings_of_causal(self, bhsd):
        with pytest.raises(ValueError, match=r"is_causal: .* expected equal lengths, got seqlen_q 3 and seqlen_k 6"):
            flashzoo.sdpa(bhsd[0][:, :, :3], *bhsd[1:], is_causal=True)

    def test_names_torchs_arguments(self, bhsd):
        with pytest.raises(TypeError, match=r"key must be a torch.Tensor, got NoneType"):
            flashzoo.sdpa(bhsd[0], None, bhsd[2])

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"is_causal": "False"}, "is_causal must be a bool, got 'False'"),
            ({"enable_gqa": 1}, "enable_gqa must be a bool, got 1"),
            ({"scale": [0.1]}, "softmax_scale must be a float or None, got list"),
            ({"query": torch.zeros(6, 8).to_sparse_csr()}, "query must be a dense tensor .* got torch.sparse_csr"),
            ({"value": _nested(torch.strided)}, "value must be a dense tensor .* got a nested one"),
            ({"key": _nested(torch.jagged)}, "key must be a dense tensor .* got a nested one"),
        ],
        ids=["is_causal", "enable_gqa", "scale", "sparse", "nested", "jagged"],
    )
    def test_refuses_what_attention_refuses(self, options, text, bhsd):
        with pytest.raises(TypeError, match=text):
            flashzoo.sdpa(**dict(zip(("query", "key", "value"), bhsd, strict=True)) | options)

    def test_takes_a_version(self, bhsd):
        with pytest.raises(ValueError, match="got 'v9'"):
            flashzoo.sdpa(*bhsd, version="v9")


EMPTY = {
    "no batch": ((0, 6, 4, 8), (0, 6, 2, 8)),
    "no queries": ((2, 0, 4, 8), (2, 6, 2, 8)),
    "no keys": ((2, 6, 4, 8), (2, 0, 2, 8)),
    "no queries, no keys": ((2, 0, 4, 8), (2, 0, 2, 8)),
}


class TestEmpty:
    @staticmethod
    def check(q_shape, k_shape, v_shape, **options):
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, v_shape))
        out, lse = flashzoo.attention(q, k, v, return_lse=True, **options)
        assert out.shape == (*q_shape[:3], v_shape[3]) and not out.any()
        assert lse.shape == (q_shape[0], q_shape[2], q_shape[1]) and bool((lse == -math.inf).all())
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in gradients)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("name", ["auto", "v1", "v2", "standard"])
    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_gives_zeros_minus_infinity_and_zero_gradients(self, shapes, name, causal):
        q_shape, k_shape = shapes
        self.check(q_shape, k_shape, k_shape, causal=causal, version=name)

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_is_as_wide_as_v(self, shapes):
        q_shape, k_shape = shapes
        self.check(q_shape, k_shape, (*k_shape[:3], 5))

    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_of_e4m3(self, shapes, out_dtype):
        q, k = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in shapes)
        blocks = torch.ones(q.shape[0], q.shape[2], -(-q.shape[1] // 128))
        for scale in (None, -1.0):
            out, lse = flashzoo.attention(
                q, k, k, softmax_scale=scale, out_dtype=out_dtype, q_descale=blocks, return_lse=True
            )
            assert out.shape == q.shape and out.dtype == out_dtype and not out.any()
            assert (
                lse.shape == (q.shape[0], q.shape[2], q.shape[1])
                and lse.dtype == torch.float32
                and bool((lse == -math.inf).all())
            )

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_of_what_would_be_quantised(self, shapes):
        q_shape, k_shape = shapes
        q, k, v = (torch.randn(shape).half().requires_grad_() for shape in (q_shape, k_shape, k_shape))
        out, lse = flashzoo.attention(q, k, v, precision="fp8", return_lse=True)
        assert out.shape == q.shape and out.dtype == torch.float16 and not out.any()
        assert not any(
            x.any() for x in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
        )

    def test_still_asks_who_would_answer(self):
        q = torch.randn(2, 0, 4, 8)
        with pytest.raises(UnsupportedError, match="does not support window_size"):
            flashzoo.attention(q, q, q, window_size=(1, 0), version="v1")

    def test_no_keys_of_bad_numbers(self):
        """The zeros must not be made from the inputs by a product: 0 * inf is NaN."""
        q, k = torch.full((1, 3, 2, 4), math.inf), torch.empty(1, 0, 2, 4)
        assert torch.equal(flashzoo.attention(q, k, k), torch.zeros_like(q))
