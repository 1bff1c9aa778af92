"""Makes compiled code follow what it was compiled for and Dynamo does not know of: a guard of our own on each.

    config       the values of `sta_compile.config` that the compile used
    tokens       what earlier graphs of the same call prove of the tokens that are the inputs (`model_call`)
    convention   what the model's timestep says about noise, where the compile inferred it: models of one class that are
                 compiled with equal options share Dynamo's code
    regions      what Dynamo checked of a block whose nested region is one that it had traced for another
    checkpoints  whether a checkpoint runs the code that may run it again without what is compiled (`checkpoints`)
    positions    which grid the values of an input have, where they showed it (`read_positions`)

A call for which one of them differs from the compile's compiles again (or finds the code of an earlier compile that
fits), as it does for a tensor of another shape.

Private torch APIs, tested on 2.11 and 2.13: TracingContext.guards_context, Guard with a create_fn of one's own,
GuardBuilder.scope, the source of a graph's input (`node.meta["grapharg"]`), RootGuardManager.add_lambda_guard, which takes
the user's stack as a third argument from 2.12 on, and of torch._dynamo.variables.invoke_subgraph what it reuses regions by.
A guard on a source (`ImportSource`, EQUALS_MATCH) would do as well, but it brings an ID_MATCH, which caching_precompile
can't store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.fx

from . import checkpoints, config, model_call
from .analysis.position_values import Positions, Rows
from .noise_plan import conventions
from .read_positions import has_positions, holds_grid, others


def install_config_guard(names: Iterable[str]) -> bool:
    """Guards the graph that is being compiled on the config's values of `names`; False if none is being compiled.

    Call it inside a backend: guards are collected until the backend has returned.
    """
    names = tuple(names)
    text = f"sta_compile.config is unchanged ({', '.join(names)})"
    return _install(partial(config.snapshot, names), text)


def install_checkpoints_guard() -> bool:
    """Guards on whether a checkpoint in Python computes anew what is compiled."""
    return _install(
        checkpoints.computed_anew, "a checkpoint in Python runs it, or none does, as before"
    )


def names_of_inputs(gm: torch.fx.GraphModule) -> list[str]:
    """The expressions by which guards find the inputs of a graph that has come from Dynamo: "L['args'][0]"."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in nodes]
    names = [getattr(source, "name", "None") for source in sources]
    return [str(name() if callable(name) else name) for name in names]  # methods in torch 2.11


def install_tokens_guard(inputs: Mapping[str, Any], declared: int) -> bool:
    """Guards on what the current call, if there is one, tells of inputs of a graph; `declared` as for that.

    inputs: what they are in this compile, by the expressions that find them.
    """
    told = model_call.told(list(inputs.values()), declared)
    return _add(partial(_tokens_guard, names=tuple(inputs), declared=declared, told=told))


def _tokens_guard(builder: Any, guard: Any, names: Sequence[str], declared: int, told: Any) -> None:
    """A Guard's create_fn, as `_equality_guard`."""
    inputs = _reader(builder, names)

    def unchanged(local: Any) -> bool:
        return bool(model_call.told(inputs(local), declared) == told)

    _add_lambda(builder, guard, unchanged, "what this call tells of its tokens is unchanged")


def install_convention_guard(timestep: str) -> bool:
    """Guards on the noise convention that is remembered for the model, with this value of the option `timestep`."""
    return _install(partial(_convention, timestep), "the model's noise convention is unchanged")


def install_positions_guards(inputs: Mapping[str, Any], read: Mapping[str, Positions]) -> None:
    """Guards on the values of inputs: on the positions that were read from them, and that they are none for which the
    graphs so far were not chosen.

    Both are by the expressions that find the inputs; inputs: their values in this compile.
    """
    for name, value in inputs.items():
        yes, no = read.get(name), others(value)
        if yes is not None or no:
            _add(partial(_positions_guard, name=name, yes=yes, no=() if yes else no))


def install_no_grid_guards(empty: Mapping[str, Rows]) -> None:
    """Guards on that inputs, by the expressions that find them, still have no grid in these rows.

    Of those that the frame is given: others, as what a mode on the stack holds, are found by names that guards don't know.
    """
    for name, rows in empty.items():
        if name.startswith("L["):
            _add(partial(_no_grid_guard, name=name, rows=rows))


def _no_grid_guard(builder: Any, guard: Any, name: str, rows: Rows) -> None:
    """A Guard's create_fn, as `_equality_guard`."""
    values = _reader(builder, [name])

    def unchanged(local: Any) -> bool:
        (value,) = values(local)
        return holds_grid(value, rows) is not True

    _add_lambda(builder, guard, unchanged, f"there is no grid in {name}")


def _positions_guard(
    builder: Any, guard: Any, name: str, yes: Positions | None, no: Sequence[Positions]
) -> None:
    """A Guard's create_fn, as `_equality_guard`."""
    values = _reader(builder, [name])

    def unchanged(local: Any) -> bool:
        (value,) = values(local)
        right = yes is None or has_positions(value, yes) is not False
        return right and not any(has_positions(value, each) for each in no)

    grid = "no grid that was read before" if yes is None else "x".join(map(str, yes.grid))
    _add_lambda(builder, guard, unchanged, f"the positions in {name} are those of {grid}")


def _reader(builder: Any, names: Sequence[str]) -> Callable[[Any], list[Any]]:
    """Finds inputs by their expressions among the locals that a guard is given."""
    inputs = compile(f"[{', '.join(names)}]", "<guard>", "eval")
    scope = dict(builder.scope)
    return lambda local: list(eval(inputs, {**scope, "L": local}))


def _convention(timestep: str) -> Any:
    model = model_call.root_module()
    return None if model is None else conventions.recall(model, timestep)


def _install(read: Callable[[], Any], text: str) -> bool:
    return _add(partial(_equality_guard, read=read, value=read(), text=text))


def _add(create: Callable[..., None]) -> bool:
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return False
    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))
    return True


def _equality_guard(
    builder: Any, guard: Any, read: Callable[[], Any], value: Any, text: str
) -> None:
    """A Guard's create_fn: at module level and made of plain values, so that it can be pickled."""

    def unchanged(_: Any) -> bool:
        return bool(read() == value)

    _add_lambda(builder, guard, unchanged, text)


def _add_lambda(builder: Any, guard: Any, holds: Callable[[Any], bool], text: str) -> None:
    add = builder.guard_manager.root.add_lambda_guard
    try:
        add(holds, [text], guard.user_stack)
    except TypeError:
        add(holds, [text])


@cache
def guard_reused_regions() -> None:
    """From here on, Dynamo guards on what it checks of a block before it takes the traced region of another for it.

    Torch (2.12 to 2.14) checks that while tracing only, so that a number of the fifth block, or a hook on it, may change and
    the code runs on as if it had not. And it misses the guards on modules, whose sources have a type of their own: a block
    with an attention of another class would run that of the first. 2.11 traces each block.
    """
    try:
        from torch._dynamo.variables import invoke_subgraph
    except ImportError:
        return
    module: Any = invoke_subgraph
    built, checked = module.build_reuse_condition, module.is_reusable

    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import NNModuleSource

    def build_reuse_condition(tx: Any, fingerprint: Any, traced: Any) -> Any:
        guarded = (guard.originating_source for guard in tx.output.guards)
        modules = {s for s in guarded if isinstance(s, NNModuleSource) and s.base in traced}
        return built(tx, fingerprint, traced | modules)

    def is_reusable(tx: Any, condition: Any, fingerprint: Any, entry: Any) -> bool:
        if not checked(tx, condition, fingerprint, entry):
            return False
        others = dict(zip(entry.arg_sources, fingerprint.arg_sources, strict=False))
        others = {own: other for own, other in others.items() if None not in (own, other)}

        def moved(source: Any) -> Any:
            return others.get(source, source)

        for source, _, _, guard in condition.guards:
            other = source.clone(moved)
            if other != source:
                install_guard(other.make_guard(guard.create_fn))
        return True

    module.build_reuse_condition = build_reuse_condition
    module.is_reusable = is_reusable
    _clone_once()
    _flatten_untraced(module)


def _clone_once() -> None:
    """From here on, a source that Dynamo moves to another block is cloned once for each block, with all that it is made of.

    Torch clones `blocks[0].attn` again for each guard on what is in it, which is a quarter of tracing 40 blocks.
    """
    from torch._guards import ChainedSource

    clone: Any = ChainedSource.clone
    clones: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # by what moves them

    def once(self: Any, transform_fn: Any = None) -> Any:
        if transform_fn is None:
            return clone(self)
        known = clones.setdefault(transform_fn, {})
        if self not in known:
            known[self] = clone(self, transform_fn)
        return known[self]

    setattr(ChainedSource, "clone", once)  # noqa: B010  mypy knows the method


def _flatten_untraced(module: Any) -> None:
    """From here on, what a block is called with is flattened here, where it is tuples, lists and dicts of what torch knows.

    Torch traces its own `tree_flatten` for each block, with guards on all that this reads.
    """
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch.utils._pytree import tree_flatten

    built = module.build_input_fingerprint

    def leaves_of(value: Any, found: list[Any]) -> Any:
        """The same containers with numbers for leaves; raises TypeError for any others."""
        value = value.realize()
        if module.classify_vt(value) is not None:
            found.append(value)
            return 0
        if type(value) in (TupleVariable, ListVariable):
            items = [leaves_of(item, found) for item in value.items]
            return tuple(items) if type(value) is TupleVariable else items
        raise TypeError

    def build_input_fingerprint(tx: Any, args: Any, kwargs: Any) -> Any:
        found: list[Any] = []
        try:
            positional = [leaves_of(value, found) for value in args]
            named = {name: leaves_of(value, found) for name, value in kwargs.items()}
        except TypeError:
            return built(tx, args, kwargs)
        _, spec = tree_flatten((positional, named))
        tagged = [(module.classify_vt(value), value) for value in found]
        sources = [getattr(value, "source", None) for value in found]
        return module.InputFingerprint(tagged, sources, False, spec)

    module.build_input_fingerprint = build_input_fingerprint
