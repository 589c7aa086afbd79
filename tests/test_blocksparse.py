"""Block masks: what THE suite, which draws them at random by their form, does not say of them.

Every version that declares `block_mask` runs every case here, forward and backward, or forward alone, or is spared for
the reasons that it gives itself.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashzoo
from flashzoo import BlockMask, Problem
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.inputs import block_mask
from flashzoo.reference import Result
from flashzoo.workloads import workloads
from flashzoo_suite import support
from flashzoo_suite.support import (
    DEVICE,
    SMALL,
    accept,
    both,
    draw,
    dtypes_of,
    forward,
    gives_lse,
    interpreted,
    same_bits,
    takes,
    toy,
)

on = {"device": DEVICE}
SPECS = flashzoo.versions()
MASKED = tuple(name for name, spec in SPECS.items() if "block_mask" in spec.features and dtypes_of(spec))
"""All that take masks on this device."""
SKIPPING = tuple(name for name in MASKED if name not in ("sdpa", "standard"))
"""Those of them that don't make a dense mask of it."""
DTYPES = {name: [dtype for dtype in ("fp16", "bf16", "fp32") if dtype in dtypes_of(SPECS[name])] for name in MASKED}

masked = pytest.mark.parametrize("version", MASKED)
skipping = pytest.mark.parametrize("version", SKIPPING)


def problem_of(mask: BlockMask, version: str = "blocksparse", **fields) -> Problem:
    """A small problem that has room for the mask, with an LSE where the version gives one,
    and with gradients where it takes that."""
    heads = mask.heads if mask.heads > 1 else 2
    plain = {"batch": mask.batch, "heads": heads, "heads_kv": heads, "head_dim": 32, "head_dim_v": None}
    numbers = {"dtype": DTYPES[version][-1], "out_dtype": None}
    asked = {"grad": True, "lse": gives_lse(SPECS[version]), "block_mask": mask.form}
    problem = replace(SMALL, seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **plain | numbers | asked | fields)
    forward = replace(problem, grad=False)
    if not takes(SPECS[version], forward):
        pytest.skip(f"{version}: {'; '.join(SPECS[version].unsupported(forward))}")
    return problem if takes(SPECS[version], problem) else forward


def block_of(version: str) -> int:
    """The smallest square block that a version takes in both passes, or else any."""
    return next((n for n in (64, 128) if takes(SPECS[version], problem_of_blocks(version, n))), 128)


def problem_of_blocks(version: str, n: int) -> Problem:
    return replace(
        SMALL,
        head_dim=32,
        head_dim_v=None,
        dtype=DTYPES[version][-1],
        out_dtype=None,
        grad=True,
        block_mask=MaskForm(n, n),
    )


def run(
    mask: BlockMask, tensors, problem: Problem, dout: Tensor, dlse: Tensor | None, version: str = "blocksparse"
) -> Result:
    """Forward and, where the problem has gradients, backward with this very mask."""
    return both(
        version,
        tensors,
        replace(problem, block_mask=None),
        dout,
        dlse,
        attention=partial(flashzoo.attention, block_mask=mask),
    )


def check(mask: BlockMask, version: str = "blocksparse", **fields) -> Result:
    """What the version gives, held to the oracle with the dense mask."""
    problem = problem_of(mask, version, **fields)
    tensors, dout, dlse = draw(problem)
    result = run(mask, tensors, problem, dout, dlse, version)
    accept(Judge(*tensors, problem, dout, dlse, mask=mask.to_dense()), result)
    return result


def dense(*shape: int, seed: int = 0) -> Tensor:
    """Elements in blocks of all three kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (*shape[:-2], -(-shape[-2] // 64), -(-shape[-1] // 64)), generator=generator)
    kinds = kinds.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., : shape[-2], : shape[-1]]
    return ((kinds == 2) | (kinds == 1) & (torch.rand(shape, generator=generator) < 0.4)).to(DEVICE)


PATTERNS = {
    "causal": ({}, lambda n: BlockMask.causal(200, 330, **n)),
    "causal_more_queries": ({"block_q": 64}, lambda n: BlockMask.causal(330, 200, **n)),
    "window": ({"block_kv": 64}, lambda n: BlockMask.sliding_window(300, 333, window_size=(40, 20), **n)),
    "window_causal": (
        {"block_q": 64, "block_kv": 64},
        lambda n: BlockMask.sliding_window(260, window_size=(90, None), causal=True, **n),
    ),
    "local_global": ({}, lambda n: BlockMask.local_global(300, 270, window_size=(30, 30), global_tokens=70, **n)),
    "sinks": (
        {},
        lambda n: BlockMask.local_global(300, window_size=(50, 0), global_tokens=4, **n) & BlockMask.causal(300, **n),
    ),
    "strided": ({"block_q": 64, "block_kv": 64}, lambda n: BlockMask.strided(300, stride=3, **n)),
    "butterfly": ({"block_q": 64, "block_kv": 64}, lambda n: BlockMask.butterfly(500, **n)),
    "random": ({"block_kv": 64}, lambda n: BlockMask.random(300, 400, blocks=2, batch=2, heads=4, **n)),
    "documents": ({}, lambda n: BlockMask.documents([100, 31, 0, 140], **n)),
    "documents_causal": ({}, lambda n: BlockMask.documents([100, 31, 140], **n) & BlockMask.causal(271, **n)),
    "dense": ({}, lambda n: BlockMask.from_dense(dense(270, 203), **sizes_of(n))),
    "dense_by_heads": ({"block_q": 64}, lambda n: BlockMask.from_dense(dense(2, 4, 140, 200), **sizes_of(n))),
    "dense_by_batch": ({"block_kv": 64}, lambda n: BlockMask.from_dense(dense(3, 1, 70, 65), **sizes_of(n))),
    "top_k": (
        {"block_q": 64, "block_kv": 64},
        lambda n: BlockMask.top_k(scores(n), 2, 300, 250, causal=True, **sizes_of(n)),
    ),
    "everything": ({}, lambda n: BlockMask.sliding_window(200, 130, window_size=None, **n)),
    "nothing": ({}, lambda n: BlockMask.from_blocks(blocks_of(200, 300, n) < 0, 200, 300, **sizes_of(n))),
    "one_token": ({}, lambda n: BlockMask.causal(1, **n)),
}
"""Sizes of blocks that stand for the defaults, and what is built of blocks of such sizes,
on the device that is with them."""


def sizes_of(blocks: dict) -> dict:
    """Of blocks, without the device."""
    return {name: size for name, size in blocks.items() if name != "device"}


def blocks_of(seqlen_q: int, seqlen_k: int, sizes: dict) -> Tensor:
    """A number for each block."""
    n_q, n_k = -(-seqlen_q // sizes.get("block_q", 128)), -(-seqlen_k // sizes.get("block_kv", 128))
    return torch.rand(n_q, n_k, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def scores(sizes: dict) -> Tensor:
    """By heads, none like the other."""
    one = blocks_of(300, 250, sizes)
    return torch.stack([one, one.flip(0)])[None]


def mask_of(pattern: str, **sizes: int) -> BlockMask:
    """A pattern in its own blocks, or in blocks of these sizes."""
    own, build = PATTERNS[pattern]
    return build(on | own | sizes)


CASES = [
    pytest.param(
        version,
        dtype,
        pattern,
        sizes,
        id="-".join(filter(None, (version, dtype, pattern, "x".join(map(str, sizes.values()))))),
    )
    for turn, (pattern, (own, _)) in enumerate(PATTERNS.items())
    for sizes in ({}, *([{"block_q": 128, "block_kv": 128}] if own else []))
    for version in MASKED
    for dtype in (DTYPES[version][turn % len(DTYPES[version]) :][:1] if interpreted(version) else DTYPES[version])
]
"""Interpreted, a dtype is NumPy's: there the patterns take them in turns."""


@pytest.mark.covering(2)
@pytest.mark.parametrize(("version", "dtype", "pattern", "sizes"), CASES)
def test_patterns(version, dtype, pattern, sizes):
    mask = mask_of(pattern, **sizes)
    shared = mask.heads // (1 if sizes else 2)  # not every version has groups where heads have masks of their own
    check(mask, version, dtype=dtype, heads_kv=max(1, shared))


@pytest.mark.covering(2)
@masked
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("pattern", ["causal", "dense"])
def test_every_width_of_tiles(pattern, head_dim, version):
    """Blocks of 128 by 128, which tiles are a part of where heads are wide."""
    check(mask_of(pattern, block_q=128, block_kv=128), version, head_dim=head_dim, heads_kv=1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("block_kv", [64, 128])
@masked
def test_every_length_around_a_block(block_q, block_kv, version):
    for seqlen_q, seqlen_k in ((63, 129), (64, 128), (65, 127), (128, 64), (129, 65), (127, 192)):
        kept = torch.ones(-(-seqlen_q // block_q), -(-seqlen_k // block_kv), dtype=torch.bool, device=DEVICE)
        check(BlockMask.from_blocks(kept, seqlen_q, seqlen_k, block_q=block_q, block_kv=block_kv), version, heads_kv=1)


@masked
def test_bits_and_a_band(version):
    """No builder gives both, but a mask may have them."""
    masks = [BlockMask.from_dense(dense(200, 200, seed=1)), BlockMask.causal(200, **on)]
    both_of = replace(masks[0], element=replace(masks[0].element, causal=True, window=(150, None))).validate()
    check(both_of, version)
    full = masks[0].rows.full.sum()
    assert bool((both_of.to_dense() != masks[0].to_dense()).any()) or not full


@masked
def test_rows_and_columns_that_keep_nothing(version):
    kept = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)
    result = check(BlockMask.from_blocks(kept, 300, 300), version)
    rows = columns = slice(128, 256)
    assert not result.out[:, rows].any() and not result.dq[:, rows].any()
    assert not result.dk[:, columns].any() and not result.dv[:, columns].any()
    if result.lse is not None:
        assert bool((result.lse[:, :, rows] == -torch.inf).all())
        assert bool(result.lse[:, :, :128].isfinite().all())


@skipping
def test_what_is_skipped_is_not_read(version):
    """NaN where no kept block looks changes nothing, also where a row keeps no block."""
    n = block_of(version)
    kept = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=DEVICE)
    mask = BlockMask.from_blocks(kept, 4 * n - 30, 4 * n - 10, block_q=n, block_kv=n)
    problem = problem_of(mask, version)
    (q, k, v), dout, dlse = draw(problem)
    sound = run(mask, (q, k, v), problem, dout, dlse, version)
    assert not sound.out[:, 3 * n :].any()
    for x in (k, v):
        x[:, :n] = torch.nan
        x[:, 2 * n : 3 * n] = torch.nan
    found = run(mask, (q, k, v), problem, dout, dlse, version)
    # dQ may be summed in any order.
    exact = [
        name for name in sound.items() if name != "dq" or takes(SPECS[version], replace(problem, deterministic=True))
    ]
    assert [name for name in exact if not same_bits(found.items()[name], sound.items()[name])] == []
    assert not any(bool(x.isnan().any()) for x in found.items().values())


@masked
def test_nothing_past_the_end_is_read(version):
    """Neither of the inputs nor, past counts, of the lists."""
    n = block_of(version)
    mask = BlockMask.from_dense(dense(150, 203), block_q=n, block_kv=n)

    def spoiled(lists):
        past = torch.arange(lists.width, device=DEVICE) >= lists.counts[..., None]
        spoil = {
            "indices": lists.indices.masked_fill(past, 1 << 30),
            "bit_index": lists.bit_index.masked_fill(past, 1 << 30),
        }
        return replace(lists, **spoil)

    mask = replace(mask, rows=spoiled(mask.rows), columns=spoiled(mask.columns)).validate()
    problem = problem_of(mask, version, heads_kv=1)
    tensors, dout, dlse = draw(problem)
    longer = []
    for x in (*tensors, dout):
        buffer = x.new_full((x.shape[0], x.shape[1] + 200, x.shape[2] + 1, x.shape[3] + 16), torch.nan)
        longer.append(buffer[:, 100:-100, 1:, 8:-8].copy_(x))
    result = run(mask, tuple(longer[:3]), problem, longer[3], dlse, version)
    accept(Judge(*tensors, problem, dout, dlse, mask=mask.to_dense()), result)


def test_all_blocks_are_v2():
    """The same tiles in the same order, so on the CPU the same bits; on a GPU tiles may differ."""
    mask = mask_of("everything")
    problem = problem_of(mask)
    tensors, dout, dlse = draw(problem)
    masked, plain = (
        run(mask, tensors, problem, dout, dlse).items(),
        both("v2", tensors, replace(problem, block_mask=None), dout, dlse).items(),
    )
    for name, x in plain.items():
        assert same_bits(masked[name], x) if DEVICE == "cpu" else torch.allclose(masked[name], x, rtol=1e-4, atol=1e-4)


@masked
def test_causal_beside_a_mask(version):
    """A key is seen where both say so; as if the mask said both."""
    sizes = {"block_q": block_of(version), "block_kv": block_of(version)}
    mask = mask_of("random", **sizes)
    problem = problem_of(mask, version, heads_kv=2, window=(100, 0))
    tensors, dout, dlse = draw(problem)
    result = run(mask, tensors, problem, dout, dlse, version)
    accept(Judge(*tensors, problem, dout, dlse, mask=mask.to_dense()), result)
    composed = mask & BlockMask.sliding_window(mask.seqlen_q, mask.seqlen_k, window_size=(100, 0), **sizes, **on)
    alone = replace(problem, window=(None, None), block_mask=composed.form)
    accept(Judge(*tensors, alone, dout, dlse, mask=composed.to_dense()), result)


@skipping
def test_the_same_bits_in_every_run(version):
    mask = mask_of("dense_by_heads", block_q=block_of(version))
    problem = problem_of(mask, version, heads_kv=2, deterministic=True)
    tensors, dout, dlse = draw(problem)
    first, again = (run(mask, tensors, problem, dout, dlse, version).items() for _ in range(2))
    assert [name for name in first if not same_bits(first[name], again[name])] == []


class TestDispatch:
    @pytest.mark.parametrize("arch", [80, 90, 100])
    def test_auto_takes_it_for_masks_that_v3_refuses_and_for_nothing_else(self, arch):
        for workload in workloads():
            for dtype in ("fp16", "bf16", "fp32") if not workload.problem.kv_in_e4m3 else ():
                problem = replace(workload.problem, dtype=dtype, out_dtype=None, device="cuda", arch=arch, grad=True)
                chosen = flashzoo.explain(problem).chosen
                if problem.block_mask is None:
                    assert chosen != "blocksparse"
                elif takes(SPECS["v3"], problem):
                    assert chosen == "v3" and arch == 90 and problem.block_mask.block_q == 128
                else:
                    alike = problem.head_dim == problem.head_dim_v
                    assert chosen == ("standard" if problem.sinks else "blocksparse" if alike else "sdpa")

    def test_on_the_cpu_auto_makes_a_dense_mask(self):
        q = torch.randn(1, 70, 2, 16)
        assert flashzoo.explain(q, q, q, block_mask=BlockMask.causal(70)).chosen == "sdpa"

    @pytest.mark.parametrize(
        "version", [name for name, spec in flashzoo.versions().items() if "block_mask" not in spec.features]
    )
    def test_others_refuse_it(self, version):
        spec = flashzoo.versions()[version]
        asked = replace(SMALL, block_mask=MaskForm())
        assert "does not support block_mask" in spec.unsupported(asked)
        assert not takes(spec, asked)

    def test_explain_tells_its_form(self):
        q = torch.empty(2, 200, 4, 64, dtype=torch.bfloat16, device="meta")
        text = str(
            flashzoo.explain(
                q, q, q, block_mask=BlockMask.sliding_window(200, window_size=(9, 0), causal=True), arch=90
            )
        )
        assert "block mask 128x128 (causal, window (9, 0))" in text and "v3 takes" in text

    def test_explain_tells_what_happens_without_one(self):
        problem = replace(SMALL, device="cuda", arch=90, dtype="bf16", out_dtype=None, causal=True)
        assert "no block_mask: one that says what causal and window_size do is made at every call" in str(
            flashzoo.explain(problem, version="blocksparse")
        )
        beside = replace(problem, block_mask=MaskForm())
        assert "put into the block mask at the first such call of a stream, and kept with it" in str(
            flashzoo.explain(beside, version="blocksparse")
        )


class TestHanded:
    """What a version is called with."""

    @pytest.fixture
    def handed(self, monkeypatch):
        calls = []

        def implementation(q, k, v, problem, operands):
            calls.append((problem, operands.block_mask))
            return q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]) if problem.lse else None

        monkeypatch.setattr(support, "handed", implementation, raising=False)
        flashzoo.register(toy(impl="flashzoo_suite.support:handed"))
        yield calls
        flashzoo.unregister("toy")

    @pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (70, 3)), (True, (70, -1))])
    def test_a_mask_with_causal_and_window_in_it(self, handed, causal, window):
        q, mask = (
            torch.randn(1, 300, 2, 16, device=DEVICE),
            BlockMask.strided(300, stride=2, block_q=64, block_kv=64, **on),
        )
        flashzoo.attention(q, q, q, causal=causal, window_size=window, block_mask=mask, version="toy")
        [(problem, given)] = handed
        band = BlockMask.sliding_window(300, window_size=window, causal=causal, block_q=64, block_kv=64, **on)
        assert torch.equal(given.to_dense(), (mask & band).to_dense())
        assert problem.span == (None, None) and problem.block_mask == given.form
        explained = flashzoo.explain(q, q, q, causal=causal, window_size=window, block_mask=mask).problem
        assert explained.block_mask == given.form and explained.causal == causal

    def test_the_mask_itself_where_there_is_neither(self, handed, monkeypatch):
        """And nothing is done with it: no check again, no operation."""
        q, mask = torch.randn(1, 300, 2, 16, device=DEVICE), BlockMask.causal(300, **on)
        monkeypatch.setattr(BlockMask, "validate", None)
        with Operations() as operations:
            flashzoo.attention(q, q, q, block_mask=mask, version="toy")
        assert handed[0][1] is mask and operations.names == []

    def test_nothing_where_there_is_none(self, handed):
        q = torch.randn(1, 30, 2, 16, device=DEVICE)
        flashzoo.attention(q, q, q, causal=True, version="toy")
        [(problem, given)] = handed
        assert given is None and problem.causal and problem.block_mask is None

    def test_causal_alone_is_one_mask_for_both_passes(self, monkeypatch):
        made, build = [], BlockMask.sliding_window
        monkeypatch.setattr(BlockMask, "sliding_window", lambda *sizes, **how: made.append(how) or build(*sizes, **how))
        q = torch.randn(1, 70, 2, 16, device=DEVICE, dtype=torch.float16, requires_grad=True)
        flashzoo.attention(q, q, q, causal=True, version="blocksparse").sum().backward()
        assert [how["causal"] for how in made] == [True]

    def test_a_fallback_backward_gets_it_too(self, handed, monkeypatch):
        went_to = []

        def fallback(dout, dlse, q, k, v, out, lse, problem, operands):
            went_to.append((problem, operands.block_mask))
            return dout, dout, dout

        monkeypatch.setattr(support, "fallback", fallback, raising=False)
        flashzoo.register(toy("fallback", backward_impl="flashzoo_suite.support:fallback"), before="v3")
        flashzoo.register(toy("without", impl="flashzoo_suite.support:handed", backward=None), before="fallback")
        try:
            q = torch.randn(1, 300, 2, 16, device=DEVICE, requires_grad=True)
            flashzoo.attention(q, q, q, causal=True, block_mask=BlockMask.strided(300, stride=2, **on)).sum().backward()
        finally:
            flashzoo.unregister("without")
            flashzoo.unregister("fallback")
        assert handed[0][1] is went_to[0][1] is not None
        assert went_to[0][0].block_mask == handed[0][1].form and not went_to[0][0].causal


class Operations(TorchDispatchMode):
    """The names of the operations within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


class TestErrors:
    @pytest.fixture
    def qkv(self):
        dtype = torch.float16 if DEVICE == "cuda" else torch.float32
        return tuple(torch.randn(2, 200, heads, 16, device=DEVICE, dtype=dtype) for heads in (4, 2, 2))

    @pytest.mark.parametrize("version", ["auto", *MASKED])
    @pytest.mark.parametrize(
        ("mask", "text"),
        [
            (lambda: BlockMask.causal(128, 200, **on), r"seqlen_q and seqlen_k \(200, 200\), got \(128, 200\)"),
            (lambda: BlockMask.causal(200, 100, **on), r"got \(200, 100\)"),
            (
                lambda: BlockMask.random(200, blocks=1, heads=2, **on),
                "block_mask must have q's heads 4, or 1 where shared, got 2",
            ),
            (
                lambda: BlockMask.random(200, blocks=1, batch=3, **on),
                "block_mask must have q's batch 2, or 1 where shared, got 3",
            ),
            (lambda: BlockMask.causal(200, device="meta"), "block_mask must be on q's device .*, got meta"),
        ],
    )
    def test_a_mask_that_does_not_fit(self, qkv, mask, text, version):
        with pytest.raises(ValueError, match=text):
            flashzoo.attention(*qkv, block_mask=mask(), version=version)

    @pytest.mark.parametrize("version", ["auto", *MASKED])
    def test_not_a_mask(self, qkv, version):
        with pytest.raises(TypeError, match=r"block_mask must be a flashzoo.BlockMask or None, got Tensor"):
            flashzoo.attention(*qkv, block_mask=torch.ones(200, 200, dtype=torch.bool), version=version)

    @pytest.mark.parametrize("version", ["auto", *MASKED])
    def test_a_mask_made_by_hand_is_looked_at_before_it_is_used(self, qkv, version):
        mask = BlockMask.causal(200, **on)
        bad = replace(mask, rows=replace(mask.rows, indices=mask.rows.indices + 7))
        with pytest.raises(ValueError, match=r"block_mask: rows.indices must be blocks 0 to 1, got 7"):
            flashzoo.attention(*qkv, block_mask=bad, version=version)
        sound = replace(mask, rows=replace(mask.rows, indices=mask.rows.indices.clone()))
        expected = flashzoo.attention(*qkv, block_mask=mask, version=version)
        assert torch.equal(flashzoo.attention(*qkv, block_mask=sound, version=version), expected)


class TestTraced:
    @pytest.mark.covering(1)
    @masked
    @pytest.mark.parametrize("pattern", ["causal", "dense_by_heads"])
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_compiled(self, pattern, version, backend):
        """One graph, with the mask as an argument, in both passes."""
        torch.compiler.reset()
        mask = mask_of(pattern, block_q=block_of(version))
        problem = problem_of(mask, version, heads_kv=2)
        tensors, dout, dlse = draw(problem)
        compiled = torch.compile(flashzoo.attention, backend=backend, fullgraph=True)
        attention = partial(compiled, block_mask=mask)
        result = both(version, tensors, replace(problem, block_mask=None), dout, dlse, attention=attention)
        accept(Judge(*tensors, problem, dout, dlse, mask=mask.to_dense()), result)

    @pytest.mark.parametrize("causal", [False, True])
    def test_a_mask_that_nobody_has_looked_at_is_traced(self, causal):
        """Nothing of it is first made in a graph."""
        torch.compiler.reset()
        tensors, _, _ = draw(problem_of(mask_of("window")))
        how = {"causal": causal, "version": "blocksparse"}
        compiled = torch.compile(flashzoo.attention, backend="aot_eager", fullgraph=True)
        found = compiled(*tensors, block_mask=mask_of("window"), **how)
        assert torch.equal(found, flashzoo.attention(*tensors, block_mask=mask_of("window"), **how))

    def test_operators_are_what_their_fakes_say(self):
        importlib.import_module("flashzoo.call.traced")  # defines them
        for pattern in ("window", "dense"):
            mask = mask_of(pattern)
            problem = problem_of(mask)
            leaves = [x.requires_grad_() for x in draw(problem)[0]]
            tensors, sizes = mask.parts()
            how = {
                "return_lse": True,
                "grad": True,
                "version": "blocksparse",
                "block_mask_tensors": tensors,
                "block_mask_sizes": sizes,
            }
            torch.library.opcheck(torch.ops.flashzoo.attention.default, tuple(leaves), how, rtol=1e-2, atol=1e-3)

    def test_a_bad_mask_is_refused(self):
        torch.compiler.reset()
        q = torch.randn(1, 70, 2, 16, device=DEVICE)
        compiled = torch.compile(flashzoo.attention, backend="aot_eager")
        with pytest.raises(TypeError, match=r"block_mask must be a flashzoo.BlockMask or None, got Tensor"):
            compiled(q, q, q, block_mask=torch.ones(70, 70, dtype=torch.bool))
        mask = BlockMask.causal(70, **on)
        bad = replace(mask, rows=replace(mask.rows, indices=mask.rows.indices + 7))
        with pytest.raises(ValueError, match=r"rows.indices must be blocks 0 to 0, got 7"):
            compiled(q, q, q, block_mask=bad)


def test_workloads_have_masks_of_their_form():
    forms = 0
    for workload in workloads():
        problem = workload.problem
        mask = block_mask(problem, device=DEVICE) if "large" not in workload.tags else None
        if mask is not None:
            assert mask.form == problem.block_mask
            forms += 1
    assert forms > 5


@pytest.mark.gpu
@skipping
@pytest.mark.parametrize("pattern", ["dense", "dense_by_heads", None])
def test_cuda_graph(pattern, version):
    """A mask that was there before the capture, and one that is made during it from causal alone."""
    if pattern is None and version != "blocksparse":
        pytest.skip(f"{version} makes no mask")
    mask = mask_of(pattern, block_q=block_of(version)) if pattern else None
    of_mask = mask or BlockMask.causal(333, **on)
    problem = problem_of(of_mask, version, heads=4, heads_kv=2, batch=2, dtype="bf16")
    tensors, dout, dlse = draw(problem)
    plain = replace(problem, block_mask=None, causal=mask is None)
    attention = partial(flashzoo.attention, block_mask=mask)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(version, tensors, plain, dout, dlse, attention=attention)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both(version, tensors, plain, dout, dlse, attention=attention)
    graph.replay()
    judged = plain if mask is None else problem
    accept(Judge(*tensors, judged, dout, dlse, mask=None if mask is None else mask.to_dense()), result)


@pytest.mark.gpu
@skipping
def test_a_call_does_not_wait_for_the_gpu(version):
    mask = BlockMask.documents(torch.tensor([300, 212], device="cuda"), seqlen_q=512)
    problem = problem_of(mask, version, dtype="bf16", lse=False, grad=False)
    tensors, *_ = draw(problem)
    attention = partial(flashzoo.attention, block_mask=mask)
    plain = replace(problem, block_mask=None)
    forward(version, tensors, plain, attention=attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(version, tensors, plain, attention=attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
