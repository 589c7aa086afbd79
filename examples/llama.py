"""A Llama of Hugging Face transformers with random weights, by several implementations of attention:
how many tokens a second does it train on, and write?

    python examples/llama.py                     # a tiny one, on a CPU
    python examples/llama.py --size 1b --seqlen 8192 --context 32768 --new 128 --compile

Implementations are transformers' names: "zoo" is flashzoo's, "zoo:v3" one version of it. One that can't be had, such as
"flash_attention_2" without its package, says why and is left out. Before anything is timed each must give the logits of
the first; the exit status is 1 where one does not. A step of training is a forward and a backward pass on a batch of
one. What is written is behind a context of random tokens, in a static cache: the time of many tokens less that of one.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Sequence
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


def model_of(args: argparse.Namespace) -> Any:
    """The model with the same random weights each time, by the first implementation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    longest = max(args.seqlen, args.context + args.new + 1)
    config = LlamaConfig(**SIZES[args.size], max_position_embeddings=longest, pad_token_id=0, eos_token_id=None)
    with torch.device(args.device):
        return LlamaForCausalLM._from_config(config, dtype=args.dtype, attn_implementation=args.implementations[0])


def seconds(call: Callable[[], object], device: torch.device, times: int) -> float:
    """The least of so many calls, behind one that is not counted."""
    found = []
    for _ in range(times + 1):
        begin = now(device)
        call()
        found.append(now(device) - begin)
    return min(found[1:])


def now(device: torch.device) -> float:
    """Seconds, all that the GPU was given being done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(model: Any, tokens: Tensor, args: argparse.Namespace) -> float:
    """Tokens a second of a forward and a backward pass."""
    run = torch.compile(model) if args.compile else model

    def step() -> None:
        model.zero_grad()
        run(tokens, labels=tokens, use_cache=False).loss.backward()

    model.train()
    return tokens.numel() / seconds(step, tokens.device, args.times)


@torch.no_grad()
def written(model: Any, context: Tensor, args: argparse.Namespace) -> float:
    """New tokens a second, behind the context."""
    model.eval()

    def write(new: int) -> None:
        how = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
        model.generate(context, **how, disable_compile=not args.compile)

    many, one = (seconds(lambda new=new: write(new), context.device, args.times) for new in (args.new + 1, 1))
    return args.new / (many - one) if many > one else math.nan  # so few that what else runs here decides


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
    parser.add_argument("--implementations", default="sdpa,zoo", help="by commas; default: sdpa,zoo")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: tiny")
    for name, default in {"seqlen": 128, "context": 128, "new": 16, "times": 3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--compile", action="store_true", help="the model, by torch.compile, and each step of writing")
    parser.add_argument("--csv", type=Path, help="append what is measured to this file")
    parser.add_argument("--commit", default="unknown", help="flashzoo's, for the file")
    args = parser.parse_args(argv)
    args.implementations = args.implementations.split(",")
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, report. Returns the exit status."""
    args = arguments(argv)
    door.register()
    model = model_of(args)
    tokens = torch.randint(1, model.config.vocab_size, (1, max(args.seqlen, args.context)), device=args.device)
    print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters, {args.dtype}, {args.device}")
    print(f"training on {args.seqlen} tokens, writing {args.new} behind {args.context}; tokens a second")
    expected, wrong = None, False
    for name in args.implementations:
        try:
            model.set_attn_implementation(name)
        except (ImportError, OSError, ValueError) as error:
            print(f"{name:20} {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        with torch.no_grad():
            logits = model(tokens[:, : args.seqlen], use_cache=False).logits.float()
        expected = logits if expected is None else expected
        far = float((logits - expected).norm() / expected.norm())
        if far > LIMIT[args.dtype]:
            wrong = True
            print(f"{name:20} parts from {args.implementations[0]}: its logits are {far:.1e} away")
            continue
        del logits
        speeds = trained(model, tokens[:, : args.seqlen], args), written(model, tokens[:, : args.context], args)
        print(f"{name:20} {speeds[0]:12.0f} trained {speeds[1]:12.1f} written   {far:.1e} away")
        if args.csv:
            gpu = torch.cuda.get_device_name() if args.device.type == "cuda" else "cpu"
            libraries = {package: version(package) for package in ("torch", "transformers")}
            asked = {"compiled": int(args.compile), "seqlen": args.seqlen, "context": args.context, "new": args.new}
            measured = {"trained": f"{speeds[0]:.5g}", "written": f"{speeds[1]:.4g}", "logits_away": f"{far:.1e}"}
            common = {"date": f"{date.today()}", "commit": args.commit, "gpu": gpu, **libraries, "size": args.size}
            keep(args.csv, {**common, "implementation": name, **asked, **measured})
        torch.compiler.reset()
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
