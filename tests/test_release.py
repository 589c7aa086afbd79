"""What a release shows: the long description outside of the repository, and one version number."""

from __future__ import annotations

import importlib.util
import re

import pytest

import flashzoo
from flashzoo_suite.support import ROOT

RELATIVE = r"\]\((?!\w+:|#)"


@pytest.fixture(scope="module")
def long_description():
    spec = importlib.util.spec_from_file_location("flashzoo_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description


def test_a_registry_shows_pictures_and_links_by_absolute_address(long_description):
    readme = (ROOT / "README.md").read_text()
    pictures = re.findall(rf"!\[[^]]*{RELATIVE}([^)]+)\)", readme)
    address = "https://example.org/flashzoo"
    text = long_description(readme, address, "v1")
    assert pictures and all(f"]({address}/raw/v1/{path})" in text for path in pictures)
    assert f"[LICENSE]({address}/blob/v1/LICENSE)" in text and not re.search(RELATIVE, text)
    assert re.sub(rf"{address}/(raw|blob)/v1/", "", text) == readme
    alone = long_description(readme, None, "v1")
    assert not re.search(RELATIVE, alone) and "![" not in alone and "see LICENSE" in alone


def test_the_version_is_said_alike():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == flashzoo.__version__
