"""FlashAttention-1 in Triton: keys and values in the outer loop. See README.md beside this file."""

from flashzoo.spec import Spec, deferred, in_any_order

_FEATURES = frozenset({"causal", "gqa", "cross", "lse", "deterministic", "score_mod", "dropout_p"})

SPEC = Spec(
    name="v1",
    title="FlashAttention-1, keys and values in the outer loop (Triton)",
    paper="Dao et al. 2022, arXiv:2205.14135",
    impl="flashzoo.v1.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=_FEATURES | {"out_dtype"},
    backward=_FEATURES,
    backward_impl="flashzoo.v1.launch:backward",
    requires=("triton",),
    check=in_any_order,
    notes=deferred("flashzoo.v1.config:describe"),
)
