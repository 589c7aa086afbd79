"""What v3 says of a problem: why it refuses it, which tiles it gets and why, what happens silently."""

from __future__ import annotations

from flashzoo.call.problem import Problem
from flashzoo.gpu import MULTIPROCESSORS, RAGGED_ROWS
from flashzoo.integers import cdiv
from flashzoo.scores.walk import MOST_ROWS
from flashzoo.spec import missing
from flashzoo.v3.config import (
    BACKWARD,
    HOPPER,
    by_head,
    kernel_backward_for,
    kernel_for,
    kernel_fp8_for,
    pack_gqa_for,
    padded,
    prepares,
    speeds_of,
    splits_for,
    widths_backward,
)
from flashzoo.v3.traits import MASK_Q, Tiles


def refusals(problem: Problem) -> list[str]:
    """Sentences on what v3 refuses and the fields of its `Spec` can't say."""
    mask, found = problem.block_mask, []
    if problem.sequences is not None:
        found += [f"packed sequences need the package {package}" for package in missing(("triton",))] + too_many_rows(
            problem
        )
    found += on_scores(problem)
    if mask is None:
        return found
    if mask.block_q != MASK_Q:
        found.append(f"takes block masks with block_q {MASK_Q}, got {mask.block_q}")
    widest = max(BACKWARD)
    if problem.grad and problem.head_dim <= widest[0] and problem.head_dim_v <= widest[1]:  # others its Spec refuses
        tile = BACKWARD[widths_backward(problem)].block_kv
        if mask.block_kv % tile:
            found.append(
                f"its backward pass takes block masks with block_kv in multiples of {tile} at these head dims, "
                f"got {mask.block_kv}"
            )
        if mask.heads > 1 and problem.heads != problem.heads_kv:
            shared = f"{problem.heads} query heads on {problem.heads_kv} key/value heads"
            found.append(f"its backward pass takes block masks with heads 1 for {shared}, got {mask.heads}")
        if problem.deterministic:
            found.append("its backward pass takes block masks with deterministic=False, got True")
    return found


def on_scores(problem: Problem) -> list[str]:
    """Of a function on scores: what its kernels can't do."""
    form, found = problem.score_mod, []
    if form is None:
        return found
    if problem.block_mask is not None:
        found.append("takes score_mod without a block_mask, got both")
    if max(problem.seqlen_q, problem.seqlen_k) > MOST_ROWS:
        got = f"{problem.seqlen_q} and {problem.seqlen_k}"
        found.append(f"takes score_mod with up to {MOST_ROWS} queries and keys, got {got}")
    if ": f64 = " in form.text:
        found.append("computes score_mod in float32, got one that computes in float64")
    if problem.grad and form.grads:
        which = ", ".join(map(str, form.grads))
        found.append(f"has no gradients of tensors that score_mod reads, which tensor {which} requires")
    return found


def too_many_rows(problem: Problem) -> list[str]:
    """Of packed sequences: those that TMA can't count."""
    totals = {"total_q": problem.seqlen_q, "total_k": problem.seqlen_k}
    return [
        f"takes packed sequences of {name} up to 2^30, got {total}"
        for name, total in totals.items()
        if total > RAGGED_ROWS
    ]


def refusals_fp8(problem: Problem) -> list[str]:
    """As `refusals`, for FP8."""
    if problem.sequences is None:
        return []
    if problem.precision is None:
        return too_many_rows(problem)
    return ["does not quantise packed sequences: they come as e4m3 tensors, with descales (sequences, heads_kv)"]


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: which tiles and why, and what happens silently."""
    kernel = kernel_for(problem)
    lines = [f"forward: {kernel.tiles}"]
    widths = kernel.width, kernel.width_v
    own = f"tiles: those of head_dim {max(widths)}, not measured for {problem.head_dim}/{problem.head_dim_v}"
    if problem.block_mask is not None:
        lines.append("a tile is a row of the block mask, whose list of blocks it walks, the longest rows first")
    else:
        lines.append(_why_tiles(problem, kernel.tiles) if widths in HOPPER else own)
    of_v = [("head_dim_v", problem.head_dim_v, kernel.width_v)] if problem.head_dim_v != problem.head_dim else []
    for name, head_dim, width in (("head_dim", problem.head_dim, kernel.width), *of_v):
        if head_dim != width:
            lines.append(f"{name} {head_dim} is padded to {width} on chip, not in memory")
    if pack := pack_gqa_for(problem, kernel.tiles.block_q):
        lines.append(f"{1 << pack} query heads of a key/value head share a tile")
    if problem.score_mod is not None:
        lines.append("score_mod: compiled into the kernels, whose tiles are those measured without")
    if problem.grad:
        lines += _describe_backward(problem)
    lines.append(
        "copies what TMA can't read in place: a start or stride that is no multiple of 16 bytes, a broadcast dimension"
    )
    return lines


def _why_tiles(problem: Problem, tiles: Tiles) -> str:
    speeds, least = speeds_of(problem), padded(problem, tiles)
    if len(speeds) == 1 or not least:
        return "tiles: the fastest measured on an H200"
    told = ", ".join(
        f"{other.block_q}x{other.block_kv} has {padded(problem, other) / least:.2f} times as many at {speed:g}"
        for other, speed in speeds.items()
        if other != tiles
    )
    return (
        f"tiles: the least time for a head's scores, padding included: {least:.0f} at {speeds[tiles]:g} of the speed "
        f"that long sequences have; {told}"
    )


def _describe_backward(problem: Problem) -> list[str]:
    backward = kernel_backward_for(problem)
    run_at = f"head dims run at {backward.width}"
    leaves = "is summed in float32 memory of its own" if backward.dq_sums else "is one tile's, which has all keys"
    if backward.by_head:
        leaves = "is summed by the thread block that has all tiles of its head, and rounded by the last of them"
    lines = [f"backward: {backward.tiles}, {run_at}; dQ {leaves}"]
    if backward.cluster == 1 and (model := by_head(problem)):
        how = "by head, which by a model takes" if backward.by_head else "not by head, which by a model would take"
        lines.append(
            f"backward: {how} {model.saved:.0f} us less for zeros and rounding of dQ's sums, {model.idle:.0f} us more "
            f"as multiprocessors share out heads and not tiles, and {model.again:.0f} us more for what L2 no longer has"
        )
    splits, group = splits_for(problem), problem.heads // problem.heads_kv
    if splits > 1:
        blocks = problem.batch * problem.heads_kv * backward.blocks_kv(problem.seqlen_k)
        every = f"{cdiv(group, splits)} of the {group} query heads that share it"
        if group == 1:
            blocks_q = backward.blocks_q(problem.seqlen_q)
            every = f"{cdiv(blocks_q, splits)} of the {blocks_q} blocks of queries"
        lines.append(
            f"backward: {blocks} blocks of keys for {MULTIPROCESSORS[90]} multiprocessors, so each is a tile for every "
            f"{every}; their dK and dV are added in float32"
        )
    if backward.cluster > 1:
        adds = ", and adds half of dQ's columns," if backward.tiles.by_gradient else ""
        lines.append(
            "backward: thread blocks work in pairs on neighbouring blocks of keys; "
            f"each loads half of the queries{adds} for both"
        )
    if backward.deterministic:
        lines.append("backward: blocks of keys add to dQ in a fixed order, each after the one before")
    return lines


def describe_fp8(problem: Problem) -> list[str]:
    """As `describe`, for FP8."""
    quantised = problem.precision is not None
    kernel = kernel_fp8_for(problem, quantised, quantised or prepares(problem))
    sums = "each block's product promoted to float32" if kernel.two_level else "O summed by the tensor core alone"
    lines = [f"forward: {kernel.tiles}, {sums}"]
    if problem.fast_accum and kernel.two_level:
        where = f"at head dims that run at {kernel.width}" if kernel.transposed else "where V is transposed on chip"
        lines.append(f"fast_accum: not used, nothing is faster so {where}")
    if quantised:
        lines.append(
            "q, k and v are quantised to e4m3: k less a mean of its keys, q and k rotated, a scale for each 128 rows"
        )
        if problem.sinks:
            lines.append("sinks join out and LSE after the kernel, which sees no score as it was")
    if problem.grad:
        lines.append("backward: v3's, in 16 bits on the saved inputs; it runs v3's forward pass again first")
        lines += _describe_backward(problem)
    if problem.head_dim != kernel.width:
        lines.append(f"head_dim {problem.head_dim} is padded to {kernel.width} on chip, not in memory")
    if pack := pack_gqa_for(problem, kernel.tiles.block_q):
        lines.append(f"{1 << pack} query heads of a key/value head share a tile")
    if not quantised:
        lines.append("v is transposed " + ("into memory of its own first" if kernel.transposed else "on chip"))
        lines.append(
            "copies what TMA can't read in place: a start or stride that is no multiple of 16 bytes, "
            "a broadcast dimension"
        )
    return lines
