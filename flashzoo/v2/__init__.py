"""FlashAttention-2 in Triton: programs own query blocks, keys and values stream by. See README.md beside this file."""

from flashzoo.spec import Spec, deferred

_FEATURES = frozenset(
    {
        *("causal", "window", "gqa", "cross", "lse", "deterministic", "packed", "used_k", "cache"),
        *("sinks", "score_mod", "dropout_p"),
    }
)

SPEC = Spec(
    name="v2",
    title="FlashAttention-2, parallel over query blocks (Triton)",
    paper="Dao 2023, arXiv:2307.08691",
    impl="flashzoo.v2.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=_FEATURES | {"out_dtype"},
    backward=_FEATURES,
    backward_impl="flashzoo.v2.launch:backward",
    requires=("triton",),
    batch_invariant=True,
    check=deferred("flashzoo.v2.config:limits"),
    notes=deferred("flashzoo.v2.config:describe"),
)
