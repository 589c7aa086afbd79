"""Shapes of real models' attention, by the models' names: a set of cells for `flashzoo bench --models`.

Heads, head dims and windows are from the models' published configurations; batches and lengths are those that they are
trained or served at, whole or as one of several GPUs has them (heads shared out by tensor parallelism). A cell is a
sample of its family: kernels are tuned for families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashzoo.call.problem import Problem


@dataclass(frozen=True)
class Model:
    """One attention layer of a model.

    Attributes:
        problem: on no device yet.
        passes: in which of "fwd" and "bwd" it is met.
    """

    problem: Problem
    passes: tuple[str, ...] = ("fwd", "bwd")


def _layer(
    batch: int,
    seqlen: int | tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    passes: tuple[str, ...] = ("fwd", "bwd"),
    **how: Any,
) -> Model:
    seqlen_q, seqlen_k = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    return Model(Problem(batch, seqlen_q, seqlen_k, *heads, head_dim, **how), passes)


def _language(batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, left: int | None = None, **how: Any):
    return _layer(batch, seqlen, heads, head_dim, window=(left, None), causal=True, **how)


SERVED = ("fwd",)
MODELS: dict[str, Model] = {
    "llama3-8b": _language(2, 8192, (32, 8), 128),
    "llama3-8b-of-4": _language(4, 8192, (8, 2), 128),
    "llama3-8b-prefill-2k": _language(4, 2048, (32, 8), 128, passes=SERVED),
    "llama3-70b": _language(1, 8192, (64, 8), 128),
    "llama3-70b-of-8": _language(2, 8192, (8, 1), 128),
    "llama3-405b-of-8": _language(1, 8192, (16, 1), 128),
    "qwen2.5-0.5b": _language(8, 4096, (14, 2), 64),
    "qwen2.5-7b": _language(4, 4096, (28, 4), 128),
    "qwen3-30b-a3b": _language(2, 4096, (32, 4), 128),
    "gemma2-9b-global": _language(2, 8192, (16, 8), 256),
    "gemma3-12b-local": _language(2, 8192, (16, 8), 256, 1023),
    "gemma3-27b-local-of-4": _language(4, 8192, (8, 4), 128, 1023),
    "mistral-7b": _language(1, 16384, (32, 8), 128, 4095),
    "gpt-oss-20b-local": _language(2, 8192, (64, 8), 64, 127),
    "gpt-oss-20b-global": _language(2, 8192, (64, 8), 64),
    "deepseek-v3": _language(1, 4096, (128, 128), 192, head_dim_v=128),
    "deepseek-v3-of-8": _language(4, 4096, (16, 16), 192, head_dim_v=128),
    "phi-2": _language(4, 2048, (32, 32), 80),
    "phi-3-mini": _language(2, 4096, (32, 32), 96),
    "phi-4": _language(1, 16384, (40, 10), 128),
    "olmo2-7b": _language(4, 4096, (32, 32), 128),
    "gpt2": _language(16, 1024, (12, 12), 64),
    "smollm2-135m": _language(16, 2048, (9, 3), 64),
    "falcon-7b": _language(4, 2048, (71, 1), 64),
    "vit-base": _layer(128, 197, (12, 12), 64),
    "vit-large-384": _layer(32, 577, (16, 16), 64),
    "dinov2-giant": _layer(16, 1370, (24, 24), 64),
    "siglip-so400m": _layer(32, 729, (16, 16), 72),
    "sam-huge-global": _layer(2, 4096, (16, 16), 80),
    "sam-huge-local": _layer(100, 196, (16, 16), 80),
    "sd15-top": _layer(8, 4096, (8, 8), 40),
    "sd15-bottom": _layer(16, 256, (8, 8), 160),
    "sdxl-self": _layer(8, 4096, (10, 10), 64),
    "sdxl-text": _layer(8, (4096, 77), (10, 10), 64),
    "flux": _layer(2, 4608, (24, 24), 128),
    "wan2.1-14b-of-8": _layer(1, 32760, (5, 5), 128),
    "wan2.1-14b-text": _layer(1, (32760, 512), (40, 40), 128),
    "whisper-large": _layer(16, 1500, (20, 20), 64),
    "whisper-large-cross": _layer(16, (448, 1500), (20, 20), 64),
    "bert-base": _layer(64, 512, (12, 12), 64),
    "bert-large": _layer(32, 512, (16, 16), 64),
    "modernbert-large-global": _layer(4, 8192, (16, 16), 64),
    "modernbert-large-local": _layer(4, 8192, (16, 16), 64, window=(64, 64)),
}
"""By name. `-of-n` is what one of n GPUs has; `local` layers have the model's window."""
