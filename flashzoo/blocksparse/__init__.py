"""Block-sparse FlashAttention in Triton: v2's kernels walking lists of blocks. See README.md beside this file."""

from flashzoo.spec import Spec, deferred, in_any_order

_FEATURES = frozenset({"causal", "window", "gqa", "cross", "lse", "deterministic", "block_mask", "score_mod"})

SPEC = Spec(
    name="blocksparse",
    title="block-sparse FlashAttention, v2 over the blocks that a mask keeps (Triton)",
    paper="Algorithm 5 of Dao et al. 2022, arXiv:2205.14135",
    impl="flashzoo.blocksparse.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=_FEATURES | {"out_dtype"},
    backward=_FEATURES,
    requires=("triton",),
    check=in_any_order,
    notes=deferred("flashzoo.blocksparse.config:describe"),
)
