"""Operators that no rule of this package describes: may they put tokens in other places?"""

from __future__ import annotations

import torch
import torch.fx

from .attention_names import LOOKS_LIKE
from .graph_view import canonical_name, is_pointwise

# What these take is judged by their numbers or sizes (see `reorderings`), and what is added around tokens where it is cut
# off (see `pieces`). A mask leaves tokens in their order.
_JUDGED = (
    "getitem", "index", "index_select", "masked_select", "pad", "constant_pad_nd", "as_strided",
)  # fmt: skip
# Places keep their order, whatever each of them gets from others.
_ORDERED = (
    "interpolate", "upsample", "avg_pool", "max_pool", "adaptive", "pixel_shuffle", "pixel_unshuffle", "cumsum",
    "cross", "inv", "linalg_cross", "linalg_inv", "linalg_norm", "linalg_matrix_norm", "linalg_vector_norm", "einsum",
)  # fmt: skip


def may_move(node: torch.fx.Node) -> bool:
    """May an operator that no rule describes leave tokens elsewhere?

    Those of torch are known: what has no rule and is not pointwise reads its input anywhere (`grid_sample`, `fft`, a
    function under `vmap`, the branches of `cond`). An operator of another library is taken to leave each token at its place,
    as fused norms, rotations and activations do.
    """
    name, target = canonical_name(node), node.target
    if LOOKS_LIKE.search(name):  # queries keep their places
        return False
    if (
        is_pointwise(name)
        or name in _JUDGED
        or name.startswith(_ORDERED)
        or node.op == "call_module"
    ):
        return False
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).split(".")[0] in ("aten", "prims")
    return True
