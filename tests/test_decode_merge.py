"""Who merges decode's splits on Hopper, and the kernel that does where neither a thread block nor a cluster has to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashzoo
from flashzoo import Problem
from flashzoo.decode.config import cut_hopper, kernel_for
from flashzoo.decode.launch_merge import merge_launch
from flashzoo.decode.traits import Merging
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo_suite.support import DEVICE

ONE = Problem(1, 1, 8192, 32, 8, 128, dtype="bf16", device="cuda", arch=90, used_k=True)
LATENT = replace(ONE, heads=16, heads_kv=1, head_dim=576, head_dim_v=512, latent=True)


class TestWhoMerges:
    @pytest.mark.parametrize(
        ("problem", "who"),
        [
            (replace(LATENT, seqlen_k=32768), "by a second kernel"),
            (replace(LATENT, heads=128, seqlen_k=131072), "by a second kernel"),
            (replace(ONE, seqlen_k=2048), "in a cluster"),
            (replace(ONE, batch=5), "by who ends last"),
        ],
        ids=str,
    )
    def test_explain_says_it(self, problem, who):
        told = str(flashzoo.explain(problem))
        assert f"splits at most, merged {who}; some" in told

    def test_one_split_is_merged_by_nobody(self):
        problem = replace(LATENT, batch=256)
        assert cut_hopper(problem).splits == 1 and "keys: not split" in str(flashzoo.explain(problem))

    def test_many_splits_of_few_tiles_are_left_to_a_second_kernel(self):
        """A model that reads all parts on one multiprocessor would have fewer splits than there are multiprocessors."""
        assert cut_hopper(replace(LATENT, seqlen_k=131072)).splits > 64

    @pytest.mark.parametrize("sinks", [False, True])
    def test_what_is_left_to_a_second_kernel_is_in_float32_and_without_sinks(self, sinks):
        problem = replace(LATENT, seqlen_k=32768, sinks=sinks)
        kernel = kernel_for(problem)
        assert kernel.merging is Merging.KERNEL and kernel.out_dtype == "fp32" and not kernel.sinks
        kept = kernel_for(replace(problem, batch=256))
        assert kept.merging is Merging.NONE and kept.out_dtype == "bf16" and kept.sinks == sinks

    @pytest.mark.parametrize(("batch", "columns"), [(1, 64), (16, 64), (17, 128), (40, 256), (100, 512), (4096, 512)])
    def test_of_many_rows_programs_have_more_columns(self, batch, columns):
        """There are 16 rows of 512 columns for each sequence, and 16 programs at most for each of 132 multiprocessors,
        unless one has a whole row."""
        launch = merge_launch(replace(LATENT, batch=batch), (1, 1, 1), 100)
        assert launch.constexprs["COLUMNS"] == columns

    def test_a_wider_program_looks_at_fewer_splits_at_a_time(self):
        few, many = (merge_launch(replace(LATENT, batch=batch), (1, 1, 1), 100).constexprs for batch in (1, 64))
        assert few["COLUMNS"] < many["COLUMNS"]
        assert few["COLUMNS"] * few["SPLITS"] == many["COLUMNS"] * many["SPLITS"]


@pytest.mark.parametrize("splits", [2, 3, 64, 65, 300])
@pytest.mark.parametrize("head_dim", [64, 72, 512])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_is_the_weighted_mean_of_its_splits(splits, head_dim, sinks):
    """Whatever memory holds of those that saw nothing; a row that no split saw is 0, and -inf without a sink."""
    torch.manual_seed(splits)
    fields = {"head_dim": 576, "head_dim_v": 512, "latent": True} if head_dim == 512 else {"head_dim": head_dim}
    problem = Problem(2, 2, 4096, 5, 1, dtype="fp16", device=DEVICE, arch=90 if DEVICE == "cuda" else None, **fields)
    parts = torch.randn(splits, 2, 2, 5, head_dim, device=DEVICE)
    lse_parts = 3 * torch.randn(splits, 2, 5, 2, device=DEVICE)
    lse_parts[torch.rand(lse_parts.shape, device=DEVICE) < 0.3] = -torch.inf
    lse_parts[:, 1, 2, 1] = -torch.inf
    lse_parts[:-1, 0, 3, 0] = -torch.inf
    parts[(lse_parts == -torch.inf).transpose(2, 3)] = torch.nan
    sink = torch.randn(5, device=DEVICE) if sinks else None
    out = torch.empty(2, 5, 2, head_dim, dtype=TORCH_DTYPES["fp16"], device=DEVICE).transpose(1, 2)
    lse = torch.empty(2, 5, 2, device=DEVICE)
    merge_launch(problem, out.stride()[:3], splits)((parts, lse_parts, out, lse, sink), ())

    logits = lse_parts.double()
    if sink is not None:
        logits = torch.cat((logits, sink.double()[None, None, :, None].expand(1, 2, 5, 2)))
    expected_lse = logits.logsumexp(0)
    weights = (lse_parts.double() - expected_lse).exp().nan_to_num(0.0).transpose(2, 3)
    expected = (weights[..., None] * parts.double().nan_to_num(0.0)).sum(0)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    assert (out[1, 1, 2] == 0).all() and (lse[1, 2, 1] == -torch.inf).item() == (not sinks)
