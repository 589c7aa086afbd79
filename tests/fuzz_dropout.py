"""What a fuzzed call's dropout keeps: Philox-4x32-7 as Salmon et al. (2011) write it, in NumPy's unsigned numbers.
Shares no line with `flashzoo.dropout`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fuzz_scores import places
from torch import Tensor

UNIT = 1 << 24


def seed_of(call: Any) -> int:
    """The dropout_seed of a call, of which all 64 bits count."""
    return (call.seed << 39) + call.seed - (1 << 62)


def factors(call: Any, device: torch.device | str) -> Tensor:
    """What P is multiplied by, float64: 0, or one over the share that is kept."""
    dropped = min(round(call.dropout * UNIT), UNIT - 1)
    b, h, i, j = (x.cpu().numpy().astype(np.uint64) for x in places(call, device))
    numbers = _philox(j >> 4 << 3 | j & 7, i >> 4 << 3 | i & 7, h, b, seed_of(call) % (1 << 64))
    number = np.choose(((i >> 3 & 1) * 2 + (j >> 3 & 1)).astype(np.int64), numbers)
    return torch.from_numpy(np.where(number >> 8 < dropped, 0.0, UNIT / (UNIT - dropped))).to(device)


def _philox(*counter_and_key: Any) -> list[Any]:
    *counter, seed = counter_and_key
    words, key = [*np.broadcast_arrays(*counter)], [seed % (1 << 32), seed >> 32]
    for _ in range(7):
        (high_0, low_0), (high_2, low_2) = (
            divmod(word * np.uint64(factor), np.uint64(1 << 32))
            for word, factor in ((words[0], 0xD2511F53), (words[2], 0xCD9E8D57))
        )
        words = [high_2 ^ words[1] ^ np.uint64(key[0]), low_2, high_0 ^ words[3] ^ np.uint64(key[1]), low_0]
        key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
    return words
