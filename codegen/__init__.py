"""Kernel source for the GPU at hand: which emitter, which blocks, what code.

Modules here import neither torch nor triton; kernels below `triton/` do, and are imported lazily.
"""
