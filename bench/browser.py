"""The page of `bench.report` in Chromium, for its tests and for its screenshots: `python -m bench.browser report.html`.
Chromium is the system's (Debian's package `chromium`), Playwright the package that drives it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (360, 1280, 2560)
DOCS = Path(__file__).parent.parent / "docs"
READY = "html[data-ready]"
"""There when every figure is drawn."""


@contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """A Playwright `Browser`; options go to `launch`. Raises FileNotFoundError where there is no Chromium."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        raise FileNotFoundError("expected a Chromium, such as Debian's package chromium, got none on PATH")
    with sync_playwright() as playwright:
        # Nobody's page is opened but our own, in containers whose user has no namespaces to give.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], **options)
        try:
            yield found
        finally:
            found.close()


def main(argv: list[str] | None = None) -> int:
    """Write docs/report_<width>.png, the first screens of the page at each of `WIDTHS`."""
    from PIL import Image

    parser = argparse.ArgumentParser(prog="python -m bench.browser", description=main.__doc__)
    parser.add_argument("page", type=Path, help="what `flashzoo report` wrote")
    args = parser.parse_args(argv)
    with browser() as chromium:
        for width in WIDTHS:
            page = chromium.new_page(viewport={"width": width, "height": min(2 * width, 1600)})
            page.goto(args.page.resolve().as_uri())
            page.wait_for_selector(READY)
            page.evaluate("document.fonts.ready")
            shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
            path = DOCS / f"report_{width}.png"
            shot.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
