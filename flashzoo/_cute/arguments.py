"""A kernel's arguments, declared once by name: what to compile with, the layout in memory and the
packing follow from it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from flashzoo.dtypes import BYTES


@dataclass(frozen=True)
class Tma:
    """A tensor, passed as a TMA descriptor: contiguous along the first dimension, strides of the others in
    steps of 16 bytes.

    Attributes:
        dtype: a key of `BYTES`.
        sizes: of its dimensions; None where the kernel is compiled for any.
    """

    dtype: str
    sizes: tuple[int | None, ...]
    format: ClassVar[str] = "128s"

    def example(self) -> Any:
        """Its type, to compile with."""
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_tensor

        from flashzoo._cute.hopper.dtypes import DTYPES

        strides = (1, *[cute.sym_int64(divisibility=16 // BYTES[self.dtype]) for _ in self.sizes[1:]])
        sizes = tuple(cute.sym_int32() if size is None else size for size in self.sizes)
        return make_fake_tensor(DTYPES[self.dtype], sizes, strides, assumed_align=16)


@dataclass(frozen=True)
class Pointer:
    """An address in memory.

    Attributes:
        dtype: of what lies there.
        align: in bytes, what the address is a multiple of.
    """

    dtype: str
    align: int = 4
    format: ClassVar[str] = "Q"

    def example(self) -> Any:
        """Its type, to compile with."""
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_ptr

        from flashzoo._cute.hopper.dtypes import DTYPES

        return make_ptr(DTYPES[self.dtype], 16, cute.AddressSpace.gmem, assumed_align=self.align)


@dataclass(frozen=True)
class Scalar:
    """A number.

    Attributes:
        dtype: "i32", "i64" or "fp32".
    """

    dtype: str

    @property
    def format(self) -> str:
        """As the module `struct` has it."""
        return {"i32": "i", "i64": "q", "fp32": "f"}[self.dtype]

    def example(self) -> Any:
        """Its type, to compile with."""
        from flashzoo._cute.hopper.dtypes import DTYPES

        return DTYPES[self.dtype](1)


INT, LONG, FLOAT = Scalar("i32"), Scalar("i64"), Scalar("fp32")


@dataclass(frozen=True)
class Record:
    """Parameters that the kernel takes as one dataclass, or as one tuple.

    Attributes:
        of: the dataclass, "module:name", imported when the kernel is compiled; "" of a tuple.
        parameters: its fields, in its order.
        constants: its first fields, known when the kernel is compiled.
        prefix: of its fields' names among the kernel's arguments.
    """

    of: str
    parameters: Mapping[str, Parameter]
    constants: tuple[Any, ...] = ()
    prefix: str = ""

    def example(self) -> Any:
        """The dataclass or tuple, of examples.

        Raises:
            TypeError: its fields are not those declared.
        """
        if not self.of:
            return tuple(parameter.example() for parameter in self.parameters.values())
        module, _, name = self.of.partition(":")
        record = getattr(import_module(module), name)
        names = [each.name for each in fields(record)][len(self.constants) :]
        if names != [*self.parameters]:
            raise TypeError(f"{self.of} must have the fields {[*self.parameters]} in this order, got {names}")
        return record(*self.constants, *[parameter.example() for parameter in self.parameters.values()])


Parameter = Tma | Pointer | Scalar | Record


def _flat(parameters: Mapping[str, Parameter], prefix: str = "") -> Iterator[tuple[str, Tma | Pointer | Scalar]]:
    for name, parameter in parameters.items():
        if isinstance(parameter, Record):
            yield from _flat(parameter.parameters, prefix + parameter.prefix)
        else:
            yield prefix + name, parameter


class Arguments:
    """The parameters of a kernel, in order; a record's fields lie where the record does.

    Args:
        parameters: by name.

    Raises:
        ValueError: two have one name.
    """

    def __init__(self, **parameters: Parameter) -> None:
        self._parameters = parameters
        flat = [*_flat(parameters)]
        self.names: tuple[str, ...] = tuple(name for name, _ in flat)
        self.formats: tuple[str, ...] = tuple(parameter.format for _, parameter in flat)
        if len({*self.names}) < len(self.names):
            raise ValueError(f"a kernel's arguments must have names of their own, got {self.names}")

    def examples(self) -> tuple[Any, ...]:
        """To compile with: types and static sizes, no data."""
        return tuple(parameter.example() for parameter in self._parameters.values())

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each, as in a C struct."""
        # `struct` pads before what it aligns: an array of no elements ends where an element may begin.
        formats = self.formats
        begins = [struct.calcsize("@" + "".join(formats[:i]) + "0" + kind[-1]) for i, kind in enumerate(formats)]
        return tuple((begin, struct.calcsize(kind)) for begin, kind in zip(begins, formats, strict=True))


class Packer:
    """Packs the arguments of a call; those that all calls have in common are packed once.

    Args:
        arguments: of the kernel.
        start: offset of the first.
        fixed: those that all calls have in common; they lie side by side.
        given: names of the others, in the order in which a call gives them, which is the kernel's.

    Raises:
        TypeError: these are not the kernel's arguments.
    """

    def __init__(self, arguments: Arguments, start: int, fixed: Mapping[str, Any], given: tuple[str, ...]) -> None:
        self._before = next((i for i, name in enumerate(arguments.names) if name in fixed), 0)
        if arguments.names != (*given[: self._before], *fixed, *given[self._before :]):
            raise TypeError(f"the kernel's arguments are {arguments.names}, got {given} and, side by side, {(*fixed,)}")
        end, after = 0, self._before + len(fixed)
        paddings_and_formats = []
        for kind, (begin, size) in zip(arguments.formats, arguments.places, strict=True):
            paddings_and_formats.append(f"{begin - end}x{kind}")
            end = begin + size
        self._fixed = struct.pack("=" + "".join(paddings_and_formats[self._before : after]), *fixed.values())
        paddings_and_formats[self._before : after] = [f"{len(self._fixed)}s"]
        self._pack_into = struct.Struct("=" + "".join(paddings_and_formats)).pack_into
        self._start, self.size = start, start + end
        self._memory = ctypes.c_char * self.size

    def __call__(self, given: tuple[Any, ...]) -> ctypes.Array[ctypes.c_char]:
        """The arguments in memory."""
        memory, before = self._memory(), self._before
        self._pack_into(memory, self._start, *given[:before], self._fixed, *given[before:])
        return memory
