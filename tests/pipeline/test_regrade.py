"""`braid look --grade`: what samples earn by the rewards as they are now; and a token's experts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot

from parallel.errors import UserError
from pipeline.commands.support.runs import read_run
from pipeline.launch.one_off import regrade
from pipeline.report.screens.overview import LookApp
from pipeline.run.directory import RunDirectory
from stages.data.prompts import PromptStream
from stages.data.tokenizer import CharacterTokenizer
from stages.domain_tools.regrade import problems
from stages.sampling.sample_files import samples_file, write_samples
from stages.settings import RegradeJob, RunSettings
from tests.pipeline.conftest import load
from tests.pipeline.measured_runs import Measured, Skill, answers, keys, write_run
from tests.pipeline.recorded_runs import STAGE, sample
from tests.pipeline.test_screens import press, settled

Braid = Callable[..., tuple[int, str, str]]
REWARD = "def score(problem, response):\n    return float(response == problem.answer)\n"


@pytest.fixture
def settings(config: Path, tmp_path: Path) -> RunSettings:
    """Two domains: `sums` of a file with a reward of one's own, `words` generated."""
    rows = [{"question": name, "reply": f"{name}?"} for name in "abc"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "regraded.py").write_text(REWARD)
    text = config.read_text()
    config.write_text(
        text.replace(
            "    prompts: {dataset: chain_sum}\n",
            f"    prompts: {{source: jsonl, path: {tmp_path}/rows.jsonl, prompt: question,"
            " answer: reply}\n"
            f"    demonstrations: {{source: jsonl, path: {tmp_path}/rows.jsonl, prompt: question,"
            " response: reply}\n"
            "    rewards: {own: {kind: python, function: 'regraded:score',"
            f" path: {tmp_path}}}}}\n",
        )
    )
    return load(config)


@pytest.fixture
def graded(runs: Path, settings: RunSettings) -> Path:
    """A run that has recorded two samples of the file's problems, with a reward of 0."""
    domains = ("sums", "words")
    measured = Measured(answers({"cold_start": {d: Skill(0.3) for d in domains}}), keys(domains))
    write_run(runs / "small", settings, measured)
    rows = [sample(1, "a", 0.0), sample(1, "b", 0.0, response="b!")]
    write_samples(samples_file(runs / "small" / "stages" / STAGE / "rollouts", 1), rows)
    return runs / "small"


def regraded(braid: Braid, *arguments: str, stage: str = STAGE) -> list[dict[str, Any]]:
    code, out, err = braid("look", "small", stage, "--grade", "--json", *arguments)
    assert code == 0, err
    return [each["graded_now"] for each in json.loads(out)["samples"]]


def printed(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("look", "small", STAGE, *arguments)
    assert code == 0, err
    return out


def refused(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("look", "small", STAGE, *arguments)
    assert (code, out) == (1, "")
    return err


def test_samples_are_graded_by_the_reward_as_it_is_now(
    graded: Path, tmp_path: Path, braid: Braid
) -> None:
    assert [each["reward"] for each in regraded(braid)] == [1.0, 0.0]
    changed = REWARD.replace("float(response == problem.answer)", "0.5, 'half for all'")
    (tmp_path / "regraded.py").write_text(changed)
    out = printed(braid, "--grade", "--count", "1")
    assert "  reward    0 (exact 0" in out and "  now       0.5 (own 0.5)\n" in out
    assert "own: half for all" in out
    assert "graded again: 1 of 1 earn more, 0 less, 0 have no reward; mean 0, now 0.5" in out


def test_the_samples_whose_reward_changes_are_shown(
    graded: Path, tmp_path: Path, braid: Braid
) -> None:
    [changed] = regraded(braid, "--changed")
    assert changed["reward"] == 1.0
    only = printed(braid, "--grade", "--changed", "--count", "1")
    assert only.splitlines()[-2:] == [
        "graded again: 1 of 2 earn more, 0 less, 0 have no reward; mean 0, now 0.5",
        "1 of 1 samples",
    ]
    (tmp_path / "regraded.py").write_text(REWARD.replace("problem.answer", "None"))
    assert printed(braid, "--grade", "--changed").startswith("graded again: 0 of 2 earn more")
    assert "add --grade" in refused(braid, "--changed")


def test_a_generated_problem_is_found_in_the_stages_stream(
    graded: Path, settings: RunSettings, braid: Braid
) -> None:
    prompts = settings.domains["words"].prompts
    stream = PromptStream(prompts, CharacterTokenizer(), "words", settings.seed, "experts.words")
    problem = stream.take(3)[-1]
    row = sample(1, problem.prompt, 0.0, domain="words", response=problem.answer)
    rollouts = graded / "stages" / "experts.words" / "rollouts"
    write_samples(samples_file(rollouts, 1), [{**row, "problem": problem.key}])
    [grade] = regraded(braid, stage="experts.words")
    assert grade["parts"].keys() == {"exact"} and grade["failure"] is None


def test_a_generated_problem_is_of_the_stage_an_evaluation_or_a_gate(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.domain_tools.regrade.MOST_DRAWN", 2)
    words = settings.domains["words"]
    job = RegradeJob(
        domains={"words": words},
        tokenizer="characters",
        pool=settings.rewards,
        seed=7,
        stage="experts.words",
        samples=(),
        result=Path("result.json"),
    )
    tokenizer = CharacterTokenizer()
    for split in ("held_out", "gate"):  # of streams that all seeds share
        stream = PromptStream(words.prompts, tokenizer, "words", 0, "evaluate", split)
        key = stream.take(2)[-1].key
        assert problems(job, "words", words, tokenizer, [key]).keys() == {key}
    with pytest.raises(UserError, match="problem 00 is not among the first 2 that it generates"):
        problems(job, "words", words, tokenizer, ["00"])


def test_what_cannot_be_graded_is_said(graded: Path, tmp_path: Path, braid: Braid) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "reply": "a?"}\n')
    assert "is not in its data any more" in refused(braid, "--grade")
    rollouts = graded / "stages" / STAGE / "rollouts"
    write_samples(samples_file(rollouts, 1), [sample(1, "a", 0.0, problem=None)])
    assert "a sample without a problem of a domain cannot be graded" in refused(braid, "--grade")


def test_code_of_a_run_that_others_may_write_is_not_run(graded: Path, braid: Braid) -> None:
    graded.chmod(0o777)
    assert "--trust-run" in refused(braid, "--grade")
    assert [each["reward"] for each in regraded(braid, "--trust-run")] == [1.0, 0.0]


def test_the_experts_of_each_token_are_shown(graded: Path, braid: Braid) -> None:
    code, out, err = braid("look", "small", STAGE, "--routes", "--count", "1")
    assert code == 0 and "its experts are not recorded" in out, err
    # Of each of two samples: two tokens of the prompt and two of the response, less the last.
    routes = np.arange(2 * 3 * 2 * 2, dtype=np.uint16).reshape(6, 2, 2)
    np.savez(
        samples_file(graded / "stages" / STAGE / "rollouts", 1).with_suffix(".npz"), routes=routes
    )
    code, out, err = braid(
        "look", "small", STAGE, "--routes", "--prompt", sample(1, "b", 0)["problem"]
    )
    assert code == 0, err
    lines = [line.split() for line in out.splitlines() if "'" in line]
    assert [line[-4:] for line in lines] == [
        ["16", "17", "18", "19"],  # of the position that predicts the response's first token
        ["20", "21", "22", "23"],
    ]
    only = ("--routes", "--json", "--prompt", sample(1, "b", 0)["problem"])
    [found] = json.loads(printed(braid, *only))["samples"]
    assert found["routes"] == [[[16, 17], [18, 19]], [[20, 21], [22, 23]]]


def test_keys_grade_again_and_show_experts(graded: Path) -> None:
    async def shown() -> None:
        run = read_run(RunDirectory(graded))
        app = LookApp(run, STAGE, partial(regrade, run, trusted=False))
        async with app.run_test(size=(140, 40)) as pilot:
            await settled(pilot)
            await act(pilot)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "g")
        said = [each.message for each in pilot.app._notifications]
        assert any("now       1 (own 1)" in each for each in said), said
        await press(pilot, "e")
        assert "its experts are not recorded" in str(pilot.app.screen.query_one("#sample").render())

    asyncio.run(shown())
