"""Inputs of a problem, from a seed: tensors of several values and layouts, and what goes with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.lengths import Ranges
from flashzoo.masks.block_mask import BlockMask
from flashzoo.scores.mod import ScoreMod
from flashzoo.workloads import Workload


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    """randn as it is."""


def _outliers(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    _with_outliers((q, k), generator)


def _fp8_paper(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    _with_outliers((q, k, v), generator)


def _with_outliers(tensors: tuple[Tensor, ...], generator: torch.Generator) -> None:
    # As FlashAttention-3 tests its FP8: to one element in a thousand, one from a normal of deviation 10 is added.
    for x in tensors:
        hit = torch.randn(x.shape, generator=generator, device=x.device).abs() > 3.29
        x += hit * 10 * torch.randn(x.shape, generator=generator, device=x.device)


def _x30(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    q *= 30


def _shifted(score: float) -> Callable[[Tensor, Tensor, Tensor, float, torch.Generator], None]:
    """Every score moved to about `score` by one component of q and k."""

    def shift(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
        half = math.sqrt(abs(score) / scale)
        q[..., 0], k[..., 0] = half, math.copysign(half, score)

    return shift


def _ramp(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    # The running maximum moves at every block, so every rescaling counts.
    q[..., 0] = 4
    k[..., 0] = torch.linspace(-5 / scale, 5 / scale, k.shape[1], device=k.device)[:, None]


def _sink(q: Tensor, k: Tensor, v: Tensor, scale: float, generator: torch.Generator) -> None:
    # Most of the rest of P is then below e4m3's smallest number, 2^-9, unless P is scaled before it is rounded.
    q[..., 0], k[:, :1, :, 0] = 4, 2 / scale


VALUES: dict[str, Callable[..., None]] = {
    "randn": _plain,
    "outliers": _outliers,
    "x30": _x30,
    "low_scores": _shifted(-120),
    "large_scores": _shifted(-1e5),
    "ramp": _ramp,
    "sink": _sink,
    "fp8_paper": _fp8_paper,
}
"""Kinds of q and k: normal; with outliers; scores of deviation 30; all near -120 (exp(-lse) overflows float32); all
near -1e5 (below a careless mask sentinel); rising by 40 along the keys; the first key 8 above the rest. v and dout are
normal, but for "fp8_paper", whose v has outliers as its q and k have: the numbers of section 4.3 of the
FlashAttention-3 paper."""

DESCALES = (None, "head", "block")
"""Kinds of descales of e4m3 tensors: none, one number for each (batch, key/value head), of packed sequences for each
(sequence, key/value head), one for each block of rows."""


def kinds_of_descales(problem: Problem) -> tuple[str | None, ...]:
    """Those of `DESCALES` that a problem's tensors may have, the finest last:
    blocks of rows have none where sequences share them."""
    return DESCALES[: 1 if not problem.kv_in_e4m3 else 3 if problem.sequences is None else 2]


def inputs(
    source: Workload | Problem,
    seed: int = 0,
    device: torch.device | str = "cpu",
    values: str | None = None,
    layout: str = "bshd",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout for a problem, drawn in float32 on the device and cast to the problem's dtype, e4m3 saturating.

    Args:
        source: a workload, or a problem whose sizes and dtype are read.
        seed: of a generator of its own; torch's global one is left alone. The same numbers come for every layout.
        device: where the tensors are.
        values: one of `VALUES`; the workload's own, or "randn", where None.
        layout: one of `LAYOUTS`.

    Returns:
        q `(batch, seqlen_q, heads, head_dim)`, k `(batch_kv, seqlen_k, heads_kv, head_dim)`, and v and dout (out's
        shape and dtype) with head_dim_v in place of head_dim; none requires grad. Where the problem is latent v is a
        view of k.

    Raises:
        ValueError: values or layout is unknown.
    """
    problem, own = (source.problem, source.values) if isinstance(source, Workload) else (source, "randn")
    values = own if values is None else values
    for name, given, known in (("values", values, VALUES), ("layout", layout, LAYOUTS)):
        if given not in known:
            raise ValueError(f"inputs: {name} must be one of {', '.join(known)}, got {given!r}")
    generator = torch.Generator(device).manual_seed(seed)
    of_queries = (problem.batch, problem.seqlen_q, problem.heads)
    of_keys = (problem.batch_kv, problem.seqlen_k, problem.heads_kv)
    d, dv = problem.head_dim, problem.head_dim_v
    shapes = ((*of_queries, d), (*of_keys, d), (*of_keys, dv), (*of_queries, dv))
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    VALUES[values](q, k, v, 1 / math.sqrt(d), generator)
    of_kv = problem.dtype_kv or problem.dtype
    q, k, v, dout = (
        LAYOUTS[layout](_cast(x, TORCH_DTYPES[name]))
        for x, name in zip((q, k, v, dout), (problem.dtype, of_kv, of_kv, problem.out_dtype), strict=True)
    )
    return q, k, k[..., :dv] if problem.latent else v, dout


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    # which gives NaN past its range
    return x.clamp(-largest, largest).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def descales(
    problem: Problem, kind: str | None = "block", seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """q_descale, k_descale and v_descale for e4m3 tensors of a problem: float32, from 1/2 to 2, no two alike; None for
    a q that is none.

    Args:
        kind: one of `kinds_of_descales`: "head" gives three of `(batch, heads_kv)`, of packed sequences
            `(sequences, heads_kv)`; "block" gives q's `(batch, heads, ceil(seqlen_q / 128))` and k's and v's
            `(batch, heads_kv, ceil(seqlen_k / 128))`; None gives None.

    Raises:
        ValueError: the kind is none of the problem's.
    """
    if kind not in kinds_of_descales(problem):
        raise ValueError(f"descales: kind must be one of {kinds_of_descales(problem)}, got {kind!r}")
    if kind is None:
        return None, None, None
    generator = torch.Generator(device).manual_seed(seed)
    of_keys = (problem.batch if problem.sequences is None else problem.sequences, problem.heads_kv)
    shapes = [of_keys] * 3
    if kind == "block":
        blocks_q, blocks_k = (cdiv(seqlen, DESCALE_BLOCK) for seqlen in (problem.seqlen_q, problem.seqlen_k))
        shapes = [(problem.batch, problem.heads, blocks_q), *[(*of_keys, blocks_k)] * 2]
    q, k, v = (torch.exp2(2 * torch.rand(shape, generator=generator, device=device) - 1) for shape in shapes)
    return q if problem.dtype == "e4m3" else None, k, v


def block_mask(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> BlockMask | None:
    """A block mask of the problem's form and sizes, its blocks drawn at random; None where the problem has none.

    About two blocks of three are kept; of those that bits apply to, half are full and the others have a random half of
    their elements. Where there are three rows of blocks or columns, one is empty.
    """
    form = problem.block_mask
    if form is None:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    n_q, n_k = cdiv(problem.seqlen_q, form.block_q), cdiv(problem.seqlen_k, form.block_kv)
    shape = (form.batch, form.heads, n_q, n_k)
    kept = torch.rand(shape, generator=generator, device=device) < 0.67
    if n_q > 2:
        kept[:, :, n_q // 2] = False
    if n_k > 2:
        kept[..., n_k // 2] = False
    sizes: dict[str, Any] = {"block_q": form.block_q, "block_kv": form.block_kv}
    if not form.bits:
        return BlockMask.from_blocks(
            kept, problem.seqlen_q, problem.seqlen_k, causal=form.causal, window_size=form.window, **sizes
        )
    whole = torch.rand(shape, generator=generator, device=device) < 0.5
    kept, whole = (
        x.repeat_interleave(form.block_q, 2).repeat_interleave(form.block_kv, 3)[
            ..., : problem.seqlen_q, : problem.seqlen_k
        ]
        for x in (kept, whole)
    )
    elements = torch.rand(kept.shape, generator=generator, device=device) < 0.5
    return BlockMask.from_dense(kept & (whole | elements), **sizes)


def lengths(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
    """Lengths for the problem, drawn at random, by the arguments of `flashzoo.attention` that take them;
    none where it asks for none.

    Packed: of four sequences or more one has no queries, and where q and k have other lengths one has no keys; the last
    rows are nobody's. Of a batch's caches the first is full, and of three or more the second empty.
    """
    if problem.sequences is not None:
        found = vars(ranges(problem, seed, device))
        return {name: x for name, x in found.items() if not (problem.packed_q and name == "cu_seqlens_k")}
    if not problem.used_k:
        return {}
    random, batch = Random(seed), problem.batch
    used = [random.randint(0, problem.seqlen_k) for _ in range(batch)]
    used[: min(2, batch - 1)] = [problem.seqlen_k, 0][: min(2, batch - 1)]
    return {"seqused_k": torch.tensor(used, dtype=torch.int32, device=device)}


def sinks(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Tensor | None:
    """Sinks that have a part of each row, from little to most of it, where scores are normal.

    `(heads,)`, float32, float64 with fp64 inputs; None where the problem has none.
    """
    if not problem.sinks:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    drawn = 3 + 2 * torch.randn(problem.heads, generator=generator, device=device)
    return drawn.to(torch.float64 if problem.dtype == "fp64" else torch.float32)


def score_mod(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> ScoreMod | None:
    """A function of the problem's form on tensors drawn at random: normal numbers, integers from 0 to 2.

    None where the problem has none. It has no Python function, but its program alone.
    """
    form = problem.score_mod
    if form is None:
        return None
    from flashzoo.scores.evaluate import TORCH_DTYPES as SCORE_DTYPES
    from flashzoo.scores.program import FLOATS

    generator = torch.Generator(device).manual_seed(seed)
    tensors = []
    for dtype, shape in form.reads:
        x = torch.randn(shape, generator=generator, device=device)
        x = x if dtype in FLOATS else x.abs().clamp(max=2)
        tensors.append(x.to(SCORE_DTYPES[dtype]))
    for i in form.grads:
        tensors[i].requires_grad_()
    return ScoreMod.of_parts(form.text, tuple(tensors))


def in_pages(problem: Problem, k: Tensor, v: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """k and v in pages that lie in any order among others, which hold no numbers; and the page table."""
    assert problem.page_size is not None
    size, pages = problem.page_size, problem.seqlen_k // problem.page_size
    batch = problem.batch_kv
    order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(seed)).to(k.device)
    table = order[: batch * pages].view(batch, pages)
    found = []
    for x in (k, v):
        # NaN in every dtype
        pool = x.new_empty((len(order), size, *x.shape[2:])).view(torch.uint8).fill_(0xFF).view(x.dtype)
        pool[table.flatten()] = x.reshape(-1, size, *x.shape[2:])
        found.append(pool)
    k, v = found
    return k, k[..., : problem.head_dim_v] if problem.latent else v, table.int()


def ranges(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Ranges:
    """Those of packed sequences; where queries alone are, on caches one behind another, of which the first is full."""
    assert problem.sequences is not None
    random, sequences = Random(seed), problem.sequences

    def drawn(total: int, empty: int) -> Tensor:
        cuts = [0, *sorted(random.randint(0, total) for _ in range(sequences - 1)), total - total // 9][: sequences + 1]
        if sequences > 3:
            cuts[empty + 1] = cuts[empty]
        return torch.tensor(sorted(cuts), dtype=torch.int32, device=device)

    q = drawn(problem.seqlen_q, 1)
    if problem.packed_q:
        k = torch.arange(sequences + 1, dtype=torch.int32, device=device) * problem.seqlen_k
    else:
        k = q if problem.seqlen_q == problem.seqlen_k else drawn(problem.seqlen_k, 2)
    used = None
    if problem.used_k:
        lengths = (k[1:] - k[:-1]).tolist()
        counts = [random.randint(0, length) for length in lengths]
        if problem.packed_q:
            counts[:1] = lengths[:1]
        used = torch.tensor(counts, dtype=torch.int32, device=device)
    return Ranges(q, k, used)


def _packed(x: Tensor) -> Tensor:
    batch, seqlen, heads, head_dim = x.shape
    buffer = x.new_full((batch, seqlen, 3, heads, head_dim), math.nan)
    buffer[:, :, 1] = x
    return buffer[:, :, 1]


def _padded_by(elements: int) -> Callable[[Tensor], Tensor]:
    def padded(x: Tensor) -> Tensor:
        buffer = x.new_full((*x.shape[:-1], x.shape[-1] + elements), math.nan)
        buffer[..., :-elements] = x
        return buffer[..., :-elements]

    return padded


def _offset(x: Tensor) -> Tensor:
    buffer = x.new_full((x.numel() + 2,), math.nan)
    buffer[1:-1] = x.flatten()
    return buffer[1:-1].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda x: x,
    "bhsd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sbhd": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "packed": _packed,
    "padded": _padded_by(1),
    "padded_by_8": _padded_by(8),
    "offset": _offset,
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}
"""Where the same `(batch, seqlen, heads, head_dim)` numbers lie: contiguous; views of head-first and sequence-first
tensors; a slot of a fused qkv; rows of head_dim + 1 and + 8; one element past an aligned address; one head for all
(stride 0, so other numbers than the rest). What lies between is NaN."""
