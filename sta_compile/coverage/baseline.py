"""The stored coverage table, and whether a new result is worse than what it holds.

stored = load(path)          {(name, batch): Result}
worse(stored, new)           what got worse, in words; empty if nothing did
better(stored, new)          what got better, so that the stored table is out of date
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .examine import Result


def load(path: Path) -> dict[tuple[str, int], Result]:
    """By name and batch; each row is stored at its first grid with a batch of 1 and at its second with 2."""
    results = map(Result.of_dict, json.loads(path.read_text()))
    return {(result.name, result.batch): result for result in results}


def as_json(results: Sequence[Result]) -> str:
    """One result a line, so that a change reads well in a diff."""
    lines = ",\n".join(json.dumps(result.to_dict(), sort_keys=True) for result in results)
    return f"[\n{lines}\n]\n"


def worse(stored: Result, new: Result) -> list[str]:
    found = []
    if new.error and not stored.error:
        found.append(f"it fails: {new.error}")
    elif new.replaced < stored.replaced:
        lost = dict(new.missing).keys() - dict(stored.missing).keys()
        reasons = {reason for site, reason in new.missing if site in lost}
        found.append(f"{', '.join(sorted(lost))} replaced no more: {'; '.join(sorted(reasons))}")
    if _hinted(new) and not _hinted(stored) and stored.evidence:
        found.append(f"its grid was proved, and now is {', '.join(new.evidence)}")
    for site in sorted(set(new.surplus) - set(stored.surplus)):
        found.append(f"{site} is replaced, and is no self-attention over the grid")
    for site, grid in sorted(set(new.wrong_grid) - set(stored.wrong_grid)):
        found.append(f"{site} was given the grid {grid}")
    return found


def _hinted(result: Result) -> bool:
    return any(evidence.startswith("hinted") for evidence in result.evidence)


def better(stored: Result, new: Result) -> list[str]:
    found = []
    if stored.error and not new.error:
        found.append("it fails no more")
    if new.replaced > stored.replaced:
        found.append(f"{new.replaced} of {new.expected} replaced, {stored.replaced} before")
    if len(new.surplus) < len(stored.surplus) or len(new.wrong_grid) < len(stored.wrong_grid):
        found.append("wrong sites or grids are gone")
    return found
