"""FlashAttention-3 on the host: outputs, TMA descriptors, launches;
delta before and dQ's rounding after the backward kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashzoo._cute.driver import TensorMap, current_stream
from flashzoo._cute.per_stream import tile_counter
from flashzoo._cute.scale import in_log2
from flashzoo._cute.scoring import arguments_of_scoring, pairs_of, parameters_of
from flashzoo._cute.tma import Ints, dense, made_readable, map_of_rows, readable, tensor_map
from flashzoo.autograd import differentiable
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.dtypes import BYTES, TORCH_DTYPES
from flashzoo.gpu import MULTIPROCESSORS, WARPGROUP_ROWS
from flashzoo.integers import cdiv, next_power_of_2
from flashzoo.masks.block_mask import BlockMask
from flashzoo.masks.lists import Lists
from flashzoo.tiles import block_d
from flashzoo.v3.config import kernel_backward_for, kernel_for, pack_gqa_for, splits_for, window_of
from flashzoo.v3.programs import LISTS, PARAMS, TABLE, WORKSPACE, function_for
from flashzoo.v3.swizzle import swizzle_backward, swizzle_of
from flashzoo.v3.traits import Kernel, KernelBackward, KernelFp8

if TYPE_CHECKING:
    from flashzoo._triton import Launch as TritonLaunch

SCALE = ("scale_log2",)
"""Names of the arguments that scale a kernel's scores, of one in 16 bits."""

# Heads whose tiles are interleaved in deterministic mode, where tiles of one head add to dQ one after the other, and
# would wait if they ran at the same time. By whether tiles are cut by gradient (there a head leaves L2 sooner), and
# whether some are longer.
DETERMINISTIC_SWIZZLE = {(False, False): 32, (False, True): 64, (True, False): 8, (True, True): 32}


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA tensors; see `flashzoo.attention`. Causal and window are in the block mask, where there
    is one. Packed rows may be of three dimensions, as those of a batch of one are."""
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    strides, pairs = (q.stride(), k.stride(), v.stride()), pairs_of(operands.score_mod)
    launch = None if misaligned else forward_launch(problem, *strides, q.get_device(), pairs)
    if launch is None:
        return forward(made_readable(q), made_readable(k), made_readable(v), problem, operands)
    mask, (tiles, _) = operands.block_mask, tables(problem, operands, launch.block_q)
    lists = () if mask is None else lists_of(mask, mask.rows)
    more = () if tiles is None else (tiles.data_ptr(),)
    read = arguments_of_scoring(operands.score_mod, q.data_ptr())
    return launch(q, k, v, *lists, *more, in_log2(problem.scale), *addresses_of(operands.sinks), *read)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Tensor, ...]:
    """`(dq, dk, dv)` of CUDA tensors, with sinks their gradient too: delta, the kernel, dQ rounded.
    Packed rows as `forward` has them."""
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15
    strides = q.stride(), k.stride(), v.stride(), dout.stride()
    launch = None if misaligned else backward_launch(problem, *strides, out.stride(), dlse is not None, q.get_device())
    if launch is None:
        q, k, v, dout = (made_readable(x) for x in (q, k, v, dout))
        return backward(dout, dlse, q, k, v, out, lse, problem, operands)
    mask, tiles = operands.block_mask, tables(problem, operands, launch.block_q, launch.block_kv)
    lists = () if mask is None else lists_of(mask, mask.columns)
    read = tuple(arguments_of_scoring(operands.score_mod, k.data_ptr()))
    return launch(dout, dlse, q, k, v, out, lse, lists, tiles, operands.sinks, read)


attention: Callable[..., tuple[Tensor, Tensor | None]] = differentiable(forward, backward, rows=True)


def tables(
    problem: Problem, operands: Operands, block_q: int, block_kv: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """Packed sequences' table of blocks of so many queries, and that of keys if asked for;
    None where nothing is packed."""
    if problem.sequences is None:
        return None, None
    return _tiles_of()(problem, operands, block_q, block_kv)


@cache
def _tiles_of() -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    from flashzoo._triton.packed import tiles_of  # here, so that a process that packs nothing loads no Triton

    return tiles_of


def lists_of(mask: BlockMask, lists: Lists) -> Ints:
    """What a kernel takes of a block mask and its rows or columns: `programs.LISTS`.

    Strides over batch and heads are in heads, 0 where shared; bits start at a multiple of 16 bytes.
    """
    bits, counts = mask.element.bits, lists.counts.data_ptr()
    # Where lists have no room for anything they have no address either, and their first entry is read all the same.
    addresses = (lists.order.data_ptr(), counts, lists.full.data_ptr(), lists.indices.data_ptr() or counts)
    of_bits = (
        (0, 0) if bits is None or lists.bit_index is None else (lists.bit_index.data_ptr() or counts, bits.data_ptr())
    )
    strides = mask.heads if mask.batch > 1 else 0, int(mask.heads > 1)
    return (*strides, lists.width, 0 if bits is None else bits.shape[2], *addresses, *of_bits)


def of_batch(*strides: Ints) -> tuple[Ints, ...]:
    """Strides of tensors of four dimensions, of those that have them and of packed rows:
    over a batch of one nobody steps."""
    return tuple([x if len(x) == 4 else (0, *x) for x in strides])


def all_readable(problem: Problem, *strides: Ints) -> bool:
    """Whether TMA can read q, k and v, and dout if that is given, of these strides, wherever they start."""
    p, strides = problem, of_batch(*strides)
    of_keys = [(p.batch, p.seqlen_k, p.heads_kv, head_dim) for head_dim in (p.head_dim, p.head_dim_v)]
    shapes = ((p.batch, p.seqlen_q, p.heads, p.head_dim), *of_keys, (p.batch, p.seqlen_q, p.heads, p.head_dim_v))
    return all(readable(*pair) for pair in zip(shapes, strides, strict=False))


@lru_cache(maxsize=1024)
def forward_launch(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int, pairs: tuple[bool, ...] = ()
) -> ForwardLaunch | None:
    """The launch for a problem, or None where TMA can't read tensors of these strides; `pairs` as in `Scoring`."""
    if not all_readable(problem, q_strides, k_strides, v_strides):
        return None
    kernel = kernel_for(problem, pairs)
    return ForwardLaunch(
        problem,
        kernel,
        q_strides,
        k_strides,
        v_strides,
        device,
        (*of_parts(problem), *SCALE, *of_sinks(problem), *of_scoring(kernel)),
    )


def of_parts(problem: Problem) -> tuple[str, ...]:
    """Names of a kernel's arguments that say which blocks a tile walks, or which tiles there are."""
    return tuple(LISTS) if problem.block_mask is not None else tuple(TABLE) if problem.sequences is not None else ()


def of_sinks(problem: Problem) -> tuple[str, ...]:
    """Name of a forward kernel's argument behind the scale, where it has it."""
    return ("sinks",) if problem.sinks else ()


def of_scoring(kernel: Kernel | KernelBackward) -> tuple[str, ...]:
    """Names of a kernel's last arguments: the tensors that a function on scores reads."""
    return tuple(parameters_of(kernel.scoring))


def addresses_of(sinks: Tensor | None) -> Ints:
    """That argument."""
    return () if sinks is None else (sinks.data_ptr(),)


class ForwardLaunch:
    """A forward kernel with everything about a call that its data don't decide, so that a call costs little host time.

    Args:
        problem: the sizes.
        kernel: what runs; any that fits the problem, of which `kernel_for(problem)` is the fastest known.
        q_strides, k_strides, v_strides: such that `readable`; of `quantize.transpose_v` of v where the
            kernel takes that. Three each of packed rows, out and lse being such too.
        device: index of the GPU.
        more: names of the kernel's arguments that a call gives behind its tensors.

    Attributes:
        block_q: queries of a tile, of one head.
    """

    def __init__(
        self,
        problem: Problem,
        kernel: Kernel,
        q_strides: Ints,
        k_strides: Ints,
        v_strides: Ints,
        device: int,
        more: tuple[str, ...] = SCALE,
    ) -> None:
        p, tiles, rows = problem, kernel.tiles, len(q_strides) == 3
        q_strides, k_strides, v_strides = of_batch(q_strides, k_strides, v_strides)
        self._device = device
        of_out, of_lse = (p.batch, p.seqlen_q, p.heads, p.head_dim_v), (p.batch, p.heads, p.seqlen_q)
        out_strides = dense(of_out, q_strides)
        self._out_shape, self._out_strides, self._lse_shape = (x[rows:] for x in (of_out, out_strides, of_lse))
        self._out_dtype = TORCH_DTYPES[kernel.out_dtype]

        pack = pack_gqa_for(p, tiles.block_q)
        self.block_q: int = tiles.block_q >> pack
        of_q, of_k = (p.batch, p.seqlen_q, p.heads, p.head_dim), (p.batch, p.seqlen_k, p.heads_kv, p.head_dim)
        # the packed heads of a query side by side
        box, ragged = (WARPGROUP_ROWS >> pack, 1 << pack), p.sequences is not None
        self._q = map_of_rows(kernel.dtype, of_q, q_strides, kernel.width, *box, ragged=ragged)
        self._k = map_of_rows(kernel.dtype, of_k, k_strides, kernel.width, tiles.block_kv, ragged=ragged)
        self._v = _map_of_v(p, kernel, v_strides)
        self._out = map_of_rows(kernel.out_dtype, of_out, out_strides, kernel.width_o, *box, ragged=ragged)

        heads, group = p.heads >> pack, p.heads // p.heads_kv >> pack
        blocks_q, batch_heads = cdiv(p.seqlen_q << pack, tiles.block_q), p.batch * heads
        if p.sequences is not None:
            blocks_q = p.entries(p.seqlen_q, self.block_q)
        swizzle = 1
        if kernel.right and not kernel.left and p.sequences is None:  # else tiles are as long, or in a table's order
            bytes_of_head = BYTES[kernel.dtype] * p.seqlen_k * (p.head_dim + p.head_dim_v)
            swizzle = swizzle_of(blocks_q, batch_heads, bytes_of_head, group)
        params = _params(p, blocks_q, batch_heads, swizzle, heads=heads, group=group, group_kv=group, pack_gqa=pack)
        blocks = min(_multiprocessors(device), cdiv(blocks_q * batch_heads, tiles.teams))
        given = ("q", "k", "v", "out", "lse", "counter", *more)
        self._launch = function_for(kernel).bind(device, blocks, params, given)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: float) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, launched on the current stream of the tensors' device."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(q, k, v, *more)
        out = torch.empty_strided(self._out_shape, self._out_strides, dtype=self._out_dtype, device=q.device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=q.device)
        stream = current_stream(self._device)
        self._launch(
            stream,
            self._q.at(q.data_ptr()),
            self._k.at(k.data_ptr()),
            self._v.at(v.data_ptr()),
            self._out.at(out.data_ptr()),
            lse.data_ptr(),
            tile_counter(self._device, stream).data_ptr(),
            *more,
        )
        return out, lse


def _map_of_v(problem: Problem, kernel: Kernel, strides: Ints) -> TensorMap:
    """As `map_of_rows` has it; where an FP8 kernel takes v transposed keys, heads, head dim, batch."""
    p, block_kv = problem, kernel.tiles.block_kv
    if isinstance(kernel, KernelFp8) and kernel.transposed:
        batch, head, row, _ = strides
        sizes = (row, p.heads_kv, p.head_dim, p.batch)  # a row is as long as there are keys, padded
        return tensor_map(kernel.dtype, sizes, (head, row, batch), block_kv, (1, kernel.width_v, 1))
    of_v = (p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v)
    columns = kernel.width_v // kernel.parts_v
    return map_of_rows(kernel.dtype, of_v, strides, columns, block_kv, ragged=p.sequences is not None)


def _params(problem: Problem, blocks: int, batch_heads: int, swizzle: int, **others: int) -> dict[str, int]:
    """`programs.PARAMS` but for the counter, in order; what one pass does not give is what changes nothing."""
    window_left, window_right = problem.reach_of(window_of(problem))
    given = {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window_left": window_left,
        "window_right": window_right,
        "blocks": blocks,
        "batch_heads": batch_heads,
        "l2_swizzle": min(batch_heads, swizzle),
    }
    given |= {"splits": 1, "query_splits": 1, "pack_gqa": 0, "wave": 1} | others
    return {name: given[name] for name in PARAMS if name in given}


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def backward_launch(
    problem: Problem,
    q_strides: Ints,
    k_strides: Ints,
    v_strides: Ints,
    dout_strides: Ints,
    out_strides: Ints,
    dlse: bool,
    device: int,
) -> BackwardLaunch | None:
    """The launches for a problem, or None where TMA can't read tensors of these strides."""
    strides = (q_strides, k_strides, v_strides, dout_strides)
    if not all_readable(problem, *strides):
        return None
    return BackwardLaunch(problem, kernel_backward_for(problem), strides, out_strides, dlse, device)


class BackwardLaunch:
    """The backward kernel, and those before and after it, with everything about a call that its data don't decide.

    Args:
        problem: the sizes.
        kernel: what runs; any that fits the problem.
        strides: of q, k, v and dout, such that `readable`. Three each of packed rows, gradients being such too.
        out_strides: any.
        dlse: whether LSE has a gradient.
        device: index of the GPU.

    Attributes:
        block_q, block_kv: queries of a block, and keys of a tile.
    """

    def __init__(
        self,
        problem: Problem,
        kernel: KernelBackward,
        strides: tuple[Ints, Ints, Ints, Ints],
        out_strides: Ints,
        dlse: bool,
        device: int,
    ) -> None:
        p, tiles, packed = problem, kernel.tiles, len(out_strides) == 3
        q_strides, k_strides, v_strides, dout_strides, out_strides = of_batch(*strides, out_strides)
        self._device = device
        of_q, of_out = (p.batch, p.seqlen_q, p.heads, p.head_dim), (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        of_k, of_v = ((p.batch, p.seqlen_k, p.heads_kv, head_dim) for head_dim in (p.head_dim, p.head_dim_v))
        dq_strides, dk_strides, dv_strides = dense(of_q, q_strides), dense(of_k, k_strides), dense(of_v, v_strides)
        self._gradients = [
            (shape[packed:], x[packed:]) for shape, x in ((of_q, dq_strides), (of_k, dk_strides), (of_v, dv_strides))
        ]
        self._dtype = TORCH_DTYPES[kernel.dtype]
        self.block_q: int = tiles.block_q
        self.block_kv: int = tiles.block_kv
        blocks_q, blocks = _blocks_q(p, kernel), kernel.blocks_kv(p.seqlen_k)
        if p.sequences is not None:
            blocks = p.entries(p.seqlen_k, tiles.block_kv)
        blocks_of_all = p.batch * p.heads * blocks_q
        self._sinks_shape = (p.batch, p.heads, blocks_q)

        map_of = partial(map_of_rows, p.dtype, ragged=p.sequences is not None)
        rows_loaded = tiles.block_q // kernel.cluster
        self._q = map_of(of_q, q_strides, kernel.width, rows_loaded)
        self._dout = map_of(of_out, dout_strides, kernel.width_v, rows_loaded)
        self._k, self._dk = (map_of(of_k, x, kernel.swizzled_k, tiles.block_kv) for x in (k_strides, dk_strides))
        self._v, self._dv = (map_of(of_v, x, kernel.width_v, tiles.block_kv) for x in (v_strides, dv_strides))

        splits = splits_for(p)
        group, batch_heads = cdiv(p.heads // p.heads_kv, splits), p.batch * p.heads_kv * splits
        keys = blocks * batch_heads * tiles.block_kv
        parts = [keys * width if kernel.split_queries else 0 for width in (kernel.width, kernel.width_v)]
        function, at_once = function_for(kernel), _multiprocessors(device)
        if kernel.cluster > 1:
            at_once = kernel.cluster * function.clusters(device, kernel.cluster)
        thread_blocks = min(at_once, batch_heads if kernel.by_head else blocks * batch_heads)
        rows, semaphores = blocks_of_all * tiles.block_q, blocks_of_all * kernel.semaphores * kernel.deterministic
        numbers_of_dq = kernel.numbers_of_dq(blocks_q, p.batch * p.heads, thread_blocks)
        self._workspace, self._numbers = _places(rows, rows, numbers_of_dq, semaphores, *parts)
        uneven = kernel.right and not kernel.left and p.sequences is None
        swizzle = wave = 1
        if kernel.by_head:
            wave = 0
        elif kernel.deterministic:
            swizzle = DETERMINISTIC_SWIZZLE[tiles.by_gradient, uneven]
        elif uneven:
            swizzle, wave = swizzle_backward(blocks, batch_heads, group)
            wave //= kernel.cluster
        elif kernel.uneven:  # entries of a table, in its order
            wave = MULTIPROCESSORS[90]
        of_heads = {"heads": p.heads_kv * splits, "group": group, "group_kv": p.heads // p.heads_kv}
        of_heads |= {"splits": splits, "query_splits": splits if p.heads == p.heads_kv else 1}
        params = _params(p, blocks, batch_heads, swizzle, wave=wave, **of_heads)
        given = (
            "q",
            "k",
            "v",
            "dout",
            "dk",
            "dv",
            *(() if kernel.dq_sums else ("dq_rounded",)),
            *WORKSPACE,
            "counter",
            *of_parts(p),
            *SCALE,
            "scale",
            *of_scoring(kernel),
        )
        self._launch = function.bind(device, thread_blocks, params, given, cluster=kernel.cluster)
        self._scales = in_log2(p.scale), p.scale
        self._delta = delta_launch(p, kernel, out_strides, dout_strides, dlse)
        self._dq = None if kernel.dq_sums else map_of(of_q, dq_strides, kernel.swizzled_k, tiles.block_q)
        self._after = None
        if kernel.dq_sums or splits > 1:
            self._after = round_and_sum_launch(p, kernel, blocks, splits, dq_strides, dk_strides, dv_strides)

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lists: Ints = (),
        tiles: tuple[Tensor | None, Tensor | None] = (None, None),
        sinks: Tensor | None = None,
        read: Ints = (),
    ) -> tuple[Tensor, ...]:
        """`(dq, dk, dv)`, and dsinks where there are sinks, launched on the current stream of the tensors' device;
        `lists` as `lists_of` gives them, `tiles` as `tables`, and `read` as `arguments_of_scoring`."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(dout, dlse, q, k, v, out, lse, lists, tiles, sinks, read)
        device = q.device
        dq, dk, dv = [
            torch.empty_strided(shape, strides, dtype=self._dtype, device=device) for shape, strides in self._gradients
        ]
        # All that no caller sees is one tensor, as each costs the host more than a microsecond.
        scratch = torch.empty(self._numbers, dtype=torch.float32, device=device)
        start = scratch.data_ptr()
        lse_log2, delta, dq_sum, dq_semaphore, *parts = workspace = [start + place for place in self._workspace]
        tiles_q, tiles_k = [x if x is None else x.data_ptr() for x in tiles]
        dlse = lse if dlse is None else dlse.contiguous()
        # Of packed sequences some programs have no block.
        dsinks = None if sinks is None else torch.zeros(self._sinks_shape, dtype=torch.float32, device=device)
        of_sinks = [x if x is None else x.data_ptr() for x in (sinks, dsinks)]
        of_dout, of_dq, of_dk, of_dv = dout.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        of_rows = (out.data_ptr(), of_dout, lse.data_ptr(), dlse.data_ptr(), delta, lse_log2, dq_sum, dq_semaphore)
        stream, (scale_log2, scale) = current_stream(self._device), self._scales
        self._delta.at(self._device, stream, (*of_rows, tiles_q, *of_sinks))
        self._launch(
            stream,
            self._q.at(q.data_ptr()),
            self._k.at(k.data_ptr()),
            self._v.at(v.data_ptr()),
            self._dout.at(of_dout),
            self._dk.at(of_dk),
            self._dv.at(of_dv),
            *(() if self._dq is None else (self._dq.at(of_dq),)),
            *workspace,
            tile_counter(self._device, stream).data_ptr(),
            *lists,
            *(() if tiles_k is None else (tiles_k,)),
            scale_log2,
            scale,
            *read,
        )
        if self._after is not None:
            self._after.at(self._device, stream, (dq_sum, of_dq, tiles_q, *parts, of_dk, of_dv, tiles_k), (scale,))
        return (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks.sum((0, 2)))


def _places(*sizes: int) -> tuple[list[int], int]:
    """Where in one piece of memory arrays of so many numbers of 4 bytes lie, in bytes, and of how many it is. Each
    begins at a multiple of 512 bytes, as torch's allocator has them begin. The last may be empty, and Triton's launcher
    asks the driver for its address too: so there is one number more."""
    *places, total = accumulate((cdiv(size, 128) * 128 for size in sizes), initial=0)
    return [4 * place for place in places], total + 1


def _blocks_q(problem: Problem, kernel: KernelBackward) -> int:
    """Blocks of queries of a head that LSE, delta and dQ's sums have room for."""
    p = problem
    return kernel.blocks_q(p.seqlen_q) if p.sequences is None else p.entries(p.seqlen_q, kernel.tiles.block_q)


def delta_launch(
    problem: Problem, kernel: KernelBackward, out_strides: Ints, dout_strides: Ints, dlse: bool
) -> TritonLaunch:
    """The launch of `delta_kernel`."""
    from flashzoo._triton import Launch  # here, so that a process that only asks what would run loads no Triton
    from flashzoo.v3.delta import delta_kernel

    p, block_q = problem, kernel.tiles.block_q
    blocks, dtype = _blocks_q(p, kernel), TORCH_DTYPES[kernel.dtype]
    sizes = {"HEAD_DIM_V": p.head_dim_v, "BLOCK_DV": block_d(p.head_dim_v), "SUMS": kernel.dq_sums}
    return Launch(
        delta_kernel,
        blocks * p.batch * p.heads,
        (*out_strides[:3], *dout_strides[:3], p.seqlen_q, blocks, p.heads),
        {
            **sizes,
            "BLOCK_Q": block_q,
            "ROWS": next_power_of_2(block_q, 16),
            "DLSE": dlse,
            "SEMAPHORES": kernel.semaphores if kernel.deterministic else 0,
            "ALIGNED": _divides(*out_strides[:3], *dout_strides[:3]),
            "PACKED": p.sequences is not None,
        },
        num_warps=4,
        num_stages=1,
        dtypes=(dtype, dtype, *[torch.float32] * 5, *[torch.int32] * 2, *[torch.float32] * 2),
    )


def _divides(*strides: int) -> int:
    """What of 16 bytes divides strides of 16-bit numbers."""
    return math.gcd(8, *strides)


def round_and_sum_launch(
    problem: Problem,
    kernel: KernelBackward,
    blocks_kv: int,
    splits: int,
    dq_strides: Ints,
    dk_strides: Ints,
    dv_strides: Ints,
) -> TritonLaunch:
    """The launch of `round_and_sum_kernel`, of so many blocks of keys for each key/value head, or in packed sequences'
    table."""
    from flashzoo._triton import Launch
    from flashzoo.v3.delta import round_and_sum_kernel

    p, tiles, (_, columns), widths = problem, kernel.tiles, kernel.dq_part, (kernel.width, kernel.width_v)
    blocks_q, step = _blocks_q(p, kernel), min(32, *[width & -width for width in widths])
    of_queries = blocks_q * kernel.dq_parts * p.batch * p.heads if kernel.dq_sums else 0
    of_keys = blocks_kv * p.batch * p.heads_kv * (tiles.block_kv // WARPGROUP_ROWS) * (sum(widths) // step)
    of_dq = {
        "BLOCK_Q": tiles.block_q,
        "PARTS": kernel.dq_parts,
        "BY_ROWS": kernel.dq_by_rows,
        "N_Q": columns,
        "STEP_Q": columns & -columns,
        "ALIGNED_Q": _divides(*dq_strides[:3]),
    }
    of_parts = {
        "N": widths[0],
        "N_V": widths[1],
        "BLOCK_KV": tiles.block_kv,
        "SPLITS": splits,
        "STEP": step,
        "ALIGNED": _divides(*dk_strides[:3], *dv_strides[:3]),
    }
    strides, sizes = (*dq_strides[:3], *dk_strides[:3], *dv_strides[:3]), (p.seqlen_q, blocks_q, p.heads)
    return Launch(
        round_and_sum_kernel,
        of_queries + of_keys * (splits > 1),
        (*strides, *sizes, p.seqlen_k, blocks_kv, p.heads_kv, of_queries),
        {
            "HEAD_DIM": p.head_dim,
            "HEAD_DIM_V": p.head_dim_v,
            **of_dq,
            **of_parts,
            "PACKED": p.sequences is not None,
        },
        num_warps=4,
        num_stages=1,
        aligned=True,
        dtypes=(
            *(torch.float32, dtype := TORCH_DTYPES[kernel.dtype], torch.int32),
            *(torch.float32, torch.float32, dtype, dtype, torch.int32),
        ),
    )
