"""How fast a cell could be on its GPU: the time that each of its parts takes at least, whatever the tiles.

One multiprocessor makes so many FLOPs a clock on its tensor cores, 16 exponentials on its MUFU, and reads 128 bytes of
shared memory; memory gives what the data sheet says. All of it is at the data sheet's clock, so a GPU that holds itself
back for its power is below its limits even where nothing is lost.
"""

from __future__ import annotations

from bench.caches import rate
from bench.cells import DECODE
from bench.pictures import BANDWIDTHS
from bench.runs import ARCHS, FP8, Row, word_of
from flashzoo.dtypes import BYTES
from flashzoo.gpu import WARPGROUP_ROWS, peak_tflops

FLOPS = {80: 2048, 90: 4096}
"""Of one multiprocessor a clock, 16 bits, by architecture. Where they are not known, products and memory are limits."""
EXPONENTIALS, SHARED_BYTES = 16, 128
"""Of one multiprocessor a clock."""
PRODUCTS = {"fwd": 2, "bwd": 5, DECODE: 2}
"""Of matrices, 2 * head_dim FLOPs for each pair of query and key."""
TENSORS = {"fwd": (2, 2), "bwd": (4, 4)}
"""Of the size of q (q, out and their gradients) and of k, which are read or written."""


def limits(row: Row) -> dict[str, float]:
    """The least ms that each part of a measured cell takes, by its name; empty where the GPU is not known.

    - products: the FLOPs, on tensor cores.
    - exponentials: one for each pair of query and key that is seen.
    - shared memory: the second factor of each product is read once for each 64 rows, the M of one WGMMA, and backward
      dS is written once and read once. Hopper alone.
    - memory: each tensor once; decoding, keys and values.
    """
    gpu, dtype, pass_ = row["gpu"], row["dtype"], row["pass"]
    peak, half, bandwidth = peak_tflops(gpu, dtype), peak_tflops(gpu, "bf16"), word_of(gpu, BANDWIDTHS)
    if not peak or not half or pass_ not in PRODUCTS:
        return {}
    work, head_dim, size = float(row["tflops"]) * float(row["ms"]) * 1e9, int(row["head_dim"]), BYTES[dtype]
    found = {"products": work / peak / 1e9}
    arch = word_of(gpu, ARCHS)
    if arch in FLOPS:
        # both in pairs of a multiprocessor's clock, of which the GPU has so many in a millisecond
        clocks, pairs = half * 1e9 / FLOPS[arch], work / (2 * PRODUCTS[pass_] * head_dim)
        found["exponentials"] = pairs / EXPONENTIALS / clocks
        if arch == 90 and pass_ in TENSORS:
            by_pair = PRODUCTS[pass_] * head_dim * size / WARPGROUP_ROWS + (2 * size if pass_ == "bwd" else 0)
            found["shared memory"] = pairs * by_pair / SHARED_BYTES / clocks
    if bandwidth and pass_ == DECODE:
        found["memory"] = float(row["ms"]) * rate(row) / (1e3 * bandwidth)
    elif bandwidth:
        found["memory"] = moved(row) / bandwidth / 1e9
    return found


def moved(row: Row) -> float:
    """Bytes of each tensor of a forward or backward pass once; out of e4m3 inputs is of 16 bits."""
    size, batch = BYTES[row["dtype"]], 1 if row.get("lengths") else int(row["batch"])
    of_q, of_k = (
        batch * int(row[n]) * int(row[h]) * int(row["head_dim"])
        for n, h in (("seqlen_q", "heads"), ("seqlen_k", "heads_kv"))
    )
    queries, keys = TENSORS[row["pass"]]
    return size * (queries * of_q + keys * of_k) + (of_q if row["dtype"] == FP8 else 0)


def share(row: Row) -> tuple[float, str] | None:
    """What a result reached of its cell's limit, and which part that is; None where none is known."""
    found = limits(row)
    if not found:
        return None
    # of two that are one but for a row's digits, always the same
    name = max(found, key=lambda part: float(f"{found[part]:.2g}"))
    return found[name] / float(row["ms"]), name
