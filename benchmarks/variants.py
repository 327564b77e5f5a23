"""What a setting does to learning: experts of one domain that differ in it alone, over seeds.

    python benchmarks/variants.py modes [--seeds 0 1 2] [--runs-dir runs]

All variants of a seed are grown from one cold start on `chain_sum`, train on as many samples and
make as many updates (dynamic sampling draws more than it trains on). What is compared is the mean
reward of all that the last steps drew, on prompts of the training split. Experts that are already
trained under --runs-dir are only read. Writes benchmarks/variants/NAME.json and prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from grpo_steps import logged, run
from machine import measured

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
LAST_STEPS = 10
STEPS = 50
TRAINED_A_STEP, GROUP_SIZE = 256, 8  # samples; of configs/domains/_base.yaml
COLD_START_SEQUENCES = 96  # a step, over all variants
# Student's t, the 97.5 % quantiles of so many degrees of freedom.
T_95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=1))

TOKEN = {"name": "token"}
# Gradients are clipped to one length here, and in those of an eighth of the samples the share of
# signal is sqrt(8) smaller: at a rate that is sqrt(8) smaller, eight move as far as one of all.
SEVERAL_UPDATES = {"updates_per_rollout": 8, "optimizer": {"learning_rate": 2.8}}
# Twice as many steps, each of half the size: a policy that is one step old is then less old.
SMALLER_STEPS = {"optimizer": {"learning_rate": 4.0}, "loop": {"steps": 2 * STEPS}}

# Those of a name are grown from one cold start.
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
        "gspo": {},
        "cispo": {"objective": {"ratio": {"name": "cispo"}, "aggregation": "token_mean"}},
        "gmpo": {"objective": {"ratio": {"name": "geometric"}}},
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
        "token_8": SEVERAL_UPDATES | {"objective": {"ratio": TOKEN}},
    },
    "modes": {
        "sync": {"rollout": {"mode": "sync"}},
        "overlap": {"rollout": {"mode": "overlap"}},
        "async_2": {"rollout": {"mode": "async", "max_staleness": 2}},
    },
    "modes_small_steps": {
        "sync": SMALLER_STEPS | {"rollout": {"mode": "sync"}},
        "overlap": SMALLER_STEPS | {"rollout": {"mode": "overlap"}},
    },
}


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    name = arguments.name
    seeds = {seed: measure(name, seed, arguments.runs_dir) for seed in arguments.seeds}
    steps = {each: steps_of(keys) for each, keys in VARIANTS[name].items()}
    report = {**measured(), "steps": steps, "seeds": seeds}
    (HERE / "variants").mkdir(exist_ok=True)
    (HERE / "variants" / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for alike in compared(name):
        print(table({seed: {each: found[each] for each in alike} for seed, found in seeds.items()}))
        print()


def steps_of(keys: dict[str, Any]) -> int:
    """How many a variant makes."""
    return int(keys.get("loop", {}).get("steps", STEPS))


def compared(name: str) -> list[list[str]]:
    """The variants of each table: those that make as many updates of a rollout."""
    tables: dict[int, list[str]] = {}
    for each, keys in VARIANTS[name].items():
        tables.setdefault(keys.get("updates_per_rollout", 1), []).append(each)
    return list(tables.values())


def measure(name: str, seed: int, runs_dir: Path) -> dict[str, Any]:
    """Of every variant what its expert logged in its first and its last steps."""
    run_name = f"variants-{name}-{seed}"
    stages = runs_dir / run_name / "stages"
    logs = {each: stages / f"experts.{each}" / "metrics.jsonl" for each in VARIANTS[name]}

    def done() -> bool:
        return all(len(logged(log)) == steps_of(VARIANTS[name][each]) for each, log in logs.items())

    if not done():
        runs_dir.mkdir(parents=True, exist_ok=True)
        config = runs_dir / f"{run_name}.json"
        config.write_text(json.dumps(configuration(name, run_name, seed), indent=1))
        run(config, runs_dir, done)
    return {each: summary(logged(log)) for each, log in logs.items()}


def configuration(name: str, run_name: str, seed: int) -> dict[str, Any]:
    """The quickstart's run with an expert for every variant, which ends after the experts."""
    variants = VARIANTS[name]
    shared = {
        "extends": str(CONFIGS / "domains" / "chain_sum.yaml"),
        "demonstrations": {"sequences_per_step": COLD_START_SEQUENCES // len(variants)},
        "loop": {"steps": STEPS},
    }
    quickstart = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    return quickstart | {
        "name": run_name,
        "seed": seed,
        "model": {"extends": str(CONFIGS / "models" / "tiny-moe.yaml")},
        "experts": {each: shared | keys for each, keys in variants.items()},
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy before and after, and what the steps between were like."""
    last = lines[-LAST_STEPS:]
    drawn = [drawn_in(line) for line in last]
    right = sum(line["reward"] * samples for line, samples in zip(last, drawn, strict=True))
    return {
        "first_reward": lines[0]["reward"],
        "last_reward": right / sum(drawn),
        "samples": sum(drawn),
        "drawn_a_step": mean(drawn_in(line) for line in lines),
        "staleness": mean(line["staleness_mean"] for line in lines),
    }


def drawn_in(line: dict[str, Any]) -> int:
    """How many samples a step drew, those of prompts that dynamic sampling replaced included."""
    return TRAINED_A_STEP + GROUP_SIZE * int(line["resampled_groups"])


def table(seeds: dict[int, dict[str, Any]]) -> str:
    """One row a variant: every seed, their mean, and how far it is from the first variant: the mean
    difference over seeds with its 95 % interval (Student's t)."""
    first, *_ = variants = list(next(iter(seeds.values())))
    each_seed = [f"seed {seed}" for seed in seeds]
    heading = ["variant", *each_seed, "mean", f"less {first}", "drawn a step"]
    lines = [heading, ["---"] * len(heading)]
    for each in variants:
        found = [results[each] for results in seeds.values()]
        accuracies = [f"{100 * one['last_reward']:.1f}" for one in found]
        points = [100 * (r[each]["last_reward"] - r[first]["last_reward"]) for r in seeds.values()]
        lines.append(
            [
                each,
                *accuracies,
                f"{100 * mean(one['last_reward'] for one in found):.1f}",
                "" if each == first else over_seeds(points),
                f"{mean(one['drawn_a_step'] for one in found):.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def over_seeds(points: list[float]) -> str:
    """The mean of as many seeds, and half of its 95 % interval where there are several."""
    if len(points) == 1:
        return f"{points[0]:+.1f}"
    half = T_95[len(points) - 1] * stdev(points) / len(points) ** 0.5
    return f"{mean(points):+.1f} ± {half:.1f}"


if __name__ == "__main__":
    main()
