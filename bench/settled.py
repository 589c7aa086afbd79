"""One implementation alone, as in a training step: call behind call until the GPU's clocks have settled, then how long
a call takes and how much energy.

In turns a contender that draws much power runs at a clock that its neighbours have spared. Alone it pays for itself:
long calls are bound by power, and their time follows their joules.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median
from typing import TypeVar

import torch

from bench.rows import Row
from flashzoo.timing import SETTLE_MS, Clock, Operation

AHEAD = 64
"""Calls that the host is ahead of the GPU at most, so that it knows what the GPU is at."""
METER_MS = 20
"""Between two looks at the meter: one holds the host up for some 2 ms, which the calls that it is ahead cover."""
Meter = Callable[[], float]
Name = TypeVar("Name", bound=Hashable)


def settled_columns(
    timed: Mapping[Name, Operation], calls: Mapping[Name, int], clock: Clock, ms: float
) -> dict[Name, Row]:
    """The columns settled_ms and joules of one of each operation's calls; joules where there is a meter of energy.

    Each is alone twice, in one order and then in the other, which takes out how clocks drift meanwhile: behind turns
    with contenders that draw little they do for a second and a half, so what comes first is timed once more, unkept.
    """
    energy = meter() if clock.cuda else None
    visits: dict[Name, list[tuple[float, float | None]]] = {name: [] for name in timed}
    order = [*timed]
    for name in [*order[:1], *order, *reversed(order)]:
        visits[name].append(alone(timed[name], clock, ms, energy))
    columns: dict[Name, Row] = {}
    for name, found in visits.items():
        columns[name] = {"settled_ms": f"{fmean(each for each, _ in found[-2:]) / calls[name]:.5g}"}
        joules = [taken for _, taken in found[-2:] if taken is not None]
        if joules:
            columns[name]["joules"] = f"{fmean(joules) / calls[name]:.5g}"
    return columns


def alone(run: Operation, clock: Clock, ms: float, energy: Meter | None) -> tuple[float, float | None]:
    """Milliseconds of an operation, the median of those that run in `ms` behind `SETTLE_MS` of them, as a host that is
    held up leaves the GPU idle before one; and by the meter its joules: None without one, or where it moved less than
    twice."""
    clock.check()
    if not clock.cuda:
        times = [time.perf_counter()]
        while len(times) == 1 or times[-1] - times[0] < 1e-3 * ms:
            run()
            times.append(time.perf_counter())
        return 1e3 * median(until - since for since, until in pairwise(times)), None
    clock.wait()
    begin, ends, waiting = torch.cuda.Event(enable_timing=True), [], deque()
    readings: list[tuple[float, float]] = []
    looked = SETTLE_MS - METER_MS
    begin.record()
    start = time.perf_counter()
    while (passed := 1e3 * (time.perf_counter() - start)) < SETTLE_MS + ms or len(ends) < 2:
        run()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        waiting.append(ends[-1])
        if len(waiting) > AHEAD:
            waiting.popleft().synchronize()
        if energy is not None and passed > looked + METER_MS:
            looked, now = passed, energy()
            if not readings or now != readings[-1][1]:
                readings.append((time.perf_counter(), now))
    ends[-1].synchronize()
    first = next((i for i, end in enumerate(ends[:-1]) if begin.elapsed_time(end) > SETTLE_MS), 0)
    each = median(since.elapsed_time(until) for since, until in pairwise(ends[first:]))
    # the first reading is of any time since the meter moved
    moved = readings[1:]
    if len(moved) < 2:
        return each, None
    (since, before), (until, after) = moved[0], moved[-1]
    mean_s = 1e-3 * ends[first].elapsed_time(ends[-1]) / (len(ends) - 1 - first)
    return each, (after - before) / (until - since) * mean_s


@lru_cache
def meter() -> Meter | None:
    """Joules that the current GPU has taken since its driver was loaded, by NVML; None where that doesn't tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (AttributeError, RuntimeError, pynvml.NVMLError):
        return None
    return lambda: 1e-3 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
