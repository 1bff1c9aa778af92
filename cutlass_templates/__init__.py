"""CUDA C++ kernels on CUTLASS headers, as files. Installed as `sta_compile.cutlass_templates`.

- `sm90/attention_forward.cuh`: the kernel. It needs the constants and types that a preamble defines.
- `sm90/attention_forward.cu.jinja`: that preamble for one KernelSpec; `codegen.cutlass_source` renders it.
- `freestanding/`: the few standard headers that the CUTLASS headers in use ask for, as NVRTC has none of its own. With
  these no other package's headers are needed. nvcc brings its own and does not see them.

A template is found by `importlib.resources.files("sta_compile.cutlass_templates")`.
"""
