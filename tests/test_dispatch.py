"""Who answers a call, why the others don't, and what bad input gets. No GPU: problems are made by hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import re
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashzoo
from flashzoo import BlockMask, Problem, UnsupportedError, registry
from flashzoo.call import plan
from flashzoo.call.forms import MaskForm
from flashzoo.call.problem import DTYPES, FEATURES
from flashzoo.workloads import TORCH_DTYPES
from flashzoo_suite.support import CALLS, dense, dense_backward, lazily_negated, toy

SUPPORT = dense.__module__
HOPPER = Problem(batch=2, seqlen_q=128, seqlen_k=128, heads=8, heads_kv=8, head_dim=64, device="cuda", arch=90)
ON_CPU = dataclasses.replace(HOPPER, device="cpu", arch=None, dtype="fp32")


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch):
    """Every test may register, unregister and choose; none is felt by the next."""
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    monkeypatch.delenv(flashzoo.spec.INTERPRETER_LIMIT, raising=False)
    monkeypatch.setattr(registry, "_zoo", registry.current())
    CALLS.clear()


NAMES = {function: f"{function.__module__}:{function.__name__}" for function in (dense, dense_backward)}


def _gradients(attention, qkv):
    """Those of q, k and v, through out and, if it is given, through lse."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    outputs = attention(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(outputs, leaves, [torch.randn(x.shape, generator=generator) for x in outputs])


@pytest.fixture
def qkv():
    return tuple(torch.randn(2, 6, 4, 8) for _ in range(3))


class TestSpec:
    def test_takes_what_it_declares(self):
        assert toy().unsupported(HOPPER) == []

    @pytest.mark.parametrize(
        ("fields", "problem", "reason"),
        [
            ({"requires": ("nosuch",)}, {}, "needs the package 'nosuch', which is not installed (pip install 'nosuch')"),
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
            ({"features": frozenset()}, {"lse": True}, "does not support return_lse=True"),
            ({"features": frozenset()}, {"deterministic": True}, "does not support deterministic=True"),
            ({"backward": None}, {"grad": True}, "has no backward pass, and an input requires grad"),
            ({"backward": frozenset()}, {"grad": True, "causal": True}, "its backward pass does not support causal=True"),
            (
                {"backward": frozenset()},
                {"grad": True, "head_dim_v": 32},
                "its backward pass does not support v's head_dim different from q's",
            ),
            ({"check": lambda problem: ["the moon is full"]}, {}, "the moon is full"),
            ({}, {"dtype": "e4m3", "out_dtype": None}, "takes dtype fp16 or bf16 or fp32, got e4m3"),
            ({"dtypes": ("e4m3",)}, {"dtype": "e4m3", "grad": True}, "e4m3 inputs have no gradients, and an input requires grad"),
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
            ({"quantizes": ("fp16", "bf16"), "cpu_dtypes": ()}, {"precision": "fp8", "device": "cpu"}, "does not run on CPU tensors"),
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
        ],
    )
    def test_a_wrong_declaration_is_refused_at_once(self, fields, text):
        with pytest.raises((TypeError, ValueError), match=text):
            toy(**fields)

    def test_every_feature_is_a_field_a_problem_can_ask_for(self):
        sizes = {"heads_kv": 2, "seqlen_k": 4, "head_dim_v": 32}
        asked = dataclasses.replace(HOPPER, causal=True, window=(1, 1), lse=True, deterministic=True, block_mask=MaskForm(), **sizes)
        assert asked.features == FEATURES.keys()
        assert HOPPER.features == frozenset()

    @pytest.mark.parametrize(
        ("window", "expected"), [((None, None), (300, 300)), ((1 << 40, 0), (300, 0)), ((7, 1 << 31), (7, 300))], ids=str
    )
    def test_a_window_past_both_sequences_reaches_no_further(self, window, expected):
        assert dataclasses.replace(HOPPER, seqlen_q=100, seqlen_k=200, window=window).reach == expected

    def test_v_is_as_wide_as_q_unless_said(self):
        said = dataclasses.replace(HOPPER, head_dim_v=64)
        assert HOPPER.head_dim_v == 64 and said == HOPPER and hash(said) == hash(HOPPER)
        assert "head_dim 64, bf16" in str(HOPPER)
        assert "head_dim 192/128, bf16" in str(dataclasses.replace(HOPPER, head_dim=192, head_dim_v=128))

    def test_out_has_the_dtype_of_the_inputs_but_for_e4m3(self):
        assert [dataclasses.replace(HOPPER, dtype=dtype).out_dtype for dtype in ("bf16", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]
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
    "precision of fp32": ({"precision": "fp8", "dtype": "fp32"}, ValueError, "precision='fp8' is for dtype fp16 or bf16, got fp32"),
    "out_dtype of e4m3": ({"dtype": "e4m3", "out_dtype": "fp32"}, ValueError, "out_dtype must be one of 'bf16', 'fp16', got 'fp32'"),
    "block_mask is a mask": ({"block_mask": BlockMask.causal(128)}, TypeError, "block_mask must be a MaskForm, .*, got BlockMask"),
    "block_mask of 3 heads": ({"block_mask": MaskForm(heads=3)}, ValueError, "block_mask must have q's heads 8, or 1 where shared, got 3"),
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


class TestRegister:
    def test_appends_and_returns_the_spec(self):
        spec = toy()
        assert flashzoo.register(spec) is spec
        assert list(flashzoo.versions())[-1] == "toy"

    def test_before_sets_the_place_in_auto_order(self):
        flashzoo.register(toy(), before="sdpa")
        names = list(flashzoo.versions())
        assert names.index("toy") == names.index("sdpa") - 1

    @pytest.mark.parametrize("name", ["auto", "two words", "1st", ""])
    def test_name_must_be_an_identifier(self, name):
        with pytest.raises(ValueError, match=f"spec.name must be an identifier other than 'auto', got '{name}'"):
            flashzoo.register(toy(name))

    def test_name_must_be_free(self):
        with pytest.raises(ValueError, match=r"the name 'sdpa' is taken by flashzoo.baselines:sdpa"):
            flashzoo.register(toy("sdpa"))

    def test_before_must_be_known(self):
        with pytest.raises(ValueError, match=r"before must be one of .*sdpa.*, got 'nobody'"):
            flashzoo.register(toy(), before="nobody")

    def test_unregister_must_be_known(self):
        with pytest.raises(ValueError, match=r"name must be one of .*sdpa.*, got 'nobody'"):
            flashzoo.unregister("nobody")

    def test_versions_is_a_copy(self):
        flashzoo.versions().clear()
        assert flashzoo.versions()

    def test_a_call_sees_what_was_registered_after_an_equal_call(self, qkv):
        flashzoo.attention(*qkv)
        flashzoo.register(toy(), before=next(iter(flashzoo.versions())))
        flashzoo.attention(*qkv)
        assert len(CALLS) == 1

    def test_a_call_does_not_reach_what_was_unregistered(self, qkv):
        flashzoo.register(toy())
        flashzoo.attention(*qkv, version="toy")
        flashzoo.unregister("toy")
        with pytest.raises(ValueError, match="got 'toy'"):
            flashzoo.attention(*qkv, version="toy")

    def test_a_name_taken_again_calls_the_new_version(self, qkv):
        flashzoo.register(toy())
        flashzoo.attention(*qkv, version="toy")
        flashzoo.unregister("toy")
        flashzoo.register(toy(features=frozenset()))
        with pytest.raises(UnsupportedError):
            flashzoo.attention(*qkv, version="toy", causal=True)


class TestResolve:
    def test_auto_takes_the_first_without_objection(self):
        flashzoo.register(toy("second"), before="v3")
        flashzoo.register(toy("first", arch=(100, None)), before="second")
        assert registry.resolve(HOPPER).name == "second"
        assert registry.resolve(dataclasses.replace(HOPPER, arch=100)).name == "first"

    def test_auto_passes_over_what_does_not_offer_itself(self):
        flashzoo.register(toy(auto=()), before="v3")
        assert registry.resolve(HOPPER).name != "toy"
        assert registry.resolve(HOPPER, "toy").name == "toy"

    @pytest.mark.parametrize("arch", [80, 89, 90, 100])
    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
    @pytest.mark.parametrize(
        "feature",
        [{}, {"causal": True}, {"window": (8, 0)}, {"heads_kv": 2, "seqlen_k": 7}, {"deterministic": True, "grad": True}],
        ids=str,
    )
    def test_auto_is_the_newest_kernel_on_every_gpu(self, arch, dtype, feature):
        """For the forward pass; v2 has a fallback backward for all."""
        problem = dataclasses.replace(HOPPER, arch=arch, dtype=dtype, **feature)
        able = [spec.name for spec in flashzoo.versions().values() if spec.auto and not spec.unsupported(problem.forward)]
        assert registry.resolve(problem).name == able[0]
        assert able[0] not in ("sdpa", "standard")

    @pytest.mark.parametrize(
        "problem",
        [
            {"head_dim": 300, "head_dim_v": None},
            {"head_dim_v": 32, "arch": 80},
            {"head_dim_v": 36},
            {"dtype": "fp64"},
            {"arch": 75},
            {"arch": 70, "dtype": "fp16"},
        ],
        ids=str,
    )
    def test_auto_ends_at_sdpa(self, problem):
        assert registry.resolve(dataclasses.replace(HOPPER, **problem)).name == "sdpa"

    def test_auto_on_the_cpu_is_torch(self, qkv):
        assert flashzoo.explain(*qkv).chosen == "sdpa"

    def test_what_even_sdpa_cannot_do_is_left_to_standard(self, qkv):
        assert flashzoo.explain(*qkv, return_lse=True).chosen == "standard"

    def test_auto_with_no_taker_says_why_of_each(self):
        with pytest.raises(UnsupportedError) as error:
            registry.resolve(dataclasses.replace(HOPPER, arch=30))
        for name in flashzoo.versions():
            assert f"  {name}: needs sm_" in str(error.value)

    def test_a_name_never_falls_back(self):
        with pytest.raises(UnsupportedError) as error:
            registry.resolve(dataclasses.replace(HOPPER, window=(4, 0)), "v1")
        text = str(error.value)
        assert "version 'v1' can't take batch 2, seqlen 128, heads 8, head_dim 64, bf16, window (4, 0), on sm_90" in text
        assert "  v1: does not support window_size" in text
        assert "versions that would: v3, v2, blocksparse, sdpa, standard" in text

    def test_a_name_that_nobody_could_replace(self):
        with pytest.raises(UnsupportedError, match="no registered version would"):
            registry.resolve(dataclasses.replace(HOPPER, arch=30), "v2")

    def test_a_name_nobody_has(self):
        with pytest.raises(ValueError, match="version must be 'auto' or one of v3, v3_fp8, v2, v1, blocksparse, sdpa, standard, got 'v9'"):
            registry.resolve(HOPPER, "v9")

    @pytest.mark.parametrize("fields", [{"head_dim": 264, "head_dim_v": None}, {"head_dim_v": 264}], ids=str)
    def test_what_nobody_has_tiles_for_is_explained(self, fields):
        text = str(flashzoo.explain(dataclasses.replace(HOPPER, **fields)))
        assert "v3" in text and "got 264" in text

    @pytest.mark.parametrize("name", ["v1", "v2"])
    def test_bf16_on_the_cpu_is_refused_by_the_interpreted_kernels(self, name):
        with pytest.raises(UnsupportedError, match=f"{name}: takes dtype fp16 or fp32 on the CPU, got bf16"):
            registry.resolve(dataclasses.replace(ON_CPU, dtype="bf16"), name)

    def test_what_triton_would_interpret_for_minutes_is_refused_before_any_launch(self):
        flashzoo.register(toy("in_triton", requires=("triton",)))
        q = torch.zeros(1, 1025, 1, 8)
        with pytest.raises(UnsupportedError) as error:
            flashzoo.attention(q, q, q, version="in_triton")
        sentence = "is too large for Triton's interpreter: 289 blocks of 64x64 scores, some 6 s, and the limit is 256"
        assert f"in_triton: {sentence}; FLASHZOO_INTERPRETER_LIMIT=289 lifts it" in str(error.value)
        assert sentence in str(flashzoo.explain(q, q, q)) and not CALLS
        with pytest.raises(UnsupportedError, match=sentence):
            torch.compile(flashzoo.attention, backend="eager")(q, q, q, version="in_triton")
        # Neither is what runs on a GPU, nor what needs no Triton.
        assert not toy(requires=("triton",)).unsupported(dataclasses.replace(HOPPER, seqlen_q=1 << 20))
        assert not toy().unsupported(dataclasses.replace(ON_CPU, seqlen_q=1 << 20))

    def test_programs_of_one_row_count_as_blocks_for_the_interpreter(self):
        problem = dataclasses.replace(ON_CPU, batch=257, heads=1, heads_kv=1, seqlen_q=1, seqlen_k=1)
        assert "257 blocks" in toy(requires=("triton",)).unsupported(problem)[0]
        assert not toy(requires=("triton",)).unsupported(dataclasses.replace(problem, batch=256))

    def test_the_interpreters_limit_is_lifted_by_the_variable_that_the_error_names(self, monkeypatch):
        flashzoo.register(toy("in_triton", requires=("triton",)))
        q = torch.zeros(1, 1025, 1, 8)
        monkeypatch.setenv("FLASHZOO_INTERPRETER_LIMIT", "289")
        flashzoo.attention(q, q, q, version="in_triton")
        assert len(CALLS) == 1
        monkeypatch.setenv("FLASHZOO_INTERPRETER_LIMIT", "none")
        with pytest.raises(ValueError, match="FLASHZOO_INTERPRETER_LIMIT must be a number of blocks of 64x64 scores, got 'none'"):
            flashzoo.attention(*[torch.zeros(1, 1026, 1, 8)] * 3, version="in_triton")

    @pytest.mark.parametrize(("name", "language", "left"), [("v1", "triton", "v3"), ("v2", "triton", "v3"), ("v3", "cutlass", "v2")])
    def test_a_kernel_without_its_language_is_refused(self, name, language, left, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package != language)
        registry._forget()
        with pytest.raises(UnsupportedError, match=f"needs the package '{language}', which is not installed"):
            registry.resolve(HOPPER, name)
        assert registry.resolve(HOPPER).name == left
        registry._forget()

    def test_explain_says_what_to_install_where_that_would_help(self, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package != "cutlass")
        registry._forget()
        explanation, needs = flashzoo.explain(HOPPER), "pip install 'nvidia-cutlass-dsl[cu13]'"
        assert explanation.chosen == "v2" and needs in str(explanation)
        for elsewhere in (dataclasses.replace(HOPPER, arch=80), ON_CPU):
            assert needs not in str(flashzoo.explain(elsewhere))
        registry._forget()

    def test_a_backward_pass_may_need_another_language(self, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package != "triton")
        registry._forget()
        with pytest.raises(UnsupportedError, match="v3: its backward pass needs the package 'triton', which is not installed"):
            registry.resolve(dataclasses.replace(HOPPER, grad=True), "v3")
        registry._forget()

    def test_without_any_kernel_language_auto_is_torch(self, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package not in ("triton", "cutlass"))
        registry._forget()
        assert registry.resolve(HOPPER).name == "sdpa"
        registry._forget()

    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
    @pytest.mark.parametrize("arch", [80, 89, 90, 100])
    def test_auto_never_quantises_unasked(self, dtype, arch):
        for fields in ({}, {"causal": True, "grad": True}, {"lse": True, "heads_kv": 2}):
            problem = dataclasses.replace(HOPPER, dtype=dtype, arch=arch, **fields)
            assert registry.resolve(problem).name != "v3_fp8"
            assert flashzoo.versions()["v3_fp8"].unsupported(problem)

    @pytest.mark.parametrize(
        "fields", [{"dtype": "e4m3", "out_dtype": None}, {"precision": "fp8"}, {"precision": "fp8", "dtype": "fp16", "grad": True}], ids=str
    )
    def test_fp8_is_v3s_on_hopper_and_standards_elsewhere(self, fields):
        problem = dataclasses.replace(HOPPER, **fields)
        assert registry.resolve(problem).name == "v3_fp8"
        able = [spec.name for spec in flashzoo.versions().values() if not spec.unsupported(problem)]
        assert able == ["v3_fp8", "standard"]
        for other in ({"arch": 80}, {"arch": 100}, {"device": "cpu", "arch": None}, {"head_dim": 72, "head_dim_v": None}):
            assert registry.resolve(dataclasses.replace(problem, **other)).name == "standard"

    @pytest.mark.parametrize(
        "problem",
        [{"arch": 80}, {"arch": 89}, {"arch": 100}, {"dtype": "fp32"}, {"head_dim": 60, "head_dim_v": None}],
        ids=str,
    )
    def test_auto_goes_on_to_v2_where_v3_cannot(self, problem):
        assert registry.resolve(HOPPER).name == "v3"
        assert registry.resolve(dataclasses.replace(HOPPER, **problem)).name == "v2"


class TestUnquantized:
    """A version that quantises, and whose backward pass is two passes of another implementation on the inputs as they are."""

    def test_gradients_are_those_of_the_other(self, qkv):
        flashzoo.register(
            toy(
                "rough",
                impl="flashzoo_suite.support:record",
                quantizes=("fp16",),
                backward_16="flashzoo_suite.support:dense_attention",
                auto=(),
            )
        )
        flashzoo.register(toy("fine", impl="flashzoo_suite.support:dense_attention", auto=()))
        halves = [x.half() for x in qkv]
        found, expected = (
            _gradients(lambda *leaves, how=how: flashzoo.attention(*leaves, **how), halves)
            for how in ({"version": "rough", "precision": "fp8"}, {"version": "fine"})
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [(problem.precision, problem.grad) for problem in CALLS[:3]] == [("fp8", True), (None, False), (None, True)]


class TestFallbackBackward:
    """A version that has no backward pass for a problem, and another with a fallback backward."""

    @staticmethod
    def registered(fallback: dict | None = None, **newer) -> None:
        flashzoo.register(toy("older", impl=NAMES[dense], backward_impl=NAMES[dense_backward], **fallback or {}), before="v3")
        flashzoo.register(toy("newer", **{"impl": NAMES[dense], "backward": None} | newer), before="older")

    @pytest.mark.parametrize("lse", [False, True])
    def test_the_gradient_is_right(self, lse, qkv):
        self.registered()
        found, expected = (
            _gradients(lambda *leaves, name=name: flashzoo.attention(*leaves, return_lse=lse, version=name), qkv)
            for name in ("auto", "standard")
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_one_runs_forward_and_the_other_backward(self, qkv):
        self.registered()
        _gradients(flashzoo.attention, qkv)
        forward, backward = CALLS
        assert forward == dataclasses.replace(backward, grad=False, lse=True)
        assert backward == flashzoo.explain(*(x.requires_grad_() for x in qkv)).problem

    def test_explain_names_both_and_says_why(self):
        self.registered(notes=lambda problem: [f"grad is {problem.grad}"])
        explanation = flashzoo.explain(dataclasses.replace(ON_CPU, grad=True))
        assert (explanation.chosen, explanation.backward) == ("newer", "older")
        lines = str(explanation).splitlines()
        assert lines[0].startswith("newer forward, older backward take batch 2") and lines[0].endswith("by the default")
        assert [line for line in lines if line.startswith("*")] == [
            "* newer        a toy: chosen for the forward pass",
            "* older        a toy: chosen for the backward pass",
        ]
        assert [line.strip() for line in lines[2:4]] == ["- has no backward pass, and an input requires grad", "- grad is False"]

    def test_the_choice_has_both_and_resolve_the_one_that_runs(self):
        self.registered()
        problem = dataclasses.replace(HOPPER, grad=True)
        choice = registry.choose(problem)
        assert (choice.forward.name, choice.backward.name, str(choice)) == ("newer", "older", "newer forward, older backward")
        assert registry.resolve(problem).name == "newer"
        assert str(registry.choose(HOPPER)) == "newer" and registry.choose(HOPPER).backward is None
        assert flashzoo.explain(HOPPER).backward is None

    def test_a_backward_pass_of_its_own_comes_first(self):
        self.registered(backward=frozenset({"causal"}))
        for fields, falls_back in (
            ({}, False),
            ({"causal": True}, False),
            ({"deterministic": True}, True),
            ({"causal": True, "lse": True}, True),
        ):
            assert bool(registry.choose(dataclasses.replace(HOPPER, grad=True, **fields)).backward) == falls_back

    @pytest.mark.parametrize(
        ("newer", "fallback", "problem"),
        [
            ({}, {"backward": frozenset({"causal"})}, {"deterministic": True}),
            ({}, {"features": frozenset(), "backward": frozenset()}, {"causal": True}),
            ({}, {"head_dims": range(1, 9)}, {}),
            ({}, {"auto": ()}, {}),
            ({"features": frozenset()}, {}, {"causal": True}),
            ({"features": frozenset({"causal"})}, {}, {}),
            ({"auto": ()}, {}, {}),
        ],
        ids=["not deterministic", "not causal", "not so wide", "not under auto", "no forward", "no lse", "newer not under auto"],
    )
    def test_is_for_what_both_take(self, newer, fallback, problem):
        self.registered(fallback, **newer)
        choice = registry.choose(dataclasses.replace(HOPPER, grad=True, **problem))
        assert str(choice) != "newer forward, older backward"

    @pytest.mark.parametrize("fields", [{"dtype": "e4m3", "out_dtype": None}, {"precision": "fp8"}], ids=str)
    def test_is_not_for_fp8(self, fields):
        """e4m3 has no gradients, and what precision="fp8" means for the backward pass is its version's to say."""
        self.registered(dtypes=("bf16", "e4m3"), quantizes=("bf16",))
        problem = dataclasses.replace(HOPPER, **fields)
        assert registry.choose(problem).forward.name == "newer"
        if problem.precision:
            assert str(registry.choose(dataclasses.replace(problem, grad=True))) == "v3_fp8"
        else:
            with pytest.raises(UnsupportedError, match="older: takes dtype fp16 or bf16 or fp32, got e4m3"):
                registry.choose(dataclasses.replace(problem, grad=True))

    def test_a_name_borrows_nothing(self, qkv):
        self.registered()
        with pytest.raises(UnsupportedError, match="newer: has no backward pass, and an input requires grad"):
            flashzoo.attention(*(x.requires_grad_() for x in qkv), version="newer")
        with flashzoo.use("newer"), pytest.raises(UnsupportedError):
            flashzoo.attention(*qkv)

    def test_where_nobody_has_one_every_reason_is_said(self):
        for name in list(flashzoo.versions()):
            flashzoo.unregister(name)
        flashzoo.register(toy("newer", backward=None))
        flashzoo.register(toy("older", backward=frozenset(), backward_impl=NAMES[dense_backward]))
        problem = dataclasses.replace(HOPPER, grad=True, causal=True, deterministic=True)
        with pytest.raises(UnsupportedError) as error:
            registry.choose(problem)
        assert str(error.value).splitlines()[1:] == [
            "  newer: has no backward pass, and an input requires grad",
            "  older: its backward pass does not support causal=True",
            "  older: its backward pass does not support deterministic=True",
        ]
        assert flashzoo.explain(problem).chosen is None
        with pytest.raises(ValueError, match="'newer' has no fallback backward"):
            registry.fallback_backward(flashzoo.versions()["newer"])

    def test_the_first_that_has_one_is_taken(self):
        self.registered()
        flashzoo.register(toy("between", backward_impl=NAMES[dense_backward], arch=(90, 90)), before="older")
        flashzoo.unregister("newer")
        flashzoo.register(toy("newer", backward=None), before="between")
        assert str(registry.choose(dataclasses.replace(HOPPER, grad=True))) == "newer forward, between backward"
        assert str(registry.choose(dataclasses.replace(HOPPER, grad=True, arch=80))) == "newer forward, older backward"


class TestOverride:
    @pytest.fixture(autouse=True)
    def _toys(self):
        for name in ("by_argument", "by_context", "by_environment"):
            flashzoo.register(toy(name))

    def test_argument_then_context_then_environment_then_auto(self, qkv, monkeypatch):
        def chosen(**options):
            explanation = flashzoo.explain(*qkv, **options)
            return explanation.chosen, explanation.by

        assert chosen() == ("sdpa", "the default")
        monkeypatch.setenv("FLASHZOO_VERSION", "by_environment")
        assert chosen() == ("by_environment", "the environment variable FLASHZOO_VERSION")
        with flashzoo.use("by_context"):
            assert chosen() == ("by_context", "the context manager flashzoo.use()")
            assert chosen(version="by_argument") == ("by_argument", "the argument version=")
        assert chosen() == ("by_environment", "the environment variable FLASHZOO_VERSION")

    @pytest.mark.parametrize("how", ["argument", "context", "environment"])
    def test_the_call_follows_it(self, how, qkv, monkeypatch):
        if how == "environment":
            monkeypatch.setenv("FLASHZOO_VERSION", "by_environment")
            flashzoo.attention(*qkv)
        elif how == "context":
            with flashzoo.use("by_context"):
                flashzoo.attention(*qkv)
        else:
            flashzoo.attention(*qkv, version="by_argument")
        assert len(CALLS) == 1

    def test_blocks_nest_and_end_with_an_error(self, qkv):
        with flashzoo.use("by_context"):
            with pytest.raises(RuntimeError), flashzoo.use("by_argument"):
                raise RuntimeError
            assert flashzoo.explain(*qkv).chosen == "by_context"
        assert flashzoo.explain(*qkv).chosen == "sdpa"

    def test_auto_in_a_block_undoes_the_outer_one(self, qkv):
        with flashzoo.use("by_context"), flashzoo.use("auto"):
            assert flashzoo.explain(*qkv).chosen == "sdpa"

    @pytest.mark.parametrize("version", ["v9", None, ["v1"], {"v1"}, 1, torch.zeros(2)], ids=str)
    def test_it_must_name_a_version(self, version, qkv):
        text = rf"version must be 'auto' or one of .*, got {re.escape(repr(version))}"
        with pytest.raises(ValueError, match=rf"use: {text}"), flashzoo.use(version):
            pass
        for ask in (flashzoo.attention, flashzoo.explain):
            with pytest.raises(ValueError, match=text):
                ask(*qkv, version=version)

    def test_the_environment_must_name_a_version(self, qkv, monkeypatch):
        monkeypatch.setenv("FLASHZOO_VERSION", "v9")
        for ask in (flashzoo.attention, flashzoo.explain):
            text = "version, by the environment variable FLASHZOO_VERSION, must be 'auto' or one of .*, got 'v9'"
            with pytest.raises(ValueError, match=text):
                ask(*qkv)

    def test_a_refusal_names_who_chose(self, qkv, monkeypatch):
        def refusal(version="auto"):
            with pytest.raises(UnsupportedError) as error:
                flashzoo.attention(*qkv, causal=True, version=version)
            explanation = flashzoo.explain(*qkv, causal=True, version=version)
            return [str(told).partition(" can't take batch 2")[0] for told in (error.value, explanation)]

        flashzoo.register(toy("narrow", features=frozenset()))
        monkeypatch.setenv("FLASHZOO_VERSION", "narrow")
        assert refusal("narrow") == ["version 'narrow'", "narrow"]
        by = ", by the environment variable FLASHZOO_VERSION,"
        assert refusal() == [f"version 'narrow'{by}", f"narrow{by}"]
        by = ", by the context manager flashzoo.use(),"
        with flashzoo.use("narrow"):
            assert refusal() == [f"version 'narrow'{by}", f"narrow{by}"]

    def test_an_override_never_falls_back_either(self, qkv):
        flashzoo.register(toy("narrow", features=frozenset()))
        with flashzoo.use("narrow"), pytest.raises(UnsupportedError, match="narrow: does not support causal=True"):
            flashzoo.attention(*qkv, causal=True)


class TestExplain:
    @pytest.mark.parametrize(("arch", "chosen"), [(80, "v2"), (89, "v2"), (90, "v3"), (100, "v2")])
    def test_of_a_gpu_that_is_not_there(self, arch, chosen, qkv):
        explanation = flashzoo.explain(*(x.bfloat16() for x in qkv), arch=arch)
        assert explanation.chosen == chosen
        assert explanation.problem.where == f"sm_{arch}"
        assert {verdict.name for verdict in explanation.verdicts} == set(flashzoo.versions())

    def test_of_a_problem_alone(self):
        assert flashzoo.explain(HOPPER).chosen == "v3"
        assert flashzoo.explain(dataclasses.replace(HOPPER, window=(1, 1)), version="v1").chosen is None

    def test_of_tensors_with_no_data(self):
        q = torch.empty(1, 1 << 20, 64, 128, dtype=torch.bfloat16, device="meta")
        assert flashzoo.explain(q, q, q, causal=True, arch=90).chosen == "v3"

    def test_prints_who_was_chosen_and_every_reason(self):
        text = str(flashzoo.explain(dataclasses.replace(HOPPER, window=(8, 0), lse=True)))
        assert (
            text.splitlines()[0] == "v3 takes batch 2, seqlen 128, heads 8, head_dim 64, bf16, window (8, 0), lse, on sm_90, by the default"
        )
        assert "* v3" in text
        assert "- does not support window_size" in text
        assert "- does not support return_lse=True" in text

    def test_prints_that_nobody_takes_it(self):
        assert str(flashzoo.explain(dataclasses.replace(HOPPER, arch=30))).startswith("no version takes ")

    def test_says_that_kernels_are_interpreted_on_the_cpu(self):
        for name in ("v1", "v2"):
            verdict = next(verdict for verdict in flashzoo.explain(ON_CPU).verdicts if verdict.name == name)
            assert any("interpreter" in note for note in verdict.notes)

    def test_a_problem_takes_no_other_argument(self):
        text = r"expected a Problem alone, or with version=, got {} beside it; dataclasses.replace\(problem, ...\) changes what it asks for"
        for beside in ({"causal": True}, {"arch": 90, "causal": False}, {"k": torch.zeros(2, 6, 4, 8), "window_size": None}):
            with pytest.raises(TypeError, match=text.format(", ".join(beside))):
                flashzoo.explain(HOPPER, **beside)

    def test_an_argument_nobody_knows(self, qkv):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
            flashzoo.explain(*qkv, dropout_p=0.1)

    def test_arch_is_a_number(self, qkv):
        with pytest.raises(TypeError, match="arch must be an int, such as 90, or None, got '90'"):
            flashzoo.explain(*qkv, arch="90")

    def test_of_half_the_tensors(self, qkv):
        with pytest.raises(TypeError, match="k and v must be tensors where q is one, got NoneType"):
            flashzoo.explain(qkv[0])

    def test_refuses_what_attention_refuses(self, qkv):
        with pytest.raises(ValueError, match="softmax_scale must be finite, got nan"):
            flashzoo.explain(*qkv, softmax_scale=math.nan)


class TestPlugins:
    @pytest.fixture
    def installed(self, monkeypatch):
        """Make these the installed entry points, unread as yet."""

        def install(**found):
            points = []
            for name, value in found.items():
                points.append(importlib.metadata.EntryPoint(name, "nowhere:at_all", registry.ENTRY_POINTS))
                object.__setattr__(points[-1], "load", value)
            monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "flashzoo.versions" else [])
            monkeypatch.setattr(registry, "_plugins", "unread")

        return install

    def test_a_plugin_is_a_version_like_any_other(self, installed, qkv):
        installed(toy=toy)
        assert "toy" in flashzoo.versions()
        flashzoo.attention(*qkv, version="toy")
        assert len(CALLS) == 1

    def test_a_plugin_that_registers_itself_is_not_registered_twice(self, installed):
        installed(toy=lambda: flashzoo.register(toy()))
        assert "toy" in flashzoo.versions()
        assert registry.plugin_errors() == {}

    def test_a_broken_plugin_breaks_nothing_and_is_reported(self, installed, qkv):
        def broken():
            raise ImportError("no such shared library")

        installed(broken=broken, wrong=lambda: "a string", taken=lambda: toy("sdpa"), toy=toy)
        assert flashzoo.attention(*qkv).shape == qkv[0].shape
        assert flashzoo.versions()["sdpa"].impl == "flashzoo.baselines:sdpa"
        errors = registry.plugin_errors()
        assert errors.keys() == {"broken", "wrong", "taken"}
        assert errors["broken"] == "ImportError: no such shared library"
        assert errors["wrong"] == "TypeError: expected a flashzoo.Spec, got str"
        assert "the name 'sdpa' is taken" in errors["taken"]
        assert "toy" in flashzoo.versions()

    def test_a_broken_plugin_is_told_where_its_version_is_missed(self, installed, qkv):
        def broken():
            raise ImportError("no such shared library")

        installed(broken=broken)
        told = "plug-in 'broken' could not be loaded: ImportError: no such shared library"
        assert str(flashzoo.explain(*qkv)).splitlines()[-1] == told
        for ask in (flashzoo.attention, flashzoo.explain):
            with pytest.raises(ValueError, match=f"got 'broken'\n{told}$"):
                ask(*qkv, version="broken")
        with pytest.raises(ValueError, match=f"got 'broken'\n{told}$"), flashzoo.use("broken"):
            pass
        with pytest.raises(ValueError, match=f"versions must be from .*, got 'broken'\n{told}$"):
            flashzoo.compare(*qkv, versions=["broken"])

    def test_a_plugin_that_ends_the_process_does_not(self, installed):
        installed(leaving=lambda: sys.exit("no GPU here"), toy=toy)
        assert "toy" in flashzoo.versions()
        assert registry.plugin_errors() == {"leaving": "SystemExit: no GPU here"}

    def test_who_interrupts_a_plugin_is_heard_and_the_next_question_starts_anew(self, installed):
        interrupts = iter([KeyboardInterrupt])

        def slow():
            for interrupt in interrupts:
                raise interrupt
            return toy()

        installed(slow=slow)
        with pytest.raises(KeyboardInterrupt):
            flashzoo.versions()
        assert "toy" in flashzoo.versions() and registry.plugin_errors() == {}

    def test_a_file_named_in_the_environment_is_a_plugin(self, installed, monkeypatch, tmp_path):
        good, broken = tmp_path / "variant_of_a_file.py", tmp_path / "broken_variant.py"
        good.write_text("import flashzoo, support\nflashzoo.register(support.toy('from_a_file'))")
        broken.write_text("import no_such_module")
        monkeypatch.setenv("FLASHZOO_VARIANTS", os.pathsep.join(map(str, (broken, good))))
        monkeypatch.setattr(sys, "path", [*sys.path])
        installed()
        assert "from_a_file" in flashzoo.versions()
        assert registry.plugin_errors() == {str(broken): "ModuleNotFoundError: No module named 'no_such_module'"}


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
    "v is sparse": ({"v": torch.zeros(2, 6, 4, 8).to_sparse()}, TypeError, r"v must be a dense tensor .* got torch.sparse_coo"),
    "q is sparse by rows": (
        {"q": torch.zeros(6, 8).to_sparse_csr()},
        TypeError,
        r"q must be a dense tensor \(torch.strided\), got torch.sparse_csr: call to_dense\(\)",
    ),
    "k is sparse by columns": ({"k": torch.zeros(6, 8).to_sparse_csc()}, TypeError, r"k must be a dense tensor .* got torch.sparse_csc"),
    "v is nested": ({"v": _nested(torch.strided)}, TypeError, r"v must be a dense tensor .* got a nested one .*: pad it with"),
    "q is nested by offsets": (
        {"q": _nested(torch.jagged)},
        TypeError,
        r"q must be a dense tensor .* got a nested one \(torch.jagged\): pad it with .* or pack .* BlockMask.documents",
    ),
    "no data": (
        dict.fromkeys("qkv", torch.empty(2, 6, 4, 8, device="meta")),
        ValueError,
        r"q, k and v must have data, got device meta: flashzoo.explain answers about such tensors",
    ),
    "q has rank 3": ({"q": torch.randn(6, 4, 8)}, ValueError, r"q must have 4 dimensions .* got shape \(6, 4, 8\)"),
    "k has rank 5": ({"k": torch.randn(1, 2, 6, 4, 8)}, ValueError, r"k must have 4 dimensions .* got shape \(1, 2, 6, 4, 8\)"),
    "v has rank 0": ({"v": torch.tensor(1.0)}, ValueError, r"v must have 4 dimensions .* got shape \(\)"),
    "batches differ": ({"q": torch.randn(3, 6, 4, 8)}, ValueError, r"k must have q's batch 3, got 2 .*q \(3, 6, 4, 8\)"),
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
    "heads do not divide": ({"q": torch.randn(2, 6, 6, 8)}, ValueError, r"q's heads must be a multiple of k's, got 6 and 4"),
    "more key heads than query heads": ({"q": torch.randn(2, 6, 2, 8)}, ValueError, r"q's heads must be a multiple of k's, got 2 and 4"),
    "no heads": (dict.fromkeys("qkv", torch.randn(2, 6, 0, 8)), ValueError, r"heads and head_dim must be at least 1"),
    "no head dim": (dict.fromkeys("qkv", torch.randn(2, 6, 4, 0)), ValueError, r"heads and head_dim must be at least 1"),
    "no head dim of v": ({"v": torch.randn(2, 6, 4, 0)}, ValueError, r"heads and head_dim must be at least 1, got .* v \(2, 6, 4, 0\)"),
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
    "v dtype differs": ({"v": torch.randn(2, 6, 4, 8).bfloat16()}, TypeError, r"must have one dtype, got .* v torch.bfloat16"),
    "devices differ": ({"k": torch.empty(2, 6, 4, 8, device="meta")}, ValueError, r"must be on one device, got q cpu, k meta, v cpu"),
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
    "scale is too large": ({"softmax_scale": -1e31}, ValueError, r"softmax_scale must be at most 1e\+30 in size, got -1e\+31"),
    "scale is infinite": ({"softmax_scale": -math.inf}, ValueError, r"softmax_scale must be finite, got -inf"),
    "scale is a string": ({"softmax_scale": "0.1"}, TypeError, r"softmax_scale must be a float or None, got str"),
    "scale is a tensor": ({"softmax_scale": torch.tensor(0.1)}, TypeError, r"softmax_scale must be a float or None, got Tensor"),
    "scale is a list": ({"softmax_scale": [0.1]}, TypeError, r"softmax_scale must be a float or None, got list"),
    "scale is past floats": ({"softmax_scale": 10**400}, ValueError, r"softmax_scale must be at most 1e\+30 in size, got 10000"),
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
    "window has three sides": ({"window_size": (1, 2, 3)}, ValueError, r"window_size must be None or a pair .* got \(1, 2, 3\)"),
    "window is below -1": ({"window_size": (-2, 0)}, ValueError, r"window_size must be None or a pair .* got \(-2, 0\)"),
    "window is past 64 bits": (
        {"window_size": (0, 2**63)},
        ValueError,
        r"window_size must be .* from 0 to 2\*\*63 - 1, got \(0, 9223372036854775808\)",
    ),
    "window is fractional": ({"window_size": (1.5, 0)}, ValueError, r"window_size must be None or a pair .* got \(1.5, 0\)"),
    "window is whole, but fractional": ({"window_size": (1.0, 0)}, ValueError, r"window_size must be None or a pair .* got \(1.0, 0\)"),
    "window of bools": ({"window_size": (True, 0)}, ValueError, r"window_size must be None or a pair .* got \(True, 0\)"),
    "window far past 64 bits": ({"window_size": (1 << 200, 0)}, ValueError, r"window_size must be .* from 0 to 2\*\*63 - 1, got \(16069"),
    "mask is dense": (
        {"block_mask": torch.ones(6, 6, dtype=torch.bool)},
        TypeError,
        r"block_mask must be a flashzoo.BlockMask or None, got Tensor",
    ),
    "mask is a list": ({"block_mask": [1]}, TypeError, r"block_mask must be a flashzoo.BlockMask or None, got list"),
    "mask is a class": ({"block_mask": flashzoo.BlockMask}, TypeError, r"block_mask must be a flashzoo.BlockMask or None, got type"),
    "version is unknown": ({"version": "v9"}, ValueError, r"version must be 'auto' or one of .*, got 'v9'"),
    "version is None": ({"version": None}, ValueError, r"version must be 'auto' or one of .*, got None"),
    "precision is unknown": ({"precision": "int8"}, ValueError, r"precision must be None or 'fp8', got 'int8'"),
    "precision is a list": ({"precision": ["fp8"]}, ValueError, r"precision must be None or 'fp8', got \['fp8'\]"),
    "precision is a dtype": (
        {"precision": torch.float8_e4m3fn},
        ValueError,
        r"precision must be None or 'fp8', got torch.float8_e4m3fn",
    ),
    "precision of fp32": ({"precision": "fp8"}, TypeError, r"precision='fp8' quantises fp16 or bf16 inputs, got q torch.float32"),
    "precision of e4m3": (_fp8(precision="fp8"), TypeError, r"precision='fp8' quantises fp16 or bf16 inputs, got q torch.float8_e4m3fn"),
    "out_dtype is a string": (_fp8(out_dtype="bf16"), TypeError, r"out_dtype must be None, torch.bfloat16 or torch.float16, got 'bf16'"),
    "out_dtype is a list": (_fp8(out_dtype=[]), TypeError, r"out_dtype must be None, .* got \[\]"),
    "out_dtype is fp32": (_fp8(out_dtype=torch.float32), TypeError, r"out_dtype must be None, .* got torch.float32"),
    "out_dtype of fp32": (
        {"out_dtype": torch.float16},
        TypeError,
        r"out_dtype is for e4m3 inputs .* got torch.float16 with q torch.float32",
    ),
    "a descale of fp32": ({"q_descale": torch.ones(2, 4)}, ValueError, r"q_descale is for e4m3 inputs .* got it with fp32 ones"),
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
    "a descale with a gradient": (_fp8(q_descale=torch.ones(2, 4, requires_grad=True)), ValueError, r"q_descale has no gradient"),
    "a descale of another batch": (
        _fp8(q_descale=torch.ones(1, 4)),
        ValueError,
        r"q_descale must have shape \(batch, heads_kv\) \(2, 4\), or \(batch, heads, blocks of 128 rows\) \(2, 4, 1\), got \(1, 4\)",
    ),
    "a descale for each row": (
        _fp8(v_descale=torch.ones(2, 4, 6)),
        ValueError,
        r"v_descale must have shape .*heads_kv, .* got \(2, 4, 6\)",
    ),
    "a single descale": (_fp8(k_descale=torch.ones(())), ValueError, r"k_descale must have shape .* got \(\)"),
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
        explicit = {"causal": False, "softmax_scale": 8**-0.5, "window_size": (None, None), "deterministic": False, "return_lse": False}
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


class TestImplementation:
    """A version's function that is not there, or does not give what it should."""

    @pytest.mark.parametrize(
        ("impl", "got"),
        [
            ("no_such_module:attention", "ModuleNotFoundError: No module named 'no_such_module'"),
            (f"{SUPPORT}:no_such_function", f"AttributeError: module '{SUPPORT}' has no attribute 'no_such_function'"),
            (f"{SUPPORT}:SMALL", "Problem"),
        ],
    )
    def test_one_that_is_missing_is_named(self, impl, got, qkv):
        flashzoo.register(toy(impl=impl))
        with pytest.raises(ImportError, match=rf"version 'toy': expected a function at '{impl}', got {got}"):
            flashzoo.attention(*qkv, version="toy")

    def test_a_missing_backward_pass_is_named(self, qkv):
        flashzoo.register(toy("older", backward_impl=f"{SUPPORT}:no_such_function"), before="v3")
        flashzoo.register(toy("newer", backward=None), before="older")
        with pytest.raises(ImportError, match=rf"version 'older': expected a function at '{SUPPORT}:no_such_function', got AttributeError"):
            flashzoo.attention(*(x.requires_grad_() for x in qkv))

    @pytest.mark.parametrize(
        ("give", "expected"),
        [
            (lambda q: q, "a tuple (out, lse), got a Tensor (2, 6, 4, 8), torch.float32, on cpu"),
            (lambda q: (q, None, None), "a tuple (out, lse), got tuple"),
            (lambda q: None, "a tuple (out, lse), got NoneType"),
            (lambda q: (None, None), "out as a Tensor (2, 6, 4, 8), torch.float32, on cpu, got NoneType"),
            (
                lambda q: (q.mT, None),
                "out as a Tensor (2, 6, 4, 8), torch.float32, on cpu, got a Tensor (2, 6, 8, 4), torch.float32, on cpu",
            ),
            (lambda q: (q.half(), None), "got a Tensor (2, 6, 4, 8), torch.float16, on cpu"),
            (lambda q: (q.to("meta"), None), "got a Tensor (2, 6, 4, 8), torch.float32, on meta"),
            (lambda q: (q.detach(), q[..., 0].mT), "an out that carries gradients, got one that does not require grad"),
            (lambda q: (q, None), "lse as a Tensor (2, 4, 6), torch.float32, on cpu, got NoneType"),
            (lambda q: (q, q[..., 0]), "lse as a Tensor (2, 4, 6), torch.float32, on cpu, got a Tensor (2, 6, 4), torch.float32, on cpu"),
        ],
    )
    def test_one_that_gives_something_else_is_named(self, give, expected, qkv, monkeypatch):
        monkeypatch.setattr("flashzoo_suite.support.record", lambda q, k, v, problem, operands: give(q))
        flashzoo.register(toy())
        for _ in range(2):
            with pytest.raises(TypeError, match=rf"version 'toy': {SUPPORT}:record must return .*{re.escape(expected)}"):
                flashzoo.attention(*(x.requires_grad_() for x in qkv), return_lse="lse as" in expected, version="toy")

    def test_it_is_looked_at_once_for_each_kind_of_call(self, qkv, monkeypatch):
        looked = []
        check = plan.Plan.check
        monkeypatch.setattr(plan.Plan, "check", lambda *arguments: looked.append(check(*arguments)))
        flashzoo.register(toy())
        for causal in (False, False, True, True, False):
            flashzoo.attention(*qkv, causal=causal, version="toy")
        assert len(looked) == 2


class TestTransforms:
    """What every version is held to there is in THE suite."""

    @pytest.fixture(autouse=True)
    def _toys(self):
        flashzoo.register(toy("plain"))
        flashzoo.register(toy("composed", transforms=frozenset({"jvp", "vmap"})))

    def test_a_version_that_declares_none_is_refused_with_those_that_would_do(self, qkv):
        q, k, v = qkv
        text = r"version 'plain' does not support torch.func.vmap, got q, v under it\nversions that would: sdpa, standard, composed"
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
        with pytest.raises(UnsupportedError, match=r"version 'sdpa' does not support forward-mode AD .*\nversions that would: standard"):
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
            with pytest.raises(UnsupportedError, match=r"'standard' does not support forward-mode AD .*, got (q|k_descale) under it"):
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
        given = dict(zip(("q_descale", "k_descale", "v_descale"), (lazily_negated(torch.rand(2, 4)) for _ in range(3)), strict=True))
        flashzoo.attention(**_fp8(**given), version="fp8")
        assert not any(found.is_neg() for found in DESCALES_SEEN[0])
        assert all(torch.equal(found, x) for found, x in zip(DESCALES_SEEN[0], given.values(), strict=True))

    def test_the_shapes_of_descales_follow_heads_and_lengths(self):
        q, k = (torch.zeros(1, seqlen, heads, 16).to(torch.float8_e4m3fn) for seqlen, heads in ((257, 6), (128, 2)))
        good = {"q_descale": (1, 6, 3), "k_descale": (1, 2, 1), "v_descale": (1, 2)}
        flashzoo.attention(q, k, k, **{name: torch.ones(shape) for name, shape in good.items()}, version="fp8")
        for name, shape in (("q_descale", (1, 6)), ("q_descale", (1, 2, 3)), ("k_descale", (1, 6, 1)), ("v_descale", (1, 2, 2))):
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
        torch.testing.assert_close(flashzoo.sdpa(q, k, v, enable_gqa=True), scaled_dot_product_attention(q, k, v, enable_gqa=True))
        with pytest.raises(ValueError, match="enable_gqa: expected True where head counts differ, got False with 4 and 2 heads"):
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
            out, lse = flashzoo.attention(q, k, k, softmax_scale=scale, out_dtype=out_dtype, q_descale=blocks, return_lse=True)
            assert out.shape == q.shape and out.dtype == out_dtype and not out.any()
            assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32 and bool((lse == -math.inf).all())

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_of_what_would_be_quantised(self, shapes):
        q_shape, k_shape = shapes
        q, k, v = (torch.randn(shape).half().requires_grad_() for shape in (q_shape, k_shape, k_shape))
        out, lse = flashzoo.attention(q, k, v, precision="fp8", return_lse=True)
        assert out.shape == q.shape and out.dtype == torch.float16 and not out.any()
        assert not any(x.any() for x in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))))

    def test_still_asks_who_would_answer(self):
        q = torch.randn(2, 0, 4, 8)
        with pytest.raises(UnsupportedError, match="does not support window_size"):
            flashzoo.attention(q, q, q, window_size=(1, 0), version="v1")

    def test_no_keys_of_bad_numbers(self):
        """The zeros must not be made from the inputs by a product: 0 * inf is NaN."""
        q, k = torch.full((1, 3, 2, 4), math.inf), torch.empty(1, 0, 2, 4)
        assert torch.equal(flashzoo.attention(q, k, k), torch.zeros_like(q))
