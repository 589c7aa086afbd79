"""Named problems, inputs from a seed, and the counts that go with them: visible pairs, FLOPs, bytes. No tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import DESCALE_BLOCK, OPTIONS, Problem
from flashzoo.dtypes import BYTES, TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.lengths import Ranges
from flashzoo.masks.block_mask import BlockMask
from flashzoo.scores.mod import ScoreMod

LOG_SUM_BYTES = 4  # lse, and FA-1's l and m, are float32 in every version

PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_BACKWARD_SEQLENS = (512, 2048, 8192, 16384)


@dataclass(frozen=True)
class Workload:
    """A named problem.

    Attributes:
        name: unique, fit for a test id.
        problem: sizes, causal and window; its dtype is a suggestion and its hardware is not set (see `on`).
        tags: "smoke" (fits Triton's interpreter on two cores), "hard" (the shapes that break kernels), "large" (GPU
            only), "paper" and "bench" (16k tokens, hidden 2048, forward), "bench_bwd" (the bench cells timed backward).
        values: one of `VALUES`.
    """

    name: str
    problem: Problem
    tags: frozenset[str]
    values: str = "randn"

    def on(self, device: torch.device | str = "cpu", **changes: object) -> Problem:
        """The problem on this device, with fields of `Problem` changed by name (`dtype="fp16"`, `grad=True`).

        out_dtype is the dtype's default unless it is among them, or the workload's is float32,
        which out of e4m3 can't be.
        """
        out_dtype = "fp32" if self.problem.out_dtype == "fp32" and changes.get("dtype") != "e4m3" else None
        return replace(self.problem, **{**hardware(device), "out_dtype": out_dtype, **changes})  # pyright: ignore[reportArgumentType]


def hardware(device: torch.device | str) -> dict[str, object]:
    """`Problem`'s fields device and arch for a torch device that is there."""
    device = torch.device(device)
    if device.type != "cuda":
        return {"device": "cpu", "arch": None}
    major, minor = torch.cuda.get_device_capability(device)
    return {"device": "cuda", "arch": 10 * major + minor}


def _workload(
    name: str,
    tags: str,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int = 64,
    heads: int = 2,
    heads_kv: int | None = None,
    batch: int = 1,
    values: str = "randn",
    **options: object,
) -> Workload:
    heads_kv = heads if heads_kv is None else heads_kv
    problem = Problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, **options)  # pyright: ignore[reportArgumentType]
    return Workload(name, problem, frozenset(tags.split()), values)


def _paper() -> list[Workload]:
    cells = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in PAPER_SEQLENS:
                name = f"paper_d{head_dim}_{'causal' if causal else 'full'}_{seqlen}"
                tags = "paper bench bench_bwd" if seqlen in PAPER_BACKWARD_SEQLENS else "paper bench"
                heads, batch = 2048 // head_dim, 16384 // seqlen
                cells.append(_workload(name, tags, seqlen, seqlen, head_dim, heads, batch=batch, causal=causal))
    return cells


SCORE_ALIBI = """\
x0: f32 = load(t0, h)
x1: i32 = sub(k, q)
x2: f32 = cast(x1)
x3: f32 = mul(x0, x2)
x4: f32 = add(x3, score)
return x4"""
SCORE_BIAS = """\
x0: bf16 = load(t0, b, 0, q, k)
x1: f32 = cast(x0)
x2: bool = lt(x1, -1e+38)
x3: f32 = const(-inf)
x4: f32 = add(x1, score)
x5: f32 = where(x2, x3, x4)
return x5 fits t0"""
SCORE_TABLE = """\
x0: i32 = sub(q, k)
x1: bool = le(x0, 40)
x2: i32 = remainder(x0, 9)
x3: i64 = load(t0, x2)
x4: f32 = load(t1, h, x3)
x5: f32 = sigmoid(score)
x6: f32 = mul(x4, x5)
x7: f32 = where(x1, x6, score)
return x7"""
"""Texts of functions on scores: ALiBi; a bias for each of the batch; a table of numbers for each head, looked up by a
table, by which some scores are multiplied, squashed before."""


_ALL = (
    _workload("square", "smoke", 128, 128),
    _workload("square_causal", "smoke", 128, 128, causal=True),
    _workload("ragged", "smoke", 113, 190, batch=2),
    _workload("ragged_causal", "smoke", 113, 190, causal=True),
    _workload("wide_heads_causal", "smoke", 65, 97, 128, causal=True),
    _workload("gqa3_causal", "smoke", 67, 131, heads=3, heads_kv=1, causal=True),
    _workload("window", "smoke", 100, 130, window=(20, 10)),
    _workload("window_causal", "smoke", 130, 130, window=(17, None), causal=True),
    _workload("outliers", "smoke", 96, 129, values="outliers", causal=True),
    _workload("narrow_values", "smoke", 96, 96, 64, head_dim_v=32),
    _workload("wide_values_causal", "smoke", 65, 97, 32, head_dim_v=64, causal=True),
    _workload("blocks", "smoke", 200, 260, block_mask=MaskForm(64, 64, heads=2)),
    _workload("blocks_causal_gqa", "smoke", 150, 260, heads=4, heads_kv=2, block_mask=MaskForm(heads=4, causal=True)),
    _workload("blocks_bits", "smoke", 260, 150, block_mask=MaskForm(64, 128, bits=True)),
    _workload("packed", "smoke", 190, 190, sequences=4),
    _workload("packed_causal_gqa", "smoke", 170, 170, heads=4, heads_kv=2, sequences=5, causal=True),
    _workload("packed_cross_window", "smoke", 150, 210, sequences=4, window=(30, 9)),
    _workload("packed_used", "smoke", 120, 200, sequences=3, used_k=True, causal=True),
    _workload("cache_causal_gqa", "smoke", 5, 190, batch=3, heads=4, heads_kv=2, used_k=True, causal=True),
    _workload("cache_window", "smoke", 130, 150, batch=2, used_k=True, window=(30, 9)),
    _workload("one_by_one", "hard", 1, 1),
    _workload("one_query", "hard", 1, 4097, heads=1),
    _workload("one_query_causal", "hard", 1, 4097, heads=1, causal=True),
    _workload("one_key", "hard", 130, 1, causal=True),
    _workload("ragged_203", "hard", 113, 203, causal=True),
    _workload("blind_rows", "hard", 203, 113, causal=True),
    _workload("mostly_blind", "hard", 200, 3, causal=True),
    _workload("block_minus_one", "hard", 127, 129, causal=True),
    _workload("no_queries", "hard", 0, 64),
    _workload("no_keys", "hard", 64, 0),
    _workload("no_keys_causal", "hard", 64, 0, causal=True),
    _workload("no_batch", "hard", 64, 64, batch=0),
    _workload("gqa3", "hard", 70, 140, heads=6, heads_kv=2, batch=2),
    _workload("gqa6_causal", "hard", 70, 140, 128, heads=12, heads_kv=2, causal=True),
    _workload("gqa7", "hard", 70, 140, heads=7, heads_kv=1),
    _workload("mqa_causal", "hard", 130, 130, heads=5, heads_kv=1, causal=True),
    *(
        _workload(f"head_dim_{d}", "hard", 65, 113, d, causal=d % 16 == 0)
        for d in (1, 8, 40, 59, 72, 96, 136, 192, 256)
    ),
    _workload("head_dim_192_128", "hard", 113, 203, 192, head_dim_v=128),
    _workload("head_dim_192_128_causal_gqa", "hard", 130, 130, 192, heads=4, heads_kv=2, head_dim_v=128, causal=True),
    _workload("head_dim_40_59_blind_rows", "hard", 113, 70, 40, head_dim_v=59, batch=2, causal=True),
    _workload("head_dim_8_1_window", "hard", 65, 113, 8, head_dim_v=1, window=(20, 10)),
    _workload("window_left_only", "hard", 150, 150, window=(0, None)),
    _workload("window_right_only", "hard", 90, 170, window=(None, 5)),
    _workload("window_itself", "hard", 129, 129, window=(0, 0)),
    _workload("window_unseen", "hard", 200, 60, window=(8, 8)),
    _workload("window_causal_gqa", "hard", 140, 200, heads=4, heads_kv=2, window=(33, 7), causal=True),
    _workload("scores_x30", "hard", 113, 203, values="x30"),
    _workload("scores_x30_causal", "hard", 129, 129, values="x30", causal=True),
    _workload("low_scores", "hard", 96, 192, values="low_scores"),
    _workload("large_scores_causal", "hard", 130, 130, values="large_scores", causal=True),
    _workload("ramp", "hard", 80, 300, values="ramp"),
    _workload("sink", "hard", 130, 300, values="sink"),
    _workload("fp8_paper", "hard", 512, 512, values="fp8_paper"),
    _workload("outliers_full", "hard", 128, 257, values="outliers"),
    _workload("blocks_window", "hard", 260, 203, batch=2, block_mask=MaskForm(128, 64, batch=2, window=(70, 20))),
    _workload(
        "blocks_bits_gqa",
        "hard",
        140,
        270,
        heads=6,
        heads_kv=2,
        batch=2,
        block_mask=MaskForm(batch=2, heads=6, bits=True),
    ),
    _workload("blocks_and_causal", "hard", 190, 260, causal=True, block_mask=MaskForm(64, 64)),
    _workload("blocks_bits_and_window", "hard", 190, 150, window=(100, 40), block_mask=MaskForm(64, 64, bits=True)),
    _workload("blocks_one_query", "hard", 1, 1025, heads=4, heads_kv=1, block_mask=MaskForm(128, 64, heads=4)),
    _workload("blocks_no_keys", "hard", 64, 0, block_mask=MaskForm()),
    _workload("blocks_scores_x30", "hard", 200, 200, values="x30", block_mask=MaskForm(64, 64, causal=True)),
    _workload("blocks_low_scores", "hard", 130, 200, values="low_scores", block_mask=MaskForm(64, 64)),
    *(
        _workload(f"blocks_head_dim_{d}", "hard", 130, 200, d, block_mask=MaskForm(64, 64, causal=True))
        for d in (8, 59, 128, 256)
    ),
    _workload("blocks_narrow_values", "hard", 130, 200, 64, head_dim_v=32, block_mask=MaskForm(64, 64)),
    *(
        _workload(f"blocks_of_128_head_dim_{d}", "hard", 260, 150, d, block_mask=MaskForm(causal=True))
        for d in (40, 64, 128, 192, 256)
    ),
    _workload(
        "blocks_of_128_bits_gqa",
        "hard",
        140,
        270,
        64,
        heads=4,
        batch=2,
        heads_kv=2,
        block_mask=MaskForm(batch=2, bits=True),
    ),
    _workload("blocks_of_128_bits_head_dim_128", "hard", 140, 270, 128, heads_kv=1, block_mask=MaskForm(bits=True)),
    _workload(
        "blocks_of_128_bits_head_dim_256", "hard", 140, 200, 256, heads_kv=1, block_mask=MaskForm(128, 64, bits=True)
    ),
    _workload("blocks_of_128_by_heads", "hard", 140, 270, 64, block_mask=MaskForm(heads=2, window=(100, 30))),
    _workload("blocks_of_128_scores_x30", "hard", 200, 200, values="x30", block_mask=MaskForm(causal=True)),
    _workload("blocks_of_128_low_scores", "hard", 200, 300, values="low_scores", block_mask=MaskForm(bits=True)),
    _workload(
        "blocks_of_128_wide_values", "hard", 130, 200, 64, head_dim_v=128, block_mask=MaskForm(window=(90, None))
    ),
    _workload("packed_alone_causal", "hard", 130, 203, sequences=1, causal=True),
    _workload("packed_many", "hard", 150, 150, sequences=90, causal=True),
    _workload("packed_none", "hard", 40, 40, sequences=0),
    _workload("packed_mqa_head_dim_128", "hard", 203, 203, 128, heads=3, heads_kv=1, sequences=3, causal=True),
    _workload("packed_head_dim_59", "hard", 140, 90, 59, sequences=6, window=(20, 0)),
    _workload("packed_narrow_values", "hard", 130, 130, 64, head_dim_v=32, sequences=3),
    _workload("packed_scores_x30", "hard", 192, 192, values="x30", sequences=2, causal=True),
    _workload("packed_low_scores", "hard", 130, 200, values="low_scores", sequences=3),
    _workload("cache_one_query", "hard", 1, 300, 128, batch=4, heads=8, heads_kv=1, used_k=True),
    _workload("cache_full", "hard", 70, 203, used_k=True, causal=True),
    _workload("cache_scores_x30", "hard", 64, 192, values="x30", batch=2, used_k=True, causal=True),
    _workload("pages", "smoke", 5, 192, batch=2, heads=4, heads_kv=2, used_k=True, page_size=16, causal=True),
    _workload("pages_all_used", "hard", 3, 200, 40, batch=2, page_size=100, window=(90, None)),
    _workload("pages_of_one_row", "hard", 70, 130, batch=2, used_k=True, page_size=1),
    _workload("cache_8192", "large", 16, 8192, 128, batch=4, heads=8, heads_kv=2, used_k=True, causal=True),
    _workload("packed_4096_causal", "large", 4096, 4096, 128, heads=8, heads_kv=2, sequences=9, causal=True),
    _workload("packed_1500_sequences", "large", 8191, 8191, 64, heads=4, sequences=1500, causal=True),
    _workload("packed_used_d256", "large", 2048, 3001, 256, heads=2, sequences=7, used_k=True, window=(200, 0)),
    _workload("blocks_4096", "large", 4096, 4096, 128, heads=8, batch=2, block_mask=MaskForm(heads=8)),
    _workload(
        "blocks_4096_causal", "large", 4096, 4096, 64, heads=8, heads_kv=2, block_mask=MaskForm(heads=8, causal=True)
    ),
    _workload(
        "blocks_of_128_long_odd_bits", "large", 3001, 4099, 96, heads=4, heads_kv=2, block_mask=MaskForm(bits=True)
    ),
    _workload("blocks_4096_d256", "large", 4096, 4096, 256, heads=4, block_mask=MaskForm(causal=True)),
    _workload("blocks_long_odd_bits", "large", 3001, 4099, 96, heads=4, block_mask=MaskForm(64, 128, bits=True)),
    _workload("long_odd", "large", 8191, 8193, 128, heads=2),
    _workload("long_odd_causal", "large", 8191, 8193, 64, heads=4, heads_kv=2, causal=True),
    _workload("square_4096", "large", 4096, 4096, 128, heads=8, batch=2),
    _workload("square_4096_causal", "large", 4096, 4096, 128, heads=8, batch=2, causal=True),
    _workload("square_4096_d256_causal", "large", 4096, 4096, 256, heads=4, causal=True),
    _workload("square_4096_d192_128_causal", "large", 4096, 4096, 192, heads=8, head_dim_v=128, causal=True),
    _workload("window_4096", "large", 4096, 4096, 64, heads=4, window=(512, 128)),
    _workload("more_queries_causal", "large", 2500, 1111, 96, heads=4, causal=True),
    _workload("decode", "large", 1, 65537, 128, heads=8, heads_kv=1, batch=4, causal=True),
    _workload("many_heads", "large", 16, 16, 16, heads=64, batch=1100),
    _workload("unrounded_causal_gqa", "smoke", 96, 130, heads=4, causal=True, out_dtype="fp32", heads_kv=2),
    *_paper(),
    _workload("sinks", "smoke", 113, 190, batch=2, sinks=True),
    _workload("sinks_causal_gqa", "smoke", 130, 150, heads=4, heads_kv=2, sinks=True, causal=True),
    _workload(
        "sinks_packed_window",
        "smoke",
        150,
        150,
        heads=4,
        heads_kv=2,
        sequences=4,
        sinks=True,
        causal=True,
        window=(40, None),
    ),
    _workload("sinks_blind_rows", "hard", 203, 113, sinks=True, causal=True),
    _workload("sinks_no_keys", "hard", 64, 0, sinks=True),
    _workload("sinks_window_mqa_head_dim_128", "hard", 140, 200, 128, heads=8, heads_kv=1, sinks=True, window=(33, 7)),
    _workload("sinks_scores_x30", "hard", 113, 203, values="x30", sinks=True),
    _workload("sinks_outliers", "hard", 96, 192, values="outliers", sinks=True),
    _workload("sinks_cache", "hard", 3, 190, batch=3, heads=4, heads_kv=2, used_k=True, sinks=True, causal=True),
    _workload("sinks_pages", "hard", 5, 192, batch=2, used_k=True, page_size=16, sinks=True),
    _workload("sinks_packed_used", "hard", 120, 200, sequences=5, used_k=True, sinks=True),
    _workload("sinks_blocks", "hard", 200, 260, heads=4, heads_kv=2, sinks=True, block_mask=MaskForm(causal=True)),
    _workload(
        "sinks_4096_window", "large", 4096, 4096, 64, heads=16, heads_kv=2, sinks=True, causal=True, window=(127, None)
    ),
    _workload("sinks_packed_4096", "large", 4096, 4096, 128, heads=8, heads_kv=2, sequences=9, sinks=True, causal=True),
    _workload(
        "pages_2048_sinks",
        "large",
        3,
        2048,
        128,
        heads=16,
        heads_kv=2,
        batch=2,
        used_k=True,
        page_size=16,
        sinks=True,
        causal=True,
    ),
    _workload("cache_4096_window_d256", "large", 2, 4096, 256, heads=8, batch=3, used_k=True, window=(3000, 0)),
    _workload("score_mod", "smoke", 113, 190, score_mod=ScoreForm()),
    _workload(
        "score_alibi_causal_gqa",
        "smoke",
        130,
        150,
        heads=4,
        heads_kv=2,
        causal=True,
        score_mod=ScoreForm(SCORE_ALIBI, (("f32", (4,)),), (0,)),
    ),
    _workload(
        "score_bias_window",
        "smoke",
        96,
        130,
        batch=2,
        window=(40, 9),
        score_mod=ScoreForm(SCORE_BIAS, (("bf16", (2, 1, 96, 130)),), (0,)),
    ),
    _workload(
        "score_table_packed",
        "smoke",
        150,
        150,
        sequences=4,
        causal=True,
        score_mod=ScoreForm(SCORE_TABLE, (("i64", (9,)), ("f32", (2, 3))), (1,)),
    ),
    _workload("score_mod_cache_sinks", "hard", 3, 190, batch=3, used_k=True, sinks=True, score_mod=ScoreForm()),
    _workload("score_mod_no_keys", "hard", 64, 0, score_mod=ScoreForm(SCORE_ALIBI, (("f32", (2,)),), (0,))),
    _workload("score_mod_scores_x30", "hard", 113, 203, 128, values="x30", score_mod=ScoreForm(), causal=True),
    _workload(
        "score_table_4096",
        "large",
        4096,
        4096,
        128,
        heads=8,
        heads_kv=2,
        causal=True,
        score_mod=ScoreForm(SCORE_TABLE, (("i64", (9,)), ("f32", (8, 3))), (1,)),
    ),
    _workload(
        "score_table_blocks",
        "hard",
        120,
        200,
        block_mask=MaskForm(64, 64, heads=2, bits=True),
        score_mod=ScoreForm(SCORE_TABLE, (("i64", (9,)), ("f32", (2, 3))), (1,)),
    ),
)
_ALL += (
    _workload(
        *("fp8_cache_causal_gqa", "smoke", 5, 190),
        **{"batch": 3, "heads": 4, "heads_kv": 2, "used_k": True, "causal": True, "dtype_kv": "e4m3"},
    ),
    _workload("fp8_pages", "hard", 2, 192, 40, batch=2, used_k=True, page_size=16, sinks=True, dtype_kv="e4m3"),
    _workload("fp8_cache_scores_x30", "hard", 1, 300, 128, heads=8, heads_kv=1, values="x30", dtype_kv="e4m3"),
    _workload("dropout", "smoke", 65, 80, heads_kv=1, batch=2, causal=True, dropout_p=0.25),
    _workload(
        "dropout_packed_sinks", "smoke", 100, 100, heads=1, sequences=3, window=(40, 9), sinks=True, dropout_p=0.6
    ),
    _workload("dropout_score_mod_cache", "hard", 20, 100, batch=2, used_k=True, dropout_p=0.97, score_mod=ScoreForm()),
    _workload("dropout_scores_x30", "large", 1130, 2030, values="x30", causal=True, dropout_p=0.1),
    _workload("dropout_4096", "large", 4096, 4096, 128, heads=8, heads_kv=2, causal=True, dropout_p=0.1),
    # what is read has no gradient in these
    _workload(
        "score_bias_causal_1026",
        "large",
        777,
        1026,
        128,
        heads=4,
        heads_kv=2,
        batch=2,
        causal=True,
        score_mod=ScoreForm(SCORE_BIAS, (("bf16", (2, 1, 777, 1026)),)),
    ),
    _workload(
        "score_bias_window_odd",
        "large",
        777,
        1025,
        batch=2,
        window=(300, 20),
        score_mod=ScoreForm(SCORE_BIAS, (("bf16", (2, 1, 777, 1025)),)),
    ),
    _workload(
        "score_alibi_sinks_d256",
        "large",
        700,
        900,
        256,
        heads=4,
        heads_kv=1,
        causal=True,
        sinks=True,
        score_mod=ScoreForm(SCORE_ALIBI, (("f32", (4,)),)),
    ),
    _workload(
        "score_table_packed_used",
        "large",
        900,
        1100,
        80,
        heads=8,
        heads_kv=2,
        sequences=7,
        used_k=True,
        causal=True,
        score_mod=ScoreForm(SCORE_TABLE, (("i64", (9,)), ("f32", (8, 3)))),
    ),
    _workload("score_mod_packed_d256", "large", 700, 700, 256, sequences=5, window=(90, 0), score_mod=ScoreForm()),
)
# the suite asks for that of each
_MET = frozenset({"deterministic"}).union(*(workload.problem.features for workload in _ALL))
_ALL += tuple(
    _workload(option.field, "smoke", 96, 130, **{option.field: option.example})
    for option in OPTIONS.values()
    if option.example is not None and option.field not in _MET
)


def workloads(tag: str | None = None) -> list[Workload]:
    """Every workload, or those with the tag, in a fixed order. Raises ValueError for an unknown tag."""
    if tag is None:
        return list(_ALL)
    tags = sorted(frozenset().union(*(w.tags for w in _ALL)))
    if tag not in tags:
        raise ValueError(f"workloads: tag must be one of {', '.join(tags)}, got {tag!r}")
    return [w for w in _ALL if tag in w.tags]


def workload(name: str) -> Workload:
    """The workload of this name. Raises ValueError for an unknown name."""
    for candidate in _ALL:
        if candidate.name == name:
            return candidate
    raise ValueError(f"workload: name must be one of {', '.join(w.name for w in _ALL)}, got {name!r}")


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
        q `(batch, seqlen_q, heads, head_dim)`, k `(batch, seqlen_k, heads_kv, head_dim)`, and v and dout (out's shape
        and dtype) with head_dim_v in place of head_dim; none requires grad.

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
    of_keys = (problem.batch, problem.seqlen_k, problem.heads_kv)
    d, dv = problem.head_dim, problem.head_dim_v
    shapes = ((*of_queries, d), (*of_keys, d), (*of_keys, dv), (*of_queries, dv))
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    VALUES[values](q, k, v, 1 / math.sqrt(d), generator)
    of_kv = problem.dtype_kv or problem.dtype
    q, k, v, dout = (
        LAYOUTS[layout](_cast(x, TORCH_DTYPES[name]))
        for x, name in zip((q, k, v, dout), (problem.dtype, of_kv, of_kv, problem.out_dtype), strict=True)
    )
    return q, k, v, dout


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
        return vars(ranges(problem, seed, device))
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
    order = torch.randperm(problem.batch * pages + 3, generator=torch.Generator().manual_seed(seed)).to(k.device)
    table = order[: problem.batch * pages].view(problem.batch, pages)
    found = []
    for x in (k, v):
        # NaN in every dtype
        pool = x.new_empty((len(order), size, *x.shape[2:])).view(torch.uint8).fill_(0xFF).view(x.dtype)
        pool[table.flatten()] = x.reshape(-1, size, *x.shape[2:])
        found.append(pool)
    return *found, table.int()  # pyright: ignore[reportReturnType] - two of them


def ranges(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Ranges:
    """Those of packed sequences."""
    assert problem.sequences is not None
    random, sequences = Random(seed), problem.sequences

    def drawn(total: int, empty: int) -> Tensor:
        cuts = [0, *sorted(random.randint(0, total) for _ in range(sequences - 1)), total - total // 9][: sequences + 1]
        if sequences > 3:
            cuts[empty + 1] = cuts[empty]
        return torch.tensor(sorted(cuts), dtype=torch.int32, device=device)

    q = drawn(problem.seqlen_q, 1)
    k = q if problem.seqlen_q == problem.seqlen_k else drawn(problem.seqlen_k, 2)
    used = None
    if problem.used_k:
        lengths = (k[1:] - k[:-1]).tolist()
        used = torch.tensor([random.randint(0, length) for length in lengths], dtype=torch.int32, device=device)
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


def visible_pairs(problem: Problem) -> int:
    """How many (query, key) pairs of one head are visible by causal and window, in closed form;
    all where lengths on the device say it."""
    if problem.by_lengths:
        return problem.seqlen_q * problem.seqlen_k
    left, right = problem.span
    upto_right = problem.seqlen_q * problem.seqlen_k if right is None else _pairs_below(problem, problem.offset + right)
    return upto_right - (0 if left is None else _pairs_below(problem, problem.offset - left - 1))


def _pairs_below(problem: Problem, diagonal: int) -> int:
    """Pairs with `key - query <= diagonal`: the sum over queries i of `clamp(i + diagonal + 1, 0, seqlen_k)`."""

    def ramp(last: int) -> int:  # sum of min(t, seqlen_k) for t in 1..last
        rising = max(0, min(last, problem.seqlen_k))
        return rising * (rising + 1) // 2 + max(0, last - problem.seqlen_k) * problem.seqlen_k

    return ramp(diagonal + problem.seqlen_q) - ramp(diagonal)


def flops(problem: Problem, pass_: str = "fwd", shown: float = 1.0) -> float:
    """Floating-point operations of the products, over the visible pairs: `2 * batch * heads * pairs` times the widths.

    Forward, S is as wide as head_dim and O as head_dim_v. Backward, S, dQ and dK are as wide as head_dim, dP and dV as
    head_dim_v: 2.5 times the forward pass where the two are equal.

    Args:
        pass_: "fwd" or "bwd" (the backward pass alone).
        shown: the share of the pairs, of those that causal and window leave, that a block mask shows.
    """
    widths = {"fwd": problem.head_dim + problem.head_dim_v, "bwd": 3 * problem.head_dim + 2 * problem.head_dim_v}
    if pass_ not in widths:
        raise ValueError(f"flops: pass_ must be 'fwd' or 'bwd', got {pass_!r}")
    return float(2 * problem.batch * problem.heads * visible_pairs(problem) * shown * widths[pass_])


def hbm_bytes(problem: Problem, version_name: str, sram_bytes: int) -> float | None:
    """Bytes that a forward pass moves to and from memory by its paper's own account, caches left out.

    - standard: reads Q, K and V, writes O, and writes and reads S and P: Theta(N d + N^2).
    - v1: K and V once; Q, O, l and m once for each block of `B_c = ceil(M / 4d)` keys: Theta(N^2 d^2 / M).
    - v2: Q, O and lse once; K and V once for each block of `min(B_c, 128)` queries.

    Blocks that nothing sees are skipped in proportion to the visible pairs. Where v's head_dim differs, V and O are as
    wide as it, and 4d, the width of a row of each of Q, K, V and O, becomes 2 (d + d_v).

    Args:
        version_name: as registered.
        sram_bytes: on-chip memory of one multiprocessor.

    Returns:
        Bytes, or None for a version whose paper gives no formula, and where lengths on the device say what is seen.
    """
    if problem.by_lengths:
        return None
    size, size_o, rows = BYTES[problem.dtype], BYTES[problem.out_dtype], problem.batch * problem.heads
    size_kv = BYTES[problem.dtype_kv or problem.dtype]
    d, dv = problem.head_dim, problem.head_dim_v
    pairs = problem.seqlen_q * problem.seqlen_k
    share = visible_pairs(problem) / pairs if pairs else 0.0
    block = math.ceil(sram_bytes / size / (2 * (d + dv)))
    q_once, o_once = (rows * problem.seqlen_q * width for width in (d * size, dv * size_o))
    kv_once = problem.batch * problem.heads_kv * problem.seqlen_k * (d + dv) * size_kv
    if version_name == "standard":
        return float(q_once + o_once + kv_once + 4 * rows * pairs * size)
    if version_name == "v1":
        sweep = q_once + 2 * o_once + 4 * rows * problem.seqlen_q * LOG_SUM_BYTES
        return kv_once + sweep * math.ceil(problem.seqlen_k / block) * share
    if version_name == "v2":
        kv_for_every_head = rows * problem.seqlen_k * (d + dv) * size
        sweeps = math.ceil(problem.seqlen_q / min(block, 128))
        return q_once + o_once + rows * problem.seqlen_q * LOG_SUM_BYTES + kv_for_every_head * sweeps * share
    return None
