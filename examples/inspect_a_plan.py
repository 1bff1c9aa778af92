"""How is a grid cut into tiles, and what does a window keep? No model and no GPU needed.

python examples/inspect_a_plan.py 21x45x80 15,24,24 --picture window.png
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from sta_compile.errors import ends_in_a_line
from sta_compile.option_values import triple, triple_or
from sta_compile.picture import draw_window
from sta_compile.planning.choose_tiles import plan_attention


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", nargs="?", type=triple, default=(21, 45, 80))
    parser.add_argument("window", nargs="?", type=triple_or("auto", "full"), default="auto")
    parser.add_argument("--picture", metavar="FILE.png")
    args = parser.parse_args(arguments)

    plan = plan_attention(args.grid, args.window)
    tiling, window = plan.tiling, plan.window
    table = Table("axis", "tokens", "tiles", "tile sizes", "window in tiles")
    for axis, name in enumerate(("frames", "rows", "cols")):
        sizes = " ".join(map(str, tiling.sizes(axis)))
        kept_tiles = window.effective(tiling)[axis]
        table.add_row(name, str(args.grid[axis]), str(tiling.tiles[axis]), sizes, str(kept_tiles))
    console = Console()
    console.print(table)
    console.print(f"{plan.kept:.1%} of all (query, key) pairs are kept")
    if args.picture:
        draw_window(tiling, window).savefig(args.picture, dpi=150)
        console.print(f"wrote {args.picture}")


if __name__ == "__main__":
    with ends_in_a_line():
        main()
