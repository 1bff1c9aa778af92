"""The command `python -m sta_compile coverage`: examines rows one after the other, prints and writes the table."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .baseline import as_json
from .examine import Result, examine
from .table import as_markdown, as_table
from .zoo import rows

CASES = ((1, 0), (2, 1))  # (batch, which of the row's two grids)


def run(only: str = "") -> list[Result]:
    """Both cases of the rows whose name contains `only`; prints the table, and on the way which row is at work."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    results: list[Result] = []
    with quiet():
        for row in track(rows(only), "tracing", console=console, transient=True):
            results += [examine(row, batch, which) for batch, which in CASES]
    Console(width=None if sys.stdout.isatty() else 160).print(as_table(results))
    return results


def write(results: Sequence[Result], json: str | None, markdown: str | None) -> None:
    """Files as `docs/coverage.json` and `docs/coverage.md`."""
    import diffusers

    if json is not None:
        Path(json).write_text(as_json(results))
    if markdown is not None:
        Path(markdown).write_text(as_markdown(results, diffusers.__version__))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what models and Dynamo say of themselves; what fails stands in the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
