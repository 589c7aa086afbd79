"""What READMEs and docs show, measured into one results file and drawn: `make report`, or `python -m bench.everything`.
Whole models, several GPUs, MLA's caches and the trace of a kernel are measured by hand (CONTRIBUTING.md).

On a machine with an NVIDIA GPU it goes through `SETS`, each a run of its own into bench/results/<gpu>.csv. What was
stopped goes on where it is called again with the same `--run`. Then it draws the pictures, and writes the sections of
READMEs and docs, where these are of this GPU, and report.html. Without a GPU it does only that, from the committed
results.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from math import inf
from pathlib import Path

import torch

import flashzoo
from bench import ablation, fp8_error, masks, plot, report, run, runs, traffic
from bench.arguments import amount, check_out, names
from bench.rows import head_commit, read, results_path


@dataclass(frozen=True)
class Set:
    """What is measured under one run id.

    Attributes:
        name: ends the id.
        main: a bench module's command.
        lines: its arguments, call by call.
        resumes: it is `bench.run`'s: it skips the cells that the run has, and takes a budget.
    """

    name: str
    main: Callable[[list[str]], int]
    lines: tuple[str, ...]
    resumes: bool = True


MASKED = "--ms 30 --masks"
SHARED = ",".join(name for name in masks.NAMES if "/" in name)
"""The masks of the curves of speed-up against density."""
SETS = (
    Set("fwd", run.main, ("--passes fwd --ms 40 --settled-ms 300",)),
    Set("bwd", run.main, ("--passes bwd --ms 40 --settled-ms 300",)),
    Set("fp8", run.main, ("--dtype e4m3 --ms 40 --settled-ms 300",)),
    Set("end-to-end", run.main, ("--passes fwd --seqlens 4096,8192,16384 --ms 40 --impls v3,v3_fp8_end_to_end",)),
    Set("models", run.main, ("--models all --ms 40 --settled-ms 300 --impls v3,fa3,fa4,sdpa_cudnn",)),
    Set("packed", run.main, ("--lengths documents --ms 40",)),
    Set("decode", run.main, ("--decode --dtype-kv bf16,e4m3 --ms 40",)),
    Set(
        "scores",
        run.main,
        (
            "--scores --ms 20",
            # so few heads that FlexAttention takes a bias of 16k
            "--scores bias,bias_grad --tokens 16384 --hidden 512 --head-dims 128,256 --ms 20",
            "--scores bias,bias_grad --tokens 16384 --hidden 256 --head-dims 64 --ms 20",
        ),
    ),
    Set("traffic", traffic.main, ("",), resumes=False),
    Set("error", fp8_error.main, ("",), resumes=False),
    Set("standard", run.main, ("--passes fwd --seqlens 512,1024,2048 --ms 40 --impls v1,standard,sdpa_math",)),
    Set("ablation", ablation.main, ("--head-dims 128",)),
    Set(
        "blocksparse",
        run.main,
        (
            f"{MASKED} dense,ones,causal,{SHARED},window1024 --seqlens 16384 --impls v3,blocksparse,v2,fa4,flex",
            f"{MASKED} dense,ones,{SHARED},window1024,butterfly --causal 0 --seqlens 65536 --impls "
            "v3,blocksparse,v2,v1,fa4,flex",
            f"{MASKED} dense,butterfly --causal 0 --head-dims 128 --tokens 65536 --hidden 512 --seqlens "
            "512,2048,8192,32768 --impls v3,blocksparse,v2,v1",
        ),
    ),
)
"""The most wanted first: a budget that runs out takes from the end."""
LEAST_S = 30
"""What is not begun with less time than this left."""


def measure(sets: tuple[Set, ...], name: str, out: Path, commit: str, budget_s: float) -> int:
    """Go through the sets; 1 where one failed, which stops no other.

    Args:
        name: what the ids of the runs begin with.
        out: the results file.
        commit: what is measured.
        budget_s: stop after so many seconds.
    """
    started, failed = time.monotonic(), 0
    for chosen in sets:
        run_id = f"{name}-{chosen.name}"
        for line in chosen.lines:
            # A copy alone is the traffic of which no counter could be read.
            begun = any(row["run"] == run_id and row["pass"] != runs.COPY for row in read(out))
            if begun and not chosen.resumes:
                print(f"run {run_id} is there")
                continue
            left = budget_s - (time.monotonic() - started)
            if left < LEAST_S:
                print(f"stopped before {run_id}: {budget_s:.0f} s are gone; go on with --run {name}")
                return failed
            how = ["--resume" if begun else "--run", run_id, *(["--budget-s", str(left)] if chosen.resumes else [])]
            try:
                failed |= chosen.main([*line.split(), *how, "--out", str(out), "--commit", commit])
            except Exception:
                traceback.print_exc()
                failed = 1
            torch.cuda.empty_cache()
    print(f"measured in {time.monotonic() - started:.0f} s, into {out}")
    return failed


def render(out: Path, page: Path) -> None:
    """The pictures beside a results file, the HTML page, and the sections of READMEs and docs, where they show it."""
    plot.main(["--csv", str(out), "--plots", *([] if out.resolve() == runs.RESULTS else ["--no-readme"])])
    report.main(["--csv", str(out), "-o", str(page)])


def main(argv: list[str] | None = None) -> int:
    """Measure where there is a GPU, then render; 1 where something measured failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.everything", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = datetime.now(timezone.utc).strftime("%Y%m%d")
    gpu = torch.cuda.is_available()
    everything = [chosen.name for chosen in SETS]
    parser.add_argument(
        "--sets", type=names(everything), default=",".join(everything), help="only these (default: %(default)s)"
    )
    parser.add_argument("--run", help="what the runs' ids begin with, and how one goes on (default: <gpu>-<today>)")
    parser.add_argument("--budget-s", type=amount, default=inf, help="stop measuring after so many seconds")
    parser.add_argument(
        "--out", type=Path, help="the CSV file; default: bench/results/<gpu>.csv, without a GPU h200.csv"
    )
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument(
        "-o", "--page", type=Path, default=Path("report.html"), help="the HTML page (default: report.html)"
    )
    args = parser.parse_args(argv)
    out = args.out or (results_path("cuda") if gpu else runs.RESULTS)
    failed = 0
    if gpu:
        check_out(args, flashzoo.versions(), parser)
        sets = tuple(chosen for chosen in SETS if chosen.name in args.sets)
        failed = measure(sets, args.run or f"{out.stem}-{today}", out, args.commit or head_commit(), args.budget_s)
    else:
        print(f"no NVIDIA GPU: nothing is measured, {out} is drawn")
    render(out, args.page)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
