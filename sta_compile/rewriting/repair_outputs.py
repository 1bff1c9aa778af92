"""Give graph outputs the strides that they had before the edits.

Tokens that come out of a patch embed as a transposed [batch, channels, tokens] keep these strides through every residual
addition, and a caller may rely on them; a conversion returns contiguous tokens. The repair is one copy:

    x [2, 144, 16], strides (2304, 16, 1), was (2304, 1, 144)   ->   x.permute(0, 2, 1).contiguous().permute(0, 2, 1)

An output that was a slice (the video of a block's [text, video]) becomes the slice of a padded copy.

    x [2, 144, 16], strides (2304, 16, 1), was (2416, 16, 1)    ->   pad(x, (0, 0, 0, 7)).narrow(1, 0, 144)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from .copy_strides import copy_before
from .fake_values import VALUE
from .signature import differs, signature
from .verify import Recorded, Violation


def repair_outputs(
    module: GraphModule, violations: Iterable[Violation], before: Recorded
) -> list[Violation]:
    """Copy outputs to their old strides where these are those of a slice or dense; return the violations that are left."""
    violations = list(violations)
    changed = {v.node for v in violations if v.kind == "strides"}
    if not changed:
        return violations
    output = module.graph.output_node()
    was: list[Any] = []
    map_aggregate(before.entries[output].args, was.append)
    old = iter(was)
    copies: dict[Node, Node] = {}
    failed: set[Node] = set()

    def repaired(value: Any) -> Any:
        source = next(old)
        if value not in changed or not isinstance(source, Node):
            return value
        wanted = before.entries[source].signature
        if differs(wanted, signature(value.meta[VALUE]), "strides") is None:
            return value
        if value not in copies or differs(wanted, signature(copies[value].meta[VALUE]), "strides"):
            copy = copy_before(output, value, wanted)
            if copy is None:
                failed.add(value)
                return value
            copies[value] = copy
        return copies[value]

    output.args = map_aggregate(output.args, repaired)
    return [v for v in violations if v.kind != "strides" or v.node in failed]
