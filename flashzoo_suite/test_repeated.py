"""The same call again, by others at the same time, and what only a GPU has."""

from __future__ import annotations

import gc
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import flashzoo
from flashzoo import Problem
from flashzoo.accuracy import Judge
from flashzoo.reference import Result
from flashzoo.timing import with_peak
from flashzoo_suite.support import (
    DEVICE,
    WORKER_BYTES,
    accept,
    both,
    draw,
    same_bits,
)

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


# The same call again.


REPEATS = 50 if ON_GPU else 3
BUSY = (
    {"batch": 8, "heads": 8, "heads_kv": 2, "seqlen_q": 513, "seqlen_k": 640, "head_dim": 64}
    if ON_GPU
    else {"heads_kv": 1, "seqlen_k": 70}
)


@asks({"plain": {}, "causal": {"causal": True}, "mqa": {"heads_kv": 1}}, **BUSY | {"deterministic": True, "both": True})
def test_deterministic_means_the_same_bits(version, problem):
    """Seen in FA #2158, c5f6ff49 (GQA gradients), #2244, ab66326a (deterministic=True that was not)."""
    tensors, dout, dlse = draw(problem)
    first = both(version, tensors, problem, dout, dlse).items()
    for _ in range(REPEATS):
        again = both(version, tensors, problem, dout, dlse).items()
        assert [name for name in first if not same_bits(first[name], again[name])] == []


@asks({"plain": {}, "causal": {"causal": True}}, both=True, heads_kv=1, seqlen_k=70)
def test_threads(version, problem):
    """Several threads at once, each with inputs of its own. Seen in Triton #8437, FlashInfer #4476
    (shared workspace)."""
    drawn_by = [draw(problem, seed) for seed in range(4)]
    together = threading.Barrier(4)

    def work(seed: int) -> Result:
        tensors, dout, dlse = drawn_by[seed]
        together.wait()
        return both(version, tensors, problem, dout, dlse)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    for (tensors, dout, dlse), result in zip(drawn_by, results, strict=True):
        accept(Judge(*tensors, problem, dout, dlse), result)


# What only a GPU has.


@pytest.mark.gpu
@asks({"plain": {}, "causal": {"causal": True}}, both=True, **BUSY)
def test_cuda_graph(version, problem):
    """Captured once, replayed on other numbers. Seen in Triton #10596 (autotuning in capture), FA #2620 (a sync)."""
    tensors, dout, dlse = draw(problem, seed=0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(version, tensors, problem, dout, dlse)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both(version, tensors, problem, dout, dlse)
    others, other_dout, other_dlse = draw(problem, seed=1)
    for held, other in zip((*tensors, dout), (*others, other_dout), strict=True):
        held.copy_(other)
    if dlse is not None and other_dlse is not None:
        dlse.copy_(other_dlse)
    graph.replay()
    accept(Judge(*others, problem, other_dout, other_dlse), result)


@pytest.mark.gpu
@asks(both=True, causal=True, **BUSY)
def test_side_stream(version, problem):
    """The inputs arrive late, on a stream of their own. Seen in FA #1957, xformers test_cuda_streams."""
    tensors, dout, dlse = draw(problem)
    late = tuple(torch.full_like(x, torch.nan) for x in tensors)
    both(version, tensors, problem, dout, dlse)  # compiled before the clock below starts
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, value in zip(late, tensors, strict=True):
            x.copy_(value)
        result = both(version, late, problem, dout, dlse)
    stream.synchronize()
    accept(Judge(*tensors, problem, dout, dlse), result)


@pytest.mark.gpu
@pytest.mark.alone  # a worker sees one GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@asks(both=True, causal=True)
def test_tensors_on_another_device_than_the_current_one(version, problem):
    """Seen in FlashInfer #452, xformers #681, PyTorch #141010."""
    tensors, dout, dlse = draw(problem)
    there = torch.device("cuda", 1)
    moved = tuple(x.to(there) for x in tensors)
    with torch.cuda.device(0):
        result = both(version, moved, problem, dout.to(there), None if dlse is None else dlse.to(there))
        assert torch.cuda.current_device() == 0
    assert result.out.device == there
    accept(Judge(*tensors, problem, dout, dlse), Result(**{name: x.to("cuda:0") for name, x in result.items().items()}))


@pytest.mark.gpu
@pytest.mark.alone  # they need most of the GPU's memory
@asks(both=True, causal=True, batch=(1 << 17) + 2, seqlen_q=16, seqlen_k=16, heads=16, heads_kv=16, head_dim=64)
def test_tensors_of_more_than_2_to_31_elements(version, problem):
    """The last batch lies past 32 bits, and so does the grid past 65535.
    Seen in PyTorch #142228, FA #1500, FlashInfer #3125."""
    free, _ = torch.cuda.mem_get_info()
    others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) - 1
    needed = 100 if problem.grad else 60
    if free - others * WORKER_BYTES < needed << 30:
        beside = f" beside {others} other processes' {WORKER_BYTES >> 30} (-n 1 leaves none)" if others else ""
        pytest.skip(f"needs {needed} GiB of GPU memory{beside}, {free >> 30} GiB are free")
    tensors, dout, dlse = draw(problem)
    result = both(version, tensors, problem, dout, dlse)
    last = slice(-2, None)
    tail = replace(problem, batch=2)
    judge = Judge(*(x[last] for x in tensors), tail, dout[last], None if dlse is None else dlse[last])
    accept(
        judge,
        Result(
            **{name: x[last] for name, x in result.items().items() if x.numel()}
            | ({} if problem.lse else {"lse": result.lse})
        ),
    )


@pytest.mark.gpu
@asks(both=True, causal=True, heads=4, heads_kv=4, head_dim=64)
def test_memory_grows_as_declared(version, problem):
    """Peak memory of a forward and backward pass beyond its inputs, at twice the length."""
    short, long = (peak_bytes(version, replace(problem, seqlen_q=n, seqlen_k=n)) for n in (4096, 8192))
    least, most = (0, 2.2) if flashzoo.versions()[version].memory == "linear" else (3, math.inf)
    assert least < long / short < most


def peak_bytes(version: str, problem: Problem) -> int:
    tensors, dout, dlse = draw(problem)
    both(version, tensors, problem, dout, dlse)
    gc.collect()  # of what other tests left, which would make room in between
    # As gradients that autograd's thread still holds when a call returns would: they make a peak low, and none high.
    return max(with_peak(lambda: both(version, tensors, problem, dout, dlse), "cuda")[1] for _ in range(3))
