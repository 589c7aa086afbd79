"""Stages of shared memory between producer warps, which fill them, and consumer warps,
which read them, guarded by mbarriers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64


@dataclass(frozen=True)
class PipelineState:
    """A fill, as a loop carries it from one to the next: of its number alone stage and phase would be divided anew in
    front of every look at a barrier.

    Attributes:
        n: its number, from 0. A kernel that asks for none keeps none.
        stage, phase: `n % stages` and `n // stages % 2`.
    """

    n: Int32
    stage: Int32
    phase: Int32

    @classmethod
    def first(cls) -> PipelineState:
        """The first fill."""
        return cls(Int32(0), Int32(0), Int32(0))

    def part(self, i: int, parts: int) -> PipelineState:
        """The i-th part of it, in a ring that has so many stages for each of this one's."""
        return PipelineState(self.n * parts + i, self.stage * parts + i, self.phase)


@dataclass(frozen=True)
class Pipeline:
    """A ring of stages. They are filled in order: the n-th fill, from 0, is of stage `n % stages`,
    in phase `n // stages % 2`. A fill `n` is given by its number, or as a `PipelineState`.

    Attributes:
        full, empty: mbarriers of each stage: that it is filled, and that it may be filled again.
        stages: how many.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: Constexpr[int]

    @classmethod
    def allocate(cls, smem: cutlass.memory.SmemAllocator, stages: int) -> Pipeline:
        """Two mbarriers for each stage."""
        return cls(smem.allocate_array(Int64, stages), smem.allocate_array(Int64, stages), stages)

    def initialize(self, consumer_warps: int, producer_warps: int = 1) -> None:
        """By one thread. A stage is full when TMA, or each producer warp, has arrived,
        and empty when each consumer warp has."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, producer_warps)
            cute.arch.mbarrier_init(self.empty + stage, consumer_warps)

    def state(self, n: Int32 | PipelineState) -> PipelineState:
        """The n-th fill."""
        if isinstance(n, PipelineState):
            return n
        return PipelineState(n, n % self.stages if self.stages > 1 else Int32(0), n // self.stages & 1)

    @cute.jit
    def following(self, n: PipelineState) -> PipelineState:
        """The fill behind that one."""
        stage, phase = n.stage + 1, n.phase
        if stage == self.stages:
            stage, phase = Int32(0), phase ^ 1
        return PipelineState(n.n + 1, stage, phase)

    def stage(self, n: Int32 | PipelineState) -> Int32:
        """Stage of the n-th fill."""
        return self.state(n).stage

    def consumer_wait(self, n: Int32 | PipelineState) -> None:
        """Wait for the n-th fill."""
        state = self.state(n)
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    def producer_acquire(self, n: Int32) -> None:
        """Wait until the stage of the n-th fill is empty: at once the first time."""
        state = self.state(n)
        cute.arch.mbarrier_wait(self.empty + state.stage, state.phase ^ 1)

    @cute.jit
    def producer_commit(self, n: Int32):
        """This warp has written its share of the n-th fill, for TMA or the tensor core to read."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + self.stage(n))

    @cute.jit
    def consumer_release(self, n: Int32 | PipelineState):
        """This warp has read the n-th fill."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(n))

    def of_team(self, team: Int32, teams: int) -> Pipeline:
        """A team's part, where this pipeline has the stages of all teams, one team's behind another's."""
        stages = self.stages // teams
        return Pipeline(self.full + team * stages, self.empty + team * stages, stages)


@dataclass(frozen=True)
class PipelineOfPair(Pipeline):
    """Stages that are filled on both thread blocks of a cluster at a time, each of which has mbarriers of its own: one
    is full when all that either sends has arrived there, and empty when the consumers of both have read theirs."""

    def initialize(self, consumer_warps: int, producer_warps: int = 1) -> None:
        """The same, with as many consumer warps on each thread block."""
        super().initialize(2 * consumer_warps, producer_warps)

    @cute.jit
    def consumer_release(self, n: Int32 | PipelineState):
        """This warp has read the n-th fill: both thread blocks are told."""
        empty = self.empty + self.stage(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)
            self.tell_partner(empty)

    @cute.jit
    def tell_partner(self, empty: cute.Pointer):
        """Arrive at the same mbarrier of the other thread block."""
        cute.arch.mbarrier_arrive(empty, cute.arch.block_idx_in_cluster() ^ 1)


@dataclass(frozen=True)
class PipelineOfPairWords(PipelineOfPair):
    """The same of words that a warp loads, and releases at once: the load is still on its way, and an arrival at the
    other thread block's mbarrier may overtake it, so that the next word is there first. One that releases to the
    cluster does not. Without, the last warp to read, in the thread block that does not write, met the word behind its
    own. Other stages are read by products that have been waited for, or by loads of which something was made."""

    @cute.jit
    def tell_partner(self, empty: cute.Pointer):
        """The same, behind what this thread has read."""
        cute.arch.inline_ptx(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
            read_only_args=[cute.arch.map_dsmem_ptr(empty, cute.arch.block_idx_in_cluster() ^ 1)],
        )


def sync_cluster() -> None:
    """Barrier of all threads of all thread blocks of a cluster."""
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
