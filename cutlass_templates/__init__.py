"""CUDA C++ kernels on CUTLASS headers, as files. Installed as `sta_compile.cutlass_templates`.

- `sm90/attention_forward.cuh`: the forward kernel; `sm90/key_gradients.cuh`, `query_gradients.cuh` and `backward_rows.cuh`:
  those of the backward pass. They need the constants and types that a preamble defines.
- `sm90/kernel.cu.jinja`: that preamble for one KernelSpec; `codegen.cutlass_source` renders it.
- `freestanding/`: the few standard headers that the CUTLASS headers in use ask for, as NVRTC has none of its own. With
  these no other package's headers are needed. nvcc brings its own and does not see them.

A template is found by `importlib.resources.files("sta_compile.cutlass_templates")`.
"""
