"""A Llama of Hugging Face transformers with random weights, by several implementations of attention: how many tokens a
second does it train on, and write?

    python examples/llama.py                     # a tiny one, on a CPU
    python examples/llama.py --size 1b --seqlen 8192 --context 32768 --new 128 --csv llama.csv

Implementations are transformers' names: "zoo" is flashzoo's, "zoo:v3" one version of it. One that can't be had, such as
"flash_attention_2" without its package, says why and is left out. Before anything is timed each must give the logits of
the first; the exit status is 1 where one does not, or where one fails.

What is measured: `train`, a forward and a backward pass on a batch of one; `write`, new tokens behind a context of
random ones in a static cache, the time of many tokens less that of one; and both with the model, or each step of
writing, compiled. Of each all implementations take turns, round by round; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import csv
import math
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
"""Of the logits' distance from the first's, by their size: in 16 bits layers carry roundings on."""
MEASURES = ("train", "write", "train_compiled", "write_compiled")
RECOMPILATIONS = 64
"""How often a function may be compiled anew: once for each implementation, with gradients and without."""


def model_of(args: argparse.Namespace) -> Any:
    """The model with the same random weights each time, by the first implementation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    longest = max(args.seqlen, args.context + args.new + 1)
    config = LlamaConfig(**SIZES[args.size], max_position_embeddings=longest, pad_token_id=0, eos_token_id=None)
    with torch.device(args.device):
        return LlamaForCausalLM._from_config(config, dtype=args.dtype, attn_implementation=args.implementations[0])


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, the GPU's work in it."""
    begin = now(device)
    call()
    return now(device) - begin


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

    def step(self) -> None:
        """Gradients of one batch."""
        self.model.zero_grad()
        self.run(self.tokens, labels=self.tokens, use_cache=False).loss.backward()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of all tokens, float32."""
        return self.run(self.tokens, use_cache=False).logits.float()

    def speed(self) -> float:
        """Tokens a second of a step."""
        return self.tokens.numel() / seconds(self.step, self.tokens.device)


class Writing:
    """New tokens behind a context `(1, context)`, the likeliest each."""

    def __init__(self, model: Any, context: Tensor, new: int, compiled: bool) -> None:
        self.model, self.context, self.new = model, context, new
        self.how = {"do_sample": False, "cache_implementation": "static", "disable_compile": not compiled}

    def step(self, new: int = 2) -> None:
        """Writes so many tokens."""
        self.model.generate(self.context, max_new_tokens=new, **self.how)

    def logits(self) -> Tensor:
        """Of the first token behind the context, float32, and those of the second given that the first is 1."""
        forced = {"output_logits": True, "return_dict_in_generate": True}
        first = {"prefix_allowed_tokens_fn": lambda *_: [1]}
        given = self.model.generate(self.context, max_new_tokens=2, **self.how, **forced, **first)
        return torch.stack(given.logits).float()

    def speed(self) -> float:
        """New tokens a second."""
        many, one = (seconds(lambda new=new: self.step(new), self.context.device) for new in (self.new + 1, 1))
        return self.new / (many - one) if many > one else math.nan  # so few that what else runs here decides


def measured(model: Any, measure: str, args: argparse.Namespace) -> Iterator[tuple[str, list[float], float | str]]:
    """Of each implementation its name, the tokens a second of each round, and how far its logits are from the
    first's; or in their place why there are none."""
    what, _, compiled = measure.partition("_")
    tokens = torch.randint(1, model.config.vocab_size, (1, args.seqlen if what == "train" else args.context))
    tokens = tokens.to(args.device)
    model.train(what == "train")
    torch.compiler.reset()
    if what == "train":
        work = Training(model, tokens, bool(compiled))
    else:
        work = Writing(model, tokens, args.new, bool(compiled))
    expected, away = None, {}
    for name in args.implementations:
        if args.began + args.budget_s < time.monotonic():
            yield name, [], f"not measured: {args.budget_s:.0f} s are gone"
            continue
        try:
            model.set_attn_implementation(name)
            logits = work.logits()
            expected = logits if expected is None else expected
            far = float((logits - expected).norm() / expected.norm())
            if not far <= LIMIT[args.dtype]:
                raise ArithmeticError(f"parts from {args.implementations[0]}: its logits are {far:.1e} away")
            del logits
            work.step()
            away[name] = far
        except Exception as error:  # of libraries that are not ours; what it is, is told
            yield name, [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    del expected
    speeds = {name: [] for name in away}
    for _ in range(args.rounds):
        for name, found in speeds.items():
            model.set_attn_implementation(name)
            found.append(work.speed())
    yield from ((name, found, away[name]) for name, found in speeds.items())


def keep(path: Path, row: dict[str, object]) -> None:
    """Append a row to a CSV file, whose header is written where it is not there yet."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
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
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin with nothing new after so many seconds")
    parser.add_argument("--csv", type=Path, help="append what is measured to this file")
    parser.add_argument("--commit", default="unknown", help="flashzoo's, for the file")
    args = parser.parse_args(argv)
    args.implementations, args.measures = args.implementations.split(","), args.measures.split(",")
    if unknown := [name for name in args.measures if name not in MEASURES]:
        parser.error(f"--measures: expected some of {', '.join(MEASURES)}, got {', '.join(unknown)}")
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
            if isinstance(away, str):
                failed |= not away.startswith(("ImportError", "OSError", "not measured"))
                print(f"{measure:15} {name:20} {away}", flush=True)
                continue
            low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
            print(f"{measure:15} {name:20} {middle:10.1f} ({low:.1f} to {high:.1f}), {away:.1e} away", flush=True)
            found = {"tokens_s": middle, "tokens_s_min": low, "tokens_s_max": high}
            row = {name: f"{value:.5g}" for name, value in found.items()} | {"logits_away": f"{away:.1e}"}
            if args.csv:
                keep(args.csv, {**common, "measure": measure, "implementation": name, "rounds": args.rounds, **row})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
