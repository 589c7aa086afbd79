"""Plumbing between CuTe DSL kernels and torch tensors: compiling, the cache on disk, launches. It knows no formula."""
