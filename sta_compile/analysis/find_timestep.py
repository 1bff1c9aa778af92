"""Which graph input is the timestep, and what does the graph prove about its scale?

A timestep is embedded as sin and cos of itself times a table of frequencies, then linear, activation, linear: so it
reaches the modulation of every layer. `guidance`, `timestep_r` and fps take the same road, and the name decides among
the inputs that do; frame indices and positions reach q and k from their sinusoid with no linear layer between, and
drop out. The frequencies start at 1, so a number that the timestep is multiplied with before them is the scale that
the model was trained on: 1000 proves a timestep over 0..1, and 1 proves nothing.

    l_kwargs_timestep_ -> float -> * 1000 -> [:, None] -> * exp(...) -> cos -> cat -> linear -> silu -> linear
    TimestepFact(name="timestep", factor=1000.0)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .graph_view import (
    GraphView,
    argument,
    canonical_name,
    fake_value,
    is_inplace,
    is_pointwise,
    is_tensor,
)

# Casts and views: the result holds the same numbers.
_SAME_NUMBERS = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "int", "long", "contiguous", "clone",
    "detach", "alias", "getitem", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand",
    "expand_as", "broadcast_to", "repeat", "repeat_interleave", "permute", "transpose", "t", "ravel", "slice", "select",
    "cat", "stack", "chunk", "split", "unbind", "view_as", "reshape_as", "round", "neg", "pos", "cuda", "cpu",
}  # fmt: skip
_PRODUCTS = {"mul", "truediv", "outer", "einsum", "matmul"}
_SUMS = {"add", "sub", "rsub"}
_SINUSOIDS = {"sin", "cos", "polar"}
_LINEAR = {"linear", "addmm", "mm"}
_NORMS = {"layer_norm", "rms_norm", "native_layer_norm", "pad", "constant_pad_nd"}
# Largest table of frequencies that is computed to read the factor.
_MAX_TABLE = 1 << 20


@dataclass(frozen=True)
class TimestepFact:
    """The timestep input: [], [1], [batch], [batch, tokens or frames], [batch, 1, frames, 1, 1]."""

    node: torch.fx.Node
    name: str  # as option `timestep` takes it
    index: int  # position among the graph's inputs
    factor: float | None  # what it is multiplied with before its sinusoid; None: not to be read
    evidence: str


@dataclass(frozen=True)
class NoTimestep:
    """Why no input is taken as the timestep, and what to do about it."""

    reason: str
    hint: str

    @property
    def message(self) -> str:
        return f"{self.reason}, so every step stays dense: {self.hint}"


def readable_name(node: torch.fx.Node) -> str:
    """The name of an input in the user's code: l_kwargs_timestep_ -> timestep, L_stack0_0_ -> stack0_0."""
    name = re.sub(r"^[lLgG]_", "", str(node.target)).strip("_")
    return re.sub(r"^kwargs_", "", name)


def find_timestep(
    view: GraphView, option: str = "auto", aliases: Mapping[str, str] | None = None
) -> TimestepFact | NoTimestep:
    """The input that `option` names, or with "auto" the one that is embedded and is called a timestep.

    aliases: what the user's code calls inputs that the graph only numbers, {"args_1": "timestep"}.
    """
    inputs = [node for node in view.gm.graph.nodes if node.op == "placeholder"]
    named = {}
    for node in inputs:
        if not _belongs_to_module(node):
            name = readable_name(node)
            named[(aliases or {}).get(name, name)] = node
    search = _Search(view)
    if option != "auto":
        node = named.get(option) or next(
            (n for n in named.values() if option in (n.name, readable_name(n))), None
        )
        if node is None or not is_tensor(node):
            return _not_an_input(option, node, named)
        factor = search.factor(node)
        return _fact(node, option, inputs, factor, f"option timestep={option!r}")
    embedded = {name: node for name, node in named.items() if search.is_embedded(node)}
    chosen = _choose_by_name(embedded)
    if chosen is None:
        return _nothing_chosen(named, embedded)
    evidence = "embedded by a sinusoid, linear, activation, linear"
    node = embedded[chosen]
    return _fact(node, chosen, inputs, search.factor(node), evidence)


def _fact(
    node: torch.fx.Node,
    name: str,
    inputs: list[torch.fx.Node],
    factor: float | None,
    evidence: str,
) -> TimestepFact:
    return TimestepFact(node, name, inputs.index(node), factor, evidence)


def _belongs_to_module(node: torch.fx.Node) -> bool:
    return re.match(r"^[lL]_self_", str(node.target)) is not None


def _choose_by_name(embedded: Iterable[str]) -> str | None:
    """The one timestep among embedded inputs: its own name first, then a name that ends in it, then t."""
    names = sorted(embedded)
    for pattern in (r"timesteps?", r".*_timesteps?", r"t"):
        matches = [name for name in names if re.fullmatch(pattern, name)]
        if matches:
            return matches[0] if len(matches) == 1 else None
    return None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))


def _not_an_input(
    option: str, node: torch.fx.Node | None, named: Mapping[str, torch.fx.Node]
) -> NoTimestep:
    tensors = _quoted(name for name, n in named.items() if is_tensor(n)) or "none"
    if node is not None:
        return NoTimestep(
            f"the input {option!r} is a Python number in this graph",
            "pass the timestep to the model as a tensor",
        )
    return NoTimestep(
        f"this graph has no input named {option!r}",
        f"pass one of its inputs as option timestep: {tensors}",
    )


def _nothing_chosen(
    named: dict[str, torch.fx.Node], embedded: dict[str, torch.fx.Node]
) -> NoTimestep:
    numbers = [n for n, node in named.items() if "timestep" in n and not is_tensor(node)]
    if numbers:
        return NoTimestep(
            f"the input {_quoted(numbers)} is a Python number",
            "pass the timestep to the model as a tensor",
        )
    if embedded:
        # A forward of *args, as diffusers' decorators make it, hides the names of its positional inputs.
        nameless = any(re.fullmatch(r"args_\d+", name) for name in embedded)
        keyword = "call the model with timestep=... by its keyword, or " if nameless else ""
        return NoTimestep(
            f"the inputs {_quoted(embedded)} are embedded as a timestep is, and none is clearly the one by its name",
            f'{keyword}pass options={{"timestep": "..."}} with one of {_quoted(embedded)}',
        )
    return NoTimestep(
        "this graph embeds no timestep (it starts after the embedding, as the blocks of a regional "
        "compile and the graphs after a graph break do)",
        "compile by sta_compile.compile(model), which tells all graphs the timestep, or pass dense_above=None to have "
        "no dense steps",
    )


class _Search:
    """Walks forwards from an input, through the bodies of checkpoints and regions."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.users: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
        for node in view.nodes:
            picked = view.picks(node)
            for source in [picked] if picked is not None else view.producers(node):
                self.users[source].append(node)

    def factor(self, root: torch.fx.Node) -> float | None:
        """The largest factor before a sinusoid of `root`; None if there is none, or one that is no constant."""
        factors = list(self._sinusoids(root).values())
        known = [factor for factor in factors if factor is not None]
        return max(known) if known and len(known) == len(factors) else None

    def is_embedded(self, root: torch.fx.Node) -> bool:
        """Does `root` pass a sinusoid, linear, activation, linear (or these linears alone), and is it no position?"""
        if not is_tensor(root):
            return False
        sinusoids = list(self._sinusoids(root))
        if not sinusoids:
            return self._reaches_linear(self._linears_of_one_number(root))
        first = {n for n in self._spread(sinusoids, self._passes) if _is_linear(n)}
        return self._reaches_linear(first) and not self._is_position(sinusoids)

    def _sinusoids(self, root: torch.fx.Node) -> dict[torch.fx.Node, float | None]:
        """Each sin or cos of a multiple of `root`, with the multiple; None where it is no constant."""
        found: dict[torch.fx.Node, float | None] = {}
        scales: dict[torch.fx.Node, float | None] = {root: 1.0}
        stack = [root]
        while stack:
            node = stack.pop()
            for user in self.users[node]:
                name = canonical_name(user)
                if name in _SINUSOIDS:
                    found[user] = scales[node]
                    continue
                scale = self._scale_after(user, node, name, scales[node])
                if scale is not None and scale[0] != 0.0 and user not in scales:
                    scales[user] = scale[0]
                    stack.append(user)
        return found

    def _scale_after(
        self, user: torch.fx.Node, node: torch.fx.Node, name: str, scale: float | None
    ) -> tuple[float | None] | None:
        """(the multiple of the timestep that `user` holds,), or None if it holds no multiple."""
        if name in _SAME_NUMBERS or user in self.view.sources or user in self.view.body:
            return (scale,)
        if name not in _PRODUCTS | _SUMS:
            return None
        others = [a for a in user.args if a is not node and not isinstance(a, str)]
        if not others:
            return None
        other = others[0]
        if name in _SUMS:
            return (scale,) if isinstance(other, (int, float)) else None
        size = _magnitude(self.view, other)
        if size is None or scale is None:
            return (None,)
        if name == "truediv":
            return (scale / size,) if size and user.args[0] is node else None
        return (scale * size,)

    def _spread(
        self, starts: Iterable[torch.fx.Node], through: Callable[[torch.fx.Node], bool]
    ) -> set[torch.fx.Node]:
        """Every user that is reached from `starts`, going on only through the nodes that `through` allows."""
        seen: set[torch.fx.Node] = set()
        stack = list(starts)
        while stack:
            for user in self.users[stack.pop()]:
                if user not in seen:
                    seen.add(user)
                    if through(user):
                        stack.append(user)
        return seen

    def _passes(self, node: torch.fx.Node) -> bool:
        name = canonical_name(node)
        structural = node in self.view.sources or node in self.view.body
        return structural or name in _SAME_NUMBERS or name in _NORMS or is_pointwise(name)

    def _reaches_linear(self, starts: Iterable[torch.fx.Node]) -> bool:
        return any(_is_linear(node) for node in self._spread(starts, self._passes))

    def _linears_of_one_number(self, root: torch.fx.Node) -> list[torch.fx.Node]:
        """Linear layers that take the numbers of `root` one by one, [..., 1]: an embedding without a sinusoid."""
        copies = self._spread([root], lambda node: canonical_name(node) in _SAME_NUMBERS)
        return [
            node
            for node in copies
            if canonical_name(node) == "linear"
            and fake_value(argument(node, 0, "input")).shape[-1:] == (1,)
        ]

    def _is_position(self, starts: list[torch.fx.Node]) -> bool:
        """Do q or k of an attention depend on `starts` with no linear layer between?"""
        reached = self._spread(starts, lambda node: not _is_linear(node))
        reached.update(starts)
        for node in reached:
            name = canonical_name(node)
            if name == "softmax":
                return True
            if name == "scaled_dot_product_attention":
                query, key = argument(node, 0, "query"), argument(node, 1, "key")
                if query in reached or key in reached:
                    return True
        return False


def _is_linear(node: torch.fx.Node) -> bool:
    return canonical_name(node) in _LINEAR


def _magnitude(view: GraphView, value: Any) -> float | None:
    """The largest magnitude of a number or of a table that the graph makes of constants; None if it can't be known.

    Example: exp(-log(10000) * arange(0, 128) / 128) -> 1.0
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return abs(float(value))
    if not is_tensor(value):
        return None
    chain = sorted(view.backwards(value), key=view.position.__getitem__)
    if any(not _is_computable(node) for node in chain):
        return None
    computed: dict[torch.fx.Node, Any] = {}
    try:
        with torch.no_grad():
            for node in chain:
                computed[node] = _compute(node, computed)
            return float(computed[value].abs().max())
    except Exception:  # a table that can't be computed here proves nothing, whatever the cause
        return None


def _is_computable(node: torch.fx.Node) -> bool:
    fake = fake_value(node)
    small = not isinstance(fake, torch.Tensor) or (
        all(isinstance(size, int) for size in fake.shape) and fake.numel() <= _MAX_TABLE
    )
    written = is_inplace(node) or any(is_inplace(user) for user in node.users)
    return node.op in ("call_function", "call_method") and small and not written


def _compute(node: torch.fx.Node, computed: dict[torch.fx.Node, Any]) -> Any:
    """The value of one node on the CPU."""
    args = torch.fx.node.map_arg(node.args, computed.__getitem__)
    kwargs = torch.fx.node.map_arg(node.kwargs, computed.__getitem__)
    cpu = torch.device("cpu")
    args = tuple(cpu if isinstance(arg, torch.device) else arg for arg in args)
    kwargs = {key: cpu if key == "device" else arg for key, arg in kwargs.items()}
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
