"""Triton kernels. Modules in here import triton; the rest of sta_compile imports them lazily."""
