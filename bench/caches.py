"""The caches of decode cells: keys and values that a few queries of each sequence see, plain or in pages, all used, of
q's dtype or in e4m3 with descales by head.

How many are used is on the device, as a server has it (`seqused_k`). A cell is timed by calls on several caches, one
after another, so that what a call reads does not lie in L2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from flashzoo.call.operands import Descales
from flashzoo.call.problem import Problem
from flashzoo.dtypes import BYTES, TORCH_DTYPES
from flashzoo.inputs import descales
from flashzoo.integers import cdiv

MOST_BYTES = 40e9
"""Of a cell's keys and values, and no more than half of the GPU's memory: larger cells are left out."""
READ_BYTES = {"cuda": 1 << 30, "cpu": 1 << 16}
"""What the calls that are timed together read, so many of them permitting: of an H200's L2 twenty times as much."""
MOST_CALLS = 40
DRAWN = 1 << 24
"""Numbers of an e4m3 cache that are drawn in q's dtype at a time."""


@dataclass(frozen=True)
class Caches:
    """The caches of one problem, and what calls of attention are told of them.

    Attributes:
        problem: one of which `used_k` is true; its page_size says whether keys lie in pages.
    """

    problem: Problem

    @property
    def bytes(self) -> int:
        """Of the keys and values that one call reads."""
        p = self.problem
        width = p.head_dim if p.latent else p.head_dim + p.head_dim_v
        return BYTES[p.dtype_kv or p.dtype] * p.batch * p.seqlen_k * p.heads_kv * width

    @property
    def calls(self) -> int:
        """How many are timed together, each on keys and values of its own."""
        return min(MOST_CALLS, cdiv(READ_BYTES[self.problem.device], self.bytes))

    @cached_property
    def used(self) -> Tensor:
        """int32 `(batch,)`: all of each."""
        return torch.full((self.problem.batch,), self.problem.seqlen_k, dtype=torch.int32, device=self.problem.device)

    @cached_property
    def page_table(self) -> Tensor | None:
        """int32 `(batch, pages)`: all the pages that there are, in any order; None where keys lie in none."""
        p = self.problem
        if p.page_size is None:
            return None
        pages = p.seqlen_k // p.page_size
        order = torch.randperm(p.batch * pages, generator=torch.Generator(p.device).manual_seed(0), device=p.device)
        return order.view(p.batch, pages).int()

    @cached_property
    def descales(self) -> Descales:
        """Of e4m3 caches k's and v's, float32 `(batch, heads_kv)`, from 1/2 to 2, no two alike; None of others."""
        return descales(self.problem, "head" if self.problem.kv_in_e4m3 else None, device=self.problem.device)

    @property
    def options(self) -> dict[str, Tensor | None]:
        """By the arguments of `flashzoo.attention`."""
        _, of_k, of_v = self.descales
        return {"seqused_k": self.used, "page_table": self.page_table, "k_descale": of_k, "v_descale": of_v}

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        """q, k, v and dout of normal random numbers, drawn in place: float32 of the largest caches would not fit."""
        p = self.problem
        generator = torch.Generator(p.device).manual_seed(seed)
        rows = (p.batch, p.seqlen_k) if p.page_size is None else (p.batch * p.seqlen_k // p.page_size, p.page_size)
        of_q, of_k = (p.batch, p.seqlen_q, p.heads), (*rows, p.heads_kv)
        shapes = [(*of_q, p.head_dim), (*of_k, p.head_dim), (*of_k, p.head_dim_v), (*of_q, p.head_dim_v)]
        dtypes = [p.dtype, *[p.dtype_kv or p.dtype] * 2, p.dtype]
        if p.latent:
            del shapes[2], dtypes[2]
        q, k, *v, dout = (
            self._drawn(torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=p.device), generator)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return q, k, v[0] if v else k[..., : p.head_dim_v], dout

    def _drawn(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if x.dtype != TORCH_DTYPES["e4m3"]:
            return x.normal_(generator=generator)
        of_q = TORCH_DTYPES[self.problem.dtype]
        for part in x.view(-1).split(DRAWN):  # torch draws none in e4m3
            part.copy_(torch.randn(part.shape, generator=generator, dtype=of_q, device=x.device))
        return x

    def first(self, x: Tensor) -> Tensor:
        """`(1, seqlen_k, heads_kv, head_dim)`: the first sequence's, of k or v or of some heads of them."""
        return x[:1] if self.page_table is None else x[self.page_table[0]].flatten(0, 1)[None]


def fits(problem: Problem) -> bool:
    """Whether there is room for the problem's caches."""
    memory = torch.cuda.get_device_properties().total_memory if problem.device == "cuda" else math.inf
    return Caches(problem).bytes <= min(MOST_BYTES, memory / 2)


@lru_cache(maxsize=4)
def caches(problem: Problem) -> Caches:
    """The problem's, kept."""
    return Caches(problem)


def rate(row: Mapping[str, object]) -> float:
    """GB/s of keys and values, of a results file's row of pass `decode`."""
    elements = math.prod(int(str(row[name])) for name in ("batch", "seqlen_k", "heads_kv", "head_dim"))
    if not row.get("head_dim_v"):  # else values lie in keys
        elements *= 2
    return BYTES[str(row.get("dtype_kv") or row["dtype"])] * elements / float(str(row["ms"])) / 1e6
