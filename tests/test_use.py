"""The programs of docs/use.md run, in this process, which has imported what they import, and are short."""

from __future__ import annotations

import re

import pytest

from flashzoo_suite.support import ROOT

PROGRAMS = dict(
    re.findall(r"^```python (\w+)\n(.*?)^```$", (ROOT / "docs" / "use.md").read_text(), re.MULTILINE | re.DOTALL)
)


def test_there_is_one_for_each_door():
    assert list(PROGRAMS) == ["replace", "diffusers", "flash_attn", "transformers", "nn"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_is_short(name, capsys):
    if name in ("diffusers", "transformers"):
        pytest.importorskip(name, reason=f"needs the extra {name}, which make installs")
    assert len([line for line in PROGRAMS[name].splitlines() if line]) <= 15
    exec(compile(PROGRAMS[name], f"docs/use.md, {name}", "exec"), {"__name__": "__main__"})
    assert ("fp32" in capsys.readouterr().out) == (name in ("replace", "diffusers"))
