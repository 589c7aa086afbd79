"""FlashDecoding in Triton: few queries on long caches, keys split among programs. See README.md beside this file."""

from flashzoo.spec import Spec, deferred

SPEC = Spec(
    name="decode",
    title="FlashDecoding, keys split among programs and their parts merged (Triton)",
    paper="Dao, Haziza, Massa and Sizov 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html",
    impl="flashzoo.decode.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=frozenset({"causal", "window", "gqa", "cross", "lse", "deterministic", "cache", "paged", "out_dtype"}),
    requires=("triton",),
    auto=(),
    batch_invariant=True,
    notes=deferred("flashzoo.decode.config:describe"),
)
