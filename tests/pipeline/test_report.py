"""`braid report` without a browser: what it writes, when, and what it says where it cannot."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page import file
from pipeline.report.page.recorded import chosen_problems
from pipeline.report.page.timelines import own_seconds
from pipeline.report.page.training import MOST_POINTS, curves
from pipeline.run.directory import RunDirectory
from pipeline.run.routing import StepLoads, churn, read_loads
from pipeline.run.timeline import Phase
from stages.sampling.expert_loads import SCHEMA as LOADS
from stages.sampling.sample_files import samples_file, write_samples, write_table
from stages.settings import RunSettings
from tests.pipeline.recorded_runs import HEALTHY, STAGE, log, sample
from tests.pipeline.recorded_runs import recorded as recorded  # fixtures
from tests.pipeline.recorded_runs import small as small

Braid = Callable[..., tuple[int, str, str]]


def data(report: Path) -> dict[str, Any]:
    """Return the data in a report."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)<', report.read_text())
    assert found is not None
    document: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return document


def test_a_report_is_one_file_without_an_address(recorded: Path, braid: Braid) -> None:
    code, out, err = braid("report", "small")
    assert code == 0, err
    assert out.startswith(f"{recorded / 'report.html'}: ")
    text = (recorded / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "MIT License" in text or "The MIT License" in text  # of the charts
    assert len(data(recorded / "report.html")["samples"][STAGE]["columns"]["step"]) == 8


def test_the_settings_are_those_that_differ_from_their_defaults(small: Path, braid: Braid) -> None:
    braid("report", "small")
    settings = data(small / "report.html")["settings"]
    assert "layout:\n  ranks: 2\n  expert: 2\n" in settings
    assert "kind: grpo" in settings  # which block it is
    assert "deterministic" not in settings


def test_a_run_before_its_first_step_has_a_report(
    runs: Path, settings: RunSettings, config: Path, braid: Braid
) -> None:
    braid("run", config, "--dry-run")
    assert braid("report", "small")[0] == 1  # there is none
    small = runs / "small"
    small.mkdir(parents=True)
    (small / "run.yaml").write_text(json.dumps(settings.model_dump(mode="json")))
    code, _, err = braid("report", "small")
    assert code == 0, err
    found = data(small / "report.html")
    assert {stage["state"] for stage in found["stages"]} == {"pending"}
    assert found["samples"] == found["curves"] == {}


@pytest.mark.usefixtures("small")
def test_only_a_file_is_replaced(tmp_path: Path, braid: Braid) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("", tmp_path, tmp_path / "pipe"):
        code, _, err = braid("report", "small", "--output", path)
        assert code == 2 and "is not a file that could be replaced" in err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "file").write_text("no folder")
    code, _, err = braid("report", "small", "--output", tmp_path / "file" / "report.html")
    assert code == 1 and "write it elsewhere with: --output FILE" in err
    (tmp_path / "link").symlink_to(tmp_path / "linked.html")
    assert braid("report", "small", "--output", tmp_path / "link")[0] == 0
    assert data(tmp_path / "link") and not (tmp_path / "link").is_symlink()
    assert not (tmp_path / "linked.html").exists()  # it may be any file of this user


def test_the_demo_is_written_without_a_run(
    tmp_path: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert braid("report", "--demo")[0] == 0
    demo = data(tmp_path / "braid-demo.html")
    braid("report", "small")
    assert demo.keys() == data(recorded / "report.html").keys()  # of this version
    [name] = [stage["name"] for stage in demo["stages"] if stage["kind"] == "distill"]
    assert demo["samples"][name]["tokens"] and demo["routing"][name]["owned"]
    assert "name no RUN" in braid("report", "small", "--demo")[2]
    assert "name a RUN" in braid("report")[2]


@pytest.mark.usefixtures("small")
def test_missing_charts_are_named_with_the_command_that_brings_them(
    braid: Braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "CHARTS", tmp_path / "nowhere")
    code, _, err = braid("report", "small")
    assert code == 1
    assert "python -m tools.vendor" in err


def test_a_watched_run_is_written_again_once_a_stage_has_saved(
    small: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = iter([True] * 2)
    monkeypatch.setattr("pipeline.commands.report._is_running", lambda _: next(running, False))

    def save(_: float) -> None:
        checkpoint = small / "stages" / STAGE / "checkpoints" / "step_9"
        checkpoint.mkdir()
        (checkpoint / "checksums.json").write_text('{"digest": "e", "files": {}}')

    monkeypatch.setattr("pipeline.commands.report.time.sleep", save)
    code, out, err = braid("report", "small", "--watch")
    assert code == 0, err
    assert out.count("report.html") == 2


def test_a_long_curve_keeps_its_newest_step() -> None:
    lines = [{"step": step, "time": 0.0, "loss": step / 3} for step in range(1, 2 * MOST_POINTS)]
    found = curves(lines)
    assert len(found["step"]) <= MOST_POINTS + 1
    assert found["step"][-1] == lines[-1]["step"]
    assert found["metrics"]["loss"][0] == 0.333333


def test_a_redacted_report_quotes_nothing(recorded: Path, braid: Braid) -> None:
    """The failure of a reward, which ends a stage, quotes the prompt and the response."""
    said = "the reward failed on 'a secret'"
    rows = [sample(4, "a secret", None, reward_failure=said, reward_messages={"exact": said})]
    write_samples(samples_file(recorded / "stages" / STAGE / "rollouts", 4), rows)
    ledger = RunDirectory(recorded).ledger
    for stage in (STAGE, "evaluate"):
        (recorded / "stages" / stage / "manifest.json").unlink()
        for state in ("running", "failed"):
            ledger.append(stage, state, said, 2, 1.0)
    ledger.append("cold_start", "running", said, 2)
    shutil.copytree(recorded, recorded.with_name("other"))
    found = {}
    for options in ((), ("--redact",)):
        code, _, err = braid("report", "small", "other", *options)
        assert code == 0, err
        found[options] = json.dumps(data(recorded / "report.html"))
    assert found[()].count("secret") >= 10
    assert "secret" not in found["--redact",]


def test_other_runs_of_one_name_are_told_apart(small: Path, runs: Path, braid: Braid) -> None:
    copies = [runs.parent / where / "small" for where in ("one", "two")]
    for copy in copies:
        shutil.copytree(small, copy)
    code, _, err = braid("report", "small", *copies)
    assert code == 0, err
    assert list(data(small / "report.html")["others"]) == [str(copy) for copy in copies]


def test_guards_say_when_they_fired(small: Path, braid: Braid) -> None:
    low = {**HEALTHY, "entropy": 0.001}
    log(small, [HEALTHY] * 3 + [low] * 7 + [HEALTHY] + [low] * 4)
    braid("report", "small")
    guards = data(small / "report.html")["guards"][STAGE]
    [guard] = [each for each in guards if each["name"] == "entropy_collapse"]
    assert guard["fired"] == [8]  # the fifth of seven; four are too few


A, B, C = "a00000001", "b00000002", "c00000000"


@pytest.mark.parametrize(("most", "kept"), [(9, None), (8, [C, A]), (5, [C]), (1, [C])])
def test_problems_are_chosen_by_the_end_of_their_keys(most: int, kept: list[str] | None) -> None:
    assert chosen_problems([Counter({A: 2, B: 1, C: 5}), Counter({A: 1})], most) == kept


def test_the_experts_of_evenly_spaced_steps_are_read(small: Path) -> None:
    directory = RunDirectory(small).stage(STAGE)
    for step in range(1, 8):
        row = {"step": step, "domain": "sums", "layer": 0, "slots": [1, 1]}
        write_table(directory.routing / f"step_{step:06d}.parquet", [row], LOADS)
    assert [each.step for each in read_loads(directory, 3)] == [1, 4, 7]
    assert [each.step for each in read_loads(directory)] == [*range(1, 8)]


def test_churn_is_the_share_of_slots_that_moved() -> None:
    steps = [[[2, 2], [4, 0]], [[2, 2], [2, 2]], [[0, 4], [2, 2]]]  # by layer and expert
    loads = [StepLoads(number, {"sums": slots}) for number, slots in enumerate(steps)]
    assert churn(loads) == [(1, 0.25), (2, 0.25)]


def test_a_phase_counts_without_those_inside_it() -> None:
    phases = [
        Phase("rank 0", "step", 0.0, 10.0),
        Phase("rank 0", "rollout", 1.0, 7.0),
        Phase("rank 0", "wait", 2.0, 6.0),
        Phase("rank 0", "step", 10.0, 11.0),
        Phase("rank 0", "wait", 11.0),  # lasts
    ]
    assert own_seconds(phases) == {"step": 5.0, "rollout": 2.0, "wait": 4.0}
