"""Named problems: what the suite, `compare` and the benchmark ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import OPTIONS, Problem

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
return x4 fits t0"""
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
    _workload(
        "head_dim_192_128_577_keys_causal_gqa", "hard", 130, 577, 192, heads=4, heads_kv=2, head_dim_v=128, causal=True
    ),
    _workload("head_dim_184_321_keys_window", "hard", 203, 321, 184, heads=1, window=(200, 20)),
    _workload("head_dim_256_577_keys_causal_gqa", "hard", 130, 577, 256, heads=4, heads_kv=2, causal=True),
    _workload("head_dim_256_700_keys_window", "hard", 203, 700, 256, heads=1, window=(500, 20)),
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
    _workload("long_odd_d32", "large", 3001, 4099, 32, heads=4),
    _workload("long_odd_d40_causal_gqa", "large", 4099, 3001, 40, heads=8, heads_kv=2, causal=True),
    _workload("square_4096_d72", "large", 4096, 4096, 72, heads=4),
    _workload("square_4096_d160_causal_gqa", "large", 4096, 4096, 160, heads=8, heads_kv=2, causal=True),
    _workload("long_odd_d136", "large", 3001, 4099, 136, heads=8, batch=2),
    _workload("packed_4096_d160_causal_gqa", "large", 4096, 4096, 160, heads=8, heads_kv=2, sequences=9, causal=True),
    _workload("packed_4096_d192_128", "large", 4096, 4096, 192, heads=8, head_dim_v=128, sequences=5),
    _workload("blocks_of_128_long_odd_d160_bits", "large", 3001, 4099, 160, heads=4, block_mask=MaskForm(bits=True)),
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
    _workload("dropout", "smoke", 65, 80, 32, heads_kv=1, causal=True, dropout_p=0.25),
    _workload(
        "dropout_packed_sinks", "smoke", 100, 100, heads=1, sequences=3, window=(40, 9), sinks=True, dropout_p=0.6
    ),
    _workload("dropout_score_mod_cache", "hard", 20, 100, batch=2, used_k=True, dropout_p=0.97, score_mod=ScoreForm()),
    _workload("dropout_scores_x30", "large", 1130, 2030, values="x30", causal=True, dropout_p=0.1),
    _workload("dropout_4096", "large", 4096, 4096, 128, heads_kv=1, causal=True, dropout_p=0.1),
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
    _workload(
        *("packed_q_causal_gqa", "smoke", 136, 190),
        **{"heads": 4, "heads_kv": 2, "sequences": 5, "packed_q": True, "used_k": True, "causal": True},
    ),
    _workload(
        *("packed_q_pages_sinks", "hard", 100, 192, 40),
        **{"heads": 3, "heads_kv": 1, "sequences": 3, "packed_q": True, "used_k": True, "page_size": 16},
        window=(60, 9),
        sinks=True,
    ),
    _workload("packed_q_fp8", "hard", 9, 130, sequences=2, packed_q=True, causal=True, dtype_kv="e4m3"),
    _workload(
        *("packed_q_2048_pages", "large", 2048, 1024, 128),  # `standard` has a mask of all queries and all keys
        **{"heads": 8, "heads_kv": 1, "sequences": 12, "packed_q": True, "used_k": True, "page_size": 16},
        causal=True,
    ),
)
_FAST_ACCUM = {"dtype": "e4m3", "fast_accum": True}
_ALL += (
    _workload("fast_accum_causal_gqa", "smoke", 100, 260, heads=4, heads_kv=2, causal=True, **_FAST_ACCUM),
    _workload("fast_accum_window_sinks", "smoke", 130, 200, 32, window=(90, 9), sinks=True, **_FAST_ACCUM),
    _workload("fast_accum_one_query", "hard", 1, 4097, 128, heads=1, **_FAST_ACCUM),
    _workload("fast_accum_blind_rows_d256", "hard", 203, 113, 256, heads=1, causal=True, **_FAST_ACCUM),
    # v3_fp8 sums so where keys are seen by many queries, and in what precision="fp8" quantises
    _workload("fast_accum_few_keys_d256", "hard", 4200, 113, 256, heads=1, sinks=True, **_FAST_ACCUM),
    *(
        _workload(f"fast_accum_d{d}_{n}", "large", queries, n, d, heads=2, heads_kv=1, **_FAST_ACCUM)
        for d, queries, n in ((64, 2100, 16384), (128, 4200, 9000), (256, 4200, 16384))
    ),
    _workload("fast_accum_causal_d64", "large", 4097, 4097, 64, causal=True, **_FAST_ACCUM),
    _workload("fast_accum_causal_d256", "large", 8200, 8200, 240, heads=1, causal=True, **_FAST_ACCUM),
    _workload("fast_accum_window_d64", "large", 5000, 5100, 64, window=(2900, 100), **_FAST_ACCUM),
    *(
        _workload(f"fast_accum_packed_d{d}", "large", 2000, 2300, d, sequences=7, causal=True, **more, **_FAST_ACCUM)
        for d, more in ((64, {"heads": 4, "heads_kv": 1}), (256, {"used_k": True, "sinks": True}))
    ),
)
_LATENT = {"head_dim": 576, "head_dim_v": 512, "latent": True, "heads_kv": 1, "used_k": True}
_ALL += (
    _workload("mla_causal", "smoke", 3, 190, heads=16, batch=3, causal=True, **_LATENT),
    _workload("mla_narrow", "smoke", 65, 113, head_dim_v=32, latent=True),
    _workload("mla_pages_sinks", "hard", 1, 192, heads=40, batch=2, page_size=16, sinks=True, **_LATENT),
    _workload("mla_window_pages_of_12", "hard", 5, 180, heads=3, page_size=12, window=(100, 2), **_LATENT),
    _workload("mla_ramp", "hard", 1, 300, heads=16, batch=2, values="ramp", **_LATENT),
    _workload(
        *("mla_packed_q_pages", "hard", 20, 160),
        **{**_LATENT, "heads": 4, "sequences": 3, "packed_q": True, "page_size": 16, "causal": True},
    ),
    # torch's math copies keys and values for every head, in float32
    _workload("mla_1100_of_128_heads", "large", 2, 1100, heads=128, batch=2, causal=True, **_LATENT),
    _workload("mla_8192_pages", "large", 1, 8192, heads=16, batch=3, page_size=64, **_LATENT),
    _workload("mla_300_queries", "large", 300, 1000, heads=16, causal=True, **_LATENT),
)
_ALL += (
    # what may be wrong alone: from the fourth of a batch on, beyond 512 queries, at head dims of no family
    _workload("batch_5_gqa3_causal", "hard", 70, 90, 45, heads=6, heads_kv=2, batch=5, causal=True),
    _workload("queries_701", "hard", 701, 90, 29, heads=1),
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
