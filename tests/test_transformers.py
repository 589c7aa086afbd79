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
    "Gemma2": GQA
    | {
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": WINDOWS,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 8,
    },
    "GPT2": TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "attn_pdrop": 0.0},
}
INKLING: dict[str, Any] = GQA | {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
INKLING |= {"swa_head_dim": 8, "sliding_window_size": 7, "local_layer_ids": [0], "d_rel": 4, "rel_extent": 16}
INKLING |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK_V4: dict[str, Any] = GQA | {"num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8}
DEEPSEEK_V4 |= {"sliding_window": 5, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK_V4 |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
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
    if cache == "static" and int(transformers.__version__.split(".")[1]) < 23:
        pytest.skip("eager adds masks of other lengths before transformers 5.23")
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
    always = {"softmax_scale", "version", "causal", "window_size", "dropout_p"}
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


T5: dict[str, Any] = TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0}


@pytest.fixture(scope="module")
def t5():
    return pair("T5ForConditionalGeneration", "T5", **T5)


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1), HOLES], ids=["no padding", "left", "right", "between"])
@pytest.mark.parametrize("of_decoder", [None, LEFT, LEFT.flip(1)], ids=["none in the decoder", "left", "right"])
def test_a_learnt_bias_of_positions(t5, mask, of_decoder):
    """T5's, whose gradient is one of what a function on scores reads, in self-attention and across."""
    given = {"input_ids": ids(mask), "attention_mask": mask, "decoder_input_ids": ids(of_decoder)}
    hold(*t5, of_decoder, **given, decoder_attention_mask=of_decoder)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [None, LEFT.flip(1)], ids=["no padding", "right"])
def test_generated_with_a_bias(t5, cache, mask):
    if cache == "static" and int(transformers.__version__.split(".")[1]) < 23:
        pytest.skip("eager adds masks of other lengths before transformers 5.23")
    mask = torch.ones_like(LEFT) if mask is None else mask
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    for decoder_attention_mask in (None, LEFT):
        if decoder_attention_mask is not None:
            how |= {"decoder_input_ids": ids(LEFT), "decoder_attention_mask": LEFT}
        expected, found = (model.generate(ids(mask), cache_implementation=cache, **how) for model in t5)
        assert torch.equal(found, expected)


def test_what_is_added_is_traced_once(monkeypatch):
    """Whatever the layer and the lengths, of which generation has others in each step."""
    monkeypatch.setattr(door, "_texts", {})
    made, init = [], flashzoo.ScoreMod.__init__
    monkeypatch.setattr(flashzoo.ScoreMod, "__init__", lambda self, function: made.append(init(self, function)))
    _, ours = pair("T5ForConditionalGeneration", "T5", **T5)
    ours.generate(ids(), max_new_tokens=5, do_sample=False)
    assert len(made) == len(door._texts)


@pytest.mark.parametrize(("name", "more"), [("Llama", {}), ("Gemma2", {"layer_types": WINDOWS[:1]})])
def test_compiled(name, more):
    """Training has one break, where padding is looked at; generation by a static cache has none."""
    eager, ours = pair(f"{name}ForCausalLM", name, **CAUSAL[name] | {"num_hidden_layers": 1} | more)
    compiled = torch.compile(ours, backend="aot_eager")
    hold(eager, compiled, LEFT, input_ids=ids(LEFT), attention_mask=LEFT)
    one_graph = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    one_graph._compile_all_devices = True
    how = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False}
    expected = eager.generate(ids(LEFT), **how)
    assert torch.equal(
        ours.generate(ids(LEFT), **how, cache_implementation="static", compile_config=one_graph), expected
    )


def test_compiled_with_a_bias():
    """Functions that read tensors are made outside of graphs."""
    eager, ours = pair("T5ForConditionalGeneration", "T5", **T5 | {"num_layers": 1, "num_decoder_layers": 1})
    compiled = torch.compile(ours, backend="aot_eager")
    hold(eager, compiled, LEFT, input_ids=ids(LEFT), attention_mask=LEFT, decoder_input_ids=ids())


@pytest.mark.skipif(not hasattr(transformers, "InklingTextModel"), reason="transformers has no Inkling")
@pytest.mark.parametrize("mask", [None, LEFT], ids=["no padding", "left"])
def test_keys_whose_columns_are_no_neighbours(mask):
    """Inkling's keys come from a convolution along the tokens."""
    eager, ours = pair("InklingTextModel", "InklingText", **INKLING)
    with torch.no_grad():
        for x, y in zip(eager.parameters(), ours.parameters(), strict=True):
            y.copy_(x.mul_(8))  # or attention gives too little for the output to tell
    rows = slice(None) if mask is None else mask.bool()
    ours.set_attn_implementation("zoo:v2")
    found, expected = (model(ids(mask), attention_mask=mask).last_hidden_state[rows] for model in (ours, eager))
    assert 0 < (found - expected).norm() <= 1e-4 * expected.norm()


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
    with pytest.raises(ValueError, match=r"attention_mask must be bool where it is one of elements, got torch.int32"):
        ours(ids(), attention_mask=shown.int())


@pytest.mark.parametrize("mask", [None, LEFT, HOLES], ids=["no padding", "left", "between"])
@pytest.mark.parametrize(
    ("model", "fields", "text"),
    [
        ("Bloom", TOKENS | {"hidden_size": 32, "n_head": 4, "n_layer": 1}, "bloom has an attention of its own, which"),
        ("DeepseekV4", DEEPSEEK_V4, "deepseek_v4 adds keys to masks in its layers"),
    ],
    ids=["without the interface", "keys of its own"],
)
def test_a_model_that_would_take_a_mask_for_another_is_refused(model, fields, text, mask):
    """Such as add it to scores, as eager's."""
    config = getattr(transformers, f"{model}Config")(**fields, attn_implementation="zoo")
    made = getattr(transformers, f"{model}ForCausalLM")(config)
    with pytest.raises(flashzoo.UnsupportedError, match=text):
        made(input_ids=ids(mask), attention_mask=mask)


def test_a_mask_is_read_once_for_all_layers():
    mask = masks.mask_of(2, 1, 9, q_offset=torch.tensor(5))
    said = masks.read(mask)
    assert said.used.tolist() == [6, 6] and masks.read(mask) is said
    assert masks.read(mask.clone()).used.tolist() == [6, 6]


def test_a_bool_mask_is_shown_anew_where_its_data_are_others():
    attend, mask = door._attention_of("standard"), torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    q, k, v = torch.randn(3, 1, 2, 4, 8)

    def out() -> torch.Tensor:
        return attend(torch.nn.Module(), q, k, v, mask)[0]

    before = out()
    mask.data = torch.ones_like(mask)
    assert torch.equal(out(), attend(torch.nn.Module(), q, k, v, mask.clone())[0]) and not torch.equal(out(), before)


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


def test_dropout_while_it_trains():
    expected, ours = pair("LlamaForCausalLM", "Llama", **CAUSAL["Llama"] | {"attention_dropout": 0.5})
    torch.testing.assert_close(ours(ids()).logits, expected(ids()).logits)
    ours.train()
    found = []
    for seed, mask in ((1, None), (1, None), (2, None), (2, LEFT)):
        torch.manual_seed(seed)
        found.append(ours(ids(mask) if mask is not None else ids(), attention_mask=mask).logits)
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:3]) and bool(found[3].isfinite().all())
    ours.set_attn_implementation("zoo:sdpa")
    with pytest.raises(flashzoo.UnsupportedError, match="sdpa: does not support dropout_p"):
        ours(ids())


def test_names():
    with pytest.raises(ValueError, match="name must not contain 'flash'"):
        door.register("flashzoo")
    query = torch.randn(1, 2, 4, 8)
    attend = door._attention_of("auto")
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
    bias = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match="cu_seq_lens_q does not go with what is added to scores"):
        attend(layer, query, query, query, None, position_bias=bias, cu_seq_lens_q=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"position_bias must spread to \(1, 2, 4, 4\), .* got \(1, 2, 4, 3\)"):
        attend(layer, query, query, query, None, position_bias=bias[..., :3])
    with pytest.raises(flashzoo.UnsupportedError, match="attention_mask must be bool or floating-point"):
        attend(layer, query, query, query, bias.long())
    added = bias + masks.mask_of(1, 4, 4)  # as BEiT's layers do, to what says in no numbers that all is seen
    with pytest.raises(flashzoo.UnsupportedError, match="with what the model's layers add to masks"):
        attend(layer, query, query, query, added)
    with pytest.raises(flashzoo.UnsupportedError, match="output_attentions must be None, got True"):
        attend(layer, query, query, query, None, output_attentions=True)


def test_numbers_that_are_added_behind_a_softcap():
    """By batch, head, query and key, in whichever they differ, with gradients; the least of a dtype masks."""
    attend, (batch, heads, queries, keys) = door._attention_of("standard"), (2, 4, 5, 7)
    q, k, v = (torch.randn(batch, n, length, 8, requires_grad=True) for n, length in ((4, 5), (2, 7), (2, 7)))
    for sizes in ((1, heads, queries, keys), (batch, 1, 1, keys), (batch, heads, queries, 1), (1, 1, 1, 1)):
        for masked in (None, -torch.inf, torch.finfo().min):
            bias, mask = torch.randn(sizes, requires_grad=True), torch.randn(batch, 1, queries, keys)
            if masked is not None:
                mask[..., 1:4] = masked
            mask.requires_grad_()
            leaves = (q, k, v, bias, mask)
            out, _ = attend(torch.nn.Module(), q, k, v, mask, scaling=0.4, softcap=0.7, position_bias=bias)
            s = 0.7 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.4 / 0.7) + bias + mask
            expected = (s.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
            torch.testing.assert_close(out, expected)
            gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
            for found, wanted in zip(*gradients, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_bias_beside_packed_sequences():
    rules, number = masks.masking_utils, torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]])
    for rule in (rules.causal_mask_function, rules.sliding_window_causal_mask_function(2)):
        rule = rules.and_masks(rules.packed_sequence_mask_function(number), rule)
        mask = masks.mask_of(2, 5, 5, mask_function=rule)
        assert isinstance(masks.read(mask), masks.Packed)
        shown = rules.sdpa_mask(2, 5, 5, mask_function=rule, allow_is_causal_skip=False)
        q, bias = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 5)
        out, _ = door._attention_of("standard")(torch.nn.Module(), q, q, q, mask, scaling=0.4, position_bias=bias)
        p = (q @ q.mT * 0.4 + bias).masked_fill(~shown, -torch.inf).softmax(-1)
        torch.testing.assert_close(out, (p @ q).transpose(1, 2))


def test_a_row_that_a_mask_of_numbers_hides_gives_0():
    attend, q = door._attention_of("standard"), torch.randn(1, 2, 4, 8)
    for masked in (-torch.inf, torch.finfo().min):
        mask = torch.zeros(1, 1, 4, 4)
        mask[:, :, 2] = masked
        out, _ = attend(torch.nn.Module(), q, q, q, mask)
        assert (out[:, 2] == 0).all() and (out[:, [0, 1, 3]] != 0).all()


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
    """Whatever the lengths, offsets, windows, padding and caches, and what is done to scores."""
    draw, attend, kinds = random.Random(0), door._attention_of("standard"), set()
    for _ in range(400):
        how, rows = drawn_mask(draw)
        mask = masks.mask_of(**how)
        mask = mask.contiguous() if draw.random() < 0.5 else mask  # as generate has it
        kinds.add(type(masks.read(mask)).__name__ if mask.dtype == torch.int32 else "dense")
        shown = masks.masking_utils.sdpa_mask(**how, allow_is_causal_skip=False)
        sizes = zip((2, 1, 1), (*shown.shape[2:], shown.shape[3]), strict=True)
        q, k, v = (torch.randn(how["batch_size"], heads, length, 8) for heads, length in sizes)
        sizes = (how["batch_size"], 2, how["q_length"], how["kv_length"])
        added = torch.randn([draw.choice([1, n]) for n in sizes])
        given = draw.choice([{}, {"position_bias": added}, {"softcap": 0.6}, {"position_bias": added, "softcap": 0.6}])
        out, _ = attend(torch.nn.Module(), q, k, v, mask, scaling=0.4, **given)
        s = q @ k.mT * 0.4
        s = (0.6 * torch.tanh(s / 0.6) if "softcap" in given else s) + (added if "position_bias" in given else 0)
        p = s.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0)
        assert torch.allclose(out[rows], (p @ v).transpose(1, 2)[rows], atol=1e-5), (how, rows, given)
    assert kinds == {"Plain", "Used", "Padded", "dense"}
