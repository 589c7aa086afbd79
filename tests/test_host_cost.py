"""What a call costs the host before any kernel runs. Limits scale with the machine's own speed; the microseconds are printed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from support import toy
from torch.nn.functional import scaled_dot_product_attention

import flashzoo

DISPATCH_US = 10.0
EXPLAIN_US = 200.0
TINY_CALL_US = {"v3": 30.0}
"""What a call on a tiny problem may cost in all, for the versions that promise it."""
CALIBRATION_US = 30.0
"""What `calibration` takes on the machine that the limits are meant for."""
OVER_SDPA = 40 / 37
"""The host's cost of v2 over that of torch's attention with the same transposes, on a GPU."""


def calibration() -> int:
    """Plain interpreter work: calls, attribute and dict look-ups, small tuples."""
    table, total = {}, 0
    for i in range(200):
        table[i % 7, "key"] = i
        total += len(table) + max(i, total & 3)
    return total


def best_us(function: Callable[[], object], calls: int = 200) -> float:
    """Microseconds of one call: the best of 15 batches, since what else the machine does only ever adds."""

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls * 1e6

    return min(batch() for _ in range(15))


def limit(microseconds: float) -> float:
    return microseconds * max(1.0, best_us(calibration) / CALIBRATION_US)


@pytest.fixture
def qkv():
    return tuple(torch.randn(1, 16, 2, 16) for _ in range(3))


@pytest.fixture
def registered():
    flashzoo.register(toy("costless", impl=f"{__name__}:costless"))
    yield
    flashzoo.unregister("costless")


def costless(q, k, v, problem, softmax_scale):
    return q, None


def test_dispatch(benchmark, qkv, registered):
    """A call of `attention` whose version does nothing is dispatch alone."""

    def dispatch():
        return flashzoo.attention(*qkv, causal=True, version="costless")

    benchmark(dispatch)
    spent, allowed = best_us(dispatch), limit(DISPATCH_US)
    print(f"dispatch {spent:.2f} us, limit {allowed:.1f} us")
    assert spent < allowed


def test_explain(benchmark, qkv):
    def explain():
        return flashzoo.explain(*qkv, causal=True, arch=90)

    benchmark(explain)
    spent, allowed = best_us(explain), limit(EXPLAIN_US)
    print(f"explain {spent:.1f} us, limit {allowed:.0f} us")
    assert spent < allowed


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, spec in flashzoo.versions().items() if spec.requires])
def test_a_tiny_call_on_the_gpu(benchmark, name):
    major, minor = torch.cuda.get_device_capability()
    problem = flashzoo.Problem(1, 64, 64, 2, 2, 64, causal=True, arch=10 * major + minor)
    if reasons := flashzoo.versions()[name].unsupported(problem):
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call():
        return flashzoo.attention(q, k, v, causal=True, version=name)

    def torchs():
        return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)

    for function in (call, torchs):
        function()
    benchmark(call)
    torch.cuda.synchronize()
    spent = best_us(call)
    torch.cuda.synchronize()
    sdpa = best_us(torchs)
    torch.cuda.synchronize()
    allowed = limit(TINY_CALL_US.get(name, math.inf))
    print(f"{name}: {spent:.1f} us of the host's time, limit {allowed:.1f} us, torch's attention {sdpa:.1f} us")
    assert spent < allowed
    if name == "v2":
        assert spent < OVER_SDPA * sdpa
