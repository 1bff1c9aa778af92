"""A picture of one tile's window: which tokens of the grid the queries of a tile attend to.

One panel per row of tiles along the frames; in each, the tiles of rows and columns, drawn to scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import needs
from .ir.attention_spec import Triple
from .ir.tiling import Tiling
from .ir.window import Window, kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY, KEPT, LEFT_OUT = "#d1495b", "#7fb3d5", "#f2f2f2"


def draw_window(tiling: Tiling, window: Window, tile: Triple | None = None) -> Figure:
    """A figure for query tile (frames, rows, cols); the default is the tile in the middle."""
    needs("matplotlib")
    from matplotlib.figure import Figure

    a, b, c = (n // 2 for n in tiling.tiles)
    tile = tile or (a, b, c)
    first, width = window.first(tiling, tile), window.effective(tiling)
    _, rows, cols = tiling.grid
    panels = tiling.tiles[0]
    across = min(panels, 4)
    down = -(-panels // across)
    wide = max(3.2 * across, 4.0)  # the title needs as much
    figure = Figure(figsize=(wide, 0.9 + 3.2 * rows / cols * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for panel, axis in enumerate(axes):
        axis.set_axis_off()
        if panel < panels:
            _draw_panel(axis, tiling, panel, tile, first, width)
    figure.suptitle(
        f"{'x'.join(map(str, tiling.grid))} tokens in {'x'.join(map(str, tiling.tiles))} tiles, "
        f"{kept(tiling, window):.0%} of all pairs\n"
        f"tile {tile} (red) attends to {'x'.join(map(str, width))} tiles (blue)",
        fontsize=9,
    )
    return figure


def _draw_panel(
    axis: Any, tiling: Tiling, panel: int, tile: Triple, first: Triple, width: Triple
) -> None:
    from matplotlib.patches import Rectangle

    start, size = tiling.starts(0)[panel], tiling.sizes(0)[panel]
    frames = f"frame {start}" if size == 1 else f"frames {start}-{start + size - 1}"
    axis.set_title(frames, fontsize=8)
    axis.set_xlim(0, tiling.grid[2])
    axis.set_ylim(tiling.grid[1], 0)
    axis.set_aspect("equal")
    for b, (top, height) in enumerate(zip(tiling.starts(1), tiling.sizes(1), strict=True)):
        for c, (left, breadth) in enumerate(zip(tiling.starts(2), tiling.sizes(2), strict=True)):
            here = (panel, b, c)
            inside = all(low <= x < low + n for x, low, n in zip(here, first, width, strict=True))
            colour = QUERY if here == tile else KEPT if inside else LEFT_OUT
            axis.add_patch(
                Rectangle((left, top), breadth, height, facecolor=colour, edgecolor="white", lw=0.8)
            )
