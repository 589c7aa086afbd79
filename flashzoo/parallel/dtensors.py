"""DTensors whose rows are sharded over the ranks of a mesh. Imported by a call with one, and by no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def of_dtensors(attention: Callable, q: Any, k: Any, v: Any, *, group: Any, layout: str, **named: Any) -> Any:
    """`attention` of DTensors; out and lse are sharded as q is.

    Raises:
        TypeError, ValueError: not all are DTensors, sharded by rows alone over the group; the layout is not theirs.
    """
    rows = Shard(1 if q.ndim == 4 else 0)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, as q, k and v all are or none, got {type(x).__name__}")
        if x.device_mesh.ndim != 1 or x.device_mesh != q.device_mesh or tuple(x.placements) != (rows,):
            raise ValueError(
                f"{name} must be sharded by rows alone, {rows}, over q's mesh of one dimension, got {x.placements} "
                f"over {x.device_mesh}"
            )
    if layout != "contiguous":
        raise ValueError(f"layout must be 'contiguous' for DTensors, whose shards are that, got {layout!r}")
    mesh = q.device_mesh
    if group not in (mesh, mesh.get_group()):
        raise ValueError(f"group must be the mesh of q, {mesh}, or its group, got {group}")
    if any(x.shape[rows.dim] % mesh.size() for x in (q, k, v)):
        raise ValueError(
            f"rows must be a multiple of the {mesh.size()} ranks, got {[tuple(x.shape) for x in (q, k, v)]}"
        )
    result = attention(*(x.to_local() for x in (q, k, v)), group=group, layout=layout, **named)

    def whole(x: Tensor, dim: int) -> DTensor:
        return DTensor.from_local(x, mesh, (Shard(dim),), run_check=False)

    return (
        (whole(result[0], rows.dim), whole(result[1], rows.dim + 1)) if named["return_lse"] else whole(result, rows.dim)
    )
