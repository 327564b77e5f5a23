"""Samples as an expert records them: rewards with what they said, and the trainer's values."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from parallel.batch import MicroBatch
from parallel.sample import Sample
from stages.data.tokenizer import CharacterTokenizer
from stages.rewards.reward import Grader, Response, RewardBase
from stages.sampling.recording import add_observed, is_recorded, record
from stages.sampling.sample_files import read_samples, samples_file
from stages.settings import LoggingSettings
from tests.fake_engines import GROUP, PROMPTS, FakeEngine, toy_domain, toy_job, toy_run
from tests.stages.test_rewards import problem, settings
from tests.stages.toys import opened

pytestmark = pytest.mark.usefixtures("one_rank")


def recorded(directory: Path, share: float, function: str) -> list[dict[str, Any]]:
    """Return what an expert records of its first step."""
    rewards = {"mine": {"kind": "python", "function": f"tests.stages.small_rewards:{function}"}}
    run = toy_run(sums=toy_domain(rewards=rewards))
    run = run.model_copy(update={"logging": LoggingSettings(trackers=(), tokens=share)})
    stage = opened(toy_job(directory, run, FakeEngine()))
    stage.policy.start_fresh(0)
    stage.step(1)
    stage.close()
    return read_samples(samples_file(directory / "rollouts", 1))


def test_a_step_is_recorded_with_what_rewards_said(tmp_path: Path) -> None:
    samples = recorded(tmp_path, 1.0, "explained_parity")
    assert len(samples) == PROMPTS * GROUP
    assert len({each["problem"] for each in samples}) == PROMPTS
    for each in samples:
        count = each["tokens"]
        assert (each["step"], each["staleness"], each["weight_version"]) == (1, 0, 1)
        assert each["solved"] == (each["reward"] == 1.0) == (each["reward_parts"]["mine"] == 1.0)
        said = {"mine": f"{len(each['response'])} characters"}
        assert each["reward_messages"] == (said if each["finish_reason"] == "stop" else None)
        assert count == len(each["response_tokens"]) == len(each["logprobs"])
        assert len(each["trainer_logprobs"]) == len(each["entropies"]) == count
        assert min(each["entropies"]) > 0 > max(each["trainer_logprobs"])


def test_tokens_of_no_prompt_are_recorded_where_the_share_is_0(tmp_path: Path) -> None:
    samples = recorded(tmp_path, 0.0, "parity")
    assert {(each["trainer_logprobs"], each["entropies"]) for each in samples} == {(None, None)}
    assert {each["reward_messages"] for each in samples} == {None}
    assert all(each["logprobs"] for each in samples)  # the engine's are no trouble


def test_a_sample_without_a_reward_says_why(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    drawn = Sample("sums", np.array([5], np.int32), np.array([6, 1], np.int32))
    drawn.reward_failure = "domains.sums.rewards.mine: raised"
    drawn.reward_messages = {"mine": "why"}
    record(path, 7, [[drawn]], CharacterTokenizer(), {}, auditable=False)
    [found] = read_samples(path)
    assert found["reward_failure"] == "domains.sums.rewards.mine: raised"
    assert (found["reward"], found["solved"], found["staleness"]) == (None, None, None)
    assert found["reward_messages"] == {"mine": "why"}
    assert (found["problem"], found["prompt"], found["step"]) == (None, "3", 7)


def test_an_error_of_a_reward_is_valid_text(tmp_path: Path) -> None:
    own: dict[str, RewardBase] = {
        "mine": settings("python", function="tests.stages.small_rewards:raises_half_a_pair")
    }
    grade = Grader("math", own, tmp_path).grade(problem(), Response("odd", 4))
    assert grade.failure is not None and "raised half a pair: ? at small_rew" in grade.failure


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("explained_parity", "3 characters"),
        ("parity", None),
        ("talkative", "x" * 1000 + "..."),
        ("half_a_pair", "half a pair: ?"),
        ("silent", None),
    ],
)
def test_a_reward_may_say_why(function: str, message: str | None, tmp_path: Path) -> None:
    own: dict[str, RewardBase] = {
        "mine": settings("python", function=f"tests.stages.small_rewards:{function}")
    }
    grade = Grader("math", own, tmp_path).grade(problem(), Response("odd", 4))
    assert grade.parts == {"mine": 1.0}
    assert grade.messages == ({} if message is None else {"mine": message})


@pytest.mark.parametrize("function", ["three_values", "two_numbers"])
def test_what_is_no_score_with_a_text_is_a_failure(function: str, tmp_path: Path) -> None:
    own: dict[str, RewardBase] = {
        "mine": settings("python", function=f"tests.stages.small_rewards:{function}")
    }
    grade = Grader("math", own, tmp_path).grade(problem(), Response("odd", 4))
    assert grade.reward is None
    assert grade.failure is not None and "not a score or (score, text)" in grade.failure


def test_the_share_is_of_the_prompts_that_are_trained_on() -> None:
    def problem_of(number: int) -> str:
        return sha256(str(number).encode()).hexdigest()

    trained = [key for key in map(problem_of, range(4000)) if int(key, 16) >= 0.25 * 2**256]
    samples = [Sample("sums", np.array([2]), np.array([3]), problem=key) for key in trained]
    share = sum(is_recorded(sample, 0.1) for sample in samples) / len(samples)
    assert 0.08 < share < 0.12


def test_what_is_observed_of_tokens_that_are_not_learned_is_0() -> None:
    part = cast("MicroBatch", SimpleNamespace(mask=torch.tensor([[True, False]]), recorded={}))
    values = torch.tensor([[0.5, 3.0]])
    add_observed(part, "teacher_kl", values)
    assert part.recorded == {}  # `observe` has found no recorded sample in it
    add_observed(part, "trainer_logprobs", values, create=True)
    add_observed(part, "trainer_logprobs", values)  # as a merge adds the loss of each teacher
    assert part.recorded["trainer_logprobs"].tolist() == [[1.0, 0.0]]
