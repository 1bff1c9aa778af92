"""A picture of a window says what it shows, also where one panel is all there is."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.picture import draw_window


@pytest.mark.parametrize(
    ("grid", "tiles", "window"),
    [((9, 16, 22), (1, 1, 13), (1, 1, 5)), ((33, 45, 80), (33, 15, 16), (13, 13, 15))],
)
def test_the_title_is_not_cut_off(grid, tiles, window):
    figure = draw_window(Tiling(grid, tiles), Window(window))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (title,) = (text for text in figure.texts if "attends to" in text.get_text())
    extent = title.get_window_extent(canvas.get_renderer())
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width


def test_panels_name_their_frames():
    figure = draw_window(Tiling((5, 4, 4), (3, 2, 2)), Window((1, 1, 1)))
    titles = [axis.get_title() for axis in figure.axes][:3]
    assert titles == ["frames 0-1", "frames 2-3", "frame 4"]
