"""`validate`: a look at the values on the device that `attention` takes on trust."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flashzoo.call.api import explain, takes_options
from flashzoo.call.check import check_data
from flashzoo.call.operands import taken
from flashzoo.call.packed import batch_of_one
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.lengths import flaws_of_caches, flaws_of_packed
from flashzoo.sinks import flaws_of_sinks


@takes_options
def validate(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Raises where a call of `attention` with these arguments would get numbers that mean nothing, and no error.

    `attention` reads no value that lies on the device, since that would wait for it. This does: lengths of packed
    sequences, how much of caches is used and in which pages, blocks of a block mask, descales, sinks. It waits for the
    device, once for each.

    Args:
        q, k, v: as in `attention`.
        options: the other arguments of `attention`.

    Raises:
        TypeError, ValueError: as `attention`; or a value is none that may be: the text names the argument, what was
            expected, and what was got.
    """
    q, k, v, options = batch_of_one(q, k, v, options)
    problem = explain(q, k, v, **options).problem
    check_data(q.device)
    block_mask = options.get("block_mask")
    if block_mask is not None:
        block_mask.validate()
    operands, _ = taken(dict(options))
    if operands.sinks is not None:
        for flaw in flaws_of_sinks(operands.sinks):
            raise ValueError(flaw)
    _check_descale("q_descale", operands.q_descale)
    for name in ("k_descale", "v_descale"):
        _check_descale(name, getattr(operands, name), operands.seqused_k)
    _check_lengths(operands, problem, k)


def _check_descale(name: str, descale: Tensor | None, used: Tensor | None = None) -> None:
    if descale is None:
        return
    if used is not None:  # blocks of nothing else than rows that are not: their numbers are not read
        blocks = descale if descale.ndim == 3 else descale[..., None]
        first = torch.arange(blocks.shape[2], device=used.device) * DESCALE_BLOCK
        descale = blocks.masked_fill(first >= used[:, None, None], 1)
    wrong = descale[~(torch.isfinite(descale) & (descale > 0))]
    if wrong.numel():
        raise ValueError(
            f"{name} must be positive and finite, got {wrong[0].item()} among {descale.numel()}, "
            f"of which {wrong.numel()} are not"
        )


def _check_lengths(operands: Any, problem: Problem, k: Tensor) -> None:
    flaws, longest, ranges = [], (problem.max_seqlen_q, problem.max_seqlen_k), operands.ranges
    if problem.packed_q:
        flaws.append(flaws_of_packed("q", operands.cu_seqlens_q, problem.seqlen_q, longest[0]))
    elif ranges is not None:
        flaws.append(ranges.flaws(problem.seqlen_q, problem.seqlen_k, *longest))
    if problem.packed_q or "cache" in problem.features:
        used = operands.seqused_k
        if used is None:  # all of each cache
            used = torch.full((operands.cu_seqlens_q.numel() - 1,), problem.seqlen_k, device="cpu")
        flaws.append(flaws_of_caches(used, problem.seqlen_k, longest[1]))
    for flaw in chain(*flaws):
        raise ValueError(flaw)
    if operands.page_table is not None:
        used = problem.seqlen_k if operands.seqused_k is None else operands.seqused_k[:, None]
        first = torch.arange(operands.page_table.shape[1], device=operands.page_table.device) * k.shape[1]
        table, pages = operands.page_table.masked_fill(first >= used, 0), k.shape[0]
        for wrong in table[(table < 0) | (table >= pages)].tolist():
            raise ValueError(f"page_table must have numbers from 0 to {pages - 1} of {pages} pages, got {wrong}")
