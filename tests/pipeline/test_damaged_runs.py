"""Commands that only look at runs, on files that something else or an older version has written:
they report what they can, and never end in a traceback."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.read import ConfigError
from pipeline.config.validate import dump_resolved, load
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
    run.stage("evaluate").results.write_text(json.dumps({"models": {"merge": {"sums": SCORE}}}))
    run.stage("export").exported.mkdir()


@pytest.fixture
def small(runs: Path, settings: RunSettings) -> Path:
    """The directory of a finished run, beside the run `other`, which lacks its merge."""
    finish(RunDirectory(runs / "small"), settings)
    finish(RunDirectory(runs / "other"), settings, without="merge")
    return runs / "small"


# Overrides that an older version started, and this one refuses to start.
REFUSED = {
    "correction": (
        "domains.sums.objective.ratio={name: geometric}",
        "domains.sums.objective.correction.level: token has no meaning under ratio geometric",
    ),
    "optimizer": (
        "domains.sums.optimizer={learning_rate: 1.0e-3, betas: [0.9, 0.99], precision_aware: true}",
        "domains.sums.optimizer.precision_aware: requires ",
    ),
    "dynamic sampling": (
        "domains.sums={prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1.0e-3},"
        " loop: {steps: 2}, rollout: {dynamic_sampling: 2},"
        " objective: {advantage: {name: reinforce_pp}, ratio: {name: token}}}",
        "domains.sums.rollout.dynamic_sampling_by: advantages replaces no prompt",
    ),
    "reward": (
        "domains.sums.rewards={a: {kind: code}}",
        "domains.sums.rewards.a.kind: problems of reasoning_gym have no tests",
    ),
    "layout": ("layout.expert=16", "layout.expert: 16 does not divide model.experts = 8"),
}


def started(config: Path, override: str) -> RunSettings:
    """Return the settings that an older version would have started."""
    tree = load(config).model_dump(mode="json")
    key, _, value = override.partition("=")
    *blocks, last = key.split(".")
    block = tree
    for name in blocks:
        block = block[name]
    block[last] = yaml.safe_load(value)
    return RunSettings.model_validate(tree)


@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_could_no_longer_start_is_read_by_every_command(
    braid: Braid, config: Path, runs: Path, tmp_path: Path, override: str, message: str
) -> None:
    settings = started(config, override)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.write_text(dump_resolved(settings))
        load(config)
    finish(RunDirectory(runs / "small"), settings)
    finish(RunDirectory(runs / "other"), settings, without="merge")
    for command in (
        ["status"],
        ["status", "small"],
        ["status", "small", "--json"],
        ["why", "small", "experts.sums"],
        ["diff", "small", "other"],
        ["look", "small"],
        ["report", "small", "other", "--output", tmp_path / "report.html"],
        ["bundle", "small", "--to", tmp_path / "small.tar.gz"],
        ["resume", "small"],  # nothing is left to start
        ["plan", runs / "small" / "run.yaml"],
    ):
        code, _, err = braid(*command)
        if command[0] in ("resume", "plan") and override.startswith("layout"):
            assert code == 1 and message in err  # no stage could use it, and no plan count it
        else:
            assert code == 0, (command, err)
    for command in (["compare", "small"], ["logs", "small", "merge"], ["cancel", "small"]):
        assert message not in braid(*command)[2]


@pytest.mark.parametrize("name", REFUSED)
def test_only_the_stages_that_have_to_start_are_refused(
    braid: Braid, config: Path, runs: Path, name: str
) -> None:
    override, message = REFUSED[name]
    settings = started(config, override)
    for missing in ("experts.sums", "experts.words"):
        finish(RunDirectory(runs / missing), settings, without=missing)
    sums, words = runs / "experts.sums" / "run.yaml", runs / "experts.words" / "run.yaml"
    for command in (["resume", sums.parent], ["run", sums], ["plan", sums]):
        code, out, err = braid(*command, *["--name", "experts.sums"] * (command[0] != "resume"))
        assert (code, out) == (1, ""), err
        assert f"{sums}:" in err and message in err
    stage = braid("stage", words.parent, "experts.sums")[2]
    assert (message in stage) == (name == "layout")  # it is done
    # The layout is of every stage; the merge reads the rewards of all domains.
    plan = braid("plan", words, "--name", "experts.words")
    assert plan[0] == (1 if name in ("layout", "reward") else 0), plan[2]


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
