"""Stages of shared memory between warps that fill them and warps that read them, and the mbarriers that say which is which."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64


@dataclass(frozen=True)
class Pipeline:
    """Slots that go round between the producer and the consumers. Use n of the pipeline is of slot `n % slots`."""

    full: cute.Pointer
    empty: cute.Pointer
    slots: Constexpr[int]

    @staticmethod
    def allocate(smem: cutlass.memory.SmemAllocator, slots: int) -> Pipeline:
        """Two mbarriers for each slot."""
        return Pipeline(smem.allocate_array(Int64, slots), smem.allocate_array(Int64, slots), slots)

    def initialize(self, consumer_warps: int, producer_warps: int = 1) -> None:
        """By one thread. TMA, or one thread of each producer warp, fills a slot; every consumer warp empties it."""
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self.full + slot, producer_warps)
            cute.arch.mbarrier_init(self.empty + slot, consumer_warps)

    def slot(self, n: Int32) -> Int32:
        """Slot of use n."""
        return n % self.slots if self.slots > 1 else Int32(0)

    def consumer_wait(self, n: Int32) -> None:
        """Until use n has been filled."""
        cute.arch.mbarrier_wait(self.full + self.slot(n), n // self.slots & 1)

    def producer_acquire(self, n: Int32) -> None:
        """Until what lay in the slot before use n has been consumed; at once where that is nothing."""
        cute.arch.mbarrier_wait(self.empty + self.slot(n), n // self.slots & 1 ^ 1)

    @cute.jit
    def consumer_release(self, n: Int32):
        """Use n is consumed, as far as this warp goes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(n))

    def of_team(self, team: Int32, teams: int) -> Pipeline:
        """A team's pipeline, where this has the slots of all teams, one team's behind another's."""
        slots = self.slots // teams
        return Pipeline(self.full + team * slots, self.empty + team * slots, slots)
