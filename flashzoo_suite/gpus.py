"""Which GPU a process of the suite runs on, where there are several: pytest-xdist's workers share them out."""

from __future__ import annotations

import os

import torch

WORKER = "PYTEST_XDIST_WORKER"
"""Where pytest-xdist says which worker a process is: gw0, gw1 and so on."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_of(worker: str, count: int, visible: str | None) -> str | None:
    """What `CUDA_VISIBLE_DEVICES` is to be for a worker, of so many GPUs; None where it stays as it is.

    Args:
        worker: its name, or "" where the process is none: it keeps all.
        count: of the GPUs that the process sees.
        visible: the variable as it is, None where it is not set.
    """
    if not worker or count < 2:
        return None
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[int(worker.removeprefix("gw")) % count]


def take_one() -> None:
    """Leaves one GPU for a worker, and for the processes that it starts, to see; to be called before CUDA is asked for
    anything but how many there are."""
    one = share_of(os.environ.get(WORKER, ""), torch.cuda.device_count(), os.environ.get(VISIBLE))
    if one is not None:
        os.environ[VISIBLE] = one


def workers_for(of_a_worker: int) -> int:
    """How many workers all GPUs have memory for, each on one GPU; at least 1.

    Args:
        of_a_worker: bytes.
    """
    count = torch.cuda.device_count()
    return max(1, count * min(torch.cuda.get_device_properties(i).total_memory // of_a_worker for i in range(count)))
