"""flashzoo: the generations of FlashAttention side by side, behind one call.

out = flashzoo.attention(q, k, v, causal=True)                  # the best version for this GPU, dtype and head dim
out = flashzoo.attention(q, k, v, causal=True, version="v1")    # exactly FA-1, or an error that says why not
print(flashzoo.explain(q, k, v, causal=True))                   # who was chosen, and every reason against the others
print(flashzoo.compare(q, k, v, causal=True))                   # error, ms, TFLOP/s and memory of every version
"""

from __future__ import annotations

from importlib import import_module
from time import time_ns
from typing import TYPE_CHECKING, Any

__imported__ = time_ns()  # before anything that kernels are made of; `_cute.cache` asks what has changed since

from flashzoo import baselines, blocksparse, decode, score_mods, v1, v2, v3
from flashzoo.append import append
from flashzoo.call.api import attention, explain, quantize, sdpa
from flashzoo.call.backward import attention_backward
from flashzoo.call.problem import Problem
from flashzoo.call.validate import validate
from flashzoo.compare import compare
from flashzoo.masks.block_mask import BlockMask
from flashzoo.merge import merge
from flashzoo.registry import UnsupportedError, register, unregister, use, versions
from flashzoo.replace import Replacement, SdpaCall, install, last_calls, replace_sdpa, uninstall
from flashzoo.scores.mod import ScoreMod
from flashzoo.spec import Spec

if TYPE_CHECKING:
    from flashzoo import flash_attn, integrations, nn, parallel

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Problem",
    "Replacement",
    "ScoreMod",
    "SdpaCall",
    "Spec",
    "UnsupportedError",
    "append",
    "attention",
    "attention_backward",
    "compare",
    "explain",
    "flash_attn",
    "install",
    "integrations",
    "last_calls",
    "merge",
    "nn",
    "parallel",
    "quantize",
    "register",
    "replace_sdpa",
    "score_mods",
    "sdpa",
    "uninstall",
    "unregister",
    "use",
    "validate",
    "versions",
]

# The order of `auto`, newest first, behind `decode`, which says itself what it leaves to others. `blocksparse` is the
# first that takes a block mask; without one it takes nothing that v2 does not. `sdpa` takes what no kernel of ours
# does; `standard` what even sdpa can't (lse).
register(decode.SPEC)
register(v3.SPEC)
register(v3.FP8_SPEC)
register(v2.SPEC)
register(v1.SPEC)
register(blocksparse.SPEC)
register(baselines.SDPA)
register(baselines.STANDARD)

_LAZY = ("flash_attn", "integrations", "nn", "parallel")
"""Doors for other people's models, and what torch.distributed comes with, imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"flashzoo.{name}")
    raise AttributeError(f"module 'flashzoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
