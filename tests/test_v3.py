"""What is special to v3: how a problem becomes a kernel, and what only its host code can get wrong."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import struct
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise, product
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import pytest
import torch

from flashzoo import Problem
from flashzoo._cute import driver
from flashzoo._cute.arguments import FLOAT, INT, LONG, Arguments, Packer, Record
from flashzoo._cute.cache import ENVIRONMENT
from flashzoo._cute.per_stream import PerStream, tile_counter
from flashzoo._cute.scale import in_log2
from flashzoo._cute.tma import readable
from flashzoo.accuracy import Judge
from flashzoo.gpu import SHARED_LIMIT, WARPGROUP_ROWS
from flashzoo.inputs import LAYOUTS
from flashzoo.reference import Result
from flashzoo.v3 import launch, launch_fp8, programs
from flashzoo.v3.config import (
    HOPPER,
    OTHERS,
    WIDTHS,
    kernel_for,
    kernel_fp8_for,
    pack_gqa_for,
    padded,
    prepares,
    speeds_of,
)
from flashzoo.v3.explain import describe, describe_fp8
from flashzoo_suite.support import ROOT, accept, draw, forward, in_fresh_process, same_bits, storage_of

gpu = pytest.mark.gpu
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="v3 runs on Hopper, sm_90, alone"
)
PLAIN = Problem(batch=1, seqlen_q=128, seqlen_k=128, heads=2, heads_kv=2, head_dim=64, arch=90)


def test_threads_that_compile_at_once(monkeypatch):
    """CuTe DSL compiles one program at a time, in one thread; two threads' first calls come at any time."""
    monkeypatch.setenv(ENVIRONMENT, "off")
    monkeypatch.setattr(programs, "Function", lambda image, *_: image)
    programs.function_for.cache_clear()
    kernels = [kernel_for(replace(PLAIN, causal=causal)) for causal in (False, True)]
    images = {}
    threads = [
        threading.Thread(target=lambda k=kernel: images.update({k: programs.function_for(k)})) for kernel in kernels
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    programs.function_for.cache_clear()
    assert images.keys() == set(kernels) and len({image.cubin for image in images.values()}) == 2


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen", "sequences"), [(128, None), (2048, None), (8192, None), (8192, 3)], ids=str)
def test_fast_accum_has_kernels_of_one_level_where_these_are_faster(head_dim, seqlen, sequences):
    changes = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": seqlen, "seqlen_k": seqlen}
    plain = replace(PLAIN, dtype="e4m3", sequences=sequences, **changes)
    fast = replace(plain, fast_accum=True)
    least = {64: (2048, 2048), 128: (4096, 4096), 256: (4096, 2048)}[head_dim]
    assert [prepares(problem) for problem in (plain, fast)] == [seqlen >= n and not sequences for n in least]
    two, one = (kernel_fp8_for(problem, False, prepares(problem)) for problem in (plain, fast))
    assert two.two_level and not two.tiles.overlap and "promoted to float32" in describe_fp8(plain)[0]
    faster = prepares(fast) and head_dim != 128
    assert one.tiles.overlap and one.transposed and not one.two_level if faster else one == two
    in_words = "\n".join(describe_fp8(fast))
    assert ("fast_accum: not used" in in_words) is not faster
    assert ("O summed by the tensor core alone" in in_words) is faster


def test_v_is_transposed_beforehand_where_its_keys_are_seen_often():
    """A mask that halves what is seen halves what it saves."""
    problem = replace(PLAIN, dtype="e4m3", head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_k=4096)
    assert (
        prepares(problem) and prepares(replace(problem, seqlen_k=100)) and not prepares(replace(problem, causal=True))
    )
    assert prepares(replace(problem, seqlen_q=8192, seqlen_k=8192, causal=True))
    assert not prepares(replace(problem, window=(1000, 1000)))


# A kernel's arguments.


def packed(arguments: Arguments, fixed: dict[str, int], given: dict[str, object]) -> tuple[object, ...]:
    """What a launch puts into memory for the kernel, behind 16 bytes of something else."""
    memory = Packer(arguments, 16, fixed, tuple(given))(tuple(given.values())).raw
    return struct.unpack("@" + "".join(arguments.formats), memory[16:])


def test_arguments_lie_as_in_a_c_struct_whichever_are_fixed():
    kernel = kernel_fp8_for(replace(PLAIN, dtype="e4m3"), True, False)
    arguments = programs.arguments_of(kernel)
    values = {
        name: {"i": i, "Q": i << 40, "f": i / 2, "128s": bytes([i]) * 128}[kind]
        for i, (name, kind) in enumerate(zip(arguments.names, arguments.formats, strict=True))
    }
    names = arguments.names
    for begin, end in ((0, 0), (5, 15), (0, 4), (len(names) - 3, len(names)), (16, 22)):
        fixed = {name: values[name] for name in names[begin:end]}
        given = {name: values[name] for name in names if name not in fixed}
        assert packed(arguments, fixed, given) == tuple(values.values())


@pytest.mark.parametrize("change", ["one too few", "one too many", "another order", "fixed ones apart"])
def test_a_launch_with_other_arguments_than_the_kernels_is_refused(change):
    arguments = Arguments(a=INT, b=INT, c=FLOAT, d=FLOAT)
    fixed, given = {
        "one too few": ({"b": 1}, ("a", "c")),
        "one too many": ({"b": 1}, ("a", "c", "d", "e")),
        "another order": ({"b": 1}, ("a", "d", "c")),
        "fixed ones apart": ({"a": 1, "c": 2.0}, ("b", "d")),
    }[change]
    assert packed(arguments, {"b": 1}, {"a": 0, "c": 2.0, "d": 3.0}) == (0, 1, 2.0, 3.0)
    with pytest.raises(TypeError, match=r"the kernel's arguments are \('a', 'b', 'c', 'd'\), got "):
        Packer(arguments, 0, fixed, given)


def test_a_record_has_the_fields_that_are_declared():
    swapped = {name: INT for name in ("batch", "values", "head", "block")}
    with pytest.raises(
        TypeError, match=r"fp8:Descale must have the fields .*'batch', 'values'.*, got .*'values', 'batch'"
    ):
        Arguments(descale=Record("flashzoo.v3.fp8:Descale", swapped)).examples()
    with pytest.raises(ValueError, match="names of their own"):
        Arguments(a=INT, b=Record("flashzoo.v3.fp8:Descale", {"a": INT}))


@pytest.mark.parametrize("how", [{}, {"programmatic": True}, {"cluster": 2, "programmatic": True}], ids=str)
def test_what_the_driver_is_told_of_a_launch(how, monkeypatch):
    told = []

    def launched(config, kernel, parameters, extra):
        config, extra = driver._Config.from_address(config), driver._Extra.from_address(extra)
        size = ctypes.c_size_t.from_address(extra[3]).value
        told.append((kernel, parameters, [*extra][::2], ctypes.string_at(extra[1], size)))
        attributes = [(config.attributes[i].id, [*config.attributes[i].value]) for i in range(config.number)]
        told.append(([*config.sizes], config.stream, attributes))
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    arguments = Arguments(a=INT, b=LONG, c=FLOAT)
    function = SimpleNamespace(kernel=7, threads=384, shared=1000, start=16, arguments=arguments)
    driver.Launch(function, 0, 132, {"b": 5}, ("a", "c"), **how)(1 << 40, 3, 0.5)
    buffer = [int(getattr(cuda, f"CU_LAUNCH_PARAM_{what}")) for what in ("BUFFER_POINTER", "BUFFER_SIZE", "END")]
    asked = [(driver._PROGRAMMATIC, [1] + [0] * 15)] * how.get("programmatic", False)
    asked += [(driver._CLUSTER, [2, 1, 1] + [0] * 13)] * ("cluster" in how)
    in_memory = bytes(16) + struct.pack("@iqf", 3, 5, 0.5)
    assert told == [
        (7, None, [buffer[0], buffer[1], buffer[2] or None], in_memory),
        ([132, 1, 1, 384, 1, 1, 1000], 1 << 40, asked),
    ]


# From a problem to a kernel.


def test_every_head_dim_has_a_kernel_that_fits():
    head_dims = range(8, 257, 8)
    every = {*HOPPER.values(), *chain.from_iterable(OTHERS.values())}
    for head_dim, head_dim_v, seqlen in product(head_dims, head_dims, (197, 333, 512, 4096)):
        sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "seqlen_q": seqlen, "seqlen_k": seqlen}
        kernel = kernel_for(replace(PLAIN, **sizes))
        assert kernel.width == min(width for width in WIDTHS if width >= head_dim)
        assert kernel.width_v == min(width for width in WIDTHS if width >= head_dim_v)
        assert kernel.shared_bytes <= SHARED_LIMIT[90]
        assert kernel.width_v % kernel.width_o == 0, "O is staged in equal parts"
        assert kernel.tiles in every


@pytest.mark.parametrize(
    ("asked", "bounded"),
    [
        ({}, (False, False)),
        ({"causal": True}, (False, True)),
        ({"window": (8, None)}, (True, False)),
        ({"window": (None, 8)}, (False, True)),
        ({"window": (8, None), "causal": True}, (True, True)),
    ],
    ids=str,
)
def test_a_kernel_looks_only_at_the_bounds_there_are(asked, bounded):
    kernel = kernel_for(replace(PLAIN, **asked))
    assert (kernel.left, kernel.right) == bounded


def test_no_other_field_asks_for_another_kernel():
    others = ({"batch": 7}, {"heads": 8, "heads_kv": 8}, {"heads_kv": 1}, {"lse": True}, {"deterministic": True})
    assert {kernel_for(replace(PLAIN, **other)) for other in others} == {kernel_for(PLAIN)}


def test_lengths_ask_for_tiles_alone_and_packed_ones_for_nothing():
    of_lengths = [replace(PLAIN, seqlen_q=q, seqlen_k=k) for q, k in product((1, 197, 333, 512, 4096), repeat=2)]
    kernels = {kernel_for(problem) for problem in of_lengths}
    assert 1 < len(kernels) <= 1 + len(OTHERS[64, 64])
    assert {replace(kernel, tiles=HOPPER[64, 64]) for kernel in kernels} == {
        kernel_for(replace(PLAIN, seqlen_q=8192, seqlen_k=8192))
    }
    assert len({kernel_for(replace(problem, batch=1, sequences=3)) for problem in of_lengths}) == 1


@pytest.mark.parametrize("lengths", [(197, 197), (256, 256), (512, 512), (4096, 77), (1, 4096), (4096, 4096)], ids=str)
def test_no_tiles_of_a_width_would_take_less_time_by_the_model(lengths):
    for widths, others in OTHERS.items():
        problem = replace(PLAIN, head_dim=widths[0], head_dim_v=widths[1], seqlen_q=lengths[0], seqlen_k=lengths[1])
        speeds = {HOPPER[widths]: 1.0, **others}
        times = {tiles: padded(problem, tiles) / speed for tiles, speed in speeds.items()}
        assert times[kernel_for(problem).tiles] == min(times.values())
        assert min(padded(problem, tiles) for tiles in speeds) >= lengths[0] * lengths[1], "everything is computed"


@pytest.mark.parametrize("head_dim", [40, 72])
def test_two_warpgroups_are_slower_where_rows_lie_across_sectors(head_dim):
    cut = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim)
    whole = replace(PLAIN, head_dim=head_dim + 8, head_dim_v=head_dim + 8)
    of_cut, of_whole = speeds_of(cut), speeds_of(whole)
    slower = {tiles for tiles, speed in of_cut.items() if speed < of_whole[tiles]}
    assert slower == {tiles for tiles in of_whole if tiles.consumers == 2}
    assert of_cut.keys() == of_whole.keys() and max(of_cut.values()) == 1


def test_a_window_leaves_keys_out_of_what_tiles_compute():
    far, near = (replace(PLAIN, seqlen_q=4096, seqlen_k=4096, window=window) for window in ((None, 0), (127, 0)))
    tiles = HOPPER[64, 64]
    assert padded(far, tiles) == 4224 * 4096 and padded(near, tiles) == 4224 * 384


PACKED = {
    (8, 8, 1): 0,
    (8, 1, 1): 3,
    (6, 1, 1): 1,
    (7, 1, 1): 0,
    (12, 3, 1): 2,
    (128, 1, 1): 6,
    (8, 1, 70): 3,
    (8, 1, 16384): 0,
}
"""Heads, key/value heads and queries: how many heads share a tile, as an exponent of 2."""


@pytest.mark.parametrize("sizes", PACKED, ids=str)
def test_packing(sizes):
    """Heads share a tile where the group has a power of two in it, and only where that saves tiles."""
    heads, heads_kv, seqlen_q = sizes
    assert pack_gqa_for(replace(PLAIN, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q), block_q=128) == PACKED[sizes]


@pytest.mark.parametrize("block_q", [64, 128, 192])
def test_packed_heads_fill_whole_rows_of_a_warpgroup(block_q):
    for group, seqlen_q in product(range(1, 130), (1, 5, 64, 100, 200)):
        pack = pack_gqa_for(replace(PLAIN, heads=group, heads_kv=1, seqlen_q=seqlen_q), block_q)
        assert group % (1 << pack) == 0 and WARPGROUP_ROWS % (1 << pack) == 0


def test_describe_says_what_happens_silently():
    plain = describe(PLAIN)
    assert str(kernel_for(PLAIN).tiles) in plain[0]
    assert not any("padded" in line or "share" in line for line in plain)
    lines = describe(replace(PLAIN, head_dim=72, head_dim_v=40, heads=8, heads_kv=1, seqlen_q=1))
    assert "head_dim 72 is padded to 80 on chip, not in memory" in lines
    assert "head_dim_v 40 is padded to 48 on chip, not in memory" in lines
    assert "8 query heads of a key/value head share a tile" in lines
    assert lines[-1].startswith("copies what TMA can't read in place")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_tma_can_read_in_place(layout):
    x = LAYOUTS[layout](torch.randn(2, 6, 4, 24).half())
    assert readable(x.shape, x.stride(), x.data_ptr()) == (layout in ("bshd", "bhsd", "sbhd", "packed", "padded_by_8"))


def test_a_stride_that_leads_nowhere_is_no_reason_to_copy():
    x = torch.randn(1, 6, 4, 25).half()[:, :1, :1, :24]
    assert readable(x.shape, x.stride(), x.data_ptr())


# On the GPU: the tile counter, descriptors and launches, which v3's host code does itself.

BUSY = Problem(16, 300, 1100, 8, 2, 128, lse=True, causal=True, arch=90)
"""More tiles than a GPU has multiprocessors, so that the counter hands them out; four heads to a tile."""
SHAPES = {"causal_gqa": BUSY, "plain": replace(BUSY, heads_kv=8, causal=False, head_dim=64, head_dim_v=None)}
on_shapes = pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)


def same(result: Result, expected: Result) -> bool:
    return same_bits(result.out, expected.out) and same_bits(result.lse, expected.lse)


def counters_are_zero() -> bool:
    torch.cuda.synchronize()
    return not any(counters.any() for counters in tile_counter.kept.values())


@gpu
@on_hopper
@on_shapes
def test_the_same_bits_every_time(problem):
    tensors, *_ = draw(problem)
    first = forward("v3", tensors, problem)
    accept(Judge(*tensors, problem), first)
    for _ in range(50):
        assert same(forward("v3", tensors, problem), first)
    assert counters_are_zero()


@gpu
@on_hopper
def test_sizes_do_not_compile_again():
    """But for the tiles that lengths ask for."""
    small = replace(PLAIN, causal=True)
    others = (
        {"batch": 3},
        {"seqlen_q": 77},
        {"seqlen_k": 513},
        {"heads": 6},
        {"heads": 8, "heads_kv": 1},
        {"head_dim": 56},
    )
    problems = [small, *(replace(small, head_dim_v=None, **other) for other in others)]
    compiled, kernels = programs.function_for.cache_info().misses, {kernel_for(problem) for problem in problems}
    for problem in problems:
        tensors, *_ = draw(problem)
        accept(Judge(*tensors, problem), forward("v3", tensors, problem))
    assert programs.function_for.cache_info().misses - compiled <= len(kernels) <= 3


@gpu
@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@on_shapes
def test_a_layout_changes_no_bit(problem, layout):
    tensors, *_ = draw(problem, layout=layout)
    before = [storage_of(x) for x in tensors]
    result = forward("v3", tensors, problem)
    assert same(result, forward("v3", tuple(x.contiguous() for x in tensors), problem))
    assert all(torch.equal(storage_of(x), then) for x, then in zip(tensors, before, strict=True))


@gpu
@on_hopper
@on_shapes
def test_two_streams_at_once(problem):
    """Each stream has a tile counter of its own: with one between them tiles would be left out or done twice."""
    inputs = [draw(problem, seed)[0] for seed in range(2)]
    expected = [forward("v3", tensors, problem) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, tensors, found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(forward("v3", tensors, problem))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(same(result, wanted) for result in found)
    assert counters_are_zero()


@gpu
@on_hopper
@on_shapes
def test_a_graph_beside_eager_calls(problem):
    """Captured once, replayed on other numbers while another stream,
    and the one that captured, make calls of their own."""
    (captured, others), side = [draw(problem, seed)[0] for seed in range(2)], torch.cuda.Stream()
    expected = [forward("v3", tensors, problem) for tensors in (captured, others)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward("v3", captured, problem)
        twice = forward("v3", captured, problem)
    for _ in range(10):
        result.out.fill_(torch.nan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            eager = [forward("v3", others, problem) for _ in range(3)]
        graph.replay()
        after = forward("v3", others, problem)
        torch.cuda.synchronize()
        assert same(result, expected[0]) and same(twice, expected[0])
        assert all(same(found, expected[1]) for found in (*eager, after))
    for held, other in zip(captured, others, strict=True):
        held.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert same(result, expected[1])
    assert counters_are_zero()


@gpu
@on_hopper
def test_a_thread_that_has_not_touched_the_gpu():
    """A new thread has no CUDA context until the CUDA runtime makes one current, and the driver's calls do not."""
    tensors, *_ = draw(BUSY)
    expected = forward("v3", tensors, BUSY)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(forward, "v3", tensors, BUSY).result()  # memory and launch are cached by now
    torch.cuda.synchronize()
    assert same(result, expected)


@gpu
@on_hopper
def test_a_scale_that_is_first_written_in_a_capture():
    """A graph's memory holds nothing before its first replay, and what is cached must not lie there."""
    problem = replace(BUSY, dtype="e4m3", out_dtype=None)
    tensors, *_ = draw(problem)
    expected = forward("v3_fp8", tensors, problem)
    launch_fp8.one.kept.clear()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        forward("v3_fp8", tensors, problem)
    assert same(forward("v3_fp8", tensors, problem), expected)


ABLATED = {
    "serial": {"overlap": False, "ping_pong": False},
    "ping_pong": {"overlap": False, "ping_pong": True},
    "overlap": {"overlap": True, "ping_pong": False},
    "both": {"overlap": True, "ping_pong": True},
    "one_slot_of_queries": {"q_stages": 1},
    "one_warpgroup": {"consumers": 1},
}


@gpu
@on_hopper
@pytest.mark.parametrize("how", ABLATED)
@pytest.mark.parametrize(
    "problem", [*SHAPES.values(), replace(BUSY, window=(300, 40), causal=False)], ids=[*SHAPES, "window"]
)
def test_ablations_give_the_same(problem, how):
    (q, k, v), *_ = draw(problem)
    expected = forward("v3", (q, k, v), problem)
    kernel = kernel_for(problem)
    kernel = replace(kernel, tiles=replace(kernel.tiles, **ABLATED[how]))
    ablated = launch.ForwardLaunch(problem, kernel, q.stride(), k.stride(), v.stride(), q.get_device())
    out, lse = ablated(q, k, v, in_log2(problem.head_dim**-0.5))
    accept(Judge(q, k, v, problem), Result(out, lse))
    rounding = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, expected.out, rtol=rounding, atol=rounding * expected.out.abs().max().item())


# The suite's own goes round a tile of 128 queries, one to a head, at head dim 16:
# one kernel of v3's, and less than one of its tiles.

TILINGS = {
    "three_warpgroups": {"head_dim": 64},
    "two_warpgroups": {"head_dim": 128},
    "short_blocks": {"head_dim": 256},
    "packed": {"head_dim": 128, "heads": 4},
}
BANDS = {"causal": {"causal": True}, "window": {"window": (131, 1)}, "left": {"window": (3, None)}}


@gpu
@on_hopper
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_every_place_of_the_diagonal_in_a_tile(tiling, band):
    """Two tiles of queries and up to three blocks of keys, which change from seen whole to seen in part to
    not seen at all."""
    sizes = (
        {"heads": 1, "heads_kv": 1, "seqlen_q": 198, "head_dim_v": None, "lse": True} | TILINGS[tiling] | BANDS[band]
    )
    for shift in range(-130, 131):
        problem = replace(PLAIN, **sizes, seqlen_k=198 + shift)
        tensors, *_ = draw(problem)
        accept(Judge(*tensors, problem), forward("v3", tensors, problem))


# In processes of their own.

TINY_CALLS = """if True:
    import torch, flashzoo

    def call(seqlen_q, seqlen_k, head_dim, heads=2, heads_kv=2, **options):
        shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
        q, k, v = (torch.randn(1, *shape, head_dim).to("cuda", torch.bfloat16) for shape in shapes)
        assert flashzoo.attention(q, k, v, version="v3", **options).isfinite().all()

    call(1, 1, 64)
    call(113, 203, 64, heads=8, heads_kv=1, causal=True)
    call(100, 130, 64, window_size=(20, 10))
    for head_dim in (64, 128, 256):
        call(64, 70, head_dim)
        call(200, 300, head_dim, causal=True)
    torch.cuda.synchronize()
"""
TINY_GRADIENTS = """if True:
    import torch, flashzoo

    def call(seqlen_q, seqlen_k, head_dim, batch=1, heads=2, heads_kv=2, **options):
        shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
        inputs = [torch.randn(batch, *shape, head_dim).to("cuda", torch.bfloat16).requires_grad_() for shape in shapes]
        out = flashzoo.attention(*inputs, version="v3", **options)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out, inputs, torch.randn_like(out)))

    call(70, 60, 64)
    for head_dim in (64, 96, 128, 160, 192, 256):
        call(150, 300, head_dim, causal=True)
    call(150, 300, 128, heads=8, heads_kv=1)
    call(130, 200, 80, window_size=(20, 10))
    for head_dim in (64, 160):
        call(150, 200, head_dim, batch=33, heads=8, heads_kv=8)  # by head
        call(150, 100, head_dim)  # all keys in a tile
    torch.cuda.synchronize()
"""


@gpu
@on_hopper
@pytest.mark.parametrize(
    ("tool", "calls"),
    [("memcheck", TINY_CALLS), ("racecheck", TINY_CALLS), ("memcheck", TINY_GRADIENTS)],
    ids=["memcheck", "racecheck", "gradients"],
)
def test_compute_sanitizer(tool, calls):
    """Of the backward pass racecheck does not see what mbarriers order."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    in_fresh_process(calls)  # compiled before, as the tool slows the host too
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", calls]
    every_tensor_apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # what lies past a tensor is nobody's
    process = subprocess.run(command, cwd=ROOT, env=os.environ | every_tensor_apart, capture_output=True, text=True)
    text = process.stdout + process.stderr
    assert process.returncode == 0, text
    assert "ERROR SUMMARY: 0 errors" in text or "RACECHECK SUMMARY: 0 hazards" in text, text


ON_ANOTHER = """
import torch, flashzoo

torch.cuda.set_device(1)
q = torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16)
assert flashzoo.attention(q, q, q, version="v3").isfinite().all()
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@gpu
@on_hopper
@pytest.mark.alone  # a worker sees one GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_gpu_than_the_first_is_used_alone():
    """A process for each GPU puts nothing on the first."""
    in_fresh_process(ON_ANOTHER)


class TestPerStream:
    """Numbers that launches share; the GPU is a stand-in, which says what is captured and counts what is written."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        state = SimpleNamespace(capture=0, by_graphs=0, before=0)

        def by_graph(self, device, n):
            state.by_graphs += 1
            return torch.zeros(n, dtype=torch.int32)

        def before(self, device, n):
            state.before += 1
            return torch.zeros(n, dtype=torch.int32)

        monkeypatch.setattr(PerStream, "_new", by_graph)
        monkeypatch.setattr(PerStream, "_written", before)
        monkeypatch.setattr("flashzoo._cute.per_stream.capture_of", lambda stream: state.capture)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capture > 0)
        return state

    def test_they_are_written_by_another_thread_on_its_device_and_on_a_stream_that_nobody_captures(self, monkeypatch):
        """Torch hands out streams in turns, so that one may be another thread's; the GPU is a stand-in here too."""
        current, seen = SimpleNamespace(device=0, stream="default"), []

        @contextmanager
        def within(name, value):
            before = getattr(current, name)
            setattr(current, name, value)
            yield
            setattr(current, name, before)

        def new(self, device, n):
            seen.append((threading.get_ident(), current.device, current.stream))
            return torch.zeros(n, dtype=torch.int32)

        waited, handed = SimpleNamespace(synchronize=lambda: seen.append("waited")), iter(("captured", "free"))
        for name, stand_in in {
            "device": lambda device: within("device", device),
            "stream": lambda stream: within("stream", stream),
            "Stream": lambda device: next(handed),
            "current_stream": lambda: SimpleNamespace(record_event=lambda: waited),
            "is_current_stream_capturing": lambda: current.stream == "captured",
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(PerStream, "_new", new)
        assert not PerStream(0, torch.int32)._written(3, 8).any()
        (thread, device, stream), last = seen
        assert thread != threading.get_ident() and (device, stream, last) == (3, "free", "waited")

    def test_launches_of_one_stream_share_them_and_others_have_their_own(self, gpu):
        numbers = PerStream(0, torch.int32)
        assert numbers(0, 1).data_ptr() == numbers(0, 1).data_ptr() != numbers(0, 2).data_ptr()
        assert numbers(0, 1, 1000).shape[0] >= 1000 and numbers(0, 1).data_ptr() == numbers(0, 1, 1000).data_ptr()

    def test_the_default_stream_of_each_thread_is_another(self, gpu):
        """They have one handle."""
        numbers, together = PerStream(0, torch.int32), threading.Barrier(2)

        def ask(_):
            together.wait()
            return [numbers(0, stream).data_ptr() for stream in (2, 2, 7)]

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(ask, range(2))
        assert one[0] == one[1] != other[0] == other[1] and one[2] == other[2]

    def test_each_capture_of_a_stream_has_its_own_of_what_was_written_before(self, gpu):
        numbers = PerStream(0, torch.int32)
        numbers(0, 1)
        before, taken = gpu.before, []
        for gpu.capture in (1, 2, 3):
            for stream in (1, 2):
                found = numbers(0, stream, 100)
                assert found.data_ptr() == numbers(0, stream, 100).data_ptr()
                taken.append((found.data_ptr(), found.data_ptr() + 400))
        assert gpu.before == before and gpu.by_graphs == 0
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(taken)))

    def test_a_graph_writes_its_own_where_there_are_none(self, gpu):
        numbers = PerStream(0, torch.int32)
        gpu.capture = 1
        numbers(0, 1)
        assert gpu.by_graphs == 1  # nothing was called before
        gpu.capture = 0
        numbers(0, 1)
        gpu.capture = 2
        numbers(0, 1)
        assert gpu.by_graphs == 1
        gpu.capture = 3
        numbers(0, 1, 1 << 20)  # more than there are
        assert gpu.by_graphs == 2

    def test_what_has_become_too_few_is_still_somebodys(self, gpu):
        """A graph's launches before it asked for more, or another thread's."""
        numbers = PerStream(0, torch.int32)
        ours = weakref.ref(numbers(0, 1))
        numbers(0, 1, 1000)
        gpu.capture = 1
        graphs = weakref.ref(numbers(0, 1, 1000))
        numbers(0, 1, 1 << 20)
        gc.collect()
        assert ours() is not None and graphs() is not None

    def test_of_two_threads_both_have_what_is_kept(self, gpu, monkeypatch):
        numbers, together = PerStream(0, torch.int32), threading.Barrier(2)
        numbers(0, 1)
        written = PerStream._written

        def waits(self, device, n):
            together.wait()
            return written(self, device, n)

        monkeypatch.setattr(PerStream, "_written", waits)
        with ThreadPoolExecutor(2) as threads:
            a, b = threads.map(lambda _: numbers(0, 1, 100), range(2))
        assert a is b is numbers.kept[0, 1]

    def test_what_graphs_have_taken_is_made_anew_between_them(self, gpu):
        numbers = PerStream(0, torch.int32)
        for capture in range(1, 100):
            gpu.capture = 0
            numbers(0, 1)
            gpu.capture = capture
            numbers(0, 1, 10_000)
        assert gpu.by_graphs == 0 and gpu.before < 40
