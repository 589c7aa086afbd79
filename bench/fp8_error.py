"""What FP8 costs in accuracy: table 3 of FlashAttention-3's paper, measured again, and long contexts.
`python -m bench.fp8_error`

The first table has the root mean square error of out against float64 on two kinds of inputs: the paper's, N(0, 1) with
N(0, 100) added to one entry in a thousand of q, k and v, and N(0, 1) alone. Each row is a way to quantise. The paper
tells no sizes; d 128 at seqlen 8192 gives its figures, all six, and is the default. The error is carried by the few
rows where outliers of q and k meet, so a head more or less moves it by some percent.

The second has N(0, 1) inputs with few queries and ever more keys: what stays of the tensor core's 13-bit sums where
each block's is promoted to float32 (two-level accumulation), and where not. Then the same of values around 1: what is
cut off goes towards 0, and where all terms have one sign it adds up.

With `--run` the first table's errors are rows of the results file too: their pass is `error_fp8_paper` or
`error_randn`, by the inputs, `rms_err` the error, and there is no time.

Without a Hopper GPU both are an emulation, `flashzoo.reference.standard` on the same e4m3 numbers, and say so.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import flashzoo
from bench import ablation, peers
from bench.arguments import numbers, offer_rows, results_of
from bench.cells import Cell
from bench.rows import Row
from bench.runs import ERROR
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.inputs import inputs
from flashzoo.reference import LARGEST_E4M3, P_SCALE, dequantized, one_level, oracle, rotated
from flashzoo.workloads import hardware

VALUES = {"outliers": "fp8_paper", "N(0, 1)": "randn"}
PAPER = {
    "16 bits: fp16": "1.9e-4",
    "per-tensor scales": "2.4e-2",
    "block scales": "2.4e-2",
    "rotation": "9.3e-3",
    "rotation, block scales": "9.1e-3",
}
"""RMSE in table 3, by row: there a row says what FlashAttention-3 in FP8 lacks, here what it has."""

SHORT = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Inputs = tuple[Tensor, Tensor, Tensor]
Quantized = tuple[Inputs, Inputs]


@dataclass(frozen=True)
class Way:
    """A way to quantise: scales by "tensor", "head" or "block" of 128 rows, of q and k rotated or not,
    of k less its mean or not."""

    scales: str
    rotate: bool = False
    smooth: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        """q, k, v in e4m3 and their descales: by `flashzoo.quantize` where it runs and knows these
        scales, else in torch."""
        if not q.is_cuda or self.scales == "tensor":
            return self._in_torch(q, k, v)
        found = flashzoo.quantize(q, k, v, rotate=self.rotate, smooth=self.smooth, scales=self.scales)  # pyright: ignore[reportArgumentType]
        return (found.q, found.k, found.v), (found.q_descale, found.k_descale, found.v_descale)

    def _in_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        q, k, v = (x.float() for x in (q, k, v))
        if self.smooth:
            k = k - k.mean(1, keepdim=True)
        if self.rotate:
            q, k = rotated(q), rotated(k)
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = (self._rounded(x, k.shape[2]) for x in (q, k, v))
        return (q8, k8, v8), (q_descale, k_descale, v_descale)

    def _rounded(self, x: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
        batch, seqlen, heads, _ = x.shape
        if self.scales == "block":
            # `(batch, blocks, heads)`, one number for each 128 rows
            largest = torch.stack([rows.abs().amax((1, 3)) for rows in x.split(DESCALE_BLOCK, 1)], 1)
            of_rows = largest.repeat_interleave(DESCALE_BLOCK, 1)[:, :seqlen]
            descale = largest.transpose(1, 2)
        else:
            by_head = x.abs().amax((1, 3)).view(batch, heads_kv, -1).amax(-1)
            descale = by_head if self.scales == "head" else x.abs().max().expand(batch, heads_kv)
            of_rows = descale.repeat_interleave(heads // heads_kv, 1)[:, None]
        rounded = (x / (of_rows / LARGEST_E4M3)[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
        return rounded, (descale / LARGEST_E4M3).contiguous()


WAYS = {
    "per-tensor scales": Way("tensor"),
    "per-head scales": Way("head"),
    "block scales": Way("block"),
    "smoothing": Way("head", smooth=True),
    "rotation": Way("head", rotate=True),
    "rotation, block scales": Way("block", rotate=True),
    "all together": Way("block", rotate=True, smooth=True),
}


def on_hopper(device: str) -> bool:
    """Whether v3 runs here."""
    return device == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def rmse(out: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference."""
    return float((out.to(exact.dtype) - exact).square().mean().sqrt())


def drawn(problem: Problem, values: str, device: str, mean: float = 0.0) -> tuple[Inputs, Tensor]:
    """q, k and v in float32, the mean added to v, and out in float64: rounding the inputs to 16 bits counts as an
    error, as in the paper."""
    q, k, v, _ = inputs(replace(problem, dtype="fp32"), device=device, values=values)
    v = v + mean
    return (q, k, v), oracle(q, k, v, problem).out


def attention_in(dtype: torch.dtype, tensors: Inputs, **how: Any) -> Tensor:
    """Out of the tensors rounded to a 16-bit dtype."""
    q, k, v = (x.to(dtype) for x in tensors)
    return flashzoo.attention(q, k, v, **how)


def attention_in_fp8(quantized: Quantized, version: str) -> Tensor:
    """Out of e4m3 tensors with descales."""
    tensors, (q_descale, k_descale, v_descale) = quantized
    return flashzoo.attention(*tensors, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, version=version)


def errors(problem: Problem, values: str, device: str) -> Iterator[tuple[str, float]]:
    """The rows of the first table: a name, and the RMSE on inputs of this kind."""
    hopper = on_hopper(device)
    tensors, right = drawn(problem, values, device)
    for dtype in (torch.float16, torch.bfloat16):
        yield (
            f"16 bits: {SHORT[dtype]}",
            rmse(attention_in(dtype, tensors, version="v3" if hopper else "standard"), right),
        )
    in_16_bits = cast("Inputs", tuple(x.to(torch.float16) for x in tensors))
    for name, way in WAYS.items():
        yield name, rmse(attention_in_fp8(way(*in_16_bits), "v3_fp8" if hopper else "standard"), right)
    if not hopper:
        return
    yield 'precision="fp8"', rmse(attention_in(torch.float16, tensors, precision="fp8", version="v3_fp8"), right)
    yield (
        "standard attention, per-tensor scales",
        rmse(attention_in_fp8(WAYS["per-tensor scales"](*in_16_bits), "standard"), right),
    )
    asked = replace(problem, dtype="e4m3", out_dtype=None)  # pyright: ignore[reportArgumentType]
    for name in (name for name in peers.FP8_PEERS if not peers.missing(name)):
        yield f"{name}, no scales", rmse(peers.peer(name, asked)(*(x.to(torch.float8_e4m3fn) for x in tensors)), right)


def row(name: str, error: float, problem: Problem, values: str, hopper: bool) -> Row:
    """An error of the first table, under its name there, as a row of the results file."""
    version = "v3_fp8" if hopper else "standard"
    named = {'precision="fp8"': "v3_fp8_end_to_end", **{f"{peer}, no scales": peer for peer in peers.FP8_PEERS}}
    dtype, impl = "e4m3", named.get(name) or f"{version}_{name}"
    if name.startswith("16 bits: "):
        dtype, impl = name.removeprefix("16 bits: "), version.removesuffix("_fp8")
    elif name.startswith("standard attention, "):
        impl = name.replace(" attention,", "")
    fields = {**Cell(problem).fields, "pass": ERROR + values, "dtype": dtype, "density": 1}
    return {**fields, "impl": re.sub(r"\W+", "_", impl), "rms_err": f"{error:.3e}"}


def sums(p: Tensor, v: Tensor, block: int) -> Tensor:
    """`p v` as Hopper's FP8 tensor core sums it, promoted to float32 after each block of keys.

    Args:
        p, v: as in `flashzoo.reference.one_level`.
        block: keys whose sum stays in the tensor core.
    """
    total = p.new_zeros((*p.shape[:-1], v.shape[-1]))
    for p_block, v_block in zip(p.split(block, -1), v.split(block, -2), strict=True):
        total += one_level(p_block, v_block)
    return total


def emulated(quantized: Quantized, two_level: bool) -> Tensor:
    """Out `(batch, seqlen_q, heads, head_dim)` in float32, with `sums` for P V."""
    (q, k, v), descales = quantized
    batch = q.shape[0]
    real = (dequantized(x, descale).float() for x, descale in zip((q, k, v), descales, strict=True))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in real)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    p = s.sub_(s.amax(-1, keepdim=True)).exp_()
    rounded = (p * P_SCALE).to(torch.float8_e4m3fn).float()
    out = sums(rounded, v, DESCALE_BLOCK if two_level else k.shape[1]) / (P_SCALE * p.sum(-1, keepdim=True))
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


def errors_of_long(problem: Problem, device: str) -> Iterator[tuple[str, float]]:
    """The rows of the second table: a name, and the RMSE over out's own root mean square."""
    hopper = on_hopper(device)
    for mean, of_values in ((0.0, ""), (1.0, ", values around 1")):
        tensors, right = drawn(problem, "randn", device, mean)
        size = float(right.square().mean().sqrt())
        in_bf16 = attention_in(torch.bfloat16, tensors, version="v3" if hopper else "standard")
        yield f"16 bits: bf16{of_values}", rmse(in_bf16, right) / size
        q, k, v = (x.to(torch.float16) for x in tensors)
        quantized = WAYS["all together"](q, k, v)
        for name, two_level in (("two levels", True), ("one level", False)):
            version = "v3_fp8" if two_level else ablation.ONE_LEVEL
            out = attention_in_fp8(quantized, version) if hopper else emulated(quantized, two_level)
            yield f"{name}{of_values}", rmse(out, right) / size


def table(head: list[str], columns: list[dict[str, float]], last: dict[str, str] | None = None) -> str:
    """Markdown: a row for each name, in the first column's order."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in columns[0]:
        cells = [name, *(f"{column[name]:.2e}" for column in columns), *([] if last is None else [last.get(name, "")])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fp8_error", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--queries", type=int, help="of each head; default: the seqlen, without a GPU 1024")
    parser.add_argument("--heads", type=int, help="default: 16, without a GPU 4")
    parser.add_argument("--long", type=numbers, default="4096,131072", help="keys of the second table's columns")
    offer_rows(parser)
    args = parser.parse_args(argv)
    results = results_of(args, args.run, args.device, parser) if args.run else None
    cuda = args.device == "cuda"
    hopper = on_hopper(args.device)
    heads = args.heads or (16 if cuda else 4)
    queries = args.queries or (args.seqlen if cuda else min(args.seqlen, 1024))
    problem = Problem(1, queries, args.seqlen, heads, heads, args.head_dim, **hardware(args.device))  # pyright: ignore[reportArgumentType]
    where = torch.cuda.get_device_name() if hopper else f"emulated in torch on {args.device}"
    print(
        f"RMSE of out against float64, {queries} queries, {args.seqlen} keys, {heads} heads, "
        f"head_dim {args.head_dim}; {where}\n"
    )
    columns = [dict(errors(problem, values, args.device)) for values in VALUES.values()]
    print(table(["", *VALUES, "the paper, outliers"], columns, PAPER))
    if results:
        of_values = zip(VALUES.values(), columns, strict=True)
        results.append(
            [
                row(name, error, problem, values, hopper)
                for values, column in of_values
                for name, error in column.items()
            ]
        )
    few = replace(problem, seqlen_q=min(queries, DESCALE_BLOCK), heads=2, heads_kv=2)
    print(
        f"\nRMSE over the root mean square of out, N(0, 1), {few.seqlen_q} queries, 2 heads, rotation, "
        "smoothing and block scales\n"
    )
    with ablation.registered(ablation.ONE_LEVEL_SPEC) if hopper else nullcontext():
        of_lengths = [dict(errors_of_long(replace(few, seqlen_k=n), args.device)) for n in args.long]
    print(table(["keys", *map(str, args.long)], of_lengths))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
