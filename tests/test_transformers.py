"""`flashzoo.integrations.transformers`: tiny models with random weights, held to what eager gives."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import flashzoo

transformers = pytest.importorskip("transformers", reason="needs the extra transformers, which make installs")

from flashzoo.integrations import masks  # noqa: E402
from flashzoo.integrations import transformers as door  # noqa: E402

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS: dict[str, Any] = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GQA = SMALL | TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 96}
WINDOWS = ["sliding_attention", "full_attention"]
CAUSAL = {
    "Llama": GQA,
    "Qwen2": GQA | {"use_sliding_window": True, "sliding_window": 7, "layer_types": WINDOWS},
    "Mistral": GQA | {"sliding_window": 6},
    "GptOss": GQA
    | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": WINDOWS}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "GPT2": TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "attn_pdrop": 0.0},
}
SEQLEN, NEW = 20, 32
LEFT = (torch.arange(SEQLEN) >= torch.tensor([0, 5, 11])[:, None]).long()
HOLES = torch.ones(3, SEQLEN, dtype=torch.long).index_fill(1, torch.tensor([4, 5, 9]), 0)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small are slower on more
    door.register()
    yield
    torch.set_num_threads(threads)


def pair(model: str, config: str, **fields: Any) -> tuple[Any, Any]:
    """The same weights, by eager and by flashzoo."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**fields, attn_implementation="eager")
    eager = getattr(transformers, model)(made).eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("zoo")
    return eager, ours


@pytest.fixture(scope="module", params=CAUSAL)
def causal(request):
    name = request.param
    return pair(f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM", name, **CAUSAL[name])


def ids(mask: Tensor | None = None) -> Tensor:
    drawn = torch.randint(2, TOKENS["vocab_size"], (3, SEQLEN), generator=torch.Generator().manual_seed(1))
    return drawn if mask is None else drawn * mask


def hold(eager: Any, ours: Any, rows: Tensor | None = None, **inputs: Any) -> None:
    """Logits, in these rows, and gradients within rounding of float32."""
    found = []
    for model in (ours, eager):
        model.zero_grad()
        logits = model(**inputs).logits
        logits = logits if rows is None else logits[rows.bool()]
        logits.square().sum().backward()
        gradient = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        found.append((logits.detach(), gradient))
    for (x, y), limit in zip(zip(*found, strict=True), (1e-5, 1e-4), strict=True):
        assert (x - y).norm() <= limit * y.norm()


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1), HOLES], ids=["no padding", "left", "right", "between"])
def test_logits_and_gradients(causal, mask):
    hold(*causal, mask, input_ids=ids(mask), attention_mask=mask)


def test_a_packed_batch_by_its_position_ids(causal):
    lengths = ((7, 9, 4), (20,), (10, 10))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    hold(*causal, input_ids=ids(), position_ids=positions, use_cache=False)


def test_a_packed_batch_by_its_lengths(causal):
    """As a collator without padding gives them: each sequence is as it is alone."""
    _, ours = causal
    lengths, row = (7, 9, 4), ids()[:1]
    cu_seqlens = torch.tensor([0, 7, 16, 20])
    given = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 9, "max_length_k": 9}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = ours(row, position_ids=positions, use_cache=False, **given).logits
        alone = torch.cat([ours(part).logits for part in row.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["no padding", "left"])
def test_generated_tokens(causal, cache, mask):
    mask = torch.ones_like(LEFT) if mask is None else mask
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected, found = (model.generate(ids(mask), cache_implementation=cache, **how) for model in causal)
    assert torch.equal(found, expected) and found.shape[1] == SEQLEN + NEW


def test_no_mask_is_dense(monkeypatch):
    """Nor is any made where flashzoo has an argument, and a step of generation by a static cache has lengths alone."""
    monkeypatch.setattr(masks.masking_utils, "sdpa_mask", lambda **_: pytest.fail("a dense mask was made"))
    asked, attention = [], flashzoo.attention

    def seen(*tensors, **options):
        asked.append({name for name, x in options.items() if x is not None and x is not False})
        return attention(*tensors, **options)

    monkeypatch.setattr(flashzoo, "attention", seen)
    _, ours = pair("MistralForCausalLM", "Mistral", **CAUSAL["Mistral"] | {"num_hidden_layers": 1})
    with torch.no_grad():
        for mask in (LEFT, LEFT.flip(1)):
            ours(ids(mask), attention_mask=mask)
        ours(ids(), position_ids=torch.arange(10).repeat(2)[None].expand(3, -1), use_cache=False)
    always = {"softmax_scale", "version", "causal", "window_size"}
    padded = always | {"cu_seqlens_q", "cu_seqlens_k", "seqused_k"}
    assert asked == [padded, padded, always | {"cu_seqlens_q"}]
    asked.clear()
    _, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"] | {"num_hidden_layers": 1})
    ours.generate(ids(), max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert asked == [always, always | {"seqused_k"}, always | {"seqused_k"}]


def test_encoders():
    bert = SMALL | {"vocab_size": 48, "num_hidden_layers": 1, "attention_probs_dropout_prob": 0.0}
    models = pair("BertForMaskedLM", "Bert", **bert)
    for mask in (LEFT, LEFT.flip(1), HOLES):
        hold(*models, mask, input_ids=ids(), attention_mask=mask)
    images = torch.randn(2, 3, 16, 16)
    hold(*pair("ViTForImageClassification", "ViT", **SMALL, image_size=16, patch_size=4), pixel_values=images)


def test_whisper_attends_across():
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 32))}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "num_mel_bins": 8}
    lengths = {"max_source_positions": 20, "max_target_positions": 60, "decoder_start_token_id": 1}
    silent = {"suppress_tokens": None, "begin_suppress_tokens": None}
    models = pair("WhisperForConditionalGeneration", "Whisper", **sizes, **lengths, **silent, **TOKENS)
    sound = torch.randn(3, 8, 40)
    mask = LEFT.flip(1)
    hold(*models, mask, input_features=sound, decoder_input_ids=ids(), decoder_attention_mask=mask)
    for cache in ("dynamic", "static"):
        how = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
        expected, found = (model.generate(sound, **how) for model in models)
        assert torch.equal(found, expected)


def test_compiled():
    """Training has one break, where padding is looked at; generation by a static cache has none."""
    eager, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"] | {"num_hidden_layers": 1})
    compiled = torch.compile(ours, backend="aot_eager")
    hold(eager, compiled, LEFT, input_ids=ids(LEFT), attention_mask=LEFT)
    one_graph = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    one_graph._compile_all_devices = True
    how = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False}
    expected = eager.generate(ids(LEFT), **how)
    assert torch.equal(
        ours.generate(ids(LEFT), **how, cache_implementation="static", compile_config=one_graph), expected
    )


def test_autocast_casts_what_rotary_embeddings_leave_in_float32():
    eager, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(ours(ids()).logits, eager(ids()).logits, rtol=0.05, atol=0.05)


def test_a_mask_of_ones_own():
    """Bool, of four dimensions: shared by the layers as a block mask."""
    eager, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"])
    shown = torch.rand(3, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(0)) < 0.5
    shown |= torch.eye(SEQLEN, dtype=torch.bool)
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo().min)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids(), attention_mask=shown).logits, eager(ids(), attention_mask=added).logits)
    with pytest.raises(flashzoo.UnsupportedError, match="attention_mask must be bool where it has 4 dimensions"):
        ours(ids(), attention_mask=added)
    with pytest.raises(ValueError, match=r"attention_mask must be bool where it is one of elements, got torch.int32"):
        ours(ids(), attention_mask=shown.int())


def test_a_rule_that_is_not_known_becomes_a_dense_mask():
    chunks = masks.masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    dense = masks.mask_of(2, 8, 8, mask_function=chunks)
    at = torch.arange(8)
    wanted = (at[:, None] >= at) & (at[:, None] // 4 == at // 4)
    assert dense.dtype == torch.bool and torch.equal(dense, wanted.expand(2, 1, 8, 8))


@pytest.mark.parametrize("version", ["standard", "sdpa"])
def test_a_version_by_name(version):
    _, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"])
    expected = ours(ids()).logits
    ours.set_attn_implementation(f"zoo:{version}")
    torch.testing.assert_close(ours(ids()).logits, expected)


@pytest.mark.parametrize(
    ("model", "config", "fields", "inputs", "text"),
    [
        ("Gemma2ForCausalLM", "Gemma2", GQA | {"head_dim": 8}, {}, "softcap must be None, got 50.0"),
        (
            "T5ForConditionalGeneration",
            "T5",
            {"vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4},
            {"decoder_input_ids": ids()},
            "position_bias must be None, got a tensor",
        ),
        ("LlamaForCausalLM", "Llama", GQA | {"attention_dropout": 0.1}, {"train": True}, "dropout must be 0, got 0.1"),
    ],
)
def test_what_no_version_does_is_an_error_by_name(model, config, fields, inputs, text):
    _, ours = pair(model, config, **fields)
    inputs = dict(inputs)
    ours.train(inputs.pop("train", False))
    with pytest.raises(flashzoo.UnsupportedError, match=text):
        ours(ids(), **inputs)


def test_names():
    with pytest.raises(ValueError, match="name must not contain 'flash'"):
        door.register("flashzoo")
    query = torch.randn(1, 2, 4, 8)
    attend = door.attention_of("auto")
    layer = torch.nn.Module()
    with pytest.raises(ValueError, match="attention_mask must say what 4 queries see of 6 keys"):
        attend(layer, query, torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), None)
    with pytest.raises(ValueError, match="sliding_window=2 without is_causal"):
        attend(layer, query, query, query, None, sliding_window=2, is_causal=False)
    padded = masks.mask_of(1, 4, 4, attention_mask=torch.tensor([[False, True, True, True]]))
    with pytest.raises(ValueError, match="cu_seq_lens_q does not go with a padded batch"):
        attend(layer, query, query, query, padded, cu_seq_lens_q=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="attention_mask is of 6 keys, got 4"):
        attend(layer, query, query, query, masks.mask_of(1, 4, 6, 2))
    with pytest.raises(flashzoo.UnsupportedError, match="output_attentions must be None, got True"):
        attend(layer, query, query, query, None, output_attentions=True)


def drawn_mask(draw: random.Random) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a mask function, as any cache and padding give them, and of each query whether it is no padding."""
    batch, positions = draw.choice([1, 2, 5]), draw.randint(1, 14)
    queries, window = draw.randint(1, positions), draw.choice([None, 1, 2, 5, 20])
    causal, static, first = draw.random() < 0.6, draw.random() < 0.4, positions - queries
    if not causal and draw.random() < 0.7:
        first = 0
    cut = 0 if static or draw.random() < 0.6 else draw.randint(0, positions - queries)
    keys = positions + (draw.randint(0, 4) if static else 0) - cut
    rules = masks.masking_utils
    if window is None:
        rule = rules.causal_mask_function if causal else rules.bidirectional_mask_function
    else:
        make = "sliding_window_causal_mask_function" if causal else "sliding_window_bidirectional_mask_function"
        rule = getattr(rules, make)(window)
    there = torch.ones(batch, positions, dtype=torch.bool)
    padding = draw.choice(["none", "left", "right", "between", "all"])
    for row in there:
        n = draw.randint(0, positions)
        if padding == "left":
            row[:n] = False
        elif padding == "right":
            row[positions - n :] = False
        elif padding == "between":
            row &= torch.rand(positions) < 0.7
        elif padding == "all" and n % 2:
            row[:] = False
    offset = torch.tensor(first) if static and draw.random() < 0.7 else first
    how = {"batch_size": batch, "q_length": queries, "kv_length": keys, "q_offset": offset, "kv_offset": cut}
    given = None if padding == "none" else there
    by_position = causal or window is not None
    rows = there[:, first : first + queries] if by_position else torch.ones(batch, queries, dtype=torch.bool)
    return how | {"mask_function": rule, "attention_mask": given}, rows


def test_a_layer_sees_what_the_dense_mask_shows():
    """Whatever the lengths, offsets, windows, padding and caches."""
    draw, attend, kinds = random.Random(0), door.attention_of("standard"), set()
    for _ in range(400):
        how, rows = drawn_mask(draw)
        mask = masks.mask_of(**how)
        mask = mask.contiguous() if draw.random() < 0.5 else mask  # as generate has it
        kinds.add(type(masks.read(mask)).__name__ if mask.dtype == torch.int32 else "dense")
        shown = masks.masking_utils.sdpa_mask(**how, allow_is_causal_skip=False)
        sizes = zip((2, 1, 1), (*shown.shape[2:], shown.shape[3]), strict=True)
        q, k, v = (torch.randn(how["batch_size"], heads, length, 8) for heads, length in sizes)
        out, _ = attend(torch.nn.Module(), q, k, v, mask, scaling=0.4)
        p = (q @ k.mT * 0.4).masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0)
        assert torch.allclose(out[rows], (p @ v).transpose(1, 2)[rows], atol=1e-5), (how, rows)
    assert kinds == {"Plain", "Used", "Padded", "dense"}
