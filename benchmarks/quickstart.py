"""The quickstart over several seeds: what every expert gains, and what of it the merge keeps.

    python benchmarks/quickstart.py --seeds 0 1 2

Runs that are already finished under --runs-dir are only read. Writes the numbers as JSON beside
this file and prints them as the Markdown tables of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from machine import measured

from stages.statistics import Accuracy, difference

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"

Models = dict[str, dict[str, dict[str, Any]]]


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    runs = {seed: run(seed, arguments.runs_dir) for seed in arguments.seeds}
    report = {
        **measured(),
        "seeds": {str(seed): summarise(results) for seed, results in runs.items()},
        "runs": {str(seed): results for seed, results in runs.items()},
    }
    (HERE / "quickstart.json").write_text(json.dumps(report, indent=1) + "\n")
    print(tables(runs))


def run(seed: int, runs_dir: Path) -> dict[str, Any]:
    """The results.json of the quickstart with this seed."""
    name = f"quickstart-seed-{seed}"
    results = runs_dir / name / "results.json"
    if not results.exists():
        command = [sys.executable, "-m", "pipeline.cli", "run", str(CONFIG), f"seed={seed}"]
        subprocess.run(
            [*command, "--name", name, "--runs-dir", str(runs_dir)], check=True, cwd=Path.cwd()
        )
    return json.loads(results.read_text())


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Gains in points with 95 % intervals, and the merge as a share of each expert."""
    models: Models = results["models"]
    domains = list(models["cold_start"])
    kept = {domain: merge_share(models, domain) for domain in domains}
    gains = {domain: gain(models, domain) for domain in domains}
    return {
        "gains": gains,
        "mean_gain": mean(points for points, _, _ in gains.values()),
        "merge_over_expert": kept,
        "mean_merge_over_expert": mean(kept.values()),
        "minutes": sum(results["minutes"].values()),
    }


def gain(models: Models, domain: str) -> tuple[float, float, float]:
    """What the domain's expert gained over the cold start there: points, low, high."""
    found = difference(
        Accuracy(**models[f"experts.{domain}"][domain]), Accuracy(**models["cold_start"][domain])
    )
    return 100 * found.difference, 100 * found.low, 100 * found.high


def merge_share(models: Models, domain: str) -> float:
    """The merge's accuracy over that of the domain's own expert."""
    own = models[f"experts.{domain}"][domain]["accuracy"]
    return float(models["merge"][domain]["accuracy"] / own)


def tables(runs: dict[int, dict[str, Any]]) -> str:
    """The two tables of docs/results.md."""
    domains = list(next(iter(runs.values()))["models"]["cold_start"])
    names = list(next(iter(runs.values()))["models"])
    gained = [f"{domain}: expert gains" for domain in domains]
    heading = ["seed", *gained, "mean gain", "merge / expert (lowest)", "minutes"]
    lines = [row(heading), row(["---"] * len(heading))]
    for seed, results in runs.items():
        found = summarise(results)
        gains = [f"{p:+.1f} [{low:.1f}, {high:.1f}]" for p, low, high in found["gains"].values()]
        kept = found["merge_over_expert"]
        share = f"{found['mean_merge_over_expert']:.3f} ({min(kept.values()):.3f})"
        mean_gain = f"{found['mean_gain']:+.1f}"
        lines.append(row([str(seed), *gains, mean_gain, share, f"{found['minutes']:.1f}"]))
    lines += ["", row(["model (mean of seeds)", *domains]), row(["---"] * (len(domains) + 1))]
    for name in names:
        scores = [
            f"{mean(100 * r['models'][name][domain]['accuracy'] for r in runs.values()):.1f}"
            for domain in domains
        ]
        lines.append(row([name, *scores]))
    return "\n".join(lines)


def row(cells: list[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
