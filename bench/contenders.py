"""Who is timed: versions and peers by their names, which cells each is for, and one of them on a cell's inputs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashzoo
from bench import scored
from bench.cells import DECODE, Cell
from bench.peers import (
    DECODE_PEERS,
    FP8_PEERS,
    LINEAR_PEERS,
    MASKED_PEERS,
    PACKED_PEERS,
    PEERS,
    Attention,
    missing,
    peer,
)
from bench.rows import MISSING, REFUSED
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.reference import Result
from flashzoo.spec import Spec
from flashzoo.timing import captured

DEFAULT_MODES = {"bwd": ("v3_deterministic@8192",)}
"""What runs unasked besides the versions as they are: at one length, which shows what a fixed order costs."""
ENDINGS: dict[str, dict[str, Any]] = {
    "_end_to_end": {"precision": "fp8"},
    "_deterministic": {"deterministic": True},
    "_fast_accum": {"fast_accum": True},
}
"""What may end the name of a version, and what it is then called with: on 16-bit inputs, quantisation included;
in a fixed order; on e4m3 inputs, with sums left to the tensor core."""
MASKED_ONLY = "blocksparse"
SCORED = ("v3", "v2", *(name for name in scored.SCORE_PEERS if name in LINEAR_PEERS))
"""What runs unasked where there is something on the scores."""
UNASKED_NEVER = ("sdpa", "decode")
"""The peers stand for the one; the other is for few queries, which no cell has but those of decoding."""


def default_impls(
    pass_: str,
    dtype: str = "bf16",
    masked: bool = False,
    packed: bool = False,
    linear: bool = False,
    with_scores: bool = False,
) -> list[str]:
    """Every registered version of that dtype but `UNASKED_NEVER`, and `blocksparse` where no cell has a block mask;
    `DEFAULT_MODES`; and the peers that need linear memory, there or not. Backward, with block masks or packed
    sequences, and where `linear`, versions that need it too. Of decoding `decode` is one of those that take caches.
    With something on the scores `SCORED`."""
    if with_scores:
        return [*SCORED]
    specs = [spec for spec in flashzoo.versions().values() if dtype in (*spec.dtypes, *spec.cpu_dtypes)]
    if pass_ == DECODE:
        taking = [spec.name for spec in specs if "cache" in spec.features and spec.memory == "linear"]
        return [*(name for name in taking if name != "sdpa"), *DECODE_PEERS]
    specs = [spec for spec in specs if spec.name not in UNASKED_NEVER and (masked or spec.name != MASKED_ONLY)]
    if packed:
        packing = [spec.name for spec in specs if "packed" in spec.features and spec.memory == "linear"]
        return [*packing, *PACKED_PEERS]
    if pass_ == "bwd":
        specs = [spec for spec in specs if spec.backward is not None]
    if pass_ == "bwd" or masked or linear:
        specs = [spec for spec in specs if spec.memory == "linear"]
    names = [spec.name for spec in specs]
    modes = (
        [] if masked else [mode for mode in DEFAULT_MODES.get(pass_, ()) if parted(mode.partition("@")[0])[0] in names]
    )
    peers = FP8_PEERS if dtype == "e4m3" else MASKED_PEERS if masked else LINEAR_PEERS
    return [*names, *modes, *peers]


def foreign(impls: Iterable[str]) -> list[str]:
    """Those that are versions from outside of flashzoo."""
    specs = flashzoo.versions()
    found = {impl: specs.get(parted(impl.partition("@")[0])[0]) for impl in impls}
    return [impl for impl, spec in found.items() if spec and not spec.impl.startswith("flashzoo.")]


def fitting(impls: list[str], cell: Cell, masked: bool) -> list[str]:
    """Those that are for the cell: of versions, in a masked one, those that take a block mask, and in a dense one of a
    run with masks all but `blocksparse`, which is v2 there; what has a length behind its name, at that length."""
    specs = flashzoo.versions()

    def fits(impl: str, seqlen: str) -> bool:
        spec = specs.get(parted(impl)[0])
        if seqlen and int(seqlen) != cell.problem.seqlen_q:
            return False
        if cell.mask:
            return spec is None or "block_mask" in spec.features
        if cell.lengths:
            return spec is None or "packed" in spec.features
        return not (masked and impl == MASKED_ONLY)

    parts = [impl.partition("@") for impl in impls]
    return list(dict.fromkeys(impl for impl, _, seqlen in parts if fits(impl, seqlen)))


def names_with_endings() -> list[str]:
    """The names of versions with each of `ENDINGS` that they can be called with."""
    specs = flashzoo.versions().values()
    can = {"_end_to_end": [spec for spec in specs if spec.quantizes]}
    can |= {f"_{name}": [spec for spec in specs if name in spec.features] for name in ("deterministic", "fast_accum")}
    return [f"{spec.name}{ending}" for ending in ENDINGS for spec in can[ending]]


def parted(impl: str) -> tuple[str, dict[str, Any]]:
    """The name without its ending, and what that asks for."""
    ending = next((ending for ending in ENDINGS if impl.endswith(ending) and impl not in flashzoo.versions()), "")
    return impl.removesuffix(ending), ENDINGS.get(ending, {})


def attention(impl: str, cell: Cell) -> Attention:
    """The version or peer of that name as a function of q, k and v."""
    problem, pattern = cell.problem, cell.pattern
    if impl in PEERS and cell.scores:
        return scored.peer(impl, problem, cell.scores)
    if impl in PEERS:
        return peer(impl, problem, pattern, cell.packed, cell.caches)
    version, options = parted(impl)
    if pattern:
        options = {**options, "block_mask": pattern.mask}
    if cell.packed:
        options = {**options, "cu_seqlens_q": cell.packed.cu_seqlens, "max_seqlen_q": cell.packed.longest}
    if cell.caches:
        options = {**options, **cell.caches.options}
    if cell.scores:
        options = {**options, **cell.scores.options}
    return partial(flashzoo.attention, causal=problem.causal, window_size=problem.window, version=version, **options)


def objection(impl: str, cell: Cell) -> str | None:
    """Why the cell is not given to the implementation, as the column `why` holds it;
    None where nothing is declared against it."""
    if impl in PEERS:
        reason = missing(impl)
        return reason and f"{MISSING}: {reason}"
    version, options = parted(impl)
    form = cell.pattern.mask.form if cell.pattern else None
    on_scores = cell.scores.asked if cell.scores else {}
    asked = replace(cell.problem, block_mask=form, **on_scores, **options)
    if not (reasons := flashzoo.versions()[version].unsupported(asked)):
        return None
    return f"{REFUSED if declared(version).unsupported(asked) else MISSING}: {'; '.join(reasons)}"


def declared(version: str) -> Spec:
    """What a version declares, the packages that it needs taken to be there."""
    return replace(flashzoo.versions()[version], requires=(), backward_requires=())


class Contender:
    """One implementation on one cell's inputs. Making it runs the forward pass where the backward pass is the cell's.

    Args:
        impl: a version, perhaps with an ending, or a peer.
        cell: what to run.
        tensors: q, k, v and dout.

    Attributes:
        calls: how many `timed` makes.
    """

    calls: int = 1

    def __init__(self, impl: str, cell: Cell, tensors: tuple[Tensor, ...]) -> None:
        self.impl, self.grad, self.out_dtype = impl, cell.problem.grad, TORCH_DTYPES[cell.problem.out_dtype]
        self.queries = cell.queries
        of_scores = cell.scores.leaves if cell.scores else {}
        self.gradients = ("dq", "dk", "dv", *of_scores)
        self.function = attention(impl, cell)
        *self.leaves, self.dout = tensors
        if self.grad:
            inputs = [x.detach().requires_grad_() for x in self.leaves]
            self.leaves = [*inputs, *of_scores.values()]
            self.out = self.function(*inputs)

    def timed(self) -> object:
        """What is timed."""
        return self.run()

    def run(self, dout: Tensor | None = None) -> tuple[Tensor, ...]:
        """One call: the forward pass, giving `(out,)`, or the backward pass alone, giving `(dq, dk, dv)` and
        gradients of what is on the scores.

        Args:
            dout: another gradient of out than the inputs'.
        """
        if self.grad:
            return torch.autograd.grad(self.out, self.leaves, self.dout if dout is None else dout, retain_graph=True)
        with torch.no_grad():
            return (self.function(*self.leaves),)

    def result(self) -> Result:
        """One run's out and, in a backward cell, gradients; where only some queries are checked, those of these
        queries' out alone."""
        dout = None
        if self.grad and self.queries is not None:
            dout = torch.zeros_like(self.dout).index_copy_(1, self.queries, self.dout[:, self.queries])
        found = self.run(dout)
        out, gradients = (self.out.detach(), found) if self.grad else (found[0], ())
        named = dict(zip(self.gradients, gradients, strict=self.grad))
        return Result(self._in_our_dtype(out), **named)

    def _in_our_dtype(self, out: Tensor) -> Tensor:
        # A peer may have another dtype for out, as cuDNN in FP8; it is judged in ours.
        return out.to(self.out_dtype) if self.impl in PEERS else out


class Decoder(Contender):
    """One implementation on a decode cell's caches. Making it captures what is timed: a call on each of them.

    Args:
        impl: a version or a peer.
        cell: what to run.
        inputs: q, k, v and dout of each call; `run` is on the first of them.
    """

    def __init__(self, impl: str, cell: Cell, *inputs: tuple[Tensor, ...]) -> None:
        super().__init__(impl, cell, inputs[0])
        self.inputs, self.calls = inputs, len(inputs)  # a graph reads its tensors, and keeps none alive
        with torch.no_grad():
            calls = [partial(self.function, *tensors[:3]) for tensors in inputs]
            self.replay, self.out = captured(calls, cell.problem.device)

    def timed(self) -> object:
        """Every call."""
        return self.replay()

    def result(self) -> Result:
        """Out of the first call that is timed."""
        self.timed()
        return Result(self._in_our_dtype(self.out), None)


def first_call(impl: str, cell: Cell, *inputs: tuple[Tensor, ...]) -> tuple[Contender, Result, float]:
    """The implementation on these inputs, what it gives, and the seconds that this took:
    what it compiles is compiled here."""
    start = time.perf_counter()
    contender = (Decoder if cell.caches else Contender)(impl, cell, *inputs)
    result = contender.result()
    if cell.problem.device == "cuda":
        torch.cuda.synchronize()
    return contender, result, time.perf_counter() - start
