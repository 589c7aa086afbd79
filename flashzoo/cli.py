"""The command line: `flashzoo list | explain | compare | check | bench | report`. Exit code 0 is well, 1 a failed
check, 2 bad input, 130 the end by Ctrl-C.

Every command takes a Python file that registers versions as its first argument, and then has these among the others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import flashzoo
from flashzoo.call.problem import DTYPES, FEATURES, OPTIONS, Problem
from flashzoo.compare import Interrupted, compare_workload
from flashzoo.comparison import WIDTH, Comparison
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.registry import FILES, current, load_file
from flashzoo.spec import Spec
from flashzoo.workloads import hardware

ROOT = Path(flashzoo.__file__).resolve().parent.parent
"""Where flashzoo and its suite are installed: in a checkout the repository's root."""

FROM_CHECKOUT: dict[str, tuple[str, ...]] = {
    "bench": ("bench.run",),
    "report": ("bench.report", "bokeh", "jinja2"),
}
"""Commands that are modules of the repository, and the packages that these need.
They take every argument themselves, `--help` too."""

ON_GPU: dict[str, Any] = {"batch_size": 8, "seq_len": 4096, "num_heads": 16, "head_dim": 128, "dtype": "bf16"}
ON_CPU: dict[str, Any] = {"batch_size": 1, "seq_len": 128, "num_heads": 2, "head_dim": 64, "dtype": "fp16"}
DEMO = {"causal": True, "backward": True}
"""What `compare` adds to these sizes where it is called with nothing that describes a problem."""

BUDGET_S = 300
"""The longest that `compare` may be expected to take unless it is told otherwise."""

DESCRIBES = (
    "batch_size",
    "seq_len",
    "seq_len_k",
    "num_heads",
    "num_heads_kv",
    "head_dim",
    "head_dim_v",
    "dtype",
    "backward",
    *(option.field for option in OPTIONS.values() if option.flag is not None),
)


class CommandError(ValueError):
    """A command was given something that it can't work with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; the process's own where None.

    Returns:
        The exit code.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who read what is printed has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        _load(getattr(args, "file", None))
        return args.run(args, rest) if args.passes_on else args.run(args)
    except (ValueError, TypeError, flashzoo.UnsupportedError) as error:
        print(f"flashzoo {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashzoo", description="The generations of FlashAttention side by side.")
    parser.add_argument("--version", action="version", version=f"flashzoo {flashzoo.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., int], text: str, passes_on: bool = False) -> argparse.ArgumentParser:
        listed: dict[str, Any] = {} if name in FROM_CHECKOUT and not _script(name).is_file() else {"help": text}
        made = commands.add_parser(name, description=text, add_help=name not in FROM_CHECKOUT, **listed)
        made.set_defaults(run=run, passes_on=passes_on)
        if not passes_on:
            made.add_argument(
                "file",
                nargs="?",
                metavar="FILE.py",
                help="a Python file that calls flashzoo.register: its versions too",
            )
        return made

    command("list", _list, "what versions there are, what each takes, and whether it can run here")

    explain = command(
        "explain", _explain, "which version would take a call, and every reason against the others; nothing is run"
    )
    _add_problem(explain)
    explain.add_argument("--lse", action="store_true", help="the log-sum-exp is asked for too")
    explain.add_argument(
        "--arch", type=_positive, metavar="90", help="ask about a GPU of this compute capability, there or not"
    )
    explain.add_argument("--version", default="auto", help="ask for this version in place of the best that can")

    compare = command("compare", _compare, "run every version on the same inputs: errors, budgets, times, memory")
    _add_problem(compare)
    compare.add_argument("--versions", type=_names, metavar="NAME[,NAME]", help="only these")
    compare.add_argument("--seed", type=_seed, default=0, help="of the inputs (default 0)")
    compare.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    text = f"on a CPU, refuse what is expected to take more than S seconds (default {BUDGET_S})"
    compare.add_argument("--budget-s", type=_positive, default=BUDGET_S, metavar="S", help=text)
    output = compare.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON in place of the table")
    output.add_argument("--csv", action="store_true", help="print CSV in place of the table")

    check = command(
        "check", _check, "run the whole test suite on your own variant; further arguments go to pytest", passes_on=True
    )
    check.add_argument(
        "target", help="a Python file that calls flashzoo.register, or NAME[,NAME] of registered versions"
    )

    command(
        "bench",
        _from_checkout,
        "time versions and peers on this GPU; arguments behind a FILE.py go to bench/run.py",
        passes_on=True,
    )
    command(
        "report",
        _from_checkout,
        "one HTML file of what bench measured; arguments behind a FILE.py go to bench/report.py",
        passes_on=True,
    )
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a problem; None where not given, so that defaults can depend on the device."""
    group = parser.add_argument_group("the problem")
    group.add_argument("--batch-size", type=_count)
    group.add_argument("--seq-len", type=_count, help="of queries, and of keys unless --seq-len-k is given")
    group.add_argument("--seq-len-k", type=_count)
    group.add_argument("--num-heads", type=_positive)
    group.add_argument("--num-heads-kv", type=_positive, help="fewer than --num-heads for GQA (default: the same)")
    group.add_argument("--head-dim", type=_positive)
    group.add_argument("--head-dim-v", type=_positive, help="of values and of out (default: --head-dim)")
    group.add_argument("--dtype", choices=DTYPES)
    for option in OPTIONS.values():
        if option.flag is not None:
            group.add_argument(f"--{option.field.replace('_', '-')}", default=None, **option.flag)
    group.add_argument("--backward", action="store_true", default=None, help="gradients too")


def _count(text: str) -> int:
    return _at_least(text, 0)


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _at_least(text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    seed, most = _count(text), 2**63 - 2  # one more of gradients is an int64 too
    if seed > most:
        raise argparse.ArgumentTypeError(f"expected an integer of at most {most}, got {text}")
    return seed


def _names(text: str) -> list[str]:
    return text.split(",")


def _asked(args: argparse.Namespace, on_gpu: bool, arch: int | None = None, lse: bool = False) -> Problem:
    """The problem that the flags describe, checked as a call with tensors of these shapes is."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    size = (ON_GPU if on_gpu else ON_CPU) | given
    seq_len_k, heads_kv = size.get("seq_len_k", size["seq_len"]), size.get("num_heads_kv", size["num_heads"])

    def meta(seqlen: int, heads: int, head_dim: int = size["head_dim"]) -> torch.Tensor:
        shape, dtype = (size["batch_size"], seqlen, heads, head_dim), TORCH_DTYPES[size["dtype"]]
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=size.get("backward", False))

    return flashzoo.explain(
        meta(size["seq_len"], size["num_heads"]),
        meta(seq_len_k, heads_kv),
        meta(seq_len_k, heads_kv, size.get("head_dim_v", size["head_dim"])),
        **{name: size[option.field] for name, option in OPTIONS.items() if option.field in size},
        return_lse=lse,
        arch=arch,
    ).problem


def _here() -> dict:
    """`Problem`'s device and arch on this machine."""
    return hardware("cuda" if torch.cuda.is_available() else "cpu")


def _list(args: argparse.Namespace) -> int:
    for name, spec in flashzoo.versions().items():
        reasons = _reasons_here(spec)
        print(f"{name}: {spec.title}")
        for what, text in _facts(spec).items():
            print(f"    {what:<10}{text}")
        print(f"    {'here':<10}{'no: ' + '; '.join(reasons) if reasons else 'can run'}")
    for sentence in current().missing:
        print(sentence)
    return 0


def _facts(spec: Spec) -> dict[str, str]:
    dims = spec.head_dims
    latent = "".join(f", and {d} with v its first {d_v} columns" for d, d_v in spec.latent_dims)
    backward = (
        "no"
        if spec.backward is None
        else "yes"
        if spec.backward >= spec.features
        else f"only with {', '.join(sorted(spec.backward))}"
    )
    return {
        "paper": spec.paper,
        "dtypes": f"{', '.join(spec.dtypes)} on a GPU; {', '.join(spec.cpu_dtypes) or 'none'} on the CPU",
        "quantizes": f'{", ".join(spec.quantizes) or "none"} with precision="fp8"',
        "arch": spec.arch_text,
        "head_dim": f"{dims[0]} to {dims[-1]}" + (f" in steps of {dims.step}" if dims.step > 1 else "") + latent,
        "features": ", ".join(name for name in FEATURES if name in spec.features) or "none",
        "backward": backward,
    }


def _reasons_here(spec: Spec) -> list[str]:
    """Why the version can't take even a plain problem on this machine."""
    where = _here()
    dtypes = spec.dtypes if where["device"] == "cuda" else spec.cpu_dtypes
    head_dim = 64 if 64 in spec.head_dims else spec.head_dims[0]
    dtype = dtypes[0] if dtypes else DTYPES[0]
    return spec.unsupported(Problem(1, 128, 128, 1, 1, head_dim, dtype=dtype, **where))


def _explain(args: argparse.Namespace) -> int:
    arch = args.arch or _here()["arch"]
    problem = _asked(args, on_gpu=arch is not None, arch=arch, lse=args.lse)
    explanation = flashzoo.explain(problem, version=args.version)
    print(explanation)
    return 0 if explanation.chosen else 1


def _compare(args: argparse.Namespace) -> int:
    device = _device(args.device)
    if all(getattr(args, name) is None for name in DESCRIBES):
        vars(args).update(DEMO)
        where = "a GPU" if device.type == "cuda" else "a CPU"
        print(f"No problem given: the default for {where}; see flashzoo compare --help.", file=sys.stderr)
    problem = _asked(args, on_gpu=device.type == "cuda", arch=hardware(device)["arch"])  # pyright: ignore[reportArgumentType]
    how = {"seed": args.seed, "backward": problem.grad, "versions": args.versions, "budget_s": args.budget_s}
    try:
        comparison = compare_workload(problem, device=device, **how)
    except Interrupted as stop:
        if stop.comparison.rows:
            print(_rendered(stop.comparison, args))
        print(f"flashzoo compare: interrupted before {', '.join(stop.left) or 'times were taken'}", file=sys.stderr)
        raise
    print(_rendered(comparison, args))
    return 0 if comparison.ok else 1


def _rendered(comparison: Comparison, args: argparse.Namespace) -> str:
    if args.json:
        return comparison.to_json()
    if args.csv:
        return comparison.to_csv().rstrip("\n")
    return comparison.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise CommandError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    gpus = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= gpus:
        raise CommandError(f"--device {name!r} is not there: torch sees {gpus} GPUs")
    return torch.device(name)


def _load(file: str | None) -> list[str]:
    """Have the versions that a file registers, in this process and in those that it starts. Returns their names."""
    if file is None:
        return []
    names = load_file(file)
    os.environ[FILES] = os.pathsep.join(filter(None, (str(Path(file).resolve()), os.environ.get(FILES))))
    return names


def _check(args: argparse.Namespace, pytest_arguments: list[str]) -> int:
    if importlib.util.find_spec("pytest") is None:
        raise CommandError("pytest is not installed: pip install pytest pytest-xdist")
    if args.target.endswith(".py"):
        names = _load(args.target)
    else:
        names = _names(args.target)
        unknown = [name for name in names if name not in flashzoo.versions()]
        if unknown:
            known = ", ".join(flashzoo.versions())
            told = f"expected a .py file or names from {known}, got {', '.join(map(repr, unknown))}"
            raise CommandError("\n".join((told, *current().missing)))
    suite = ROOT / "flashzoo_suite"
    print(f"the suite on {', '.join(names)}: {suite}", flush=True)
    # With settings of its own, and not those of a project that it is run from or lies in.
    alone = ["-c", os.devnull, f"--confcutdir={suite}", f"--rootdir={os.getcwd()}", "-ra", "--strict-markers"]
    command = [sys.executable, "-m", "pytest", str(suite), *alone, "--versions", ",".join(names), *pytest_arguments]
    with subprocess.Popen(command) as suite_run:
        try:
            return suite_run.wait()
        except KeyboardInterrupt:  # which pytest has had too: it says what it found so far
            suite_run.wait()
            raise


def _script(command: str) -> Path:
    """Where the module of a command of `FROM_CHECKOUT` is, if it is there."""
    return (ROOT / FROM_CHECKOUT[command][0].replace(".", "/")).with_suffix(".py")


def _from_checkout(args: argparse.Namespace, arguments: list[str]) -> int:
    name, *packages = FROM_CHECKOUT[args.command]
    if not _script(args.command).is_file():
        raise CommandError(
            f"expected {_script(args.command)}, which a clone has and a wheel has not: in a clone, pip install -e ."
        )
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise CommandError(f"{' and '.join(missing)} must be installed: pip install -e '{ROOT}[report]'")
    if arguments and arguments[0].endswith(".py"):
        _load(arguments.pop(0))
    sys.path.insert(0, str(ROOT))
    return importlib.import_module(name).main(arguments)
