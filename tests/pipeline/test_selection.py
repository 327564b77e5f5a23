"""Running some of a run's stages, rerunning some, and reusing those of another run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.test_gate_runs import attempts
from tests.pipeline.violations import cells, extending

Braid = Callable[..., tuple[int, str, str]]


def in_two_rounds(config: Path) -> Path:
    return extending(config, "two-rounds", "cold_start", "merge", "merge_2")


def digests(run: Path) -> dict[str, str]:
    """Return the digest of the newest checkpoint of every stage that has one."""
    found = sorted(run.glob("stages/*/checkpoints/step_*/checksums.json"))
    return {path.parts[-4]: json.loads(path.read_text())["digest"] for path in found}


def test_only_the_named_stages_run(braid: Braid, config: Path, runs: Path) -> None:
    code, out, err = braid("run", config, "--only", "cold_start", "--only", "experts.words")
    assert (code, err) == (0, "")
    assert "small: 2 done, 4 pending\n" in out
    assert attempts(runs / "small") == {"cold_start": 1, "experts.words": 1}
    assert braid("resume", "small")[0] == 0
    assert set(attempts(runs / "small").values()) == {1}


def test_a_stage_alone_needs_its_inputs(braid: Braid, config: Path, runs: Path) -> None:
    code, _, err = braid("run", config, "--only", "merge")
    assert code == 1
    assert "  merge needs cold_start, which is pending\n" in err
    assert "  merge needs experts.sums, which is pending\n" in err
    code, _, err = braid("run", config, "--only", "merg")
    assert code == 1
    assert 'has no stage merg; did you mean "merge"?' in err
    assert not runs.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "merge"], "merge needs cold_start, which is pending"),
        (["--from", "merg"], "has no stage merg; did you mean"),
        (["--from", "merge", "--only", "evaluate"], "evaluate needs merge, which is pending"),
        (["--parallel", "99999"], "--parallel 99999 needs 99999 CPU cores"),
        (["engine={count: 9999, placement: own}"], "engine.placement: own needs 10000 CPU cores"),
        (["--fork", "nothing"], "no run nothing in"),
        (["--fork", "one", "--only", "evaluate"], "evaluate needs merge, which is pending"),
    ],
)
def test_options_that_are_refused_leave_nothing(
    braid: Braid, config: Path, runs: Path, options: list[str], message: str
) -> None:
    experts = ["cold_start", "experts.sums", "experts.words"]
    only = [each for name in experts for each in ("--only", name)]
    assert braid("run", config, "--name", "one", *only)[0] == 0
    code, out, err = braid("run", config, *options)
    assert (code, out) == (1, "")
    assert message in err
    assert [path.name for path in runs.iterdir()] == ["one"]


def test_a_refused_selection_moves_nothing(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config)[0] == 0
    before = digests(runs / "small")
    for command, name in (("run", config), ("resume", "small")):
        code, _, err = braid(command, name, "--from", "cold_start", "--only", "merge")
        assert code == 1
        assert "  merge needs experts.sums, which is pending\n" in err
    assert digests(runs / "small") == before
    assert not (runs / "small" / "replaced").exists()


def test_a_stage_alone_may_need_what_a_fork_reuses(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, "--name", "one")[0] == 0
    (runs / "two").mkdir(mode=0o700)  # nothing of a run yet
    code, out, err = braid(
        "run", config, "--name", "two", "--fork", "one", "--from", "merge", "--only", "merge"
    )
    assert (code, err) == (0, "")
    assert attempts(runs / "two")["merge"] == 1
    assert "put aside" in out


def test_an_edited_domain_reruns_its_expert_and_dependents(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config)[0] == 0
    before = digests(runs / "small")
    edit = "domains.sums.objective.kl.coefficient=0.5"
    code, _, err = braid("run", config, edit)
    assert code == 1
    assert "finished or started stages depend on it: experts.sums, merge, evaluate, export\n" in err
    assert "--from experts.sums" in err
    assert digests(runs / "small") == before

    code, out, err = braid("run", config, edit, "--from", "experts.sums")
    assert (code, err) == (0, "")
    assert f"put aside {runs}/small/replaced/experts.sums.1\n" in out
    assert "] experts.words" not in out
    assert (runs / "small" / "replaced" / "merge.1" / "manifest.json").exists()
    ledger = (runs / "small" / "ledger.jsonl").read_text()
    assert "put aside as" in ledger
    assert braid("resume", "small", "--from", "merge")[0] == 0
    assert (runs / "small" / "replaced" / "merge.2").exists()
    assert braid("resume", "small", "--from", "nothing")[0] == 1


def test_stale_stages_that_are_not_rerun_are_still_refused(braid: Braid, config: Path) -> None:
    assert braid("run", config)[0] == 0
    edit = "domains.sums.objective.kl.coefficient=0.5"
    code, _, err = braid("run", config, edit, "--from", "merge")
    assert code == 1
    assert "--from experts.sums" in err


def test_settings_that_no_stage_has_used_may_change(braid: Braid, config: Path) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    code, out, err = braid("run", config, "stages.merge.optimizer.learning_rate=0.5")
    assert (code, err) == (0, "")
    assert "stages.merge.optimizer.learning_rate: 0.001 there, 0.5 here\n" in out


def test_a_fork_reuses_identical_stages(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, "--name", "one")[0] == 0
    edit = "domains.sums.objective.kl.coefficient=0.5"
    code, out, err = braid("run", config, "--name", "two", "--fork", "one", edit)
    assert (code, err) == (0, "")
    assert f"reused from {runs}/one: cold_start, experts.words\n" in out
    assert "] cold_start" not in out
    assert "] experts.sums  done" in out
    ours, theirs = digests(runs / "two"), digests(runs / "one")
    assert ours["cold_start"] == theirs["cold_start"]
    assert ours["experts.words"] == theirs["experts.words"]
    assert attempts(runs / "two")["experts.words"] == 0

    code, out, _ = braid(
        "run", config, "--name", "three", "--fork", "one", "seed=3", "--only", "cold_start"
    )
    assert code == 0
    assert "no stage: none is finished" in out


def test_a_fork_of_no_run_says_so(braid: Braid, config: Path, runs: Path) -> None:
    code, _, err = braid("run", config, "--name", "two", "--fork", "none")
    assert code == 1
    assert "no run none in" in err
    assert not (runs / "two").exists()


def test_experts_without_a_merge_end_with_their_results(
    braid: Braid, config: Path, runs: Path
) -> None:
    code, out, err = braid("run", config, "stages={merge: null, export: null}")
    assert (code, err) == (0, "")
    assert f"results: {runs}/small/results.json\n" in out
    assert "merge" not in attempts(runs / "small")


def test_an_imported_model_is_no_expert_of_a_run_s_only_domain(
    braid: Braid, config: Path, start: Path
) -> None:
    imported = config.with_name("imported.yaml")
    domain = (
        "sums: {prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"
    )
    imported.write_text(
        config.read_text().partition("domains:")[0]
        + f"domains:\n  {domain}\nstages:\n  initial: {{kind: import}}\n"
        "  experts: {kind: grpo, from: initial, for_each: domain}\n  evaluate: {kind: evaluate}\n"
    )
    code, out, err = braid("run", imported, f"model.initial_weights={start}")
    assert (code, err) == (0, "")
    marked = [line.split()[0] for line in out.splitlines() if "◆ " in line and "±" in line]
    assert marked == ["experts.sums"]


def test_two_rounds_run_one_after_another(braid: Braid, config: Path, runs: Path) -> None:
    code, out, err = braid("run", in_two_rounds(config))
    assert (code, err) == (0, "")
    assert "◆" in next(line for line in out.splitlines() if line.startswith("round_2.experts.s"))
    assert attempts(runs / "small")["round_2.merge"] == 1


def test_a_finished_run_continues_with_another_round(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config)[0] == 0
    code, _, err = braid("run", in_two_rounds(config))
    assert code == 1
    assert "finished or started stages depend on it: evaluate, export\n" in err
    assert "or rerun the dependent stages with --from evaluate --from export;\n" in err
    code, out, err = braid("run", config, "--from", "evaluate", "--from", "export")
    assert (code, err) == (0, "")
    assert "] merge" not in out
    assert "] round_2.merge  done" in out


def test_a_dry_run_shows_what_the_options_do(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config)[0] == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))

    def shown(*options: str) -> tuple[dict[str, str], list[str]]:
        code, out, err = braid("run", config, "--dry-run", *options)
        assert (code, err) == (0, "")
        plan, _, commands = out.partition("\n\nengine ")
        rows = {cells(line)[0]: line for line in plan.splitlines() if cells(line)}
        started = [line.split("/stages/")[1].split()[0] for line in commands.splitlines()[2:]]
        return rows, started

    rows, started = shown("--from", "merge", "--only", "merge")
    assert " done " in rows["experts.sums"]
    assert " is kept" in rows["experts.sums"]
    assert " pending  is put aside, and starts" in rows["merge"]
    assert " pending  is put aside, and left out by --only" in rows["evaluate"]
    assert started == ["merge/attempt_1/job.json"]

    edit = "domains.sums.objective.kl.coefficient=0.5"
    forked = ("--name", "two", "--fork", "small", edit)
    rows, started = shown(*forked)
    assert " done     is reused from " in rows["experts.words"]
    assert " pending  starts" in rows["experts.sums"]
    assert [each.split("/")[0] for each in started] == [
        *("experts.sums", "merge", "evaluate", "export")
    ]
    assert "no command: nothing" in braid("run", config, "--dry-run")[1]
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "merg"], "has no stage merg; did you mean"),
        (["--from", "merge", "--only", "evaluate"], "evaluate needs merge, which is pending"),
        (["seed=1"], "was started with a different config"),
        (["--name", "two", "--fork", "none"], "no run none in"),
    ],
)
def test_a_dry_run_refuses_what_the_command_would(
    braid: Braid, config: Path, options: list[str], message: str
) -> None:
    assert braid("run", config)[0] == 0
    code, out, err = braid("run", config, "--dry-run", *options)
    assert (code, out) == (1, "")
    assert message in err


def test_a_dry_run_refuses_stale_inputs(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config)[0] == 0
    (runs / "small" / "stages" / "merge" / "manifest.json").unlink()
    code, _, err = braid("run", config, "--dry-run")
    assert (code, "merge: its manifest.json is missing" in err) == (1, True)
    assert braid("run", config, "--dry-run", "--from", "merge")[0] == 0


def test_an_evaluation_alone_writes_the_results_of_the_run(
    braid: Braid, config: Path, runs: Path
) -> None:
    trained = ("cold_start", "experts.sums", "experts.words", "merge")
    assert braid("run", config, *(part for name in trained for part in ("--only", name)))[0] == 0
    code, out, err = braid("resume", "small", "--only", "evaluate")
    assert (code, err) == (0, "")
    assert f"results: {runs}/small/results.json\n" in out  # and no merged model yet
    assert "accuracy in %" in braid("status", "small")[1]
