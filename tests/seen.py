"""The whole suite on this machine's GPU in one command, and what was seen of it in a small file:
`tests/<gpu>_seen.json`.

`python tests/seen.py` runs all in as many processes as the GPU has memory for, or all GPUs together, of which each
process has one; then, one at a time, in a process that sees them all, what is marked `alone`. The file says which
commit, what ran, what failed, and what was skipped for which reason. What follows `--` goes to pytest, for a part of
the suite.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs the suite and writes the file; 1 where a test failed or nothing passed."""
    parser = argparse.ArgumentParser(description="run the whole suite and write down what was seen")
    parser.add_argument("--commit", help="what is tested, where there is no git")
    parser.add_argument(
        "--jobs", default="auto", help="processes side by side (default: what cores and the GPUs' memory allow)"
    )
    parser.add_argument("--out", type=Path, help="the file (default: tests/<gpu>_seen.json)")
    parser.add_argument("pytest", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    out = (
        given.out
        or ROOT / "tests" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower().removeprefix('nvidia ')).strip('-')}_seen.json"
    )
    began = time.time()
    found = [
        *run(["-n", given.jobs, "--dist", "worksteal", "-m", "not alone"], given.pytest),
        *run(["-m", "alone"], given.pytest),
    ]
    ended = {outcome: [case for case in found if case[1] == outcome] for outcome in ("passed", "failed", "skipped")}
    seen = {
        "commit": given.commit or head(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        **{name: installed(name) for name in ("torch", "triton", "nvidia-cutlass-dsl")},
        "python": platform.python_version(),
        "arguments": given.pytest,
        "cases": len(found),
        "passed": len(ended["passed"]),
        "failed": [name for name, _, _ in ended["failed"]],
        "skipped": dict(Counter(why for _, _, why in ended["skipped"]).most_common()),
        "seconds": round(time.time() - began),
    }
    out.write_text(json.dumps(seen, indent=2) + "\n")
    print(
        f"{out}: {seen['passed']} passed, {len(seen['failed'])} failed, {len(ended['skipped'])} skipped, "
        f"{seen['seconds']} s"
    )
    return int(bool(seen["failed"]) or not seen["passed"])


def run(how: list[str], more: list[str]) -> list[tuple[str, str, str]]:
    """Name, outcome and reason of each test of one run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-disable", f"--junitxml={report}", *how, *more]
        told = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLASHZOO_SEEN": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | told)
        if ended.returncode not in (0, 1, 5):  # passed, failed, nothing chosen
            raise SystemExit(f"seen: pytest ended with {ended.returncode}: {' '.join(command)}")
        return [outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """Of one test in pytest's report."""
    name = f"{case.get('classname')}::{case.get('name')}"
    for tag, ended in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return name, ended, (found.get("message") or "").splitlines()[0]
    return name, "passed", ""


def installed(package: str) -> str | None:
    """A package's version, None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def head() -> str:
    """The commit that is checked out, marked where files differ from it."""
    ended = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True
    )
    return ended.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
