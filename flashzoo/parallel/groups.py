"""The ranks of a group, and their agreement on a call before the first communication that could hang."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

AGREE_WITHIN = timedelta(minutes=5)
"""How long a rank waits for the others to tell what they call: until the slowest has compiled and read its data."""
LONGEST_TELLING = 4000
"""Bytes of what one rank tells the others."""
MOST_AGREED = 4096
"""Kinds of call that are remembered. All ranks add the same ones in the same order, so all forget them at once."""


Kind = tuple[tuple[str, Hashable], ...]
"""A call without its data, as its arguments' names and what of them all ranks must have alike."""


def form_of(x: Any) -> Hashable:
    """What of an argument all ranks must have alike."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.device.type, x.requires_grad
    if isinstance(x, list):
        return tuple(x)
    form = getattr(x, "form", x)  # a BlockMask's
    return form if isinstance(form, Hashable) else repr(form)


def _told(form: Any) -> str:
    if isinstance(form, tuple) and len(form) == 4 and isinstance(form[1], torch.dtype):
        return f"{form[0]} {form[1]} on {form[2]}{' that requires grad' if form[3] else ''}"
    return repr(form)


class _Agreed:
    """What is remembered of a group: what was made of each kind of call that every rank is known to make alike, and the
    group in which they tell."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, Any] = {}
        self.telling: Any = None


_AGREED: WeakKeyDictionary[Any, _Agreed] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """A group as one of its ranks sees it.

    Attributes:
        group: its process group.
        rank, size: the caller's number in the group, and how many there are.
        agreed: what is remembered of it.
    """

    group: Any
    rank: int
    size: int
    agreed: _Agreed

    def agree(self, kind: Kind, make: Callable[[], Any]) -> Any:
        """What `make` makes of a call, where every rank makes the call alike; raises the same on all where not.

        Once for each kind of call: an all-gather of a few kilobytes on the CPU, in a gloo group of its own, so that it
        never meets another collective of the caller's, and with a time limit of its own. Where all ranks run the same
        program a call that is new to one is new to all. One that comes here while the others go on with what they have
        agreed on raises when the time is over. Of two ranks that go on with different calls, each of which all have
        agreed on before, this tells neither: that costs a look at each other at every call.

        Args:
            kind: of the call, by its arguments' names.
            make: raises what this rank finds wrong with it.
        """
        if kind in self.agreed.kinds:
            return self.agreed.kinds[kind]
        made, error = None, None
        try:
            made = make()
        except Exception as found:  # the others are to hear of it, whatever it is
            error = found
        if self.size > 1:
            self._compare(", ".join(f"{name}={_told(form)}" for name, form in kind), error)
        if error is not None:
            raise error
        if len(self.agreed.kinds) >= MOST_AGREED:
            self.agreed.kinds.clear()
        self.agreed.kinds[kind] = made
        return made

    def _compare(self, words: str, error: Exception | None) -> None:
        """ValueError where the ranks tell different things, or make different errors."""
        told = f"{type(error).__name__}: {error}" if error is not None else words
        every = self._told_by_all(told, error is not None)
        by_words: dict[str, list[str]] = {}
        for rank, (_, one) in enumerate(every):
            by_words.setdefault(one, []).append(str(rank))
        if len(by_words) == 1:
            return
        wrong = {one: ranks for one, ranks in by_words.items() if any(every[int(rank)][0] for rank in ranks)}
        what = "not every rank can make this call" if wrong else "every rank must make the same call"
        found = [f"  rank {', '.join(ranks)}: {one}" for one, ranks in (wrong or by_words).items()]
        raise ValueError("\n".join([f"flashzoo.parallel: {what}, got", *found])) from error

    def _told_by_all(self, words: str, failed: bool) -> list[tuple[bool, str]]:
        """What each rank tells, and whether it is an error."""
        if self.agreed.telling is None:
            members = dist.get_process_group_ranks(self.group)
            self.agreed.telling = dist.new_group(
                members, timeout=AGREE_WITHIN, backend="gloo", use_local_synchronization=True
            )
        text = words.encode()[: LONGEST_TELLING - 1]
        mine = torch.zeros(LONGEST_TELLING, dtype=torch.uint8)
        mine[: len(text) + 1] = torch.tensor([failed, *text], dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(every, mine, group=self.agreed.telling)
        except RuntimeError as error:
            raise RuntimeError(
                f"flashzoo.parallel: the ranks did not agree on a call within {AGREE_WITHIN}: expected all "
                f"{self.size} of the group to make it, got none from at least one (rank {self.rank} makes: {words})"
            ) from error
        return [(bool(x[0]), bytes(x[1:].tolist()).rstrip(b"\0").decode(errors="ignore")) for x in every]


def ranks_of(group: Any) -> Ranks:
    """The ranks of a group that the caller is in.

    Args:
        group: a `torch.distributed.ProcessGroup`, or a `DeviceMesh` of one dimension.

    Raises:
        TypeError, ValueError: it is none of these, or the caller is not in it.
    """
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension, got {group.ndim}: take a mesh['name'] of it"
            )
        if group.get_coordinate() is None:
            raise ValueError("group must be one that this rank is in, got a DeviceMesh of others")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must be one that this rank is in, got what new_group gives to ranks that are not")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or a DeviceMesh of one dimension, got "
            f"{type(group).__name__}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must be one that this rank is in, got a group of others")
    return Ranks(group, rank, dist.get_world_size(group), _AGREED.setdefault(group, _Agreed()))
