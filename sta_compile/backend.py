"""The Dynamo backend: `torch.compile(model, backend="sta", options={...})`, found by its entry point.

Options become Settings, the pipeline rewrites the graph, and inductor compiles the result with all that it offers:
AOTAutograd, caches, CUDA graphs. What can't be improved goes to inductor as it came. Importing this module is fast:
inductor, triton and networkx are imported when a graph arrives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch
import torch.fx


def sta(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    mode: as for inductor ("reduce-overhead", "max-autotune", ...). options: sta_compile's and inductor's in one dict.
    Raises StaError for a user's mistake in the options.
    """
    from . import _torch, warn_once
    from ._guards import install_config_guard
    from .pipeline import rewrite
    from .report import Report, record
    from .settings import OPTIONS, Settings
    from .warm_kernels import warm_kernels

    settings, patches = Settings.resolve(options)
    install_config_guard(name for name in OPTIONS if name not in (options or {}))
    model = _torch.root_module()
    reason = _unsupported(example_inputs)
    if reason is not None:
        report = Report(
            name=type(model).__name__ if model is not None else "graph",
            settings=settings.to_dict(),
            reason=reason[0],
            hint=reason[1],
        )
    else:
        gm, report = rewrite(gm, example_inputs, settings, kernel=_kernel(example_inputs, settings))
        if report.replaced:
            with report.stage("build kernels"):
                warm_kernels(gm)
    record(report)
    warn_once.say(report, model, _torch.ends_at_graph_break(gm))
    return _torch.compile_with_inductor(
        gm, example_inputs, mode=mode, patches=patches, tag=_cache_tag(settings.fingerprint())
    )


def _reset() -> None:
    """For `torch._dynamo.reset()`: the next compile is as in a new process."""
    from . import _torch, warn_once
    from .noise_plan import conventions
    from .report import reset_reports

    reset_reports()
    conventions.clear()
    warn_once.forget()
    _torch.reset_cudagraphs()


sta.reset = _reset  # type: ignore[attr-defined]


def _device(example_inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _unsupported(example_inputs: Sequence[Any]) -> tuple[str, str] | None:
    """(reason, hint) where the device is not one that we speed up. A CPU runs the reference."""
    from .runtime.target import detect

    target = detect(_device(example_inputs))
    if target.kind == "cpu" or not target.unsupported:
        return None
    return target.unsupported, "use an NVIDIA GPU of compute capability 8.0 or later"


def _kernel(example_inputs: Sequence[Any], settings: Any) -> str:
    if settings.kernel != "auto":
        return str(settings.kernel)
    return "triton" if _device(example_inputs).type == "cuda" else "reference"


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Hash of the package's own sources: compiled artifacts call our operators, so a new version must not find old ones."""
    digest = hashlib.sha256()
    stack = [
        files("sta_compile"),
        files("sta_compile.codegen"),
        files("sta_compile.cutlass_templates"),
    ]
    while stack:
        for entry in sorted(stack.pop().iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                stack.append(entry)
            elif entry.name.endswith((".py", ".jinja", ".hpp", ".cuh")):
                digest.update(entry.name.encode() + entry.read_bytes())
    return digest.hexdigest()


def _cache_tag(fingerprint: str) -> str:
    from ._version import __version__

    return f"sta_compile {__version__} {_source_hash()} {fingerprint}"
