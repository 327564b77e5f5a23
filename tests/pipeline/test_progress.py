"""The progress that is shown while a stage runs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.launch.progress import Progress, Screen, latest
from pipeline.run.metrics import MetricsTail
from pipeline.text import clock


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "steps": 10, "time": 100.0 + 3 * step, **values}) + "\n"


def test_the_tail_gives_whole_new_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1))
    tail = MetricsTail(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write(line(2) + line(3)[:10])
    assert [found["step"] for found in tail.read()] == [2]
    with path.open("a") as file:
        file.write(line(3)[10:])
    assert [found["step"] for found in tail.read()] == [3]
    path.write_text(line(1))
    assert tail.read() == []
    with path.open("a") as file:
        file.write("not json\n" + line(2))
    assert [found["step"] for found in tail.read()] == [2]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 2, "time": 1.0, "loss": "low"}',
        '{"step": 2, "time": NaN}',
        '{"step": true, "time": 1.0}',
        f'{{"step": 2, "time": 1.0, "loss": 1{400 * "0"}}}',
        f'{{"step": 2, "time": 1{400 * "0"}}}',
        '{"step": 2, "steps": "many", "time": 1.0}',
        '{"step": 2, "time": 1.0, "model": 5}',
        "[" * 10_000,
    ],
)
def test_a_line_that_no_stage_logs_is_dropped(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line(1)}{damaged}\n")
    assert latest(path) == "step 1/10"


def test_progress_says_the_step_the_time_left_and_the_reward() -> None:
    progress = Progress(0.0, 10)
    assert progress.describe().startswith("starting: the first step (")
    progress.add(json.loads(line(1, reward=0.25)))
    progress.add(json.loads(line(4, reward=0.5, loss=1.5)))
    assert progress.describe() == "step 4/10  18 s left  reward 0.5"
    progress.add(json.loads(line(4, loss=1e-9, entropy=0.7, reward=0.5)))
    assert progress.describe() == "step 4/10  18 s left  reward 0.5  entropy 0.7"
    progress.add(json.loads(line(4, loss=0.02, teacher_kl=0.02, reward=0.5)))  # of a merge
    assert progress.describe() == "step 4/10  18 s left  reward 0.5  teacher_kl 0.02"


def test_a_stage_that_samples_says_how_many_responses_it_kept() -> None:
    progress = Progress(0.0, None)
    for step in (1, 4):
        values = {"domain": "sums", "reward": 0.5, "kept": 6.0, "drawn": 8.0}
        progress.add(json.loads(line(step, **values)))
    assert progress.describe() == "problem 4/10  sums  18 s left  reward 0.5  kept 6 of 8"


def test_after_the_last_step_no_time_is_left_and_the_checkpoint_is_saved() -> None:
    trained, measured = Progress(0.0, 10), Progress(0.0, None)
    for step in (9, 10):
        trained.add(json.loads(line(step, loss=0.5)))
        measured.add(json.loads(line(step, model="merge", domain="sums", accuracy=0.5)))
    assert trained.describe() == "step 10/10  saving step 10  loss 0.5"
    assert measured.describe() == "problem 10/10  merge  sums  accuracy 50.0 %"
    assert trained.result() == "  step 10/10  loss 0.5"
    assert measured.result() == Progress(0.0, 10).result() == ""
    alone = Progress(0.0, 10)
    alone.add(json.loads(line(10)))  # of a stage that had one step to go
    assert alone.describe() == "step 10/10  saving step 10"


def test_a_log_gets_few_plain_lines(tmp_path: Path) -> None:
    output = io.StringIO()
    metrics = tmp_path / "metrics.jsonl"
    with (
        Screen(Console(file=output)) as screen,
        screen.watching("[1/7] cold_start", 10, metrics) as view,
    ):
        for step in range(1, 11):
            with metrics.open("a") as file:
                file.write(line(step, reward=step / 10))
            view.poll()
    first, *_, last = output.getvalue().splitlines()
    assert first == "[1/7] cold_start  step 1/10  reward 0.1"
    assert last.startswith("[1/7] cold_start  done in ")
    assert last.endswith(" s  step 10/10  reward 1")
    assert len(output.getvalue().splitlines()) < 10


def test_a_log_repeats_an_unchanged_line_only_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pipeline.launch.progress.time.monotonic", lambda: now[0])
    output = io.StringIO()
    metrics = tmp_path / "metrics.jsonl"
    with Screen(Console(file=output)) as screen, screen.watching("merge", 10, metrics) as view:
        metrics.write_text(line(1, loss=0.5))
        for _ in range(13):  # for two minutes
            view.poll()
            now[0] += 10
        metrics.write_text(line(1, loss=0.5) + line(2, loss=0.5))
        view.poll()
    once, twice, again, new, _ = output.getvalue().splitlines()
    assert once == twice == again == "merge  step 1/10  loss 0.5"
    assert new == "merge  step 2/10  24 s left  loss 0.5"


def test_a_terminal_gets_a_line_that_is_redrawn(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with (
        Screen(console) as screen,
        screen.watching("[1/7] cold_start", 10, tmp_path / "metrics.jsonl") as view,
    ):
        view.poll()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[1/7] cold_start" in shown
    assert "starting: the ranks load (" in shown
    assert "done in " in shown


def test_the_cause_of_a_wait_is_reported(tmp_path: Path) -> None:
    metrics, engines = tmp_path / "metrics.jsonl", [tmp_path / "0", tmp_path / "1"]
    metrics.write_text(line(1))
    os.utime(metrics, (0, 0))  # an earlier attempt's
    console = Console(file=io.StringIO(), force_terminal=True, width=120)

    def said() -> str:
        console.file = io.StringIO()
        with Screen(console) as screen, screen.watching("merge", 10, metrics) as view:
            view.expect(engines)
            view.poll()
        return console.file.getvalue().partition("starting: ")[2].partition(" (")[0]

    assert said() == "the ranks load, 0 of 2 engines ready"
    engines[1].touch()
    metrics.touch()
    assert said() == "1 of 2 engines ready"
    engines[0].touch()
    assert said() == "the first rollout"
    engines.clear()
    assert said() == "the first step"


def test_durations_are_readable() -> None:
    assert [clock(seconds) for seconds in (0, 59.4, 185, 7800)] == [
        "0 s",
        "59 s",
        "3 min 05 s",
        "2 h 10 min",
    ]


def test_the_step_of_a_running_stage_is_read_from_the_end_of_its_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert latest(metrics) == "starting"
    with metrics.open("w") as file:
        for step in range(1, 20_001):
            line = {"step": step, "steps": 40_000, "time": float(step), "reward": 0.5}
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 20001, "st')
    assert latest(metrics) == "step 20000/40000  5 h 33 min left  reward 0.5"
