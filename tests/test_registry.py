"""Who is registered: by a call, by an entry point, by a file; and what stands behind a version's name."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from functools import partial

import pytest
import torch

import flashzoo
from flashzoo import UnsupportedError, registry
from flashzoo.call import plan
from flashzoo_suite.support import CALLS, dense, toy

SUPPORT = dense.__module__


@pytest.fixture(autouse=True)
def _apart(registry_as_it_was):
    """Set up before what a class registers for its tests."""


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
        assert registry.current().broken == {}

    def test_a_broken_plugin_breaks_nothing_and_is_reported(self, installed, qkv):
        def broken():
            raise ImportError("no such shared library")

        installed(broken=broken, wrong=lambda: "a string", taken=lambda: toy("sdpa"), toy=toy)
        assert flashzoo.attention(*qkv).shape == qkv[0].shape
        assert flashzoo.versions()["sdpa"].impl == "flashzoo.baselines:sdpa"
        errors = registry.current().broken
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
        assert registry.current().broken == {"leaving": "SystemExit: no GPU here"}

    def test_who_interrupts_a_plugin_is_heard_and_the_next_question_starts_anew(self, installed):
        interrupts = iter([KeyboardInterrupt])

        def slow():
            for interrupt in interrupts:
                raise interrupt
            return toy()

        installed(slow=slow)
        with pytest.raises(KeyboardInterrupt):
            flashzoo.versions()
        assert "toy" in flashzoo.versions() and registry.current().broken == {}

    def test_a_file_named_in_the_environment_is_a_plugin(self, installed, monkeypatch, tmp_path):
        good, broken = tmp_path / "variant_of_a_file.py", tmp_path / "broken_variant.py"
        good.write_text(
            "import flashzoo, flashzoo_suite.support\nflashzoo.register(flashzoo_suite.support.toy('from_a_file'))"
        )
        broken.write_text("import no_such_module")
        monkeypatch.setenv("FLASHZOO_VARIANTS", os.pathsep.join(map(str, (broken, good))))
        monkeypatch.setattr(sys, "path", [*sys.path])
        installed()
        assert "from_a_file" in flashzoo.versions()
        assert registry.current().broken == {str(broken): "ModuleNotFoundError: No module named 'no_such_module'"}

    def test_a_file_may_be_loaded_again(self, installed, monkeypatch, tmp_path):
        """By a command and as a plug-in; what it names as its implementation is in another module."""
        file = tmp_path / "variant_of_another_module.py"
        file.write_text(
            "import flashzoo, flashzoo_suite.support\nflashzoo.register(flashzoo_suite.support.toy('elsewhere'))"
        )
        monkeypatch.setattr(sys, "path", [*sys.path])
        installed()
        assert registry.load_file(file) == registry.load_file(file) == ["elsewhere"]


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
        with pytest.raises(
            ImportError,
            match=rf"version 'older': expected a function at '{SUPPORT}:no_such_function', got AttributeError",
        ):
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
            (
                lambda q: (q, q[..., 0].mT.detach()),
                "an lse that carries gradients, got one that does not require grad",
            ),
            (lambda q: (q, None), "lse as a Tensor (2, 4, 6), torch.float32, on cpu, got NoneType"),
            (
                lambda q: (q, q[..., 0]),
                "lse as a Tensor (2, 4, 6), torch.float32, on cpu, got a Tensor (2, 6, 4), torch.float32, on cpu",
            ),
        ],
    )
    def test_one_that_gives_something_else_is_named(self, give, expected, qkv, monkeypatch):
        monkeypatch.setattr("flashzoo_suite.support.record", lambda q, k, v, problem, operands: give(q))
        flashzoo.register(toy())
        for _ in range(2):
            with pytest.raises(
                TypeError, match=rf"version 'toy': {SUPPORT}:record must return .*{re.escape(expected)}"
            ):
                flashzoo.attention(*(x.requires_grad_() for x in qkv), return_lse="lse" in expected, version="toy")

    def test_what_a_first_call_does_not_show_is_looked_at_in_the_next(self, qkv, monkeypatch):
        """LSE has no gradient by v, and a graph records its calls itself."""
        q, k, v = qkv
        forgets = lambda q, k, v, problem, operands: (q + 0 * v, q[..., 0].mT.detach())  # noqa: E731
        monkeypatch.setattr("flashzoo_suite.support.record", forgets)
        flashzoo.register(toy())
        call = partial(flashzoo.attention, return_lse=True, version="toy")
        call(q, k, v.requires_grad_())
        torch.compile(call, backend="eager")(q.requires_grad_(), k, v)
        with pytest.raises(TypeError, match="must return an lse that carries gradients"):
            call(q, k, v)

    def test_it_is_looked_at_once_for_each_kind_of_call(self, qkv, monkeypatch):
        looked = []
        check = plan.Plan.check
        monkeypatch.setattr(plan.Plan, "check", lambda *arguments: looked.append(check(*arguments)))
        flashzoo.register(toy())
        for causal in (False, False, True, True, False):
            flashzoo.attention(*qkv, causal=causal, version="toy")
        assert len(looked) == 2
