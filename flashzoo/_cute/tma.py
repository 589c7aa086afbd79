"""Which tensors TMA can read where they lie, and their descriptors."""

from __future__ import annotations

import torch
from torch import Tensor

from flashzoo._cute.driver import TensorMap
from flashzoo.dtypes import BYTES
from flashzoo.gpu import RAGGED_ROWS, ragged_back

Ints = tuple[int, ...]


def readable(shape: Ints, strides: Ints, address: int = 0, size: int = 2) -> bool:
    """Whether TMA can read a tensor where it lies: rows without gaps, start and strides in steps of 16 bytes,
    nothing broadcast.

    `size` is an element's, in bytes.
    """
    steps = [size * stride for stride, length in zip(strides[:-1], shape[:-1], strict=True) if length > 1]
    return strides[-1] == 1 and not address & 15 and all(step > 0 and step % 16 == 0 for step in steps)


def made_readable(x: Tensor) -> Tensor:
    """The tensor, or a copy if TMA can't read it where it lies."""
    if readable(x.shape, x.stride(), x.data_ptr(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def dense(shape: Ints, order: Ints) -> Ints:
    """Strides of a tensor without gaps, whose dimensions lie in memory in the order that the strides `order` give."""
    strides, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=order.__getitem__):
        strides[i], step = step, step * shape[i]
    return tuple(strides)


def in_bytes(dtype: str, strides: Ints, sizes: Ints) -> list[int]:
    """Strides in bytes. That of a dimension of size 1 means nothing to torch and may be anything,
    but TMA wants multiples of 16."""
    return [BYTES[dtype] * stride if size > 1 else 16 for stride, size in zip(strides, sizes, strict=False)]


def tensor_map(dtype: str, sizes: Ints, strides: Ints, width: int, box: Ints) -> TensorMap:
    """Descriptors for tiles of that width: rows on chip are 128 bytes, or the half or a quarter where those divide it.

    Args:
        dtype: of the tensor.
        sizes: innermost dimension first.
        strides: in bytes, of all dimensions but the innermost.
        width: of a tile, in elements.
        box: sizes of what one instruction moves, but for the innermost dimension's.
    """
    size = BYTES[dtype]
    row_bytes = next(row_bytes for row_bytes in (128, 64, 32) if size * width % row_bytes == 0)
    return TensorMap(dtype, sizes, strides, (row_bytes // size, *box), row_bytes)


def map_of_rows(
    dtype: str, shape: Ints, strides: Ints, width: int, rows: int, heads: int = 1, ragged: bool = False
) -> TensorMap:
    """Descriptors of a tensor `(batch, seqlen, heads, head_dim)`, as head dim, heads, seqlen, batch,
    for boxes of so many rows and heads.

    Ragged, where the batch is one that sequences of many lengths are packed in, as head dim, heads, row, end, back: at
    `(row, end, back)` `(R - n + i, end, R)`, where R is `RAGGED_ROWS`, lies row i of the n rows before row `end`. They
    are the last of the dimension, and what follows them is outside of it: zeros to read, and not written. R rows back
    is as far as R rows of the dimension are forward: R times its stride is that less 2^64, which addresses are taken
    modulo. So coordinates that are all 0 are the tensor's first element, and nothing of a box is anywhere but in the
    tensor: TMA faults at a load whose descriptor begins where no memory is, though it reads nothing there. (Triton's
    `ragged_tma` and quack have the same trick.)
    """
    batch, seqlen, of_heads, head_dim = shape
    by_batch, by_row, by_head = in_bytes(dtype, strides, shape[:3])
    if not ragged:
        return tensor_map(
            dtype, (head_dim, of_heads, seqlen, batch), (by_head, by_row, by_batch), width, (heads, rows, 1)
        )
    sizes = (head_dim, of_heads, RAGGED_ROWS, seqlen + 1, RAGGED_ROWS + 1)
    return tensor_map(dtype, sizes, (by_head, by_row, by_row, ragged_back(by_row)), width, (heads, rows, 1, 1))
