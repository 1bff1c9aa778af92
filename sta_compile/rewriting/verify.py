"""Does an edited graph still compute tensors of the same shapes, dtypes and output strides?

An inserted conversion changes strides, and strides decide whether a later `view` works and what the
graph's outputs look like. `record` notes the graph before the edits; `verify` runs fake propagation
again afterwards, but only where something changed: a node is run again if it is new, or if the
metadata (shape, strides, dtype, device, offset) of what it reads is not what it was. That is a few
nodes around each edit, since most results are contiguous again.

    before = record(gm)
    ...                                  # edit gm
    violations = repair_views(verify(gm, before), before)

Bodies of checkpoints and nested regions are followed. Values of nodes that ran again are stored in
their meta, so after `verify` every node's `example_value` is right for the edited graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import rebind_unbacked
from torch.fx.node import map_aggregate, map_arg

from .._torch import body_of_call, graph_modules, is_higher_order
from .fake_values import VALUE, fake_mode_of, run, value_of
from .global_state import GlobalState
from .signature import Aspect, Signature, differs, signature

# What a view becomes when strides no longer allow it.
COPYING_FORM = {"view": "reshape", "view_as": "reshape_as"}
# Operators for which equal results of fake propagation don't mean equal results.
_STRIDE_SENSITIVE = (
    *("as_strided", "as_strided_", "set_", "resize_", "resize_as_", "t_", "transpose_"),
    *("swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
)


@dataclass(frozen=True)
class Violation:
    """What no longer holds at `node`; None is the graph as a whole.

    kind: "lint" a malformed graph; "fails" a node that raises; "view" a view that its input's new
    strides forbid; "call sites" a shared body that is now called with different metadata;
    otherwise the aspect of the node's value that changed, "strides" for graph outputs only.
    """

    kind: Literal["lint", "fails", "view", "call sites"] | Aspect
    node: Node | None
    message: str


@dataclass(frozen=True)
class _Entry:
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    signature: Signature


@dataclass(frozen=True)
class Recorded:
    """Every node as it was before the edits."""

    entries: dict[Node, _Entry]


def record(module: GraphModule) -> Recorded:
    """Note all nodes of `module`, bodies of regions included."""
    entries = {}
    for body in graph_modules(module):
        for node in body.graph.nodes:
            value = node.meta.get(VALUE)
            entries[node] = _Entry(node.target, node.args, node.kwargs, value, signature(value))
    return Recorded(entries)


def verify(module: GraphModule, before: Recorded) -> list[Violation]:
    """What is wrong with the edited graph: empty if nothing is. Never raises for a wrong edit."""
    violations = []
    for body in graph_modules(module):
        try:
            body.graph.lint()
        except Exception as error:  # lint raises what it likes
            violations.append(Violation("lint", None, f"malformed graph: {error}"))
    if violations:
        return violations
    propagation = _Propagation(before, fake_mode_of(module.graph))
    propagation.run(module)
    propagation.compare_outputs(module)
    return propagation.violations


class _Propagation:
    def __init__(self, before: Recorded, mode: FakeTensorMode | None) -> None:
        self.before = before.entries
        self.mode = mode
        self.now: dict[Node, Signature] = {}  # of the nodes that are new or not what they were
        self.entered: dict[GraphModule, tuple[Signature, ...]] = {}  # bodies, and with what
        self.violations: list[Violation] = []

    def run(self, module: GraphModule) -> None:
        with GlobalState() as state:
            for node in module.graph.nodes:
                if node.op in ("placeholder", "get_attr"):
                    if node not in self.before:
                        self.now[node] = signature(node.meta.get(VALUE))
                elif node.op == "output":
                    pass
                elif state.is_switch(node):
                    state.apply(node)
                elif (body := _region_body(node)) is not None:
                    self._run_region(node, body)
                elif self._is_dirty(node):
                    self._run_node(node)
                else:
                    self._restore(node)

    def compare_outputs(self, module: GraphModule) -> None:
        """Strides too: they are seen by the callers of the compiled function."""
        output = module.graph.output_node()
        if output not in self.before:
            self._report("lint", output, "the output node is not the one that was recorded")
            return
        was = _leaves(self.before[output].args)
        now = _leaves(output.args)
        if len(was) != len(now):
            self._report("shape", output, f"{len(was)} outputs -> {len(now)}")
            return
        aspects: tuple[Aspect, ...] = ("shape", "dtype", "device", "strides")
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            before = self._signature_before(a) if isinstance(a, Node) else signature(a)
            after = self._signature_now(b) if isinstance(b, Node) else signature(b)
            for aspect in aspects:
                if change := differs(before, after, aspect):
                    node = b if isinstance(b, Node) else output
                    self._report(aspect, node, f"graph output {i}: {aspect} {change}")
                    break

    def _is_dirty(self, node: Node) -> bool:
        entry = self.before.get(node)
        if entry is None or entry.target != node.target:
            return True
        if entry.args is node.args and entry.kwargs is node.kwargs:
            return any(source in self.now for source in node.all_input_nodes)
        was = _described((entry.args, entry.kwargs), self._signature_before)
        return bool(was != _described((node.args, node.kwargs), self._signature_now))

    def _signature_before(self, node: Node) -> Signature:
        return self.before[node].signature

    def _signature_now(self, node: Node) -> Signature:
        return self.now[node] if node in self.now else self.before[node].signature

    def _run_node(self, node: Node) -> None:
        name = str(
            node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        value = node.meta.get(VALUE)
        if name in _STRIDE_SENSITIVE and node in self.before:
            self._report("fails", node, f"`{name}` of a tensor whose strides have changed")
        else:
            try:
                value = self._value(node)
            except Exception as error:  # an operator raises what it likes
                value = self._value_in_spite_of(error, node, name)
        self._store(node, value)

    def _value_in_spite_of(self, error: Exception, node: Node, name: str) -> Any:
        """Report the error, and go on with the value of the copying form or the old one."""
        if node.op == "call_method" and name in COPYING_FORM:
            with contextlib.suppress(Exception):  # else the view's own error is reported
                value = run(node, self.mode, COPYING_FORM[name])
                self._report("view", node, f"the new strides of its input forbid it: {error}")
                return value
        self._report("fails", node, f"{type(error).__name__}: {error}")
        return node.meta.get(VALUE)

    def _value(self, node: Node) -> Any:
        shape_env = self.mode.shape_env if self.mode is not None else None
        if shape_env is None or not node.meta.get("unbacked_bindings"):
            return run(node, self.mode)
        with shape_env.ignore_fresh_unbacked_symbols():
            value = run(node, self.mode)
        rebind_unbacked(shape_env, node, value)  # the new symbol is the one it was before
        return value

    def _run_region(self, node: Node, body: GraphModule) -> None:
        inputs = body.graph.find_nodes(op="placeholder")
        operands = node.args[len(node.args) - len(inputs) :]
        values = [value_of(arg) if isinstance(arg, Node) else arg for arg in operands]
        signatures = tuple(map(signature, values))
        if body not in self.entered:
            self.entered[body] = signatures
            for source, value, now in zip(inputs, values, signatures, strict=True):
                if source in self.before and self._signature_before(source) == now:
                    self._restore(source)
                else:
                    source.meta[VALUE] = value
                    self.now[source] = now
            self.run(body)
        else:
            aspects: tuple[Aspect, ...] = ("shape", "dtype", "device", "strides")
            changes = (differs(self.entered[body], signatures, aspect) for aspect in aspects)
            if change := next(filter(None, changes), None):
                # Goes on as if the operands were copied to the first call's layout.
                self._report("call sites", node, f"the body is called with two layouts: {change}")
        (result,) = body.graph.output_node().args
        self._store(node, map_arg(result, value_of))

    def _store(self, node: Node, value: Any) -> None:
        """Keep the old value if it says the same: unchanged nodes hold views of it."""
        now = signature(value)
        entry = self.before.get(node)
        if entry is not None:
            if entry.signature == now:
                self._restore(node)
                return
            aspects: tuple[Aspect, ...] = ("shape", "dtype", "device")
            for aspect in aspects:
                if change := differs(entry.signature, now, aspect):
                    self._report(aspect, node, f"{aspect} {change}")
                    break
        self.now[node] = now
        node.meta[VALUE] = value

    def _restore(self, node: Node) -> None:
        """Undo what an earlier `verify` stored, if the edit behind it was taken back since."""
        if VALUE in node.meta:
            node.meta[VALUE] = self.before[node].value

    def _report(self, kind: Any, node: Node, message: str) -> None:
        self.violations.append(Violation(kind, node, f"`{node.name}`: {message}"))


def _region_body(node: Node) -> GraphModule | None:
    module = node.graph.owning_module
    if module is None or not is_higher_order(node):
        return None
    call = body_of_call(module, node)
    return None if call is None else call[0]


def _described(args: Any, of: Callable[[Node], Signature]) -> Any:
    return map_aggregate(args, lambda arg: of(arg) if isinstance(arg, Node) else arg)


def _leaves(args: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(args, leaves.append)
    return leaves
