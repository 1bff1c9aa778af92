"""Error against cost of sparse and low-precision attention on frozen activations, and of tiers among them.

    python benchmarks/tier_methods.py acts.pt --json methods.json      (acts.pt: freeze_activations.py)

Each method has one knob, the same for all layers and steps. Cost is a share of dense 16-bit attention: by the measured
costs of a key block in each tier (sta_compile/tiers/router.py). Error is that of the output, relative, root mean square over
layers and steps. All of them round as the kernels do.

    window          STA: tiles outside of the window are dropped
    window + means  and these are skipped by means and slope instead
    fp8             all blocks in e4m3
    top-k           the k blocks of largest pooled score of each row of queries, others are dropped (SpargeAttn's idea)
    top-k + means   others are skipped by their means
    means           16 bit or means, by the router
    tiers           16 bit, e4m3 or means and slope, by the router
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tier_errors import Problem, frozen
from torch import Tensor

from sta_compile.ir.window import Window
from sta_compile.tiers.attention import Tier
from sta_compile.tiers.inside import inside_window
from sta_compile.tiers.predict import Predicted
from sta_compile.tiers.router import Costs, choose_tiers, costs_of
from sta_compile.tiers.statistics import Partition, key_statistics

WINDOWS = ((1, 1, 1), (1, 3, 3), (3, 3, 3), (3, 4, 5))
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
PRICES = tuple(10 ** (x / 2) for x in range(-10, 2))


def choices(
    problem: Problem, rows: Partition, blocks: Partition, predicted: Predicted, costs: Costs
) -> Iterator[tuple[str, str, Tensor]]:
    """(method, knob, tiers [heads, rows, blocks])"""
    shape = predicted.skip[0].shape

    def otherwise(kept: Tensor, tier: Tier) -> Tensor:
        return torch.where(kept, int(Tier.REFINE), int(tier)).expand(shape)

    windows = tuple(map(Window, WINDOWS))
    inside = inside_window(problem.tiling, windows, rows.runs, blocks.runs)
    for window, kept in zip(WINDOWS, inside, strict=True):
        yield "window", f"{window}", otherwise(kept, Tier.DROP)
        yield "window + means", f"{window}", otherwise(kept, Tier.SKIP)
    yield "fp8", "", torch.full(shape, int(Tier.SKIM), device=problem.q.device)
    pooled = torch.stack([pooled_scores(problem, head, rows, blocks) for head in range(shape[0])])
    rank = pooled.argsort(-1, descending=True).argsort(-1)
    for share in SHARES:
        kept = rank < max(1, round(share * shape[-1]))
        yield "top-k", f"{share:.0%}", otherwise(kept, Tier.DROP)
        yield "top-k + means", f"{share:.0%}", otherwise(kept, Tier.SKIP)
    two = replace(predicted, skim=torch.full_like(predicted.skim, torch.inf))
    for price in PRICES:
        yield "means", f"{price:.1e}", choose_tiers(two, price, costs)[0]
        yield "tiers", f"{price:.1e}", choose_tiers(predicted, price, costs)[0]


def pooled_scores(problem: Problem, head: int, rows: Partition, blocks: Partition) -> Tensor:
    q, k = (
        torch.stack([x[head, start : start + n].mean(0) for start, n in part.runs.tolist()])
        for x, part in ((problem.q, rows), (problem.k, blocks))
    )
    return q @ k.mT


PLAIN = {"top-k + means", "means"}  # without slope and gain


def measure(problem: Problem, costs: Costs, every: int) -> list[dict[str, Any]]:
    rows, blocks = problem.partitions(every=every)
    predicted = problem.predict(rows, blocks)
    tried = list(choices(problem, rows, blocks, predicted, costs))
    wrong: dict[tuple[str, str], Tensor] = defaultdict(
        lambda: torch.zeros((), device=problem.q.device)
    )
    size = torch.zeros((), device=problem.q.device)
    means = key_statistics(problem.k[None], problem.v[None], blocks).mean_v[0].bfloat16().float()
    gains = predicted.log_skipped - blocks.lengths.log()
    for place, row in problem.rows(rows, blocks, predicted.log_skipped):
        size += row.exact.square().sum()
        full = row.skipped
        mass = full[1] * (-gains[place]).exp()
        plain = mass[..., None] * means[place[1]], mass
        for method, knob, tiers in tried:
            row.skipped = plain if method in PLAIN else full
            error = row.read(tiers[place[1:]]) - row.exact
            wrong[method, knob] += error.square().sum()
    return [
        {
            "problem": problem.name,
            "method": method,
            "knob": knob,
            "cost": float(costs_of(tiers, costs).mean()),
            "error": float((wrong[method, knob] / size).sqrt()),
        }
        for method, knob, tiers in tried
    ]


def means_of(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over problems: mean cost, root mean square error."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in record:
        groups[row["method"], row["knob"]].append(row)
    return [
        {
            "method": method,
            "knob": knob,
            "cost": sum(row["cost"] for row in rows) / len(rows),
            "error": (sum(row["error"] ** 2 for row in rows) / len(rows)) ** 0.5,
        }
        for (method, knob), rows in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("frozen", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth row of queries")
    parser.add_argument("--names", nargs="*", help="of layers and steps; all if not given")
    parser.add_argument("--json", type=Path, help="where to write the numbers of each problem")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: list[dict[str, Any]] = []
    for problem in frozen(args.frozen):
        if args.names and problem.name not in args.names:
            continue
        record += measure(problem.to(device), Costs(), args.every)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    table = Table("method", "knob", "cost", "error")
    for row in sorted(means_of(record), key=lambda row: (row["method"], row["cost"])):
        table.add_row(row["method"], row["knob"], f"{row['cost']:.3f}", f"{row['error']:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
