"""Who answers a call, and why the others don't. No GPU: problems are made by hand."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

import flashzoo
from flashzoo import Problem, UnsupportedError, registry
from flashzoo_suite.support import CALLS, dense, dense_backward, toy

HOPPER = Problem(batch=2, seqlen_q=128, seqlen_k=128, heads=8, heads_kv=8, head_dim=64, device="cuda", arch=90)
ON_CPU = dataclasses.replace(HOPPER, device="cpu", arch=None, dtype="fp32")
NAMES = {function: f"{function.__module__}:{function.__name__}" for function in (dense, dense_backward)}


@pytest.fixture(autouse=True)
def _apart(registry_as_it_was):
    """Set up before what a class registers for its tests."""


def _gradients(attention, qkv):
    """Those of q, k and v, through out and, if it is given, through lse."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    outputs = attention(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(outputs, leaves, [torch.randn(x.shape, generator=generator) for x in outputs])


class TestChoose:
    def test_auto_takes_the_first_without_objection(self):
        flashzoo.register(toy("second"), before="v3")
        flashzoo.register(toy("first", arch=(100, None)), before="second")
        assert registry.choose(HOPPER).forward.name == "second"
        assert registry.choose(dataclasses.replace(HOPPER, arch=100)).forward.name == "first"

    def test_auto_leaves_what_a_version_leaves_to_others_that_can(self):
        flashzoo.register(toy(leaves=lambda problem: ["it is long"] if problem.seqlen_k > 100 else []), before="v3")
        short, long = (dataclasses.replace(HOPPER, seqlen_q=n, seqlen_k=n) for n in (100, 101))
        assert registry.choose(short).forward.name == "toy"
        assert registry.choose(long).forward.name == "v3"
        assert "auto leaves it to others that can: it is long" in str(flashzoo.explain(long))
        for spec in flashzoo.versions().values():
            if spec.name != "toy":
                flashzoo.unregister(spec.name)
        assert registry.choose(long).forward.name == "toy"

    @pytest.mark.parametrize(
        ("batch", "seqlen_q", "seqlen_k", "heads", "fields", "taken"),
        [
            (1, 1, 131072, 8, {}, True),
            (1, 1, 131072, 8, {"used_k": True}, True),
            (32, 1, 2048, 8, {"used_k": True}, True),
            (1, 512, 65536, 8, {}, True),
            (1, 512, 65536, 64, {}, False),
            (2, 4096, 4096, 8, {}, False),
            (1, 1, 131072, 8, {"grad": True}, False),
            (1, 1, 131072, 8, {"arch": 80, "used_k": True}, False),
            (1, 1, 131072, 8, {"arch": 80, "page_size": 16, "used_k": True}, True),
            (1, 4096, 8192, 8, {"sequences": 40, "packed_q": True, "used_k": True}, True),
        ],
        ids=str,
    )
    def test_auto_takes_decode_where_few_tiles_have_many_keys(self, batch, seqlen_q, seqlen_k, heads, fields, taken):
        problem = flashzoo.Problem(
            batch, seqlen_q, seqlen_k, heads, 8, 128, dtype="bf16", causal=seqlen_q > 1, **{"arch": 90} | fields
        )
        assert (registry.choose(problem).forward.name == "decode") == taken

    def test_auto_passes_over_what_does_not_offer_itself(self):
        flashzoo.register(toy(auto=()), before="v3")
        assert registry.choose(HOPPER).forward.name != "toy"
        assert registry.choose(HOPPER, "toy").forward.name == "toy"

    @pytest.mark.parametrize("arch", [80, 89, 90, 100])
    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
    @pytest.mark.parametrize(
        "feature",
        [
            {},
            {"causal": True},
            {"window": (8, 0)},
            {"heads_kv": 2, "seqlen_k": 7},
            {"deterministic": True, "grad": True},
        ],
        ids=str,
    )
    def test_auto_is_the_newest_kernel_on_every_gpu(self, arch, dtype, feature):
        """For the forward pass; v2 has a fallback backward for all."""
        problem = dataclasses.replace(HOPPER, arch=arch, dtype=dtype, **feature)
        specs = [
            spec for spec in flashzoo.versions().values() if spec.auto and not (spec.leaves and spec.leaves(problem))
        ]
        able = [spec.name for spec in specs if not spec.unsupported(problem.forward)]
        assert registry.choose(problem).forward.name == able[0]
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
        assert registry.choose(dataclasses.replace(HOPPER, **problem)).forward.name == "sdpa"

    def test_auto_on_the_cpu_is_torch(self, qkv):
        assert flashzoo.explain(*qkv).chosen == "sdpa"

    def test_what_even_sdpa_cannot_do_is_left_to_standard(self, qkv):
        assert flashzoo.explain(*qkv, return_lse=True).chosen == "standard"

    def test_auto_with_no_taker_says_why_of_each(self):
        with pytest.raises(UnsupportedError) as error:
            registry.choose(dataclasses.replace(HOPPER, arch=30))
        for name, spec in flashzoo.versions().items():
            assert (f"  {name}: needs sm_" in str(error.value)) == ("cuda" in spec.auto)

    def test_a_name_never_falls_back(self):
        with pytest.raises(UnsupportedError) as error:
            registry.choose(dataclasses.replace(HOPPER, window=(4, 0)), "v1")
        text = str(error.value)
        assert (
            "version 'v1' can't take batch 2, seqlen 128, heads 8, head_dim 64, bf16, window (4, 0), on sm_90" in text
        )
        assert "  v1: does not support window_size" in text
        assert "versions that would: decode, v3, v2, blocksparse, sdpa, standard" in text

    def test_a_name_that_nobody_could_replace(self):
        with pytest.raises(UnsupportedError, match="no registered version would"):
            registry.choose(dataclasses.replace(HOPPER, arch=30), "v2")

    def test_a_name_nobody_has(self):
        with pytest.raises(
            ValueError,
            match="version must be 'auto' or one of decode, v3, v3_fp8, v2, v1, blocksparse, sdpa, standard, got 'v9'",
        ):
            registry.choose(HOPPER, "v9")

    @pytest.mark.parametrize("fields", [{"head_dim": 264, "head_dim_v": None}, {"head_dim_v": 264}], ids=str)
    def test_what_nobody_has_tiles_for_is_explained(self, fields):
        text = str(flashzoo.explain(dataclasses.replace(HOPPER, **fields)))
        assert "v3" in text and "got 264" in text

    @pytest.mark.parametrize("name", ["v1", "v2"])
    def test_bf16_on_the_cpu_is_refused_by_the_interpreted_kernels(self, name):
        with pytest.raises(UnsupportedError, match=f"{name}: takes dtype fp16 or fp32 on the CPU, got bf16"):
            registry.choose(dataclasses.replace(ON_CPU, dtype="bf16"), name)

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
        with pytest.raises(
            ValueError, match="FLASHZOO_INTERPRETER_LIMIT must be a number of blocks of 64x64 scores, got 'none'"
        ):
            flashzoo.attention(*[torch.zeros(1, 1026, 1, 8)] * 3, version="in_triton")

    @pytest.mark.parametrize(
        ("name", "language", "left"), [("v1", "triton", "v3"), ("v2", "triton", "v3"), ("v3", "cutlass", "v2")]
    )
    def test_a_kernel_without_its_language_is_refused(self, name, language, left, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package != language)
        registry._forget()
        with pytest.raises(UnsupportedError, match=f"needs the package '{language}', which is not installed"):
            registry.choose(HOPPER, name)
        assert registry.choose(HOPPER).forward.name == left
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
        with pytest.raises(
            UnsupportedError, match="v3: its backward pass needs the package 'triton', which is not installed"
        ):
            registry.choose(dataclasses.replace(HOPPER, grad=True), "v3")
        registry._forget()

    def test_without_any_kernel_language_auto_is_torch(self, monkeypatch):
        monkeypatch.setattr(flashzoo.spec, "_installed", lambda package: package not in ("triton", "cutlass"))
        registry._forget()
        assert registry.choose(HOPPER).forward.name == "sdpa"
        registry._forget()

    @pytest.mark.parametrize(
        "empty", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"seqlen_q": 0, "batch": 0}], ids=str
    )
    @pytest.mark.parametrize("arch", [80, 90, 100])
    def test_what_is_empty_is_taken_and_explained(self, arch, empty):
        for fields in ({}, {"grad": True}, {"used_k": True}, {"causal": True, "heads_kv": 2}, {"window": (8, 0)}):
            problem = dataclasses.replace(HOPPER, arch=arch, **fields, **empty)
            assert flashzoo.explain(problem).chosen == registry.choose(problem).forward.name
            assert str(flashzoo.explain(problem))

    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
    @pytest.mark.parametrize("arch", [80, 89, 90, 100])
    def test_auto_never_quantises_unasked(self, dtype, arch):
        for fields in ({}, {"causal": True, "grad": True}, {"lse": True, "heads_kv": 2}):
            problem = dataclasses.replace(HOPPER, dtype=dtype, arch=arch, **fields)
            assert registry.choose(problem).forward.name != "v3_fp8"
            assert flashzoo.versions()["v3_fp8"].unsupported(problem)

    @pytest.mark.parametrize(
        "fields",
        [
            {"dtype": "e4m3", "out_dtype": None},
            {"precision": "fp8"},
            {"precision": "fp8", "dtype": "fp16", "grad": True},
        ],
        ids=str,
    )
    def test_fp8_is_v3s_on_hopper_and_standards_elsewhere(self, fields):
        problem = dataclasses.replace(HOPPER, **fields)
        assert registry.choose(problem).forward.name == "v3_fp8"
        able = [spec.name for spec in flashzoo.versions().values() if not spec.unsupported(problem)]
        assert able == ["v3_fp8", "standard"]
        for other in (
            {"arch": 80},
            {"arch": 100},
            {"device": "cpu", "arch": None},
            {"head_dim": 72, "head_dim_v": None},
        ):
            assert registry.choose(dataclasses.replace(problem, **other)).forward.name == "standard"

    @pytest.mark.parametrize(
        "problem",
        [{"arch": 80}, {"arch": 89}, {"arch": 100}, {"dtype": "fp32"}, {"head_dim": 60, "head_dim_v": None}],
        ids=str,
    )
    def test_auto_goes_on_to_v2_where_v3_cannot(self, problem):
        assert registry.choose(HOPPER).forward.name == "v3"
        assert registry.choose(dataclasses.replace(HOPPER, **problem)).forward.name == "v2"


class TestUnquantized:
    """A version that quantises, and whose backward pass is two passes of another implementation on the
    inputs as they are."""

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
        assert [(problem.precision, problem.grad) for problem in CALLS[:3]] == [
            ("fp8", True),
            (None, False),
            (None, True),
        ]


class TestFallbackBackward:
    """A version that has no backward pass for a problem, and another with a fallback backward."""

    @staticmethod
    def registered(fallback: dict | None = None, **newer) -> None:
        flashzoo.register(
            toy("older", impl=NAMES[dense], backward_impl=NAMES[dense_backward], **fallback or {}), before="v3"
        )
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

    @pytest.mark.parametrize(
        ("change", "got"),
        [
            (lambda lse: None, "NoneType"),
            (lambda lse: lse.half(), "a Tensor (2, 4, 6), torch.float16, on cpu"),
            (lambda lse: lse.amax(1, keepdim=True), "a Tensor (2, 1, 6), torch.float32, on cpu"),
        ],
        ids=["none", "dtype", "shape"],
    )
    def test_the_lse_that_the_other_starts_from_is_looked_at(self, change, got, qkv, monkeypatch):
        """Which the call did not ask for."""

        def lies(*arguments):
            out, lse = dense(*arguments)
            return out, change(lse)

        monkeypatch.setattr("flashzoo_suite.support.dense", lies)
        self.registered()
        expected = f"version 'newer': {NAMES[dense]} must return lse as a Tensor (2, 4, 6), torch.float32, on cpu, "
        with pytest.raises(TypeError, match=re.escape(f"{expected}got {got}")):
            _gradients(flashzoo.attention, qkv)

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
        of_newer = lines.index("* newer        a toy: chosen for the forward pass") + 1
        told = [line.strip() for line in lines[of_newer : of_newer + 2]]
        assert told == ["- has no backward pass, and an input requires grad", "- grad is False"]

    def test_the_choice_has_both(self):
        self.registered()
        problem = dataclasses.replace(HOPPER, grad=True)
        choice = registry.choose(problem)
        assert (choice.forward.name, choice.backward.name, str(choice)) == (
            "newer",
            "older",
            "newer forward, older backward",
        )
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
        ids=[
            "not deterministic",
            "not causal",
            "not so wide",
            "not under auto",
            "no forward",
            "no lse",
            "newer not under auto",
        ],
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
            text.splitlines()[0]
            == "v3 takes batch 2, seqlen 128, heads 8, head_dim 64, bf16, window (8, 0), lse, on sm_90, by the default"
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
        text = (
            r"expected a Problem alone, or with version=, got {} beside it; "
            r"dataclasses.replace\(problem, ...\) changes what it asks for"
        )
        for beside in (
            {"causal": True},
            {"arch": 90, "causal": False},
            {"k": torch.zeros(2, 6, 4, 8), "window_size": None},
        ):
            with pytest.raises(TypeError, match=text.format(", ".join(beside))):
                flashzoo.explain(HOPPER, **beside)

    def test_an_argument_nobody_knows(self, qkv):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            flashzoo.explain(*qkv, dropout=0.1)

    def test_arch_is_a_number(self, qkv):
        with pytest.raises(TypeError, match="arch must be an int, such as 90, or None, got '90'"):
            flashzoo.explain(*qkv, arch="90")

    def test_of_half_the_tensors(self, qkv):
        with pytest.raises(TypeError, match="k and v must be tensors where q is one, got NoneType"):
            flashzoo.explain(qkv[0])

    def test_refuses_what_attention_refuses(self, qkv):
        with pytest.raises(ValueError, match="softmax_scale must be finite, got nan"):
            flashzoo.explain(*qkv, softmax_scale=math.nan)
