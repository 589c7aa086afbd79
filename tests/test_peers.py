"""Other libraries are called as they want, with the same mask, and refused what they mean otherwise."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bench_runs import PATTERNS, forget_libraries

import flashzoo
from bench import masks, peers
from bench.cells import Cell
from bench.contenders import Contender
from bench.referee import Referee, WrongResultError
from flashzoo.call.problem import Problem
from flashzoo.inputs import inputs


@pytest.mark.filterwarnings("ignore:flex_attention versions_called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_means_what_flashzoo_means(causal):
    problem = Problem(1, 32, 48, 4, 2, 16, "fp32", causal=causal, device="cpu")
    q, k, v, _ = inputs(problem)
    with pytest.MonkeyPatch.context() as patch:
        from torch.nn.attention.flex_attention import flex_attention

        # compiling for the CPU would need a C++ compiler
        patch.setattr(peers, "_compiled_flex", lambda *_: flex_attention)
        out = peers.peer("flex", problem)(q, k, v)
    torch.testing.assert_close(out, flashzoo.attention(q, k, v, causal=causal, version="standard"), rtol=0, atol=1e-5)


def test_sdpa_peers_refuse_another_alignment():
    with pytest.raises(NotImplementedError, match="top-left"):
        peers.peer("sdpa_math", Problem(1, 32, 48, 2, 2, 16, causal=True))


@pytest.mark.parametrize("name", ["fa4", "sdpa_cudnn", "flex"])
def test_a_peers_gradients_are_held_to_the_oracle_too(name, monkeypatch):
    """Right or wrong by what is behind the peer's name."""
    factor = 1.0

    def attention(problem):
        def call(q, k, v):
            return flashzoo.attention(
                q, torch.lerp(k.detach(), k, factor), v, causal=problem.causal, version="standard"
            )

        return call

    monkeypatch.setitem(peers.PEERS, name, attention)
    cell = Cell(Problem(2, 64, 64, 4, 4, 16, "bf16", causal=True, device="cpu", grad=True))
    tensors = inputs(cell.problem)
    Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())
    factor = 0.5
    with pytest.raises(WrongResultError, match="dk"):
        Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())


def test_peers_refuse_a_dtype_that_is_not_theirs():
    with pytest.raises(NotImplementedError, match="e4m3 is taken by fa3 and cudnn_fp8, got sdpa_math"):
        peers.peer("sdpa_math", Problem(1, 32, 32, 2, 2, 16, "e4m3"))
    with pytest.raises(NotImplementedError, match="takes e4m3, got bf16"):
        peers.peer("cudnn_fp8", Problem(1, 32, 32, 2, 2, 16))


def test_libraries_refuse_32_bits():
    for name in ("fa2", "fa3", "fa4"):
        with pytest.raises(NotImplementedError, match="takes fp16 and bf16, got fp32"):
            peers.peer(name, Problem(1, 32, 32, 2, 2, 16, "fp32"))


def _fake_library(monkeypatch, **modules) -> list[dict]:
    """Put these modules, by name, in place of a library's. Returns what its function is versions_called with
    besides q, k and v."""
    asked = []

    def function(q, k, v, **options):
        asked.append(options)
        if q.ndim == 5:  # as xformers has groups of heads
            assert q.shape[2:4] == k.shape[2:4] == v.shape[2:4], "heads of keys are to be repeated by the caller"
            assert k.stride(3) == v.stride(3) == 0, "with no copy"
            out = flashzoo.attention(
                *(x.flatten(2, 3) for x in (q, k, v)), causal=options["attn_bias"] is not None, version="standard"
            )
            return out.unflatten(2, q.shape[2:4])
        causal = options["causal"] if "causal" in options else options["attn_bias"] is not None
        return flashzoo.attention(q, k, v, causal=causal, version="standard")

    for name, attributes in modules.items():
        given = {attribute: value or function for attribute, value in attributes.items()}
        monkeypatch.setitem(sys.modules, name.replace("__", "."), SimpleNamespace(**given))
    forget_libraries()
    return asked


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    yield
    forget_libraries()


class BottomRight:
    """What xformers calls causal, aligned as ours."""


LIBRARIES = {
    "fa2": {"flash_attn": {"flash_attn_func": None}},
    "fa3": {"flash_attn_interface": {"flash_attn_func": None}},
    "fa4": {"flash_attn__cute": {"flash_attn_func": None}},
    "xformers": {
        "xformers__ops": {"memory_efficient_attention": None},
        "xformers__ops__fmha__attn_bias": {"LowerTriangularFromBottomRightMask": BottomRight},
    },
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads_kv", "grad"), [(4, True), (2, False)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_called_as_it_wants(name, heads_kv, grad, causal, monkeypatch, fresh_libraries):
    asked = _fake_library(monkeypatch, **LIBRARIES[name])
    assert peers.missing(name) is None
    cell = Cell(Problem(2, 40, 72, 4, heads_kv, 16, "bf16", causal=causal, device="cpu", grad=grad))
    tensors = inputs(cell.problem)
    Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())
    (options,) = asked
    if name == "xformers":
        assert set(options) == {"attn_bias"} and isinstance(options["attn_bias"], BottomRight) == causal
    else:
        assert options == {"causal": causal}


def test_flash_attn_without_its_function_is_missing(monkeypatch, fresh_libraries):
    """As where flash-attn-4 alone is installed, which lives inside the name."""
    _fake_library(monkeypatch, flash_attn={})
    assert "needs flash_attn.flash_attn_func, which is not installed" in str(peers.missing("fa2"))


class FakeCudnn:
    """As much of cuDNN's frontend as one FP8 graph needs: it notes what it is asked, and computes out with torch."""

    class data_type:
        FP8_E4M3, FLOAT, BFLOAT16, HALF = "e4m3", "fp32", "bf16", "fp16"

    class heur_mode:
        A, FALLBACK = "a", "fallback"

    class diagonal_alignment:
        TOP_LEFT = "top left"

    class Node:
        def __init__(self, **attributes):
            self.attributes, self.output = attributes, False

        def __getattr__(self, name):
            assert name.startswith("set_")

            def remember(value):
                self.attributes[name.removeprefix("set_")] = value
                return self

            return remember

    def create_handle(self):
        return "handle"

    def set_stream(self, handle, stream):
        self.stream = stream

    def pygraph(self, **options):
        assert options["handle"] == "handle"
        return self

    def tensor(self, **attributes):
        return self.Node(**attributes)

    def sdpa_fp8(self, **asked):
        self.asked = asked
        self.outs = [self.Node() for _ in range(3)]
        return self.outs[0], None, *self.outs[1:]

    def build(self, modes):
        assert all("output" in node.attributes and node.attributes["data_type"] for node in self.outs)

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, handle):
        assert set(pack) == {node for node in self.asked.values() if isinstance(node, self.Node)} | set(self.outs)
        for node, x in pack.items():
            view = x.transpose(1, 2) if x.shape[1] > 1 else x
            assert (list(view.shape), list(view.stride())) == (node.attributes["dim"], node.attributes["stride"])
        q, k, v = (pack[self.asked[name]] for name in "qkv")
        causal = self.asked.get("right_bound") == 0
        out = flashzoo.attention(q, k, v, causal=causal, softmax_scale=self.asked["attn_scale"], version="standard")
        pack[self.outs[0]].copy_(out)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnns_graph_is_given_what_it_asks_for(causal, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    forget_libraries()
    cell = Cell(Problem(2, 48, 48, 4, 2, 16, "e4m3", causal=causal, device="cpu"))
    tensors = inputs(cell.problem)
    contender = Contender("cudnn_fp8", cell, tensors)
    assert contender.run()[0].dtype == torch.float8_e4m3fn
    Referee(cell, tensors).errors("cudnn_fp8", contender.result())
    forget_libraries()
    peers._cudnn_handle.cache_clear()


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_is_given_the_same_mask(name, monkeypatch):
    given = []
    monkeypatch.setattr(
        peers, "_compiled_flex", lambda: lambda q, k, v, block_mask, enable_gqa: given.append(block_mask) or q
    )
    pattern, problem = masks.pattern(name, 1024, "cpu"), Problem(1, 1024, 1024, 2, 2, 16, "fp16", device="cpu")
    q, k, v, _ = inputs(problem)
    peers.peer("flex", problem, pattern)(q, k, v)
    (mask,) = given
    i, j = torch.arange(1024)[:, None], torch.arange(1024)
    lists = ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.kv_num_blocks, mask.kv_indices))
    full, some = (_of_lists(*of) for of in lists)
    assert torch.equal(full | some & mask.mask_mod(None, None, i, j), pattern.mask.to_dense()[0, 0])
    lists = ((mask.full_q_num_blocks, mask.full_q_indices), (mask.q_num_blocks, mask.q_indices))
    full, some = (_of_lists(*of).mT for of in lists)
    assert torch.equal(full | some & mask.mask_mod(None, None, i, j), pattern.mask.to_dense()[0, 0])


def _of_lists(counts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """bool, elements, of lists of blocks of 128 by 128."""
    blocks = torch.zeros(numbers.shape[2], numbers.shape[3], dtype=torch.bool)
    for i, count in enumerate(counts[0, 0].tolist()):
        blocks[i, numbers[0, 0, i, :count].long()] = True
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.filterwarnings("ignore")
def test_flex_compiles_once_for_all_masks_of_a_shape(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.flex_attention import flex_attention

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(peers, "_compiled_flex", lambda: compiled)
    problem = Problem(1, 256, 256, 1, 1, 16, "fp32", device="cpu")
    q, k, v, _ = inputs(problem)
    for name in ("causal", "ones", "random/2", "window100", "butterfly"):
        peers.peer("flex", problem, masks.pattern(name, 256, "cpu"))(q, k, v)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["random/2", "causal", "window200"])
def test_fa4_is_given_the_same_mask(name, monkeypatch):
    given = {}
    tensors = namedtuple(
        "Tensors",
        ["mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"],
        defaults=[None, None, None],
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", SimpleNamespace(BlockSparseTensorsTorch=tensors))
    monkeypatch.setattr(peers, "_function", lambda name: lambda q, k, v, **options: (given.update(options) or q, None))
    monkeypatch.setattr(peers, "_fa4_band", lambda left: left)
    pattern, problem = masks.pattern(name, 1024, "cpu"), Problem(1, 1024, 1024, 2, 2, 16, "fp16", device="cpu")
    q, k, v, _ = inputs(problem)
    peers.peer("fa4", problem, pattern)(q, k, v)
    band = torch.ones(()).bool() if name == "random/2" else masks.in_band(torch.arange(1024), 1024, given["mask_mod"])
    for argument, turned in (("block_sparse_tensors", False), ("block_sparse_tensors_bwd", True)):
        lists = given[argument]
        assert lists.block_size == (128, 128)
        partial, full = (
            _of_lists(lists.mask_block_cnt, lists.mask_block_idx),
            _of_lists(lists.full_block_cnt, lists.full_block_idx),
        )
        partial, full = (partial.mT, full.mT) if turned else (partial, full)
        assert torch.equal(full | partial & band, pattern.mask.to_dense()[0, 0])
