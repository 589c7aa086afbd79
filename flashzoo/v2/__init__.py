"""FlashAttention-2 in Triton: programs own query blocks, keys and values stream by. See README.md beside this file."""

from flashzoo.spec import FEATURES, Spec
from flashzoo.v2.config import describe

SPEC = Spec(
    name="v2",
    title="FlashAttention-2, parallel over query blocks (Triton)",
    paper="Dao 2023, arXiv:2307.08691",
    impl="flashzoo.v2.launch:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "fp32"),
    features=frozenset(FEATURES) - {"head_dim_v", "block_mask"},
    backward=frozenset(FEATURES) - {"head_dim_v", "block_mask"},
    backward_impl="flashzoo.v2.launch:backward",
    requires=("triton",),
    notes=describe,
)
