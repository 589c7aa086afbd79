"""What bad input gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flashzoo
from flashzoo.call.problem import DTYPES
from flashzoo_suite.support import CALLS, toy


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
        r"v must have k's batch, seqlen and heads \(2, 6, 4\), got \(1, 6, 4\) \(q .*, k .*, v \(1, 6, 4, 8\), as",
    ),
    "k and v lengths differ": (
        {"v": torch.randn(2, 5, 4, 16)},
        ValueError,
        r"v must have k's batch, seqlen and heads \(2, 6, 4\), got \(2, 5, 4\) \(q .*, k .*, v \(2, 5, 4, 16\), as",
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
        r"q's heads must be a multiple of k's, got 2 and 4 \(q .*, as \(batch, seqlen, heads, head_dim\)\)",
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
    "fast_accum is a number": (_fp8(fast_accum=1), TypeError, r"fast_accum must be a bool, got (1|int)"),
    "fast_accum of fp32": (
        {"fast_accum": True},
        ValueError,
        r"fast_accum=True is for e4m3 inputs or precision='fp8', got fp32",
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
    "sinks are sparse": (
        {"sinks": torch.zeros(4).to_sparse()},
        TypeError,
        r"sinks must be a dense tensor \(torch.strided\), got torch.sparse_coo: call to_dense\(\)",
    ),
    "a page table of no queries": (
        {"q": torch.tensor(1.0), "page_table": torch.zeros(2, 1, dtype=torch.int32)},
        ValueError,
        r"q must have 4 dimensions .* got shape \(\)",
    ),
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
    "e4m3 k alone": (
        _fp8(q=torch.randn(2, 6, 4, 8).half(), v=torch.randn(2, 6, 4, 8).half()),
        TypeError,
        r"must have one dtype, got .*; only k and v, both, may be torch.float8_e4m3fn",
    ),
    "e4m3 beside float32": (_fp8(q=torch.randn(2, 6, 4, 8)), TypeError, r"must have one dtype, got q torch.float32"),
    "q_descale of 16 bits": (
        _fp8(q=torch.randn(2, 6, 4, 8).half(), q_descale=torch.ones(2, 4)),
        ValueError,
        r"q_descale is for e4m3 inputs .* got it with fp16 ones",
    ),
    "precision beside e4m3": (
        _fp8(q=torch.randn(2, 6, 4, 8).half(), precision="fp8"),
        TypeError,
        r"precision='fp8' quantises fp16 or bf16 inputs, got q torch.float16, k torch.float8_e4m3fn",
    ),
    "e4m3 mixed": (_fp8(v=torch.randn(2, 6, 4, 8).half()), TypeError, r"must have one dtype, got .* v torch.float16"),
    "all is dropped": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be at least 0 and less than 1, got 1.0"),
    "less than nothing is dropped": ({"dropout_p": -0.1}, ValueError, r"dropout_p must be .* got -0.1"),
    "dropout_p is no number": ({"dropout_p": math.nan}, ValueError, r"dropout_p must be .* got nan"),
    "dropout_p is None": ({"dropout_p": None}, TypeError, r"dropout_p must be a float, got NoneType"),
    "a seed that is a float": (
        {"dropout_p": 0.1, "dropout_seed": 7.0},
        TypeError,
        r"dropout_seed must be an int, a torch.Tensor of one or None, got float",
    ),
    "a seed of 65 bits": (
        {"dropout_seed": 1 << 63},
        ValueError,
        r"dropout_seed must be from -2\*\*63 to 2\*\*63 - 1, got 9223372036854775808",
    ),
    "a seed of 32 bits": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int32)},
        TypeError,
        r"dropout_seed must be of dtype torch.int64, got torch.int32",
    ),
    "two seeds": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(2, dtype=torch.int64)},
        ValueError,
        r"dropout_seed must have one element, got shape \(2,\)",
    ),
    "a seed elsewhere": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros((), dtype=torch.int64, device="meta")},
        ValueError,
        r"dropout_seed must be on q's device cpu, got meta",
    ),
    "an argument nobody knows": (
        {"attn_mask": None},
        TypeError,
        "unexpected keyword argument 'attn_mask', expected some of causal, .*, block_mask, .*, dropout_seed$",
    ),
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
            ({"dropout_p": 0.0}, {"dropout_p": False}),
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
