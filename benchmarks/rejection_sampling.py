"""What the rejection-sampled SFT stage of R1 gains over the RL stage before it, over seeds.

    python benchmarks/rejection_sampling.py [--seeds 0 1 2 3 4] [--runs-dir runs]

Each seed is a whole run of configs/recipes/r1-small.yaml. The analysis, stated before the runs:

- the unit is the seed; the metric is the accuracy on PROBLEMS held-out problems of each domain,
  one response at temperature 1, and its mean over the domains;
- the question is `sft` less `reasoning`: the base, fine-tuned on the right answers that `collect`
  kept of `reasoning`, against `reasoning` itself. A baseline of equal cost is `cold_start`: the
  same base, optimizer and number of steps, on the domains' own demonstrations. `final` less
  `reasoning` says what both later stages bring together;
- the interval is Student's t, 95 %, over the seeds' differences. It is a gain where the whole
  interval is above 0, a loss where it is below, and otherwise no difference is shown. No setting
  was chosen by these numbers.

Runs that are already finished under --runs-dir are only read. Writes
benchmarks/rejection_sampling.json and prints the Markdown tables of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from intervals import half_width, over_seeds, row
from machine import measured
from quickstart import results_of

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "recipes" / "r1-small.yaml"
PROBLEMS = 1000
MODELS = ("base", "zero", "cold_start", "reasoning", "sft", "final")
COMPARED = (("sft", "reasoning"), ("sft", "cold_start"), ("sft", "base"), ("final", "reasoning"))

Accuracies = dict[str, dict[str, float]]  # percent, by model and domain


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    seeds = {seed: measure(seed, arguments.runs_dir) for seed in arguments.seeds}
    made = measured(arguments.runs_dir / run_name(seed) for seed in seeds)
    path = HERE / "rejection_sampling.json"
    path.write_text(json.dumps({**made, "problems": PROBLEMS, "seeds": seeds}, indent=1) + "\n")
    accuracies = [found["accuracies"] for found in seeds.values()]
    print(of_models(accuracies), differences(accuracies), sep="\n\n")


def run_name(seed: int) -> str:
    """Return the name of a seed's run."""
    return f"r1-small-seed-{seed}"


def measure(seed: int, runs_dir: Path) -> dict[str, Any]:
    """Return a seed's minutes by stage, accuracies, and what `collect` sampled and kept."""
    run = runs_dir / run_name(seed)
    results = results_of(run, CONFIG, seed, PROBLEMS)
    return {
        "minutes": results["minutes"],
        "accuracies": {
            model: {domain: 100 * score["accuracy"] for domain, score in scores.items()}
            for model, scores in results["models"].items()
        },
    }


def of_models(seeds: Sequence[Accuracies]) -> str:
    """Return the table of accuracies: means over the seeds, with their intervals."""
    domains = list(seeds[0]["base"])
    lines = [["%", *domains, "mean"], ["---"] * (len(domains) + 2)]
    for model in MODELS:
        cells = [[seed[model][domain] for seed in seeds] for domain in domains]
        cells.append([mean(seed[model].values()) for seed in seeds])
        lines.append([f"`{model}`", *(over_seeds(cell, ".1f") for cell in cells)])
    return "\n".join(map(row, lines))


def differences(seeds: Sequence[Accuracies]) -> str:
    """Return the table of differences in points, of each domain and of their mean."""
    domains = list(seeds[0]["base"])
    lines = [["points", *domains, "mean", "of the mean"], ["---"] * (len(domains) + 3)]
    for after, before in COMPARED:
        of_seeds = [
            [seed[after][domain] - seed[before][domain] for domain in domains] for seed in seeds
        ]
        cells = [*zip(*of_seeds, strict=True), tuple(map(mean, of_seeds))]
        lines.append(
            [
                f"`{after}` less `{before}`",
                *(over_seeds(cell) for cell in cells),
                verdict(cells[-1]),
            ]
        )
    return "\n".join(map(row, lines))


def verdict(values: Sequence[float]) -> str:
    """Return what the interval over the seeds says."""
    half = half_width(values) if len(values) > 1 else float("inf")
    if mean(values) - half > 0:
        return "a gain"
    return "a loss" if mean(values) + half < 0 else "no difference shown"


if __name__ == "__main__":
    main()
