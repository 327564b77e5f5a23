"""A block that says `was`: its work is kept under another name, whatever is killed when."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.run import former
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import digest
from pipeline.run.ledger import latest
from tests.pipeline.violations import edited_copy

Braid = Callable[..., tuple[int, str, str]]
KL = "domains.sums.objective.kl={{reference: {}, coefficient: 0.1}}"
GATED = ("stages.{}.gate={{domains: [sums], problems: 20}}", KL)


def gated(block: str = "experts", reference: str = "cold_start") -> list[str]:
    return [GATED[0].format(block), GATED[1].format(reference)]


@pytest.fixture
def small(braid: Braid, config: Path, runs: Path) -> Path:
    """A finished run with a gate, and a reference of a KL penalty."""
    assert braid("run", config, *gated())[0] == 0
    return runs / "small"


def experts_as(config: Path, name: str, was: str | None = "experts") -> Path:
    """Return the configuration with the block `experts` under another name."""
    key = f"was: {was}, " if was else ""
    return edited_copy(
        config,
        ("experts: {kind: grpo,", f"{name}: {{{key}kind: grpo,"),
        ("teachers: experts", f"teachers: {name}"),
    )


def warm(config: Path) -> Path:
    """Return the configuration with the block `cold_start` renamed, and all that names it."""
    return edited_copy(config, ("cold_start", "warm"), ("warm:\n", "warm:\n    was: cold_start\n"))


def attempts(run: Path) -> dict[str, int]:
    return {
        stage.name: len(list(stage.glob("attempt_*"))) for stage in sorted(run.glob("stages/*"))
    }


def contents(run: Path) -> dict[str, str]:
    """Return every file of a run; of the ledger all but the times."""
    files = {
        str(path.relative_to(run)): path.read_text()
        for path in run.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }
    lines = map(json.loads, files.pop("ledger.jsonl").splitlines())
    files["ledger.jsonl"] = json.dumps([{**line, "time": ""} for line in lines])
    return files


def test_a_renamed_block_keeps_its_work(braid: Braid, config: Path, small: Path) -> None:
    RunDirectory(small).ledger.append("experts.sums", "done", "finished", 1, seconds=600)
    before = {name.replace("experts", "rl"): count for name, count in attempts(small).items()}
    renamed = experts_as(config, "rl")
    code, out, err = braid("plan", renamed, *gated("rl"))  # which moves nothing
    assert (code, err, "edit:" in out) == (0, "", False)
    assert out.count("done") == 7 and (small / "stages/experts.sums").exists()
    code, out, _ = braid("run", renamed, *gated("rl"))
    assert code == 0, out
    assert braid("status")[1] == "small: 7 done\n"
    assert attempts(small) == before
    results = json.loads((small / "results.json").read_text())
    assert list(results["models"]) == ["cold_start", "rl.sums", "rl.words", "merge"]
    assert results["minutes"]["rl.sums"] == pytest.approx(10, abs=5)
    assert "experts.sums" not in results["minutes"]
    of_gate = json.loads((small / "stages/gates.rl.sums/results.json").read_text())
    assert list(of_gate["models"]) == ["rl.sums", "cold_start"]
    merge = json.loads((small / "stages/merge/manifest.json").read_text())
    assert merge["parents"].keys() == {"cold_start", "rl.sums", "rl.words"}
    events = latest(RunDirectory(small).ledger.events())
    assert events["rl.sums"].cause == "finished; renamed from experts.sums"
    assert events["experts.sums"].cause == "renamed to rl.sums"
    assert "was started with the same config" in braid("run", renamed, *gated("rl"))[1]


def test_a_parent_and_its_reference_in_a_penalty_are_renamed(
    braid: Braid, config: Path, small: Path
) -> None:
    assert braid("plan", warm(config), *gated(reference="warm"))[1].count("done") == 7
    assert braid("run", warm(config), *gated(reference="warm"))[0] == 0
    assert braid("status")[1] == "small: 7 done\n"
    experts = json.loads((small / "stages/experts.sums/manifest.json").read_text())
    assert experts["settings"]["objective.kl.reference"] == "warm"
    assert experts["config"] == digest(experts["settings"])


def test_a_renamed_stage_repeats_its_random_numbers(
    braid: Braid, config: Path, small: Path
) -> None:
    assert braid("run", experts_as(config, "rl"), *gated("rl"))[0] == 0
    assert braid("run", small / "run.yaml", "--from", "rl.sums")[0] == 0
    for name in ("rl.sums", "gates.rl.sums"):
        job = json.loads((small / f"stages/{name}/attempt_1/job.json").read_text())
        assert job["seeded_as"] == name.replace("rl", "experts")
    # Their manifests now have the second name too: they are known by the first.
    assert braid("run", experts_as(config, "c"), *gated("c"))[0] == 0
    assert "rl.sums" not in attempts(small)


def test_the_key_stays_the_first_name_and_goes_with_it(
    braid: Braid, config: Path, small: Path
) -> None:
    before = yaml.safe_load((small / "run.yaml").read_text())
    for name, was in (("b", "experts"), ("c", "'experts.{domain}'"), ("experts", None)):
        assert braid("run", experts_as(config, name, was), *gated(name))[0] == 0
        assert set(attempts(small).values()) == {1}
        assert braid("status")[1] == "small: 7 done\n"
    assert yaml.safe_load((small / "run.yaml").read_text()) == before


def test_a_run_of_an_older_version_has_the_key_seeded_as(
    braid: Braid, config: Path, small: Path
) -> None:
    assert braid("run", experts_as(config, "rl"), *gated("rl"))[0] == 0
    path = small / "run.yaml"
    path.write_text(path.read_text().replace("    was:", "    seeded_as:"))
    assert "seeded_as: experts" in path.read_text()
    assert braid("resume", "small")[0] == 0
    assert set(attempts(small).values()) == {1}


def test_a_name_that_never_was_changes_nothing(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", experts_as(config, "rl", "never"))[0] == 0
    assert braid("run", experts_as(config, "rl", "never"))[0] == 0
    assert braid("status")[1] == "small: 6 done\n"
    assert set(attempts(runs / "small").values()) == {1}


def test_half_finished_work_continues_under_the_new_name(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, actions={"merge": {"0": "save_then_break"}})[0] == 1
    renamed = edited_copy(
        config, ("\n  merge:\n", "\n  braided:\n    was: merge\n"), ("from: merge", "from: braided")
    )
    assert braid("run", renamed)[0] == 0
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
    assert braid("run", config, GATED[0].format("experts"), actions=short)[0] == 1
    code, _, err = braid("run", experts_as(config, "b"), GATED[0].format("b"))
    assert code == 1
    assert "braid: gate: experts.sums gains -20.0 points" in err
    assert braid("gate", "override", "small", "gates.b.sums", "--reason", "why not")[0] == 0
    assert braid("run", experts_as(config, "c"), GATED[0].format("c"))[0] == 0


class KilledMove(BaseException):
    """The end of the process, which nothing may catch."""


def test_the_next_start_finishes_what_a_kill_cut_short(
    braid: Braid, config: Path, small: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, renamed = runs / "copy", experts_as(config, "rl")
    shutil.copytree(small, copy)
    assert braid("run", renamed, *gated("rl"))[0] == 0
    expected, steps = contents(small), 0
    writes = {
        former: ("save_manifest", "write_atomically", "_record"),
        former.Ledger: ("append",),
        Path: ("rename",),
    }
    whole = {(holder, name): getattr(holder, name) for holder in writes for name in writes[holder]}

    def killed_after(count: int) -> bool:
        """Start the renamed run, and kill it after `count` writes; return whether it was."""
        done = 0
        move = former.move_stages

        def moving(*arguments: object) -> None:
            for (holder, name), function in whole.items():
                monkeypatch.setattr(holder, name, counted(function))
            try:
                move(*arguments)  # type: ignore[arg-type]
            finally:
                for (holder, name), function in whole.items():
                    monkeypatch.setattr(holder, name, function)

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def write(*arguments: object, **options: object) -> object:
                nonlocal done
                if done == count:
                    raise KilledMove
                done += 1
                return function(*arguments, **options)

            return write

        monkeypatch.setattr(former, "move_stages", moving)
        try:
            braid("run", renamed, *gated("rl"))
        except KilledMove:
            return True
        finally:
            monkeypatch.setattr(former, "move_stages", move)
        return False

    while True:
        shutil.rmtree(small)
        shutil.copytree(copy, small)
        if not killed_after(steps):
            break
        assert braid("status", "small")[1].count(" done") == 7, steps
        assert braid("resume", "small")[0] == 0
        assert contents(small) == expected, steps
        steps += 1
    assert steps > 10


@pytest.mark.parametrize("name", ["rl.sums", "rl.words", "gates.rl.sums"])
def test_a_directory_in_the_place_of_a_new_name_is_refused(
    name: str, braid: Braid, config: Path, small: Path
) -> None:
    (small / "stages" / name).mkdir()
    code, _, err = braid("run", experts_as(config, "rl"), *gated("rl"))
    assert code == 1
    assert f"stages/{name}: exists without a manifest.json, and the work of {name} is in" in err
    assert (small / "stages/experts.sums/manifest.json").exists()


# A stage of another name reads the manifests and models that are renamed.
@pytest.mark.parametrize("name", ["experts.sums", "merge"])
def test_a_running_stage_is_not_moved(
    name: str, braid: Braid, config: Path, slurm: Path, profile: Path, small: Path
) -> None:
    run = RunDirectory(small)
    with run.lock(shared=True), run.lock_stage(name):  # as a stage's job does
        options = ("--cluster", profile, "--prepare")
        code, _, err = braid("submit", experts_as(config, "rl"), *gated("rl"), *options)
    assert code == 1
    assert f"stage {name} of" in err and ": running; rename stages when it has ended" in err
    assert (small / "stages/experts.sums/manifest.json").exists()


def test_a_setting_that_was_stale_before_stays_so(braid: Braid, config: Path, small: Path) -> None:
    """Only what is recorded under the old name becomes the new one."""
    path, key = small / "stages/experts.sums/manifest.json", "objective.kl.reference"
    manifest = json.loads(path.read_text())
    manifest["settings"][key] = "elsewhere"
    path.write_text(json.dumps(manifest))
    _, out, _ = braid("plan", warm(config), *gated(reference="warm"))
    assert f'{key} was "elsewhere" and is now "warm"' in out


def test_damaged_manifests_and_results_are_left_alone(
    braid: Braid, config: Path, small: Path
) -> None:
    (small / "stages/merge/manifest.json").write_text("[]")
    (small / "stages/evaluate/metrics.jsonl").write_text("[1]")
    assert braid("run", experts_as(config, "x"), *gated("x"), "--from", "merge")[0] == 0
    assert (small / "stages/x.sums").exists()
    assert (small / "replaced/merge.1/manifest.json").read_text() == "[]"
    assert (small / "replaced/evaluate.1/metrics.jsonl").read_text() == "[1]"


def test_models_measured_so_far_are_renamed(braid: Braid, config: Path, small: Path) -> None:
    evaluation = small / "stages/evaluate"
    for name in ("models", "solved"):
        (evaluation / name).mkdir(exist_ok=True)
        (evaluation / name / "experts.sums.json").write_text("{}")
    (evaluation / "samples/experts.sums").mkdir(parents=True)
    (evaluation / "metrics.jsonl").write_text('{"step": 1, "model": "experts.sums"}\n')
    assert braid("run", experts_as(config, "x"), *gated("x"))[0] == 0
    assert (evaluation / "models/x.sums.json").exists()
    assert (evaluation / "solved/x.sums.json").exists()
    assert (evaluation / "samples/x.sums").exists()
    assert '"x.sums"' in (evaluation / "metrics.jsonl").read_text()


def test_a_copy_of_the_work_under_the_first_name_is_left_alone(
    braid: Braid, config: Path, small: Path
) -> None:
    renamed = experts_as(config, "rl"), *gated("rl")
    assert braid("run", *renamed)[0] == 0
    shutil.copytree(small / "stages/rl.sums", small / "stages/experts.sums")
    assert braid("run", *renamed)[0] == 0
    assert (small / "stages/experts.sums/manifest.json").exists()
    assert (small / "stages/rl.sums/manifest.json").exists()


def test_work_that_draws_nothing_is_known_by_the_name_it_had(
    braid: Braid, config: Path, runs: Path
) -> None:
    """No name that random numbers derive from is in its manifest, as in those of before."""
    assert braid("run", config)[0] == 0
    manifest = runs / "small/stages/export/manifest.json"
    assert json.loads(manifest.read_text())["seeded_as"] is None
    moved = edited_copy(config, ("  export: {kind", "  written: {was: export, kind"))
    assert braid("run", moved)[0] == 0
    assert attempts(runs / "small")["written"] == 1
    assert "export" not in attempts(runs / "small")
