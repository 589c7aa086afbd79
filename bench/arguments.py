"""Arguments of the benchmark's commands, and what is wrong with them in words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from math import inf
from pathlib import Path

import torch

import flashzoo
from bench import lengths, masks, scores
from bench.caches import MOST_BYTES
from bench.cells import (
    DECODE_BATCHES,
    DECODE_SEQLENS,
    DENSE,
    MASKED_HEAD_DIMS,
    MASKED_SIZES,
    OWN_HEAD_DIMS,
    PACKED_TOTALS,
    PASSES,
    SCORED_HEAD_DIMS,
    SCORED_SEQLENS,
    SCORED_SIZE,
    causal,
    cells,
    passes,
)
from bench.contenders import ENDINGS, foreign, names_with_endings
from bench.models import MODELS
from bench.peers import PEERS
from bench.rows import Results, head_commit, results_path
from flashzoo.call.problem import QUANTIZABLE

DTYPES = ("bf16", "fp16", "fp32", "e4m3")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of `flashzoo bench`."""
    parser = argparse.ArgumentParser(
        prog="flashzoo bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_what_runs(parser)
    _add_sizes(parser)
    _add_how(parser)
    _add_results(parser)
    return parser


def _add_what_runs(parser: argparse.ArgumentParser) -> None:
    versions, modes = list(flashzoo.versions()), names_with_endings()

    def impl_names(text: str) -> list[str]:
        found = text.split(",")
        names([*versions, *modes, *PEERS])(",".join(name.partition("@")[0] for name in found))
        for name, at, seqlen in (name.partition("@") for name in found):
            if at and not seqlen.isdecimal():
                raise argparse.ArgumentTypeError(
                    f"expected {name}@ and a length, such as {name}@8192, got {name}@{seqlen}"
                )
        return found

    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--impls",
        metavar="NAME,...",
        type=impl_names,
        help=f"versions ({', '.join(versions)}), these with {' or '.join(ENDINGS)} behind the name, and peers "
        f"({', '.join(PEERS)}); with @8192 behind the name in cells of this seqlen alone. Default: what takes the "
        "dtype, and with --masks block masks or none",
    )
    what.add_argument(
        "--passes", metavar="PASS,...", type=names(PASSES), help="fwd,bwd (default: those that the dtype has)"
    )
    what.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the inputs (default: bf16)")
    what.add_argument(
        "--masks",
        metavar="NAME,...",
        type=_mask_names,
        help="cells with block masks: dense (none, as --causal says), ones, causal, window1024, butterfly, random/4 "
        f"and local/4 (a quarter of the blocks), with any numbers; `default` is dense, {', '.join(masks.NAMES)}. In "
        "one sequence of 16k tokens with hidden 2048 and one of 64k with hidden 512, head dims 128 and 64, unless the "
        "sizes below say otherwise",
    )
    what.add_argument(
        "--lengths",
        metavar="NAME,...",
        type=_lengths_names,
        help="cells of packed sequences: documents (log-normal lengths), equal512 (all of that length); in totals of "
        f"{', '.join(map(str, PACKED_TOTALS))} tokens, which --seqlens chooses from, unless the "
        "sizes below say otherwise",
    )
    what.add_argument(
        "--decode",
        action="store_true",
        help="cells of decoding, one query of each sequence on a cache, timed by CUDA graphs: caches of "
        f"{', '.join(map(str, DECODE_SEQLENS))} keys (or --seqlens), in batches of "
        f"{', '.join(map(str, DECODE_BATCHES))} (or --batches), in five layouts of heads, from which --head-dims "
        "chooses, and with 576 in two of MLA's; "
        f"what has more than {MOST_BYTES / 1e9:.0f} GB of keys and values is left out",
    )
    what.add_argument(
        "--models",
        metavar="NAME,...",
        type=lambda text: list(MODELS) if text == "all" else names(MODELS)(text),
        help=f"cells of real models' shapes, `all` or some of {', '.join(MODELS)}",
    )
    what.add_argument(
        "--scores",
        metavar="NAME,...",
        nargs="?",
        const="all",
        type=lambda text: list(scores.NAMES) if text == "all" else names(scores.NAMES)(text),
        help=f"cells with something on the scores: {', '.join(scores.NAMES)} (without a name: all), in 16k tokens of "
        f"hidden 2048, head dims {', '.join(map(str, SCORED_HEAD_DIMS))}, seqlens "
        f"{', '.join(map(str, SCORED_SEQLENS))}, causal, unless the sizes below say otherwise; what has a bias for "
        "which the GPU has no room is left out",
    )
    what.add_argument(
        "--list", action="store_true", help="say which peers there are, installed or missing, and do no more"
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    truth = {"0": False, "1": True}

    def truths(text: str) -> list[bool]:
        return [truth[name] for name in names(truth)(text)]

    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--head-dims", metavar="N,...", type=numbers, help="only these, such as 64,128")
    sizes.add_argument("--seqlens", metavar="N,...", type=numbers, help="only these, such as 512,8192")
    sizes.add_argument("--batches", metavar="N,...", type=numbers, help="with --decode: of so many sequences")
    several = "with --decode: of each sequence, causal where there are several (default: 1)"
    sizes.add_argument("--queries", metavar="N,...", type=numbers, help=several)
    sizes.add_argument("--page-size", metavar="N", type=whole, help="with --decode: keys of a page (default: no pages)")
    sizes.add_argument(
        "--dtype-kv",
        metavar="NAME,...",
        type=names(DTYPES),
        help="with --decode: of keys and values, --dtype's or e4m3 with descales by head; with bf16,e4m3 both of a "
        "shape are timed in the same turns (default: --dtype's)",
    )
    sizes.add_argument("--causal", metavar="0,1", type=truths, help="only 0 or only 1 (default: both, with --scores 1)")
    sizes.add_argument(
        "--tokens", metavar="N", type=whole, help="other sizes than the field's: batch * seqlen; needs --hidden"
    )
    sizes.add_argument(
        "--hidden", metavar="N", type=whole, help="other sizes than the field's: heads * head_dim; needs --tokens"
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    how.add_argument(
        "--ms", type=amount, default=80.0, help="measured time for each implementation and cell (default: 80)"
    )
    how.add_argument(
        "--settled-ms",
        type=amount,
        default=0.0,
        help="measured time for each implementation and cell alone, behind as many calls as settle the GPU's clocks, "
        "with the energy of a call; a GPU's counter of energy wants 300 (default: 0, none)",
    )
    how.add_argument(
        "--budget-s",
        metavar="S",
        type=amount,
        default=inf,
        help="stop once so much time is gone, after the call at hand; what was not timed yet of its cell, "
        "or with --masks of all of its size and pass, is left to --resume",
    )
    how.add_argument(
        "--workers",
        metavar="N",
        type=partial(whole, least=0),
        default=max(1, (os.cpu_count() or 1) - 2),
        help="processes that compile ahead, on a GPU (default: the cores but two); 0: none",
    )
    how.add_argument(
        "--compile-only",
        action="store_true",
        help="only fill the disk caches of compilers with what the run needs, for a later one with --workers 0: runs "
        "side by side on one host disturb one another while they compile",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument(
        "--out", metavar="CSV", type=Path, help="the file that rows are appended to (default: bench/results/<gpu>.csv)"
    )
    results.add_argument(
        "--run", metavar="ID", default=datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S"), help="of the run's rows"
    )
    results.add_argument("--resume", metavar="ID", help="go on with this run: measure only what it has no row of")
    results.add_argument("--commit", metavar="ID", help="what is measured, where there is no git")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Arguments that don't go together are an error of the parser's."""
    if args.compile_only and (args.device == "cpu" or args.decode or not args.workers):
        got = "--device cpu" if args.device == "cpu" else "--decode" if args.decode else "--workers 0"
        parser.error(f"--compile-only: expected cells that are compiled ahead, on a GPU, got {got}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since torch sees no GPU, got cuda")
    if args.dtype == "e4m3" and "bwd" in passes(args):
        parser.error(f"--passes: expected fwd for e4m3, which has no backward pass, got {','.join(args.passes)}")
    if args.dtype == "e4m3" and args.masks:
        parser.error("--masks: expected 16 or 32 bits, got e4m3, which takes no block mask")
    if args.lengths and (args.masks or args.dtype == "e4m3"):
        parser.error(
            f"--lengths: expected 16 or 32 bits and no block masks, got {'--masks' if args.masks else args.dtype}"
        )
    sizes = {"--head-dims": args.head_dims, "--seqlens": args.seqlens, "--tokens": args.tokens}
    others = {"--masks": args.masks, "--lengths": args.lengths, "--decode": args.decode, "--scores": args.scores}
    if args.models and (given := [name for name, value in (others | sizes).items() if value]):
        parser.error(f"--models: expected the models' own sizes, got {given[0]} beside it")
    _check_scores(args, parser)
    _check_decode(args, parser)
    if bool(args.tokens) != bool(args.hidden):
        given, other = ("--tokens", "--hidden") if args.tokens else ("--hidden", "--tokens")
        parser.error(f"--tokens and --hidden: expected both or neither, got {given} without {other}")
    head_dims = args.head_dims or (
        MASKED_HEAD_DIMS if args.masks else SCORED_HEAD_DIMS if args.scores else OWN_HEAD_DIMS
    )
    tokens, hidden = SCORED_SIZE if args.scores and not args.tokens else (args.tokens, args.hidden)
    for name, total, parts in (("--tokens", tokens, args.seqlens or ()), ("--hidden", hidden, head_dims)):
        if total and any(total % part for part in parts):
            parser.error(
                f"{name}: expected a multiple of each of {', '.join(map(str, sorted(set(parts))))}, got {total}"
            )
    chosen = cells(args)
    if args.masks and not args.hidden:
        hidden = [size for _, size in MASKED_SIZES]
        if uneven := [head_dim for head_dim in args.head_dims or () if any(size % head_dim for size in hidden)]:
            expected = f"divisors of {' and '.join(map(str, hidden))}, or --tokens and --hidden"
            parser.error(f"--head-dims: expected {expected}, got {','.join(map(str, uneven))}")
    if not chosen:
        sizes = {"--head-dims": args.head_dims, "--seqlens": args.seqlens}
        got = " ".join(f"{name} {','.join(map(str, given))}" for name, given in sizes.items() if given)
        parser.error(f"expected sizes that a cell of the field's has, or --tokens and --hidden for others, got {got}")


def _check_scores(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.scores:
        return
    others = {
        "--masks": args.masks,
        "--lengths": args.lengths,
        "--decode": args.decode,
        "--dtype e4m3": args.dtype == "e4m3",
    }
    if given := [name for name, value in others.items() if value]:
        parser.error(f"--scores: expected 16 or 32 bits and nothing else beside it, got {given[0]}")
    if args.scores == [scores.BIAS_GRAD] and "bwd" not in passes(args):
        parser.error(f"--passes: expected bwd for {scores.BIAS_GRAD}, which has no forward pass of its own, got fwd")


def _check_decode(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.decode:
        own = {"--batches": args.batches, "--queries": args.queries, "--page-size": args.page_size}
        own |= {"--dtype-kv": args.dtype_kv}
        if given := [name for name, value in own.items() if value]:
            parser.error(f"{given[0]}: expected --decode beside it, got none")
        return
    others = {"--passes": args.passes, "--masks": args.masks, "--lengths": args.lengths}
    others |= {"--dtype e4m3": args.dtype == "e4m3", "--tokens beside --batches": args.tokens and args.batches}
    if given := [name for name, value in others.items() if value]:
        parser.error(f"--decode: expected forward cells of 16 or 32 bits, each with its caches, got {given[0]}")
    beside = (args.dtype, "e4m3") if args.dtype in QUANTIZABLE else (args.dtype,)
    if unlike := [dtype for dtype in args.dtype_kv or () if dtype not in beside]:
        parser.error(f"--dtype-kv: expected {' or '.join(beside)} beside --dtype {args.dtype}, got {','.join(unlike)}")
    if not any((queries > 1) in causal(args) for queries in args.queries or (1,)):
        got = ",".join(str(int(each)) for each in causal(args))
        parser.error(f"--causal: expected 0 for one query or 1 for several, got {got} for --queries")
    lengths_of_caches = args.seqlens or ([args.tokens] if args.tokens else DECODE_SEQLENS)
    if uneven := [str(length) for length in lengths_of_caches if length % (args.page_size or 1)]:
        got = f"{args.page_size} for {','.join(uneven)}"
        parser.error(f"--page-size: expected a divisor of the caches' lengths, got {got}")


def check_size(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """The field's sizes on a CPU are an error of the parser's."""
    if args.device == "cpu" and not (args.tokens or args.models):
        small = "small ones on a CPU, such as --tokens 256 --hidden 64 --dtype fp32"
        why = "none" if torch.cuda.is_available() else "none on a machine with no GPU"
        parser.error(f"--tokens and --hidden: expected {small}, got {why}; the field's sizes take a CPU days")


def check_out(args: argparse.Namespace, impls: Iterable[str], parser: argparse.ArgumentParser) -> None:
    """Others' versions in this repository's results are an error of the parser's."""
    if not args.out and (own := foreign(impls)):
        parser.error(
            f"--out: expected a file of your own for {', '.join(own)}, which this repository's results don't have"
        )


def offer_rows(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that appends rows only where it is told a run's id; `results_of` reads them."""
    parser.add_argument("--run", help="id of the run's rows; without it none are written")
    parser.add_argument("--out", type=Path, help="the CSV file; default: bench/results/<gpu>.csv")
    parser.add_argument("--commit", help="what is measured, where there is no git")


def results_of(args: argparse.Namespace, run: str, device: str, parser: argparse.ArgumentParser) -> Results:
    """What `--out` and `--commit` say; a file with other columns, or that can't be written, is an error
    of the parser's."""
    try:
        return Results(args.out or results_path(device), run, device, args.commit or head_commit())
    except (OSError, ValueError) as error:
        parser.error(f"--out: {error}")


def names(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these, with commas between."""
    known = list(choices)

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected names from {', '.join(known)}, got {', '.join(unknown)}")
        return text.split(",")

    return parse


def whole(text: str, least: int = 1) -> int:
    """The type of an argument that is an integer of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    """The type of an argument that lists positive integers, with commas between."""
    return [whole(number) for number in text.split(",")]


def amount(text: str) -> float:
    """The type of an argument that is a number, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def _lengths_names(text: str) -> list[str]:
    found = text.split(",")
    unknown = [name for name in found if not lengths.known(name)]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected names of the form {lengths.FORMS}, got {', '.join(unknown)}")
    return found


def _mask_names(text: str) -> list[str]:
    found = [DENSE, *masks.NAMES] if text == "default" else text.split(",")
    unknown = [name for name in found if name != DENSE and not masks.known(name)]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected default, or names of the form {DENSE}|{masks.FORMS}, got {', '.join(unknown)}"
        )
    return found
