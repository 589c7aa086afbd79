"""What the tests of this repository have beside the suite's plugin: profiles of hypothesis, and options of `make host`."""

from __future__ import annotations

import pytest
from hypothesis import settings

from flashzoo_suite.support import ROOT

pytest_plugins = ("flashzoo_suite.plugin",)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    saved = ROOT / "tests" / "host_baseline.json"
    parser.addoption("--host-baseline", metavar="FILE", default=str(saved), help=f"what host costs are held to (default: {saved.name})")
    parser.addoption("--update-host-baseline", action="store_true", help="write the host costs that are measured, and compare none")
