"""The programs of docs/use.md run, each in a process of its own, and are short."""

from __future__ import annotations

import re

import pytest

from flashzoo_suite.support import ROOT, in_fresh_process

PROGRAMS = dict(
    re.findall(r"^```python (\w+)\n(.*?)^```$", (ROOT / "docs" / "use.md").read_text(), re.MULTILINE | re.DOTALL)
)


def test_there_is_one_for_each_door():
    assert list(PROGRAMS) == ["replace", "diffusers", "flash_attn", "transformers", "nn"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_is_short(name):
    if name in ("diffusers", "transformers"):
        pytest.importorskip(name, reason=f"needs the extra {name}, which make installs")
    assert len([line for line in PROGRAMS[name].splitlines() if line]) <= 15
    printed = in_fresh_process(PROGRAMS[name])
    assert ("fp32" in printed) == (name in ("replace", "diffusers"))
