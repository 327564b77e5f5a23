"""Every way to merge six experts that interfere, over seeds.

    python benchmarks/merge_study.py [--seeds 0 1 2 3 4 5 6 7] [--runs-dir runs]

Each seed is a run of benchmarks/merge_study/merge_study.yaml: a cold start, an expert of each of
six domains, and the arms. The analysis, stated before the runs:

- The unit is the seed, 8 of them; intervals are Student's t, 95 %, over the seeds. The metric is
  the accuracy on PROBLEMS held-out problems of each domain, one response at temperature 1, the
  same problems for every model of a seed. Settings were tuned on seeds from 100 on: the domains,
  the steps, task arithmetic's lambda (0.25, 0.4, 0.6), and TIES' (0.5, 1.0) and density (0.2, 0.5).
- An arm makes one model out of the cold start. Arms are equal in sampled responses, counted from
  the cold start on with the experts' own: the arms that sample from the student or the experts
  (OPD, ExOPD, OPD with reward, rejection-sampled SFT) draw equally many after the experts, and
  mixed RL, which needs no experts, draws the sum. The table of tokens says how far equal responses
  are equal tokens. Merges of weights draw none after the experts, and could not use any.
- Headroom recovered, by seed and domain: (arm - cold start) / (own expert - cold start). A domain
  whose expert gains less than LEAST_HEADROOM points in a seed has no headroom there: that seed
  counts nowhere for that domain, and the report names it. An arm's mean is over domains, then
  over seeds; its worst domain is the lowest of its domains' means over seeds.
- Forgetting, by seed: the mean over domains of how far a model is below the cold start, in points,
  0 where it is above; of an expert over the five domains that are not its own.
- The best single expert is, in each seed, the one of the highest mean accuracy over the six
  domains, on the very problems that it is then reported on, which favours it.
- Each arm is compared with REFERENCE by the difference of mean headroom recovered, seed by seed: a
  win of the arm where the whole interval is above 0, a loss where it is below, else a tie. The
  intervals are not corrected for the number of arms.
- The aims: OPD or ExOPD recovers at least 95 % of the headroom on average and 90 % on every
  domain, by means over seeds; ExOPD is above its teachers on at least two domains, by intervals.
  Domains interfere where an expert loses on another domain, by the interval over seeds.

Writes benchmarks/merge_study/seeds/SEED.json, with the revision that ran the seed, and prints the
Markdown tables of docs/results.md. A seed that has its file is not run again, so that the seeds may
be run in several sessions; they must agree in all settings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from intervals import half_width, over_seeds, row
from machine import measured
from quickstart import evaluation, results_of

HERE = Path(__file__).parent
CONFIG = HERE / "merge_study" / "merge_study.yaml"
SEEDS = HERE / "merge_study" / "seeds"
PROBLEMS = 500
LEAST_HEADROOM = 5.0
START, REFERENCE = "cold_start", "opd"
EXPERT, BEST_EXPERT = "experts.", "best single expert"
# A stage of each arm, by its name in the tables.
ARMS = {
    "opd": "OPD, domains equal",
    "opd_tokens": "OPD, by tokens",
    "exopd": "ExOPD",
    "opd_reward": "OPD and reward",
    "mixed": "mixed RL",
    "rejection_sft": "rejection-sampled SFT",
    "average": "average",
    "average_recalibrated": "average, routers recalibrated",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "ram": "RAM",
}
ALONE = {"mixed"}  # arms that need no experts
FED_BY = {"rejection_sft": "collect"}  # blocks whose stages sample for an arm
# Beside the one sample at temperature 1 that every model has: of the cold start.
FURTHER = {
    "greedy": ["--stage", START, "--temperature", "0"],
    "of_8": ["--stage", START, "--samples", "8"],
}

Accuracies = dict[str, dict[str, float]]  # percent, by model and domain


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    found = [numbers_of(seed, arguments.runs_dir) for seed in arguments.seeds]
    check_alike(found)
    print(report(found))


def numbers_of(seed: int, runs_dir: Path) -> dict[str, Any]:
    """Return the numbers of a seed from its file, which is written where it is missing."""
    path = SEEDS / f"{seed}.json"
    if not path.exists():
        run = runs_dir / run_name(seed)
        numbers = measure(seed, runs_dir)
        numbers = {**measured([run]), "settings": settings_digest(run), **numbers}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    found: dict[str, Any] = json.loads(path.read_text())
    return {"seed": seed, **found}


def settings_digest(run: Path) -> str:
    """Return a digest of all settings of a run but its name and its seed."""
    settings = yaml.safe_load((run / "run.yaml").read_text())
    rest = {key: value for key, value in settings.items() if key not in ("name", "seed")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def check_alike(found: Sequence[dict[str, Any]]) -> None:
    """Raise SystemExit where seeds were run with unlike settings."""
    first = found[0]
    for each in found:
        if each["settings"] != first["settings"]:
            raise SystemExit(
                f"{SEEDS}: seeds {first['seed']} and {each['seed']} were run with different"
                " settings; delete the files of the old ones to run them again"
            )


def run_name(seed: int) -> str:
    """Return the name of a seed's run."""
    return f"merge-study-seed-{seed}"


def measure(seed: int, runs_dir: Path) -> dict[str, Any]:
    """Return a seed's minutes and sampled tokens by stage, and its models' accuracies."""
    run = runs_dir / run_name(seed)
    results = results_of(run, CONFIG, seed, PROBLEMS)
    further = {}
    for name, flags in FURTHER.items():
        found = json.loads((evaluation(run, name, flags) / "results.json").read_text())
        further[name] = found["models"][START]
    accuracies = {model: percents(scores) for model, scores in results["models"].items()}
    accuracies[f"{START}, greedy"] = percents(further["greedy"])
    accuracies[f"{START}, any of 8"] = percents(further["of_8"], "pass_at_k")
    return {
        "minutes": results["minutes"],
        "sampled_tokens": {
            name: sampled_tokens(run / "stages" / name) for name in results["minutes"]
        },
        "accuracies": accuracies,
    }


def percents(scores: dict[str, dict[str, float]], key: str = "accuracy") -> dict[str, float]:
    """Return one number of each domain's scores, in percent."""
    return {domain: 100 * score[key] for domain, score in scores.items()}


def sampled_tokens(stage: Path) -> int:
    """Return how many tokens of responses a stage drew, to train on or to collect."""
    path = stage / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return round(sum(line.get("sampled_tokens", 0) for line in lines))


def report(seeds: Sequence[dict[str, Any]]) -> str:
    """Return the tables of docs/results.md, and below them what the aims come to."""
    found = [Seed(each["accuracies"]) for each in seeds]
    arms = [arm for arm in (*ARMS, BEST_EXPERT) if arm in found[0].accuracies]
    parts = [
        accuracy_table(found),
        headroom_table(found, arms),
        forgetting_table(found, arms),
        expert_table(found),
        cost_table(seeds, arms),
        *aims(found),
    ]
    return "\n\n".join(parts)


class Seed:
    """The accuracies of a seed's models, with the best single expert among them."""

    def __init__(self, accuracies: Accuracies) -> None:
        self.domains = list(accuracies[START])
        experts = [accuracies[EXPERT + domain] for domain in self.domains]
        best = max(experts, key=lambda each: mean(each.values()))
        self.accuracies = {**accuracies, BEST_EXPERT: best}

    def gain(self, model: str, domain: str) -> float:
        """Return how many points a model is above the cold start."""
        return self.accuracies[model][domain] - self.accuracies[START][domain]

    def headroom(self, domain: str) -> float:
        """Return how many points a domain's own expert is above the cold start."""
        return self.gain(EXPERT + domain, domain)

    def recovered(self, arm: str, domain: str) -> float | None:
        """Return the percent of a domain's headroom that an arm recovers, if there is enough."""
        if self.headroom(domain) < LEAST_HEADROOM:
            return None
        return 100 * self.gain(arm, domain) / self.headroom(domain)

    def mean_recovered(self, arm: str) -> float:
        """Return the mean of the percents over the domains with headroom."""
        found = [self.recovered(arm, domain) for domain in self.domains]
        return mean(each for each in found if each is not None)

    def forgetting(self, model: str, own: str = "") -> float:
        """Return the mean loss against the cold start, over the domains other than `own`."""
        others = [domain for domain in self.domains if domain != own]
        return mean(max(0.0, -self.gain(model, domain)) for domain in others)


def accuracy_table(seeds: Sequence[Seed]) -> str:
    """Return every model's accuracy on every domain, and its mean, over the seeds."""
    domains = seeds[0].domains
    lines = [["%", *domains, "mean"], ["---"] * (len(domains) + 2)]
    for model in seeds[0].accuracies:
        cells = [[seed.accuracies[model][domain] for seed in seeds] for domain in domains]
        cells.append([mean(seed.accuracies[model].values()) for seed in seeds])
        lines.append([label(model), *(over_seeds(cell, ".1f") for cell in cells)])
    return "\n".join(map(row, lines))


def headroom_table(seeds: Sequence[Seed], arms: Sequence[str]) -> str:
    """Return the percent of headroom that each arm recovers, by domain, on average and at worst."""
    domains = seeds[0].domains
    ending = ["mean", "worst domain", f"mean less {label(REFERENCE)}", ""]
    lines = [["% of headroom", *domains, *ending], ["---"] * (len(domains) + 5)]
    for arm in arms:
        by_domain = {domain: of_domain(seeds, arm, domain) for domain in domains}
        less = [seed.mean_recovered(arm) - seed.mean_recovered(REFERENCE) for seed in seeds]
        worst = min((mean(each) for each in by_domain.values() if each), default=float("nan"))
        lines.append(
            [
                label(arm),
                *(over_seeds(each, ".0f") if each else "none" for each in by_domain.values()),
                over_seeds([seed.mean_recovered(arm) for seed in seeds], ".0f"),
                f"{worst:.0f}",
                *(("", "") if arm == REFERENCE else (over_seeds(less, "+.0f"), verdict(less))),
            ]
        )
    return "\n".join(map(row, lines))


def of_domain(seeds: Sequence[Seed], arm: str, domain: str) -> list[float]:
    """Return what an arm recovers of a domain in the seeds where that has headroom."""
    found = [seed.recovered(arm, domain) for seed in seeds]
    return [each for each in found if each is not None]


def forgetting_table(seeds: Sequence[Seed], arms: Sequence[str]) -> str:
    """Return how far each arm is below the cold start on average, and on its worst domain."""
    lines = [["points", "forgetting", "worst domain"], ["---"] * 3]
    for arm in arms:
        lowest = min(
            seeds[0].domains, key=lambda domain: mean(seed.gain(arm, domain) for seed in seeds)
        )
        gains = [seed.gain(arm, lowest) for seed in seeds]
        lost = [seed.forgetting(arm) for seed in seeds]
        lines.append([label(arm), over_seeds(lost, ".1f"), f"{lowest} {over_seeds(gains)}"])
    return "\n".join(map(row, lines))


def expert_table(seeds: Sequence[Seed]) -> str:
    """Return each expert's gain over the cold start on every domain, and what it forgets."""
    domains = seeds[0].domains
    lines = [["points", *domains, "forgetting"], ["---"] * (len(domains) + 2)]
    for own in domains:
        cells = [[seed.gain(EXPERT + own, domain) for seed in seeds] for domain in domains]
        lost = [seed.forgetting(EXPERT + own, own) for seed in seeds]
        lines.append([label(EXPERT + own), *map(over_seeds, cells), over_seeds(lost, ".1f")])
    return "\n".join(map(row, lines))


def cost_table(seeds: Sequence[dict[str, Any]], arms: Sequence[str]) -> str:
    """Return the tokens and minutes of each arm, with and without its experts' share."""
    lines = [["", "tokens of the arm", "with the experts'", "minutes of the arm"], ["---"] * 4]
    for arm in arms:
        if arm == BEST_EXPERT:
            continue
        own = [total(seed["sampled_tokens"], arm) for seed in seeds]
        experts = [0 if arm in ALONE else total(seed["sampled_tokens"], EXPERT) for seed in seeds]
        minutes = [total(seed["minutes"], arm) for seed in seeds]
        whole = [one + other for one, other in zip(own, experts, strict=True)]
        lines.append(
            [
                label(arm),
                f"{mean(own):,.0f}",
                f"{mean(whole):,.0f}",
                over_seeds(minutes, ".1f"),
            ]
        )
    return "\n".join(map(row, lines))


def total(by_stage: dict[str, float], arm: str) -> float:
    """Return the sum over an arm's stages, or over the experts."""
    first = FED_BY.get(arm, arm)
    return sum(
        value
        for stage, value in by_stage.items()
        if stage == arm or stage.startswith(EXPERT if arm == EXPERT else f"{first}.")
    )


def aims(seeds: Sequence[Seed]) -> list[str]:
    """Return what the aims of the study come to, one sentence each."""
    domains, found = seeds[0].domains, []
    for arm in ("opd", "exopd"):
        by_domain = [mean(each) for d in domains if (each := of_domain(seeds, arm, d))]
        average = mean(seed.mean_recovered(arm) for seed in seeds)
        reached = "reached" if average >= 95 and min(by_domain) >= 90 else "missed"
        found.append(
            f"{label(arm)}: {average:.0f} % of the headroom, {min(by_domain):.0f} % on the worst"
            f" domain; the aim of 95 and 90 is {reached}."
        )
    above = [
        domain
        for domain in domains
        if verdict([seed.gain("exopd", domain) - seed.headroom(domain) for seed in seeds]) == "win"
    ]
    found.append(
        f"ExOPD is above its teachers on {len(above)} domains ({', '.join(above) or 'none'});"
        f" the aim of two is {'reached' if len(above) >= 2 else 'missed'}."
    )
    losses = [
        f"{own} on {domain}"
        for own in domains
        for domain in domains
        if own != domain and verdict([seed.gain(EXPERT + own, domain) for seed in seeds]) == "loss"
    ]
    found.append(f"Experts that lose elsewhere: {', '.join(losses) or 'none'}.")
    narrow = [
        f"{domain} in {sum(seed.headroom(domain) < LEAST_HEADROOM for seed in seeds)} seeds"
        for domain in domains
        if any(seed.headroom(domain) < LEAST_HEADROOM for seed in seeds)
    ]
    found.append(f"Without headroom: {', '.join(narrow) or 'none'}.")
    return found


def verdict(differences: Sequence[float]) -> str:
    """Return what the interval over the seeds says of a difference."""
    half = half_width(differences) if len(differences) > 1 else float("inf")
    if mean(differences) - half > 0:
        return "win"
    return "loss" if mean(differences) + half < 0 else "tie"


def label(model: str) -> str:
    """Return a model's name in the tables."""
    return ARMS.get(model, model)


if __name__ == "__main__":
    main()
