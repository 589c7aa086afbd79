"""Online softmax on the registers of one thread, which holds two rows of a warpgroup's WGMMA results."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flashzoo._cute.hopper.bounds import Bounds
from flashzoo._cute.hopper.wgmma import rows_of

NOTHING_SEEN = -3e38
"""The maximum of a row that has seen no key: below what float32 scores can be, and finite,
so that -inf less it is -inf."""

LN2, LOG2E = 0.6931471805599453, 1.4426950408889634

RESCALE_THRESHOLD = 8.0
"""How far, in log2, the scores of a row may outgrow its `row_max` before O is rescaled."""


@dataclass(frozen=True)
class Softmax:
    """Running state of a thread's two rows.

    The paper takes scores relative to the maximum so far, and rescales O whenever that grows. Any number near it does:
    what P and l gain is divided out in the end. So `row_max` follows the true maximum only when that is more than
    `RESCALE_THRESHOLD` beyond it (FlashAttention-4's idea for Blackwell). P is then at most 2^8, which costs 16-bit
    floats no precision, and O is rescaled a few times in all rather than once a block.

    Attributes:
        row_max: what the rows' scores are taken relative to, in log2 units.
        row_sum: this thread's part of the rows' sums of P.
        scale_log2: softmax scale times log2 e.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32

    def reset(self, bounds: Bounds, row: Int32) -> None:
        """Begin with rows that have seen no key."""
        self.row_max.fill(NOTHING_SEEN)
        self.row_sum.fill(0.0)

    def expect(self, first_key: Int32) -> None:
        """Prepare for the next block, which begins at that key: nothing to do without scales."""

    @cute.jit
    def step(self, s: cute.Tensor, first_key: Int32) -> tuple[Boolean, cute.Tensor]:
        """Turn a block's scores into P in place; returns whether O must be rescaled, for the whole warp alike,
        and by what."""
        rows = rows_of(s)
        maxima = [maximum(rows[None, r, None]) * self.scale_log2 for r in range(2)]
        grown = maxima[0] > self.row_max[0] + RESCALE_THRESHOLD or maxima[1] > self.row_max[1] + RESCALE_THRESHOLD
        rescale = cute.arch.vote_any_sync(grown)
        alpha = cute.make_rmem_tensor(2, Float32)
        alpha.fill(1.0)
        if rescale:
            for r in cutlass.range_constexpr(2):
                row_max = cute.arch.fmax(self.row_max[r], maxima[r])
                alpha[r] = cute.math.exp2(self.row_max[r] - row_max, fastmath=True)
                self.row_max[r] = row_max
                self.row_sum[r] = self.row_sum[r] * alpha[r]
        for r in cutlass.range_constexpr(2):
            row = rows[None, r, None]
            sums = [self.row_sum[r], None, None, None]  # four chains, as one would wait for itself
            for i in cutlass.range_constexpr(cute.size(row)):
                p = cute.math.exp2(row[i] * self.scale_log2 - self.row_max[r], fastmath=True)
                row[i] = p
                sums[i % 4] = p if const_expr(sums[i % 4] is None) else sums[i % 4] + p
            self.row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
        return rescale, alpha

    def lse_log2(self, r: int, total: Float32) -> Float32:
        """LSE of row r in log2 units, `total` being the sum of its P."""
        return self.row_max[r] + cute.math.log2(total, fastmath=True)

    def scale_of_o(self, total: Float32) -> Float32:
        """The factor of a row of O in the end."""
        return cute.arch.rcp_approx(total)


@cute.jit
def beside_sink(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """Of a row that has a sink too: what share of its softmax its keys keep, and its LSE; -inf for none.

    Not in log2 units, so that where the sink is nearly all LSE is the sink itself, from which its gradient is made.
    """
    top = cute.arch.fmax(lse, sink)
    safe = Float32(0.0) if top == -Float32.inf else top
    of_keys = cute.math.exp2((lse - safe) * LOG2E, fastmath=True)
    total = of_keys + cute.math.exp2((sink - safe) * LOG2E, fastmath=True)
    share = Float32(0.0) if total == 0.0 else of_keys * cute.arch.rcp_approx(total)
    return share, safe + cute.math.log2(total, fastmath=True) * LN2


@cute.jit
def maximum(row: cute.Tensor) -> Float32:
    """The maximum of a whole row of scores, which four neighbouring lanes hold."""
    maxima = [row[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, cute.size(row)):
        maxima[i % 4] = cute.arch.fmax(maxima[i % 4], row[i])
    top = cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))
    return cute.arch.warp_reduction_max(top, threads_in_group=4)
