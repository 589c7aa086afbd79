"""Other libraries' attention with something on its scores (`bench.scores`), each as its own users write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from torch import tanh
from torch.nn.attention import SDPBackend

from bench.peers import Attention, flex, library, sdpa
from bench.scores import ALIBI, BIAS, BIASES, CAP, SINKS, SOFTCAP, Scores
from flashzoo.call.problem import Problem

MOST_NUMBERED = 1 << 31
"""Numbers of a bias that 32 bits don't count: from there on FlexAttention's kernels read where nothing is, which loses
a process its GPU."""
Scored = Callable[[Problem, Scores], Attention]


def peer(name: str, problem: Problem, scores: Scores) -> Attention:
    """The peer of that name, as `bench.peers.peer`.

    Args:
        name: a key of `PEERS`.
        problem: with nothing on its scores.
        scores: what is on them.

    Raises:
        ImportError: the library behind it is not installed, or too old to hold the function.
        NotImplementedError: the peer does not take it.
    """
    made = SCORE_PEERS.get(name, {}).get(scores.name)
    if made is None:
        taking = [other for other, of in SCORE_PEERS.items() if scores.name in of]
        raise NotImplementedError(f"{scores.name} is taken by {' and '.join(taking) or 'no peer'}, got {name}")
    if problem.dtype == "e4m3":
        raise NotImplementedError("takes 16 or 32 bits, got e4m3")
    return made(problem, scores)


def _flex_softcap(problem: Problem, _: Scores) -> Attention:
    return flex(problem, lambda s, b, h, i, j: CAP * tanh(s / CAP))


def _flex_alibi(problem: Problem, scores: Scores) -> Attention:
    slopes = scores.slopes
    return flex(problem, lambda s, b, h, i, j: s + slopes[h] * (j - i))


def _flex_bias(problem: Problem, scores: Scores) -> Attention:
    numbers = problem.heads * problem.seqlen_q * problem.seqlen_k
    if numbers >= MOST_NUMBERED:
        raise NotImplementedError(f"counts a bias's numbers in 32 bits: expected fewer than 2^31, got {numbers}")
    bias = scores.bias
    return flex(problem, lambda s, b, h, i, j: s + bias[0, h, i, j])


def _fa4_mod(problem: Problem, scores: Scores) -> Attention:
    bias = scores.name == BIAS
    on_scores, tensors = (_fa4_bias(), [scores.bias]) if bias else (_fa4_alibi(problem.heads), None)
    return library("fa4", problem, score_mod=on_scores, score_mod_bwd=_fa4_gradient(), aux_tensors=tensors)


# fa4's language: numbers come as vectors, of 1 where tensors are read, and the last four arguments by their names.


@lru_cache
def _fa4_alibi(heads: int) -> Callable[..., Any]:
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    each = -8 / heads

    @cute.jit
    def alibi(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        slope = cute.math.exp2((head + 1).to(cutlass.Float32) * each)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    return alibi


@lru_cache
def _fa4_bias() -> Callable[..., Any]:
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")

    @cute.jit
    def bias(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        numbers = aux_tensors[0]
        read = cute.make_rmem_tensor(1, numbers.element_type)
        read[0] = numbers[0, head[0], q_idx[0], kv_idx[0]]
        return score + read.load().to(cutlass.Float32)

    return bias


@lru_cache
def _fa4_gradient() -> Callable[..., Any]:
    cute = import_module("cutlass.cute")

    @cute.jit
    def same(
        grad: Any, score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        return grad

    return same


def _sdpa_bias(backend: SDPBackend, problem: Problem, scores: Scores) -> Attention:
    return sdpa(backend, problem, scores.bias)


SCORE_PEERS: dict[str, Mapping[str, Scored]] = {
    "flex": {
        SOFTCAP: _flex_softcap,
        ALIBI: _flex_alibi,
        **dict.fromkeys(BIASES, _flex_bias),
        SINKS: lambda problem, scores: flex(problem, None, scores.sinks),
    },
    "fa4": {
        SOFTCAP: lambda problem, _: library("fa4", problem, softcap=CAP),
        **dict.fromkeys((ALIBI, BIAS), _fa4_mod),
        SINKS: lambda problem, scores: library("fa4", problem, learnable_sink=scores.sinks),
    },
    "fa3": {SOFTCAP: lambda problem, _: library("fa3", problem, softcap=CAP)},
    "sdpa_efficient": dict.fromkeys(BIASES, partial(_sdpa_bias, SDPBackend.EFFICIENT_ATTENTION)),
    "sdpa_math": dict.fromkeys(BIASES, partial(_sdpa_bias, SDPBackend.MATH)),
}
"""What peers take, by name; dropout of theirs drops others, which no oracle knows. flash-attn-4 has no gradient of what
it reads."""
