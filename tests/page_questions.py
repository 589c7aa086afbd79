"""Twenty questions to the page of `flashzoo report`, by hand: what a reader chooses, who takes the call on an H200, and
the columns of those rows of bench/results/h200.csv that timed it.

Beside these columns a row has those of `PLAIN`; None stands for what the file has no columns for.
"""

from __future__ import annotations

PLAIN = {"dtype": "bf16", "mask": "", "lengths": "", "causal": "0", "dtype_kv": ""}
CAUSAL = {"causal": "1"}
MASK, WINDOW = "block mask, a quarter kept", "causal, 1024 keys back"

QUESTIONS: dict[str, tuple[str, dict[str, str], str, dict[str, str] | None]] = {
    "prefill of Llama 3.1 8B": (
        "forward",
        {"a model's layers": "Llama 3.1 8B", "length": "8k"},
        "v3",
        {"head_dim": "128", "seqlen_k": "8192", **CAUSAL},
    ),
    "BERT large": ("forward", {"a model's layers": "BERT large"}, "v3", {"head_dim": "64", "seqlen_k": "512"}),
    "head dim 256, long": (
        "forward",
        {"head dim": "256", "heads": "16:16", "length": "16k", "mask": "none"},
        "v3",
        {"head_dim": "256", "seqlen_k": "16384"},
    ),
    "training with causal masks": (
        "backward",
        {"head dim": "128", "heads": "16:16", "length": "8k", "mask": "causal"},
        "v3",
        {"head_dim": "128", "seqlen_k": "8192", **CAUSAL},
    ),
    "training at head dim 64, no mask": (
        "backward",
        {"head dim": "64", "heads": "32:32", "length": "16k", "mask": "none"},
        "v3",
        {"head_dim": "64", "seqlen_k": "16384"},
    ),
    "training with the same bits": (
        "backward",
        {"mask": "causal", "length": "8k", "feature": "the same bits in every run"},
        "v3",
        {"head_dim": "128", "seqlen_k": "8192", "impl": "v3_deterministic", **CAUSAL},
    ),
    "FP8 tensors": (
        "forward",
        {"inputs": "FP8 (e4m3)", "head dim": "256", "length": "16k", "mask": "causal"},
        "v3_fp8",
        {"dtype": "e4m3", "head_dim": "256", "seqlen_k": "16384", **CAUSAL},
    ),
    "FP8 tensors at head dim 64": (
        "forward",
        {"inputs": "FP8 (e4m3)", "head dim": "64", "length": "2k", "mask": "none"},
        "v3_fp8",
        {"dtype": "e4m3", "head_dim": "64", "seqlen_k": "2048"},
    ),
    "16-bit tensors through FP8": (
        "forward",
        {"inputs": "16 bits, products in FP8", "head dim": "256", "length": "16k", "mask": "none"},
        "v3_fp8",
        {"head_dim": "256", "seqlen_k": "16384", "impl": "v3_fp8_end_to_end"},
    ),
    "training on FP8 tensors": (
        "backward",
        {"inputs": "FP8 (e4m3)", "length": "2k", "mask": "none"},
        "No version",
        None,
    ),
    "Gemma 2's windows and softcap": (
        "forward",
        {"a model's layers": "Gemma 2 9B, layers with windows", "length": "4k"},
        "v3",
        None,
    ),
    "gpt-oss, trained": ("backward", {"a model's layers": "gpt-oss, layers that see all", "length": "4k"}, "v3", None),
    "DeepSeek's values of 128": (
        "forward",
        {"a model's layers": "DeepSeek-V3 on eight GPUs, prefill", "length": "4k"},
        "v3",
        None,
    ),
    "a quarter of the blocks": (
        "forward",
        {"head dim": "128", "heads": "16:16", "length": "16k", "mask": MASK},
        "v3",
        {"head_dim": "128", "seqlen_k": "16384", "mask": "random/4"},
    ),
    "a block mask, a softcap": ("forward", {"mask": MASK, "feature": "softcap"}, "blocksparse", None),
    "documents, a GQA model trained": (
        "backward",
        {"head dim": "128", "heads": "64:8", "length": "64k", "mask": "none", "feature": "packed sequences"},
        "v3",
        {"head_dim": "128", "heads": "64", "seqlen_k": "65536", "lengths": "documents"},
    ),
    "windows in documents of a GQA model": (
        "forward",
        {"heads": "64:8", "length": "16k", "mask": WINDOW, "feature": "packed sequences"},
        "v3",
        None,
    ),
    "serving Llama 3.1 70B": (
        "decode",
        {"a model's layers": "Llama 3.1 70B", "length": "32k", "sequences": "8", "mask": "none"},
        "decode",
        {"head_dim": "128", "heads": "64", "seqlen_k": "32768", "batch": "8"},
    ),
    "serving from pages": (
        "decode",
        {"heads": "32:8", "length": "8k", "sequences": "8", "feature": "pages of 64"},
        "decode",
        {"head_dim": "128", "seqlen_k": "8192", "batch": "8", "lengths": "pages64"},
    ),
    "caches in FP8": (
        "decode",
        {"inputs": "16 bits on FP8 caches", "heads": "64:8", "length": "32k", "sequences": "32", "mask": "none"},
        "decode",
        {"head_dim": "128", "heads": "64", "seqlen_k": "32768", "batch": "32", "dtype_kv": "e4m3"},
    ),
}
