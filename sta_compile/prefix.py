"""What does a model do before its first block, and which token grid does that prove?

Where a model runs in several graphs (hooks of offloading, FSDP2, a graph break in the loop over its blocks), Dynamo gives up
the frame with the patch embed, and a block's graph shows a number of tokens only. The part before the blocks is then traced
by itself, once for each shape of the model's inputs:

    Wan, latent [1, 16, 9, 60, 104] -> the first block is called with [1, 14040, 1536] tokens of a 9x30x52 grid
    grids_before_blocks(model, args, kwargs).grids  ->  {14040: ((14040, (9, 30, 52)),)}

If that part breaks a graph nothing is traced, and what broke it is kept for the report. Its operators, and those between the
blocks, are then noted while they run (`watched`), from the next call on.

What is traced is a skeleton: the same modules without hooks and without data, so that nothing runs, moves or is read.
Linear layers of any kind (quantised, with adapters) stand for plain ones.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from .ir.known_tokens import Doubt, Known, Leaving, Segments, Told, agreed, by_number
from .regions import repeated_blocks
from .rewriting.python_indexing import index_in_python
from .seen_tokens import SeenTokens

if TYPE_CHECKING:
    from .analysis.infer_grid import GridInference

log = logging.getLogger(__name__)
Tell = Callable[[Leaving, Sequence[bool], Sequence[Any]], None]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
          "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
# Blocks that hold less of the repeated weights than this are of a text encoder inside the model.
_MAIN_SHARE = 0.2
_MANY_SHAPES = 256


@dataclass(frozen=True)
class BeforeBlocks:
    """What a model does before its blocks. grids: by the number of tokens. broken: why it can't be traced, and where."""

    grids: Known
    broken: str = ""


class Prefix:
    """The part of one model before its blocks, by shapes of the inputs. needed: has any graph asked?

    parts: numbers of tokens that graphs of earlier calls had with frames in their batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.needed = False
        self.parts: set[int] = set()
        self.blocks = _main_blocks(model)
        self._found: OrderedDict[Any, BeforeBlocks] = OrderedDict()
        self._seen: OrderedDict[str, Leaving] = OrderedDict()

    def before_blocks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BeforeBlocks:
        """What is known for inputs of these shapes; traced once."""
        key = key_of(args, kwargs)
        if key not in self._found:
            self._found[key] = grids_before_blocks(self.model, args, kwargs)
            _limit(self._found)
        return self._found[key]

    @contextmanager
    def watched(self, seen: SeenTokens, tell: Tell) -> Iterator[None]:
        """Runs the model with a watch on what it does outside of its blocks, and tells what that proves before each of them.

        seen: what is known of tensors.
        """
        from ._watch import watching

        def reached(
            gm: torch.fx.GraphModule, told: Mapping[torch.fx.Node, Told], made: Sequence[Tensor]
        ) -> None:
            inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
            given = [(tuple(n.meta["example_value"].shape), told.get(n)) for n in inputs]
            key = f"{given} {gm.graph}"
            if key not in self._seen:
                index_in_python(gm)
                self._seen[key] = _leaving(gm, told)[1]
                _limit(self._seen)
            tell(self._seen[key], [n in told for n in inputs], made)

        with watching(self.blocks, seen, reached):
            yield


def grids_before_blocks(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BeforeBlocks:
    """What the part before the blocks proves of token counts, if it can be traced."""
    from ._trace import trace_quietly

    found: dict[int, Segments | Doubt] = {}
    broken = ""

    def visit(gm: torch.fx.GraphModule, _: Sequence[Any]) -> None:
        found.update(_proved(gm))

    try:
        given: Any = (tuple(args), dict(kwargs))
        device = next(x.device for x in tree_leaves(given) if isinstance(x, Tensor))
        with FakeTensorMode(), torch.no_grad():
            skeleton = _Skeleton(device)
            args, kwargs = tree_map_only(Tensor, skeleton.like, given)
            whole = _Until(skeleton.of(model))
        with torch.no_grad():
            broken = trace_quietly(whole, args, kwargs, visit)
    except Exception as error:  # a model that can't be traced shows no grid, whatever the cause
        broken = str(error).strip().partition("\n")[0] or type(error).__name__
    if broken:
        log.info("what %s does before its blocks can't be traced: %s", type(model).__name__, broken)
    return BeforeBlocks(found, broken)


def _proved(gm: torch.fx.GraphModule) -> dict[int, Segments | Doubt]:
    """What a graph shows of the tokens that leave it, by their number."""
    from .analysis.graph_view import fake_value
    from .call_grids import other_sequences

    inference, all_leaving = _leaving(gm, {})
    nodes = gm.graph.nodes
    args = [fake_value(n) for n in nodes if n.op == "placeholder"]
    outputs = [fake_value(n) for n in next(iter(reversed(nodes))).args[0]]
    found: dict[int, Segments | Doubt] = {}
    for leaving in all_leaving.tokens:
        tokens = int(outputs[leaving.output].shape[leaving.dim])
        for n, known in by_number(tokens, leaving.of(tokens)):
            found[n] = agreed(found.get(n, known), known)
    found |= dict.fromkeys(all_leaving.parts, Doubt.PARTS)
    for sequence in other_sequences(inference):
        other = sequence.tokens(args, outputs, found)
        if other in found:
            found[other] = Doubt.SEVERAL
    return found


def _leaving(
    gm: torch.fx.GraphModule, told: Mapping[torch.fx.Node, Told]
) -> tuple[GridInference, Leaving]:
    """What a graph shows of the tokens that leave it. told: what is known of those that come in."""
    from .analysis.graph_view import GraphView
    from .analysis.infer_grid import GridInference
    from .analysis.told_axes import told_axes
    from .analysis.trace_dims import trace_dims
    from .call_grids import leaving_of

    axes = told_axes(told)
    inference = GridInference(trace_dims(GraphView(gm), axes.dims), told=axes)
    return inference, leaving_of(gm, inference)


def _limit(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _MANY_SHAPES:
        kept.popitem(last=False)


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the grid of a call may depend on: shapes of tensors, and the numbers and words beside them."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    return (spec, *map(_key_of_leaf, leaves))


def _key_of_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value)


class _Reached(Exception):
    """A block is called."""


class _Until(nn.Module):
    """Runs a skeleton until it reaches a block; decorators of its forward (scales of adapters) are left out."""

    def __init__(self, skeleton: nn.Module) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.run = inspect.unwrap(type(skeleton).forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.run(self.skeleton, *args, **kwargs)
        except _Reached:
            return None


class _Block(nn.Module):
    """In place of a block: keeps what it is called with and ends the run."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.inputs.append((args, kwargs))
        raise _Reached


class _Linear(nn.Module):
    """In place of any linear layer. `weight` is there for models that ask for its dtype."""

    def __init__(self, given: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = int(given.in_features), int(given.out_features)  # type: ignore[arg-type]
        dtypes = [p.dtype for p in given.parameters() if p.dtype.is_floating_point]
        dtype = dtypes[0] if dtypes else torch.bfloat16
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, x.new_empty(self.out_features, self.in_features))


class _Skeleton:
    """Makes modules and tensors without data on one device, whatever device each of the model's weights is on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[nn.Module, nn.Module] = {}

    def like(self, value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=self.device)

    def of(self, model: nn.Module) -> nn.Module:
        self._copies = {block: _Block() for block in _main_blocks(model)}
        return self._copy(model)

    def _copy(self, module: nn.Module) -> nn.Module:
        if module in self._copies:
            return self._copies[module]
        if hasattr(module, "out_features") and hasattr(module, "in_features"):
            self._copies[module] = _Linear(module, self.device)
        else:
            self._copies[module] = object.__new__(
                type(module)
            )  # before what it holds: it may hold itself
            self._fill(self._copies[module], module)
        return self._copies[module]

    def _fill(self, bare: nn.Module, module: nn.Module) -> None:
        """The same attributes, without hooks."""
        bare.__dict__.update(module.__dict__)
        for name in _HOOKS:
            bare.__dict__[name] = OrderedDict()
        if hasattr(module, "_diffusers_hook") or hasattr(module, "_hf_hook"):
            bare.__dict__.pop("forward", None)  # it calls the hooks
        bare.__dict__.pop("_compiled_call_impl", None)
        for name, convert in (
            ("_parameters", lambda p: nn.Parameter(self.like(p), requires_grad=False)),
            ("_buffers", self.like),
            ("_modules", self._copy),
        ):
            bare.__dict__[name] = {
                key: None if value is None else convert(value)
                for key, value in module.__dict__[name].items()
            }


def _main_blocks(model: nn.Module) -> set[nn.Module]:
    blocks = repeated_blocks(model)
    sizes = {block: sum(p.numel() for p in block.parameters()) for block in blocks}
    share: Counter[type] = Counter()
    for block, size in sizes.items():
        share[type(block)] += size
    return {b for b in blocks if share[type(b)] >= _MAIN_SHARE * sum(sizes.values())}
