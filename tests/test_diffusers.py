"""Models of diffusers and timm run unchanged under `flashzoo.replace_sdpa`."""

from __future__ import annotations

import pytest
import torch

import flashzoo
from flashzoo_suite.support import same_bits


def test_a_transformer_of_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="needs the extra diffusers, which make installs")
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32}
    widths |= {"joint_attention_dim": 16, "pooled_projection_dim": 16}
    model = diffusers.SD3Transformer2DModel(**sizes, **widths).eval()
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 16)}
    inputs |= {"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([1, 2])}
    hold(lambda: model(**inputs).sample, layers=2)


def test_a_vit_of_timm():
    why = "timm imports torchvision, of which the registry has none for torch's CPU build"
    timm = pytest.importorskip("timm", reason=why, exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    images = torch.randn(2, 3, 32, 32)
    hold(lambda: model(images), layers=2)


def hold(call, layers: int) -> None:
    expected = call()
    with flashzoo.replace_sdpa("sdpa") as seen:
        out = call()
    assert same_bits(out, expected) and [(each.answered_by, each.count) for each in seen.calls] == [("sdpa", layers)]
    with flashzoo.replace_sdpa("standard"):
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-4)
