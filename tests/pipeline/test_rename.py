"""`braid mv`: work under another name, whatever is killed when, and every wrong way to ask."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import digest
from pipeline.run.ledger import latest
from pipeline.run.rename import Renaming, renaming
from pipeline.run.run import Run
from tests.pipeline.violations import edited_copy

Braid = Callable[..., tuple[int, str, str]]
GATED = (
    "stages.experts.gate={domains: [sums], problems: 20}",
    "domains.sums.objective.kl={reference: cold_start, coefficient: 0.1}",
)


@pytest.fixture
def small(braid: Braid, config: Path, runs: Path) -> Path:
    """A finished run with a gate, and a reference of a KL penalty."""
    assert braid("run", config, *GATED)[0] == 0
    return runs / "small"


def attempts(run: Path) -> dict[str, int]:
    return {
        stage.name: len(list(stage.glob("attempt_*"))) for stage in sorted(run.glob("stages/*"))
    }


def test_a_renamed_block_keeps_its_work(
    braid: Braid, config: Path, small: Path, runs: Path
) -> None:
    minutes = json.loads((small / "results.json").read_text())["minutes"]
    code, out, err = braid("mv", "small", "experts", "teachers")
    assert (code, err) == (0, "")
    assert "experts.sums is now teachers.sums" in out
    assert "gates.experts.sums is now gates.teachers.sums" in out
    assert "      seeded_as: experts.{domain}\n" in out
    assert "      teachers: teachers\n" in out
    names = {path.name for path in (small / "stages").iterdir()}
    assert {"teachers.sums", "teachers.words", "gates.teachers.sums"} <= names
    assert not any("experts" in name for name in names)
    assert braid("status")[1] == "small: 7 done\n"
    results = json.loads((small / "results.json").read_text())
    assert list(results["models"]) == ["cold_start", "teachers.sums", "teachers.words", "merge"]
    assert results["minutes"].keys() == {name.replace("experts", "teachers") for name in minutes}
    of_gate = json.loads((small / "stages/gates.teachers.sums/results.json").read_text())
    assert list(of_gate["models"]) == ["teachers.sums", "cold_start"]
    merge = json.loads((small / "stages/merge/manifest.json").read_text())
    assert merge["parents"].keys() == {"cold_start", "teachers.sums", "teachers.words"}

    before = attempts(small)
    wanted = edited_copy(
        config,
        (
            "experts: {kind: grpo,",
            "teachers: {seeded_as: 'experts.{domain}', kind: grpo,",
        ),
        ("teachers: experts", "teachers: teachers"),
    )
    gated = [each.replace("stages.experts", "stages.teachers") for each in GATED]
    code, out, _ = braid("run", wanted, *gated)
    assert code == 0
    assert "was started with the same config" in out
    assert attempts(small) == before
    events = latest(RunDirectory(small).ledger.events())
    assert events["teachers.sums"].cause == "finished; renamed from experts.sums"
    assert events["experts.sums"].cause == "renamed to teachers.sums"
    spent = json.loads((small / "results.json").read_text())["minutes"]
    assert spent["teachers.sums"] == minutes["experts.sums"]
    assert "experts.sums" not in spent


def test_a_parent_and_its_reference_in_a_penalty_are_renamed(braid: Braid, small: Path) -> None:
    assert braid("mv", "small", "cold_start", "warm")[0] == 0
    assert braid("status")[1] == "small: 7 done\n"
    settings = yaml.safe_load((small / "run.yaml").read_text())
    assert settings["domains"]["sums"]["objective"]["kl"]["reference"] == "warm"
    assert settings["stages"]["merge"]["from"] == "warm"
    assert settings["stages"]["warm"]["seeded_as"] == "cold_start"
    assert list(settings["stages"]) == ["warm", "experts", "merge", "evaluate", "export"]
    solved = json.loads((small / "stages/experts.sums/manifest.json").read_text())
    assert solved["settings"]["objective.kl.reference"] == "warm"
    assert solved["config"] == digest(solved["settings"])


def test_an_own_reference_is_not_a_block(braid: Braid, config: Path, runs: Path) -> None:
    kl = "domains.sums.objective.kl={reference: parent, coefficient: 0.1}"
    wanted = edited_copy(config, ("cold_start", "parent"))
    assert braid("run", wanted, kl)[0] == 0
    assert braid("mv", "small", "parent", "warm")[0] == 0
    assert braid("status")[1] == "small: 6 done\n"
    settings = yaml.safe_load((runs / "small/run.yaml").read_text())
    assert settings["domains"]["sums"]["objective"]["kl"]["reference"] == "parent"


def test_a_renamed_stage_repeats_its_random_numbers(
    braid: Braid, small: Path, config: Path
) -> None:
    assert braid("mv", "small", "experts", "teachers")[0] == 0
    assert braid("run", small / "run.yaml", "--from", "teachers.sums")[0] == 0
    for name in ("teachers.sums", "gates.teachers.sums"):
        job = json.loads((small / f"stages/{name}/attempt_1/job.json").read_text())
        assert job["seeded_as"] == name.replace("teachers", "experts")


def test_back_again_states_no_seed(braid: Braid, small: Path) -> None:
    before = yaml.safe_load((small / "run.yaml").read_text())
    for old, new in (("experts", "b"), ("b", "c"), ("c", "experts")):
        assert braid("mv", "small", old, new)[0] == 0
        assert braid("status")[1] == "small: 7 done\n"
    assert yaml.safe_load((small / "run.yaml").read_text()) == before


def test_the_name_of_a_block_s_stages_is_renamed_alone(
    braid: Braid, config: Path, runs: Path
) -> None:
    named = edited_copy(
        config, ("experts: {kind: grpo,", "experts: {as: 'rl.{domain}', kind: grpo,")
    )
    assert braid("run", named)[0] == 0
    assert braid("mv", "small", "experts", "teachers")[0] == 0  # no directory moves
    assert braid("status")[1] == "small: 6 done\n"
    assert braid("mv", "small", "rl.{domain}", "rlvr.{domain}")[0] == 0
    assert braid("status")[1] == "small: 6 done\n"
    block = yaml.safe_load((runs / "small/run.yaml").read_text())["stages"]["teachers"]
    assert (block["as"], block["seeded_as"]) == ("rlvr.{domain}", "rl.{domain}")
    assert (runs / "small/stages/rlvr.sums").exists()
    assert braid("mv", "small", "rlvr.{domain}", "all")[0] == 1


def test_half_finished_work_continues_under_the_new_name(
    braid: Braid, config: Path, runs: Path
) -> None:
    half = {"merge": {"0": "save_then_break"}}
    assert braid("run", config, actions=half)[0] == 1
    assert braid("mv", "small", "merge", "braided")[0] == 0
    _, out, _ = braid("status", "small", "--json")
    states = {each["name"]: each for each in json.loads(out)["stages"]}
    assert (states["braided"]["state"], states["braided"]["step"]) == ("failed", 1)
    assert braid("resume", "small")[0] == 0
    causes = [
        event.cause
        for event in RunDirectory(runs / "small").ledger.events()
        if event.stage == "braided" and event.state == "running"
    ]
    assert causes == ["from step 1"]


def test_a_stopped_gate_stays_stopped_and_an_overridden_one_overridden(
    braid: Braid, config: Path
) -> None:
    short = {"gates.experts.sums": {"0": "fall_short"}}
    assert braid("run", config, GATED[0], actions=short)[0] == 1
    assert braid("mv", "small", "experts", "b")[0] == 0
    code, _, err = braid("resume", "small")
    assert code == 1
    assert "braid: gate: experts.sums gains -20.0 points" in err
    assert braid("gate", "override", "small", "gates.b.sums", "--reason", "why not")[0] == 0
    assert braid("mv", "small", "b", "c")[0] == 0
    assert braid("resume", "small")[0] == 0


class KilledRename(BaseException):
    """The end of the process, which nothing may catch."""


def steps_of(small: Path) -> int:
    run = Run(small, load(small / "run.yaml"))
    return len(list(renaming(run, "experts", "teachers")._steps(run)))


@pytest.mark.parametrize("torn", [False, True])
def test_the_same_command_finishes_what_a_kill_cut_short(
    torn: bool, braid: Braid, small: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Renaming._steps
    expected: dict[str, str] = {}
    kept = runs / "kept"
    shutil.copytree(small, kept)
    assert braid("mv", "small", "experts", "teachers")[0] == 0
    expected = contents(small)
    for number in range(steps_of(kept) + 1):
        shutil.rmtree(small)
        shutil.copytree(kept, small)

        def killed(self: Renaming, run: RunDirectory, last: int = number):
            for count, step in enumerate(whole(self, run)):
                if count == last:
                    if torn:  # the step happened, and what follows did not
                        step()
                    raise KilledRename
                yield step
            raise KilledRename

        monkeypatch.setattr(Renaming, "_steps", killed)
        with pytest.raises(KilledRename):
            braid("mv", "small", "experts", "teachers")
        monkeypatch.setattr(Renaming, "_steps", whole)
        code, _, err = braid("run", small / "run.yaml")
        assert code == 1
        assert "finish it with: braid mv" in err
        assert "finish it first" in braid("mv", "small", "merge", "x")[2]
        assert braid("mv", "small", "experts", "teachers")[0] == 0
        assert contents(small) == expected
        assert braid("status")[1] == "kept: 7 done\nsmall: 7 done\n"


def contents(run: Path) -> dict[str, str]:
    """Return every file of a run; of the ledger all but the times."""
    found = {
        str(path.relative_to(run)): path.read_text()
        for path in run.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }
    lines = map(json.loads, found.pop("ledger.jsonl").splitlines())
    found["ledger.jsonl"] = json.dumps([{**line, "time": ""} for line in lines])
    return found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("expert", "x", 'no block expert; did you mean "experts"?'),
        ("experts.sums", "x", "experts.sums is a stage of experts; rename all of its stages"),
        ("gates.experts.sums", "x", "is the gate of experts.sums, and named after it"),
        ("experts", "experts", "experts is its name already"),
        ("experts", "merge", "has merge already; choose another name"),
        ("merge", "experts.sums", "has experts.sums already; choose another name"),
        ("merge", "a/b", "a block's name must be 1 to 100 letters, digits, _ or -"),
        ("merge", "", "a block's name must be 1 to 100 letters, digits, _ or -"),
        ("merge", "../x", "a block's name must be 1 to 100 letters, digits, _ or -"),
        ("merge", "gone", "stages/gone exists, though the run has no stage gone"),
    ],
)
def test_a_wrong_name_is_refused_and_changes_nothing(
    old: str, new: str, message: str, braid: Braid, small: Path
) -> None:
    (small / "stages/gone").mkdir()
    before = contents(small)
    code, _, err = braid("mv", "small", old, new)
    assert code == 1
    assert message in err
    assert contents(small) == before


def test_a_running_run_and_queued_jobs_refuse(
    braid: Braid, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(small)
    with run.lock():
        assert "is being run by process" in braid("mv", "small", "experts", "x")[2]
    with run.lock(shared=True):  # as a stage's job does
        assert "is being run by" in braid("mv", "small", "experts", "x")[2]
    assert braid("mv", "none", "experts", "x")[0] == 1


def test_queued_jobs_refuse(
    braid: Braid, config: Path, slurm: Path, profile: Path, runs: Path
) -> None:
    assert braid("submit", config, "--cluster", profile)[0] == 0
    code, _, err = braid("mv", "small", "experts", "x")
    assert code == 1
    assert "has jobs in Slurm's queue" in err
    assert not (runs / "small/renaming.json").exists()


def test_a_damaged_intent_is_refused(braid: Braid, small: Path) -> None:
    (small / "renaming.json").write_text("{}")
    assert "damaged: not a renaming" in braid("mv", "small", "experts", "x")[2]
    assert "braid mv" in braid("resume", "small")[2]


def test_a_setting_that_was_stale_before_stays_so(braid: Braid, small: Path) -> None:
    """Only what is recorded under the old name becomes the new one."""
    path, key = small / "stages/experts.sums/manifest.json", "objective.kl.reference"
    manifest = json.loads(path.read_text())
    manifest["settings"][key] = "elsewhere"
    path.write_text(json.dumps(manifest))
    assert braid("mv", "small", "cold_start", "warm")[0] == 0
    assert json.loads(path.read_text())["settings"][key] == "elsewhere"
    code, out, _ = braid("status", "small")
    assert code == 0
    assert f'{key} was "elsewhere" and is now "warm"' in out


def test_damaged_manifests_and_results_are_left_alone(braid: Braid, small: Path) -> None:
    (small / "stages/merge/manifest.json").write_text("[]")
    (small / "stages/evaluate/results.json").write_text("[1]")
    assert braid("mv", "small", "experts", "x")[0] == 0
    assert (small / "stages/merge/manifest.json").read_text() == "[]"
    assert (small / "stages/evaluate/results.json").read_text() == "[1]"


def test_models_measured_so_far_are_renamed(braid: Braid, small: Path) -> None:
    evaluation = small / "stages/evaluate"
    for name in ("models", "solved"):
        (evaluation / name).mkdir(exist_ok=True)
        (evaluation / name / "experts.sums.json").write_text("{}")
    (evaluation / "samples/experts.sums").mkdir(parents=True)
    (evaluation / "metrics.jsonl").write_text('{"step": 1, "model": "experts.sums"}\n')
    assert braid("mv", "small", "experts", "x")[0] == 0
    assert (evaluation / "models/x.sums.json").exists()
    assert (evaluation / "solved/x.sums.json").exists()
    assert (evaluation / "samples/x.sums").exists()
    assert '"x.sums"' in (evaluation / "metrics.jsonl").read_text()


def test_a_name_with_another_meaning_in_a_reference_is_refused(braid: Braid, small: Path) -> None:
    before = contents(small)
    code, _, err = braid("mv", "small", "cold_start", "ema")  # the penalty's own average
    assert code == 1
    assert "ema is not the name of a stage in objective.kl.reference" in err
    assert contents(small) == before
