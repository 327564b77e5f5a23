"""The command as a person meets it: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.commands.audit import _audit_tables
from pipeline.launch import one_off
from pipeline.launch.placement import ForkServers
from stages.keys import NON_INVALIDATING_KEYS
from tests.pipeline.violations import cells

Braid = Callable[..., tuple[int, str, str]]


def files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_valid_configuration_is_said_to_be_so(braid: Braid, config: Path) -> None:
    code, out, _ = braid("validate", config)
    assert (code, out) == (0, f"{config} is valid: 6 stages, domains sums, words\n")


def test_faults_are_listed_on_standard_error(braid: Braid, config: Path) -> None:
    code, out, err = braid("run", config, "--name", "other", "sed=1", "layout.rank=1")
    assert (code, out) == (1, "")
    assert err == (
        "braid: 2 configuration errors:\n"
        'command line: sed: unknown key; did you mean "seed"?\n'
        'command line: layout.rank: unknown key; did you mean "ranks"?\n'
    )


def test_a_misunderstood_command_line_is_exit_code_2(braid: Braid, config: Path) -> None:
    code, _, err = braid("run", config, "--nmae", "other")
    assert code == 2
    assert err.startswith("usage: braid run ")
    assert 'unrecognized arguments: --nmae other; did you mean "--name"?' in err
    fork = braid("plan", config, "--fork", "other")
    assert fork[0] == 2
    assert "--fork other; braid run --dry-run takes --fork" in fork[2]
    assert braid("resume", "small", "seed=1")[0] == 2
    assert braid("evaluate", "small", "--problems", "0")[0] == 2


@pytest.mark.parametrize("given", [[], ["domain"], ["gate"]])
def test_a_command_line_without_a_command_prints_the_help(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(given)
    _, err = capsys.readouterr()
    assert err.startswith(" ".join(["usage: braid", *given, "[-h]"]))
    assert "show this help message" in err


def test_stages_that_an_audit_refuses_for_one_cause_share_a_line() -> None:
    stages = {"cold_start": "no step", "experts.sums": "no step", "evaluate": "no answers"}
    found = [{"stage": name, "step": None, "refused": why} for name, why in stages.items()]
    assert list(_audit_tables(found)) == [
        "\ncold_start; experts.sums are not audited: no step",
        "\nevaluate is not audited: no answers",
    ]


def test_a_dry_run_shows_the_commands_and_leaves_nothing(
    braid: Braid, config: Path, runs: Path
) -> None:
    code, out, _ = braid("run", config, "--dry-run")
    assert code == 0
    assert f"engine 0: {sys.executable} " in out
    assert f"{runs}/small/engine/0/engine.json" in out
    assert f"{runs}/small/stages/experts.sums/attempt_1/job.json" in out
    assert not runs.exists()


def test_a_plan_names_every_parallelism(braid: Braid, config: Path) -> None:
    def title(*overrides: str) -> str:
        # A title that is wider than its table continues in the next line.
        return " ".join(braid("plan", config, *overrides)[1].partition("stage ")[0].split())

    assert title() == "small: seed 0, 2 ranks: data 2; experts: expert 2; 1 engine"
    assert title("layout={ranks: 1, expert: 1}") == "small: seed 0, 1 rank; 1 engine"
    dense = "layout={ranks: 16, tensor: 2, pipeline: 2, virtual_pipeline: 2, context: 2}"
    engines = ("engine.count=3", "engine.tensor=2")
    assert title(dense, "layout.expert_tensor=4", *engines) == (
        "small: seed 0, 16 ranks: data 2, tensor 2, pipeline 2, virtual_pipeline 2, context 2; "
        "experts: expert 2, expert_tensor 4; 3 engines x tensor 2"
    )


def test_a_run_without_a_cold_start(braid: Braid, config: Path, runs: Path, start: Path) -> None:
    cold = (
        "  cold_start:\n    kind: sft\n    optimizer: {learning_rate: 1e-3}\n    loop: {steps: 2}\n"
    )
    text = config.read_text()
    assert cold in text
    imported = config.with_name("imported.yaml")
    text = text.replace(cold, "  initial: {kind: import}\n")
    imported.write_text(text.replace("from: cold_start", "from: initial"))
    without = [imported, f"model.initial_weights={start}"]
    code, out, _ = braid("plan", *without)
    first, expert = map(cells, out.splitlines()[2:4])
    assert (code, first[:4]) == (0, ["initial", "import", "model.initial_weights", "pending"])
    assert expert[:6] == ["experts.sums", "grpo", "initial", "2", "yes", "pending"]
    _, out, _ = braid("plan", "--memory", *without)
    [memory] = [line for line in out.splitlines() if line.startswith("initial ")]
    assert len(memory.split()) == 5  # name, parameters, total, and no optimizer
    code, out, err = braid("run", *without)
    assert (code, err) == (0, "")
    assert "[1/6] initial  done in" in out
    results = json.loads((runs / "small" / "results.json").read_text())
    assert next(iter(results["models"])) == "initial"
    assert braid("status")[1] == "small: 6 done\n"
    assert "cold_start" in braid("run", config)[2]  # another start is another run


def test_a_run_from_its_start_to_its_table(braid: Braid, config: Path, runs: Path) -> None:
    code, out, err = braid("run", config, children=True)
    assert (code, err) == (0, "")
    assert "[2/6] experts.sums  done in" in out
    assert "◆ 50.0 ± 5.0" in out
    exported = f"{runs}/small/stages/export/huggingface"
    assert f"model of merge: {exported}\n  vllm serve {exported}\n" in out
    assert set(json.loads((runs / "small" / "results.json").read_text())) == {"models", "minutes"}

    ledger = (runs / "small" / "ledger.jsonl").read_text()
    code, out, _ = braid("run", config)
    assert code == 0
    assert "was started with the same config: resuming it" in out
    assert (runs / "small" / "ledger.jsonl").read_text() == ledger

    assert braid("status")[1] == "small: 6 done\n"
    assert "experts.words  done" in braid("status", "small")[1]


def test_another_configuration_under_the_same_name_is_refused(
    braid: Braid, config: Path, runs: Path
) -> None:
    braid("run", config)
    before = files(runs)
    code, _, err = braid("run", config, "seed=1", "domains.sums.loop.steps=3")
    assert code == 1
    assert "  seed: 0 there, 1 here\n  domains.sums.loop.steps: 2 there, 3 here\n" in err
    assert files(runs) == before


def test_what_changes_no_result_may_change_in_a_run(braid: Braid, config: Path, runs: Path) -> None:
    braid("run", config, actions={"merge": {"1": "say_why"}})
    settings = runs / "small" / "run.yaml"
    neutral = [
        "engine.kv_cache_mebibytes=32",
        "domains.sums.loop.keep_last=1",
        "domains.sums.guards.drift={threshold: 0.5, action: stop}",
    ]
    before = settings.read_text()
    code, _, err = braid("run", config, *neutral, "seed=1")
    assert code == 1
    assert "only these settings may change:\n  logging\n  launch\n  layout\n  rewards: " in err
    assert "\n  every domain and stage: guards\n" in err
    assert settings.read_text() == before

    code, out, err = braid("run", config, *neutral)
    assert (code, err) == (0, "")
    assert "engine.kv_cache_mebibytes: null there, 32 here\n" in out
    assert "domains.sums.loop.keep_last: 2 there, 1 here\n" in out
    assert "[3/6]" not in out
    assert "kv_cache_mebibytes: 32" in settings.read_text()


def test_a_run_goes_on_under_another_layout(braid: Braid, config: Path, runs: Path) -> None:
    braid("run", config, actions={"merge": {"1": "say_why"}})
    code, out, err = braid("run", config, "layout={ranks: 4, tensor: 2}")
    assert (code, err) == (0, "")
    assert "layout.ranks: 2 there, 4 here\n" in out
    assert "[3/6]" not in out
    ran_on = {
        path.parent.name: json.loads(path.read_text())["layout"]["ranks"]
        for path in runs.glob("small/stages/*/manifest.json")
    }
    assert (ran_on["cold_start"], ran_on["merge"]) == (2, 4)


def test_the_help_of_resume_names_what_may_change(braid: Braid) -> None:
    code, out, _ = braid("resume", "--help")
    assert code == 0
    for pattern in NON_INVALIDATING_KEYS[1:]:
        assert pattern.rpartition(".")[2] in out


def test_a_failure_tells_the_stage_and_how_to_go_on(braid: Braid, config: Path, runs: Path) -> None:
    code, _, err = braid("run", config, actions={"merge": {"1": "say_why"}})
    assert code == 1
    assert "braid: stage merge failed: domain chain_sum has no prompts\n" in err
    assert "stages/merge/attempt_1/rank_1.log\n" in err
    assert "continue with: braid resume " in err
    assert braid("status", "small")[1].endswith(f"\ncontinue with: braid resume {runs}/small\n")
    assert "continue" not in braid("status", "small", "--json")[1]
    code, out, _ = braid("resume", "small")
    assert code == 0
    assert "[3/6]" not in out
    assert "[4/6] merge  done in" in out
    assert "continue with" not in braid("status", "small")[1]


def test_the_command_to_go_on_with_repeats_what_was_asked_for(
    braid: Braid, config: Path, runs: Path
) -> None:
    only = ("--only", "experts.sums", "--only", "cold_start", "--parallel", "2")
    fails = {"experts.sums": {"1": "say_why"}}
    for given in (("run", config, *only), ("resume", "small", *only, "--from", "cold_start")):
        code, _, err = braid(*given, actions=fails)
        assert code == 1
        assert err.endswith(f"continue with: braid resume {runs}/small {' '.join(only)}\n")


def test_an_engine_that_fails_again_and_again_leaves_a_run_to_resume(
    braid: Braid, config: Path, runs: Path
) -> None:
    actions = {"experts.sums": {"0": "kill_every_engine", "1": "hang"}}
    code, out, err = braid("run", config, "engine.max_restarts=1", actions=actions)
    killed = "engine 0 was killed by SIGKILL (out of memory?)"
    restarted = f"{killed}; restarting it (1 of at most 1)"
    failed = f"{killed}; it was restarted once, the most that engine.max_restarts = 1 allows"
    assert code == 1
    assert f"[2/6] experts.sums  {restarted}\n" in out
    assert f"braid: stage experts.sums failed: {failed}\n" in err
    assert err.endswith(f"continue with: braid resume {runs}/small\n")
    lines = (runs / "small" / "ledger.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["stage"] == "experts.sums"]
    assert [(event["state"], event["cause"]) for event in events] == [
        ("running", "from the start"),
        ("running", restarted),
        ("failed", failed),
    ]
    assert braid("resume", "small")[0] == 0


def test_a_refit_is_checked_when_asked(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, "--check-refit")[0] == 0
    assert "check_refit: true" in (runs / "small" / "run.yaml").read_text()


def test_a_run_that_cannot_be_read_hides_no_other(braid: Braid, config: Path, runs: Path) -> None:
    braid("run", config, actions={"experts.sums": {"0": "say_why"}})
    (runs / "small" / "stages" / "cold_start" / "attempt_1.old").mkdir()
    (runs / "small" / "stages" / "cold_start" / "checkpoints" / "step_20.bak").mkdir()
    (runs / "old").mkdir()
    (runs / "old" / "run.yaml").write_text("nam: old\n")
    code, out, err = braid("status")
    assert (code, err) == (0, "")
    assert out.startswith("old: 5 configuration errors:")
    assert 'run.yaml:1: nam: unknown key; did you mean "name"?\n' in out
    assert out.endswith("\nsmall: 2 done, 1 failed, 3 pending\n")


def test_a_run_is_read_from_another_working_directory(
    braid: Braid, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(problem, response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    own = "domains.sums.rewards={own: {kind: python, function: my_rewards:score}}"
    braid("run", config, own)
    monkeypatch.chdir("/")
    assert braid("status")[1] == "small: 6 done\n"
    assert braid("status", "small")[0] == 0
    assert braid("evaluate", "small", "--stage", "merge")[0] == 0
    assert braid("export", "small", "--stage", "merge", "--to", tmp_path / "model")[0] == 0
    code, _, err = braid("resume", "small")
    assert code == 1
    assert "domains.sums.rewards.own.function: no module my_rewards in the working directory" in err


def test_an_empty_name_is_not_a_missing_one(braid: Braid, config: Path, runs: Path) -> None:
    code, out, err = braid("run", config, "--name", "", "--dry-run")
    assert (code, out) == (1, "") and "command line: name: " in err
    code, out, err = braid("run", config, "--fork", "", "--dry-run")
    assert (code, out) == (1, "") and "no run  in" in err


def test_an_unknown_run_names_the_known_ones(braid: Braid, config: Path, runs: Path) -> None:
    (runs / "small").mkdir(parents=True)
    (runs / "small" / "run.yaml").write_text("")
    code, _, err = braid("resume", "smal")
    assert code == 1
    assert err == f'braid: no run smal in {runs}; did you mean "small"?\n'


def test_more_answers_are_refused_where_a_domain_answers_greedily(
    braid: Braid, config: Path
) -> None:
    braid("run", config, "domains.sums.evaluation.temperature=0")
    code, _, err = braid("evaluate", "small", "--samples", 4)
    assert code == 1
    assert err.startswith("braid: domains.sums.evaluation.temperature: 4 greedy answers"), err
    assert braid("evaluate", "small", "--samples", 4, "--temperature", 1)[0] == 0


def test_one_more_evaluation_and_export(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    braid("run", config, actions={"experts.words": {"0": "say_why"}})
    code, out, err = braid("evaluate", "small", "--stage", "experts.sums", "--problems", 9)
    assert (code, err) == (0, "")
    assert "experts.sums" in out
    assert "cold_start" not in out

    narrow = ("--domain", "sums", "--problems", 9, "--samples", 4, "--temperature", 0.5)
    code, out, err = braid("evaluate", "small", *narrow, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["models"].keys() == {"cold_start", "experts.sums"}
    job = job_of(runs / "small", "evaluations")
    assert job["evaluated_on"] == {"cold_start": ["sums"], "experts.sums": ["sums"]}
    assert found["results"].startswith(job["directory"])
    asked = job["settings"]["evaluation"]
    assert (asked["problems"], asked["samples_per_problem"], asked["temperature"]) == (9, 4, 0.5)
    assert braid("evaluate", "small", *narrow, "--top-p", 0.95, "--top-k", 20)[0] == 0
    asked = job_of(runs / "small", "evaluations")["settings"]["evaluation"]
    assert (asked["top_p"], asked["top_k"]) == (0.95, 20)
    code, _, err = braid("evaluate", "small", "--domain", "sum")
    assert (code, err) == (1, 'braid: --domain sum: no such domain; did you mean "sums"?\n')
    code, _, err = braid("evaluate", "small", "--samples", 2, "--temperature", 0)
    assert code == 1
    assert err.startswith("braid: --samples: 2 greedy answers to a problem are identical"), err
    code, _, err = braid("evaluate", "small", "--top-k", 10_000)
    assert code == 1
    assert err.startswith("braid: --top-k: 10000 is more than model.vocabulary_size = "), err
    assert braid("evaluate", "small", "--problems", "\u0663")[0] == 2
    code, _, err = braid("evaluate", "small", "--step", "9" * 300)
    assert code == 2
    assert "9999 is not a number from 0 to" in err
    for flag, wrong in (
        ("--temperature", "nan"),
        ("--temperature", 2.5),
        ("--top-p", 2.0),
        ("--top-k", -1),
        ("--samples", 257),
    ):
        code, _, err = braid("evaluate", "small", flag, wrong)
        assert code == 1
        assert err.startswith(f"braid: {flag} {wrong}: input should be"), err

    code, _, err = braid("evaluate", "small", "--problems", 1)
    assert code == 1
    assert "--problems: 1 is less than the 2 data-parallel ranks of layout" in err

    code, _, err = braid("evaluate", "small", "--stage", "merge")
    assert code == 1
    assert "stage merge is pending" in err

    to = tmp_path / "model"
    assert braid("export", "small", "--stage", "experts.sums", "--to", to)[0] == 0
    (to / "config.json").write_text("{}")
    code, _, err = braid("export", "small", "--stage", "experts.sums", "--to", to)
    assert (code, err) == (1, f"braid: {to} exists and is not empty; choose another --to\n")
    (link := tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    code, _, err = braid("export", "small", "--stage", "experts.sums", "--to", link)
    there = f"{link} is a link; name the directory itself: --to {tmp_path / 'empty'}"
    assert (code, err) == (1, f"braid: {there}\n")


def job_of(run: Path, folder: str) -> dict[str, Any]:
    """Return the job of the newest evaluation or export."""
    newest = max((run / folder).glob("*/attempt_1/job.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def test_a_checkpoint_that_was_kept_on_the_way_is_taken_by_its_step(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    braid("run", config, actions={"experts.words": {"0": "say_why"}})
    kept = runs / "small" / "stages" / "experts.sums" / "checkpoints"
    shutil.copytree(kept / "step_2", kept / "step_1")
    (kept / "step_9").mkdir()  # not whole
    sums = ("--stage", "experts.sums", "--step")
    code, out, err = braid("export", "small", *sums, 1, "--to", tmp_path / "best")
    assert (code, err) == (0, "")
    assert out.endswith(f"exported experts.sums of step 1 to {tmp_path}/best\n")
    assert job_of(runs / "small", "exports")["parent"] == str(kept / "step_1")
    code, out, err = braid("evaluate", "small", *sums, 1)
    assert (code, err) == (0, "")
    assert "\nexperts.sums, step 1  ◆ 50.0 ± 5.0 " in out
    [found] = (runs / "small" / "evaluations").glob("*/results.json")
    assert out.endswith(f"\nresults: {found}\n")
    assert job_of(runs / "small", "evaluations")["models"] == {"experts.sums": str(kept / "step_1")}
    for command in (("export", "small", "--to", tmp_path / "none"), ("evaluate", "small")):
        code, out, err = braid(*command, *sums, 9)
        assert (code, out) == (1, "")
        assert err == (
            f"braid: stage experts.sums of {runs}/small has no checkpoint of step 9: it has "
            "steps 1, 2\n"
        )
    assert "--step 1 needs --stage: a step" in braid("evaluate", "small", "--step", 1)[2]
    assert (
        "no stage experts.sum has a model"
        in braid("evaluate", "small", "--stage", "experts.sum", "--step", 1)[2]
    )
    assert "words of " in braid("evaluate", "small", "--stage", "experts.words", "--step", 1)[2]
    assert braid("evaluate", "small", *sums, "last")[0] == 2


def test_a_stage_that_is_not_done_gives_its_checkpoints_by_their_steps(
    braid: Braid, config: Path, runs: Path
) -> None:
    braid("run", config, actions={"experts.sums": {"0": "save_then_break"}})
    sums = ("--stage", "experts.sums")
    assert "stage experts.sums is failed" in braid("evaluate", "small", *sums)[2]
    assert braid("evaluate", "small", *sums, "--step", 1)[0] == 0
    settings = runs / "small" / "run.yaml"
    settings.write_text(settings.read_text().replace("seed: 0\n", "seed: 7\n"))
    error = braid("evaluate", "small", *sums, "--step", 1)[2]
    assert "experts.sums is stale" in error
    rerun = error.strip().rpartition("finish it with: braid ")[2].split()
    assert rerun == ["resume", f"{runs}/small", "--from", "cold_start"]
    (runs / "small" / "cluster.yaml").touch()
    assert f"braid submit {settings} --runs-dir" in braid("evaluate", "small", *sums)[2]
    (runs / "small" / "cluster.yaml").unlink()
    assert braid(*rerun)[0] == braid("evaluate", "small", *sums)[0] == 0


def test_a_full_disk_is_one_line_with_the_path(
    braid: Braid, config: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("parallel.files.os.fsync", full)
    code, _, err = braid("run", config)
    assert (code, err) == (1, f"braid: {runs}/small/run.yaml: No space left on device\n")
    assert [path.name for path in (runs / "small").iterdir()] == ["run.lock"]


def test_it_prints_the_versions_that_a_bug_report_needs(braid: Braid) -> None:
    code, out, _ = braid("--version")
    assert code == 0
    assert out.startswith(f"braid {metadata.version('braid')}, revision ")
    assert f"\ntorch {metadata.version('torch')}\n" in out


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_no_error(tmp_path: Path, closed: int) -> None:
    command = f"exec {sys.executable} -m pipeline.cli status --runs-dir {tmp_path} {closed}>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    said = f"no runs in {tmp_path}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said if closed != 1 else "", "")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_ranks_of_an_evaluation_are_forked(
    enabled: bool, braid: Braid, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    class Servers(ForkServers):
        def __init__(self, logs: Path, enabled: bool) -> None:
            happened.append(enabled)
            super().__init__(logs, enabled=False)

        def of(self, command: Sequence[str]) -> None:
            happened.append("asked")

        def __exit__(self, *error: object) -> None:
            happened.append("closed")

    braid("run", config, f"launch.fork_servers={str(enabled).lower()}")
    monkeypatch.setattr(one_off, "ForkServers", Servers)
    assert braid("evaluate", "small", "--stage", "merge")[0] == 0
    assert happened[0] is enabled and happened[-1] == "closed"
    assert "asked" in happened
