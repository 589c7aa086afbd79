"""The command `flashzoo`: shows at once that it is at work, which importing torch takes seconds for,
and hands over to `flashzoo.cli`.

Not in the package, whose import is torch's.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> int:
    """Run one command with the process's arguments, and give its exit code."""
    try:
        with _importing():
            from flashzoo.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


@contextmanager
def _importing() -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        print("importing torch", file=sys.stderr)
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("importing torch", total=None)
        yield


if __name__ == "__main__":
    sys.exit(main())
