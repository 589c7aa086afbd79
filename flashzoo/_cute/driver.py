"""The CUDA driver calls that a compiled kernel needs: load it, describe tensors to TMA, launch it.

They are made here, through ctypes, and not by CuTe DSL's own host code, for two reasons: a kernel that lies in the cache
runs without importing CuTe DSL, and a call costs a few microseconds of host time.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache

import torch

from flashzoo._cute.cache import Image

TMA_DTYPES = {"fp16": 6, "bf16": 9}
"""CUtensorMapDataType of our dtypes."""

TMA_SWIZZLES = {32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by the bytes of a row of the box."""

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROMOTE_L2_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*


@cache
def _driver() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    u64, u32 = POINTER(c_uint64), POINTER(c_uint32)
    cuda.cuTensorMapEncodeTiled.argtypes = [c_void_p, c_int, c_uint32, c_void_p, u64, u64, u32, u32, c_int, c_int, c_int, c_int]
    cuda.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return cuda


def _check(error: int, what: str) -> None:
    if error:
        text = c_char_p()
        _driver().cuGetErrorString(error, byref(text))
        raise RuntimeError(f"{what}: CUDA driver error {error}, {(text.value or b'unknown').decode()}")


def current_stream(device: int) -> int:
    """Handle of the current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


def tensor_map(address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], row_bytes: int) -> bytes:
    """A TMA descriptor (CUtensorMap) of a tensor in memory; elements outside of it read as zeros.

    Args:
        address: of the first element, a multiple of 16.
        dtype: a key of `TMA_DTYPES`.
        sizes: innermost dimension first, which is contiguous.
        strides: in bytes, of all dimensions but the innermost; multiples of 16.
        box: sizes of what one TMA instruction moves.
        row_bytes: bytes of a row of the box: 32, 64 or 128, which is the swizzle on chip.

    Raises:
        RuntimeError: the driver refuses; the text holds the arguments.
    """
    rank = len(sizes)
    memory = (c_char * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT))()
    start = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(memory) + start,
        TMA_DTYPES[dtype],
        rank,
        address,
        (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank),
        0,  # no interleaving
        TMA_SWIZZLES[row_bytes],
        _PROMOTE_L2_256B,
        0,  # zeros outside
    )
    if error:
        _check(error, f"tensor_map(address={address:#x}, {dtype}, sizes={sizes}, strides={strides}, box={box}, row_bytes={row_bytes})")
    return memory.raw[start : start + _TENSOR_MAP_BYTES]


class Function:
    """A loaded kernel.

    Args:
        image: the kernel, compiled for the device's architecture.
        threads: of a block.
        shared: bytes of dynamic shared memory of a block.
        parameters: bytes of each parameter, in order, which lie as in a C struct.

    Raises:
        RuntimeError: the driver refuses the code, or the kernel's parameters lie otherwise in memory.
    """

    def __init__(self, image: Image, threads: int, shared: int, parameters: tuple[int, ...]) -> None:
        self._threads, self._shared = threads, shared
        self._library, self._kernel = c_void_p(), c_void_p()
        _check(_driver().cuLibraryLoadData(byref(self._library), image.cubin, None, None, 0, None, None, 0), "loading a kernel")
        _check(_driver().cuLibraryGetKernel(byref(self._kernel), self._library, image.name.encode()), f"finding {image.name}")
        self._launch = _driver().cuLaunchKernel
        self._padding = bytes(self._offset(parameters))

    def _offset(self, parameters: tuple[int, ...]) -> int:
        """Where the first parameter lies; the others must follow it as in a C struct."""
        found, offset, size = [], c_size_t(), c_size_t()
        while not _driver().cuKernelGetParamInfo(self._kernel, c_size_t(len(found)), byref(offset), byref(size)):
            found.append((offset.value, size.value))
        expected, at = [], found[0][0] if found else 0
        for size in parameters:
            at += -at % min(size, 8)
            expected.append((at, size))
            at += size
        if found != expected:
            raise RuntimeError(f"the kernel's parameters lie at (offset, size) {found}, expected {expected}: another release of CuTe DSL?")
        return expected[0][0]

    @cache  # noqa: B019 - as many as devices, and a Function lives as long as the process
    def on(self, device: int) -> Function:
        """Itself, prepared for a device."""
        if self._shared > 48 << 10:
            handle = c_int()
            _check(_driver().cuDeviceGet(byref(handle), device), f"finding device {device}")
            error = _driver().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, self._shared, self._kernel, handle)
            _check(error, f"asking for {self._shared} bytes of shared memory on device {device}")
        return self

    def __call__(self, blocks: int, stream: int, arguments: bytes) -> None:
        """Launch on a stream of the current device; `arguments` are the kernel's parameters as they lie in memory."""
        arguments = self._padding + arguments
        size = c_size_t(len(arguments))
        extra = (c_void_p * 5)(_BUFFER_POINTER, ctypes.cast(c_char_p(arguments), c_void_p), _BUFFER_SIZE, ctypes.addressof(size), 0)
        error = self._launch(self._kernel, blocks, 1, 1, self._threads, 1, 1, self._shared, stream, None, extra)
        if error:
            _check(error, "launching a kernel")
