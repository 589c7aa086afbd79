"""The ranks of a group, and their agreement on a call before the first communication that could hang.

They agree through the group's store, in which the ranks met: each writes there what it is about to call, and waits, so
long and no longer, until all have. That is no collective, which could meet another one of ranks that are elsewhere, and
it is done once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

AGREE_WITHIN = timedelta(minutes=5)
"""How long a rank waits for the others to tell what they call: until the slowest has compiled and read its data."""
SAME, WRONG = "same", "!"
"""What the last rank to come says of all that were told, and how an error is told."""
MOST_AGREED = 4096
"""Kinds of call that are remembered. All ranks add the same ones in the same order, so all forget them at once."""
Kind = tuple[tuple[str, Hashable], ...]
"""A call without its data, as its arguments' names and what of them all ranks must have alike."""


@dataclass(frozen=True)
class Typed:
    """A number or flag, of which 1, 1.0 and True are three."""

    value: Any
    kind: type

    def __repr__(self) -> str:
        return repr(self.value)


def form_of(x: Any) -> Hashable:
    """What of an argument all ranks must have alike."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.device.type, x.requires_grad
    if isinstance(x, list):
        x = tuple(x)
    if isinstance(x, bool | int | float):
        return Typed(x, type(x))
    form = getattr(x, "form", x)  # a BlockMask's
    try:
        hash(form)
    except TypeError:  # of a tuple with a list in it too
        return repr(form)
    return form


def kind_of(asked: Mapping[str, Any]) -> Kind:
    """That of a call of these arguments."""
    return tuple([(name, form_of(asked[name])) for name in sorted(asked)])


def _told(form: Any) -> str:
    if isinstance(form, tuple) and len(form) == 4 and isinstance(form[1], torch.dtype):
        return f"{form[0]} {form[1]} on {form[2]}{' that requires grad' if form[3] else ''}"
    return repr(form)


class _Agreed:
    """What is remembered of a group: what was made of each kind of call that every rank is known to make alike, how
    often they were asked, where in its store they tell it, which keys there are this rank's to delete, and whether all
    of them are known to have communicated."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, Any] = {}
        self.asked = 0
        self.told_at = ""
        self.told: list[str] = []
        self.met = False


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

    def agree(self, kind: Kind, make: Callable[[], Any], remember: bool = True) -> Any:
        """What `make` makes of a call, where every rank makes the call alike; raises the same on all where not.

        Where all ranks run the same program a call that is new to one is new to all, and the answer is kept. A rank
        that comes here while the others go on with what they have agreed on raises when the time is over. Of two that
        go on with different calls, each of which all have agreed on before, this tells neither: that would cost a look
        at each other at every call.

        Args:
            kind: of the call, by its arguments' names.
            make: raises what this rank finds wrong with it.
            remember: keep the answer. Not of a kind that is another in every batch: then the ranks ask each time.
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
        if remember:
            if len(self.agreed.kinds) >= MOST_AGREED:
                self.agreed.kinds.clear()
            self.agreed.kinds[kind] = made
        return made

    def _compare(self, words: str, error: Exception | None) -> None:
        """ValueError where the ranks tell different things, or make different errors."""
        told = words if error is None else f"{WRONG}{type(error).__name__}: {error}"
        every = self._told_by_all(told)
        if every is None:
            return
        by_words: dict[str, list[str]] = {}
        for rank, one in enumerate(every):
            by_words.setdefault(one, []).append(str(rank))
        wrong = {one: ranks for one, ranks in by_words.items() if one.startswith(WRONG)}
        what = "not every rank can make this call" if wrong else "every rank must make the same call"
        found = [f"  rank {', '.join(ranks)}: {one.removeprefix(WRONG)}" for one, ranks in (wrong or by_words).items()]
        raise ValueError("\n".join([f"flashzoo.parallel: {what}, got", *found])) from error

    def _told_by_all(self, told: str) -> list[str] | None:
        """What each rank tells; None where all tell the same. RuntimeError where one tells nothing."""
        store, number = self.group.get_group_store(), self.agreed.asked
        if not number:  # a store outlives its group, and has what was told in it: each group has a place of its own
            of_size = f"flashzoo/{self.size}"
            self.agreed.told_at = f"{of_size}/{(store.add(of_size, 1) - 1) // self.size}"
        self.agreed.asked += 1
        key = f"{self.agreed.told_at}/{number}"
        same, done = f"{key}/{sha256(told.encode()).hexdigest()}", f"{key}/done"
        store.set(f"{key}/{self.rank}", told)
        store.add(same, 1)
        if store.add(f"{key}/here", 1) == self.size:  # the last to come: all have counted themselves
            store.set(done, SAME if store.add(same, 0) == self.size else "different")
        try:
            store.wait([done], AGREE_WITHIN)
        except Exception as error:  # of what type is the store's own
            away = [str(rank) for rank in range(self.size) if not store.check([f"{key}/{rank}"])]
            raise RuntimeError(
                f"flashzoo.parallel: expected all {self.size} ranks of the group to make the same call within "
                f"{AGREE_WITHIN}, got none from rank {', '.join(away)}; rank {self.rank} makes: {told}"
            ) from error
        agree = store.get(done).decode() == SAME
        every = None if agree else [store.get(f"{key}/{rank}").decode() for rank in range(self.size)]
        for before in self.agreed.told:  # who is here has done with the one before
            store.delete_key(before)
        self.agreed.told = [f"{key}/{self.rank}", *([] if self.rank else [same, f"{key}/here", done])]
        return every


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


def size_of(group: Any) -> int:
    """How many ranks a group has, or a number of ranks is.

    Raises:
        TypeError, ValueError: it is neither, or as `ranks_of`.
    """
    if isinstance(group, bool) or (isinstance(group, int) and group < 1):
        raise ValueError(f"group must be a group, or a number of ranks from 1 on, got {group!r}")
    return group if isinstance(group, int) else ranks_of(group).size
