"""What a newcomer does, in a fresh clone and in fresh environments: `make newcomer`. Says what it does;
ends with 1 where something fails.

1. The package: sdist and wheel are built and checked, and a type checker sees its types.
2. Environments with nothing in them but what flashzoo asks for: the wheel's, with what `flashzoo check` needs, and the
   clone's, installed in place with the extra that `make compare` adds, and with those that docs/start.md names. What it
   asks for is linked from this environment, and not fetched again. `import flashzoo` is tried in four folders.
3. The wheel, in an empty folder: `flashzoo check` of the example; what only a clone has is refused in words.
4. The README and other pages (`PAGES`), in the clone, at a terminal of 80 columns: every command, and each page's
   blocks of Python in turn. Blocks marked `setup` make environments, and are not run, nor are those marked `gpu` where
   there is one, which take minutes, nor `gpus`, which need several: tests/test_docs_commands.py runs both, bounded.
   Where there is no GPU, `gpu` must be refused, in time and in words.
5. The tutorial, docs/write_a_variant.md, in the environment with what it installs and in an empty folder: its files are
   written and its commands run, in order. A block is a file where the line that opens it names one. Blocks of commands
   marked `setup` are not run; `cpu` and `gpu` are for machines without and with one, and what `fails` must.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 80
FIRST_TABLE_S = 10
COMMAND_S = 120
TYPED = 0.95
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("start", "options", "versions", "context_parallel")))
NEEDS_MORE = ("flashzoo check", "flashzoo report")
"""Commands for which the plain package is not enough: there they say what to install, and run where that is."""
LISTED = "lazy: FlashAttention-2 that rescales lazily"
"""How the tutorial's variant is listed."""
ALONE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("FLASHZOO", "PYTHON", "PYTEST", "COLUMNS"))
}


def main() -> int:
    """Everything, in order."""
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        parent, empty = Path(folder) / "code", Path(folder) / "empty"
        parent.mkdir()
        empty.mkdir()
        clone = parent / "flashzoo"
        run("git", "clone", "--quiet", ROOT, clone)

        run(sys.executable, "-m", "build", "--outdir", Path(folder) / "dist", cwd=clone)
        made = sorted((Path(folder) / "dist").iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *made)
        say("types", f"{typed(clone):.1%} are known")

        folders = {
            "the clone": clone,
            "its parent": parent,
            "the package": clone / "flashzoo",
            "an empty folder": empty,
        }
        homes = []
        in_place = ["-e", clone]
        for kind, what, extras in (
            ("the wheel", [made[-1]], ("check",)),
            ("the clone", in_place, ("cli",)),
            ("all extras", in_place, ("cli", "report", "check")),
        ):
            home = environment(Path(folder) / kind.split()[-1], extras)
            homes.append(home)
            run(sys.executable, "-m", "pip", "-q", "--python", home / "bin" / "python", "install", "--no-deps", *what)
            for name, where in folders.items():
                print_path = "import flashzoo; flashzoo.attention; print(flashzoo.__file__)"
                found = Path(run(home / "bin" / "python", "-c", print_path, cwd=where).strip())
                own = clone if what == in_place or where == clone else home
                assert found.is_relative_to(own), (
                    f"{kind}'s environment, in {name}: expected flashzoo of {own}, got {found}"
                )
                assert found.with_name("py.typed").is_file(), (
                    f"{kind} declares no types: expected py.typed beside {found}"
                )
            say(kind, f"is imported from {', '.join(folders)}")
        checks(clone, homes[0], empty)
        programs(clone, homes[1])
        commands(clone, *homes[1:])
        tutorial(clone, homes[2], Path(folder) / "own")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def say(what: str, text: str) -> None:
    """One line of the report."""
    print(f"{what + ':':<12}{text}", flush=True)


def run(*command: object, cwd: Path | None = None, home: Path | None = None, ends: int = 0) -> str:
    """What a command prints, in an environment or in none; to end with another code ends everything with its output."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=ALONE if home is None else within(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == ends, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
    return done.stdout


def within(home: Path) -> dict[str, str]:
    """The variables of a process in an environment."""
    return ALONE | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Of every fenced block its language, the second word of the line that opens it or "", and what is in it."""
    return re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def typed(clone: Path) -> float:
    """The share of the package's names whose types pyright knows."""
    tool = [Path(sys.executable).parent / "pyright", "--pythonpath", sys.executable, "--outputjson"]
    command = [*map(str, tool), "--verifytypes", "flashzoo", "--ignoreexternal"]
    # It looks for a package on the path alone, and ends with 1 below 100 %.
    done = subprocess.run(command, cwd=clone, env=ALONE | {"PYTHONPATH": str(clone)}, stdout=subprocess.PIPE, text=True)
    share = json.loads(done.stdout)["typeCompleteness"]["completenessScore"]
    assert share >= TYPED, f"expected {TYPED:.0%} of the types to be known, got {share:.1%}: {' '.join(command)}"
    return share


def environment(home: Path, extras: tuple[str, ...]) -> Path:
    """A new virtual environment with what flashzoo and extras of it ask for, as links to what is here,
    and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", home)
    (packages,) = home.glob("lib/python*/site-packages")
    wanted, seen = [("flashzoo", extras)], set[str]()
    while wanted:
        name, of_name = wanted.pop()
        there = distribution(name)
        asked = map(Requirement, there.requires or ())
        asked = [
            each
            for each in asked
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *of_name))
        ]
        wanted += [(each.name, tuple(each.extras)) for each in asked]
        wanted = [each for each in wanted if each[0] not in seen]
        seen.add(name)
        for top in {file.parts[0] for file in there.files or () if name != "flashzoo"} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(there.locate_file(top))).resolve())
    return home


def checks(clone: Path, home: Path, empty: Path) -> None:
    """`flashzoo check` of the example, and what is left out of the wheel, in an environment that has the wheel."""
    name = "my_variant.py"
    (empty / name).write_text((clone / "examples" / name).read_text())
    printed = run(home / "bin" / "flashzoo", "check", name, "-q", "-n", "auto", cwd=empty)
    say("checked", f"{name}: {printed.strip().splitlines()[-1]}")
    helped = run(home / "bin" / "flashzoo", "--help", cwd=empty)
    for command in ("bench", "report"):
        printed = run(home / "bin" / "flashzoo", command, cwd=empty, ends=2)
        refused = f"flashzoo {command}: expected" in printed
        told = f"got\n{printed}\n{helped}"
        assert refused and f"    {command} " not in helped, f"expected {command} to be refused and not listed, {told}"


def programs(clone: Path, home: Path) -> None:
    """The blocks of Python of each page, one after the other, in an environment without extras."""
    for page in PAGES:
        code = [text for language, _, text in blocks((clone / page).read_text()) if language == "python"]
        ended, printed, spent = at_terminal([str(home / "bin" / "python"), "-c", "".join(code)], clone, home)
        assert ended == 0, f"the Python of {page} ended with {ended}\n{printed}"
        say("python", f"{page}: {len(code)} blocks, {spent:.1f} s")


def commands(clone: Path, home: Path, home_of_extras: Path) -> None:
    """Every command of the pages, in an environment without extras, and what needs these in one with."""
    # As `make` leaves it once it has installed what is here.
    (home / ".flashzoo-run").touch()
    found = [("", f"make compare VENV={home}")]
    elsewhere = {"setup", "gpus", "gpu"} if torch.cuda.is_available() else {"setup", "gpus"}
    shown = [block for page in PAGES for block in blocks((clone / page).read_text())]
    here = [(mark, text) for language, mark, text in shown if language == "sh" and mark not in elsewhere]
    found += [(mark, line) for mark, text in here for line in text.splitlines()]
    wrong = []
    for mark, line in found:
        command = line.partition(" #")[0].strip()
        for where in (home, home_of_extras) if command.startswith(NEEDS_MORE) else (home,):
            ended, printed, spent = at_terminal(["bash", "-c", command], clone, where)
            say("ran", f"{command.replace(str(home), '...')}: {ended}, {spent:.1f} s")
            if complaint := complaint_about(command, mark, ended, printed, spent, lacks=where == home):
                wrong.append(f"{command}: {complaint}, got {ended} after {spent:.1f} s and\n{printed}")
    assert not wrong, "\n\n".join(wrong)


def tutorial(clone: Path, home: Path, folder: Path) -> None:
    """The tutorial from an empty folder to a package, which it installs: nothing else is asked of the environment
    after it."""
    folder.mkdir()
    # The environment has none; the pip that is here works on another's packages.
    pip = home / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{home}/bin/python" "$@"\n')
    pip.chmod(0o755)
    results = {path: path.stat().st_mtime_ns for path in (clone / "bench" / "results").iterdir()}
    elsewhere, printed = {"setup", "cpu" if torch.cuda.is_available() else "gpu"}, []
    for language, word, text in blocks((clone / "docs" / "write_a_variant.md").read_text()):
        if language != "sh":
            (folder / word).write_text(text)
        elif word not in elsewhere:
            began = time.monotonic()
            printed.append((text, run("bash", "-euc", text, cwd=folder, home=home, ends=word == "fails")))
            say("tutorial", f"{text.splitlines()[-1]}: {time.monotonic() - began:.1f} s")
    before, after = (told for text, told in printed if "flashzoo list\n" in text)
    everything = "".join(told for _, told in printed)
    page = (folder / "lazy.html").read_text()
    for what, seen in (
        ("lazy to be listed once it is installed", "lazy: " not in before and LISTED in after),
        ("explain to say that lazy takes the problem", "lazy takes batch 8, seqlen 4096" in everything),
        ("a failure and its rule", "test_forward[too_lazy-scores_x30-fp16]" in everything and "exceeds" in everything),
        ("a call of the installed variant", "torch.Size([1, 128, 2, 64])" in everything),
        ("the variant and figures in the report", '<th scope="col">lazy</th>' in page and "Bokeh" in page),
        (
            "the repository's results to be as they were",
            results == {path: path.stat().st_mtime_ns for path in (clone / "bench" / "results").iterdir()},
        ),
    ):
        assert seen, f"the tutorial: expected {what}, got\n{everything}"


def complaint_about(command: str, mark: str, ended: int, printed: str, spent: float, lacks: bool) -> str:
    """What was expected of a command of a page in vain, in an environment that lacks the extras or not;
    empty where all is well."""
    if "Traceback" in printed or not printed.strip():
        return "expected words for people"
    if lacks and command.startswith(NEEDS_MORE):
        return "" if ended == 2 and "pip install" in printed else "expected to be told what to install"
    if mark == "gpu":
        return (
            "" if ended in (1, 2) and re.search(r"\b(GPU|CPU)\b", printed) else "expected to be refused without a GPU"
        )
    if ended != command.startswith("diff "):
        return "expected it to run"
    if " compare" in command and max(map(len, printed.splitlines())) > COLUMNS:
        return f"expected lines of at most {COLUMNS} columns"
    if command.startswith("make compare") and spent >= FIRST_TABLE_S:
        return f"expected a table in {FIRST_TABLE_S} s"
    return ""


def at_terminal(command: list[str], cwd: Path, home: Path) -> tuple[int, str, float]:
    """Run a command at a terminal of 80 columns: its exit code, what stands there in the end, and the seconds it took.

    Where others load the machine, these are the processor's.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = within(home) | {"TERM": "xterm-256color"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    printed = b""
    while True:
        left = began + COMMAND_S - time.monotonic()
        if left <= 0 or not select.select([ours], [], [], left)[0]:
            os.killpg(process.pid, signal.SIGKILL)
            break
        try:
            printed += os.read(ours, 1 << 16)
        except OSError:  # the last process at the terminal has ended
            break
    os.close(ours)
    text = re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|\].*?(\x07|\x1b\\))", "", printed.decode(errors="replace"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    spent = min(time.monotonic() - began, used.ru_utime + used.ru_stime)
    return process.returncode, "\n".join(lines), spent


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except AssertionError as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from None
