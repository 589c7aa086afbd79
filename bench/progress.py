"""How far a command is, and how long the rest of it takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A function that prints the line of one of so many steps. The time left is before it or, under a terminal,
    in a bar beneath."""
    if not sys.stdout.isatty():
        started, done = time.monotonic(), 0

        def tell(line: str) -> None:
            nonlocal done
            done += 1
            left = (time.monotonic() - started) / done * (total - done)
            print(f"[{done}/{total}, {left:.0f} s left] {line}", flush=True)

        yield tell
        return
    from rich.progress import Progress, TimeElapsedColumn

    # The speed of all steps up to now: of the last half minute there may be none.
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), speed_estimate_period=inf) as bar:
        task = bar.add_task(what, total=total)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False)
            bar.advance(task)

        yield say
