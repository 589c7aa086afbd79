"""Several threads at once: at the first question, beside `register`, in torch's attention, and which version
`flashzoo.use` is for."""

from __future__ import annotations

import contextvars
import dataclasses
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flashzoo
from flashzoo import registry
from flashzoo.call.forms import MaskForm
from flashzoo_suite.support import DEVICE, SMALL, draw, mask_of, same_bits, toy

THREADS = 8
PLAIN = dataclasses.replace(SMALL, dtype="fp32", device="cpu", arch=None)
"""Under "auto" `sdpa` takes it."""


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch):
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    monkeypatch.setattr(registry, "_zoo", registry.current())


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads give way to one another after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(
    function: Callable[[], object], rounds: int = 1, prepare: Callable[[], object] = lambda: None
) -> list[object]:
    """What the function gives in all threads, which begin each round together, after prepare()."""
    start = threading.Barrier(THREADS, action=prepare)

    def call(_: int) -> list[object]:
        try:
            return [function() for _ in range(rounds) if start.wait(60) >= 0]
        except BaseException:
            start.abort()
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        return [answer for answers in pool.map(call, range(THREADS)) for answer in answers]


class TestFirstQuestion:
    @pytest.fixture
    def plugins(self, monkeypatch):
        """Make these functions the entry points, unread as yet."""

        def install(*loads: Callable[[], object]) -> None:
            points = [SimpleNamespace(name=f"plugin_{i}", load=load) for i, load in enumerate(loads)]
            monkeypatch.setattr(registry, "entry_points", lambda group: points)
            monkeypatch.setattr(registry, "_plugins", "unread")

        return install

    @pytest.mark.parametrize(
        "ask",
        [
            lambda: "slow" in flashzoo.versions(),
            lambda: flashzoo.explain(PLAIN, version="slow").chosen == "slow",
        ],
        ids=["versions", "explain"],
    )
    def test_everyone_waits_for_a_slow_plugin(self, ask, plugins, monkeypatch):
        rounds, before, loads = 500, registry.current(), []

        def slow():
            time.sleep(1e-3)
            loads.append("slow" in registry.current().specs)  # a plug-in may ask, too
            return flashzoo.register(toy("slow"))

        def unread():
            monkeypatch.setattr(registry, "_zoo", before)
            monkeypatch.setattr(registry, "_plugins", "unread")

        plugins(slow)
        assert all(at_once(ask, rounds, unread))
        assert loads == [False] * rounds
        assert registry.current().broken == {}

    def test_a_plugin_that_another_thread_imports_meanwhile_is_no_deadlock(self, plugins, monkeypatch, tmp_path):
        """Python holds a lock while it imports a module, and the module registers."""
        (tmp_path / "variant_imported_twice.py").write_text(
            "import time\ntime.sleep(0.05)\nfrom flashzoo_suite.support import flashzoo, "
            "toy\nSPEC = flashzoo.register(toy('twice'))"
        )
        monkeypatch.syspath_prepend(tmp_path)
        plugins(EntryPoint("twice", "variant_imported_twice:SPEC", registry.ENTRY_POINTS).load)
        importing = threading.Thread(target=importlib.import_module, args=("variant_imported_twice",), daemon=True)
        asking = threading.Thread(target=flashzoo.versions, daemon=True)
        importing.start()
        time.sleep(0.01)
        asking.start()
        for thread in (importing, asking):
            thread.join(10)
            assert not thread.is_alive()
        assert "twice" in flashzoo.versions() and registry.current().broken == {}


class TestRegisterBesideCalls:
    def test_every_answer_is_of_one_moment(self):
        """The versions before or after a change, in their order, and nothing in between."""
        q = torch.randn(1, 4, 1, 8)
        names = list(flashzoo.versions())
        moments = [names, ["beside", *names]]
        stop = threading.Event()

        def change():
            while not stop.is_set():
                flashzoo.register(toy("beside", auto=()), before=names[0])
                flashzoo.unregister("beside")

        def ask():
            flashzoo.attention(q, q, q, version="standard")
            explanation = flashzoo.explain(q, q, q)
            assert explanation.chosen == "sdpa"
            return [verdict.name for verdict in explanation.verdicts] in moments and list(
                flashzoo.versions()
            ) in moments

        changing = threading.Thread(target=change)
        with switching_often():
            changing.start()
            try:
                answers = at_once(ask, rounds=20)
            finally:
                stop.set()
                changing.join()
        assert all(answers)

    def test_an_answer_that_a_change_overtook_is_not_remembered(self):
        q = torch.randn(1, 4, 1, 8)
        asked, changed = threading.Event(), threading.Event()

        def check(problem):
            asked.set()
            assert changed.wait(10)
            return []

        names = list(flashzoo.versions())
        flashzoo.register(toy("old", check=check, impl=f"{__name__}:zeros"), before=names[0])
        calling = threading.Thread(target=flashzoo.attention, args=(q, q, q))
        calling.start()
        assert asked.wait(10)
        flashzoo.register(toy("new"), before="old")
        changed.set()
        calling.join()
        assert flashzoo.explain(q, q, q).chosen == "new"
        assert torch.equal(flashzoo.attention(q, q, q), q * 8**-0.5)


def zeros(q, k, v, problem, operands):
    return torch.zeros_like(q), None


def switches() -> tuple[bool, ...]:
    """torch's own, which are the whole process's: which kernels its attention may take."""
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


class Watched(TorchDispatchMode):
    """Notes the operators that this thread calls, and torch's switches at each."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.switches = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.add(func.name())
        self.switches.add(switches())
        return func(*args, **kwargs or {})


SDPA = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3), "seqlen_k": 75},
    "gqa": {"heads_kv": 1},
    "gqa and window": {"heads_kv": 1, "window": (5, 0)},
    "head dim 60": {"head_dim": 60, "causal": True},
    "head dim 264": {"head_dim": 264},
    "v is narrower": {"head_dim": 64, "head_dim_v": 32},
    "block mask": {"seqlen_q": 200, "seqlen_k": 200, "block_mask": MaskForm(64, 64, heads=2)},
}


class TestSdpa:
    """torch's attention, whose kernel of cuDNN's is kept out with no switch of torch's touched."""

    @pytest.mark.parametrize("case", SDPA)
    @pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
    def test_torchs_switches_are_not_touched(self, dtype, case):
        problem = dataclasses.replace(SMALL, dtype=dtype, grad=True, **{"head_dim_v": None} | SDPA[case])
        before = switches()
        assert before[3]
        with Watched() as watched:
            self.gradients(problem)
        assert watched.switches == {before}
        assert not [name for name in watched.called if "cudnn" in name]

    def test_torchs_switches_are_as_they_were_after_many_threads(self):
        q = torch.randn(1, 4, 1, 8, device=DEVICE)
        before = switches()
        with switching_often():
            answers = at_once(lambda: flashzoo.attention(q, q, q, version="sdpa"), rounds=20)
        assert switches() == before
        assert all(same_bits(answer, answers[0]) for answer in answers)

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", SDPA)
    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
    def test_is_what_torch_gives_without_cudnn(self, dtype, case, monkeypatch):
        problem = dataclasses.replace(SMALL, dtype=dtype, grad=True, **{"head_dim_v": None} | SDPA[case])
        found = self.gradients(problem)
        monkeypatch.setattr("flashzoo.baselines._attend_on_gpu", torch.nn.functional.scaled_dot_product_attention)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            expected = self.gradients(problem)
        assert same_bits(found[0], expected[0])
        torch.testing.assert_close(found[1:], expected[1:])  # torch's backward kernels add in no fixed order

    @staticmethod
    def gradients(problem):
        """out, dq, dk and dv."""
        tensors, dout, _ = draw(problem)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = flashzoo.attention(
            *leaves, causal=problem.causal, window_size=problem.window, block_mask=mask_of(problem), version="sdpa"
        )
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


class TestUse:
    def test_a_new_thread_begins_with_no_choice(self):
        with flashzoo.use("standard"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(flashzoo.explain, PLAIN).result().chosen == "sdpa"
            assert flashzoo.explain(PLAIN).chosen == "standard"

    def test_a_copied_context_takes_the_choice_along(self):
        with flashzoo.use("standard"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(contextvars.copy_context().run, flashzoo.explain, PLAIN).result().chosen == "standard"

    def test_a_choice_is_not_felt_by_a_thread_beside(self):
        chosen, asked = threading.Event(), threading.Event()

        def choosing():
            with flashzoo.use("standard"):
                chosen.set()
                assert asked.wait(10)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(choosing)
            assert chosen.wait(10)
            assert flashzoo.explain(PLAIN).chosen == "sdpa"
            asked.set()
            done.result()
