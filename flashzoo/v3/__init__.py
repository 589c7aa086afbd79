"""FlashAttention-3 in CuTe DSL: TMA, WGMMA and warps with roles, on Hopper. See README.md beside this file."""

from flashzoo.spec import Spec, deferred

_FEATURES = frozenset(
    {
        "causal",
        "window",
        "gqa",
        "cross",
        "head_dim_v",
        "mla",
        "lse",
        "deterministic",
        "block_mask",
        "packed",
        "used_k",
        "sinks",
        "score_mod",
    }
)

SPEC = Spec(
    name="v3",
    title="FlashAttention-3, warps with roles and softmax under the products (CuTe DSL)",
    paper="Shah et al. 2024, arXiv:2407.08608",
    impl="flashzoo.v3.launch:attention",
    dtypes=("fp16", "bf16"),
    arch=(90, 90),
    head_dims=range(8, 257, 8),
    features=_FEATURES,
    backward=_FEATURES,
    backward_impl="flashzoo.v3.launch:backward",
    requires=("cutlass",),
    backward_requires=("triton",),
    batch_invariant=True,
    check=deferred("flashzoo.v3.explain:refusals"),
    notes=deferred("flashzoo.v3.explain:describe"),
)

_FP8_FEATURES = frozenset({"causal", "window", "gqa", "cross", "lse", "deterministic", "sinks", "fast_accum"})

FP8_SPEC = Spec(
    name="v3_fp8",
    title="FlashAttention-3 in FP8, with scales for blocks and sums promoted to float32 (CuTe DSL; Triton to quantise)",
    paper="Shah et al. 2024, arXiv:2407.08608",
    impl="flashzoo.v3.launch_fp8:attention",
    dtypes=("e4m3",),
    quantizes=("fp16", "bf16"),
    fp8_rms=(("randn", 1.1), ("fp8_paper", 0.75)),
    arch=(90, 90),
    head_dims=range(16, 257, 16),
    features=_FP8_FEATURES | {"packed", "used_k"},
    backward=_FP8_FEATURES,
    backward_16="flashzoo.v3.launch:attention",
    requires=("cutlass", "triton"),
    batch_invariant=True,
    check=deferred("flashzoo.v3.explain:refusals_fp8"),
    notes=deferred("flashzoo.v3.explain:describe_fp8"),
)
