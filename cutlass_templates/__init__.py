"""CUDA C++ kernels on CUTLASS headers, as files. Installed as `sta_compile.cutlass_templates`.

A template is found by `importlib.resources.files("sta_compile.cutlass_templates")`. No kernel of this version is a
CUTLASS kernel, so there is none here.
"""
