"""What a registry shows: the README, with pictures and links by absolute address. All else is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description(readme: str, repository: str | None, release: str) -> str:
    """The README as it reads outside of the repository.

    Args:
        readme: its markdown.
        repository: address of the repository; without one pictures are left out, and links to files are their words.
        release: the tag that addresses name.
    """
    picture, link = r"!\[([^]]*)\]\((?!\w+:|#)([^)]+)\)", r"\[([^]]*)\]\((?!\w+:|#)([^)]+)\)"
    if repository is None:
        return re.sub(link, r"\1", re.sub(rf"{picture}\n*", "", readme))
    readme = re.sub(picture, rf"![\1]({repository}/raw/{release}/\2)", readme)
    return re.sub(link, rf"[\1]({repository}/blob/{release}/\2)", readme)


if __name__ == "__main__":
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^Repository = "(.+)"', project, re.MULTILINE)
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "flashzoo" / "__init__.py").read_text(), re.MULTILINE)
    assert version
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=long_description(text, address[1] if address else None, f"v{version[1]}"),
        long_description_content_type="text/markdown",
    )
