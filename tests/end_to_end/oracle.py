"""The eager model with the definition's mask: what a compiled model has to compute (design, section 4).

Of the compiler it takes two things only, tiles per axis and the window in tiles, as its report prints them:

    mask = window_mask(grid=(5, 9, 11), tiles=(5, 5, 6), window=(3, 3, 3))     bool [query token, key token]
    with Oracle(model, sites, mask) as oracle:
        expected = model(**inputs)                                            oracle.calls: attentions that were masked
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

Triple = tuple[int, int, int]


def tiles_of_axis(length: int, tiles: int) -> list[range]:
    """The positions of each tile: sizes differ by at most one, the larger ones first (45 in 6: 8 8 8 7 7 7)."""
    ranges, start = [], 0
    for tile in range(tiles):
        size = length // tiles + (1 if tile < length % tiles else 0)
        ranges.append(range(start, start + size))
        start += size
    return ranges


def seen_from(position: int, length: int, tiles: int, window: int) -> slice:
    """The positions of an axis that a token sees: `window` tiles around its own, shifted inward at the borders."""
    ranges = tiles_of_axis(length, tiles)
    (own,) = (i for i, tile in enumerate(ranges) if position in tile)
    half = window // 2
    width = min(tiles, 2 * half + 1)
    first = own - half
    if first < 0:
        first = 0
    if first + width > tiles:
        first = tiles - width
    return slice(ranges[first].start, ranges[first + width - 1].stop)


def window_mask(grid: Triple, tiles: Triple, window: Triple) -> Tensor:
    """bool [query, key] over the tokens of a grid in raster order, query token by query token."""
    tokens = grid[0] * grid[1] * grid[2]
    mask = np.zeros((tokens, *grid), dtype=bool)
    for row, place in enumerate(product(*map(range, grid))):
        box = tuple(seen_from(*axis) for axis in zip(place, grid, tiles, window, strict=True))
        mask[(row, *box)] = True
    return torch.from_numpy(mask.reshape(tokens, tokens))


def site_mask(site: Any) -> Tensor:
    """The mask of a site of a report, whose numbers are (frames, rows, cols), over its tokens as they stand."""
    mask = window_mask(site.grid, site.tiles, site.window)
    told, _, names = site.order.partition("tokens in the order ")
    if told or not names:
        return mask
    order = [("frames", "rows", "cols").index(name) for name in names.split(", ")]
    places = torch.arange(len(mask)).view(site.grid).permute(order).flatten()
    return mask[places][:, places]


class Oracle(TorchFunctionMode):
    """While active, SDPA inside the named modules sees the mask over the video beside the mask it was given.

    text_first: the video stands at the end of its sequence, else at its start. places: for sites where it stands elsewhere,
    how many tokens stand ahead of it among the queries and among the keys; a call inside that is too short to hold the
    video is not of it. masks: for sites over a grid of their own.
    dense: one flag per sample, True where a sample sees everything. A model that attends sample by sample is told by
    batches of one.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[str],
        mask: Tensor,
        *,
        text_first: bool = False,
        dense: Iterable[bool] = (False,),
        places: Mapping[str, tuple[int, int]] | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.sites, self.mask = model, tuple(sites), mask
        self.text_first, self.dense = text_first, list(dense)
        self.places, self.masks = places or {}, masks or {}
        self.calls = 0
        self._inside: list[str] = []
        self._sample = 0
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Oracle:
        modules = dict(self.model.named_modules())
        for site in self.sites:
            self._hooks += [
                modules[site].register_forward_pre_hook(partial(self._enter_site, site)),
                modules[site].register_forward_hook(self._leave_site),
            ]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()

    def _enter_site(self, site: str, *_: Any) -> None:
        self._inside.append(site)
        self._sample = 0

    def _leave_site(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention or not self._inside:
            return function(*args, **kwargs)
        call = _SDPA.bind(*args, **kwargs).arguments
        mask = self.masks.get(self._inside[-1], self.mask)
        starts = self._starts(call["query"].shape[-2], call["key"].shape[-2], len(mask))
        if starts is None:
            return function(*args, **kwargs)
        call["attn_mask"] = self._joined(call, mask, starts)
        self.calls += 1
        return function(**call)

    def _starts(self, queries: int, keys: int, video: int) -> tuple[int, int] | None:
        """Where the video starts among queries and keys; None where it does not fit."""
        last = queries - video if self.text_first else 0
        start = self.places.get(self._inside[-1], (last, last))
        fits = start[0] + video <= queries and start[1] + video <= keys
        return start if fits else None

    def _joined(self, call: Mapping[str, Any], mask: Tensor, starts: tuple[int, int]) -> Tensor:
        """[batch, 1 or heads, queries, keys] in the kind of the given mask; bool where there was none."""
        query, given = call["query"], call.get("attn_mask")
        batch, video = query.shape[0], len(mask)
        shape = (batch, 1, query.shape[-2], call["key"].shape[-2])
        visible = torch.ones(shape, dtype=torch.bool, device=query.device)
        flags = self.dense if len(self.dense) > 1 else self.dense * batch
        if batch < len(flags):
            flags = flags[self._sample :]
        self._sample += batch
        rows, cols = (slice(start, start + video) for start in starts)
        for sample in range(batch):
            if not flags[sample]:
                visible[sample, 0, rows, cols] = mask
        if given is None:
            return visible
        if given.dtype == torch.bool:
            return visible & given
        return torch.where(visible, given, -torch.inf)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The parameters of scaled_dot_product_attention, which has no signature that can be read."""


_SDPA = inspect.signature(_sdpa)
