"""Offloading leaf by leaf, a block at a time.

diffusers' `apply_group_offloading(offload_type="leaf_level")` moves the weights of each linear layer to the GPU before its
forward and back after it. Dynamo can't trace that, so every layer is a graph break, and no graph shows where q, k and v come
from. What lies in one of the model's blocks is therefore moved together: before the block and after it, outside of
its graph. One block's weights are on the GPU at a time instead of one layer's; with a stream also those of the block that
came next in an earlier call, which are on their way while the block runs. Layers outside of blocks keep their hooks.

The moves are made by a group of diffusers that has the layers of all the block's groups, with their options. Weights that
are offloaded to disk lie in a file for each leaf, so those keep their hooks too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .diffusers_hooks import Changes, Hook, hook_of
from .regions import repeated_blocks

HOOK = "group_offloading"


def move_by_block(model: nn.Module) -> Callable[[], None]:
    """Lets blocks move the weights that their layers' hooks would move; returns what undoes it."""
    changes, groups = Changes(), {}
    blocks = set(repeated_blocks(model, least=1))
    for block in [module for module in model.modules() if module in blocks]:
        hooks = [hook for module in block.modules() if (hook := _leaf_hook(module)) is not None]
        if hooks:
            groups[block] = _joined(block, hooks)
            for hook in hooks:
                changes.make(hook)
    moves = _Moves(groups)

    def undo() -> None:
        moves.stop()
        changes.undo()

    return undo


def _leaf_hook(module: nn.Module) -> Hook | None:
    found = hook_of(module, HOOK)
    if found is None or found.hook.config.offload_type != "leaf_level":
        return None
    return found if found.hook.config.offload_to_disk_path is None else None


def _joined(block: nn.Module, hooks: list[Hook]) -> Any:
    """One group of the layers, parameters and buffers of all: weights that are pinned already are not copied."""
    groups = [found.hook.group for found in hooks]
    config = hooks[0].hook.config
    return type(groups[0])(
        modules=[module for group in groups for module in group.modules],
        parameters=[parameter for group in groups for parameter in group.parameters],
        buffers=[buffer for group in groups for buffer in group.buffers],
        offload_device=config.offload_device,
        onload_device=config.onload_device,
        offload_leader=block,
        onload_leader=block,
        non_blocking=config.non_blocking,
        stream=config.stream,
        record_stream=config.record_stream,
        low_cpu_mem_usage=config.low_cpu_mem_usage,
    )


class _Moves:
    """Hooks on the blocks that move their groups. groups: of blocks, in the order of the model."""

    def __init__(self, groups: dict[nn.Module, Any]) -> None:
        self._groups = groups
        self._place = {block: place for place, block in enumerate(groups)}
        self._next: dict[nn.Module, nn.Module] = {}
        self._last: nn.Module | None = None
        self._onloaded: set[nn.Module] = set()
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._handles = [
            handle
            for block in groups
            for handle in (
                block.register_forward_pre_hook(before, with_kwargs=True),
                block.register_forward_hook(after),
            )
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        for block in list(self._onloaded):
            self._offload(block)

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = self._groups[block]
        self._onload(block)
        if group.stream is not None:
            group.stream.synchronize()
            self._prefetch(block)

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(group.onload_device, non_blocking=group.non_blocking)

        moved: tuple[Any, Any] = tree_map_only(torch.Tensor, move, (args, kwargs))
        return moved

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        self._offload(block)

    def _prefetch(self, block: nn.Module) -> None:
        """Starts to move what came after this block last time. The first block of a call comes after none."""
        if self._last is not None and self._place[self._last] < self._place[block]:
            self._next[self._last] = block
        self._last = block
        if block in self._next:
            self._onload(self._next[block])

    def _onload(self, block: nn.Module) -> None:
        if block not in self._onloaded:
            self._groups[block].onload_()
            self._onloaded.add(block)

    def _offload(self, block: nn.Module) -> None:
        self._groups[block].offload_()
        self._onloaded.discard(block)
