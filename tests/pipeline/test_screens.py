"""The screens of `braid look` on a terminal, driven by keys as a person does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from threading import Event
from time import sleep

import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from pipeline.commands.support.runs import read_run
from pipeline.report.screens.overview import LookApp, MetricsScreen
from pipeline.report.view.overview import Overview
from pipeline.report.view.sample_text import Grade
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run
from stages.sampling.sample_files import Row, samples_file, write_samples
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.recorded_runs import HEALTHY, STAGE, log, sample
from tests.pipeline.recorded_runs import recorded as recorded  # fixtures
from tests.pipeline.recorded_runs import small as small

Act = Callable[[Pilot[None]], Awaitable[None]]


def screens(run: Path, act: Act, stage: str | None = None) -> None:
    """Show a run in a terminal of 140 columns and act on it."""

    async def shown() -> None:
        app = LookApp(read_run(RunDirectory(run)), stage, lambda *_: [])
        async with app.run_test(size=(140, 40)) as pilot:
            await settled(pilot)
            await act(pilot)

    asyncio.run(shown())


def text_of(pilot: Pilot[None], name: str) -> str:
    """Return the text of a widget on the present screen."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(pilot.app.screen.query_one(name, Static).render())
    return captured.get()


def table(pilot: Pilot[None]) -> list[list[str]]:
    """Return the cells of the table on the present screen."""
    found: DataTable[object] = pilot.app.screen.query_one(DataTable)
    return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]


async def settled(pilot: Pilot[None]) -> None:
    """Wait until the present screen has read the run's files."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settled(pilot)


def test_a_run_is_shown_with_its_health_and_stages(small: Path) -> None:
    log(small, [HEALTHY] * 22 + [{**HEALTHY, "entropy": 0.001}] * 8)

    async def act(pilot: Pilot[None]) -> None:
        assert f"! {STAGE}: does harm: entropy is 0.001, below 0.02" in text_of(pilot, "#health")
        [row] = [row for row in table(pilot) if row[0].endswith(STAGE)]
        assert row[2] == "30/30" and "reward 0.353" in row[4]
        await press(pilot, "down", "c")
        assert "entropy" in [row[0] for row in table(pilot)]
        await press(pilot, "escape", "w")
        assert [row[0] for row in table(pilot)] == ["no stage is running"]

    screens(small, act)


def test_keys_do_not_wait_for_files(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed, read = Event(), Overview.of

    def slow(run: Run) -> Overview:
        assert pressed.wait(PATIENCE_SECONDS)
        return read(run)

    monkeypatch.setattr(Overview, "of", slow)

    async def act() -> None:
        app = LookApp(read_run(RunDirectory(small)), None, lambda *_: [])
        async with app.run_test() as pilot:
            await pilot.press("c")
            assert isinstance(app.screen, MetricsScreen)
            pressed.set()

    asyncio.run(act())


def test_a_stage_without_samples_says_so_and_stays(small: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        before = pilot.app.screen
        await press(pilot, "enter")
        assert pilot.app.screen is before
        assert "no recorded samples" in next(iter(pilot.app._notifications)).message

    screens(small, act)


def test_samples_are_ordered_filtered_and_left_by_keys(recorded: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert len(table(pilot)) == 8
        await press(pilot, "o")
        assert "order worst" in text_of(pilot, "#about")
        assert table(pilot)[0][:4] == ["3", "sums", "", "-1"]
        await press(pilot, "slash", *"^c", "enter")
        assert "2 samples" in text_of(pilot, "#about")
        assert "prompt    c" in text_of(pilot, "#sample")
        await press(pilot, "slash", *"[c", "enter")  # no regular expression
        assert "2 samples" in text_of(pilot, "#about")
        await press(pilot, "escape")
        assert "8 samples" in text_of(pilot, "#about")
        await press(pilot, "r", *"exact=1", "enter", "j")
        assert "reward    1 (exact 1" in text_of(pilot, "#sample")
        await press(pilot, "s", *"3", "enter")
        assert len(table(pilot)) == 1
        await press(pilot, "s", *"99", "enter")  # no such step: the list stays
        assert len(table(pilot)) == 1
        await press(pilot, "escape", "escape")
        assert pilot.app.screen.query("#health")

    screens(recorded, act, STAGE)


def test_the_same_prompt_and_a_difference_are_shown(recorded: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "p")
        assert [row[0] for row in table(pilot)] == ["1", "2", "3"]
        await press(pilot, "m", "j")
        assert "difference from the marked sample" in text_of(pilot, "#sample")
        await press(pilot, "m")
        assert "difference" not in text_of(pilot, "#sample")

    screens(recorded, act, STAGE)


def test_tokens_are_coloured_by_what_was_recorded(recorded: Path) -> None:
    whole = sample(4, "x", 0.0, trainer_logprobs=[-1.5, -2.0], entropies=[0.25, 0.5])
    write_samples(samples_file(recorded / "stages" / STAGE / "rollouts", 4), [whole])

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "t")
        assert "not recorded of this sample" in text_of(pilot, "#sample")
        await press(pilot, "ctrl+end")
        assert "tokens by |engine - trainer|, at most 0.5" in text_of(pilot, "#sample")
        await press(pilot, "t")
        assert "tokens by entropy, at most 0.5" in text_of(pilot, "#sample")

    screens(recorded, act, STAGE)


def test_a_sample_that_was_taken_away_is_said_so(recorded: Path) -> None:
    path = samples_file(recorded / "stages" / STAGE / "rollouts", 3)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "ctrl+end")
        write_samples(path, [sample(3, "a", 1)])  # as by a stage that was resumed
        await press(pilot, "m")
        await press(pilot, "g")
        said = [each.message for each in pilot.app._notifications]
        assert len([each for each in said if "it has other samples now" in each]) == 2
        path.unlink()
        await press(pilot, "m")
        assert any("No such file" in each.message for each in pilot.app._notifications)

    screens(recorded, act, STAGE)


def test_a_grading_that_does_not_end_is_left_by_escape(recorded: Path) -> None:
    stopped = Event()

    def hang(stage: str, rows: Sequence[Row], check: Callable[[], None]) -> list[Grade]:
        try:
            while True:
                check()
                sleep(0.01)
        finally:
            stopped.set()

    async def act() -> None:
        app = LookApp(read_run(RunDirectory(recorded)), STAGE, hang)
        async with app.run_test() as pilot:
            await settled(pilot)
            await pilot.press("g", "j", "escape")
            assert await asyncio.to_thread(stopped.wait, 60)
            await settled(pilot)
            assert len(table(pilot)) == 8  # the screen stays

    asyncio.run(act())


@pytest.mark.usefixtures("small")
def test_a_question_is_left_without_an_answer(recorded: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", "escape")
        assert len(table(pilot)) == 8
        await press(pilot, "v", *"nobody", "enter")
        assert len(table(pilot)) == 8  # an error, and the list as it was

    screens(recorded, act, STAGE)


def test_text_is_never_read_as_markup(recorded: Path) -> None:
    odd = "[red]x[/red] [/b] [@click=app.quit]"
    rows = [sample(4, odd, 0.0, response=odd, reward_messages={"exact": odd})]
    write_samples(samples_file(recorded / "stages" / STAGE / "rollouts", 4), rows)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"click", "enter")
        assert text_of(pilot, "#sample").count(odd) == 3
        await press(pilot, "v", *"[/b]", "enter")
        assert any("[/b]" in each.message for each in pilot.app._notifications)

    screens(recorded, act, STAGE)


def test_samples_follow_the_run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.report.screens.samples.SECONDS", 0.05)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "j", "j")
        write_samples(
            samples_file(recorded / "stages" / STAGE / "rollouts", 4), [sample(4, "x", 1)]
        )
        while len(table(pilot)) == 8:
            await pilot.pause(0.05)
        assert table(pilot)[-1][0] == "4"
        assert pilot.app.screen.query_one(DataTable).cursor_row == 2

    screens(recorded, act, STAGE)
