"""What a call means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_bad_input import _changed, _fp8, _nested
from torch.nn.functional import scaled_dot_product_attention

import flashzoo
from flashzoo import UnsupportedError
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo_suite.support import CALLS, lazily_negated, same_bits, toy


@pytest.fixture(autouse=True)
def _apart(registry_as_it_was):
    """Set up before what a class registers for its tests."""


def forgets(q, k, v, problem, operands):
    """A version whose out carries no gradients."""
    return torch.zeros_like(q), None


class TestMeaning:
    """What arguments are taken to mean, by whichever version answers."""

    def test_scale_defaults_to_one_over_root_head_dim(self, qkv):
        flashzoo.register(toy())
        assert torch.equal(flashzoo.attention(*qkv, version="toy"), qkv[0] * (1 / math.sqrt(8)))

    @pytest.mark.parametrize("scale", [0.0, -0.0, 1e-46, -1e-300])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_at_a_scale_of_zero_every_key_that_is_seen_counts_alike(self, dtype, scale):
        """By default, which is torch, whose masks that scale must not reach; what is not 0 here is in 32 bits."""
        q, k, v = (torch.randn(2, 24, 4, 16).to(dtype).requires_grad_() for _ in range(3))
        out = flashzoo.attention(q, k, v, causal=True, softmax_scale=scale)
        seen = torch.arange(1, 25)[:, None, None]
        torch.testing.assert_close(out.double(), v.double().cumsum(1) / seen, rtol=0, atol=4 * torch.finfo(dtype).eps)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert max(dq.abs().max(), dk.abs().max()) <= 100 * abs(scale)
        expected = (1 / seen.double()).flip(0).cumsum(0).flip(0).expand_as(v)
        torch.testing.assert_close(dv.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)

    def test_v_sets_the_width_of_out_and_not_the_scale(self, qkv):
        q, k, _ = qkv
        v = torch.randn(2, 6, 4, 32)
        out = flashzoo.attention(q, k, v)
        assert out.shape == v.shape
        torch.testing.assert_close(out, flashzoo.attention(q, k, v, softmax_scale=8**-0.5))
        assert flashzoo.explain(q, k, v).problem.head_dim_v == 32

    @pytest.mark.parametrize("window", [None, (None, None), (-1, -1), (-1, None), [-1, None]], ids=str)
    def test_none_and_minus_one_both_mean_unbounded(self, window, qkv):
        flashzoo.register(toy())
        flashzoo.attention(*qkv, window_size=window, version="toy")
        assert CALLS[0].window == (None, None)

    def test_a_window_is_looked_at_though_an_equal_one_was_taken(self, qkv):
        flashzoo.attention(*qkv, window_size=(1, 0))
        for window in ((1.0, 0), (1, False), (True, 0.0)):
            with pytest.raises(ValueError, match="window_size must be None or a pair"):
                flashzoo.attention(*qkv, window_size=window)

    @pytest.mark.parametrize("version", ["v1", "v2", "standard", "sdpa"])
    def test_a_whole_number_is_a_softmax_scale(self, version):
        q = torch.randn(1, 16, 1, 16)
        found, expected = (
            torch.autograd.grad(flashzoo.attention(x, q, q, softmax_scale=scale, version=version).sum(), x)[0]
            for scale in (10**20, 1e20)
            for x in (q.clone().requires_grad_(),)
        )
        assert same_bits(found, expected)
        assert type(flashzoo.explain(q, q, q, softmax_scale=2).problem.scale) is float

    def test_defaults_are_their_explicit_values(self, qkv):
        explicit = {
            "causal": False,
            "softmax_scale": 8**-0.5,
            "window_size": (None, None),
            "deterministic": False,
            "return_lse": False,
        }
        assert torch.equal(flashzoo.attention(*qkv), flashzoo.attention(*qkv, **explicit, version="auto"))

    def test_grad_is_asked_for_only_where_autograd_records(self, qkv):
        flashzoo.register(toy())
        q, k, v = qkv
        flashzoo.attention(q, k, v, version="toy")
        flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        with torch.no_grad():
            flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        with torch.inference_mode():
            flashzoo.attention(q, k.clone().requires_grad_(), v, version="toy")
        assert [problem.grad for problem in CALLS] == [False, True, False, False]


class TestTransforms:
    """What every version is held to there is in THE suite."""

    @pytest.fixture(autouse=True)
    def _toys(self):
        flashzoo.register(toy("plain"))
        flashzoo.register(toy("composed", transforms=frozenset({"jvp", "vmap"})))

    def test_a_version_that_declares_none_is_refused_with_those_that_would_do(self, qkv):
        q, k, v = qkv
        text = (
            r"version 'plain' does not support torch.func.vmap, got q, v under it\nversions that would: "
            r"sdpa, standard, composed"
        )
        with pytest.raises(UnsupportedError, match=text):
            torch.func.vmap(lambda q: flashzoo.attention(q, k, q, version="plain"))(torch.stack([q, q]))
        assert CALLS == []
        torch.func.vmap(lambda q: flashzoo.attention(q, k, v, version="composed"))(torch.stack([q, q]))
        assert len(CALLS) == 1

    def test_what_is_not_looked_at_under_a_transform_is_behind_it(self, qkv):
        """That a version's out carries gradients, which under vmap only who is outside can say."""
        transforms = frozenset({"vmap", "grad"})
        flashzoo.register(toy("forgets", impl=f"{__name__}:{forgets.__name__}", transforms=transforms))
        q, k, v = qkv
        k.requires_grad_()
        torch.func.vmap(lambda q: flashzoo.attention(q, k, v, version="forgets"))(torch.stack([q, q]))
        with pytest.raises(TypeError, match="must return an out that carries gradients"):
            flashzoo.attention(q, k, v, version="forgets")

    def test_tensors_beside_a_transform_are_not_under_it(self, qkv):
        with torch.autograd.forward_ad.dual_level():
            flashzoo.attention(*qkv, version="plain")
        torch.func.vmap(lambda x: flashzoo.attention(*qkv, version="plain").sum() + x)(torch.ones(2))
        assert len(CALLS) == 2

    def test_auto_names_who_would_do(self, qkv):
        q, k, v = qkv
        with pytest.raises(
            UnsupportedError, match=r"version 'sdpa' does not support forward-mode AD .*\nversions that would: standard"
        ):
            torch.func.jvp(lambda q: flashzoo.attention(q, k, v), (q,), (q,))

    def test_where_nobody_would_do(self, qkv):
        with pytest.raises(UnsupportedError, match="no registered version would: call it outside of that"):
            torch.func.hessian(lambda q: flashzoo.attention(q, *qkv[1:]).sum())(qkv[0])

    def test_an_input_that_requires_grad_within_torch_func(self, qkv):
        k = qkv[1].requires_grad_()
        text = "version 'standard' does not support gradients within torch.func .*, got inputs that require grad"
        with pytest.raises(UnsupportedError, match=text):
            torch.func.vmap(lambda x: x * flashzoo.attention(k, k, k, version="standard").sum())(torch.ones(2))

    @pytest.mark.parametrize("what", ["plain", "score_mod", "tensors"])
    def test_a_batch_of_gradients(self, qkv, what):
        read = torch.linspace(0.5, 2.0, 4, requires_grad=True)
        mods = {"score_mod": flashzoo.score_mods.softcap(2.0), "tensors": lambda s, b, h, i, j: s * read[h]}
        how = {"score_mod": mods[what]} if what in mods else {}
        inputs = [x.requires_grad_() for x in qkv] + [read] * (what == "tensors")
        out = flashzoo.attention(*inputs[:3], version="standard", **how)
        batch = torch.randn(2, *out.shape)
        found = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
        for i, dout in enumerate(batch):
            expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            torch.testing.assert_close(tuple(x[i] for x in found), expected)
        out = flashzoo.attention(*inputs[:3], version="v2", **how)
        with pytest.raises(NotImplementedError, match=r"kernel's backward pass .*is_grads_batched=True"):
            torch.autograd.grad(out, inputs, batch, is_grads_batched=True)

    @pytest.mark.parametrize("precision", ["fp8", None])
    def test_no_tangent_goes_through_fp8(self, precision):
        x = torch.randn(1, 6, 2, 16).half()
        with torch.autograd.forward_ad.dual_level():
            if precision:
                arguments = {"q": torch.autograd.forward_ad.make_dual(x, x), "k": x, "v": x, "precision": precision}
            else:
                scale = torch.autograd.forward_ad.make_dual(torch.ones(1, 2), torch.ones(1, 2))
                arguments = dict.fromkeys("qkv", x.to(torch.float8_e4m3fn)) | {"k_descale": scale}
            with pytest.raises(
                UnsupportedError, match=r"'standard' does not support forward-mode AD .*, got (q|k_descale) under it"
            ):
                flashzoo.attention(**arguments)


DESCALES_SEEN, STRIDES_SEEN = [], []


def record_descales(q, k, v, problem, operands):
    CALLS.append(problem)
    DESCALES_SEEN.append(operands.descales)
    STRIDES_SEEN.append(q.stride())
    return q.to(TORCH_DTYPES[problem.out_dtype]), None


class TestFp8:
    @pytest.fixture(autouse=True)
    def _registered(self):
        """Versions that note what they get."""
        DESCALES_SEEN.clear()
        STRIDES_SEEN.clear()
        flashzoo.register(toy("fp8", impl=f"{__name__}:record_descales", dtypes=("e4m3",), cpu_dtypes=("e4m3",)))
        flashzoo.register(toy("quantizing", quantizes=("fp16", "bf16")))

    @pytest.mark.parametrize("kind", [None, "head", "block"])
    def test_a_version_gets_the_descales_as_they_are(self, kind):
        shapes = {None: [None] * 3, "head": [(2, 4)] * 3, "block": [(2, 4, 1)] * 3}[kind]
        given = tuple(None if shape is None else torch.rand(shape) for shape in shapes)
        names = dict(zip(("q_descale", "k_descale", "v_descale"), given, strict=True))
        out = flashzoo.attention(**_fp8(**names), version="fp8")
        assert out.dtype == torch.bfloat16 and len(DESCALES_SEEN) == 1
        assert all(found is x for found, x in zip(DESCALES_SEEN[0], given, strict=True))

    @pytest.mark.parametrize("shape", [(2, 4), (2, 4, 1)], ids=str)
    def test_descales_that_lie_too_far_apart_for_kernels_are_copied(self, shape, tmp_path):
        near, far = (self.apart(step, shape, tmp_path) for step in ((1 << 31) - 4, (1 << 31) - 3))
        flashzoo.attention(**_fp8(q_descale=near, k_descale=far, v_descale=far), version="fp8")
        q, k, v = DESCALES_SEEN[0]
        assert q is near and k.is_contiguous() and v.is_contiguous() and torch.equal(k, far)

    @staticmethod
    def apart(step: int, shape: tuple[int, ...], folder: Path) -> torch.Tensor:
        """One whose batches are that far apart, in a file that takes no room: nothing else of it is touched."""
        numbers = torch.from_file(str(folder / str(step)), shared=True, size=step + 4)
        return numbers.as_strided(shape, (step, 1, 1)[: len(shape)]).copy_(torch.rand(shape))

    def test_lazy_negatives_are_resolved_before_a_version_gets_them(self):
        given = dict(
            zip(
                ("q_descale", "k_descale", "v_descale"),
                (lazily_negated(torch.rand(2, 4)) for _ in range(3)),
                strict=True,
            )
        )
        flashzoo.attention(**_fp8(**given), version="fp8")
        assert not any(found.is_neg() for found in DESCALES_SEEN[0])
        assert all(torch.equal(found, x) for found, x in zip(DESCALES_SEEN[0], given.values(), strict=True))

    def test_what_is_negated_has_whole_rows(self):
        """Where heads that overlap leave torch the choice which dimension is innermost."""
        q = torch.randn(1, 3, 17).to(torch.float8_e4m3fn).as_strided((1, 3, 2, 16), (51, 17, 1, 1))
        out = flashzoo.attention(q, q, q, softmax_scale=-0.5, version="fp8")
        assert torch.equal(out, -q.bfloat16()) and STRIDES_SEEN[0][-1] == 1

    def test_the_shapes_of_descales_follow_heads_and_lengths(self):
        q, k = (torch.zeros(1, seqlen, heads, 16).to(torch.float8_e4m3fn) for seqlen, heads in ((257, 6), (128, 2)))
        good = {"q_descale": (1, 6, 3), "k_descale": (1, 2, 1), "v_descale": (1, 2)}
        flashzoo.attention(q, k, k, **{name: torch.ones(shape) for name, shape in good.items()}, version="fp8")
        for name, shape in (
            ("q_descale", (1, 6)),
            ("q_descale", (1, 2, 3)),
            ("k_descale", (1, 6, 1)),
            ("v_descale", (1, 2, 2)),
        ):
            with pytest.raises(ValueError, match=f"{name} must have shape"):
                flashzoo.attention(q, k, k, **{name: torch.ones(shape)}, version="fp8")

    def test_explain_refuses_the_same(self):
        with pytest.raises(ValueError, match="q_descale must have shape"):
            flashzoo.explain(**_fp8(q_descale=torch.ones(3)))
        with pytest.raises(ValueError, match="precision must be None or 'fp8', got 'fp4'"):
            flashzoo.explain(**_fp8(precision="fp4"))
        with pytest.raises(ValueError, match="k_descale is for e4m3 inputs"):
            flashzoo.explain(**_changed(k_descale=torch.ones(2, 4)))

    def test_explain_says_what_was_asked(self):
        tensors = dict.fromkeys("qkv", torch.zeros(2, 6, 4, 16).to(torch.float8_e4m3fn))
        asked = flashzoo.explain(**tensors, out_dtype=torch.float16, q_descale=torch.ones(2, 4), arch=90)
        assert asked.problem.out_dtype == "fp16" and asked.chosen == "v3_fp8"
        half = {name: x.half() for name, x in _changed().items()}
        asked = flashzoo.explain(**half, precision="fp8", arch=90)
        assert asked.problem.precision == "fp8" and "fp16 in fp8" in str(asked)

    def test_precision_and_out_dtype_reach_the_problem_and_are_not_remembered(self):
        half = {name: x.half() for name, x in _changed().items()}
        for precision in (None, "fp8", None):
            flashzoo.attention(**half, precision=precision, version="quantizing")
        assert [problem.precision for problem in CALLS] == [None, "fp8", None]
        CALLS.clear()
        for out_dtype in (None, torch.float16, torch.bfloat16):
            flashzoo.attention(**_fp8(), out_dtype=out_dtype, version="fp8")
        assert [problem.out_dtype for problem in CALLS] == ["bf16", "fp16", "bf16"]

    def test_a_negative_scale_turns_the_sign_of_every_number(self):
        tensors = _fp8()
        tensors["q"][0, 0, 0, :3] = torch.tensor([0.0, 2**-9, math.nan])
        out = flashzoo.attention(**tensors, softmax_scale=-1.0, version="fp8").float()
        expected = -tensors["q"].float()
        assert torch.equal(out.nan_to_num(), expected.nan_to_num()) and torch.equal(out.isnan(), expected.isnan())

    def test_out_and_lse_have_their_dtypes(self):
        for out_dtype in (torch.float16, torch.bfloat16):
            out, lse = flashzoo.attention(**_fp8(), out_dtype=out_dtype, return_lse=True)
            assert out.dtype == out_dtype and lse.dtype == torch.float32
        half = {name: x.half() for name, x in _changed().items()}
        assert flashzoo.attention(**half, precision="fp8").dtype == torch.float16

    def test_e4m3_keys_have_their_descales_and_no_gradients(self):
        """Of k and v in e4m3 beside a 16-bit q: what they are multiplied by, and that no backward pass takes them."""
        q, k, v = (torch.randn(1, 200, heads, 16) for heads in (4, 2, 2))
        q, k, v = q.bfloat16(), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        by_head, by_block = torch.rand(1, 2) + 0.5, torch.rand(1, 2, 2) + 0.5
        out = flashzoo.attention(q, k, v, k_descale=by_head, v_descale=by_block)
        k_real = k.double() * by_head[:, None, :, None]
        v_real = v.double() * by_block.repeat_interleave(128, 2)[..., :200].mT[..., None]
        expected = flashzoo.attention(q.double(), k_real, v_real)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
        with pytest.raises(UnsupportedError, match="backward pass does not support e4m3 k and v with 16-bit q"):
            flashzoo.attention(q.requires_grad_(), k, v, version="standard")

    def test_e4m3_has_no_gradients(self):
        tensors = {name: x.requires_grad_() for name, x in _fp8().items()}
        with pytest.raises(UnsupportedError, match="standard: e4m3 inputs have no gradients"):
            flashzoo.attention(**tensors)
        with torch.no_grad():
            assert flashzoo.attention(**tensors).shape == (2, 6, 4, 8)

    def test_no_other_version_drops_the_precision(self):
        half = {name: x.half() for name, x in _changed().items()}
        for name in ("v1", "v2", "sdpa"):
            with pytest.raises(UnsupportedError, match=f"{name}: does not support precision='fp8'"):
                flashzoo.attention(**half, precision="fp8", version=name)

    def test_quantize_is_a_public_name(self):
        with pytest.raises((TypeError, ValueError)):
            flashzoo.quantize(*(torch.randn(1, 16, 2, 16, dtype=torch.float64) for _ in range(3)))


class TestSdpaAdapter:
    @pytest.fixture
    def bhsd(self):
        return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
    def test_is_torch(self, options, bhsd):
        torch.testing.assert_close(flashzoo.sdpa(*bhsd, **options), scaled_dot_product_attention(*bhsd, **options))

    def test_groups_heads_where_told(self, bhsd):
        q, k, v = bhsd[0], bhsd[1][:, :2], bhsd[2][:, :2]
        torch.testing.assert_close(
            flashzoo.sdpa(q, k, v, enable_gqa=True), scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )
        with pytest.raises(
            ValueError, match="enable_gqa: expected True where head counts differ, got False with 4 and 2 heads"
        ):
            flashzoo.sdpa(q, k, v)

    def test_takes_values_of_another_width(self, bhsd):
        q, k, v = *bhsd[:2], torch.randn(2, 4, 6, 16)
        torch.testing.assert_close(flashzoo.sdpa(q, k, v), scaled_dot_product_attention(q, k, v))

    def test_refuses_the_two_meanings_of_causal(self, bhsd):
        with pytest.raises(ValueError, match=r"is_causal: .* expected equal lengths, got seqlen_q 3 and seqlen_k 6"):
            flashzoo.sdpa(bhsd[0][:, :, :3], *bhsd[1:], is_causal=True)

    def test_names_torchs_arguments(self, bhsd):
        with pytest.raises(TypeError, match=r"key must be a torch.Tensor, got NoneType"):
            flashzoo.sdpa(bhsd[0], None, bhsd[2])

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"is_causal": "False"}, "is_causal must be a bool, got 'False'"),
            ({"enable_gqa": 1}, "enable_gqa must be a bool, got 1"),
            ({"scale": [0.1]}, "softmax_scale must be a float or None, got list"),
            ({"query": torch.zeros(6, 8).to_sparse_csr()}, "query must be a dense tensor .* got torch.sparse_csr"),
            ({"value": _nested(torch.strided)}, "value must be a dense tensor .* got a nested one"),
            ({"key": _nested(torch.jagged)}, "key must be a dense tensor .* got a nested one"),
        ],
        ids=["is_causal", "enable_gqa", "scale", "sparse", "nested", "jagged"],
    )
    def test_refuses_what_attention_refuses(self, options, text, bhsd):
        with pytest.raises(TypeError, match=text):
            flashzoo.sdpa(**dict(zip(("query", "key", "value"), bhsd, strict=True)) | options)

    def test_takes_a_version(self, bhsd):
        with pytest.raises(ValueError, match="got 'v9'"):
            flashzoo.sdpa(*bhsd, version="v9")


EMPTY = {
    "no batch": ((0, 6, 4, 8), (0, 6, 2, 8)),
    "no queries": ((2, 0, 4, 8), (2, 6, 2, 8)),
    "no keys": ((2, 6, 4, 8), (2, 0, 2, 8)),
    "no queries, no keys": ((2, 0, 4, 8), (2, 0, 2, 8)),
}


class TestEmpty:
    @staticmethod
    def check(q_shape, k_shape, v_shape, **options):
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, v_shape))
        out, lse = flashzoo.attention(q, k, v, return_lse=True, **options)
        assert out.shape == (*q_shape[:3], v_shape[3]) and not out.any()
        assert lse.shape == (q_shape[0], q_shape[2], q_shape[1]) and bool((lse == -math.inf).all())
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in gradients)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("name", ["auto", "v1", "v2", "standard"])
    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_gives_zeros_minus_infinity_and_zero_gradients(self, shapes, name, causal):
        q_shape, k_shape = shapes
        self.check(q_shape, k_shape, k_shape, causal=causal, version=name)

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_is_as_wide_as_v(self, shapes):
        q_shape, k_shape = shapes
        self.check(q_shape, k_shape, (*k_shape[:3], 5))

    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_of_e4m3(self, shapes, out_dtype):
        q, k = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in shapes)
        blocks = torch.ones(q.shape[0], q.shape[2], -(-q.shape[1] // 128))
        for scale in (None, -1.0):
            out, lse = flashzoo.attention(
                q, k, k, softmax_scale=scale, out_dtype=out_dtype, q_descale=blocks, return_lse=True
            )
            assert out.shape == q.shape and out.dtype == out_dtype and not out.any()
            assert (
                lse.shape == (q.shape[0], q.shape[2], q.shape[1])
                and lse.dtype == torch.float32
                and bool((lse == -math.inf).all())
            )

    @pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
    def test_of_what_would_be_quantised(self, shapes):
        q_shape, k_shape = shapes
        q, k, v = (torch.randn(shape).half().requires_grad_() for shape in (q_shape, k_shape, k_shape))
        out, lse = flashzoo.attention(q, k, v, precision="fp8", return_lse=True)
        assert out.shape == q.shape and out.dtype == torch.float16 and not out.any()
        assert not any(
            x.any() for x in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
        )

    def test_still_asks_who_would_answer(self):
        q = torch.randn(2, 0, 4, 8)
        with pytest.raises(UnsupportedError, match="does not support window_size"):
            flashzoo.attention(q, q, q, window_size=(1, 0), version="v1")

    def test_no_keys_of_bad_numbers(self):
        """The zeros must not be made from the inputs by a product: 0 * inf is NaN."""
        q, k = torch.full((1, 3, 2, 4), math.inf), torch.empty(1, 0, 2, 4)
        assert torch.equal(flashzoo.attention(q, k, k), torch.zeros_like(q))
