"""Every version says of every problem whether it takes it, and of what it takes how, in words, whatever was asked."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import flashzoo
from flashzoo import Problem
from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import DTYPES
from flashzoo.workloads import SCORE_ALIBI, SCORE_BIAS

SIZES = {
    "batch": (0, 1, 1, 2, 64),
    "seqlen_q": (0, 1, 2, 16, 63, 64, 129, 4096, 70000),
    "seqlen_k": (0, 1, 5, 77, 128, 129, 4096, 131072),
    "heads_kv": (1, 1, 2, 3, 8, 71),
    "group": (1, 1, 2, 5, 7, 8, 16, 71),
    "head_dim": (1, 3, 8, 20, 40, 64, 72, 80, 96, 112, 128, 136, 192, 200, 256, 264, 320, 512, 576, 640),
}
"""Some that tables have and some that none has."""


def drawn(random: Random) -> Problem | None:
    """A problem, or None where what was drawn is none."""
    size = {name: random.choice(values) for name, values in SIZES.items()}
    heads, queries, keys = size["heads_kv"] * size.pop("group"), max(1, size["seqlen_q"]), max(1, size["seqlen_k"])
    scores = (
        ScoreForm(),
        ScoreForm(SCORE_ALIBI, (("f32", (heads,)),), random.choice(((), (0,)))),
        ScoreForm(SCORE_BIAS, (("bf16", (1, heads, queries, keys)),), random.choice(((), (0,)))),
    )
    mask = MaskForm(*random.choices((64, 128), k=2), heads=random.choice((1, heads)), bits=random.random() < 0.5)
    seldom: dict[str, Any] = {
        "window": random.choice(((0, 0), (5, None), (None, 7), (4095, 0))),
        "head_dim_v": random.choice((1, 8, 64, 128, 192, 256, 264, 512)),
        "block_mask": mask,
        "score_mod": random.choice(scores),
        "sequences": random.choice((0, 1, 9, 1000)),
        "page_size": random.choice((1, 16, 256)),
        "precision": "fp8",
        "dtype_kv": "e4m3",
        "out_dtype": random.choice(("fp32", "bf16", "fp16")),
        "softmax_scale": random.choice((0.0, -1.0)),
        "dropout_p": 0.1,
        **dict.fromkeys(("used_k", "packed_q", "sinks", "fast_accum", "latent"), True),
    }
    often = {name: random.random() < 0.5 for name in ("causal", "lse", "grad", "deterministic")}
    where = random.choice([{"device": "cpu"}, *({"arch": arch} for arch in (75, 80, 89, 90, 90, 90, 100, 120))])
    asked = {name: value for name, value in seldom.items() if random.random() < 0.2}
    try:
        return Problem(**size, heads=heads, dtype=random.choice(DTYPES), **often, **where, **asked)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_in_words(seed):
    random = Random(seed)
    problems = [problem for problem in (drawn(random) for _ in range(2000)) if problem is not None]
    assert len(problems) > 200
    taken = 0
    for spec in flashzoo.versions().values():
        for problem in problems:
            if spec.unsupported(problem):
                continue
            taken += 1
            for told in (spec.leaves, spec.notes):
                assert told is None or all(isinstance(sentence, str) for sentence in told(problem)), problem
    assert taken > 200
