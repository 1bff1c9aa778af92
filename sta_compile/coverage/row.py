"""A row of the coverage table: a diffusers class in one of its modes, small and random, and what has to happen to it.

    row = Row("WanTransformer3DModel", "text to video", wan, ("blocks.{}.attn1",))
    built = row.at(Size(batch=2, grid=(5, 9, 11)))
    built.model(**built.inputs)          built.sites: ("blocks.0.attn1", "blocks.1.attn1")

What has to happen is written down from the source of the model: which modules attend over the grid, and where the video
stands in their sequence. It is the truth that the compiler's findings are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StaError
from ..ir.attention_spec import Triple

Inputs = dict[str, Any]
HEADS, HEAD_DIM, CHANNELS, TEXT_DIM = 2, 24, 4, 16
LENGTH = 7  # tokens of text
VIDEO_GRIDS: tuple[Triple, Triple] = ((5, 9, 11), (3, 8, 14))
IMAGE_GRIDS: tuple[Triple, Triple] = ((1, 12, 18), (1, 9, 13))


@dataclass(frozen=True)
class Size:
    """batch; grid: tokens (frames, rows, cols) after patchify; layers; text: tokens of the prompt."""

    batch: int
    grid: Triple
    layers: int = 2
    text: int = LENGTH

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def latent(self, channels: int = CHANNELS) -> Tensor:
        """[batch, channels, frames, 2 * rows, 2 * cols]"""
        frames, rows, cols = self.grid
        return torch.randn(self.batch, channels, frames, 2 * rows, 2 * cols)

    def picture(self, channels: int = CHANNELS) -> Tensor:
        """[batch, channels, 2 * rows, 2 * cols]"""
        return self.latent(channels)[:, :, 0]

    def packed(self, channels: int = CHANNELS) -> Tensor:
        """[batch, tokens, channels]: patches that were made outside of the model."""
        return torch.randn(self.batch, self.tokens, channels)

    def prompt(self, dim: int = TEXT_DIM) -> Tensor:
        """[batch, text, dim]"""
        return torch.randn(self.batch, self.text, dim)

    def timestep(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """[batch]"""
        return torch.full((self.batch,), value, dtype=dtype)

    def valid(self, dtype: torch.dtype) -> Tensor:
        """Which text tokens are no padding: every sample of a batch has a length of its own."""
        lengths = torch.tensor([max(1, self.text - 2 * (1 + i)) for i in range(self.batch)])
        return (torch.arange(self.text) < lengths[:, None]).to(dtype)

    def places(self) -> Tensor:
        """int64 [tokens, 3]: (frame, row, column) of every token in raster order."""
        return torch.cartesian_prod(*(torch.arange(size) for size in self.grid))


@dataclass(frozen=True)
class Built:
    """A model and its inputs.

    before: tokens ahead of the video in the sequence of keys; queries_before: in that of queries, where they are others.
    other_grids: prefixes of sites whose tokens are another grid than the row's.
    """

    model: nn.Module
    inputs: Inputs
    before: int = 0
    queries_before: int | None = None
    other_grids: Mapping[str, Triple] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()

    def with_inputs(self, **inputs: Any) -> Built:
        return replace(self, inputs={**self.inputs, **inputs})

    def grid_of(self, site: str, size: Size) -> Triple:
        """The grid that a site attends over."""
        other = (grid for prefix, grid in self.other_grids.items() if site.startswith(prefix))
        return next(other, size.grid)

    def place_of(self, site: str) -> tuple[int, int]:
        """How many tokens stand ahead of the grid, among the site's queries and among its keys."""
        if site in self.alone:
            return 0, 0
        return self.before if self.queries_before is None else self.queries_before, self.before


@dataclass(frozen=True)
class Row:
    """model: name of the class. sites: modules whose attention has to be replaced, `{}` is the number of the layer.

    alone: those of them that see the video without the tokens beside it. refused: why other attention over the video may
    stay as it is. breaks: the model can't be captured as one graph.
    """

    model: str
    mode: str
    build: Callable[[Size], Built]
    sites: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    refused: str = ""
    breaks: bool = False
    grids: tuple[Triple, Triple] = VIDEO_GRIDS
    layers: int = 2

    @property
    def name(self) -> str:
        return name_of(self.model, self.mode)

    def at(self, size: Size) -> Built:
        """The model with random weights in eval mode, its inputs, and the names of its sites."""
        torch.manual_seed(0)
        built = self.build(size)
        randomize(built.model)
        sites, alone = (_modules(paths, size.layers) for paths in (self.sites, self.alone))
        return replace(built, model=built.model.eval(), sites=sites, alone=alone)


def _modules(paths: tuple[str, ...], layers: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.format(layer) for path in paths for layer in range(layers)))


def transformer(name: str) -> Any:
    """A class of diffusers; raises StaError where the installed version has none of this name."""
    import diffusers

    try:
        return getattr(diffusers, name)
    except AttributeError as error:
        raise StaError(
            f"diffusers {diffusers.__version__} has no {name}; install a later version"
        ) from error


def name_of(model: str, mode: str) -> str:
    return f"{model} ({mode})" if mode else model


def randomize(model: nn.Module) -> None:
    """Weights at which no part of the model is near to the identity or to nothing."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
