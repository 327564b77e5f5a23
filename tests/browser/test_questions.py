"""Ten questions about a run: each has its answer in `look` and, in at most three actions, here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as parquet
import pytest

from pipeline import cli
from pipeline.run.run import Run
from tests.browser.reported_run import EXPERT, OWNED, REASON, write_reported
from tests.chromium import opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass(frozen=True)
class RunQuestion:
    """A question: the actions in the report, the command, and a text that answers it in both.

    An action is a click, or a text or a choice for a field: `tab`, `field=text`, `field:choice`.
    """

    actions: tuple[str, ...]
    answer: str  # a text of the report
    command: tuple[str, ...]
    printed: str  # a text of the command's output


QUESTIONS = {
    "which prompts flipped between step 10 and 40?": RunQuestion(
        ("Samples", "step=10 40", "order:flipped"),
        "4 of 960 samples",
        (EXPERT, "--step", "10", "--step", "40", "--flipped"),
        "4 of 4 samples",
    ),
    "which domain pays the KL?": RunQuestion(
        ("Merge",), "sums 34", ("--metric", "teacher_kl"), "teacher_kl/sums"
    ),
    "why did the gate stop?": RunQuestion((), REASON, (), REASON),
    "is the engine or the trainer waiting?": RunQuestion(
        ("Time",), "Ranks wait for engine 50 % of their time", (), "rollout 75 %"
    ),
    "which experts does words own?": RunQuestion(
        ("Routing",),
        f"words layer 0 expert {OWNED} (4 times)",
        ("merge", "--experts"),
        f"words       0       {OWNED}   4.00",
    ),
    "what did the reward say of the worst sample?": RunQuestion(
        ("Samples", "order:worst"),
        "exact: expected prompt 1",
        (EXPERT, "--worst", "--count", "1"),
        "exact: expected prompt 1",
    ),
    "which wrong answers earn by being brief?": RunQuestion(
        ("Samples", "reward=brief=0.5", "solved:no"),
        "{wrong} of 960 samples",
        (EXPERT, "--reward", "brief=0.5", "--worst"),
        "reward    0 (exact 0, brief 0.5)",
    ),
    "which responses were truncated?": RunQuestion(
        ("Samples", "finish_reason:length"),
        "240 of 960 samples",
        (EXPERT, "--finish", "length"),
        "of 240 samples",
    ),
    "what did the merge lose?": RunQuestion(
        ("Versus", "only the first, sums"),
        "problems of sums: only the first",
        ("--model", "cold_start", "--versus", "merge", "--solved-by", "model"),
        "cold_start says 1",
    ),
    "on which tokens do engine and trainer differ?": RunQuestion(
        ("Samples",),
        "|engine - trainer|",
        (EXPERT, "--tokens", "--count", "1"),
        "difference",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_reported(tmp_path_factory.mktemp("asked") / "small")


@pytest.fixture(scope="module")
def report(run: Run) -> Path:
    assert cli.main(["report", "small", "--runs-dir", str(run.path.parent)]) == 0
    return run.path / "report.html"


def act(page: Page, action: str) -> None:
    """Do one action in the report, as a person does."""
    field, chooses, choice = action.partition(":")
    name, types, text = action.partition("=")
    if types:
        page.locator(f"#filters [name={name}]").fill(text)
        page.keyboard.press("Enter")
    elif chooses:
        page.locator(f"#choose-{field}").select_option(choice)
    elif page.get_by_role("link", name=action, exact=True).count():
        page.get_by_role("link", name=action, exact=True).click()
    else:
        page.locator(f"a[aria-label^='{action}']").click()


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_answered_in_three_actions(
    question: str, run: Run, browser: Browser, report: Path
) -> None:
    asked = QUESTIONS[question]
    assert len(asked.actions) <= 3
    table = parquet.read_table(run.stage(EXPERT).rollouts, columns=["solved"], use_threads=False)
    wrong = table["solved"].to_pylist().count(False)
    with opened(browser, report) as page:
        for action in asked.actions:
            act(page, action)
        page.wait_for_function(
            "answer => document.getElementById('main').innerText.replace(/\\s+/g, ' ')"
            ".includes(answer)",
            arg=asked.answer.replace("{wrong}", str(wrong)),
        )


@pytest.mark.parametrize("question", QUESTIONS)
def test_look_answers_it(question: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    asked = QUESTIONS[question]
    assert cli.main(["look", "small", *asked.command, "--runs-dir", str(run.path.parent)]) == 0
    assert asked.printed in capsys.readouterr().out
