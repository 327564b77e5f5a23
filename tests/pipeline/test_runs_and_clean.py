"""`braid runs` lists runs in a table; `braid clean` deletes what nothing in them needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.support.runs import read_run
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.lineage import read_manifest, write_manifest
from stages.settings import RunSettings
from tests.pipeline.measured_runs import Measured, Skill, answers, keys, write_run

Braid = Callable[..., tuple[int, str, str]]
DOMAINS = ("sums", "words")
MODELS = {
    "cold_start": {domain: Skill(0.3) for domain in DOMAINS},
    "merge": {domain: Skill(0.6) for domain in DOMAINS},
}


@pytest.fixture
def small(runs: Path, settings: RunSettings) -> Path:
    """A run whose stages are done, each with a checkpoint of step 2, and measured models."""
    write_run(runs / "small", settings, Measured(answers(MODELS), keys(DOMAINS)))
    return runs / "small"


def checkpoint(run: Path, stage: str, step: int, digest: str) -> Path:
    """Write a checkpoint of a thousand bytes and more."""
    path = run / "stages" / stage / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(1000))
    (path / "checksums.json").write_text(json.dumps({"digest": digest, "files": {}}))
    return path


def listed(braid: Braid, *arguments: str) -> dict[str, int]:
    """Return what would be deleted of the run, by its path in it, with its bytes."""
    code, out, err = braid("clean", "small", *arguments, "--json")
    assert code == 0, err
    [run] = json.loads(out)["runs"]
    freed = {
        each["path"].removeprefix(f"{run['run']}/"): each["bytes"] for each in run["leftovers"]
    }
    assert run["bytes"] == sum(freed.values())
    return freed


@pytest.mark.usefixtures("small")
def test_runs_are_listed_with_their_state_size_and_outcome(braid: Braid, runs: Path) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "run.yaml").write_text("layout: 3")
    code, out, err = braid("runs")
    assert (code, err) == (0, "")
    headings, broken, small, why, *_ = out.splitlines()
    assert headings.split() == ["run", "begun", "changed", "state", "size", "outcome"]
    assert broken.split() == ["broken", "unreadable"] and why.startswith("broken: ")
    assert "6 done" in small and " KiB" in small
    assert "merge " in small and " % over 2 domains, +" in small and " points" in small
    both = json.loads(braid("runs", "--json")[1])["runs"]
    assert [run["name"] for run in both] == ["broken", "small"]
    assert both[0]["error"] and both[1]["states"] == {"done": 6}
    assert both[1]["change"] > both[1]["half_width"] > 0
    assert [run["name"] for run in json.loads(braid("runs", "small", "--json")[1])["runs"]] == [
        "small"
    ]
    assert "did you mean" in braid("runs", "smal")[2]


def test_no_runs_are_said(braid: Braid, runs: Path) -> None:
    assert braid("runs")[:2] == (0, f"no runs in {runs}\n")


def test_nothing_is_deleted_without_yes(small: Path, braid: Braid) -> None:
    assert braid("clean", "small")[1] == f"{small}: nothing to delete\n"
    older = checkpoint(small, "merge", 1, "older")
    before = sorted(small.rglob("*"))
    code, out, err = braid("clean", "small")
    assert (code, err) == (0, "")
    assert "stages/merge/checkpoints/step_1" in out and "add --yes" in out
    assert sorted(small.rglob("*")) == before
    code, out, err = braid("clean", "small", "--yes")
    assert (code, err) == (0, "")
    assert out.startswith(f"{small}: ") and " deleted\n" in out
    assert not older.exists() and (older.parent / "step_2").exists()
    assert braid("status", "small")[0] == 0
    assert braid("clean", "small", "--yes")[1] == f"{small}: nothing to delete\n"


def test_what_nothing_needs_is_listed(small: Path, braid: Braid) -> None:
    for name in ("replaced/merge.1/metrics.jsonl", "previews/1/results.json", "previews/2/log"):
        path = small / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(500))
    (small / "stages/merge/checkpoints/tmp_step_1").mkdir()
    outside = small.with_name("precious")
    outside.write_text("precious")
    (small / "replaced" / "linked").symlink_to(outside)
    assert listed(braid).keys() == {
        *("replaced/linked", "replaced/merge.1", "previews/1"),
        "stages/merge/checkpoints/tmp_step_1",
    }
    assert listed(braid, "--yes")
    assert [path.name for path in (small / "previews").iterdir()] == ["2"]  # it may be running
    assert outside.read_text() == "precious"


def test_checkpoints_that_somebody_reads_stay(small: Path, braid: Braid, runs: Path) -> None:
    checkpoint(small, "merge", 1, "older")
    assert listed(braid).keys() == {"stages/merge/checkpoints/step_1"}
    # Another run's stage has started from it.
    directory = RunDirectory(small).stage("export")
    manifest = read_manifest(directory)
    assert manifest is not None
    (runs / "fork" / "stages").mkdir(parents=True)
    (runs / "fork" / "run.yaml").write_text((small / "run.yaml").read_text())
    theirs = RunDirectory(runs / "fork").stage("export")
    theirs.path.mkdir()
    write_manifest(theirs, read_run(RunDirectory(small)).lineage(_stage(small, "export")))
    document = json.loads(theirs.manifest.read_text())
    document["parents"] = {"merge": "older"}
    theirs.manifest.write_text(json.dumps(document))
    assert listed(braid) == {}
    theirs.manifest.unlink()
    # A stage that is not done resumes from its checkpoints.
    RunDirectory(small).ledger.append("merge", "failed", "out of memory", 1)
    assert listed(braid) == {}


def _stage(run: Path, name: str) -> Stage:
    return next(stage for stage in read_run(RunDirectory(run)).stages if stage.name == name)


@pytest.mark.parametrize("setting", ["auditable: false", "keep_best: 0"])
def test_an_audit_s_and_the_best_checkpoints_stay(setting: str, small: Path, braid: Braid) -> None:
    checkpoint(small, "merge", 1, "older")
    path = small / "run.yaml"
    used = setting.replace("false", "true").replace("0", "1")
    assert setting in path.read_text()
    path.write_text(path.read_text().replace(setting, used))
    assert listed(braid) == {}


def test_a_file_of_another_run_too_frees_nothing(small: Path, braid: Braid) -> None:
    older = checkpoint(small, "merge", 1, "older")
    alone = listed(braid)["stages/merge/checkpoints/step_1"]
    os.link(older / "weights", small.with_name("weights"))
    assert listed(braid)["stages/merge/checkpoints/step_1"] == alone - 1000


def test_a_running_run_is_not_cleaned(small: Path, braid: Braid) -> None:
    older = checkpoint(small, "merge", 1, "older")
    with RunDirectory(small).lock():
        code, _, err = braid("clean", "small", "--yes")
    assert code == 1 and "being run by" in err
    assert older.exists()
