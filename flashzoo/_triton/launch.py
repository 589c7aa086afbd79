"""`Launch`: a kernel with everything about a call that its data don't decide, so that a call costs little host time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from flashzoo._triton.interpreter import interpret
from flashzoo.gpu import RAGGED_ROWS, ragged_back

RAGGED = 5
"""Dimensions of a descriptor of packed sequences: back, end, rows, heads, head dim,
as `flashzoo/_cute/tma.py` has them."""


class Launch:
    """One kernel, one grid, one choice of scalars and constexprs; calling it with the tensors launches it.

    Triton's own launch path looks at every argument of every call (types, divisibility, whether it is 1) to find the
    compiled kernel. Here all but the addresses is fixed, dtypes too, so what was found once is reused: the key that is
    left is which tensors are 16-byte aligned, and the device.

    Args:
        kernel: the `@triton.jit` function. Its parameters are, in this order: tensors, floats, the scalars, constexprs.
        programs: size of the grid.
        scalars: the integer parameters, in order.
        constexprs: the constexpr parameters by name, in order.
        num_warps, num_stages: Triton's options.
        aligned: every tensor of every call starts at a multiple of 16 bytes.
        tma_tiles: for each tensor, the tile that TMA reads of it, to pass it as a tensor descriptor, or None to pass it
            as a pointer; empty to pass all as pointers. A tile of `RAGGED` dimensions is of packed sequences.
        programmatic: it begins before the stream's last launch has ended, for which the kernel itself waits (gdc_wait).
        dtypes: of the tensors, where their addresses are given in their place, see `at`.
    """

    def __init__(
        self,
        kernel: JITFunction,
        programs: int,
        scalars: tuple[int, ...],
        constexprs: dict[str, Any],
        num_warps: int,
        num_stages: int,
        aligned: bool = False,
        tma_tiles: tuple[tuple[int, ...] | None, ...] = (),
        programmatic: bool = False,
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> None:
        self.kernel = kernel
        self.scalars = scalars
        self.constexprs = constexprs
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        if programmatic:
            self.options["launch_pdl"] = True
        self.tma_tiles = tma_tiles
        self._aligned = aligned
        self._dtypes = dtypes
        self._grid = (programs, 1, 1)
        self._rest = (*scalars, *constexprs.values())
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, tensors: tuple[Any, ...], floats: tuple[float | None, ...]) -> None:
        """Launch on the current stream of the tensors' device, or in the interpreter where they are on the CPU.

        A kernel is compiled without the tensors, of which the first is never one, that are None. One may be a tuple of
        tensors and integers.
        """
        if not tensors[0].is_cuda:
            interpret(self.kernel, self._grid, (*tensors, *floats, *self.scalars), self.constexprs)
            return
        device = tensors[0].get_device()
        if device == torch.cuda.current_device():
            self._launch(device, tensors, floats)
        else:
            with torch.cuda.device(device):
                self._launch(device, tensors, floats)

    def at(
        self, device: int, stream: int, addresses: tuple[int | None, ...], floats: tuple[float | None, ...] = ()
    ) -> None:
        """Launch with the addresses of tensors of `dtypes`, or None, in the place of all; on the current stream of the
        current device, which the caller names, having asked for them already."""
        key = (device,) if self._aligned else (device, *[x and x & 15 for x in addresses])
        run = self._compiled.get(key)
        if run is None:
            memory = [x if x is None else _Memory(x, dtype) for x, dtype in zip(addresses, self._dtypes, strict=True)]
            self._compile(key, memory, floats)
        else:
            run(*addresses, *floats, *self._rest, stream=stream)

    def _launch(self, device: int, tensors: tuple[Any, ...], floats: tuple[float | None, ...]) -> None:
        # Of a tensor Triton's launcher would ask the address, and of that the driver whose it is; a number it takes.
        addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
        key = (device,)
        if not self._aligned:
            key += tuple([x & 15 if isinstance(x, int) else _specialised(x) for x in addresses])
        run = self._compiled.get(key)
        if run is None:
            self._compile(key, self._described(tensors, tensors), floats)
        else:
            # Asked by the function that torch's own generated code uses: Triton would ask at a higher cost.
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*self._described(tensors, addresses), *floats, *self._rest, stream=stream)

    def _compile(self, key: tuple[Any, ...], arguments: Sequence[Any], floats: tuple[float | None, ...]) -> None:
        """By Triton's own launch path, which launches it too."""
        compiled = self.kernel[self._grid](*arguments, *floats, *self.scalars, **self.constexprs, **self.options)
        self._compiled[key] = _runner(compiled, self._grid)

    def _described(self, tensors: tuple[Any, ...], otherwise: Sequence[Any]) -> Sequence[Any]:
        """The arguments in their place: descriptors of the tensors that have a tile, of the others what is given."""
        if not self.tma_tiles:
            return otherwise
        return [
            _descriptor(x, tile) if tile else other
            for x, tile, other in zip(tensors, self.tma_tiles, otherwise, strict=True)
        ]


def _runner(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """`compiled[grid]`, at half the cost where no profiler has hooks, for which it makes ready at each launch."""
    with_hooks, launch, function, metadata = compiled[grid], compiled.run, compiled.function, compiled.packed_metadata

    def run(*arguments: Any, stream: int) -> None:
        before, behind = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(before, "calls", True) or getattr(behind, "calls", True):  # a chain of them, or else one
            with_hooks(*arguments, stream=stream)
        else:
            launch(*grid, stream, function, metadata, None, None, None, *arguments)

    return run


class _Memory:
    """What Triton takes for a tensor: an address, and the dtype of what lies there."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


def _specialised(x: Any) -> Any:
    """By what Triton chooses a kernel: of a tensor its address, and of a tuple that and the numbers beside tensors."""
    if isinstance(x, Tensor):
        return x.data_ptr() & 15
    return tuple([_specialised(part) for part in x]) if isinstance(x, tuple) else x


def _descriptor(x: Tensor, tile: tuple[int, ...]) -> TensorDescriptor:
    # The stride of a dimension of size 1 means nothing to torch and may be anything; TMA wants multiples of 16 bytes.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    if len(tile) < RAGGED:
        return TensorDescriptor(x, list(x.shape), [*strides, 1], list(tile))
    (_, rows, *shape), (_, row, head) = x.shape, strides
    back = ragged_back(row * x.itemsize) // x.itemsize
    return TensorDescriptor(x, [RAGGED_ROWS + 1, rows + 1, RAGGED_ROWS, *shape], [back, row, row, head, 1], list(tile))
