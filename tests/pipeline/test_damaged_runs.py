"""Commands that only look at runs, on files that something else has written: they report what they
can, and never end in a traceback."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.validate import dump_resolved
from pipeline.launch.progress import latest
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.lineage import read_manifest, write_manifest
from pipeline.run.run import Run
from stages.directory import StageDirectory, ended_early
from stages.settings import RunSettings

Braid = Callable[..., tuple[int, str, str]]

SCORE = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 400}
DEEP = "[" * 100_000
WRONG = ("null", "7", '"[/x]"', "[]", "{}", '[{"a": []}]', "1e400", DEEP, '{"ended": 5}')


def look(braid: Braid, *stages: str) -> Iterator[tuple[int, str, str]]:
    """Run every command that only looks at the run `small` beside the run `other`."""
    for command in (("status",), ("status", "small"), ("diff", "small", "other")):
        yield braid(*command)
    for stage in stages:
        yield braid("why", "small", stage)


def finish(run: RunDirectory, settings: RunSettings, without: str = "") -> None:
    """Write what a run leaves whose stages are all done, but for one."""
    run.path.mkdir(parents=True)
    run.settings_file.write_text(dump_resolved(settings))
    run.results.write_text(json.dumps({"models": {"merge": {"sums": SCORE}}}))
    for stage in compile_graph(settings):
        if stage.name == without:
            continue
        directory = run.stage(stage.name)
        write_manifest(directory, Run(run.path, settings).lineage(stage))
        directory.metrics.touch()
        run.ledger.append(stage.name, "done", "finished", 1, 5.0)
        if stage.trains:
            checkpoint = directory.path / "checkpoints" / "step_2"
            checkpoint.mkdir(parents=True)
            (checkpoint / "state.json").write_text("{}")
            (checkpoint / "checksums.json").write_text('{"digest": "d", "files": {}}')
    run.stage("evaluate").results.touch()
    run.stage("export").exported.mkdir()


@pytest.fixture
def small(runs: Path, settings: RunSettings) -> Path:
    """The directory of a finished run, beside the run `other`, which lacks its merge."""
    finish(RunDirectory(runs / "small"), settings)
    finish(RunDirectory(runs / "other"), settings, without="merge")
    return runs / "small"


def test_every_file_of_a_run_may_hold_another_type(braid: Braid, small: Path) -> None:
    assert braid("status")[1] == "other: 3 done, 1 pending, 2 stale\nsmall: 6 done\n"
    stage = small / "stages" / "merge"
    # Its state.json is asked why there is no step_2.
    checkpoint = (stage / "checkpoints" / "step_2").rename(stage / "checkpoints" / "step_1")
    files = [checkpoint / "state.json", checkpoint / "checksums.json", stage / "manifest.json"]
    files += [small / "results.json", small / "ledger.jsonl", stage / "metrics.jsonl"]
    for path, wrong in itertools.product(files, WRONG):
        before = path.read_text()
        path.write_text(wrong)
        (_, every, _), *_ = found = list(look(braid, "merge"))
        assert {(code, err) for code, _, err in found} == {(0, "")}, (path, wrong[:20])
        assert every.startswith("other: 3 done, 1 pending, 2 stale\nsmall: ")
        path.write_text(before)


@pytest.mark.parametrize("wrong", [*WRONG, '{"ended": ["x"]}'])
def test_a_state_that_no_stage_has_written_ends_nothing_early(tmp_path: Path, wrong: str) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checksums.json").write_text('{"digest": "d", "files": {}}')
    (checkpoint / "state.json").write_text(wrong)
    found = StageDirectory(tmp_path).newest_checkpoint()
    assert found is not None
    assert ended_early(found) is None


@pytest.mark.parametrize("seconds", ["1e308", "1" + "0" * 400, "1e300", "NaN", "Infinity"])
def test_seconds_that_nothing_lasts_are_not_summed(braid: Braid, small: Path, seconds: str) -> None:
    line = {"time": "2026-01-01T00:00:00+00:00", "stage": "merge", "state": "done", "cause": "x"}
    text = json.dumps({**line, "attempt": 1, "seconds": 5}).replace("5}", f"{seconds}}}")
    with (small / "ledger.jsonl").open("a") as ledger:
        ledger.write(2 * f"{text}\n")
    for code, _, err in look(braid, "merge"):
        assert (code, err) == (0, "")


RESULTS = [
    {"[/x]": {"[/y]": SCORE}},
    {"merge": {"sums": {**SCORE, "accuracy": 10**400}}},
    {"merge": {"sums": {**SCORE, "high": float("nan")}}},
]


@pytest.mark.parametrize("models", RESULTS, ids=["markup", "huge", "not a number"])
def test_results_are_shown_as_they_stand_or_said_to_be_damaged(
    braid: Braid, small: Path, models: dict[str, Any]
) -> None:
    (small / "results.json").write_text(json.dumps({"models": models}))
    code, out, err = braid("status", "small")
    assert (code, err) == (0, "")
    assert "[/x]" in out if "[/x]" in models else "results.json is damaged" in out


WRONG_FIELDS = [
    {"versions": {"torch": 2}},
    {"versions": {"torch": None}},
    {"parents": {"cold_start": 7}},
    {"parents": {"cold_start": ["x"]}},
    {"files": {"tokenizer": {"a": 1}}},
    {"files": {"tokenizer": [1]}},
    {"code": ["x"]},
    {"routing": {}},
    {"stage": 7},
]


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=str)
def test_a_manifest_of_other_types_is_damaged(
    braid: Braid, small: Path, fields: dict[str, Any]
) -> None:
    path = small / "stages" / "experts.sums" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    assert read_manifest(StageDirectory(path.parent)) is None
    for code, _, err in look(braid, "experts.sums", "merge"):
        assert (code, err) == (0, "")
    out = braid("why", "small", "experts.sums")[1]
    assert out.startswith("experts.sums is stale: its manifest.json is missing or damaged\n")


@pytest.mark.parametrize("depth", [100, 900, 990, 5_000, 50_000])
def test_a_manifest_may_be_nested_to_any_depth(braid: Braid, small: Path, depth: int) -> None:
    path = small / "stages" / "experts.sums" / "manifest.json"
    for field in ("settings", "layout"):
        before = path.read_text()
        nested = f'{{"seed": {"[" * depth}{"]" * depth}}}'
        text = json.dumps({**json.loads(before), field: "HERE"}).replace('"HERE"', nested)
        path.write_text(text)
        for code, _, err in look(braid, "experts.sums"):
            assert (code, err) == (0, "")
        path.write_text(before)


def test_times_and_steps_that_no_stage_has_are_no_progress(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for first, last in (
        ({"step": 1, "time": -1.7e308}, {"step": 2, "time": 1.7e308}),
        ({"step": 1, "time": 0.0}, {"step": 2, "time": 1.7e308}),
        ({"step": -(10**308), "time": 0.0}, {"step": 10**308, "time": 1.0}),
        ({"step": 1, "time": 0.0}, {"step": 2, "time": 1.0, "steps": 10**308}),
    ):
        lines = [{"steps": 100, **line} for line in (first, last)]
        metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert len(latest(metrics)) < 100
