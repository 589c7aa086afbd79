"""The CUDA driver calls that a compiled kernel needs: load it, describe tensors to TMA, launch it.

They are made here, through ctypes, and not by CuTe DSL's own host code, for two reasons: a kernel that lies in the
cache runs without importing CuTe DSL, and a call costs a few microseconds of host time. The driver's numbers are
cuda-bindings', which CuTe DSL brings.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from ctypes import POINTER, addressof, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

import cuda.bindings.driver as cuda
import torch

from flashzoo._cute.arguments import Arguments, Packer
from flashzoo._cute.cache import Image

_Dtype, _Swizzle = cuda.CUtensorMapDataType, cuda.CUtensorMapSwizzle

TMA_DTYPES = {
    "fp16": int(_Dtype.CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
    "bf16": int(_Dtype.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
    "fp32": int(_Dtype.CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
    "e4m3": int(_Dtype.CU_TENSOR_MAP_DATA_TYPE_UINT8),
}
"""CUDA's number of each of our dtypes; for e4m3, which TMA does not know, that of bytes."""

TMA_SWIZZLES = {size: int(getattr(_Swizzle, f"CU_TENSOR_MAP_SWIZZLE_{size}B")) for size in (32, 64, 128)}
"""CUDA's number of the swizzle, by the bytes of a row of the box."""

_NOT_INTERLEAVED = int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)
_PROMOTE_L2_128B = int(cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B)
_ZEROS_OUTSIDE = int(cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
_ALLOW_LARGE_CLUSTERS = int(cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
_PORTABLE_CLUSTER = 8
_MAX_DYNAMIC_SHARED = int(cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_BUFFER_POINTER, _BUFFER_SIZE = int(cuda.CU_LAUNCH_PARAM_BUFFER_POINTER), int(cuda.CU_LAUNCH_PARAM_BUFFER_SIZE)
_Extra = c_void_p * 5
_PROGRAMMATIC = int(cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
_CLUSTER = int(cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of ints."""

    _fields_ = [("id", c_int), ("padding", c_int), ("value", c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("sizes", c_uint * 7),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("number", c_uint),
    ]


_STREAM, _EXTRA = _Config.stream.offset, ctypes.sizeof(_Config)
_ARGUMENTS = _EXTRA + 8
"""Where in a launch's head, which is its CUlaunchConfig and what cuLaunchKernelEx calls extra, the addresses lie that
differ from call to call: the stream's, and that of the kernel's arguments, which lie behind the head."""
_HEAD = struct.Struct(f"{_STREAM}sP{_ARGUMENTS - _STREAM - 8}sP{ctypes.sizeof(_Extra) - 16}s")


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    u64, u32 = POINTER(c_uint64), POINTER(c_uint32)
    library.cuTensorMapEncodeTiled.argtypes = [c_void_p, c_int, c_uint32, c_void_p, u64, u64, u32, u32, *[c_int] * 4]
    library.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    library.cuOccupancyMaxActiveClusters.argtypes = [POINTER(c_int), c_void_p, POINTER(_Config)]
    return library


def _check(error: int, what: str) -> None:
    if error:
        text = c_char_p()
        _driver().cuGetErrorString(error, byref(text))
        raise RuntimeError(f"{what}: CUDA driver error {error}, {(text.value or b'unknown').decode()}")


def current_stream(device: int) -> int:
    """Handle of the current stream of a device."""
    # The function that torch's own generated code uses: it costs a tenth of `torch.cuda.current_stream`.
    return torch._C._cuda_getCurrentRawStream(device)


def capture_of(stream: int) -> int:
    """Number of the capture into a CUDA graph that the stream is in; no two of a process have the same."""
    status, number = c_int(), c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(c_void_p(stream), byref(status), byref(number), None, None, None)
    _check(error, "asking which capture a stream is in")
    return number.value


def _handle(device: int) -> c_int:
    handle = c_int()
    _check(_driver().cuDeviceGet(byref(handle), device), f"finding device {device}")
    return handle


def _make_current(device: int) -> bool:
    """Give this thread the device's primary context, the one that torch uses, if it has none: whether that was so.

    A thread has none until the CUDA runtime had something to do in it; torch's own memory, for one, needs no runtime.
    """
    context = c_void_p()
    _check(_driver().cuCtxGetCurrent(byref(context)), "finding this thread's context")
    if context:
        return False
    _check(
        _driver().cuDevicePrimaryCtxRetain(byref(context), _handle(device)), f"finding the context of device {device}"
    )
    _check(_driver().cuCtxSetCurrent(context), f"making the context of device {device} current")
    return True


class TensorMap:
    """TMA descriptors (CUtensorMap) of tensors that differ in their address only;
    elements outside of them read as zeros.

    Args:
        dtype: a key of `TMA_DTYPES`.
        sizes: innermost dimension first, which is contiguous.
        strides: in bytes, of all dimensions but the innermost; multiples of 16.
        box: sizes of what one TMA instruction moves.
        row_bytes: bytes of a row of the box: 32, 64 or 128, which is the swizzle on chip.
    """

    def __init__(
        self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], row_bytes: int
    ) -> None:
        self._text = (
            f"TMA descriptor for {dtype}, sizes {sizes}, strides {strides}, box {box}, rows of {row_bytes} bytes"
        )
        self.row_bytes: int = row_bytes
        rank = len(sizes)
        self._first = (TMA_DTYPES[dtype], rank)
        sides = (c_uint64 * rank)(*sizes), (c_uint64 * (rank - 1))(*strides)
        self._shape = (*sides, (c_uint32 * rank)(*box), (c_uint32 * rank)(*[1] * rank))
        self._last = (_NOT_INTERLEAVED, TMA_SWIZZLES[row_bytes], _PROMOTE_L2_128B, _ZEROS_OUTSIDE)
        self.at: Callable[[int], bytes] = lru_cache(maxsize=1024)(self._at)

    def _at(self, address: int) -> bytes:
        """The descriptor of the tensor that starts at an address, a multiple of 16.

        Raises:
            RuntimeError: the driver refuses; the text holds the arguments.
        """
        memory = (c_char * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT))()
        start = -addressof(memory) % _TENSOR_MAP_ALIGNMENT
        arguments = (addressof(memory) + start, *self._first, address, *self._shape, *self._last)
        error = _driver().cuTensorMapEncodeTiled(*arguments)
        if error and _make_current(torch.cuda.current_device()):
            error = _driver().cuTensorMapEncodeTiled(*arguments)
        if error:
            _check(error, f"{self._text}, address {address:#x}")
        return memory.raw[start : start + _TENSOR_MAP_BYTES]


class Function:
    """A loaded kernel.

    Args:
        image: the kernel, compiled for the device's architecture.
        threads: of a block.
        shared: bytes of dynamic shared memory of a block.
        arguments: the kernel's parameters, which lie as in a C struct.

    Raises:
        RuntimeError: the driver refuses the code, or the kernel's parameters lie otherwise in memory.
    """

    def __init__(self, image: Image, threads: int, shared: int, arguments: Arguments) -> None:
        self.threads, self.shared, self.arguments = threads, shared, arguments
        self._library, self.kernel = c_void_p(), c_void_p()
        # the driver looks into a kernel only from a thread that has a context
        _make_current(torch.cuda.current_device())
        _check(
            _driver().cuLibraryLoadData(byref(self._library), image.cubin, None, None, 0, None, None, 0),
            "loading a kernel",
        )
        _check(
            _driver().cuLibraryGetKernel(byref(self.kernel), self._library, image.name.encode()),
            f"finding {image.name}",
        )
        self.start = self._offset()

    def _offset(self) -> int:
        """Where the first parameter lies; the others must follow it as in a C struct."""
        found, offset, size = [], c_size_t(), c_size_t()
        names = self.arguments.names
        for i, name in enumerate(names):
            error = _driver().cuKernelGetParamInfo(self.kernel, c_size_t(i), byref(offset), byref(size))
            _check(error, f"finding parameter {i} of {len(names)}, {name}")
            found.append((offset.value, size.value))
        start = found[0][0]
        expected = [(start + begin, size) for begin, size in self.arguments.places]
        if found != expected:
            text = f"the kernel's parameters lie at (offset, size) {found}, expected {expected}"
            raise RuntimeError(f"{text}: not the layout of nvidia-cutlass-dsl 4.8.1, with which this is known to work")
        return start

    @cache  # noqa: B019 - as many as devices, and a Function lives as long as the process
    def _prepare(self, device: int) -> None:
        if self.shared > 48 << 10:
            error = _driver().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, self.shared, self.kernel, _handle(device))
            _check(error, f"asking for {self.shared} bytes of shared memory on device {device}")

    def clusters(self, device: int, cluster: int) -> int:
        """How many clusters of so many thread blocks run at a time on a device."""
        self._prepare(device)
        attributes = (_Attribute * 1)(_Attribute(_CLUSTER, 0, (c_int * 16)(cluster, 1, 1)))
        config = _Config((c_uint * 7)(cluster, 1, 1, self.threads, 1, 1, self.shared), None, attributes, 1)
        found = c_int()
        with torch.cuda.device(device):  # the driver asks of the current one
            _make_current(device)
            error = _driver().cuOccupancyMaxActiveClusters(byref(found), self.kernel, byref(config))
        _check(error, f"asking how many clusters of {cluster} thread blocks device {device} runs")
        return found.value

    def bind(
        self,
        device: int,
        blocks: int,
        fixed: Mapping[str, int],
        given: tuple[str, ...],
        programmatic: bool = False,
        cluster: int = 1,
    ) -> Launch:
        """A launch of `blocks` thread blocks on a device; `fixed` and `given` as in `Packer`,
        `programmatic` and `cluster` as in `Launch`."""
        self._prepare(device)
        if cluster > _PORTABLE_CLUSTER:
            error = _driver().cuKernelSetAttribute(_ALLOW_LARGE_CLUSTERS, 1, self.kernel, _handle(device))
            _check(error, f"asking for clusters of {cluster} thread blocks on device {device}")
        return Launch(self, device, blocks, fixed, given, programmatic, cluster)


class Launch:
    """A kernel and all arguments but those that differ from call to call.

    Args:
        function: the kernel, prepared for the device.
        device: index of the GPU.
        blocks: how many thread blocks.
        fixed, given: its arguments, as in `Packer`.
        programmatic: it begins before the stream's last launch has ended,
            for which the kernel itself waits (griddepcontrol.wait).
        cluster: how many thread blocks begin together and see each other's shared memory.
    """

    def __init__(
        self,
        function: Function,
        device: int,
        blocks: int,
        fixed: Mapping[str, int],
        given: tuple[str, ...],
        programmatic: bool = False,
        cluster: int = 1,
    ) -> None:
        self._device, self._kernel = device, function.kernel
        asked = [(_PROGRAMMATIC, (1,))] * programmatic + [(_CLUSTER, (cluster, 1, 1))] * (cluster > 1)
        attributes = [_Attribute(number, 0, (c_int * 16)(*value)) for number, value in asked]
        self._attributes = (_Attribute * len(attributes))(*attributes)
        sizes = (c_uint * 7)(blocks, 1, 1, function.threads, 1, 1, function.shared)
        config = _Config(sizes, None, self._attributes, len(attributes))
        self._pack = Packer(function.arguments, _HEAD.size + function.start, fixed, given)
        self._size = c_size_t(self._pack.size - _HEAD.size)
        head = bytes(config) + bytes(_Extra(_BUFFER_POINTER, 0, _BUFFER_SIZE, addressof(self._size), 0))
        self._head = head[:_STREAM], head[_STREAM + 8 : _ARGUMENTS], head[_ARGUMENTS + 8 :]

    def __call__(self, stream: int, *given: bytes | int | float) -> None:
        """Launch on a stream of the current device, which is the launch's.

        Raises:
            RuntimeError: the driver refuses.
        """
        # One piece of memory, as Python writes to it in a third of the time that ctypes takes to make each of these.
        memory, (sizes, attributes, size) = self._pack(given), self._head
        address = addressof(memory)
        _HEAD.pack_into(memory, 0, sizes, stream, attributes, address + _HEAD.size, size)
        error = self._launch(address)
        if error and _make_current(self._device):
            error = self._launch(address)
        if error:
            _check(error, "launching a kernel")

    def _launch(self, address: int) -> int:
        return _driver().cuLaunchKernelEx(address, self._kernel, None, address + _EXTRA)
