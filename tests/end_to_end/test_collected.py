"""Data that a stage samples and others train on: a run left alone, and one killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from stages.directory import StageDirectory
from tests.end_to_end.killed_run import Kill, KilledRun
from tests.end_to_end.moments import Moment
from tests.end_to_end.same_bits import digests
from tests.runs import REPOSITORY, braid, finish, metrics
from tests.warm_runs import WarmBraid

CONFIG = Path(__file__).with_name("collected.yaml")
STAGES = ["cold_start", "collect", "tuned", "preferred"]
PROMPTS, STEP, SIZE = 16, 2, 4
# The stage's reward, which also lists what it has graded, beside itself.
REWARD = """\
import json, time
from pathlib import Path

GRADED = Path(__file__).with_name("graded.jsonl")


def even(problem, response):
    time.sleep(0.03)  # so that a kill is often in the middle of a part
    with GRADED.open("a") as file:
        file.write(json.dumps([problem.index, response]) + "\\n")
    return sum(ord(character) % 2 == 0 for character in response) / (len(response) + 1)
"""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, and what was graded in it."""

    path: Path
    graded: Counter[tuple[int, str]]
    output: str = ""
    kills: list[Kill] = field(default_factory=list)

    @property
    def sampled(self) -> StageDirectory:
        """The directory of the stage that samples."""
        return StageDirectory(self.path / "stages" / "collect")

    @property
    def drawn(self) -> list[dict[str, Any]]:
        """The rows of all parts that were drawn."""
        parts = sorted(self.sampled.drawn.iterdir())
        return [row for part in parts for row in parquet.read_table(part).to_pylist()]

    @property
    def to_grade(self) -> Counter[tuple[int, str]]:
        """The responses that rewards are asked about: truncated ones earn nothing."""
        return Counter(
            (row["index"], row["response"]) for row in self.drawn if row["finish_reason"] == "stop"
        )


def prepared(directory: Path) -> Path:
    """Return the path of the configuration, with its file of data and its reward beside it."""
    text = CONFIG.read_text().replace("../../configs", str(REPOSITORY / "configs"))
    (directory / CONFIG.name).write_text(text)
    shown = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(9) for b in range(9)]
    (directory / "shown.jsonl").write_text("\n".join(map(json.dumps, shown)))
    (directory / "graded.py").write_text(REWARD)
    return directory / CONFIG.name


def graded_in(directory: Path) -> Counter[tuple[int, str]]:
    """Return the calls of the reward so far, by the index of the prompt and the response."""
    lines = (directory / "graded.jsonl").read_text().splitlines()
    return Counter((index, response) for index, response in map(json.loads, lines))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_braid: WarmBraid) -> FinishedRun:
    """A run that nothing is killed in."""
    directory = tmp_path_factory.mktemp("undisturbed")
    output = warm_braid(directory, "run", str(prepared(directory)))
    return FinishedRun(directory / "collected", graded_in(directory), output)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run whose engine is killed while it samples, and its launcher there and in a mixture."""
    directory = tmp_path_factory.mktemp("killed")
    moments = [
        Moment("engine", "collect", step=1, seconds=0.0, which=0.0),
        Moment("launcher", "collect", step=3, seconds=0.0, which=0.0),
        Moment("rank 1", "preferred", step=1, seconds=0.0, which=0.0),
    ]
    begin = ["run", str(prepared(directory))]
    run = KilledRun(directory, "collected", begin, ["resume", "collected"])
    run.kill_at(moments, STAGES)
    return FinishedRun(run.path, graded_in(directory), run.output(), run.kills)


def values(run: FinishedRun, stage: str) -> list[dict[str, Any]]:
    """Return a stage's metrics without what depends on the time."""
    return [
        {name: value for name, value in line.items() if name != "time"}
        for line in metrics(run.path, stage)
    ]


def test_stages_train_on_what_was_collected(undisturbed: FinishedRun) -> None:
    drawn, kept = undisturbed.drawn, parquet.read_table(undisturbed.sampled.collected).to_pylist()
    assert Counter(row["problem"] for row in drawn) == dict.fromkeys(
        {row["problem"] for row in drawn}, SIZE
    )
    assert len(drawn) == PROMPTS * SIZE
    assert kept == [
        {name: value for name, value in row.items() if name != "dropped"}
        for row in drawn
        if row["dropped"] is None
    ]
    assert undisturbed.graded == undisturbed.to_grade
    said = f"collect  kept {len(kept)} of {PROMPTS * SIZE} responses"
    assert said in undisturbed.output
    assert len(metrics(undisturbed.path, "tuned")) == 6
    first, *_, last = metrics(undisturbed.path, "preferred")
    assert last["step"] == 6 and last["loss"] < first["loss"]


@pytest.mark.combinations  # of stages/test_sample's resumed stage, with real processes
def test_a_killed_sample_stage_collects_the_same_bytes(
    undisturbed: FinishedRun, killed: FinishedRun
) -> None:
    inside = [kill.at for kill in killed.kills if kill.at.stage == "collect"]
    assert [kill.moment.process for kill in killed.kills[:2]] == ["engine", "launcher"]
    assert len(inside) == 2 and all(0 < at.step < PROMPTS // STEP for at in inside)
    mine, theirs = killed.sampled, undisturbed.sampled
    assert mine.collected.read_bytes() == theirs.collected.read_bytes()
    assert mine.collection.read_bytes() == theirs.collection.read_bytes()
    assert killed.drawn == undisturbed.drawn
    assert values(killed, "collect") == values(undisturbed, "collect")


@pytest.mark.combinations
def test_no_prompt_of_a_whole_part_is_graded_again(killed: FinishedRun) -> None:
    assert killed.graded.keys() == killed.to_grade.keys()
    indices = list(dict.fromkeys(row["index"] for row in killed.drawn))
    again = killed.graded - killed.to_grade
    torn = {indices.index(index) // STEP for index, _ in again}
    assert len(torn) <= 2  # the parts in which the engine and the launcher were killed


@pytest.mark.combinations  # of test_preference, from data that was sampled
def test_stages_on_collected_data_resume_with_the_same_bits(
    undisturbed: FinishedRun, killed: FinishedRun
) -> None:
    assert killed.kills[-1].at.stage == "preferred"
    assert digests(killed.path) == digests(undisturbed.path)
    for stage in ("tuned", "preferred"):
        assert values(killed, stage) == values(undisturbed, stage)


@pytest.mark.combinations  # of stages/test_sample's message, as a person meets it
def test_a_filter_that_leaves_nothing_says_so_and_keeps_what_was_drawn(
    undisturbed: FinishedRun, tmp_path: Path
) -> None:
    only = ("--only", "cold_start", "--only", "collect")
    named, forked = ("--name", "strict", *only), ("--fork", str(undisturbed.path))
    run = FinishedRun(tmp_path / "strict", Counter())
    drawn = run.sampled.all_drawn
    config = prepared(tmp_path)
    strict = ("run", str(config), "stages.collect.keep.reward=9")
    first, _ = braid(tmp_path, *strict, *forked, *named).communicate(timeout=600)
    graded = graded_in(tmp_path)
    again, _ = braid(tmp_path, "resume", str(run.path), *only).communicate(timeout=600)
    assert graded_in(tmp_path) == graded == run.to_grade  # nothing is drawn again
    message = f"stages.collect.keep: nothing is left of {PROMPTS * SIZE} responses: "
    for output in (first, again):
        assert "Traceback" not in output
        assert "rerun with --from collect" in output
        assert message in " ".join(output.split())
        assert str(drawn) in output
    refused, _ = braid(tmp_path, "run", str(config), *named).communicate(timeout=600)
    assert "these finished or started stages depend on it: collect" in refused
    assert "--from collect" in refused
    before = parquet.read_table(drawn).drop_columns(["dropped"])
    finish(braid(tmp_path, "run", str(config), *named, "--from", "collect"))
    put_aside = run.path / "replaced" / "collect.1" / "drawn.parquet"
    assert parquet.read_table(put_aside).drop_columns(["dropped"]) == before
    assert run.sampled.collected.read_bytes() == undisturbed.sampled.collected.read_bytes()
    assert not drawn.exists()
