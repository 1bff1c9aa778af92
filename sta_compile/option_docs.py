"""The table of options as a page (docs/options.md) and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import OPTIONS, PROCESS_OPTIONS, env_name

if TYPE_CHECKING:
    from rich.table import Table


def as_markdown() -> str:
    lines = [
        "# Options",
        "",
        'Pass them as `torch.compile(model, backend="sta", options={"window": (18, 24, 24)})`, set '
        "them for the process as `sta_compile.config.window = (18, 24, 24)`, or in the environment "
        "as `STA_WINDOW=18,24,24`; the first of these that has a value counts. Inductor's own "
        "options may stand in the same dict. The last three are for the whole process: `torch.compile` does not take "
        "them.",
        "",
        "| option | default | takes | meaning | environment |",
        "|---|---|---|---|---|",
    ]
    for name, row in (OPTIONS | PROCESS_OPTIONS).items():
        cells = (f"`{name}`", f"`{shown(row.default)}`", row.metadata["takes"])
        lines.append(f"| {' | '.join(cells)} | {row.metadata['doc']} | `{env_name(name)}` |")
    return "\n".join(lines) + "\n"


def as_table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("option", "default", "takes", "meaning"):
        table.add_column(column, ratio=3 if column == "meaning" else None)
    for name, row in (OPTIONS | PROCESS_OPTIONS).items():
        table.add_row(name, shown(row.default), row.metadata["takes"], row.metadata["doc"])
    return table


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
