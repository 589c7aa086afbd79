"""The search for tiles."""

from __future__ import annotations

import pytest

from bench import tune
from bench.cells import Cell
from flashzoo import timing
from flashzoo.call.problem import Problem
from flashzoo.tiles import Tiles
from flashzoo.v1 import config as v1_config
from flashzoo.v2 import config as v2_config
from flashzoo.v3 import config as v3_config


@pytest.mark.parametrize(("version", "table"), [("v1", v1_config.HOPPER), ("v2", v2_config.HOPPER)])
def test_the_tuner_tries_what_the_table_holds(version, table):
    for (kernel, width, *_), tiles in table.items():
        assert tiles in list(tune.candidates(version, kernel, width))


def test_the_tuner_tries_what_v3s_tables_hold():
    for (width, width_v), tiles in v3_config.HOPPER.items():
        for one in (tiles, *v3_config.OTHERS.get((width, width_v), ())):
            assert width != width_v or one in list(tune.candidates("v3", "forward", width))


def test_the_tuner_tries_one_entry_of_v3_alone():
    problem = Problem(1, 197, 197, 12, 12, 64, device="cuda", arch=90)
    chosen, before = v3_config.tiles_for(problem), dict(v3_config.OTHERS)
    other = v3_config.Tiles(2, 96)
    with tune.entry("v3", "forward", problem, other):
        assert v3_config.tiles_for(problem) == other
    assert v3_config.tiles_for(problem) == chosen and before == v3_config.OTHERS


def test_the_tuner_replaces_one_entry_and_puts_it_back():
    problem = Problem(1, 40, 40, 1, 1, 64, dtype="fp16", device="cpu")
    before, other = dict(v2_config.HOPPER), Tiles(128, 32, 8, 1)
    with tune.entry("v2", "dq", problem, other):
        changed = {key for key, tiles in v2_config.HOPPER.items() if tiles != before[key]}
        assert changed == {("dq", 64, False)} and v2_config.HOPPER["dq", 64, False] == other
    assert before == v2_config.HOPPER


def test_the_tuner_times_right_candidates(monkeypatch):
    some = [Tiles(64, 64, 4, 1), Tiles(32, 32, 4, 1)]
    monkeypatch.setattr(tune, "candidates", lambda *_: iter(some))
    cell = Cell(Problem(1, 40, 40, 1, 1, 64, dtype="fp16", device="cpu"))
    found = tune.tune("v2", "forward", cell, timing.Clock("cpu"), 1.0)
    assert sorted(map(str, some)) == sorted(str(tiles) for _, tiles in found)
    assert all(ms > 0 for ms, _ in found) and found == sorted(found, key=lambda pair: pair[0])
