"""Which samples are dense, for each attention of a graph.

The model has a flag for each of its samples. An attention may have more in its batch: its heads, as in
[samples * heads, tokens, head_dim], each of which takes the flag of its sample.
"""

from __future__ import annotations

import torch.fx

from ..analysis.attention_site import AttentionSite, sizes_of
from ..analysis.axes import Atom, Size, axis_size, same_size, size_of
from ..analysis.graph_view import fake_value, is_parameter
from ..analysis.infer_grid import VideoAttention
from ..analysis.trace_dims import DimTrace
from .fake_values import add_call
from .thread_value import ValueThreads


class FlagNodes:
    """Nodes for the flags of attentions; dense: bool [samples], of the root graph, or None where no step is dense."""

    def __init__(self, trace: DimTrace, threads: ValueThreads, dense: torch.fx.Node | None) -> None:
        self.trace, self.threads, self.dense_root = trace, threads, dense
        self.view = threads.view
        self._samples: set[Atom] | None = None

    def dense(self, found: VideoAttention) -> torch.fx.Node | None:
        """The dense flags of a site, bool [batch].

        A batch that is not known to be of samples, in their order, is dense if any sample is.
        """
        if self.dense_root is None:
            return None
        site = found.site
        flags = self.threads.reach(self.dense_root, self.view.owner[site.node])
        samples = size_of(fake_value(flags).shape[0])
        batch = sizes_of(site.q, site.q_order, site.samples)[0]
        around = self._around_samples(site, samples)
        if around == (1, 1) or (same_size(batch, 1) and same_size(samples, 1)):
            return flags
        graph = site.node.graph

        def method(name: str, *args: object) -> torch.fx.Node:
            return add_call(graph, "call_method", name, args, like=site.node)

        with graph.inserting_before(site.node):
            if around is not None:
                before, after = around
                rows = method("reshape", flags, (1, -1, 1))
                return method("reshape", method("expand", rows, (before, -1, after)), (-1,))
            size = batch if isinstance(batch, int) else method("size", site.q, site.q_order.batch)
            return method("expand", method("any", flags), size)

    def _around_samples(self, site: AttentionSite, samples: Size) -> tuple[int, int] | None:
        """How often all samples, and each sample, stand in the batch of an attention; None if that is not known."""
        dims, place = self.trace.dims(site.q), site.q_order.batch
        axis = () if dims is None or place is None or site.q_order.packed else dims[place]
        for i, factor in enumerate(axis):
            if factor in self._sample_axes() and same_size(axis_size((factor,)), samples):
                before, after = axis_size(axis[:i]), axis_size(axis[i + 1 :])
                if isinstance(before, int) and isinstance(after, int):
                    return before, after
        return None

    def _sample_axes(self) -> set[Atom]:
        """The outermost axes of what the model is called with."""
        if self._samples is None:
            inputs = [n for n in self.view.nodes if self.view.is_root_input(n)]
            outer = [
                dims[0] for n in inputs if not is_parameter(n) and (dims := self.trace.dims(n))
            ]
            self._samples = {
                axis[0] for axis in outer if len(axis) == 1 and isinstance(axis[0], Atom)
            }
        return self._samples
