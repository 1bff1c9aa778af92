"""The hooks of diffusers on a model's modules: found, changed for a while, and put back.

A registry keeps one reference for each hook of a module, the innermost first: `pre_forward`, `forward` (what lies inside of
the hook) and `post_forward`. A hook that is changed stays where it is, so that hooks before and after it keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook of one module, what it is called by, and the references of the hooks inside of it."""

    hook: Any
    reference: Any
    inside: tuple[Any, ...]

    @property
    def innermost(self) -> bool:
        """Does nothing happen between this hook and the module's own forward?"""
        return all(reference.pre_forward is unchanged_inputs for reference in self.inside)


def hook_of(module: nn.Module, name: str) -> Hook | None:
    """The hook of this name, if the module has one."""
    registry: Any = getattr(module, "_diffusers_hook", None)
    hook = None if registry is None else registry.get_hook(name)
    if hook is None:
        return None
    index = registry._hook_order.index(name)
    return Hook(hook, registry._fn_refs[index], tuple(registry._fn_refs[:index]))


class Changes:
    """Changes of hooks that can be taken back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def make(self, hook: Hook, forward: Callable[..., Any] | None = None) -> None:
        """Lets a hook do nothing but call `forward`, by default what lies inside of it."""
        fields = {"pre_forward": unchanged_inputs, "post_forward": unchanged_output}
        if forward is not None:
            fields["forward"] = forward
        self._before.append(
            (hook.reference, {name: getattr(hook.reference, name) for name in fields})
        )
        for name, value in fields.items():
            setattr(hook.reference, name, value)

    def undo(self) -> None:
        while self._before:
            reference, fields = self._before.pop()
            for name, value in fields.items():
                setattr(reference, name, value)


def unchanged_inputs(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def unchanged_output(module: nn.Module, output: Any) -> Any:
    return output
