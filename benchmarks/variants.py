"""What a setting does to learning: experts of one domain that differ in it alone, over seeds.

    python benchmarks/variants.py objectives [--seeds 0 1 2 3 4] [--runs-dir runs]

All variants of a seed are grown from one cold start on `chain_sum` and train on the same number of
samples a step (dynamic sampling draws more than it trains on). The measure is the accuracy of the
last checkpoints on PROBLEMS held-out problems, the same for all; the unit is the seed, and the
interval Student's t over the seeds' differences to the first variant. No setting is chosen by these
numbers, so no seed is held back. A variant counts as no worse than the first where the whole
interval is above -MARGIN points, as better or worse where it does not contain 0.

Runs and evaluations that are already finished under --runs-dir are only read. Writes
benchmarks/variants/NAME.json and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from grpo_steps import logged
from intervals import over_seeds, row
from machine import measured
from quickstart import braid

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
MARGIN = 2.0  # points
PROBLEMS = 2000
STEPS = 50
TRAINED_A_STEP, GROUP_SIZE = 256, 8  # samples; of configs/domains/_base.yaml
COLD_START_SEQUENCES = 90  # a step, over all variants

TOKEN = {"name": "token"}
# Gradients are clipped to one length here, and in those of an eighth of the samples the share of
# signal is sqrt(8) smaller: at a rate that is sqrt(8) smaller, eight move as far as one of all.
SEVERAL_UPDATES: dict[str, Any] = {"updates_per_rollout": 8, "optimizer": {"learning_rate": 2.8}}
# GSPO's clip is for thousands of tokens: the geometric mean over 20 moves 14 times as far.
WIDE_CLIP = {"name": "sequence", "clip_low": 4e-3, "clip_high": 6e-3}
HALF_RATE = {"optimizer": {"learning_rate": 4.0}}
# With a core for the trainer and one for the engine, `overlap` and `async` make 1.3 to 1.5 times
# the steps a minute of `sync` (docs/explanation/rollouts.md): STEPS of them take less time than
# STEPS of `sync`, and these at least as long.
AS_LONG = {"loop": {"steps": 3 * STEPS // 2}}
ASYNC = {"rollout": {"max_steps_ahead": 2}}
OVERLAP = {"rollout": {"max_steps_ahead": 1}}

# All variants under one name grow from one cold start. GSPO and GMPO are not among the objectives:
# with one update a rollout they have the very gradient of `grpo`.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "objectives": {
        "grpo": {"objective": {"ratio": TOKEN}},
        "dr_grpo": {
            "objective": {
                "ratio": TOKEN,
                "advantage": {"name": "dr_grpo"},
                "aggregation": "constant",
            }
        },
        "dapo": {
            "objective": {"ratio": TOKEN, "aggregation": "token_mean"},
            "rollout": {"dynamic_sampling": 2},
        },
        "cispo": {"objective": {"ratio": {"name": "cispo"}, "aggregation": "token_mean"}},
        "rloo": {"objective": {"ratio": TOKEN, "advantage": {"name": "rloo"}}},
        "reinforce_pp": {
            "objective": {"ratio": TOKEN, "advantage": {"name": "reinforce_pp"}},
        },
        "ppo": {
            "objective": {
                "ratio": TOKEN,
                "advantage": {"name": "gae", "critic": {"optimizer": {"learning_rate": 1e-3}}},
                "aggregation": "token_mean",
            },
        },
        "gspo_8": SEVERAL_UPDATES,
        "gspo_8_wide": SEVERAL_UPDATES | {"objective": {"ratio": WIDE_CLIP}},
        "token_8": SEVERAL_UPDATES | {"objective": {"ratio": TOKEN}},
    },
    "modes": {
        "sync": {},
        "overlap": OVERLAP,
        "async_2": ASYNC,
        "overlap_as_long": OVERLAP | AS_LONG,
        "async_2_as_long": ASYNC | AS_LONG,
        "overlap_half_rate_as_long": OVERLAP | AS_LONG | HALF_RATE,
    },
}
# A core for the trainer and one for the engine, which work at once where the mode lets them.
OWN_CORES: dict[str, Any] = {"layout": {"ranks": 1}, "engine": {"placement": "own", "count": 1}}
PLACEMENT: dict[str, dict[str, dict[str, Any]]] = {"modes": OWN_CORES}


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    name = arguments.name
    seeds = {seed: measure(name, seed, arguments.runs_dir) for seed in arguments.seeds}
    made = measured(arguments.runs_dir / run_name(name, seed) for seed in seeds)
    report = {**made, "problems": PROBLEMS, "margin": MARGIN, "seeds": seeds}
    (HERE / "variants").mkdir(exist_ok=True)
    (HERE / "variants" / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for alike in compared(name):
        print(table({seed: {each: found[each] for each in alike} for seed, found in seeds.items()}))
        print()


def compared(name: str) -> list[list[str]]:
    """Return the variants of each table: those with the same number of updates a rollout."""
    tables: dict[int, list[str]] = {}
    for each, keys in VARIANTS[name].items():
        tables.setdefault(keys.get("updates_per_rollout", 1), []).append(each)
    return list(tables.values())


def measure(name: str, seed: int, runs_dir: Path) -> dict[str, Any]:
    """Of every variant its accuracy on held-out problems, and what its steps were like."""
    run = runs_dir / run_name(name, seed)
    if not (run / "results.json").exists():
        runs_dir.mkdir(parents=True, exist_ok=True)
        config = runs_dir / f"{run.name}.json"
        config.write_text(json.dumps(configuration(name, run.name, seed), indent=1))
        braid("run", config, runs_dir=runs_dir)
    held_out = run / "held_out.json"
    if not held_out.exists():  # all of them on the problems of one name
        same = ("--domain", next(iter(VARIANTS[name])), "--problems", PROBLEMS)
        held_out.write_text(braid("evaluate", run.name, *same, "--json", runs_dir=runs_dir))
    models = json.loads(held_out.read_text())["models"]
    [before] = models["cold_start"].values()
    found = {"cold_start": {"accuracy": before["accuracy"]}}
    for each in VARIANTS[name]:
        [score] = models[f"experts.{each}"].values()
        lines = logged(run / "stages" / f"experts.{each}" / "metrics.jsonl")
        found[each] = {"accuracy": score["accuracy"], **summary(lines)}
    return found


def run_name(name: str, seed: int) -> str:
    """Of a seed's run of the variants of a name."""
    return f"variants-{name}-{seed}"


def configuration(name: str, run_name: str, seed: int) -> dict[str, Any]:
    """The quickstart's run with an expert for every variant and no merge."""
    variants = VARIANTS[name]
    shared = {
        "extends": str(CONFIGS / "domains" / "chain_sum.yaml"),
        "demonstrations": {"sequences_per_step": COLD_START_SEQUENCES // len(variants)},
        "loop": {"steps": STEPS},
    }
    quickstart = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    placement = {
        block: quickstart[block] | keys if block == "engine" else keys
        for block, keys in PLACEMENT.get(name, {}).items()
    }
    return {
        **quickstart,
        **placement,
        "extends": str(CONFIGS / quickstart["extends"]),
        "name": run_name,
        "seed": seed,
        "model": {"extends": str(CONFIGS / "models" / "tiny-moe.yaml")},
        "domains": {each: shared | keys for each, keys in variants.items()},
        "stages": quickstart["stages"] | {"merge": None, "export": None},
        "evaluation": {"problems": 2},  # of every model on every domain, which are all the same
        "logging": {"trackers": []},
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What an expert's steps were like."""
    seconds = [after["time"] - before["time"] for before, after in pairwise(lines)]
    return {
        "steps": len(lines),
        "minutes": round((lines[-1]["time"] - lines[0]["time"]) / 60, 3),
        "steps_a_minute": round(60 / median(seconds), 2),
        "first_reward": lines[0]["reward"],
        "last_reward": mean(line["reward"] for line in lines[-10:]),
        "drawn_a_step": mean(drawn_in(line) for line in lines),
        "staleness": mean(line["staleness_mean"] for line in lines),
        "clip_fraction": mean(line.get("clip_fraction", 0.0) for line in lines),
    }


def drawn_in(line: dict[str, Any]) -> int:
    """How many samples a step drew, those of prompts that dynamic sampling replaced included."""
    return TRAINED_A_STEP + GROUP_SIZE * int(line["resampled_groups"])


def table(seeds: dict[int, dict[str, Any]]) -> str:
    """One row a variant: every seed's accuracy in percent, their mean, how far it is from the first
    variant over the seeds, and its steps, minutes and clipped share."""
    first, *_ = variants = list(next(iter(seeds.values())))
    heading = ["variant", *(f"seed {seed}" for seed in seeds), "mean", f"less {first}"]
    heading += ["drawn a step", "steps", "minutes", "clipped"]
    lines = [row(heading), row(["---"] * len(heading))]
    for each in variants:
        found = [results[each] for results in seeds.values()]
        points = [100 * (r[each]["accuracy"] - r[first]["accuracy"]) for r in seeds.values()]
        lines.append(
            row(
                [
                    each,
                    *(f"{100 * one['accuracy']:.1f}" for one in found),
                    f"{100 * mean(one['accuracy'] for one in found):.1f}",
                    "" if each == first else over_seeds(points),
                    f"{mean(one['drawn_a_step'] for one in found):.0f}",
                    f"{found[0]['steps']}",
                    f"{mean(one['minutes'] for one in found):.2f}",
                    f"{mean(one['clip_fraction'] for one in found):.1%}",
                ]
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
