"""What a version declares, and what a problem is."""

from __future__ import annotations

import dataclasses
import pickle
import sys

import pytest
import torch

import flashzoo
from flashzoo import BlockMask, Problem
from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import FEATURES
from flashzoo_suite.support import dense, toy

HOPPER = Problem(batch=2, seqlen_q=128, seqlen_k=128, heads=8, heads_kv=8, head_dim=64, device="cuda", arch=90)


@pytest.fixture(autouse=True)
def _apart(registry_as_it_was):
    """Set up before what a class registers for its tests."""


class TestSpec:
    def test_takes_what_it_declares(self):
        assert toy().unsupported(HOPPER) == []

    @pytest.mark.parametrize("name", flashzoo.versions())
    def test_is_the_same_in_another_process(self, name):
        spec = flashzoo.versions()[name]
        copied = pickle.loads(pickle.dumps(spec))
        assert (copied.name, copied.features) == (spec.name, spec.features)
        assert copied.unsupported(HOPPER) == spec.unsupported(HOPPER)
        assert (copied.notes is None) == (spec.notes is None)

    @pytest.mark.parametrize(
        ("fields", "problem", "reason"),
        [
            (
                {"requires": ("nosuch",)},
                {},
                "needs the package 'nosuch', which is not installed (pip install 'nosuch')",
            ),
            ({"arch": (90, 90)}, {"arch": 80}, "needs sm_90, got sm_80"),
            ({"arch": (90, 99)}, {"arch": 100}, "needs sm_90 to sm_99, got sm_100"),
            ({"arch": (90, None)}, {"arch": 89}, "needs sm_90 or newer, got sm_89"),
            ({}, {"arch": None}, "needs a GPU whose architecture is known: pass arch=, such as arch=90"),
            ({}, {"dtype": "fp64"}, "takes dtype fp16 or bf16 or fp32, got fp64"),
            ({"cpu_dtypes": ()}, {"device": "cpu"}, "does not run on CPU tensors"),
            ({}, {"device": "cpu", "dtype": "bf16"}, "takes dtype fp16 or fp32 on the CPU, got bf16"),
            ({"head_dims": range(1, 129)}, {"head_dim": 129}, "takes head_dim 1 to 128, got 129"),
            ({"head_dims": range(1, 129)}, {"head_dim_v": 129}, "takes head_dim_v 1 to 128, got 129"),
            ({"head_dims": range(1, 129)}, {"head_dim": 129, "head_dim_v": 129}, "takes head_dim 1 to 128, got 129"),
            ({"head_dims": range(16, 257, 16)}, {"head_dim": 72}, "takes head_dim 16 to 256 in steps of 16, got 72"),
            ({"features": frozenset()}, {"causal": True}, "does not support causal=True"),
            ({"features": frozenset()}, {"window": (3, None)}, "does not support window_size"),
            ({"features": frozenset()}, {"heads_kv": 2}, "does not support fewer key/value heads than query heads"),
            ({"features": frozenset()}, {"seqlen_k": 64}, "does not support seqlen_q != seqlen_k"),
            ({"features": frozenset()}, {"head_dim_v": 32}, "does not support v's head_dim different from q's"),
            (
                {"features": frozenset({"head_dim_v"})},
                {"head_dim_v": 32, "latent": True},
                "does not support v that is k's first columns",
            ),
            (
                {"latent_dims": ((40, 32), (80, 64))},
                {"head_dim_v": 32, "latent": True},
                "takes head_dim and head_dim_v 40 and 32 or 80 and 64 where v is k's first columns, got 64 and 32",
            ),
            (
                {"latent_dims": ((64, 32),)},
                {"head_dim_v": 32},
                "takes head_dim and head_dim_v 64 and 32 where v is a view of k, k[..., :32], got another v",
            ),
            ({"features": frozenset()}, {"lse": True}, "does not support return_lse=True"),
            ({"features": frozenset()}, {"deterministic": True}, "does not support deterministic=True"),
            ({"backward": None}, {"grad": True}, "has no backward pass, and an input requires grad"),
            (
                {"backward": frozenset()},
                {"grad": True, "causal": True},
                "its backward pass does not support causal=True",
            ),
            (
                {"backward": frozenset()},
                {"grad": True, "head_dim_v": 32},
                "its backward pass does not support v's head_dim different from q's",
            ),
            ({"check": lambda problem: ["the moon is full"]}, {}, "the moon is full"),
            ({}, {"dtype": "e4m3", "out_dtype": None}, "takes dtype fp16 or bf16 or fp32, got e4m3"),
            (
                {"dtypes": ("e4m3",)},
                {"dtype": "e4m3", "grad": True},
                "e4m3 inputs have no gradients, and an input requires grad",
            ),
            (
                {"dtypes": ("e4m3",), "backward": None},
                {"dtype": "e4m3", "grad": True},
                "has no backward pass, and an input requires grad",
            ),
            ({}, {"precision": "fp8"}, "does not support precision='fp8'"),
            ({"quantizes": ("fp16",)}, {"precision": "fp8"}, 'takes dtype fp16 with precision="fp8", got bf16'),
            (
                {"dtypes": ("e4m3",), "quantizes": ("fp16", "bf16")},
                {},
                'takes dtype e4m3, or fp16 or bf16 with precision="fp8", got bf16',
            ),
            (
                {"quantizes": ("fp16", "bf16"), "cpu_dtypes": ()},
                {"precision": "fp8", "device": "cpu"},
                "does not run on CPU tensors",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_refusal(self, fields, problem, reason):
        assert toy(**fields).unsupported(dataclasses.replace(HOPPER, **problem)) == [reason]

    def test_gives_every_reason_not_the_first(self):
        spec = toy(arch=(90, None), dtypes=("fp16",), features=frozenset(), backward=None)
        problem = dataclasses.replace(HOPPER, arch=80, dtype="fp32", causal=True, seqlen_k=4, grad=True)
        assert len(spec.unsupported(problem)) == 5

    @pytest.mark.parametrize("arch", [80, 89, 90, 100])
    def test_arch_range_includes_its_ends(self, arch):
        assert toy(arch=(arch, arch)).unsupported(dataclasses.replace(HOPPER, arch=arch)) == []

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"features": frozenset({"softcap"})}, "features must be names from .* got \\['softcap'\\]"),
            ({"backward": frozenset({"softcap"})}, "backward must be names from .* got \\['softcap'\\]"),
            ({"dtypes": ("e5m2",)}, "dtypes must be from .* got \\['e5m2'\\]"),
            ({"quantizes": ("fp32",)}, "quantizes must be from .* got \\['fp32'\\]"),
            ({"features": frozenset({1, "x"})}, "features must be names from .* got \\[1, 'x'\\]"),
            ({"requires": ("",)}, r"requires must be names of packages, got \(''\,\)"),
            ({"quantizes": ("fp16",), "fp8_rms": ((1, 1.0),)}, "fp8_rms must be pairs of a kind of values"),
            ({"fp8_rms": (("randn", 1.0),)}, "fp8_rms is for a version that quantizes, got .*randn"),
            ({"cpu_dtypes": ("int8",)}, "cpu_dtypes must be from .* got \\['int8'\\]"),
            ({"transforms": frozenset({"jit"})}, "transforms must be names from .* got \\['jit'\\]"),
            ({"impl": "no_colon"}, "impl must be 'package.module:function', got 'no_colon'"),
            ({"impl": "no_function:"}, "impl must be 'package.module:function', got 'no_function:'"),
            ({"impl": dense}, "impl must be 'package.module:function', got <function dense"),
            ({"impl": None}, "impl must be 'package.module:function', got None"),
            ({"backward_impl": dense}, "backward_impl must be 'package.module:function', got <function dense"),
            ({"features": ["causal"]}, "features must be a frozenset, got \\['causal'\\]"),
            ({"backward": {"causal"}}, "backward must be a frozenset, got {'causal'}"),
            ({"dtypes": ["fp16"]}, "dtypes must be a tuple, got \\['fp16'\\]"),
            ({"cpu_dtypes": "fp16"}, "cpu_dtypes must be a tuple, got 'fp16'"),
            ({"arch": 90}, "arch must be a tuple, got 90"),
            ({"name": 1}, "name must be a str, got 1"),
            ({"arch": ("90", None)}, r"arch must be the lowest and the highest compute .*, got \('90', None\)"),
            ({"arch": (90, 80)}, r"arch must be the lowest and the highest .*, got \(90, 80\)"),
            ({"arch": (None, 90)}, r"arch must be the lowest and the highest .*, got \(None, 90\)"),
            ({"arch": (90,)}, r"arch must be the lowest and the highest .*, got \(90,\)"),
            ({"head_dims": range(0)}, r"head_dims must be a range of some numbers from 1 on, got range\(0, 0\)"),
            ({"head_dims": range(129)}, r"head_dims must be a range of .* from 1 on, got range\(0, 129\)"),
            ({"latent_dims": (576, 512)}, r"latent_dims must be pairs of head_dim and head_dim_v, got \(576, 512\)"),
            ({"requires": (torch,)}, "requires must be names of packages, got .*module 'torch'"),
            ({"auto": ("gpu",)}, r"auto must be some of 'cuda' and 'cpu', got \('gpu',\)"),
            ({"memory": "cubic"}, "memory must be 'linear' or 'quadratic', got 'cubic'"),
            ({"batch_invariant": "yes"}, "batch_invariant must be a bool, got 'yes'"),
            ({"faults": ("x",)}, r"faults must be triples of a device, .*, got \('x',\)"),
            ({"faults": (("gpu", "test_", "wrong"),)}, "faults must be triples of a device, 'cuda' or 'cpu', .*gpu"),
            ({"quantizes": ("fp16",), "fp8_rms": ("randn", 1.0)}, "fp8_rms must be pairs of a kind of values"),
            ({"check": "mine:check"}, r"check must be a function .* flashzoo.spec.deferred\('mine:check'\)"),
            ({"transforms": {"vmap"}}, "transforms must be a frozenset, got {'vmap'}"),
        ],
    )
    def test_a_wrong_declaration_is_refused_at_once(self, fields, text):
        with pytest.raises((TypeError, ValueError), match=text):
            toy(**fields)

    def test_any_range_of_head_dims_is_looked_at_by_its_ends(self):
        assert toy(head_dims=range(1, sys.maxsize)).unsupported(HOPPER) == []

    def test_every_feature_is_a_field_a_problem_can_ask_for(self):
        sizes = {"heads_kv": 2, "seqlen_k": 4, "head_dim_v": 32, "out_dtype": "fp32"}
        asked = dataclasses.replace(
            HOPPER,
            causal=True,
            window=(1, 1),
            lse=True,
            deterministic=True,
            sinks=True,
            score_mod=ScoreForm(),
            dropout_p=0.5,
            **sizes,
        )
        packed, masked = (
            dataclasses.replace(asked, batch=1, sequences=2, used_k=True),
            dataclasses.replace(asked, block_mask=MaskForm()),
        )
        cached = dataclasses.replace(asked, used_k=True, dtype_kv="e4m3")
        paged = dataclasses.replace(cached, page_size=1)
        mixed = dataclasses.replace(packed, packed_q=True)
        latent = dataclasses.replace(asked, latent=True)
        in_fp8 = dataclasses.replace(asked, precision="fp8", fast_accum=True)
        several = (packed, masked, paged, mixed, latent, in_fp8)
        assert frozenset().union(*(problem.features for problem in several)) == FEATURES.keys()
        assert latent.features ^ asked.features == {"mla", "head_dim_v"}
        assert mixed.features - paged.features == {"packed_q"}
        assert HOPPER.features == frozenset()

    @pytest.mark.parametrize(
        ("window", "expected"),
        [((None, None), (300, 300)), ((1 << 40, 0), (300, 0)), ((7, 1 << 31), (7, 300))],
        ids=str,
    )
    def test_a_window_past_both_sequences_reaches_no_further(self, window, expected):
        assert dataclasses.replace(HOPPER, seqlen_q=100, seqlen_k=200, window=window).reach == expected

    def test_v_is_as_wide_as_q_unless_said(self):
        said = dataclasses.replace(HOPPER, head_dim_v=64)
        assert HOPPER.head_dim_v == 64 and said == HOPPER and hash(said) == hash(HOPPER)
        assert "head_dim 64, bf16" in str(HOPPER)
        assert "head_dim 192/128, bf16" in str(dataclasses.replace(HOPPER, head_dim=192, head_dim_v=128))

    def test_out_has_the_dtype_of_the_inputs_but_for_e4m3(self):
        assert [dataclasses.replace(HOPPER, dtype=dtype).out_dtype for dtype in ("bf16", "fp16", "fp32")] == [
            "bf16",
            "fp16",
            "fp32",
        ]
        unrounded = dataclasses.replace(HOPPER, out_dtype="fp32")
        assert unrounded.out_dtype == "fp32" and "head_dim 64, bf16 to fp32" in str(unrounded)
        assert dataclasses.replace(unrounded, dtype="fp16").out_dtype == "fp32"
        e4m3 = dataclasses.replace(HOPPER, dtype="e4m3", out_dtype=None)
        assert e4m3.out_dtype == "bf16" and "head_dim 64, e4m3 to bf16" in str(e4m3)
        assert dataclasses.replace(e4m3, causal=True, out_dtype="fp16").out_dtype == "fp16"
        assert dataclasses.replace(dataclasses.replace(e4m3, out_dtype="fp16"), dtype="bf16").out_dtype == "bf16"

    def test_precision_is_part_of_what_is_asked(self):
        quantized = dataclasses.replace(HOPPER, precision="fp8")
        assert quantized != HOPPER and len({HOPPER, quantized}) == 2
        assert "head_dim 64, bf16 in fp8, on sm_90" in str(quantized)
        assert (HOPPER.numerics, quantized.numerics) == ("bf16", "fp8")


BAD_PROBLEMS = {
    "batch is negative": ({"batch": -1}, ValueError, "batch must be at least 0, got -1"),
    "batch is fractional": ({"batch": 2.0}, TypeError, "batch must be an int, got 2.0"),
    "batch is a bool": ({"batch": True}, TypeError, "batch must be an int, got True"),
    "a length is negative": ({"seqlen_k": -1}, ValueError, "seqlen_k must be at least 0, got -1"),
    "no heads": ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
    "no key heads": ({"heads_kv": 0}, ValueError, "heads_kv must be at least 1, got 0"),
    "heads 3:2": ({"heads": 3, "heads_kv": 2}, ValueError, "heads must be a multiple of heads_kv, got 3 and 2"),
    "no head dim": ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    "head dim of v is a list": ({"head_dim_v": [64]}, TypeError, r"head_dim_v must be an int, got \[64\]"),
    "dtype is unknown": ({"dtype": "bfloat16"}, ValueError, "dtype must be one of 'fp16', .*, got 'bfloat16'"),
    "dtype is torch's": ({"dtype": torch.bfloat16}, ValueError, "dtype must be one of 'fp16', .*, got torch.bfloat16"),
    "dtype is a list": ({"dtype": ["bf16"]}, ValueError, r"dtype must be one of 'fp16', .*, got \['bf16'\]"),
    "device is unknown": ({"device": "cuda:0"}, ValueError, "device must be one of 'cuda', 'cpu', got 'cuda:0'"),
    "causal is a number": ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
    "lse is None": ({"lse": None}, TypeError, "lse must be a bool, got None"),
    "deterministic is a list": ({"deterministic": [True]}, TypeError, r"deterministic must be a bool, got \[True\]"),
    "grad is a string": ({"grad": "yes"}, TypeError, "grad must be a bool, got 'yes'"),
    "window is below -1": ({"window": (-5, 0)}, ValueError, r"window must be None or a pair .*, got \(-5, 0\)"),
    "window is a number": ({"window": 5}, ValueError, "window must be None or a pair .*, got 5"),
    "window is past 64 bits": (
        {"window": (2**63, 0)},
        ValueError,
        r"window must be .* from 0 to 2\*\*63 - 1, got \(9223372036854775808, 0\)",
    ),
    "arch is a string": ({"arch": "90"}, TypeError, "arch must be an int, such as 90, or None, got '90'"),
    "arch is a version": ({"arch": (9, 0)}, TypeError, r"arch must be an int, such as 90, or None, got \(9, 0\)"),
    "arch is 0": ({"arch": 0}, ValueError, "arch must be at least 1, got 0"),
    "precision is unknown": ({"precision": "int4"}, ValueError, "precision must be None or 'fp8', got 'int4'"),
    "precision of fp32": (
        {"precision": "fp8", "dtype": "fp32"},
        ValueError,
        "precision='fp8' is for dtype fp16 or bf16, got fp32",
    ),
    "out_dtype of e4m3": (
        {"dtype": "e4m3", "out_dtype": "fp32"},
        ValueError,
        "out_dtype must be one of 'bf16', 'fp16', got 'fp32'",
    ),
    "block_mask is a mask": (
        {"block_mask": BlockMask.causal(128)},
        TypeError,
        "block_mask must be a MaskForm, .*, got BlockMask",
    ),
    "block_mask of 3 heads": (
        {"block_mask": MaskForm(heads=3)},
        ValueError,
        "block_mask must have q's heads 8, or 1 where shared, got 3",
    ),
}


class TestProblem:
    """One made by hand is validated as a call is."""

    @pytest.mark.parametrize("case", BAD_PROBLEMS)
    def test_a_wrong_one_is_refused(self, case):
        changes, error, text = BAD_PROBLEMS[case]
        with pytest.raises(error, match=text):
            dataclasses.replace(HOPPER, **changes)

    @pytest.mark.parametrize("window", [None, (-1, -1), [None, -1]], ids=str)
    def test_none_and_minus_one_both_mean_unbounded(self, window):
        assert dataclasses.replace(HOPPER, window=window) == HOPPER
