"""What it costs to build a block mask: no library that is not needed, no look at values, no wait for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask

from flashzoo import BlockMask
from flashzoo_suite.support import in_fresh_process


def test_it_loads_no_kernel_language_and_no_plots():
    code = """if True:
        import sys, flashzoo
        print(flashzoo.BlockMask.causal(64))
        print("triton" in sys.modules, "matplotlib" in sys.modules)
    """
    assert in_fresh_process(code).split()[-2:] == ["False", "False"]


PACKED_LENGTHS = [100, 300, 0, 200]


def flex_mask(device: str) -> FlexMask:
    return create_block_mask(lambda b, h, q, k: (q >= k) & (k > q - 100), None, 2, 700, 700, device=device)


def build_everything(device: str, flex: FlexMask, lengths: Tensor) -> list[BlockMask]:
    """A mask of every builder, and combinations; `lengths` of documents, `(1, 4)`."""
    n = 700
    dense = torch.zeros(1, 2, n, n, dtype=torch.bool, device=device)
    blocks = torch.ones(6, 6, dtype=torch.bool, device=device)
    made = [
        BlockMask.causal(n, device=device),
        BlockMask.sliding_window(n, window_size=(100, 20), device=device),
        BlockMask.local_global(n, window_size=(100, 20), global_tokens=50, device=device),
        BlockMask.strided(n, stride=2, device=device),
        BlockMask.butterfly(n, device=device),
        BlockMask.random(n, blocks=2, device=device),
        BlockMask.documents([300, 200], seqlen_q=n, device=device),
        BlockMask.documents(lengths, seqlen_q=n),
        BlockMask.from_blocks(blocks, n, causal=True),
        BlockMask.from_blocks(blocks, n, full=blocks, causal=True),
        BlockMask.from_dense(dense),
        BlockMask.from_flex(flex),
        BlockMask.top_k(torch.zeros(6, 6, device=device), 2, n, causal=True),
    ]
    made += [made[0] & made[1], made[0] & made[7], made[2] | made[4], made[11] & made[10]]
    made[-1].to_dense()
    return made


def test_no_builder_looks_at_values():
    """A tensor without values refuses every read, so no builder needs one."""
    with FakeTensorMode():
        made = build_everything("cpu", flex_mask("cpu"), torch.tensor([PACKED_LENGTHS]))
        with pytest.raises(DataDependentOutputException):
            _ = made[0].density
    assert len(made) == 17


@pytest.mark.gpu
def test_no_builder_waits_for_the_gpu():
    given = flex_mask("cuda"), torch.tensor([PACKED_LENGTHS], device="cuda")  # which waits by itself
    build_everything("cuda", *given)  # what PyTorch does once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        build_everything("cuda", *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
