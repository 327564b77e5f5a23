"""Evaluation: every model by its own weights, on problems that nothing else has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from parallel.checkpoint import load
from parallel.model.policy import Policy
from stages.data.prompts import held_out_problems
from stages.data.tokenizer import load_tokenizer
from stages.domains import DomainEvaluationSettings, SamplingSettings
from stages.kinds.evaluate import work as evaluate
from stages.kinds.evaluate.settings import EvaluationSettings
from stages.rewards.reward import RewardError, RewardPoolSettings
from stages.sampling.logprob_check import MismatchError
from stages.sampling.sample_files import read_samples
from stages.settings import LoggingSettings, StageJob
from tests.fake_engines import FakeEngine, RefittedFleet, toy_domain, toy_job, toy_run
from tests.stages.toys import measuring

pytestmark = pytest.mark.usefixtures("one_rank")

MODELS = {"cold_start": 1, "experts.sums": 2, "merge": 3}  # what each one's weights are made of
SPLITS: list[str] = []  # of the problems that were asked for


class WatchedFleet(RefittedFleet):
    """Remembers whose weights the engines were given."""

    given: ClassVar[list[float]] = []

    def refit(self, policy: Policy, version: int) -> dict[str, float]:
        self.given.append(next(iter(policy.named_weights().values())).flatten()[0].item())
        return super().refit(policy, version)


@torch.no_grad()
def load_named(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a checkpoint, which the folder's name says."""
    for weight in policy.named_weights().values():
        weight.fill_(MODELS[checkpoint.name] / 100)
    policy.weights_changed()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    held_out = evaluate.held_out_problems

    def asked(*given: Any) -> Any:
        SPLITS.append(given[-1])
        return held_out(*given)

    WatchedFleet.given.clear()
    SPLITS.clear()
    monkeypatch.setattr(evaluate, "held_out_problems", asked)
    monkeypatch.setattr("stages.sampling.engines.Fleet", WatchedFleet)
    monkeypatch.setattr(load, "weights", load_named)
    yield


def job(
    directory: Path,
    function: str = "parity",
    bound: float = 1e9,
    failed: float = 0.9,
    samples_per_problem: int = 1,
    sampling_seed: int = 1,
    auditable: bool = False,
    **given: Any,
) -> StageJob:
    reward = {
        "kind": "python",
        "function": f"tests.stages.small_rewards:{function}",
        "unfinished": "score",
    }
    settings = toy_run(bound, sums=toy_domain(rewards={"odd": reward})).model_copy(
        update={
            "evaluation": EvaluationSettings(
                problems=40, samples_per_problem=samples_per_problem, sampling_seed=sampling_seed
            ),
            "rewards": RewardPoolSettings(workers=1, max_failed_fraction=failed),
            "logging": LoggingSettings(trackers=(), auditable=auditable),
        }
    )
    models = {name: directory / name for name in MODELS}
    fields = {"stage": "evaluate", "kind": "evaluate", "domain": None, "models": models, **given}
    return toy_job(directory, settings, FakeEngine(), evaluated_on={}, **fields)


def results(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())["models"]
    return found


def test_every_model_is_measured_with_its_own_weights(tmp_path: Path) -> None:
    evaluate.run(job(tmp_path))
    assert WatchedFleet.given == pytest.approx([0.01, 0.02, 0.03])
    found = results(tmp_path)
    assert found.keys() == MODELS.keys()
    for scores in found.values():  # parity is 1 on about half of what the fake engine says
        assert 0.2 < scores["sums"]["accuracy"] < 0.8
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["model"], line["accuracy"]) for line in lines] == [
        (name, scores["sums"]["accuracy"]) for name, scores in found.items()
    ]


def test_a_model_with_a_result_is_not_evaluated_again(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir(parents=True)
    (tmp_path / "models" / "experts.sums.json").write_text('{"sums": {"accuracy": 2}}')
    evaluate.run(job(tmp_path))
    assert WatchedFleet.given == pytest.approx([0.01, 0.03])
    assert results(tmp_path)["experts.sums"] == {"sums": {"accuracy": 2}}


def test_the_results_of_a_model_outside_the_run_stay_in_the_stages_directory(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "elsewhere" / "merge"
    stage = tmp_path / "stage"
    evaluate.run(job(stage, models={str(outside): outside}, auditable=True))
    assert results(stage).keys() == {str(outside)}
    assert not outside.parent.exists()
    assert len(list((stage / "models").glob("*.json"))) == 1
    assert len(list((stage / "samples").glob("*/*.parquet"))) == 1


def test_a_response_without_a_reward_counts_as_unsolved(tmp_path: Path) -> None:
    """Else a model that makes graders fail is measured on fewer problems, and does better."""
    evaluate.run(job(tmp_path, "parity_or_failure", models={"merge": tmp_path / "merge"}))
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 5 < line["reward_failures"] < 35
    assert results(tmp_path)["merge"]["sums"]["accuracy"] == line["accuracy"]
    assert line["accuracy"] == pytest.approx(1 - line["reward_failures"] / 40)


def test_several_responses_to_a_problem_count_by_their_share(tmp_path: Path) -> None:
    evaluate.run(job(tmp_path, samples_per_problem=8))
    solved = json.loads((tmp_path / "solved" / "merge.json").read_text())["sums"]
    assert len(solved) == 40
    assert max(solved) <= 8
    assert len(set(solved)) > 3  # the answers to a problem differ
    score = results(tmp_path)["merge"]["sums"]
    assert score["accuracy"] == pytest.approx(sum(solved) / 320)
    assert score["n"] == 40
    assert score["samples_per_problem"] == 8
    assert score["pass_at_k"] == sum(count > 0 for count in solved) / 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] == pytest.approx(score["accuracy"])


@pytest.mark.parametrize(
    ("common", "own", "asked"),
    [
        ({}, {}, (1.0, 1.0, 0)),
        # As Qwen3's cards measure it.
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {}, (0.6, 0.95, 20)),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0, "top_k": 5}, (0.0, 0.95, 5)),
        ({"top_k": 20}, {"top_p": 0.9, "top_k": 0}, (1.0, 0.9, 0)),
    ],
)
@pytest.mark.parametrize("kind", ["evaluate", "gate"])
def test_answers_are_sampled_as_the_run_or_the_domain_says(
    kind: str,
    common: dict[str, Any],
    own: dict[str, Any],
    asked: tuple[float, float, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checked log-probabilities are of samples from the whole distribution."""
    seen: list[tuple[float, float, int]] = []
    request = evaluate.StageEngines.request

    def watch(engines: Any, groups: Any, sampling: SamplingSettings) -> None:
        seen.append((sampling.temperature, sampling.top_p, sampling.top_k))
        request(engines, groups, sampling)

    monkeypatch.setattr(evaluate.StageEngines, "request", watch)
    given = job(tmp_path, kind=kind, models={"merge": tmp_path / "merge"})
    settings = given.settings
    domain = settings.domains["sums"].model_copy(
        update={
            "evaluation": DomainEvaluationSettings(**own),
            # What the domain is trained with is not read.
            "sampling": settings.domains["sums"].sampling.model_copy(update={"top_p": 0.5}),
        }
    )
    evaluation = settings.evaluation.model_copy(update=common)
    settings = settings.model_copy(update={"domains": {"sums": domain}, "evaluation": evaluation})
    evaluate.run(given.model_copy(update={"settings": settings}))
    assert seen == [(1.0, 1.0, 0), asked]


def test_another_sampling_seed_samples_other_responses(tmp_path: Path) -> None:
    def solved(directory: Path, seed: int) -> Any:
        evaluate.run(job(directory, sampling_seed=seed))
        return json.loads((directory / "solved" / "merge.json").read_text())

    first, again, other = (
        solved(tmp_path / name, seed) for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("auditable", [True, False])
def test_answers_are_written_by_problem(auditable: bool, tmp_path: Path) -> None:
    evaluate.run(job(tmp_path, auditable=auditable, models={"merge": tmp_path / "merge"}))
    [file] = (tmp_path / "samples").rglob("*.parquet")
    answers = read_samples(file)
    keys = json.loads((tmp_path / "problems.json").read_text())["sums"]
    solved = json.loads((tmp_path / "solved" / "merge.json").read_text())["sums"]
    assert [(each["problem"], each["solved"]) for each in answers] == [
        (key, bool(right)) for key, right in zip(keys, solved, strict=True)
    ]
    assert file.with_suffix(".npz").exists() == auditable


def test_each_problem_s_score_is_kept_for_paired_comparisons(tmp_path: Path) -> None:
    evaluate.run(job(tmp_path))
    solved = json.loads((tmp_path / "solved" / "cold_start.json").read_text())["sums"]
    assert set(solved) == {0, 1}
    assert results(tmp_path)["cold_start"]["sums"]["accuracy"] == sum(solved) / 40
    assert "pass_at_k" not in results(tmp_path)["cold_start"]["sums"]


def test_the_keys_of_the_problems_are_kept_for_comparisons_with_other_runs(tmp_path: Path) -> None:
    evaluation = job(tmp_path)
    evaluate.run(evaluation)
    keys = json.loads((tmp_path / "problems.json").read_text())
    settings = evaluation.settings
    longest = settings.longest_prompt(settings.domains["sums"].sampling)
    tokenizer = load_tokenizer(settings.model)
    prompts = settings.domains["sums"].prompts
    problems = held_out_problems(prompts, tokenizer, "sums", 40, longest)
    assert keys == {"sums": [problem.key for problem in problems]}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["sampled_tokens"] >= 40 for line in lines)


def test_too_many_responses_without_a_reward_end_the_stage(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="of 40 samples have no reward"):
        evaluate.run(job(tmp_path, "parity_or_failure", failed=0.02))


@pytest.mark.parametrize(("kind", "split"), [("gate", "gate"), ("evaluate", "held_out")])
def test_a_gate_decides_by_problems_of_no_reported_result(
    kind: str, split: str, tmp_path: Path
) -> None:
    evaluate.run(job(tmp_path, kind=kind, models={"merge": tmp_path / "merge"}))
    assert [split] == SPLITS


@pytest.mark.parametrize(("last", "reported"), [(1e-3, False), (8e-3, True)])
def test_one_check_beyond_a_bound_is_drawn_again(
    last: float, reported: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model is asked for two checks of 40 responses each, and for its 40 answers."""
    asked = job(tmp_path, bound=1.0, models={"merge": tmp_path / "merge"})
    with measuring(2.0, 0.5, share=last):
        evaluate.run(asked)
    engine: Any = asked.engine_addresses[0]
    seeds = [prompt.seed for request in engine.requests for prompt in request.prompts]
    assert len(seeds) == len(set(seeds)) == 3 * 40
    assert ("differ from the trainer's by more than ln 2" in capfd.readouterr().err) == reported


def test_an_engine_with_other_weights_ends_the_stage(tmp_path: Path) -> None:
    with pytest.raises(MismatchError):
        evaluate.run(job(tmp_path, bound=1e-4))
