"""What traces a call: torch.compile and torch.export. What each version owes there is in THE suite;
here is what none decides."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_arguments import EMPTY
from test_bad_input import BAD_INPUT, _changed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashzoo
from flashzoo import UnsupportedError, registry
from flashzoo.autograd import differentiable
from flashzoo.call import traced
from flashzoo.inputs import LAYOUTS
from flashzoo_suite.support import CALLS, DEVICE, dense, dense_backward, in_fresh_process, lazily_negated, toy

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
"""Of float32: the same call, or another version's. How well a version does traced is THE suite's to judge."""
ATTENTION, BACKWARD = torch.ops.flashzoo.attention.default, torch.ops.flashzoo.attention_backward.default


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    CALLS.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def toys():
    """Versions that note their calls: `plain` alone, and `newer`, which borrows the backward pass of `older`."""
    fallback = {
        "impl": "flashzoo_suite.support:dense",
        "backward_impl": f"flashzoo_suite.support:{dense_backward.__name__}",
    }
    flashzoo.register(toy("older", **fallback), before="v3")
    flashzoo.register(toy("newer", impl=f"flashzoo_suite.support:{dense.__name__}", backward=None), before="older")
    flashzoo.register(toy("plain"))
    yield
    for name in ("newer", "older", "plain"):
        flashzoo.unregister(name)


@pytest.fixture
def qkv():
    return tuple(torch.randn(2, 24, 4, 16, device=DEVICE) for _ in range(3))


def compiled(function=flashzoo.attention, **options):
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True} | options)


def gradients(function, tensors, **options):
    """out and the gradients of its squares' sum."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


class TestImport:
    def test_a_call_that_is_not_traced_loads_nothing_for_it(self):
        code = """if True:
            import sys, torch, flashzoo, flashzoo.flash_attn
            q = torch.randn(1, 8, 2, 16, requires_grad=True)
            flashzoo.attention(q, q, q, version="standard").sum().backward()
            print(*({"flashzoo.call.traced", "torch._dynamo"} & set(sys.modules)))
        """
        assert in_fresh_process(code).split() == []

    def test_the_first_call_may_be_a_traced_one(self):
        """The operators are defined while a graph is made."""
        code = """if True:
            import torch, flashzoo
            q = torch.randn(1, 8, 2, 16)
            compiled = torch.compile(flashzoo.attention, backend="aot_eager", fullgraph=True)
            print(torch.equal(compiled(q, q, q), flashzoo.attention(q, q, q)))
        """
        assert in_fresh_process(code).split() == ["True"]


class TestGraph:
    @pytest.mark.parametrize("operator", [ATTENTION, BACKWARD], ids=str)
    def test_what_is_no_tensor_is_given_by_name(self, operator):
        """Inductor's cache outlives flashzoo's versions: code that it keeps must not mean another option."""
        by_place = [x.name for x in operator._schema.arguments if "Tensor" not in str(x.type) and not x.kwarg_only]
        assert by_place == []

    def test_a_call_is_one_node(self, qkv):
        found = []

        def backend(graph, _):
            found.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph

        compiled(backend=backend)(*qkv, causal=True)
        assert found[0][0] in (ATTENTION, torch.ops.flashzoo.attention)
        assert len([target for target in found[0] if "flashzoo" in str(target)]) == len(found) == 1

    def test_the_same_kind_of_call_is_traced_once(self, qkv):
        counter = CompileCounterWithBackend("aot_eager")
        function = compiled(backend=counter)
        for _ in range(3):
            function(*(torch.randn_like(x) for x in qkv), causal=True, window_size=(3, None))
        assert counter.frame_count == 1

    def test_a_scale_that_changes(self, qkv):
        """Each value has a graph of its own: torch makes constants of an operator's floats."""
        function = compiled(lambda *x, scale: flashzoo.attention(*x, softmax_scale=scale))
        for scale in (0.125, 0.25, -0.3, 0.125):
            close(function(*qkv, scale=scale), flashzoo.attention(*qkv, softmax_scale=scale))

    @pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
    def test_lengths_that_change(self, dynamic):
        counter = CompileCounterWithBackend("aot_eager")
        function = compiled(backend=counter, dynamic=dynamic)
        for batch, length in ((6, 24), (3, 33), (5, 17), (7, 64)):
            q, k, v = (
                torch.randn(batch, n, heads, 16, device=DEVICE)
                for n, heads in ((length, 4), (length + 5, 2), (length + 5, 2))
            )
            options = {"causal": True, "window_size": (length, None), "version": "standard"}
            close(gradients(function, (q, k, v), **options), gradients(flashzoo.attention, (q, k, v), **options))
        assert counter.frame_count == (1 if dynamic else 2)

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_a_block_of_a_model(self, backend, qkv):
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out, self.norm = (
                    torch.nn.Linear(64, 192),
                    torch.nn.Linear(64, 64),
                    torch.nn.LayerNorm(64),
                )

            def forward(self, x):
                q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).unbind(2)
                return x + self.out(torch.nn.functional.gelu(flashzoo.attention(q, k, v, causal=True).flatten(2)))

        block = Block().to(DEVICE)
        x = qkv[0].flatten(2)
        # An eval pass, then a training step; inductor, which takes long, has the graphs of the step alone.
        for parameters in (False, True) if backend == "aot_eager" else (True,):
            torch.compiler.reset()
            block.requires_grad_(parameters)
            close(gradients(compiled(block, backend=backend), [x]), gradients(block, [x]))

    @pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
    def test_checkpointed_inside(self, reentrant, qkv):
        def block(q, k, v):
            return checkpoint(
                lambda *x: flashzoo.attention(*x, causal=True) * 2, q.sin(), k, v, use_reentrant=reentrant
            )

        def backward(function):
            leaves = [x.detach().requires_grad_() for x in qkv]
            function(*leaves).square().sum().backward()
            return [x.grad for x in leaves]

        close(backward(compiled(block)), backward(block))

    def test_under_autocast(self, qkv):
        def block(q, k, v):
            with torch.autocast(DEVICE, torch.bfloat16):
                return flashzoo.attention(q, k, v, version="standard")

        for function in (compiled(block), block):
            close(gradients(function, qkv), gradients(flashzoo.attention, qkv, version="standard"))

    @pytest.mark.parametrize("scale", [-0.5, 0.0])
    def test_any_scale(self, scale, qkv):
        options = {"softmax_scale": scale, "version": "standard"}
        close(gradients(compiled(), qkv, **options), gradients(flashzoo.attention, qkv, **options))
        e4m3 = [x.to(torch.float8_e4m3fn) for x in qkv]
        assert torch.equal(compiled()(*e4m3, **options), flashzoo.attention(*e4m3, **options))

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_empty(self, shapes):
        q_shape, k_shape = shapes
        leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in (q_shape, k_shape, k_shape)]
        out, lse = compiled()(*leaves, return_lse=True)
        assert out.shape == q_shape and not out.any() and bool((lse == -torch.inf).all())
        assert not any(x.any() for x in torch.autograd.grad((out.sum(), lse.sum()), leaves))

    def test_layout_and_names_of_torch(self, qkv):
        close(compiled(flashzoo.sdpa)(*qkv, is_causal=True), flashzoo.sdpa(*qkv, is_causal=True))

    @pytest.mark.parametrize("strict", [True, False])
    def test_exported(self, strict, qkv):
        class Model(torch.nn.Module):
            def forward(self, q, k, v):
                return flashzoo.attention(q, k, v, causal=True)

        length = torch.export.Dim("length", min=2, max=4096)
        program = torch.export.export(Model(), qkv, strict=strict, dynamic_shapes=({1: length},) * 3)
        assert [node.target for node in program.graph.nodes if "flashzoo" in str(node.target)] == [ATTENTION]
        longer = tuple(torch.randn(2, 77, 4, 16, device=DEVICE) for _ in range(3))
        close(program.module()(*longer), Model()(*longer))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_an_operand_with_a_gradient(self, dtype, qkv):
        """A parameter of a model, alone too, in its own dtype."""

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.sinks = torch.nn.Parameter(torch.tensor([1.0, 3.0, -2.0, 0.5], device=DEVICE, dtype=dtype))

            def forward(self, q, k, v):
                return flashzoo.attention(q, k, v, causal=True, version="standard", sinks=self.sinks)

        model = Model()
        program = torch.export.export(model, qkv)
        assert [node.target for node in program.graph.nodes if "flashzoo" in str(node.target)] == [ATTENTION]
        close(program.module()(*qkv), model(*qkv))
        for leaves in ((), qkv):
            for x in leaves:
                x.requires_grad_()
            found = []
            for call in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
                gradients = torch.autograd.grad(call(*qkv).square().sum(), (*leaves, model.sinks))
                assert gradients[-1].dtype == dtype
                found.append(gradients)
            close(*found)


GRAPH_TREES = """
from functools import partial
import torch, flashzoo

version, seqlen_q, seqlen_k, grad = {version!r}, {seqlen_q}, {seqlen_k}, {grad}
function = torch.compile(partial(flashzoo.attention, version=version), mode="reduce-overhead", fullgraph=True)

def results(call, q, k, v, dout):
    out = call(q, k, v).clone()
    return (out, *torch.autograd.grad(out, (q, k, v), dout)) if grad else (out,)

for _ in range(4):  # as it is, as its graph's memory is sought, as its graph is captured, and replayed
    shapes = ((seqlen_q, 8), (seqlen_k, 2), (seqlen_k, 2), (seqlen_q, 8))
    *qkv, dout = (torch.randn(5, *shape, 128, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    qkv = [x.requires_grad_(grad) for x in qkv]
    torch.compiler.cudagraph_mark_step_begin()
    found = results(function, *qkv, dout)
    expected = results(partial(flashzoo.attention, version=version), *qkv, dout)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)  # dQ's sums come in any order
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("version", "seqlen_q", "seqlen_k", "grad"),
    [("v3", 200, 200, True), ("v2", 200, 200, True), ("decode", 1, 8192, False)],
    ids=["v3", "v2", "decode"],
)
def test_in_graph_trees(version, seqlen_q, seqlen_k, grad):
    """`mode="reduce-overhead"`, with which transformers writes: what a call keeps of its own must not come from the
    pool of its graph. In a process that has kept nothing yet."""
    in_fresh_process(GRAPH_TREES.format(version=version, seqlen_q=seqlen_q, seqlen_k=seqlen_k, grad=grad))


def padded(*arguments):
    """A forward pass whose LSE is its own affair."""
    out, lse = dense(*arguments)
    return out, torch.nn.functional.pad(lse, (0, 4))


def from_padded(*arguments):
    dout, dlse, q, k, v, out, lse, *rest = arguments
    return dense_backward(dout, dlse, q, k, v, out, lse[..., : q.shape[1]], *rest)


padded_attention = differentiable(padded, from_padded)


lazy_attention = differentiable(dense, lambda dout, *rest: (dout, dout, dout))


@pytest.fixture
def own(toys):
    """Registers a version `own` that pads its LSE, with features."""
    yield lambda **fields: flashzoo.register(toy("own", impl=f"{__name__}:padded_attention", **fields))
    flashzoo.unregister("own")


class TestChoice:
    def test_what_was_asked_for_when_it_was_traced(self, toys, qkv, monkeypatch):
        def calls(function):
            CALLS.clear()
            function(*qkv)
            return len(CALLS)

        with flashzoo.use("plain"):
            by_context = compiled(lambda *x: flashzoo.attention(*x))
            assert calls(by_context) == 1
        assert calls(by_context) == 1  # a graph keeps its version
        monkeypatch.setenv(registry.ENVIRONMENT, "plain")
        assert calls(compiled(lambda *x: flashzoo.attention(*x) + 1)) == 1
        monkeypatch.delenv(registry.ENVIRONMENT)
        assert calls(compiled(lambda *x: flashzoo.attention(*x, version="standard") + 2)) == 0

    def test_a_fallback_backward(self, toys, qkv):
        found = gradients(compiled(), qkv)
        assert [problem.grad for problem in CALLS] == [False, True]
        close(found, gradients(flashzoo.attention, qkv, version="standard"))

    def test_a_version_that_declares_no_lse_may_hand_itself_another(self, own, qkv):
        own(features=frozenset(), backward=frozenset())
        close(gradients(compiled(), qkv, version="own"), gradients(flashzoo.attention, qkv, version="standard"))

    def test_a_version_is_told_whether_gradients_are_wanted(self, toys, qkv):
        leaves = [x.requires_grad_() for x in qkv]
        for grad in (True, False):
            CALLS.clear()
            with torch.set_grad_enabled(grad):
                compiled()(*leaves, version="newer" if not grad else "auto")
            assert len(CALLS) == 1


UNTRACED = (
    "v is sparse",
    "q is sparse by rows",
    "k is sparse by columns",
    "v is nested",
    "q alone is nested by offsets",
    "v is an array",
    "no data",
    "sinks are sparse",
)
UNTRACED += ("causal is a tensor", "causal is NumPy's", "version is None", "an argument nobody knows")
"""What torch refuses to trace in its own words, turns into a tensor, or, of tensors with no data, traces as any."""


class TestErrors:
    @pytest.mark.parametrize("case", [case for case in BAD_INPUT if case not in UNTRACED])
    def test_bad_input_is_told_in_our_words(self, case):
        """By torch's exception where it stops the tracing, by ours where it stops the call."""
        changes, _, text = BAD_INPUT[case]
        with pytest.raises(Exception, match=text):
            compiled()(**_changed(**changes))

    def test_a_version_that_does_not_take_it(self, qkv):
        with pytest.raises(UnsupportedError, match=r"version 'v1' can't take .*\n  v1: does not support window_size"):
            compiled()(*qkv, window_size=(3, 3), version="v1")

    @pytest.mark.parametrize("grad", [False, True])
    def test_a_refusal_names_the_environment_that_chose(self, grad, qkv, monkeypatch):
        monkeypatch.setenv(registry.ENVIRONMENT, "v1")
        graph = compiled()
        with pytest.raises(
            UnsupportedError, match="version 'v1', by the environment variable FLASHZOO_VERSION, can't take"
        ):
            graph(*(x.requires_grad_(grad) for x in qkv), window_size=(3, 3))

    @pytest.mark.parametrize("version", [None, ["v1"]], ids=str)
    def test_a_version_is_a_name(self, version, qkv):
        with pytest.raises(ValueError, match=r"version must be 'auto' or one of .*, got"):
            compiled()(*qkv, version=version)

    def test_a_version_that_gives_something_else_is_named(self, toys, qkv, monkeypatch):
        monkeypatch.setattr("flashzoo_suite.support.record", lambda q, *rest: q)
        with pytest.raises(
            TypeError, match=r"version 'plain': \S+:record must return a tuple \(out, lse\), got a Tensor"
        ):
            compiled()(*qkv, version="plain")

    @pytest.mark.parametrize(("version", "impl"), [("newer", "dense"), ("own", "padded_attention")])
    def test_an_lse_that_a_backward_pass_starts_from_is_looked_at(self, version, impl, own, qkv, monkeypatch):
        """Which the call did not ask for; the backward pass is another version's, or its own."""
        monkeypatch.setattr("flashzoo_suite.support.dense", padded)
        own()
        text = (
            rf"version '{version}': \S+:{impl} must return lse as a Tensor \(2, 4, 24\), .* got a Tensor \(2, 4, 28\)"
        )
        with pytest.raises(TypeError, match=text):
            compiled()(*(x.requires_grad_() for x in qkv), version="auto" if version == "newer" else version)

    def test_where_graphs_may_break_the_error_is_ours(self, qkv):
        with pytest.raises(TypeError, match="causal must be a bool, got 1"):
            torch.compile(flashzoo.attention, backend="aot_eager")(*qkv, causal=1)

    def test_double_backward(self, qkv):
        leaves = [x.requires_grad_() for x in qkv]
        first = torch.autograd.grad(compiled()(*leaves).square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(first[0].square().sum(), leaves)
        out, _ = ATTENTION(*leaves, grad=True)
        with pytest.raises(NotImplementedError, match="flashzoo has no double backward"):
            torch.autograd.grad(out.square().sum(), leaves, create_graph=True)

    def test_an_operator_that_was_told_of_no_gradients_has_none(self, qkv):
        out, lse = ATTENTION(*(x.requires_grad_() for x in qkv))
        assert lse.numel() == 0
        with pytest.raises(RuntimeError, match="expected the argument grad to be True"):
            out.sum().backward()

    @pytest.mark.parametrize("make", ["causal", "sliding_window", "documents"])
    def test_a_block_mask_may_be_made_inside_of_a_graph(self, make, qkv):
        how = {"causal": (24,), "sliding_window": (24, 24), "documents": ([9, 15],)}[make]
        more = {"window_size": (3, 0)} if make == "sliding_window" else {}
        more |= {"device": DEVICE} if DEVICE != "cpu" else {}  # else none is named
        attention = lambda q: flashzoo.attention(  # noqa: E731
            q, q, q, block_mask=getattr(flashzoo.BlockMask, make)(*how, **more), version="standard"
        )
        torch.testing.assert_close(compiled(attention)(qkv[0]), attention(qkv[0]))

    def test_the_longest_sequence_may_be_a_number_of_a_tensor(self, qkv):
        """A graph does not know it."""
        rows, lengths = qkv[0].flatten(0, 1), torch.tensor([0, 20, 48], dtype=torch.int32, device=DEVICE)

        def attention(q, cu_seqlens):
            longest = int(cu_seqlens.diff().max())
            how = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return flashzoo.attention(q, q, q, **how, version="standard")

        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            torch.testing.assert_close(compiled(attention)(rows, lengths), attention(rows, lengths))

    def test_quantize_is_not_traced(self, qkv):
        q, k, v = (x.half() for x in qkv)
        quantized = lambda *x: flashzoo.quantize(*x).q.float() * 2  # noqa: E731
        with pytest.raises(Exception, match=r"quantize, .*can't be traced"):
            compiled(quantized)(q, k, v)
        assert torch.equal(compiled(quantized, fullgraph=False)(q, k, v), quantized(q, k, v))

    def test_a_graph_breaks_where_a_cache_is_written_to(self, qkv):
        """By a step of decoding, whose every kernel is launched as outside of a graph."""
        q, k, v = (x.half() for x in qkv)
        used = torch.tensor([3, 20], dtype=torch.int32, device=DEVICE)

        def step(q, k_cache, v_cache):
            flashzoo.append(k_cache, v_cache, k[:, :2], v[:, 1:3], used)
            return flashzoo.attention(q[:, :2], k_cache, v_cache, seqused_k=used + 2, causal=True, version="v2") * 2

        caches = [[torch.ones_like(x) for x in (k, v)] for _ in range(2)]
        with pytest.raises(Exception, match=r"flashzoo\.append, .*can't be traced"):
            compiled(step)(q, *caches[0])
        found, expected = compiled(step, fullgraph=False)(q, *caches[0]), step(q, *caches[1])
        assert torch.equal(found, expected) and all(map(torch.equal, *caches))
        with pytest.raises(NotImplementedError, match="append can't be traced"):
            torch.export.export(Steps(*caches[0], used), (k, v), strict=False)

    def test_a_graph_breaks_at_a_backward_pass_alone(self, qkv):
        q, k, v = (x.half() for x in qkv)
        out, lse = flashzoo.attention(q, k, v, return_lse=True, version="v2")
        back = lambda dout: flashzoo.attention_backward(dout, q, k, v, out, lse, version="v2")[0] * 2  # noqa: E731
        assert torch.equal(compiled(back, fullgraph=False)(out), back(out))


class Steps(torch.nn.Module):
    """Writes to caches of its own."""

    def __init__(self, k_cache, v_cache, used):
        super().__init__()
        self.caches, self.used = (k_cache, v_cache), used

    def forward(self, k, v):
        flashzoo.append(*self.caches, k, v, self.used)
        return k


class TestModes:
    @pytest.mark.parametrize("name", ["sdpa", "standard"])
    def test_operators_below_a_dispatch_mode(self, name, qkv):
        """There torch records nothing, but a backward pass that is torch's own must be."""
        out, lse = ATTENTION(*qkv, grad=True, version=name)
        arguments = (2 * out, None, *qkv, out, lse)
        expected = BACKWARD(*arguments, version=name)
        with FlopCounterMode(display=False):
            found = BACKWARD(*arguments, version=name)
        close(found, expected)
        close((out, *found[:3]), gradients(flashzoo.attention, qkv, version=name))

    FORWARD_AD = "a traced flashzoo.attention does not support forward-mode AD .*: call it outside of that, or untraced"
    OF_TORCH_2_14 = "torch.compile does not support input tensors that carry a forward-mode AD tangent"

    @pytest.mark.parametrize("traced_before", [False, True])
    def test_a_dual_tensor_does_not_lose_its_tangent(self, traced_before, qkv):
        q, k, v = qkv
        function = compiled(partial(flashzoo.attention, version="standard"))
        if traced_before:
            function(q, k, v)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, q)
            with pytest.raises(Exception, match=f"{self.FORWARD_AD}|{self.OF_TORCH_2_14}"):
                function(dual, k, v)
            with pytest.raises(Exception, match=self.FORWARD_AD):
                ATTENTION(dual, k, v, version="standard")

    def test_where_graphs_may_break_a_dual_tensor_is_as_untraced(self, qkv):
        q, k, v = qkv
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, q)
            function = torch.compile(partial(flashzoo.attention, version="standard"), backend="eager")
            close(
                *(
                    forward_ad.unpack_dual(x).tangent
                    for x in (function(dual, k, v), flashzoo.attention(dual, k, v, version="standard"))
                )
            )
            with pytest.raises(UnsupportedError, match="version 'v2' does not support forward-mode AD"):
                torch.compile(partial(flashzoo.attention, version="v2"), backend="eager")(dual, k, v)

    def test_jvp_inside(self, qkv):
        q, k, v = qkv
        function = compiled(
            lambda q: torch.func.jvp(lambda q: flashzoo.attention(q, k, v, version="standard"), (q,), (q,))
        )
        with pytest.raises(Exception, match=self.FORWARD_AD):
            function(q)

    def test_vmap_inside(self, qkv):
        q, k, v = qkv
        found = compiled(torch.func.vmap(lambda q: flashzoo.attention(q, k, v, causal=True)))(torch.stack([q, 2 * q]))
        close(found, torch.stack([flashzoo.attention(x, k, v, causal=True) for x in (q, 2 * q)]))

    def test_vmap_of_what_is_differentiated_outside(self, qkv):
        q, k, v = qkv
        attention = lambda q, k: flashzoo.attention(q, k, v, version="sdpa")  # noqa: E731
        expected = torch.func.grad(lambda k: attention(q, k).square().sum() + attention(2 * q, k).square().sum())(k)
        mapped = lambda k: torch.func.vmap(lambda q: attention(q, k))(torch.stack([q, 2 * q])).square().sum()  # noqa: E731
        close(torch.func.grad(mapped)(k), expected)
        close(torch.autograd.grad(mapped(k.requires_grad_()), k)[0], expected)

    @pytest.mark.parametrize("version", ["v2", "standard"])
    def test_nested_tensors_break_a_graph(self, version, qkv):
        offsets = torch.tensor([0, 10, 24], device=DEVICE)
        q, k, v = (torch.nested.nested_tensor_from_jagged(x[0], offsets) for x in qkv)
        attention = lambda *x: flashzoo.attention(*x, causal=True, version=version) * 2  # noqa: E731
        close(compiled(attention, fullgraph=False)(q, k, v).values(), attention(q, k, v).values())
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"attention of nested tensors .*can't be traced"):
            compiled(attention)(q, k, v)

    @pytest.mark.parametrize("version", ["v2", "standard"])
    def test_compiled_autograd_runs_a_backward_pass_as_it_stands(self, version, qkv):
        from torch._dynamo import compiled_autograd

        attention = partial(flashzoo.attention, version=version)
        expected = gradients(attention, qkv)[1:]
        leaves = [x.requires_grad_() for x in qkv]
        out = attention(*leaves).square().sum()
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=version == "standard")):
            out.backward()
        close([x.grad for x in leaves], list(expected))

    @pytest.mark.parametrize("name", ["sdpa", "standard"])
    def test_lazy_negatives(self, name, qkv):
        lazy = [lazily_negated(x) for x in qkv]
        function = compiled(partial(flashzoo.attention, version=name))
        close(gradients(function, lazy), gradients(flashzoo.attention, qkv, version=name))

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
    def test_outputs_lie_as_torch_would_lay_them(self, layout):
        """Which is how kernels do, and then nothing is copied."""
        x = LAYOUTS[layout](torch.randn(3, 10, 4, 8))
        shape, strides = traced._dense(x)
        assert (tuple(shape), tuple(strides)) == (x.shape, torch.empty_like(x).stride())
        out = torch.empty_like(x)
        assert traced._laid_out(out, shape, strides, set()) is out
        other = x.movedim(0, 2).contiguous().movedim(2, 0)
        moved = traced._laid_out(other, shape, strides, set())
        assert torch.equal(moved, x) and moved.stride() == out.stride()

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("place", range(3), ids="qkv")
    def test_an_out_that_is_an_input_is_copied(self, backend, place, toys, qkv, monkeypatch):
        """So that what is done to it is not done to the caller's."""
        monkeypatch.setattr("flashzoo_suite.support.record", lambda *given: (given[place], None))
        before = [x.clone() for x in qkv]
        out = compiled(lambda *x: flashzoo.attention(*x, version="plain").add_(1), backend=backend)(*qkv)
        assert all(map(torch.equal, qkv, before)) and torch.equal(out, qkv[place] + 1)

    def test_gradients_share_no_memory(self, toys, qkv):
        """With one another, or with what they were made from."""
        flashzoo.register(toy("lazy", impl=f"{__name__}:lazy_attention"))
        try:
            leaves = [x.requires_grad_() for x in qkv]
            out = compiled(backend="eager")(*leaves, version="lazy")
            dout = torch.randn_like(out)
            found = torch.autograd.grad(out, leaves, dout)
        finally:
            flashzoo.unregister("lazy")
        assert all(torch.equal(x, dout) for x in found)
        assert len({x.data_ptr() for x in (dout, *found)}) == 4
