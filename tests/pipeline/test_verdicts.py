"""The verdicts on stages: every injected trouble is said, with the command to run next.

Silent on stages that learned: `clean_stages.json.gz` has the metrics of twelve stages of five runs,
recorded with the quickstart's model (the demo's run, a quickstart, three experts of twenty steps).
"""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from pipeline.cli import command_parser
from pipeline.commands.support.runs import read_run
from pipeline.report.compare.comparison import held_out_gains
from pipeline.report.view.findings import Health
from pipeline.report.view.health import judged
from pipeline.report.view.learning import HeldOutGain
from pipeline.report.view.next_commands import next_three
from pipeline.run.directory import RunDirectory
from pipeline.run.run import StageState
from stages.metric_ranges import RANGES
from stages.settings import RunSettings
from tests.pipeline.measured_runs import Measured, Skill, answers, keys, write_run
from tests.pipeline.recorded_runs import HEALTHY, STAGE, Line
from tests.pipeline.recorded_runs import small as small
from tests.runs import REPOSITORY

CLEAN = Path(__file__).with_name("clean_stages.json.gz")
PAGE = REPOSITORY / "docs" / "how-to" / "read-a-run.md"
FLAT = "sums +0.2 points (paired 95 %: -1.9 to +2.3)"
LOST = "words -12.0 points (paired 95 %: -15.1 to -8.9), which it was not trained on"


@dataclass(frozen=True)
class Injected:
    """A trouble: the metrics of the last steps, and the words that must be said of it."""

    word: str
    said: str
    command: str
    worse: Line = field(default_factory=dict)
    steps: int = 40
    since: int = 0  # the first step with `worse`
    reward: tuple[float, float] = (0.3, 0.7)  # at the first step and at the last
    gain: HeldOutGain | None = None
    state: StageState = field(default_factory=lambda: StageState("done"))


def gained(*, lost: tuple[str, ...] = ()) -> HeldOutGain:
    return HeldOutGain(
        ("sums +9.0 points (paired 95 %: +6.0 to +12.0)",) if lost else (),
        () if lost else (FLAT,),
        lost,
        ("words",) if lost else (),
        "cold_start",
    )


LOOK = "braid look small experts.sums"
TROUBLES = {
    "nearly nothing right, reward .004": Injected(
        *("cannot learn", "no response to 98% of the prompts is right", f"{LOOK} --worst"),
        {"all_wrong": 0.98, "zero_variance": 0.96},
        reward=(0.004, 0.004),
    ),
    "4 steps, reward .03": Injected(
        *(
            "too short to say",
            "4 steps; 9% of the responses are truncated",
            f"{LOOK} --worst",
        ),
        {"all_wrong": 0.85, "zero_variance": 0.88, "unfinished": 0.09},
        steps=4,
        reward=(0.03, 0.03),
    ),
    "40 steps, reward .03": Injected(
        *("does not learn", "86% of the prompt groups have zero variance", f"{LOOK} --worst"),
        {"zero_variance": 0.86},
        reward=(0.03, 0.03),
    ),
    "4 steps, a limit below the right answers": Injected(
        *("cannot learn", "91% of the responses are truncated", f"{LOOK} --finish length"),
        {"unfinished": 0.91, "all_wrong": 1.0, "zero_variance": 1.0},
        steps=4,
        reward=(0.0, 0.0),
    ),
    "reward flat": Injected("does not learn", "reward 0.49", f"{LOOK} --worst", reward=(0.5, 0.5)),
    "reward falls": Injected("does harm", "reward 0.695", f"{LOOK} --worst", reward=(0.7, 0.3)),
    "all wrong": Injected(
        *("cannot learn", "no response to 100% of the prompts", f"{LOOK} --worst"),
        {"all_wrong": 1.0, "zero_variance": 1.0},
        reward=(0.0, 0.0),
    ),
    "truncated": Injected(
        *("cannot learn", "unfinished is 0.5, above 0.25", f"{LOOK} --finish length"),
        {"unfinished": 0.5},
        since=25,
    ),
    "zero variance": Injected(
        *("cannot learn", "zero_variance is 0.97, above 0.9", f"{LOOK} --worst"),
        {"zero_variance": 0.97},
        since=25,
    ),
    "rewards spread by nothing": Injected(
        *("cannot learn", "reward_spread is 0.01, below 0.02", f"{LOOK} --worst"),
        {"reward_spread": 0.01},
        since=25,
    ),
    "responses alike": Injected(
        *("cannot learn", "similar_responses is 0.97", LOOK), {"similar_responses": 0.97}, since=25
    ),
    "KL blown up": Injected(
        *("does harm", "the policy is 5 nats a token", f"{LOOK} --metric kl"), {"kl": 5.0}, since=25
    ),
    "entropy collapsed": Injected(
        *("does harm", "entropy is 0.001, below 0.02", f"{LOOK} --metric entropy"),
        {"entropy": 0.001},
        since=25,
    ),
    "mismatch": Injected(
        *("does harm", "high_ratio is 0.5", f"{LOOK} --tokens"), {"high_ratio": 0.5}, since=25
    ),
    "other experts in the engine": Injected(
        *("does harm", "engine and trainer choose other experts", f"{LOOK} --tokens"),
        {"router_agreement": 0.5},
        since=25,
    ),
    "samples too old": Injected(
        *("does harm", "drift_high_ratio is 0.9", f"{LOOK} --metric drift_high_ratio"),
        {"drift_high_ratio": 0.9},
        since=25,
    ),
    "a reward hacked": Injected(
        *("does harm", "format_gain is 0.9", f"{LOOK} --worst"), {"format_gain": 0.9}, since=25
    ),
    "wrong answers grow": Injected(
        *("does harm", "length_inflation is 3", f"{LOOK} --longest"),
        {"length_inflation": 3.0},
        since=25,
    ),
    "few experts work": Injected(
        *("does harm", "few experts work", f"{LOOK} --experts"), {"load_balance": 3.5}, since=25
    ),
    "gain not significant": Injected(
        *("does not learn", "held out, not significant", "braid compare small"), gain=gained()
    ),
    "forgetting on another domain": Injected(
        "does harm",
        "words -12.0 points",
        "braid look small --model cold_start --versus experts.sums --domain words",
        gain=gained(lost=(LOST,)),
    ),
    "weight sync failing": Injected(
        "failed",
        "the engines live but refits fail",
        "braid resume small",
        state=StageState("failed", "the engines live but refits fail; see their logs"),
    ),
    "rewards failing": Injected(
        *("", "rewards fail on 3 samples a step", "braid logs small experts.sums"),
        {"reward_failures": 3.0},
        since=25,
    ),
    "engines lost": Injected(
        *("", "engines are lost, 1 a step", "braid logs small experts.sums --engine 0"),
        {"engine_restarts": 1.0},
        since=25,
    ),
    "samples dropped as stale": Injected(
        *("", "dropped_stale is 60", f"{LOOK} --metric dropped_stale"),
        {"dropped_stale": 60.0},
        since=25,
    ),
    "the gradient jumps": Injected(
        *("", "the gradient's norm jumped to 50", f"{LOOK} --metric gradient_norm"),
        {"gradient_norm": 50.0},
        since=38,
    ),
}


def lines_of(trouble: Injected) -> list[Line]:
    """Return the metrics of a stage with a trouble; its reward is noisy, as prompts differ."""
    noise, (first, last) = Random(0), trouble.reward
    return [
        {
            **{"step": step + 1, "steps": trouble.steps, "time": float(step), **HEALTHY},
            "reward": first + (last - first) * step / trouble.steps + noise.gauss(0, first / 20),
            **(trouble.worse if step >= trouble.since else {}),
        }
        for step in range(trouble.steps)
    ]


def health_of(small: Path, trouble: Injected) -> Health:
    run = read_run(RunDirectory(small))
    gains = {STAGE: trouble.gain} if trouble.gain else {}
    states = {**run.states, STAGE: trouble.state}
    return judged(run, states, {STAGE: lines_of(trouble)}, gains)


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_said_with_the_command_to_run_next(name: str, small: Path) -> None:
    trouble = TROUBLES[name]
    health = health_of(small, trouble)
    assert not health.is_well
    symptom, *_ = health.symptoms
    assert symptom.stage == STAGE and trouble.said in symptom.what
    assert (symptom.word or "") == trouble.word
    command = symptom.command.replace(str(small), "small")
    assert command == trouble.command
    arguments = shlex.split(command)[1:]
    command_parser(arguments[0]).parse_args(arguments)  # exits where braid would refuse it
    [verdict] = health.verdicts
    assert verdict.word == (trouble.word or "learns")
    if trouble.word:
        assert not verdict.is_good


@pytest.mark.parametrize("metric", ["reward", "teacher_kl", "loss"])
def test_a_gain_that_is_not_significant_is_never_called_healthy(metric: str, small: Path) -> None:
    """Noise alone rises in 40 runs no more often than chance has it."""
    run, well = read_run(RunDirectory(small)), 0
    for seed in range(40):
        noise = Random(seed)
        lines = [
            {"step": step, "time": float(step), metric: 0.3 + noise.gauss(0, 0.05)}
            for step in range(1, 41)
        ]
        well += judged(run, run.states, {STAGE: lines}, {}).is_well
    assert well <= 3


with gzip.open(CLEAN) as file:
    RECORDED: dict[str, list[Line]] = json.load(file)


def test_ten_clean_stages_were_recorded() -> None:
    assert len(RECORDED) >= 10


@pytest.mark.parametrize("name", RECORDED)
def test_a_clean_stage_is_said_to_learn_and_nothing_else(name: str, small: Path) -> None:
    run, stage = read_run(RunDirectory(small)), name.split()[-1]
    here = stage if stage in ("cold_start", "merge") else STAGE
    lines = [{"step": n, "time": float(n), **line} for n, line in enumerate(RECORDED[name], 1)]
    health = judged(run, run.states, {here: lines}, {})
    assert health.symptoms == []
    assert [verdict.word for verdict in health.verdicts] == ["learns"]
    assert health.is_well


def test_what_is_solved_from_the_start_is_no_trouble(small: Path) -> None:
    solved = Injected("", "", "", {"all_right": 0.8, "zero_variance": 0.95}, reward=(0.95, 0.95))
    [verdict] = health_of(small, solved).verdicts
    assert (verdict.word, verdict.is_good) == ("is solved", True)


def test_a_stage_that_runs_may_learn_yet(small: Path) -> None:
    trouble = Injected("", "", "", reward=(0.5, 0.5), state=StageState("running"))
    lines = lines_of(trouble)
    run = read_run(RunDirectory(small))
    for number, line in enumerate(lines):  # of now, or it seems stuck
        line["time"] = 4e9 + number
    [symptom] = judged(run, {**run.states, STAGE: trouble.state}, {STAGE: lines}, {}).symptoms
    assert (symptom.word, symptom.alarm) == ("does not learn", False)


def test_gains_and_losses_are_those_of_compare(runs: Path, settings: RunSettings) -> None:
    skills = {
        "cold_start": {"sums": Skill(0.3), "words": Skill(0.6)},
        STAGE: {"sums": Skill(0.6), "words": Skill(0.3)},
        "experts.words": {"sums": Skill(0.3, noise=0.0), "words": Skill(0.6)},
    }
    run = write_run(
        runs / "small", settings, Measured(answers(skills, 400), keys(("sums", "words"), 400))
    )
    gains = held_out_gains(run, run.states)
    assert [text.split()[0] for text in gains[STAGE].gained] == ["sums"]
    assert gains[STAGE].lost_domains == ("words",)
    assert "which it was not trained on" in gains[STAGE].lost[0]
    assert gains["experts.words"].gained == () and len(gains["experts.words"].not_gained) == 1
    assert "cold_start" not in gains  # what all are compared with


def test_causes_of_alarms_come_first_of_three_commands(small: Path) -> None:
    run = read_run(RunDirectory(small))
    health = health_of(small, TROUBLES["truncated"])
    commands = [text.replace(str(small), "small") for text in next_three(run, health, True)]
    assert commands == [f"{LOOK} --finish length", "braid look small", "braid report small"]


def rows(small: Path) -> list[str]:
    """Return the rows of the docs' table: each trouble and what is said of it."""
    found = []
    for name, trouble in TROUBLES.items():
        symptom = health_of(small, trouble).symptoms[0]
        command = symptom.command.replace(str(small), "small")
        said = f"{symptom.word}: {symptom.what}" if symptom.word else symptom.what
        found.append(f"| {name} | {said} | `{command}` |")
    return found


def test_the_documented_table_is_what_is_said(small: Path) -> None:
    documented = PAGE.read_text().splitlines()
    missing = [row for row in rows(small) if row not in documented]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("metric", ["zero_variance", "unfinished"])
def test_the_page_states_the_ranges_of_the_one_place(metric: str) -> None:
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"- `{metric}`")]
    assert str(RANGES[metric]) in line


Braid = Callable[..., tuple[int, str, str]]


def test_a_run_ends_with_its_verdicts_and_three_commands(braid: Braid, config: Path) -> None:
    code, out, err = braid("run", config)
    assert code == 0, err
    *_, heading, first, second, third = out.splitlines()
    assert heading == "next:"
    for command in (first, second, third):
        arguments = shlex.split(command)
        assert arguments[0] == "braid"
        command_parser(arguments[1]).parse_args(arguments[1:])
    assert "\n  vllm serve " in out
