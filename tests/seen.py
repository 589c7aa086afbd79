"""The whole suite on this machine's GPU in one command, and what was seen of it in a small file:
`tests/<gpu>_seen.json`.

`python tests/seen.py` runs all in as many processes as the GPU has memory for, or all GPUs together, of which each
process has one; then, one at a time, in a process that sees them all, what is marked `alone`. The file says which
commit, and of each of the two runs what ran, what failed by which error, and what was skipped for which reason; it is
written behind each. What follows `--` goes to pytest, for a part of the suite, and patterns of files' names mean all of
them; `--add` puts a part to those of the same commit that the file has, where a machine is not to be had for so long as
the whole takes.
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
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
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
    parser.add_argument("--add", action="store_true", help="to what the file has of this commit (default: anew)")
    parser.add_argument("pytest", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    out = (
        given.out
        or ROOT / "tests" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower().removeprefix('nvidia ')).strip('-')}_seen.json"
    )
    seen = {
        "commit": given.commit or head(),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        **{name: installed(name) for name in ("torch", "triton", "nvidia-cutlass-dsl")},
        "python": platform.python_version(),
        "runs": [],
    }
    if given.add and out.exists():
        before = json.loads(out.read_text())
        if before | {"runs": []} != seen:
            parser.error(
                f"--add: expected a file of {seen['commit']} and this machine, got {out} of {before['commit']}"
            )
        seen = before
    for how in (["-n", given.jobs, "--dist", "worksteal", "-m", "not alone"], ["-m", "alone"]):
        found = run([*how, *given.pytest])
        if found["cases"]:
            seen["runs"].append(found)
        out.write_text(json.dumps(seen, indent=2) + "\n")
    passed = sum(each["passed"] for each in seen["runs"])
    failed = sum(len(each["failed"]) for each in seen["runs"])
    skipped = sum(sum(each["skipped"].values()) for each in seen["runs"])
    print(f"{out}: {passed} passed, {failed} failed, {skipped} skipped")
    return int(bool(failed) or not passed)


def run(arguments: list[str]) -> dict[str, Any]:
    """What one run of pytest came to."""
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        names = [name for each in arguments for name in (sorted(glob(each, root_dir=ROOT)) if "*" in each else [each])]
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-disable", f"--junitxml={report}", *names]
        told = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLASHZOO_SEEN": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | told)
        if ended.returncode not in (0, 1, 5):  # passed, failed, nothing chosen
            raise SystemExit(f"seen: pytest ended with {ended.returncode}: {' '.join(command)}")
        found = [outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "arguments": arguments,
        "cases": len(found),
        "passed": sum(ended == "passed" for _, ended, _ in found),
        "failed": {name: why for name, ended, why in found if ended == "failed"},
        "skipped": dict(Counter(why for _, ended, why in found if ended == "skipped").most_common()),
        "seconds": round(time.time() - began),
    }


def outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """Of one test in pytest's report."""
    name = f"{case.get('classname')}::{case.get('name')}"
    for tag, ended in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return name, ended, next(iter((found.get("message") or "").splitlines()), "")
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
