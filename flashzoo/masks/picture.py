"""Pictures of a block matrix: characters for a terminal, a figure for everything else."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from flashzoo.integers import cdiv
from flashzoo.masks.lists import FULL


def characters(codes: Tensor, width: int, height: int) -> str:
    """A block matrix in at most `height` lines of at most `width` characters, and what they mean.

    Args:
        codes: `(n_q, n_k)` on the CPU, as of `lists.codes_of`.
    """
    n_q, n_k = codes.shape
    if not codes.numel():
        return "no blocks"
    # Whole blocks a character. It is twice as high as wide, where there are so many that it can show that.
    across = cdiv(n_k, width)
    down = max(cdiv(n_q, height), 1 if across == 1 else min(2 * across, n_q))

    def share(chosen: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(chosen.float()[None], (down, across), ceil_mode=True)[0]

    kept, full = share(codes > 0), share(codes == FULL)
    shades = torch.where(full == 1, 3, torch.where(kept >= 0.5, 2, torch.where(kept > 0, 1, 0)))
    picture = "\n".join("".join(".-+#"[shade] for shade in line) for line in shades.tolist())
    if down == across == 1:
        return f"{picture}\n# full, + partial, . skipped"
    return f"{picture}\n# all full, + half kept or more, - less, . none\na character is {down} x {across} blocks"


def figure(codes: Tensor, block_q: int, block_kv: int, title: str) -> Any:
    """A `matplotlib.figure.Figure` of a block matrix, its axes in tokens.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        colors, figures, patches = (
            importlib.import_module(f"matplotlib.{name}") for name in ("colors", "figure", "patches")
        )
    except ImportError as error:
        raise ImportError("plot() needs matplotlib, which the extra report of flashzoo brings") from error
    shades = {"skipped": "#f2f2f2", "partial": "#f4a259", "full": "#2e5e8c"}
    n_q, n_k = codes.shape
    made = figures.Figure(figsize=(5, 5), layout="constrained")
    axes = made.add_subplot()
    extent = (0, max(n_k, 1) * block_kv, max(n_q, 1) * block_q, 0)
    image = codes.numpy() if codes.numel() else codes.new_zeros(1, 1).numpy()
    axes.imshow(
        image, cmap=colors.ListedColormap([*shades.values()]), vmin=0, vmax=2, extent=extent, interpolation="nearest"
    )
    axes.set(xlabel="key", ylabel="query", title=title)
    handles = [patches.Patch(facecolor=shade, edgecolor="#999999", label=name) for name, shade in shades.items()]
    made.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")
    return made
