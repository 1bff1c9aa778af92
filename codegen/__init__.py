"""Kernel source: what to compute in, source and launch parameters out. Installed as `sta_compile.codegen`."""
