"""`flashzoo.BlockMask`: builders against formulas of their own, lists against dense masks, algebra, errors, no
waiting for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import flashzoo
from flashzoo import BlockMask, Problem
from flashzoo.reference import visible
from flashzoo_suite.support import DEVICE

LENGTHS = [
    (1, 1),
    (64, 64),
    (256, 256),
    (300, 300),
    (100, 300),
    (300, 100),
    (513, 130),
    (1, 700),
    (129, 127),
    (500, 510),
]
BLOCKS = [(128, 128), (64, 64), (64, 128), (128, 64)]
Sizes = tuple[int, int, int, int]  # seqlen_q, seqlen_k, block_q, block_kv
SIZES = [(*lengths, *BLOCKS[(nth + more) % 4]) for nth, lengths in enumerate(LENGTHS) for more in (0, 2)]
EVERY_SIZE = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{}x{}-{}x{}".format(*sizes))


def positions(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key numbers, and how far a key is after the aligned diagonal."""
    q, k = torch.arange(sizes[0], device=DEVICE)[:, None], torch.arange(sizes[1], device=DEVICE)[None, :]
    return q, k, k - q - (sizes[1] - sizes[0])


def changed(mask: BlockMask, path: str, value) -> BlockMask:
    """The mask with another value of a field, or of a field of a field."""
    name, _, inner = path.partition(".")
    return replace(mask, **{name: replace(getattr(mask, name), **{inner: value}) if inner else value})


def how(sizes: Sizes) -> dict:
    return {"block_q": sizes[2], "block_kv": sizes[3], "device": DEVICE}


def by_blocks(blocks: list[list[bool]], sizes: Sizes) -> Tensor:
    """The elements of a block matrix."""
    matrix = torch.tensor(blocks, dtype=torch.bool, device=DEVICE).view(
        -(-sizes[0] // sizes[2]), -(-sizes[1] // sizes[3])
    )
    return matrix.repeat_interleave(sizes[2], 0).repeat_interleave(sizes[3], 1)[: sizes[0], : sizes[1]]


def over_blocks(kept: Callable[[int, int], bool], sizes: Sizes) -> Tensor:
    """The elements of the blocks (i, j) that are kept, where i and j number squares of the larger block size."""
    square = max(sizes[2:])
    n_q, n_k = -(-sizes[0] // sizes[2]), -(-sizes[1] // sizes[3])
    return by_blocks(
        [[kept(i * sizes[2] // square, j * sizes[3] // square) for j in range(n_k)] for i in range(n_q)], sizes
    )


def by_window(left: int | None, right: int | None) -> Callable:
    def build(sizes: Sizes) -> tuple[BlockMask, Tensor]:
        problem = Problem(1, sizes[0], sizes[1], 1, 1, 64, window=(left, right))
        seen = visible(problem, DEVICE)
        dense = torch.ones(sizes[:2], dtype=torch.bool, device=DEVICE) if seen is None else seen
        return BlockMask.sliding_window(*sizes[:2], window_size=(left, right), **how(sizes)), dense

    return build


def causal(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    return BlockMask.causal(*sizes[:2], **how(sizes)), positions(sizes)[2] <= 0


def causal_window(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    offset = positions(sizes)[2]
    mask = BlockMask.sliding_window(*sizes[:2], window_size=(70, 30), causal=True, **how(sizes))
    return mask, (offset <= 0) & (offset >= -70)


def by_globals(tokens: int) -> Callable:
    def build(sizes: Sizes) -> tuple[BlockMask, Tensor]:
        q, k, offset = positions(sizes)
        mask = BlockMask.local_global(*sizes[:2], window_size=(33, 65), global_tokens=tokens, **how(sizes))
        return mask, ((offset >= -33) & (offset <= 65)) | (k < tokens) | (q + sizes[1] - sizes[0] < tokens)

    return build


def strided(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    square = max(sizes[2:])
    level = -(-sizes[1] // square) - -(-sizes[0] // square)
    mask = BlockMask.strided(*sizes[:2], stride=3, local=2, **how(sizes))
    return mask, over_blocks(lambda i, j: (i + level - j) % 3 == 0 or abs(i + level - j) < 2, sizes)


@pytest.mark.parametrize("stride", [1000, (1 << 32) - 1, 1 << 32, (1 << 33) + 2, 1 << 70])
def test_a_stride_may_be_of_any_size(stride):
    """Further than any block it leaves the diagonal; as far as all, `local` takes all."""
    alone = BlockMask.strided(1000, 600, stride=99, device=DEVICE).to_dense()
    assert torch.equal(BlockMask.strided(1000, 600, stride=stride, device=DEVICE).to_dense(), alone)
    assert BlockMask.strided(1000, 600, stride=99, local=stride, device=DEVICE).to_dense().all()


def butterfly(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    powers = [0, *(1 << n for n in range(20))]
    return BlockMask.butterfly(*sizes[:2], **how(sizes)), over_blocks(lambda i, j: i ^ j in powers, sizes)


def cut(seqlen: int, at: tuple[float, ...]) -> list[int]:
    """Lengths of documents, one of them empty, that leave the last tokens to none."""
    ends = [0, *(int(seqlen * share) for share in at)]
    return [end - start for start, end in pairwise(ends)]


def belonging(lengths: list[int], seqlen: int, none: int) -> Tensor:
    """The document of each token, by counting."""
    tokens = [document for document, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor((tokens + [none] * seqlen)[:seqlen], dtype=torch.int64, device=DEVICE)


def documents(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    lengths, lengths_k = cut(sizes[0], (0.2, 0.2, 0.7, 0.9)), cut(sizes[1], (0.5, 0.6, 0.8, 0.95))
    mask = BlockMask.documents(lengths, lengths_k=lengths_k, seqlen_q=sizes[0], seqlen_k=sizes[1], **how(sizes))
    return mask, belonging(lengths, sizes[0], -1)[:, None] == belonging(lengths_k, sizes[1], -2)


def documents_of_a_batch(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    batch = [cut(sizes[0], (0.3, 0.55, 1.0)), cut(sizes[0], (0.0, 0.9, 0.9))]
    mask = BlockMask.documents(
        torch.tensor(batch, device=DEVICE), seqlen_q=sizes[0], seqlen_k=sizes[1], block_q=sizes[2], block_kv=sizes[3]
    )
    dense = [belonging(lengths, sizes[0], -1)[:, None] == belonging(lengths, sizes[1], -2) for lengths in batch]
    return mask, torch.stack(dense)[:, None]


def drawn(sizes: Sizes, *shape: int, seed: int = 0) -> Tensor:
    """A random block matrix, or a random dense mask."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def n_blocks(sizes: Sizes) -> tuple[int, int]:
    return -(-sizes[0] // sizes[2]), -(-sizes[1] // sizes[3])


def from_blocks(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    blocks = drawn(sizes, 2, 3, *n_blocks(sizes)) < 0.5
    dense = torch.stack([torch.stack([by_blocks(head.tolist(), sizes) for head in one]) for one in blocks])
    return BlockMask.from_blocks(blocks, *sizes[:2], block_q=sizes[2], block_kv=sizes[3]), dense


def from_causal_blocks(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    blocks = drawn(sizes, *n_blocks(sizes)) < 0.5
    mask = BlockMask.from_blocks(
        blocks, *sizes[:2], causal=True, window_size=(150, 3), block_q=sizes[2], block_kv=sizes[3]
    )
    offset = positions(sizes)[2]
    return mask, by_blocks(blocks.tolist(), sizes) & (offset <= 0) & (offset >= -150)


def from_full_blocks(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    blocks, full = drawn(sizes, *n_blocks(sizes)) < 0.5, drawn(sizes, *n_blocks(sizes), seed=1) < 0.3
    mask = BlockMask.from_blocks(blocks, *sizes[:2], full=full, causal=True, block_q=sizes[2], block_kv=sizes[3])
    return mask, by_blocks(full.tolist(), sizes) | (by_blocks(blocks.tolist(), sizes) & (positions(sizes)[2] <= 0))


def from_dense(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    noise = drawn(sizes, 2, 1, *sizes[:2]) < 0.1
    dense = from_blocks(sizes)[1] | (noise & from_blocks(sizes)[1].roll(1, 1))
    return BlockMask.from_dense(dense, block_q=sizes[2], block_kv=sizes[3]), dense


def from_flat_dense(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    dense = drawn(sizes, sizes[1], sizes[0]).T < 0.01  # rows that are not contiguous
    return BlockMask.from_dense(dense, block_q=sizes[2], block_kv=sizes[3]), dense


def top_k(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    n_q, n_k = n_blocks(sizes)
    scores = (drawn(sizes, n_q, n_k) * 4).floor()  # with equal ones
    scores[:, ::3] = torch.nan
    in_band = BlockMask.causal(*sizes[:2], **how(sizes)).to_dense()[0, 0]
    blocks = [[False] * n_k for _ in range(n_q)]
    for i, row in enumerate(scores.tolist()):
        whole = in_band[i * sizes[2] : (i + 1) * sizes[2]]
        possible = [
            j for j, score in enumerate(row) if score == score and whole[:, j * sizes[3] : (j + 1) * sizes[3]].any()
        ]
        for j in sorted(possible, key=lambda j, row=row: -row[j])[:2]:
            blocks[i][j] = True
    mask = BlockMask.top_k(scores, 2, *sizes[:2], causal=True, block_q=sizes[2], block_kv=sizes[3])
    return mask, by_blocks(blocks, sizes) & in_band


def from_flex(sizes: Sizes) -> tuple[BlockMask, Tensor]:
    document = torch.arange(max(sizes[:2]), device=DEVICE) // 150  # with nothing to read past the ends

    def mask_mod(b, h, q, k):
        return (document[q] == document[k]) & (k <= q + 40 * h) | (k < 10 * b)

    arguments = (mask_mod, 2, 3, *sizes[:2])
    flex = create_block_mask(*arguments, device=DEVICE, BLOCK_SIZE=sizes[2:])
    return BlockMask.from_flex(flex), create_mask(*arguments, device=DEVICE)


BUILDERS = {
    "causal": causal,
    "causal window": causal_window,
    **{
        f"window {sides}": by_window(*sides)
        for sides in [(None, None), (0, 0), (63, 64), (None, 10), (200, None), (1 << 40, 1)]
    },
    **{f"{tokens} global": by_globals(tokens) for tokens in (0, 1, 64, 128, 130, 1 << 40)},
    "strided": strided,
    "butterfly": butterfly,
    "documents": documents,
    "documents of a batch": documents_of_a_batch,
    "from_blocks": from_blocks,
    "from_blocks causal": from_causal_blocks,
    "from_blocks full": from_full_blocks,
    "from_dense": from_dense,
    "from_dense flat": from_flat_dense,
    "top_k": top_k,
    "from_flex": from_flex,
}
EVERY_BUILDER = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def block_of(dense: Tensor, i: int, j: int, mask: BlockMask) -> Tensor:
    return dense[..., i * mask.block_q : (i + 1) * mask.block_q, j * mask.block_kv : (j + 1) * mask.block_kv]


def in_partial_block(mask: BlockMask, b: int, h: int, i: int, j: int, where: int) -> Tensor:
    """What a kernel applies to a partial block, told without the package's own tools."""
    q = torch.arange(i * mask.block_q, min((i + 1) * mask.block_q, mask.seqlen_q))
    k = torch.arange(j * mask.block_kv, min((j + 1) * mask.block_kv, mask.seqlen_k))
    left, right = mask.element.span
    offset = k - q[:, None] - (mask.seqlen_k - mask.seqlen_q)
    seen = torch.ones_like(offset, dtype=torch.bool)
    seen &= offset <= (1 << 40 if right is None else right)
    seen &= offset >= -(1 << 40 if left is None else left)
    if mask.element.bits is not None:
        words = mask.element.bits[b, h, where].cpu()
        seen &= torch.stack([words[:, c // 8] >> (c % 8) & 1 for c in range(mask.block_kv)], 1).bool()[
            : len(q), : len(k)
        ]
    return seen


def check_lists(mask: BlockMask, dense: Tensor) -> None:
    """Both lists and the bits say what the dense mask says: what has nothing to see is skipped,
    what sees all is full."""
    dense = dense.expand(mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k).cpu()
    n_q, n_k = n_blocks((mask.seqlen_q, mask.seqlen_k, mask.block_q, mask.block_kv))
    for lists, n, m in ((mask.rows, n_q, n_k), (mask.columns, n_k, n_q)):
        tensors = (lists.counts, lists.full, lists.indices, lists.order)
        assert all(x.dtype == torch.int32 and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors)
        counts, full, indices, order = (x.tolist() for x in tensors)
        where = [] if lists.bit_index is None else lists.bit_index.tolist()
        for b in range(mask.batch):
            for h in range(mask.heads):
                for row in range(n):
                    pairs = {other: (row, other) if lists is mask.rows else (other, row) for other in range(m)}
                    blocks = {other: block_of(dense[b, h], *pair, mask) for other, pair in pairs.items()}
                    whole = [other for other, block in blocks.items() if block.all()]
                    partial = [other for other, block in blocks.items() if block.any() and other not in whole]
                    assert counts[b][h][row] == len(whole) + len(partial) and full[b][h][row] == len(whole)
                    rest = [0] * (lists.width - len(whole) - len(partial))
                    assert indices[b][h][row] == partial + whole + rest
                    assert not where or where[b][h][row][len(partial) :] == [0] * (lists.width - len(partial))
                    for nth, other in enumerate(partial):
                        applied = in_partial_block(mask, b, h, *pairs[other], where[b][h][row][nth] if where else 0)
                        assert torch.equal(applied, blocks[other])
                assert sorted(order[b][h]) == [*range(n)]
                assert [counts[b][h][row] for row in order[b][h]] == sorted(counts[b][h], reverse=True)


@EVERY_SIZE
@EVERY_BUILDER
def test_a_builder_is_its_formula(build, sizes):
    mask, dense = build(sizes)
    expected = dense.expand(mask.batch, mask.heads, *sizes[:2])
    assert mask.to_dense().shape == expected.shape and torch.equal(mask.to_dense(), expected)
    check_lists(mask, dense)
    assert replace(mask).validate()


@settings(max_examples=150)
@given(
    st.tuples(st.integers(1, 1200), st.integers(1, 1200), st.sampled_from((64, 128)), st.sampled_from((64, 128))),
    st.one_of(
        st.builds(by_window, st.one_of(st.none(), st.integers(0, 1300)), st.one_of(st.none(), st.integers(0, 1300))),
        st.builds(by_globals, st.integers(0, 1300)),
        st.sampled_from([causal, strided, butterfly, documents, documents_of_a_batch, from_flat_dense, top_k]),
    ),
)
def test_a_builder_is_its_formula_at_any_size(sizes, build):
    """There is room for as many blocks as any sizes lead to."""
    mask, dense = build(sizes)
    assert torch.equal(mask.to_dense(), dense.expand(mask.batch, mask.heads, *sizes[:2]))
    check_lists(mask, dense)


@EVERY_BUILDER
def test_shares(build):
    mask, dense = build((300, 200, 64, 128))
    kept = sum(
        block_of(dense, i, j, mask).flatten(-2).any(-1).float().mean().item() for i in range(5) for j in range(2)
    )
    assert mask.density == pytest.approx(kept / 10)
    assert mask.visible == pytest.approx(dense.float().mean().item())


@EVERY_BUILDER
def test_compact_is_the_same_in_less(build):
    mask, dense = build((300, 513, 128, 64))
    compact = mask.compact()
    check_lists(compact, dense)
    for small, lists in ((compact.rows, mask.rows), (compact.columns, mask.columns)):
        assert small.width == lists.counts.max()
    if compact.element.bits is not None:
        partials = (mask.rows.counts - mask.rows.full).sum(-1)
        assert compact.element.bits.shape[2] == partials.max()


@pytest.mark.parametrize("sizes", [(0, 0, 64, 64), (0, 100, 64, 64), (100, 0, 64, 64)], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        causal,
        by_globals(1),
        by_globals(64),
        strided,
        butterfly,
        documents,
        from_blocks,
        from_dense,
        from_flat_dense,
        top_k,
    ],
)
def test_nothing_to_see(build, sizes):
    mask, _ = build(sizes)
    assert mask.to_dense().shape[2:] == sizes[:2] and not mask.to_dense().any()
    assert replace(mask).validate() and mask.density == mask.visible == 0 and "no blocks" in str(mask)
    assert (mask & mask | mask).compact().to_dense().shape[2:] == sizes[:2]


@pytest.mark.parametrize("seqlen", [0, 200])
def test_an_empty_batch_has_a_mask(seqlen):
    blocks = torch.zeros(0, 1, -(-seqlen // 128), -(-seqlen // 128), dtype=torch.bool, device=DEVICE)
    elements = torch.zeros(0, 1, seqlen, seqlen, dtype=torch.bool, device=DEVICE)
    for mask in (BlockMask.from_blocks(blocks, seqlen), BlockMask.from_dense(elements)):
        assert replace(mask).validate() and mask.to_dense().shape == elements.shape
        q = torch.zeros(0, seqlen, 2, 16, device=DEVICE, requires_grad=True)
        out = flashzoo.attention(q, q, q, block_mask=mask.compact(), version="blocksparse")
        assert out.shape == q.shape and torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("seqlen_q", [None, 100])
@pytest.mark.parametrize("lengths", [[50.9, 20], [-5, 10], [True, 10]], ids=str)
def test_lengths_of_documents_are_looked_at(lengths, seqlen_q):
    with pytest.raises(ValueError, match="lengths must be an int, 0 or more"):
        BlockMask.documents(lengths, seqlen_q=seqlen_q)


def test_documents_have_room():
    with pytest.raises(ValueError, match="lengths must add up to no more than seqlen_q 100, got 101"):
        BlockMask.documents([50, 51], seqlen_q=100)
    with pytest.raises(ValueError, match="lengths_k must add up to no more than seqlen_k 30, got 31"):
        BlockMask.documents([10, 20], lengths_k=[1, 30], seqlen_k=30)


def test_tokens_of_no_document_take_no_room():
    mask = BlockMask.documents([10, 0, 300], seqlen_q=4000, seqlen_k=5000, device=DEVICE)
    assert mask.element.bits.shape[2] < 200 and mask.rows.counts.sum() == 9
    assert mask.validate().to_dense().sum() == 10 * 10 + 300 * 300


def test_defaults():
    mask = BlockMask.documents([10, 20])
    assert (mask.seqlen_q, mask.seqlen_k, mask.block_q, mask.block_kv, mask.batch, mask.heads) == (
        30,
        30,
        128,
        128,
        1,
        1,
    )
    assert mask.device == torch.get_default_device()
    assert BlockMask.causal(200).seqlen_k == 200


# Random blocks


def chosen(mask: BlockMask) -> Tensor:
    return mask.rows.indices.cpu()


def test_random_blocks():
    mask = BlockMask.random(8192, 4096, blocks=5, seed=3, batch=2, heads=4, block_q=64, device=DEVICE)
    assert mask.rows.counts.shape == (2, 4, 128) and (mask.rows.counts == 5).all() and (mask.rows.full == 5).all()
    check_lists(mask, mask.to_dense())
    times = torch.bincount(chosen(mask).flatten().long(), minlength=32).float()
    assert times.sum() == 5120 and (times - 160).abs().max() < 5 * 160**0.5  # all blocks are as likely
    # rows, heads and batches are drawn apart
    assert len({tuple(row) for row in chosen(mask).flatten(0, 2).tolist()}) > 1000
    with_others = BlockMask.random(8192, 4096, blocks=5, seed=4, batch=2, heads=4, block_q=64, device=DEVICE)
    assert not torch.equal(chosen(mask), chosen(with_others))
    assert (BlockMask.random(100, blocks=9, device=DEVICE).rows.counts == 1).all()
    assert BlockMask.random(100, blocks=0, device=DEVICE).density == 0


def test_random_blocks_are_the_same_everywhere():
    assert chosen(BlockMask.random(512, 4096, blocks=4, seed=-7, device=DEVICE)).tolist() == GOLDEN


GOLDEN = [[[[21, 29, 30, 31], [15, 17, 20, 25], [2, 11, 23, 27], [19, 24, 25, 30]]]]


# Algebra


def masks(sizes: Sizes) -> st.SearchStrategy[tuple[BlockMask, Tensor]]:
    """Expressions of masks, beside the same ones of dense masks."""
    sides = st.one_of(st.none(), st.integers(0, 300))
    seeds = st.integers(0, 1 << 20)
    leaves = st.one_of(
        st.sampled_from([build for name, build in BUILDERS.items() if name != "from_flex"]).map(
            lambda build: build(sizes)
        ),
        st.builds(lambda left, right: by_window(left, right)(sizes), sides, sides),
        st.builds(lambda tokens: by_globals(tokens)(sizes), st.integers(0, 300)),
        st.builds(lambda seed: _dense_of_heads(sizes, seed), seeds),
    )

    def combined(children: st.SearchStrategy) -> st.SearchStrategy:
        def combine(a: tuple[BlockMask, Tensor], b: tuple[BlockMask, Tensor], union: bool) -> tuple[BlockMask, Tensor]:
            return (a[0] | b[0], a[1] | b[1]) if union else (a[0] & b[0], a[1] & b[1])

        return st.builds(combine, children, children, st.booleans())

    return st.recursive(leaves, combined, max_leaves=4).filter(lambda drawn: drawn[0].batch in (1, 2))


def _dense_of_heads(sizes: Sizes, seed: int) -> tuple[BlockMask, Tensor]:
    dense = drawn(sizes, 1, 3, *sizes[:2], seed=seed) < 0.02
    return BlockMask.from_dense(dense, block_q=sizes[2], block_kv=sizes[3]), dense


@pytest.mark.parametrize("sizes", [(300, 200, 64, 128), (200, 300, 128, 64), (256, 256, 128, 128)], ids=str)
def test_and_and_or_are_those_of_the_elements(sizes):
    @settings(max_examples=60)
    @given(masks(sizes))
    def holds(drawn_mask: tuple[BlockMask, Tensor]) -> None:
        mask, dense = drawn_mask
        assert torch.equal(mask.to_dense(), dense.expand(mask.batch, mask.heads, *sizes[:2]))
        check_lists(mask, dense)
        assert replace(mask).validate()

    holds()


def test_bands_need_no_bits():
    """What a band can say exactly stays one, which is faster and takes no memory."""
    sizes = (1000, 1300, 128, 64)
    window, triangle = by_window(100, 70)(sizes)[0], causal(sizes)[0]
    both = window & triangle
    assert both.element.bits is None and both.element.span == (100, 0) and both.rows.width == window.rows.width
    assert (triangle | triangle).element.bits is None
    assert (triangle & butterfly(sizes)[0]).element.bits is None
    sinks = triangle & by_window(100, None)(sizes)[0] | BlockMask.from_blocks(
        (torch.arange(21, device=DEVICE) < 1).expand(8, 21), *sizes[:2], block_kv=64
    )
    assert sinks.element.bits is None and sinks.element.span == (100, 0)
    assert (sinks | sinks).element.bits is None and (sinks & butterfly(sizes)[0]).element.bits is None
    q, k, offset = positions(sizes)
    check_lists(sinks, ((offset <= 0) & (offset >= -100)) | (k < 64) & (q >= 0))
    check_lists(sinks & triangle, (((offset <= 0) & (offset >= -100)) | (k < 64)) & (offset <= 0))
    assert by_globals(128)((1024, 1024, 128, 64))[0].element.bits is None


def test_narrow_lists_widen():
    one, other = (BlockMask.random(8192, blocks=3, seed=seed, device=DEVICE) for seed in (0, 1))
    both = one | other
    assert both.rows.counts.max() == both.rows.width == 6
    assert torch.equal(both.to_dense(), one.to_dense() | other.to_dense())


def test_partial_blocks_that_the_band_does_not_cut():
    """Lists made by hand may call partial what the band shows all or nothing of."""
    mask = BlockMask.butterfly(1500, device=DEVICE)
    expected = mask.to_dense() & (positions((1500, 1500, 128, 128))[2] <= 0)
    mask = changed(mask, "element", BlockMask.causal(1).element)
    for name in ("rows.full", "columns.full"):
        mask = changed(mask, name, torch.zeros_like(mask.rows.full))
    assert torch.equal(mask.to_dense(), expected) and mask.visible == pytest.approx(expected.float().mean().item())
    window, dense = by_window(200, 30)((1500, 1500, 128, 128))
    for combined, elements in (
        (mask & window, expected & dense),
        (mask | window, expected | dense),
        (mask.compact(), expected),
    ):
        check_lists(combined, elements)


def test_masks_of_other_sizes_do_not_combine():
    mask = BlockMask.causal(256, device=DEVICE)
    for other, name in (
        (BlockMask.causal(128, 256, device=DEVICE), "seqlen_q"),
        (BlockMask.causal(256, 128, device=DEVICE), "seqlen_k"),
        (BlockMask.causal(256, block_q=64, device=DEVICE), "block_q"),
        (BlockMask.causal(256, block_kv=64, device=DEVICE), "block_kv"),
        (BlockMask.causal(256, device="meta"), "device"),
    ):
        with pytest.raises(ValueError, match=f"same {name}"):
            _ = mask & other
    two, three = (BlockMask.random(256, blocks=1, heads=heads, device=DEVICE) for heads in (2, 3))
    with pytest.raises(ValueError, match="same heads or 1, got 2 and 3"):
        _ = two | three
    for other in (None, True, torch.ones(256, 256)):
        with pytest.raises(TypeError):
            _ = mask & other


# FlexAttention's masks


def test_flex_without_full_blocks_or_a_mask_mod():
    counts, indices = (
        torch.tensor([[[1, 2, 0]]], device=DEVICE).int(),
        torch.tensor([[[[2, 0, 0], [2, 0, 1], [0, 1, 2]]]], device=DEVICE),
    )
    mask = BlockMask.from_flex(FlexMask.from_kv_blocks(counts, indices.int(), seq_lengths=(300, 384)))
    assert mask.rows.counts.tolist() == [[[1, 2, 0]]] and mask.rows.full.tolist() == [[[1, 2, 0]]]
    assert mask.rows.indices[0, 0].tolist() == [[2, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert mask.element.bits is None and (mask.seqlen_q, mask.seqlen_k) == (300, 384)


def test_flex_block_sizes_and_types():
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device=DEVICE, BLOCK_SIZE=256)
    with pytest.raises(ValueError, match=r"block_q must be one of \(64, 128\), got 256"):
        BlockMask.from_flex(flex)
    with pytest.raises(TypeError, match=r"mask must be a torch\.nn\.attention\.flex_attention\.BlockMask, got Tensor"):
        BlockMask.from_flex(torch.ones(2, 2))


def test_flex_indices_outside_are_passed_over():
    counts, indices = torch.tensor([[[3]]], device=DEVICE).int(), torch.tensor([[[[1, 9, -1]]]], device=DEVICE).int()
    flex = FlexMask(
        (100, 200), counts, indices, *[None] * 6, BLOCK_SIZE=(128, 128), mask_mod=lambda b, h, q, k: k < 150
    )
    mask = BlockMask.from_flex(flex)
    assert mask.rows.counts.tolist() == [[[1]]] and torch.equal(
        mask.to_dense().sum(-1).unique().cpu(), torch.tensor([22])
    )
