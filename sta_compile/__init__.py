"""Sliding Tile Attention for video diffusion transformers: `torch.compile(model, backend="sta")`.

Importing this registers the operators `torch.ops.sta.*`, which artifacts in a warm cache call by name. Everything else
is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import ops as _ops  # noqa: F401  registers torch.ops.sta
from ._version import __version__
from .errors import StaError

if TYPE_CHECKING:
    from . import config
    from .compile_model import compile, restore
    from .config import token_grid
    from .explanation import explain
    from .exported import rewrite
    from .ops import checkpoint_ops
    from .planning.noise_schedule import dense_above
    from .report import Report, reports, reset_reports
    from .runtime.target import target

_HOMES = {
    "checkpoint_ops": "ops",
    "compile": "compile_model",
    "config": "config",
    "dense_above": "planning.noise_schedule",
    "token_grid": "config",
    "explain": "explanation",
    "Report": "report",
    "reports": "report",
    "reset_reports": "report",
    "restore": "compile_model",
    "target": "runtime.target",
    "rewrite": "exported",
}

__all__ = [
    "Report",
    "StaError",
    "__version__",
    "checkpoint_ops",
    "compile",
    "config",
    "dense_above",
    "explain",
    "reports",
    "reset_reports",
    "restore",
    "rewrite",
    "target",
    "token_grid",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    return module if name == _HOMES[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
