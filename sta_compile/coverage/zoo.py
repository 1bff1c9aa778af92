"""All rows of the coverage table, video first."""

from __future__ import annotations

from ..errors import StaError
from . import (
    cogvideo,
    cosmos,
    flux,
    hunyuan,
    joint_image,
    kandinsky,
    ltx,
    other_image,
    other_video,
    qwen,
    wan,
)
from .row import Row

VIDEO: tuple[Row, ...] = (
    *wan.ROWS,
    *hunyuan.ROWS,
    *cogvideo.ROWS,
    *ltx.ROWS,
    *cosmos.ROWS,
    *kandinsky.ROWS,
    *other_video.ROWS,
)
IMAGE: tuple[Row, ...] = (*flux.ROWS, *joint_image.ROWS, *qwen.ROWS, *other_image.ROWS)
ROWS = VIDEO + IMAGE


def rows(only: str = "") -> tuple[Row, ...]:
    """The rows whose name contains `only`, whatever the case of its letters."""
    found = tuple(row for row in ROWS if only.lower() in row.name.lower())
    if not found:
        names = ", ".join(dict.fromkeys(row.model for row in ROWS))
        raise StaError(f"no row of the coverage table is named {only!r}; pass a part of {names}")
    return found
