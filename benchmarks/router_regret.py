"""How far from the best choice is the router's? On synthetic fields and on frozen activations of a trained model.

    python benchmarks/router_regret.py                         synthetic fields
    python benchmarks/router_regret.py --frozen acts.pt        and activations (`tier_errors.frozen` says in which form)

The oracle knows the true squared error of every pair. For a price, the router's choice has a cost and a true summed squared
error. Regret is that error over the oracle's at equal cost: `row` with the cost of each row of queries as the router has
it, `layer` with the layer's cost, which the oracle may spend on other rows. `error` is the router's relative error,
square root of the summed squared errors; `predicted` what it believes that to be.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tier_errors import GROUPS, Problem, frozen, synthetic, true_pairs
from torch import Tensor

from sta_compile.tiers.predict import Predicted
from sta_compile.tiers.router import Costs, choose_tiers, costs_of, error_of

COSTS = (0.08, 0.15, 0.3, 0.5)
FIELDS = ("smooth", "needles", "static", "heavy")
STEPS = 40  # of bisections over prices


def at_cost(known: Predicted, cost: Tensor, costs: Costs) -> Tensor:
    """Tiers of the lowest price of each row that costs no more. cost: [batch, heads, rows], or one number for the layer."""
    low, high = (known.skip.new_full((*known.skip.shape[:3], 1), x) for x in (-18.0, 6.0))
    for _ in range(STEPS):
        middle = (low + high) / 2
        spent = costs_of(choose(known, middle, costs), costs)
        over = (spent if cost.dim() else spent.mean().expand_as(spent)) > cost
        low = torch.where(over[..., None], middle, low)
        high = torch.where(over[..., None], high, middle)
    return choose(known, high, costs)


def choose(known: Predicted, log_price: Tensor, costs: Costs) -> Tensor:
    """`choose_tiers` with a price for each row: errors in units of it."""
    price = 10**log_price
    return choose_tiers(
        Predicted(known.skip / price, known.skim / price, known.log_skipped), 1.0, costs
    )


def judge(
    problem: Problem, costs: Costs, groups: tuple[int, int], every: int
) -> list[dict[str, Any]]:
    rows, blocks = problem.partitions(*groups, every)
    predicted = problem.predict(rows, blocks)
    true = true_pairs(problem, rows, blocks, predicted.log_skipped)
    found = []
    for cost in COSTS:
        tiers = at_cost(predicted, torch.tensor(cost), costs)
        spent, error = costs_of(tiers, costs), error_of(tiers, true)
        by_row = error_of(at_cost(true, spent, costs), true)
        by_layer = error_of(at_cost(true, spent.mean(), costs), true)
        found.append(
            {
                "problem": problem.name,
                "cost": float(spent.mean()),
                "row": float(error.sum() / by_row.sum()),
                "layer": float(error.sum() / by_layer.sum()),
                "error": float(error.mean().sqrt()),
                "predicted": float(error_of(tiers, predicted).mean().sqrt()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frozen", type=Path, help="activations")
    parser.add_argument("--fields", nargs="*", default=FIELDS)
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth row of queries")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    args = parser.parse_args()
    problems = [synthetic(kind) for kind in args.fields] + (
        frozen(args.frozen) if args.frozen else []
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("problem", "cost", "regret by row", "by layer", "error", "predicted")
    record = []
    for problem in problems:
        for row in judge(problem.to(device), Costs(), GROUPS, args.every):
            record.append(row)
            table.add_row(row["problem"], *(f"{row[x]:.3g}" for x in list(row)[1:]))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
