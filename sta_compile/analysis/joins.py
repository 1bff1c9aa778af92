"""Operations that put values one behind the other, or stack them: along which dimension?"""

from __future__ import annotations

import torch.fx

from .graph_view import argument, canonical_name, fake_value

# None: along their argument `dim`.
_DIMS = {"cat": None, "stack": None, "vstack": 0, "row_stack": 0, "hstack": 1, "column_stack": 1, "dstack": 2}  # fmt: skip
JOINS = tuple(name for name in _DIMS if name != "stack")


def joined_dim(node: torch.fx.Node) -> int | None:
    """The dimension of the result; None of any other operation."""
    name = canonical_name(node)
    if name not in _DIMS:
        return None
    fixed = _DIMS[name]
    dim = int(argument(node, 1, "dim", 0)) if fixed is None else fixed
    return dim % int(fake_value(node).dim())
