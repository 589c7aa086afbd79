"""What `bench.trace` has of v3's clocks: what is measured, which phases a stamp ends, and how stamps are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from bench.runs import RESULTS

if TYPE_CHECKING:
    from torch import Tensor

TRACE = RESULTS.with_name("h200_trace.json")

BATCH, SEQLEN, HEADS, HEAD_DIM, DTYPE = 4, 4096, 16, 128, "fp16"
SWITCHES = {
    "fa2": {"overlap": False, "ping_pong": False},
    "overlap": {"overlap": True, "ping_pong": False},
    "ping_pong": {"overlap": False, "ping_pong": True},
    "both": {"overlap": True, "ping_pong": True},
}
"""By the name in `ORDERS`."""
TILE = 4
"""Which of the thread block's tiles is kept, from 0: one in the middle."""
BLOCKS = 1024
"""Blocks of keys, over all tiles, that there is room for in memory. What is beyond them is not stamped."""
PHASES = (
    *("K", "turn", "S issued", "S", "softmax", "P", "V", "PV issued", "PV", "O"),
    *("K free", "K ordered", "V free", "V ordered"),
)
"""What ends at a stamp. Of a consumer: the wait for K, and for the turn to issue; issuing S, and the wait for it;
softmax; P to 16 bits, and O rescaled; the same of V and P V as of K and S; writing O. Of the producer: the wait until a
stage is free, and the order to load into it."""
ROW = 4 * 16
"""Bytes of the stamps of a block, in which the phases have room."""

Lane = Mapping[str, list["int | None"]]
"""By phase the clock at its end for each block of keys; None where it has none."""


class Order(TypedDict):
    """What was measured in one order of the loop: milliseconds of the kernel and of that with stamps, and the lanes,
    the producer's first."""

    ms: float
    stamped_ms: float
    lanes: list[Lane]


def lanes_of(stamps: Tensor, blocks: int) -> list[Lane]:
    """The lanes of the tile `TILE`, of so many blocks of keys, from clocks of 32 bits, 0 where there is none; the
    first is 0 in what is returned."""
    rows = stamps[:, TILE * blocks : (TILE + 1) * blocks, : len(PHASES)].tolist()
    base = next(clock for row in rows[1] for clock in row if clock)
    # As far from one of them as fits into 32 bits with a sign: the clock may have gone past its last number.
    clocks = [[[(x - base + 2**31) % 2**32 - 2**31 if x else None for x in row] for row in lane] for lane in rows]
    first = min(x for lane in clocks for row in lane for x in row if x is not None)
    lanes = []
    for lane in clocks:
        columns = zip(PHASES, zip(*lane, strict=True), strict=True)
        of = {what: [None if x is None else x - first for x in column] for what, column in columns}
        lanes.append({what: column for what, column in of.items() if any(x is not None for x in column)})
    return lanes


def written(found: Mapping[str, Any]) -> str:
    """As JSON, a list of numbers on one line."""
    return (
        re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda of: f"[{' '.join(of[1].split())}]", json.dumps(found, indent=1)) + "\n"
    )
