"""FlashAttention-3 in CuTe DSL: TMA, WGMMA and warps with roles, on Hopper. See README.md beside this file."""

from flashzoo.spec import FEATURES, Spec
from flashzoo.v3.config import describe

SPEC = Spec(
    name="v3",
    title="FlashAttention-3, warps with roles and softmax under the products (CuTe DSL)",
    paper="Shah et al. 2024, arXiv:2407.08608",
    impl="flashzoo.v3.launch:attention",
    dtypes=("fp16", "bf16"),
    arch=(90, 90),
    head_dims=range(8, 257, 8),
    features=frozenset(FEATURES),
    requires=("cutlass",),
    notes=describe,
)
