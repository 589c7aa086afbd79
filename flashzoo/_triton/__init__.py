"""Launching Triton kernels: compiled and remembered on a GPU, interpreted on CPU tensors. Knows no formula."""

from flashzoo._triton.launch import Launch

__all__ = ["Launch"]
