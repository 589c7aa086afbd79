"""Cells: the shapes, passes, block masks, packed sequences, caches and functions on scores that a run is of."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench import lengths, masks, scores
from bench.caches import Caches, caches, fits
from bench.models import MODELS
from bench.rows import SHAPE_FIELDS, Row, key_of
from bench.scores import BIAS_GRAD, PLAIN, Scores
from flashzoo.call.problem import Problem
from flashzoo.counts import flops, visible_pairs
from flashzoo.inputs import inputs
from flashzoo.workloads import hardware, workloads

TAGS = {"fwd": "bench", "bwd": "bench_bwd"}
PASSES = tuple(TAGS)
DECODE = "decode"
"""The pass of cells with caches: forward, and timed by CUDA graphs."""
MASKED_SIZES = ((16384, 2048), (65536, 512))
"""Tokens, of one sequence, and hidden sizes of a run with block masks."""
MASKED_HEAD_DIMS = (128, 64)
OWN_HEAD_DIMS = (64,)
"""Where `--tokens` and `--hidden` are given and no head dims are."""
PACKED_TOTALS = (4096, 16384, 65536)
PACKED_HEADS = ((16, 16, 128), (64, 8, 128), (32, 32, 64), (8, 8, 256))
"""Heads of queries, of keys, and head dims of a run with packed sequences."""
DECODE_HEADS = ((64, 8, 128), (32, 8, 128), (32, 32, 128), (16, 2, 256), (64, 8, 64))
"""The same of a run with `--decode`."""
DECODE_LATENT = ((16, 1, 576), (128, 1, 576))
"""And where its head dims are asked for: DeepSeek's MLA, whose values are a key's first 512 columns."""
DECODE_SEQLENS = (2048, 8192, 32768, 131072)
DECODE_BATCHES = (1, 8, 32, 128)
SCORED_SIZE = (16384, 2048)
"""Tokens in all, and the hidden size, of a run with `--scores`."""
SCORED_SEQLENS = (2048, 16384)
SCORED_HEAD_DIMS = (64, 128, 256)
DENSE = "dense"
"""What stands among the names of masks for none."""
WHOLE, WHOLE_SCORED, QUERIES = 16384, 2048, 1024
"""Dense cells of at most so many queries, and those with something on their scores, are checked in all of them; others
and masked ones in so many."""


@dataclass(frozen=True)
class Cell:
    """One shape and pass, with a block mask, packed sequences, caches, something on its scores or none of these;
    `problem.grad` and `problem.used_k` say which pass, mask is one of `bench.masks` or empty, lengths one of
    `bench.lengths` or empty, and score one of `bench.scores` or empty. model is one of `bench.models`, where it is the
    first of such a shape, or empty.
    """

    problem: Problem
    mask: str = ""
    lengths: str = ""
    score: str = ""
    model: str = field(default="", compare=False)

    @property
    def pass_(self) -> str:
        return DECODE if self.problem.used_k else "bwd" if self.problem.grad else "fwd"

    @property
    def fields(self) -> Row:
        """The columns that say what was asked, but for `density`."""
        shape = {name: getattr(self.problem, name) for name in SHAPE_FIELDS[1:]}
        shape["batch"] = self.problem.batch if self.packed is None else len(self.packed.lengths)
        return {
            **shape,
            "pass": self.pass_,
            "causal": int(self.problem.causal),
            "mask": self.mask,
            "lengths": f"pages{self.problem.page_size}" if self.problem.page_size else self.lengths,
            "window": window_column(self.problem.window),
            "head_dim_v": "" if self.problem.head_dim_v == self.problem.head_dim else self.problem.head_dim_v,
            "model": self.model,
            "score": self.score,
            "gpus": "",
            "dtype_kv": self.problem.dtype_kv or "",
        }

    @property
    def key(self) -> tuple[str, ...]:
        """The shape, pass and mask as a results file holds them."""
        return key_of(self.fields)

    @property
    def pattern(self) -> masks.Pattern | None:
        """The block mask, on the problem's device."""
        return masks.pattern(self.mask, self.problem.seqlen_q, self.problem.device) if self.mask else None

    @property
    def packed(self) -> lengths.Packed | None:
        """The packed sequences, on the problem's device."""
        return lengths.packed(self.lengths, self.problem.seqlen_q, self.problem.device) if self.lengths else None

    @property
    def caches(self) -> Caches | None:
        """The caches, on the problem's device."""
        return caches(self.problem) if self.problem.used_k else None

    @property
    def scores(self) -> Scores | None:
        """What is on the scores, on the problem's device."""
        return scores.scores(self.score, self.problem) if self.score else None

    @property
    def dense(self) -> Problem:
        """The problem, of caches with all of them used and in no pages."""
        return replace(self.problem, used_k=False, page_size=None)

    @property
    def density(self) -> float:
        """The share of the pairs, of those that causal leaves, that the block mask shows; of packed sequences and
        caches, of all that there are."""
        if self.packed:
            return self.packed.density(self.problem.causal)
        if self.caches:
            return visible_pairs(self.dense) / visible_pairs(self.problem)
        return self.pattern.visible if self.pattern else 1

    @property
    def flops(self) -> float:
        """Of the pass, over the pairs that are seen."""
        return flops(self.problem, "bwd" if self.problem.grad else "fwd", self.density)

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """q, k, v and dout; of caches those of every call that is timed."""
        if self.caches:
            return [self.caches.inputs(seed) for seed in range(self.caches.calls)]
        if self.scores:
            return [self.scores.inputs()]
        return [inputs(self.problem, device=self.problem.device)]

    @property
    def queries(self) -> Tensor | None:
        """The queries that are checked; None where all are. One of each run of equally many,
        at ever other places in a block."""
        seqlen = self.problem.seqlen_q
        windowed = self.problem.window != (None, None)
        whole = 0 if self.mask or self.lengths else WHOLE_SCORED if self.score else WHOLE
        if windowed or seqlen <= whole:
            return None
        step = max(1, seqlen // QUERIES)
        first = torch.arange(0, seqlen, step, device=self.problem.device)
        return (first + first // step * 37 % step).clamp(max=seqlen - 1)

    def __str__(self) -> str:
        p = self.problem
        shape = f"{p.batch}x{p.seqlen_q}x{p.heads}"
        what = f"{self.mask:<10}" if self.mask else f"{'causal' if p.causal else 'full':<6}"
        if self.packed:
            what, shape = f"{what} {self.lengths}", f"{len(self.packed.lengths)} in {p.seqlen_q}x{p.heads}:{p.heads_kv}"
        if self.caches:
            pages = f" in pages of {p.page_size}" if p.page_size else ""
            kept = f" in {p.dtype_kv}" if p.dtype_kv else ""
            what, shape = f"{p.heads}:{p.heads_kv}", f"{p.batch}x{p.seqlen_q} on {p.seqlen_k}{kept}{pages}"
        named = "".join(f" {name}" for name in (self.score, self.model) if name)
        return f"{self.pass_} d{p.head_dim:<3} {what} {shape}{named}"


def window_column(window: tuple[int | None, int | None]) -> str:
    """`left:right`, either empty where there is no such side; empty where there is none."""
    return "" if window == (None, None) else ":".join("" if side is None else str(side) for side in window)


Work = dict[Cell, list[str]]
"""What is to be measured: for each cell these implementations."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments leave, in the workloads' order;
    of other sizes where `--tokens` and `--hidden` are given.

    With `--masks` head dim by head dim, size by size, and pass by pass: the dense cells, then the masked ones.
    """
    if args.masks:
        return list(_masked(args))
    if args.lengths:
        return list(_packed(args))
    if args.decode:
        return list(_decoding(args))
    if args.scores:
        return [cell for cell in _scored(args) if scores.fits(cell.score, cell.problem)]
    if args.models:
        return list(dict.fromkeys(_of_models(args)))
    own = bool(args.tokens)
    chosen = []
    for pass_ in passes(args):
        problems = _sized(args) if own else [w.problem for w in workloads(TAGS[pass_])]
        chosen += [Cell(_here(p, pass_, args)) for p in problems if own or _wanted(p, args)]
    return chosen


def _here(problem: Problem, pass_: str, args: argparse.Namespace) -> Problem:
    return replace(problem, **hardware(args.device), dtype=args.dtype, out_dtype=None, grad=pass_ == "bwd")  # pyright: ignore[reportArgumentType]


def _masked(args: argparse.Namespace) -> Iterator[Cell]:
    if args.tokens:
        sizes = [(args.tokens, seqlen, args.hidden) for seqlen in args.seqlens or (args.tokens,)]
    else:
        sizes = [(tokens, tokens, hidden) for tokens, hidden in MASKED_SIZES if tokens in (args.seqlens or (tokens,))]
    for head_dim in args.head_dims or MASKED_HEAD_DIMS:
        for tokens, seqlen, hidden in sizes:
            heads = hidden // head_dim
            problem = Problem(tokens // seqlen, seqlen, seqlen, heads, heads, head_dim)
            for pass_ in passes(args):
                here = _here(problem, pass_, args)
                dense = causal(args) if DENSE in args.masks else ()
                yield from (Cell(replace(here, causal=each)) for each in dense)
                yield from (Cell(here, mask) for mask in args.masks if mask != DENSE)


def _packed(args: argparse.Namespace) -> Iterator[Cell]:
    totals = [args.tokens] if args.tokens else [total for total in PACKED_TOTALS if total in (args.seqlens or (total,))]
    for name in args.lengths:
        for (heads_q, heads_kv, head_dim), total in product(_heads(args, PACKED_HEADS), totals):
            count = len(lengths.lengths(name, total))
            problem = Problem(1, total, total, heads_q, heads_kv, head_dim, sequences=count)
            for pass_, each in product(passes(args), causal(args)):
                yield Cell(replace(_here(problem, pass_, args), causal=each), lengths=name)


def _decoding(args: argparse.Namespace) -> Iterator[Cell]:
    """One query sees all keys, causal or not; more are causal. Of one shape the dtypes of keys and values follow one
    another. What does not fit is left out."""
    sizes = [(seqlen, batch) for seqlen in args.seqlens or DECODE_SEQLENS for batch in args.batches or DECODE_BATCHES]
    if args.tokens:
        sizes = [(seqlen, args.tokens // seqlen) for seqlen in args.seqlens or (args.tokens,)]
    field = (*DECODE_HEADS, *DECODE_LATENT) if args.head_dims else DECODE_HEADS
    dtypes = [None if dtype == args.dtype else dtype for dtype in args.dtype_kv or (args.dtype,)]
    for heads, queries, (seqlen, batch), dtype_kv in product(_heads(args, field), args.queries or (1,), sizes, dtypes):
        how: dict[str, Any] = {"head_dim_v": 512, "latent": True} if heads in DECODE_LATENT else {}
        problem = Problem(batch, queries, seqlen, *heads, used_k=True, page_size=args.page_size, **how)
        problem = replace(_here(problem, DECODE, args), causal=queries > 1, dtype_kv=dtype_kv)
        if problem.causal in causal(args) and fits(problem):
            yield Cell(problem)


def _scored(args: argparse.Namespace) -> Iterator[Cell]:
    """Size by size all that is on scores; a bias whose gradient is asked for has no forward pass of its own."""
    tokens, hidden = (args.tokens, args.hidden) if args.tokens else SCORED_SIZE
    seqlens = args.seqlens or ((tokens,) if args.tokens else SCORED_SEQLENS)
    for pass_, head_dim, seqlen, each in product(
        passes(args), args.head_dims or SCORED_HEAD_DIMS, seqlens, causal(args)
    ):
        problem = _here(_of_size(tokens, hidden, seqlen, head_dim, causal=each), pass_, args)
        for name in args.scores:
            if problem.grad or name != BIAS_GRAD:
                yield Cell(problem, score="" if name == PLAIN else name)


def left_out(args: argparse.Namespace) -> Iterator[str]:
    """Cells with a bias for which the GPU has no room, in words."""
    for cell in _scored(args) if args.scores else ():
        if not scores.fits(cell.score, cell.problem):
            taken, room = (each / 1e9 for each in (Scores(cell.score, cell.problem).bytes, scores.room(args.device)))
            yield f"{cell} is left out: its bias takes {taken:.0f} GB, and there are {room:.0f}"


def causal(args: argparse.Namespace) -> list[bool]:
    """Those asked for; where none are both, and with something on the scores causal alone."""
    return args.causal or ([True] if args.scores else [False, True])


def _of_models(args: argparse.Namespace) -> Iterator[Cell]:
    for pass_, name in product(passes(args), args.models):
        if pass_ in MODELS[name].passes:
            yield Cell(_here(MODELS[name].problem, pass_, args), model=name)


def _heads(args: argparse.Namespace, field: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int]]:
    """Heads of queries, of keys, and head dims: the field's, or those of `--hidden`."""
    own = [(args.hidden // d, args.hidden // d, d) for d in args.head_dims or OWN_HEAD_DIMS] if args.hidden else field
    return [heads for heads in own if heads[2] in (args.head_dims or (heads[2],))]


def passes(args: argparse.Namespace) -> list[str]:
    """Those asked for; where none are, all that the dtype has: e4m3 has no backward pass, and decoding has its own."""
    if args.decode:
        return [DECODE]
    return args.passes or [pass_ for pass_ in PASSES if (pass_, args.dtype) != ("bwd", "e4m3")]


def _sized(args: argparse.Namespace) -> list[Problem]:
    sizes = product(args.head_dims or OWN_HEAD_DIMS, causal(args), args.seqlens or (args.tokens,))
    return [_of_size(args.tokens, args.hidden, seqlen, head_dim, causal=each) for head_dim, each, seqlen in sizes]


def _of_size(tokens: int, hidden: int, seqlen: int, head_dim: int, **how: Any) -> Problem:
    return Problem(tokens // seqlen, seqlen, seqlen, hidden // head_dim, hidden // head_dim, head_dim, **how)


def _wanted(problem: Problem, args: argparse.Namespace) -> bool:
    sizes = ((problem.head_dim, args.head_dims), (problem.seqlen_q, args.seqlens), (problem.causal, causal(args)))
    return all(not wanted or size in wanted for size, wanted in sizes)
