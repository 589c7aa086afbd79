"""Launching Triton kernels: compiled and remembered on a GPU, interpreted on CPU tensors. Knows no formula."""

from flashzoo._triton.launch import Launch, tma_can_take

__all__ = ["Launch", "tma_can_take"]
