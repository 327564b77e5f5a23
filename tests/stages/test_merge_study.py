"""The arithmetic of benchmarks/merge_study.py, on accuracies whose results are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.runs import REPOSITORY

DOMAINS = ("sum", "sort")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import merge_study

    return merge_study


def accuracies(**models: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Return accuracies of a cold start at 20, experts 20 points above it, and some models."""
    given = {
        "cold_start": (20.0, 20.0),
        "experts.sum": (40.0, 10.0),
        "experts.sort": (20.0, 40.0),
        **models,
    }
    return {model: dict(zip(DOMAINS, values, strict=True)) for model, values in given.items()}


def test_headroom_is_0_at_the_cold_start_and_100_at_each_domain_s_own_expert(
    study: ModuleType,
) -> None:
    seed = study.Seed(accuracies(opd=(40.0, 40.0), exopd=(50.0, 35.0), ties=(10.0, 30.0)))
    recovered = {
        arm: [seed.recovered(arm, domain) for domain in DOMAINS]
        for arm in ("cold_start", "opd", "exopd", "ties", study.BEST_EXPERT)
    }
    assert recovered == {
        "cold_start": [0, 0],
        "opd": [100, 100],
        "exopd": [150, 75],
        "ties": [-50, 50],
        study.BEST_EXPERT: [0, 100],  # sort's has the higher mean, 30 against 25
    }
    assert seed.mean_recovered("ties") == 0
    assert seed.forgetting("ties") == 5  # 10 points on one domain of two
    assert seed.forgetting("experts.sum", "sum") == 10  # on the only other one
    assert seed.forgetting("experts.sort", "sort") == 0


def test_a_domain_whose_expert_gains_little_has_no_headroom_to_recover(study: ModuleType) -> None:
    less = 20 + study.LEAST_HEADROOM - 0.1
    seed = study.Seed(accuracies(**{"experts.sum": (less, 10.0)}, opd=(80.0, 30.0)))
    assert seed.recovered("opd", "sum") is None
    assert seed.mean_recovered("opd") == seed.recovered("opd", "sort") == 50
    other = study.Seed(accuracies(opd=(30.0, 30.0)))
    assert study.of_domain([seed, other], "opd", "sum") == [50]
    table = study.headroom_table([seed, other], ["opd"])
    assert table.splitlines()[-1].startswith("| OPD, domains equal | 50 | 50 ± 0 | 50 ± 0 | 50 |")
    assert "Without headroom: sum in 1 seeds." in study.aims(
        [study.Seed(each.accuracies | {"exopd": each.accuracies["opd"]}) for each in (seed, other)]
    )


def test_wins_and_losses_are_whole_intervals_over_seeds(study: ModuleType) -> None:
    assert study.verdict([1.0, 2.0, 1.5]) == "win"
    assert study.verdict([-1.0, -2.0, -1.5]) == "loss"
    assert study.verdict([-1.0, 2.0, 1.5]) == study.verdict([5.0]) == "tie"


def test_the_aims_name_the_experts_that_lose_and_those_that_are_surpassed(
    study: ModuleType,
) -> None:
    seeds = [
        study.Seed(accuracies(opd=(39.0 + n, 39.0), exopd=(44.0 + n, 42.0 - 2 * n)))
        for n in (0.0, 0.5, 1.0)
    ]
    first, second, third, fourth, _ = study.aims(seeds)
    assert first.startswith("OPD, domains equal: 96 % of the headroom, 95 % on the worst domain;")
    assert first.endswith("is reached.")
    assert second.startswith("ExOPD: 114 % of the headroom, 105 % on the worst")
    assert third == "ExOPD is above its teachers on 1 domains (sum); the aim of two is missed."
    assert fourth == "Experts that lose elsewhere: sum on sort."


def test_a_finished_seed_is_only_read(study: ModuleType, tmp_path: Path) -> None:
    def scores(**numbers: float) -> dict[str, Any]:
        return {"cold_start": dict.fromkeys(DOMAINS, numbers)}

    run = tmp_path / study.run_name(3)
    stage = run / "stages" / "cold_start"
    stage.mkdir(parents=True)
    (stage / "manifest.json").write_text('{"settings": {}}')
    found = {"minutes": {"cold_start": 1.5}, "models": scores(accuracy=0.25)}
    (run / "results.json").write_text(json.dumps(found))
    for name, numbers in (
        ("greedy", {"accuracy": 0.5}),
        ("of_8", {"accuracy": 0.3, "pass_at_k": 0.75}),
    ):
        path = run / "evaluations" / name / "results.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"models": scores(**numbers)}))
        (run / f"evaluated_{name}.json").write_text(json.dumps({"results": str(path)}))
    assert study.measure(3, tmp_path) == {
        "minutes": {"cold_start": 1.5},
        "sampled_tokens": {"cold_start": 0},
        "accuracies": {
            "cold_start": {"sum": 25, "sort": 25},
            "cold_start, greedy": {"sum": 50, "sort": 50},
            "cold_start, any of 8": {"sum": 75, "sort": 75},
        },
    }


def test_a_seed_that_has_its_file_needs_no_run(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / study.run_name(3)
    stage = run / "stages" / "cold_start"
    stage.mkdir(parents=True)
    (stage / "manifest.json").write_text(json.dumps({"code": 40 * "a", "versions": {}}))
    (run / "run.yaml").write_text("{name: study, seed: 3, domains: {}}")
    measured = {"accuracies": accuracies(), "minutes": {}, "sampled_tokens": {}}
    monkeypatch.setattr(study, "measure", lambda seed, runs_dir: measured)
    monkeypatch.setattr(study, "SEEDS", tmp_path / "seeds")
    found = study.numbers_of(3, tmp_path)
    assert (found["seed"], found["revision"]) == (3, 7 * "a")
    monkeypatch.setattr(study, "measure", None)
    assert study.numbers_of(3, tmp_path / "moved away") == found


def test_seeds_of_other_settings_are_refused(study: ModuleType, tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(study.settings_digest(tmp_path))

    first, second = digest("{name: a, seed: 0, loop: 1}"), digest("{name: b, seed: 1, loop: 1}")
    other = digest("{name: b, seed: 1, loop: 2}")
    study.check_alike([{"seed": 0, "settings": first}, {"seed": 1, "settings": second}])
    with pytest.raises(SystemExit, match="seeds 0 and 1 were run with different settings"):
        study.check_alike([{"seed": 0, "settings": first}, {"seed": 1, "settings": other}])


def test_the_report_has_every_model_and_what_each_arm_costs(study: ModuleType) -> None:
    tokens = {"experts.sum": 10, "experts.sort": 20, "opd": 5, "mixed": 35, "collect.sum": 4}
    seeds = [
        {
            "minutes": dict.fromkeys([*tokens, "rejection_sft"], 0.5),
            "sampled_tokens": tokens,
            "accuracies": accuracies(
                **dict.fromkeys(("opd", "exopd", "mixed", "rejection_sft"), (38.0 + n, 39.0))
            ),
        }
        for n in range(3)
    ]
    report = study.report(seeds)
    assert report.count("| OPD, domains equal |") == 4
    assert "| OPD, domains equal | 5 | 35 | 0.5 ± 0.0 |" in report
    assert "| mixed RL | 35 | 35 | 0.5 ± 0.0 |" in report
    assert "| rejection-sampled SFT | 4 | 34 | 1.0 ± 0.0 |" in report
    assert "| experts.sum | +20.0 ± 0.0 | -10.0 ± 0.0 | 10.0 ± 0.0 |" in report
    assert "| experts.sum | 40.0 ± 0.0 | 10.0 ± 0.0 | 25.0 ± 0.0 |" in report


def test_sampled_tokens_are_of_all_steps(study: ModuleType, tmp_path: Path) -> None:
    def stage(name: str, *lines: dict[str, float]) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return directory

    assert study.sampled_tokens(stage("mixed", *({"sampled_tokens": n} for n in (132, 108)))) == 240
    assert study.sampled_tokens(stage("cold_start", {"loss": 1.0})) == 0
    tokens = {"collect.sum": 1, "collect.sort": 2, "rejection_sft": 0, "experts.sum": 4, "opd": 8}
    assert [study.total(tokens, arm) for arm in ("rejection_sft", "experts.", "opd")] == [3, 4, 8]
