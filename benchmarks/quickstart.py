"""The quickstart over several seeds: what every expert gains, and what of it the merge keeps.

    python benchmarks/quickstart.py --seeds 0 1 2 3 4

All models are evaluated greedily too, and the cold start with 8 samples a problem: reinforcement
learning may do no more than make the likely answer likelier. Runs and evaluations that are already
finished under --runs-dir are only read. Writes benchmarks/quickstart.json, in which `solved` has a
digit for every problem of every model, and prints the Markdown tables of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from intervals import over_seeds, paired, row
from machine import measured

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"
# Beside the one sample at temperature 1 that every model has.
FURTHER = {
    "greedy": ["--temperature", "0"],
    "of_8": ["--stage", "cold_start", "--samples", "8"],
}

Solved = dict[str, dict[str, list[int]]]  # by model and domain: the right answers to each problem


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    seeds = {seed: measure(seed, arguments.runs_dir) for seed in arguments.seeds}
    path = HERE / "quickstart.json"
    made = measured(arguments.runs_dir / run_name(seed) for seed in seeds)
    path.write_text(json.dumps({**made, "seeds": seeds}, indent=1) + "\n")
    print(tables({seed: read(found["solved"]) for seed, found in seeds.items()}))
    print(
        "minutes:", ", ".join(f"{sum(found['minutes'].values()):.1f}" for found in seeds.values())
    )


def measure(seed: int, runs_dir: Path) -> dict[str, Any]:
    """A seed's run: `minutes` by stage, and by model and domain which problems are `solved`."""
    run = runs_dir / (name := run_name(seed))
    if not (run / "results.json").exists():
        braid("run", CONFIG, f"seed={seed}", "--name", name, runs_dir=runs_dir)
    results = json.loads((run / "results.json").read_text())
    folders = {"": run / "stages" / "evaluate"}
    folders |= {f" {name}": evaluation(run, name, flags) for name, flags in FURTHER.items()}
    solved = {}
    for suffix, folder in folders.items():
        for model in results["models"]:
            path = folder / "solved" / f"{model}.json"
            if path.exists():
                by_domain = json.loads(path.read_text())
                solved[model + suffix] = {d: "".join(map(str, of)) for d, of in by_domain.items()}
    return {
        "minutes": results["minutes"],
        "largest_mismatch": largest_mismatch(run),
        "solved": solved,
    }


def run_name(seed: int) -> str:
    """Of a seed's run."""
    return f"quickstart-seed-{seed}"


def evaluation(run: Path, name: str, flags: Sequence[str]) -> Path:
    """The folder of a further evaluation of the run, which is made where it is missing."""
    known = run / f"evaluated_{name}.json"
    if not known.exists():
        known.write_text(braid("evaluate", run.name, *flags, "--json", runs_dir=run.parent))
    return Path(json.loads(known.read_text())["results"]).parent


def braid(*arguments: object, runs_dir: Path) -> str:
    """What a command prints, with its progress on standard error."""
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    command += ["--runs-dir", str(runs_dir)]
    output = None if "--json" not in arguments else subprocess.PIPE
    finished = subprocess.run(command, check=True, stdout=output or sys.stderr, text=True)
    return finished.stdout or ""


def results_of(run: Path, config: Path, seed: int, problems: int) -> Any:
    """Return a run's results.json, after running the seed where it is missing."""
    if not (run / "results.json").exists():
        overrides = (f"seed={seed}", f"evaluation.problems={problems}", "logging.trackers=[]")
        braid("run", config, *overrides, "--name", run.name, runs_dir=run.parent)
    return json.loads((run / "results.json").read_text())


def largest_mismatch(run: Path) -> float:
    """Between engine and trainer over all refits of the run, in nats."""
    lines = [
        json.loads(line)
        for log in run.glob("stages/*/metrics.jsonl")
        for line in log.read_text().splitlines()
    ]
    return max(line["mismatch_max"] for line in lines if "mismatch_max" in line)


def read(solved: dict[str, dict[str, str]]) -> Solved:
    """What the file has as digits."""
    return {
        name: {domain: [int(digit) for digit in digits] for domain, digits in of_model.items()}
        for name, of_model in solved.items()
    }


def tables(seeds: dict[int, Solved]) -> str:
    """The tables of docs/results.md."""
    domains = list(next(iter(seeds.values()))["cold_start"])
    greedy = partial(gains, suffix=" greedy")
    return "\n\n".join(make(seeds, domains) for make in (gains, greedy, accuracies, kept))


def gains(seeds: dict[int, Solved], domains: Sequence[str], suffix: str = "") -> str:
    """What every expert gains over the cold start: of each seed on the same problems, and over the
    seeds."""
    heading = ["seed", *(f"{domain}: expert gains{suffix}" for domain in domains), "mean gain"]
    lines = [heading, ["---"] * len(heading)]
    points: dict[str, list[float]] = {domain: [] for domain in domains}
    for seed, solved in seeds.items():
        found = {
            d: paired(solved[f"experts.{d}{suffix}"][d], solved[f"cold_start{suffix}"][d])
            for d in domains
        }
        cells = [
            f"{100 * each.difference:+.1f} [{100 * each.low:.1f}, {100 * each.high:.1f}]"
            for each in found.values()
        ]
        for domain, each in found.items():
            points[domain].append(100 * each.difference)
        lines.append([str(seed), *cells, f"{mean(p[-1] for p in points.values()):+.1f}"])
    of_all = [mean(each) for each in zip(*points.values(), strict=True)]
    lines.append(["all", *map(over_seeds, points.values()), over_seeds(of_all)])
    return "\n".join(map(row, lines))


def accuracies(seeds: dict[int, Solved], domains: Sequence[str]) -> str:
    """Every model's, over the seeds."""
    lines = [["accuracy", *domains], ["---"] * (len(domains) + 1)]
    for name in next(iter(seeds.values())):
        lines.append([name, *over(seeds, name, domains, share)])
        if name.endswith("of_8"):
            lines.append(["cold_start pass@8", *over(seeds, name, domains, passed)])
    return "\n".join(map(row, lines))


def kept(seeds: dict[int, Solved], domains: Sequence[str]) -> str:
    """The merge's accuracy over that of each domain's expert, by seed and over the seeds."""
    shares = {
        domain: [
            sum(solved["merge"][domain]) / sum(solved[f"experts.{domain}"][domain])
            for solved in seeds.values()
        ]
        for domain in domains
    }
    lines = [["merge / expert", *domains], ["---"] * (len(domains) + 1)]
    for number, seed in enumerate(seeds):
        lines.append([str(seed), *(f"{shares[domain][number]:.3f}" for domain in domains)])
    lines.append(["all", *(over_seeds(each, ".3f") for each in shares.values())])
    return "\n".join(map(row, lines))


def over(
    seeds: dict[int, Solved],
    name: str,
    domains: Sequence[str],
    value: Callable[[str, list[int]], float],
) -> list[str]:
    """What a model is worth by domain, in percent: the mean over seeds and its interval."""
    return [
        over_seeds([100 * value(name, solved[name][domain]) for solved in seeds.values()], ".1f")
        for domain in domains
    ]


def share(name: str, solved: list[int]) -> float:
    """Of a model's answers those that are right."""
    return mean(solved) / (8 if name.endswith("of_8") else 1)


def passed(_name: str, solved: list[int]) -> float:
    """Of the problems those that any answer solves."""
    return mean(map(bool, solved))


if __name__ == "__main__":
    main()
