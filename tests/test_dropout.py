"""Dropout: the same elements by every version and tile, as many as are asked for, as the seed says, and the same again
in a backward pass. The suite holds results and gradients to the oracle on its workloads."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashzoo
from flashzoo import Problem
from flashzoo.dropout import kept, philox
from flashzoo.lengths import places
from flashzoo.tiles import Tiles
from flashzoo.v2 import launch
from flashzoo_suite.support import DEVICE, same_bits

SEED = (1 << 62) + 12345
ZEROS = (0,) * 4
ONES = (0xFFFFFFFF,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
SIZES = 2, 2, 70, 40
"""batch, heads, seqlen_q and seqlen_k of `revealing`."""


def on_device(number: int) -> torch.Tensor:
    return torch.tensor([number], device=DEVICE)


def revealing() -> tuple[torch.Tensor, ...]:
    """q, k and v with which out is P."""
    batch, heads, seqlen_q, seqlen_k = SIZES
    q, k = (torch.randn(batch, n, heads, seqlen_k, device=DEVICE, dtype=torch.float16) for n in (seqlen_q, seqlen_k))
    return q, k, torch.eye(seqlen_k, device=DEVICE).half()[None, :, None].expand(batch, -1, heads, -1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (ZEROS, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ONES, -1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (PI, 0x299F31D0A4093822, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_numbers_are_those_of_philox(counter, key, expected):
    """The known answers of Random123's philox4x32, 7 rounds."""
    words = philox(torch.tensor(key), tuple(torch.tensor(x) for x in counter))
    assert tuple(int(x) for x in words) == expected


@pytest.mark.parametrize("p", [0.001, 0.1, 0.75])
def test_as_many_are_dropped_as_are_asked_for(p):
    of = kept(
        on_device(SEED),
        Problem(1, 1, 1, 1, 1, 1, dropout_p=p).dropped,
        places((8, 4, 90, 50), None, torch.device(DEVICE)),
    )
    count = of.numel()
    assert abs(int(of.sum()) - count * (1 - p)) < 5 * math.sqrt(count * p * (1 - p))


def test_every_version_and_tile_drops_the_same(monkeypatch):
    q, k, v = revealing()
    of = kept(on_device(SEED), 0.25, places(SIZES, None, q.device))

    def dropped(version: str) -> torch.Tensor:
        return flashzoo.attention(q, k, v, dropout_p=0.25, dropout_seed=SEED, version=version).transpose(1, 2) == 0

    for version in ("standard", "v2", "v1"):
        assert torch.equal(dropped(version), ~of), version
    monkeypatch.setattr(launch, "tiles_for", lambda kernel, problem: Tiles(16, 32, 4, 1))
    launch.forward_launch.cache_clear()
    try:
        assert torch.equal(dropped("v2"), ~of)
    finally:
        launch.forward_launch.cache_clear()


def test_a_packed_sequence_drops_as_one_of_a_batch():
    q, k, v, dout = torch.randn(4, 2, 40, 1, 16, device=DEVICE)
    cu = torch.tensor([0, 40, 80], dtype=torch.int32, device=DEVICE)
    how = {"dropout_p": 0.5, "dropout_seed": 7, "version": "v2"}
    batch, rows = (
        [x.clone().requires_grad_() for x in some] for some in ((q, k, v), [x.flatten(0, 1) for x in (q, k, v)])
    )
    found = flashzoo.attention(*rows, cu_seqlens_q=cu, **how), flashzoo.attention(*batch, **how)
    gradients = torch.autograd.grad(found[0], rows, dout.flatten(0, 1)), torch.autograd.grad(found[1], batch, dout)
    for x, y in zip((found[0], *gradients[0]), (found[1], *gradients[1]), strict=True):
        assert torch.equal(x, y.flatten(0, 1))


def test_the_mean_over_seeds_is_the_output_without():
    q, k, v = (torch.randn(1, 3, 1, 4, dtype=torch.float64, device=DEVICE).expand(250, -1, -1, -1) for _ in range(3))
    found = torch.cat(
        [flashzoo.attention(q, k, v, dropout_p=0.3, dropout_seed=i, version="standard") for i in range(8)]
    )
    off = found.mean(0) - flashzoo.attention(q, k, v, version="standard")[0]
    assert (off.abs() < 5 * found.std(0) / math.sqrt(len(found))).all()


def test_gradients_are_those_of_finite_differences():
    double = {"dtype": torch.float64, "device": DEVICE, "requires_grad": True}
    q, k, v, sinks = (torch.randn(shape, **double) for shape in ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2), (2,)))

    def attention(q, k, v, sinks):
        how = {"dropout_p": 0.4, "dropout_seed": 3, "sinks": sinks, "causal": True, "version": "standard"}
        return flashzoo.attention(q, k, v, return_lse=True, **how)

    assert torch.autograd.gradcheck(attention, (q, k, v, sinks))


class TestSeed:
    def attention(self, seed=None, **options):
        torch.manual_seed(1)
        q = torch.randn(1, 20, 1, 8, device=DEVICE)
        return flashzoo.attention(q, q, q, **{"dropout_p": 0.5, "version": "standard"} | options, dropout_seed=seed)

    def test_is_an_int_or_lies_on_the_device(self):
        assert torch.equal(self.attention(-5), self.attention(on_device(-5)))
        assert torch.equal(self.attention(-5), self.attention(on_device(-5)[0]))
        # of all of its bits
        assert not any(torch.equal(self.attention(5), self.attention(other)) for other in (4, 5 + (1 << 32), None))

    def test_is_drawn_from_torchs_generator(self):
        assert torch.equal(self.attention(), self.attention())
        q = torch.randn(1, 20, 1, 8, device=DEVICE)
        first, second = (flashzoo.attention(q, q, q, dropout_p=0.5) for _ in range(2))
        assert not torch.equal(first, second)

    def test_is_not_drawn_where_nothing_is_dropped(self):
        q, state = torch.randn(1, 20, 1, 8, device=DEVICE), torch.random.get_rng_state()
        assert same_bits(flashzoo.attention(q, q, q, dropout_p=0.0, dropout_seed=3), flashzoo.attention(q, q, q))
        flashzoo.explain(q, q, q, dropout_p=0.5)
        flashzoo.attention(q, q, q, dropout_p=0.0)
        assert torch.equal(state, torch.random.get_rng_state())

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_is_the_same_when_a_checkpoint_computes_anew(self, use_reentrant):
        q = torch.randn(1, 20, 1, 8, device=DEVICE, requires_grad=True)

        def layer(q):
            return flashzoo.attention(q, q, q, dropout_p=0.5, version="standard") ** 2

        gradients = []
        for run in (layer, lambda q: checkpoint(layer, q, use_reentrant=use_reentrant)):
            torch.manual_seed(5)
            out = run(q)
            torch.randn(3, device=DEVICE)
            gradients.append(torch.autograd.grad(out.sum(), q)[0] if not use_reentrant else _grad(out, q))
        assert torch.equal(*gradients)

    def test_may_be_written_before_the_backward_pass(self):
        q, seed, gradients = torch.randn(1, 20, 1, 8, device=DEVICE, requires_grad=True), on_device(3), []
        for more in (0, 1):
            out = flashzoo.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)
            seed += more
            gradients += torch.autograd.grad(out.sum(), q)
        assert torch.equal(*gradients)

    def test_is_given_to_a_backward_pass_alone(self):
        q, k, v, dout = torch.randn(4, 1, 20, 1, 8, device=DEVICE)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        how = {"dropout_p": 0.5, "version": "standard"}
        out, lse = flashzoo.attention(*leaves, return_lse=True, **how, dropout_seed=9)
        given = (dout, q, k, v, out.detach(), lse.detach())
        found = flashzoo.attention_backward(*given, **how, dropout_seed=9)
        assert all(torch.equal(x, y) for x, y in zip(found, torch.autograd.grad(out, leaves, dout), strict=True))
        with pytest.raises(ValueError, match=r"dropout_seed must be that of the forward pass .* 0\.5, got None"):
            flashzoo.attention_backward(*given, **how)


def _grad(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """By `backward`, which alone a reentrant checkpoint knows."""
    q.grad = None
    out.sum().backward()
    assert q.grad is not None
    return q.grad


def test_compiled():
    """One graph for every seed, given or drawn, whose backward pass drops what its forward pass dropped."""
    torch.compiler.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    @torch.compile(backend=counted, fullgraph=True)
    def compiled(v, seed):
        # q is 0, so that out is a mean of what is kept of v
        return flashzoo.attention(torch.zeros_like(v), v, v, dropout_p=0.5, dropout_seed=seed, version="standard")

    v = torch.eye(16, device=DEVICE)[None, :, None].requires_grad_()
    for seed in (on_device(1), on_device(2)):
        eager = flashzoo.attention(torch.zeros_like(v), v, v, dropout_p=0.5, dropout_seed=seed, version="standard")
        assert torch.equal(compiled(v, seed), eager)
    assert len(graphs) == 1
    out = compiled(v, None)
    dv = torch.autograd.grad(out, v, torch.ones_like(out))[0]
    torch.testing.assert_close(dv[0, :, 0, 0], out[0, :, 0].sum(0))  # with dS of a q of 0 no part of it
    assert not torch.equal(out, compiled(v, None))


def test_v3_has_none_and_auto_takes_v2():
    problem = Problem(1, 4096, 4096, 8, 8, 128, dropout_p=0.1, grad=True, arch=90)
    told = flashzoo.explain(problem)
    assert told.chosen == "v2" and "does not support dropout_p" in str(told)
