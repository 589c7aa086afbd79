"""What a problem counts: visible pairs, FLOPs, bytes."""

from __future__ import annotations

import math

from flashzoo.call.problem import Problem
from flashzoo.dtypes import BYTES

LOG_SUM_BYTES = 4  # lse, and FA-1's l and m, are float32 in every version


def visible_pairs(problem: Problem) -> int:
    """How many (query, key) pairs of one head are visible by causal and window, in closed form;
    all where lengths on the device say it."""
    if problem.by_lengths:
        return problem.seqlen_q * problem.total_k
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
