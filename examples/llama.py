"""A Llama of Hugging Face transformers with random weights, by several implementations of attention: how many tokens a
second does it train on, and write?

    python examples/llama.py                     # a tiny one, on a CPU
    python examples/llama.py --size 1b --seqlen 8192 --context 32768 --new 128 --csv llama.csv

Implementations are transformers' names: "zoo" is flashzoo's, "zoo:v3" one version of it. Before anything is timed each
must give the results of the first: all logits, and in training all gradients. One that gives others, can't be had, such
as "flash_attention_2" without its package, or is out of memory, is told with why, kept as a row without a speed, and
left out of that measure. The exit status is 1 where one gives other results, or fails otherwise than by these.

What is measured: `train`, a forward and a backward pass on a batch of one; `write`, new tokens behind a context of
random ones in a static cache, from when the context and a few tokens are done; and both with the model, or each step of
writing, compiled. All implementations have the same weights and tokens, and take turns, round by round, in an order
drawn anew; a turn runs once untimed, and a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashzoo.integrations import transformers as door

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 99},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
}
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of any result's distance from the first's, by its size: in 16 bits layers carry roundings on."""
MEASURES = ("train", "write", "train_compiled", "write_compiled")
RECOMPILATIONS = 64
"""How often a function may be compiled anew: once for each implementation, if not more."""
STEPS = 3
"""Of training, in a turn that is timed: the host is ahead of the GPU in all but the first."""
BEFORE = 4
"""Tokens written before time counts: each call has a new cache, for which a compiled step records its graph."""
WHY: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    **{"out of memory": torch.OutOfMemoryError, "missing": (ImportError, OSError)},
    "refused": (ValueError, NotImplementedError),
}
"""What the column `why` begins with, by what was raised; with "FAILED" for all else."""
FIELDS = (
    *("date", "commit", "gpu", "torch", "transformers", "size", "parameters", "seqlen", "context", "new", "measure"),
    *("implementation", "rounds", "tokens_s", "tokens_s_min", "tokens_s_max", "away", "why"),
)


def model_of(args: argparse.Namespace) -> Any:
    """The model with the same random weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    longest = max(args.seqlen, args.context + BEFORE + args.new + 1)
    config = LlamaConfig(**SIZES[args.size], max_position_embeddings=longest, pad_token_id=0, eos_token_id=None)
    with torch.device(args.device):
        return LlamaForCausalLM._from_config(config, dtype=args.dtype, attn_implementation="eager")


def now(device: torch.device) -> float:
    """Seconds, all that the GPU was given being done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Training:
    """Forward and backward passes on tokens `(1, seqlen)`."""

    def __init__(self, model: Any, tokens: Tensor, compiled: bool) -> None:
        self.model, self.tokens = model, tokens
        self.run = torch.compile(model) if compiled else model
        self.of = tokens.numel()

    def step(self) -> Tensor:
        """Gradients of one batch, and the logits of all tokens."""
        self.model.zero_grad()
        out = self.run(self.tokens, labels=self.tokens, use_cache=False)
        out.loss.backward()
        return out.logits.detach()

    def results(self) -> list[Tensor]:
        """Logits and gradients of what is timed; 0 where there is no gradient."""
        logits = self.step()
        return [logits, *(x.new_zeros(()) if x.grad is None else x.grad for x in self.model.parameters())]

    def seconds(self) -> float:
        """Of a step on so many tokens as `of` says."""
        begin = now(self.tokens.device)
        for _ in range(STEPS):
            self.step()
        return (now(self.tokens.device) - begin) / STEPS


class Writing:
    """New tokens behind a context `(1, context)`, the likeliest each."""

    def __init__(self, model: Any, context: Tensor, new: int, compiled: bool) -> None:
        self.model, self.context, self.of = model, context, new
        self.how = {"do_sample": False, "cache_implementation": "static", "disable_compile": not compiled}
        self.how["max_new_tokens"] = BEFORE + new + 1

    def results(self) -> list[Tensor]:
        """Logits of all new tokens, each given that those before it are 1."""
        kept = {"output_logits": True, "return_dict_in_generate": True}
        ones = {"prefix_allowed_tokens_fn": lambda *_: [1]}
        return [torch.stack(self.model.generate(self.context, **self.how, **kept, **ones).logits)]

    def seconds(self) -> float:
        """Of writing so many tokens as `of` says."""
        calls, at = 0, {}

        def clock(_: Tensor, logits: Tensor) -> Tensor:
            nonlocal calls
            if calls in (BEFORE, BEFORE + self.of):
                at[calls] = now(logits.device)
            calls += 1
            return logits

        self.model.generate(self.context, **self.how, logits_processor=[clock])
        return at[BEFORE + self.of] - at[BEFORE]


def release(model: Any) -> None:
    """Give back the memory of gradients, and what torch holds of freed tensors."""
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()


def attempt(model: Any, name: str, call: Callable[[], float]) -> float | str:
    """What a call gives by an implementation, or why there is nothing; then nothing of it stays in memory."""
    release(model)
    try:
        model.set_attn_implementation(name)
        return call()
    except Exception as error:  # of libraries that are not ours; what it is, is told
        kind = next((kind for kind, of in WHY.items() if isinstance(error, of)), "FAILED")
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        why = f"{kind}: {type(error).__name__}: {text}"
    torch.compiler.reset()  # graphs that an error has left half made would be others' errors
    release(model)
    return why


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of the result that is farthest from the expected one, by the size of that; NaN where there is one."""
    pairs = ((x.float(), y.float()) for x, y in zip(found, expected, strict=True))
    return float(torch.stack([(x - y).norm() / y.norm().clamp_min(1e-30) for x, y in pairs]).max())


def measured(model: Any, measure: str, args: argparse.Namespace) -> Iterator[tuple[str, list[float], float | str]]:
    """Of each implementation its name, the tokens a second of each round, and how far its results are from the
    first's; or in their place why there are none."""
    what, _, compiled = measure.partition("_")
    drawn = torch.Generator().manual_seed(args.seed)
    shape = (1, args.seqlen if what == "train" else args.context)
    tokens = torch.randint(1, model.config.vocab_size, shape, generator=drawn).to(args.device)
    model.train(what == "train")
    torch.compiler.reset()
    if what == "train":
        work = Training(model, tokens, bool(compiled))
    else:
        work = Writing(model, tokens, args.new, bool(compiled))
    expected: list[Tensor] = []
    away: dict[str, float] = {}

    def check() -> float:
        found = work.results()
        far = distance(found, expected or found)
        if not far <= LIMIT[args.dtype]:
            raise ArithmeticError(f"its results are {far:.1e} away from those of {next(iter(away), 'any number')}")
        expected[:] = expected or found
        return far

    def turn() -> float:
        work.seconds()
        return work.of / work.seconds()

    def budget_ended() -> bool:
        return args.began + args.budget_s < time.monotonic()

    for name in args.implementations:
        far = "not measured: the budget ended" if budget_ended() else attempt(model, name, check)
        if isinstance(far, str):
            yield name, [], far
        else:
            away[name] = far
    expected.clear()
    speeds: dict[str, list[float]] = {name: [] for name in away}
    order = random.Random(args.seed)
    for number in range(args.rounds):
        if number and budget_ended():  # what is checked, and compiled, has a turn at least
            break
        for name in order.sample(list(speeds), len(speeds)):
            speed = attempt(model, name, turn)
            if isinstance(speed, str):
                del speeds[name]
                yield name, [], speed
            else:
                speeds[name].append(speed)
    yield from ((name, found, away[name]) for name, found in speeds.items())


def keep(path: Path, row: dict[str, object]) -> None:
    """Append a row to a CSV file, whose header is written where it is not there yet."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = "sdpa,zoo,flash_attention_2,flash_attention_3"
    parser.add_argument("--implementations", default=everything, help=f"by commas; default: {everything}")
    parser.add_argument("--measures", default=",".join(MEASURES), help=f"by commas; default: {','.join(MEASURES)}")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: tiny")
    for name, default in {"seqlen": 128, "context": 128, "new": 16, "rounds": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    late = "begin with no implementation, nor with a second round, after so many seconds"
    parser.add_argument("--budget-s", type=float, default=math.inf, help=late)
    parser.add_argument("--csv", type=Path, help="append what is measured to this file")
    parser.add_argument("--commit", default="unknown", help="flashzoo's, for the file")
    args = parser.parse_args(argv)
    args.implementations, args.measures = args.implementations.split(","), args.measures.split(",")
    if unknown := [name for name in args.measures if name not in MEASURES]:
        parser.error(f"--measures: expected some of {', '.join(MEASURES)}, got {', '.join(unknown)}")
    for name in ("seqlen", "context", "new", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.csv and args.csv.exists():
        with args.csv.open() as file:
            if (header := file.readline().strip()) != ",".join(FIELDS):
                parser.error(f"--csv: expected a file with the columns {','.join(FIELDS)}, got {header}")
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.began = time.monotonic()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, report. Returns the exit status."""
    args = arguments(argv)
    door.register()
    torch._dynamo.config.recompile_limit = RECOMPILATIONS  # pyright: ignore[reportPrivateImportUsage]
    model = model_of(args)
    millions = sum(x.numel() for x in model.parameters()) / 1e6
    print(f"{millions:.1f} M parameters, {args.dtype}, {args.device}")
    print(f"training on {args.seqlen} tokens, writing {args.new} behind {args.context}; tokens a second")
    gpu = torch.cuda.get_device_name() if args.device.type == "cuda" else "cpu"
    libraries = {package: version(package) for package in ("torch", "transformers")}
    common = {"date": f"{date.today()}", "commit": args.commit, "gpu": gpu, **libraries, "size": args.size}
    common |= {"parameters": f"{millions:.4g}e6", "seqlen": args.seqlen, "context": args.context, "new": args.new}
    failed = False
    for measure in args.measures:
        for name, speeds, away in measured(model, measure, args):
            row: dict[str, object] = {**common, "measure": measure, "implementation": name, "rounds": len(speeds)}
            if isinstance(away, str):
                failed |= away.startswith(("FAILED", "refused"))
                print(f"{measure:15} {name:20} {away}", flush=True)
                if args.csv and not away.startswith("not measured"):
                    keep(args.csv, {**row, "why": away})
                continue
            low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
            print(f"{measure:15} {name:20} {middle:10.1f} ({low:.1f} to {high:.1f}), {away:.1e} away", flush=True)
            found = {"tokens_s": middle, "tokens_s_min": low, "tokens_s_max": high}
            if args.csv:
                keep(args.csv, row | {key: f"{x:.5g}" for key, x in found.items()} | {"away": f"{away:.1e}"})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
