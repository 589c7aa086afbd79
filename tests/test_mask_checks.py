"""What a block mask must be, with what is put into it, and its pictures."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import replace
from pickle import dumps, loads

import pytest
import torch
from test_block_mask import changed, positions

import flashzoo
from flashzoo import BlockMask
from flashzoo_suite.support import DEVICE

# What a mask must be


def put(mask: BlockMask, path: str, where: tuple, value: int) -> BlockMask:
    """The mask with one element of a tensor changed."""
    x = mask
    for name in path.split("."):
        x = getattr(x, name)
    x = x.clone()
    x[where] = value
    return changed(mask, path, x)


def mixed() -> BlockMask:
    """Three rows of blocks, with partial and full ones, two heads and bits."""
    q, k, _ = positions((300, 500, 128, 128))
    dense = torch.stack([(k <= q + 150), (k <= q + 150) | (k > 300)])[None]
    return BlockMask.from_dense(dense)


VALUES = {  # field, element, value, error
    "count over width": ("rows.counts", (0, 1, 2), 5, r"rows\.counts must be 0 to 4, .* got 5 at \(0, 1, 2\)"),
    "count below 0": ("columns.counts", (0, 0, 1), -1, r"columns\.counts must be 0 to 3, .* got -1 at \(0, 0, 1\)"),
    "more full than counted": (
        "rows.full",
        (0, 0, 0),
        4,
        r"rows\.full must be 0 to rows\.counts, got 4 at \(0, 0, 0\)",
    ),
    "full below 0": ("rows.full", (0, 1, 0), -2, r"rows\.full must be 0 to rows\.counts, got -2 at \(0, 1, 0\)"),
    "index too high": (
        "rows.indices",
        (0, 0, 2, 0),
        4,
        r"rows\.indices must be blocks 0 to 3, got 4 at \(0, 0, 2, 0\)",
    ),
    "index far too high": (
        "rows.indices",
        (0, 0, 2, 0),
        1 << 30,
        r"rows\.indices must be blocks 0 to 3, got 1073741824",
    ),
    "index below 0": (
        "columns.indices",
        (0, 1, 0, 0),
        -1,
        r"columns\.indices must be blocks 0 to 2, got -1 at \(0, 1, 0, 0\)",
    ),
    "unsorted or doubled": (
        "columns.indices",
        (0, 0, 0, 1),
        0,
        r"columns\.indices must be each part ascending, no block twice, got 0",
    ),
    "partial and full": (
        "rows.indices",
        (0, 0, 0, 0),
        0,
        r"rows\.indices must be no block both partial and full, got 0",
    ),
    "other blocks than rows": ("columns.indices", (0, 0, 3, 0), 0, r"columns must be of the blocks of rows"),
    "order outside": ("rows.order", (0, 0, 0), 3, r"rows\.order must be rows 0 to 2, got 3 at \(0, 0, 0\)"),
    "order twice": (
        "rows.order",
        (0, 0, 1),
        1,
        r"rows\.order must be a permutation of the rows, of which one is missing, got 2",
    ),
    "bits outside": ("rows.bit_index", (0, 0, 0, 0), 12, r"rows\.bit_index must be 0 to 11, got 12 at \(0, 0, 0, 0\)"),
    "bits below 0": ("columns.bit_index", (0, 0, 3, 0), -1, r"columns\.bit_index must be 0 to 11, got -1"),
    "other bits than rows": ("columns.bit_index", (0, 0, 3, 0), 0, r"columns\.bit_index must be that of rows"),
}


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
def test_values_that_are_refused(case):
    path, where, value, error = case
    mask = put(mixed(), path, where, value)
    with pytest.raises(ValueError, match=f"block_mask: {error}"):
        mask.validate()
    # Nothing that looks at its blocks takes it on trust.
    for use in (
        mask.to_dense,
        mask.compact,
        mask.check_once,
        lambda: mask & mixed(),
        lambda: mixed() | mask,
        lambda: mask.visible,
    ):
        with pytest.raises(ValueError, match="block_mask: "):
            use()


def test_rows_in_another_order_are_refused():
    mask = BlockMask.causal(300, device=DEVICE)
    order = torch.tensor([[[0, 1, 2]]], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"rows\.order must be from the longest row to the shortest"):
        changed(mask, "rows.order", order).validate()


def test_a_full_block_beyond_the_band_is_not_tight():
    mask = BlockMask.from_blocks(
        torch.ones(3, 3, dtype=torch.bool, device=DEVICE), 300, full=torch.eye(3, device=DEVICE).bool(), causal=True
    )
    assert mask.validate()
    with pytest.raises(ValueError, match="tight must be False"):
        replace(mask, tight=True).validate()


SHAPES = {  # field, its new value, error
    "dtype": ("rows.counts", lambda x: x.long(), r"rows\.counts must be of dtype torch\.int32, got torch\.int64"),
    "dtype of bits": (
        "element.bits",
        lambda x: x.int(),
        r"element\.bits must be of dtype torch\.uint8, got torch\.int32",
    ),
    "rows": (
        "rows.full",
        lambda x: x[..., :2].contiguous(),
        r"rows\.full must have shape \(1, 2, 3\), got \(1, 2, 2\)",
    ),
    "heads": ("heads", lambda _: 3, r"rows\.counts must have shape \(1, 3, 3\), got \(1, 2, 3\)"),
    "lengths": ("seqlen_k", lambda _: 700, r"columns\.counts must have shape \(1, 2, 6\), got \(1, 2, 4\)"),
    "width": (
        "rows.bit_index",
        lambda x: x[..., :2].contiguous(),
        r"rows\.bit_index must have shape \(1, 2, 3, 4\), got \(1, 2, 3, 2\)",
    ),
    "dimensions": (
        "columns.indices",
        lambda x: x[0],
        r"columns\.indices must have shape \(1, 2, 4, 3\), got \(2, 4, 3\)",
    ),
    "words": (
        "element.bits",
        lambda x: x[..., :8].contiguous(),
        r"element\.bits must have shape \(1, 2, 12, 128, 16\), got \(1, 2, 12, 128, 8\)",
    ),
    "device": ("columns.order", lambda x: x.to("meta"), r"columns\.order must be on .* as rows\.counts is, got meta"),
    "strides": ("rows.counts", lambda x: x.mT.contiguous().mT, r"rows\.counts must be contiguous, got strides"),
    "no tensor": ("rows.order", lambda _: [0, 1, 2], r"rows\.order must be a torch\.Tensor, got list"),
    "no tensor first": ("rows.counts", lambda _: None, r"rows\.counts must be a torch\.Tensor, got NoneType"),
    "bits without index": (
        "columns.bit_index",
        lambda _: None,
        r"columns\.bit_index must be a tensor, as there are bits, got None",
    ),
    "index without bits": (
        "element.bits",
        lambda _: None,
        r"rows\.bit_index must be None, as there are no bits, got a tensor",
    ),
    "lists": ("rows", lambda _: None, r"rows must be Lists, got NoneType"),
    "block size": ("block_q", lambda _: 96, r"block_q must be one of \(64, 128\), got 96"),
    "length below 0": ("seqlen_q", lambda _: -1, r"seqlen_q must be an int, 0 or more, got -1"),
    "no heads": ("heads", lambda _: 0, r"heads must be an int, 1 or more, got 0"),
    "start": (
        "element.bits",
        lambda x: torch.cat([x.flatten(), x.flatten()[:8]])[8:].view(x.shape),
        r"element\.bits must start at a multiple of 16 bytes, got one 8 bytes past it",
    ),
    "causal": ("element.causal", lambda _: "False", r"element\.causal must be a bool, got 'False'"),
    "window": ("element.window", lambda _: (-3, 0), r"element\.window_size must be None or a pair .* got \(-3, 0\)"),
    "window -1": (
        "element.window",
        lambda _: (-1, 0),
        r"element\.window must have None for a side without a bound, got \(-1, 0\)",
    ),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_tensors_that_are_refused(case):
    path, change, error = case
    mask = mixed()
    value = mask
    for name in path.split("."):
        value = getattr(value, name)
    with pytest.raises(ValueError, match=f"block_mask: {error}"):
        changed(mask, path, change(value)).validate()


def test_what_has_passed_is_not_checked_again(monkeypatch):
    passed, calls = replace(mixed()).validate(), []
    monkeypatch.setattr(BlockMask, "validate", lambda self: calls.append(self))
    for mask in (passed, mixed(), mixed().to(DEVICE)):
        mask.check_once()
    assert not calls
    by_hand = replace(mixed())
    by_hand.check_once()
    assert calls == [by_hand]


@pytest.mark.parametrize(
    "path", ["rows.counts", "rows.full", "rows.indices", "rows.order", "rows.bit_index", "columns.indices"]
)
def test_what_was_changed_in_place_is_checked_again(path):
    """A kernel would read keys that are not there."""
    mask, q = mixed().to(DEVICE), torch.randn(1, 300, 2, 16, device=DEVICE)
    k = torch.randn(1, 500, 2, 16, device=DEVICE)
    flashzoo.attention(q, k, k, block_mask=mask)
    lists, name = path.split(".")
    x = getattr(getattr(mask, lists), name)
    x.view(-1)[:1].fill_(999)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"block_mask: {lists}.{name} must be .* got 999"):
            flashzoo.attention(q, k, k, block_mask=mask)
    with pytest.raises(ValueError, match="block_mask: "):
        flashzoo.attention(q, k, k, block_mask=mask.to(DEVICE))


def test_what_was_changed_in_place_and_is_sound_passes_and_counts(monkeypatch):
    mask = mixed()
    dense = mask.to_dense()
    mask.element.bits.bitwise_and_(0)
    assert mask.check_once() is mask
    assert mask.to_dense().sum() < dense.sum()
    calls = []
    monkeypatch.setattr(BlockMask, "validate", lambda self: calls.append(self))
    mask.check_once()
    assert not calls


def test_masks_of_inference_mode_are_taken():
    """Their tensors count no changes."""
    with torch.inference_mode():
        mask = mixed()
        assert mask.check_once() is mask
    assert replace(mask).check_once().check_once()


# With a band put into it


def test_a_band_is_put_in_once():
    mask = mixed()
    causal = mask.banded(True)
    assert torch.equal(causal.to_dense(), (mask & BlockMask.causal(300, 500, device=DEVICE)).to_dense())
    assert mask.banded(True) is causal and mask.banded(True, (-1, None)) is causal
    window = mask.banded(window_size=(70, 30))
    assert torch.equal(
        window.to_dense(), (mask & BlockMask.sliding_window(300, 500, window_size=(70, 30), device=DEVICE)).to_dense()
    )
    assert mask.banded(True) is causal and mask.banded(False, [70, 30]) is window
    assert mask.banded() is mask and mask.banded(window_size=(-1, -1)) is mask


def test_attention_takes_the_band_that_is_kept(monkeypatch):
    mask, q = mixed().to(DEVICE), torch.randn(1, 300, 2, 16, device=DEVICE)
    k = torch.randn(1, 500, 2, 16, device=DEVICE)
    out = flashzoo.attention(q, k, k, block_mask=mask, causal=True)
    monkeypatch.setattr(BlockMask, "__and__", None)
    assert torch.equal(flashzoo.attention(q, k, k, block_mask=mask, causal=True), out)


def test_a_few_bands_are_kept():
    mask = BlockMask.butterfly(300, device=DEVICE)
    bands = [mask.banded(window_size=(width, 0)) for width in range(10)]
    assert mask.banded(window_size=(9, 0)) is bands[9] and mask.banded(window_size=(2, 0)) is bands[2]
    assert mask.banded(window_size=(0, 0)) is not bands[0]


def test_a_band_is_put_in_anew_behind_a_change_in_place():
    mask = mixed()
    before = mask.banded(True)
    dense = before.to_dense()
    mask.element.bits.bitwise_and_(0)
    after = mask.banded(True)
    assert after is not before and after.to_dense().sum() < dense.sum() and mask.banded(True) is after
    after.element.bits.bitwise_and_(0)  # nobody else may see what is done to one that was handed out
    assert torch.equal(mask.banded(True).to_dense(), (mask & BlockMask.causal(300, 500, device=DEVICE)).to_dense())


def test_a_mask_that_is_not_sound_gets_no_band():
    mask = mixed()
    mask.banded(True)
    mask.rows.indices.view(-1)[:1].fill_(999)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"block_mask: rows\.indices must be .* got 999"):
            mask.banded(True)


OTHERS = {
    "copy": copy,
    "deepcopy": deepcopy,
    "pickle": lambda mask: loads(dumps(mask)),
    "to": lambda mask: mask.to(DEVICE),
    "compact": BlockMask.compact,
    "replace": replace,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_another_mask_has_bands_of_its_own(make):
    mask = mixed()
    mask.element.bits.bitwise_or_(0)  # so that its tensors count from elsewhere than a copy's
    band = mask.banded(True)
    other = make(mask)
    assert other.banded(True) is not band and torch.equal(other.banded(True).to_dense(), band.to_dense())
    assert other.banded(True) is other.banded(True) and mask.banded(True) is band
    if other.element.bits is not mask.element.bits:
        other.element.bits.bitwise_and_(0)
        assert other.banded(True).to_dense().sum() < band.to_dense().sum()


def test_copies_are_checked_where_the_mask_would_be(monkeypatch):
    sound, changed_since, by_hand = mixed(), mixed(), replace(mixed())
    changed_since.element.bits.bitwise_and_(0)
    calls = []
    monkeypatch.setattr(BlockMask, "validate", lambda self: calls.append(self))
    for mask, times in ((sound, 0), (changed_since, 1), (by_hand, 1)):
        calls.clear()
        deepcopy(mask).check_once()
        assert len(calls) == times


def test_no_band_is_kept_of_what_does_not_last():
    with torch.inference_mode():
        inside = mixed()
    outside = mixed()
    assert inside.banded(True) is not inside.banded(True)
    with torch.inference_mode():
        made = outside.banded(True)
    assert outside.banded(True) is not made
    mask, kept = mixed(), []
    torch.func.grad(lambda x: (kept.append(mask.banded(True)), x)[1])(torch.zeros(()))
    assert mask.banded(True) is not kept[0] and torch.equal(
        mask.banded(True).to_dense(), outside.banded(True).to_dense()
    )
    compiled = torch.compile(lambda x: x + mask.banded(True, (50, None)).rows.counts.sum(), backend="eager")
    compiled(torch.zeros(1, device=DEVICE))
    assert all(which[:2] == (True, (None, None)) for which in mask._bands)


@pytest.mark.gpu
def test_a_stream_and_a_graph_put_it_in_themselves():
    mask, side = mixed(), torch.cuda.Stream()
    band = mask.banded(True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = mask.banded(True)
        assert other is not band and mask.banded(True) is other
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mask.banded(True)
        assert mask.banded(True) is not captured
    graph.replay()
    assert mask.banded(True) is band and torch.equal(captured.to_dense(), band.to_dense())


def test_threads_put_in_one_band():
    mask = mixed()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: mask.banded(True).to_dense(), range(32)))
    assert all(torch.equal(dense, found[0]) for dense in found) and mask.banded(True) is mask.banded(True)


ARGUMENTS = {
    "band's causal": (TypeError, "causal must be a bool, got 1", lambda: BlockMask.butterfly(64).banded(1)),
    "band's window": (
        ValueError,
        "window_size must be None or a pair",
        lambda: BlockMask.butterfly(64).banded(window_size=3),
    ),
    "causal": (
        TypeError,
        "causal must be a bool, got 'False'",
        lambda: BlockMask.sliding_window(64, window_size=None, causal="False"),
    ),
    "causal of blocks": (
        TypeError,
        "causal must be a bool, got 1",
        lambda: BlockMask.from_blocks(torch.ones(1, 1).bool(), 1, causal=1),
    ),
    "causal of scores": (
        TypeError,
        "causal must be a bool, got None",
        lambda: BlockMask.top_k(torch.ones(1, 1), 1, 1, causal=None),
    ),
    "window past 64 bits": (
        ValueError,
        r"from 0 to 2\*\*63 - 1",
        lambda: BlockMask.sliding_window(64, window_size=(1 << 63, 0)),
    ),
    "length": (ValueError, "seqlen_q must be an int, 0 or more, got -1", lambda: BlockMask.causal(-1)),
    "length of keys": (ValueError, "seqlen_k must be an int, 0 or more, got 2.0", lambda: BlockMask.causal(1, 2.0)),
    "block": (ValueError, r"block_kv must be one of \(64, 128\), got 32", lambda: BlockMask.butterfly(64, block_kv=32)),
    "window": (ValueError, "window_size must be None or a pair", lambda: BlockMask.sliding_window(64, window_size=3)),
    "window side": (
        ValueError,
        r"got \(-2, 0\)",
        lambda: BlockMask.local_global(64, window_size=(-2, 0), global_tokens=0),
    ),
    "globals": (
        ValueError,
        "global_tokens must be an int",
        lambda: BlockMask.local_global(64, window_size=None, global_tokens=None),
    ),
    "stride": (ValueError, "stride must be an int, 1 or more, got 0", lambda: BlockMask.strided(64, stride=0)),
    "local": (
        ValueError,
        "local must be an int, 0 or more, got True",
        lambda: BlockMask.strided(64, stride=1, local=True),
    ),
    "heads": (ValueError, "heads must be an int, 1 or more, got 0", lambda: BlockMask.random(64, blocks=1, heads=0)),
    "matrix": (
        ValueError,
        r"blocks must have shape \(2, 1\) .* got \(1, 1\)",
        lambda: BlockMask.from_blocks(torch.ones(1, 1).bool(), 130, 1),
    ),
    "matrix dtype": (
        TypeError,
        r"blocks must be of dtype torch\.bool",
        lambda: BlockMask.from_blocks(torch.ones(1, 1), 1),
    ),
    "no matrix": (TypeError, r"blocks must be a torch\.Tensor, got list", lambda: BlockMask.from_blocks([[True]], 1)),
    "full": (
        ValueError,
        "full must have the shape and device of blocks",
        lambda: BlockMask.from_blocks(torch.ones(1, 2, 1, 1).bool(), 1, full=torch.ones(1, 1).bool()),
    ),
    "dense": (
        ValueError,
        r"mask must have shape .* got \(1, 2, 3\)",
        lambda: BlockMask.from_dense(torch.ones(1, 2, 3).bool()),
    ),
    "dense dtype": (TypeError, r"mask must be of dtype torch\.bool", lambda: BlockMask.from_dense(torch.ones(2, 3))),
    "no heads": (
        ValueError,
        "a block mask must be of one head or more, got none, of a batch of 2",
        lambda: BlockMask.from_dense(torch.ones(2, 0, 3, 3).bool()),
    ),
    "sparse": (
        TypeError,
        r"mask must be a dense tensor \(torch\.strided\), got torch\.sparse_coo: call to_dense\(\)",
        lambda: BlockMask.from_dense(torch.ones(3, 3).bool().to_sparse()),
    ),
    "block of a tensor": (ValueError, "block_q must be one of", lambda: BlockMask.causal(9, block_q=torch.ones(2))),
    "scores": (TypeError, "scores must be floating point", lambda: BlockMask.top_k(torch.ones(1, 1).int(), 1, 1)),
    "k": (ValueError, "k must be an int, 0 or more, got -1", lambda: BlockMask.top_k(torch.ones(1, 1), -1, 1)),
    "lengths": (ValueError, "lengths must be an int, 0 or more, got -5", lambda: BlockMask.documents([3, -5])),
    "lengths that come but once": (
        TypeError,
        "lengths must be a sequence of ints or an integer tensor, got generator",
        lambda: BlockMask.documents(length for length in (3, 4)),
    ),
    "no lengths": (
        TypeError,
        "lengths_k must be a sequence of ints or an integer tensor, got int",
        lambda: BlockMask.documents([3], lengths_k=3),
    ),
    "seed": (ValueError, r"seed must be an int, got 1\.5", lambda: BlockMask.random(64, blocks=1, seed=1.5)),
    "lengths on the device": (
        ValueError,
        "seqlen_q is required where lengths is a tensor",
        lambda: BlockMask.documents(torch.tensor([3])),
    ),
    "floating lengths": (
        ValueError,
        "lengths must be ints of shape",
        lambda: BlockMask.documents(torch.ones(2), seqlen_q=3),
    ),
    "other documents": (
        ValueError,
        "lengths_k must be of as many documents",
        lambda: BlockMask.documents([3, 4], lengths_k=[7]),
    ),
    "other batch": (
        ValueError,
        "lengths_k must be of as many documents",
        lambda: BlockMask.documents(torch.ones(2, 1).int(), lengths_k=torch.ones(3, 1).int(), seqlen_q=9, seqlen_k=9),
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_are_refused(case):
    kind, error, build = case
    with pytest.raises(kind, match=error):
        build()


# Pictures


def test_the_picture_tells_skipped_partial_and_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert str(BlockMask.causal(300, device=DEVICE)).splitlines()[:5] == [
        "BlockMask 300 x 300 in blocks of 128 x 128, causal",
        "66.67% of blocks kept, 50.17% of pairs seen",
        "+..",
        "#+.",
        "##+",
    ]
    assert (
        repr(BlockMask.random(300, blocks=1, heads=2))
        == "<BlockMask 300 x 300 in blocks of 128 x 128, 2 heads, on cpu>"
    )


@pytest.mark.parametrize(
    "lengths", [(65536, 65536), (1000, 65536), (65536, 1000), (10000, 10000), (12800, 9000)], ids=str
)
@pytest.mark.parametrize("terminal", [(80, 24), (200, 50), (30, 10)], ids=str)
def test_the_picture_fits_the_terminal(lengths, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(terminal[0]))
    monkeypatch.setenv("LINES", str(terminal[1]))
    lines = str(BlockMask.sliding_window(*lengths, window_size=(2000, 0), device=DEVICE)).splitlines()
    drawn_lines = [line for line in lines if set(line) <= set(".-+#")]
    assert 1 <= len(drawn_lines) <= max(8, terminal[1] - 5) and len(lines) <= max(12, terminal[1])
    assert min(lengths[1] // 128, 15) <= len(drawn_lines[0]) <= terminal[0]
    assert len({len(line) for line in drawn_lines}) == 1 and {"."} < set("".join(drawn_lines)) <= set(".-+#")


def test_plot():
    pytest.importorskip("matplotlib")
    figure = mixed().plot(head=0)
    (axes,) = figure.axes
    assert axes.images[0].get_array().tolist() == [[2, 1, 1, 0], [2, 2, 1, 1], [2, 2, 2, 1]]
    assert axes.images[0].get_extent() == [0, 512, 384, 0]
    figure.canvas.draw()


def test_plot_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib, which the extra report of flashzoo brings"):
        BlockMask.causal(64).plot()


def test_another_device():
    mask = mixed().to("cpu")
    assert mask.device.type == "cpu" and torch.equal(mask.to_dense(), mixed().to_dense().cpu())
    assert mask.to(DEVICE).element.bits.device.type == DEVICE
    assert mask.to("meta").device.type == "meta"
