"""`bench.trace` on stamps that are made up, and v3's kernel with stamps as it compiles."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from bench import phases, trace
from flashzoo import Problem
from flashzoo._sass import read
from flashzoo.v3.config import kernel_for

BLOCKS, STEP = 12, 1000
CONSUMER = {"K": 1000, "S issued": 10, "S": 320, "softmax": 620, "P": 650, "V": 655, "PV issued": 665, "PV": 985}
"""The clock at the end of each phase of a step; K is waited for in the step before."""
PRODUCER = {"K free": 30, "K ordered": 40, "V free": 400, "V ordered": 410}


def lane(ends: dict[str, int], late: int) -> dict[str, list[int | None]]:
    return {what: [STEP * (n - (what == "K")) + end + late for n in range(BLOCKS)] for what, end in ends.items()}


@pytest.fixture
def found():
    """Two warpgroups in turns, half a step apart; stamps cost a tenth in one order, and little in the others."""
    lanes = [lane(PRODUCER, 0), lane(CONSUMER, 0), lane(CONSUMER, STEP // 2)]
    orders = {
        name: {"ms": 1.0, "stamped_ms": 1.1 if name == "both" else 1.02, "lanes": lanes} for name in phases.SWITCHES
    }
    of_run = {"run": "made-up", "date": "2026-11-24", "commit": "", "gpu": "GPU", "torch": "2.11", "triton": "3.6"}
    sizes = {"dtype": "fp16", "batch": 4, "seqlen": 4096, "heads": 16, "head_dim": 128, "block_kv": 40, "tile": 4}
    return {**of_run, **sizes, "orders": orders}


def test_the_numbers_are_those_of_the_stamps(found):
    s = trace.summary(found["orders"]["both"], 40)
    assert s.step == STEP
    expected = {"K": 15, "S issued": 10, "S": 310, "softmax": 300, "P": 30, "V": 5, "PV issued": 10, "PV": 320}
    assert {what: clocks for what, clocks in s.phases.items() if clocks} == expected
    # products: S from 0 to 320, P V from 655 to 985, and those of the other 500 later
    assert (s.under_way, s.under_own, s.under_others) == (0.97, 0, 0.95)
    assert s.busy == 2 * 2 * 160 / STEP
    assert s.slower == pytest.approx(0.1)


def test_a_product_that_softmax_runs_over_is_under_way_until_it_is_waited_for():
    of = {"S issued": [0, 110], "S": [100, 200], "PV issued": [120, None], "softmax": [105, 260], "PV": [300, None]}
    assert [(p.what, p.block, p.begin, p.end) for p in trace.products(of)] == [("S", 1, 105, 200), ("PV", 0, 110, 300)]


@pytest.mark.parametrize("start", [5, 2**31 - 75, 2**32 - 75])
def test_the_clock_may_begin_anew(start):
    stamps = torch.zeros(2, phases.BLOCKS, phases.ROW // 4, dtype=torch.int64)
    first = phases.TILE * 3
    for n in range(3):
        stamps[0, first + n, phases.PHASES.index("K free")] = start + 50 * n
        stamps[1, first + n, phases.PHASES.index("softmax")] = start + 50 * n + 20
    clocks = torch.where(stamps % 2**32 < 2**31, stamps % 2**32, stamps % 2**32 - 2**32).to(torch.int32)
    assert phases.lanes_of(clocks, 3) == [{"K free": [0, 50, 100]}, {"softmax": [20, 70, 120]}]


def test_file_section_and_picture(found, tmp_path):
    assert not list(trace.section(tmp_path / "none.json"))
    path = tmp_path / "trace.json"
    path.write_text(phases.written(found))
    assert json.loads(path.read_text()) == found and max(map(len, path.read_text().splitlines())) < 200
    text = "\n".join(trace.section(path))
    assert "| neither | 1000 | 20 | 0 | 20 | 630 | 300 | 30 |" in text and "2.0% to 10.0% slower" in text
    assert "| FA-3, both | 64% | 97% | 0% | 95% |" in text
    trace.draw(found, tmp_path / "trace.svg")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "trace.svg").read_text())
    assert {*map(trace.title, phases.SWITCHES), "producer", "warpgroup 1", *trace.LEGEND} <= set(words)
    assert words.count("1000 clocks a step") == 4 and sum(word.startswith("softmax ") for word in words) >= 4 * 2 * 3


WORK = {"HGMMA": "HGMMA", "MUFU.EX2": "softmax", "F2FP.F16": "P"}
"""What is done between stamps, by an instruction that says so."""


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("order", "step"),
    [("fa2", "HGMMA softmax P HGMMA"), ("both", "HGMMA HGMMA softmax P")],
)
def test_stamps_stand_between_the_phases_of_the_compiled_kernel(order: str, step: str):
    from bench import stamps  # loads CuTe DSL

    problem = Problem(
        phases.BATCH, phases.SEQLEN, phases.SEQLEN, phases.HEADS, phases.HEADS, phases.HEAD_DIM, dtype="fp16", arch=90
    )
    kernel = kernel_for(problem)
    kernel = replace(kernel, tiles=replace(kernel.tiles, **phases.SWITCHES[order]))
    wrapped = stamps.forward.Forward.epilogue, stamps.Pipeline.consumer_wait, stamps.forward.warpgroup
    compiled = read(stamps.stamped(kernel, 1 << 40).cubin, kernel.shared_bytes)
    assert (stamps.forward.Forward.epilogue, stamps.Pipeline.consumer_wait, stamps.forward.warpgroup) == wrapped
    assert compiled.spills == compiled.stack == 0 and kernel.threads * compiled.registers <= 1 << 16
    between = [set[str]()]
    for instruction in compiled.code:
        if "SR_CLOCKLO" in instruction:
            between.append(set())
        between[-1] |= {what for opcode, what in WORK.items() if f" {opcode}" in f" {instruction}"}
    assert all(len(phase) <= 1 for phase in between)
    # the first block of a tile, those after it, and O in the end
    first = "HGMMA softmax P" if order == "both" else step
    last = "HGMMA P" if order == "both" else "P"
    assert " ".join(what for phase in between for what in phase) == f"{first} {step} {last}"
