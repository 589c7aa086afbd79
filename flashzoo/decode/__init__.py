"""FlashDecoding in CuTe DSL for Hopper, and in Triton: few queries on long caches, keys split.
See README.md beside this file."""

from flashzoo.spec import Spec, deferred

SPEC = Spec(
    name="decode",
    title="FlashDecoding, keys split and their parts merged (CuTe DSL on Hopper, else Triton)",
    paper="Dao, Haziza, Massa and Sizov 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html",
    impl="flashzoo.decode.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=frozenset(
        {
            *("causal", "window", "gqa", "cross", "lse", "deterministic", "sinks", "out_dtype"),
            *("cache", "paged", "packed_q", "fp8_kv", "mla"),
        }
    ),
    latent_dims=((576, 512),),
    requires=("triton",),
    batch_invariant=True,
    check=deferred("flashzoo.decode.config:unsupported"),
    leaves=deferred("flashzoo.decode.config:leaves"),
    notes=deferred("flashzoo.decode.config:describe"),
)
