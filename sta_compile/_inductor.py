"""What we ask of inductor beside compiling a graph: its options, and its CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def asks_for_max_autotune(mode: str | None, patches: Mapping[str, Any]) -> bool:
    """As inductor reads it: from the mode, from its options, from its config."""
    from torch._inductor import config, list_mode_options

    merged = {**(list_mode_options(mode) if mode else {}), **patches}
    return bool(merged.get("max_autotune", config.max_autotune))


def asks_for_cudagraphs(patches: Mapping[str, Any]) -> bool:
    """As inductor reads it: from its options, from its config."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def reset_cudagraphs() -> None:
    """Frees CUDA graph trees, as inductor's own reset does; nothing if none were made."""
    import sys

    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
