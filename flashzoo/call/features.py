"""What a call can ask for beyond plain attention, where no option alone says it:
by its shapes, its operands, or what it wants back.

With the options that are features, which `problem.FEATURES` puts before these, it is the table that errors, refusals,
`explain`, `flashzoo list` and the suite are made from. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashzoo.call.forms import MaskForm, ScoreForm


@dataclass(frozen=True)
class Feature:
    """One thing that a version takes or refuses.

    Attributes:
        asked: how a caller asks for it, in words.
        needed: whether a `Problem` needs it.
        example: the fields by which a plain problem, one length and one number of heads for q and k, comes to need it
            and nothing else.
    """

    asked: str
    needed: Callable[[Any], bool]
    example: Mapping[str, Any]


BESIDE_OPTIONS = {
    "gqa": Feature("fewer key/value heads than query heads", lambda p: p.heads != p.heads_kv, {"heads_kv": 1}),
    "cross": Feature("seqlen_q != seqlen_k", lambda p: p.seqlen_q != p.seqlen_k, {"seqlen_k": 24}),
    "head_dim_v": Feature(
        "v's head_dim different from q's", lambda p: p.head_dim != p.head_dim_v and not p.latent, {"head_dim_v": 8}
    ),
    "mla": Feature("v that is k's first columns", lambda p: p.latent, {"head_dim_v": 8, "latent": True}),
    "lse": Feature("return_lse=True", lambda p: p.lse, {"lse": True}),
    "out_dtype": Feature(
        "out_dtype=torch.float32 with 16-bit inputs",
        lambda p: p.out_dtype == "fp32" and p.dtype != "fp32",
        {"dtype": "fp16", "out_dtype": "fp32"},
    ),
    "fast_accum": Feature(
        "fast_accum=True", lambda p: p.fast_accum, {"dtype": "fp16", "precision": "fp8", "fast_accum": True}
    ),
    "fp8_kv": Feature(
        "e4m3 k and v with 16-bit q", lambda p: p.dtype_kv is not None, {"dtype": "fp16", "dtype_kv": "e4m3"}
    ),
    "packed": Feature("cu_seqlens_q", lambda p: p.sequences is not None and not p.packed_q, {"sequences": 3}),
    "packed_q": Feature("cu_seqlens_q with caches", lambda p: p.packed_q, {"sequences": 3, "packed_q": True}),
    "used_k": Feature(
        "seqused_k with cu_seqlens_q and packed keys",
        lambda p: p.used_k and p.sequences is not None and not p.packed_q,
        {"sequences": 3, "used_k": True},
    ),
    "cache": Feature("seqused_k", lambda p: p.used_k and (p.sequences is None or p.packed_q), {"used_k": True}),
    "paged": Feature("page_table", lambda p: p.page_size is not None, {"page_size": 1}),
    "sinks": Feature("sinks", lambda p: p.sinks, {"sinks": True}),
    "score_mod": Feature("score_mod", lambda p: p.score_mod is not None, {"score_mod": ScoreForm()}),
    "block_mask": Feature("block_mask", lambda p: p.block_mask is not None, {"block_mask": MaskForm()}),
}
"""By the name that a `Spec` declares it under."""
