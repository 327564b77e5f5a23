"""Jobs in a stand-in for Slurm's queue: killed submissions, jobs by hand, logs, and the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run.graph import compile_graph
from pipeline.run.ledger import Ledger
from pipeline.slurm.queue import SlurmError, call, queued
from pipeline.slurm.stage import _starts
from stages.settings import RunSettings
from tests.awaiting import PATIENCE_SECONDS

Braid = Callable[..., tuple[int, str, str]]


def killed_submission(config: Path, profile: Path, runs: Path, slurm: Path) -> None:
    """`braid submit` whose sbatch kills it when the job is in the queue."""
    (slurm / "killer").touch()
    command = [sys.executable, "-m", "pipeline.cli", "submit", "--runs-dir", str(runs)]
    found = subprocess.run([*command, str(config), "--cluster", str(profile)], check=False)
    assert found.returncode == -9
    (slurm / "killer").unlink()


def test_a_job_whose_submission_was_killed_is_adopted(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    killed_submission(config, profile, runs, slurm)
    ledger = Ledger(runs / "small" / "ledger.jsonl")
    assert ledger.events() == []
    status = " ".join(braid("status", "small")[1].split())
    assert "cold_start submitted" in status
    assert "job 100 waits: Priority" in status
    assert ledger.events() == []  # looking changes nothing
    assert "has jobs in Slurm's queue: 100" in braid("resume", "small")[2]
    code, out, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "cold_start: submitted already (job 100 waits: Priority)" in out
    [first, *others] = ledger.events()
    assert (first.stage, first.job) == ("cold_start", "100")
    assert first.cause == "as job 100, which was in the queue"
    assert [each.job for each in others] == ["101_0", "101_1", "102", "103", "104"]
    assert "--dependency=afterok:100 " in (slurm / "submitted").read_text().splitlines()[1]
    assert not (runs / "small" / "slurm" / "submitting").exists()


def test_a_job_whose_submission_was_killed_is_cancelled(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    killed_submission(config, profile, runs, slurm)
    code, out, err = braid("cancel", "small")
    assert (code, out, err) == (0, "cold_start: cancelled (job 100)\n", "")
    assert (slurm / "cancelled").read_text() == "100\n"


def by_hand(slurm: Path, number: str, run: Path, stage: str) -> None:
    """Queue a job as a person does who submits a command of submit.sh."""
    fields = (number, "PENDING", "Priority", "0:00", "4:00", "", f"{run}/{stage}")
    with (slurm / "queue").open("a") as queue:
        queue.write("\x1f".join(fields) + "\n")


def test_a_job_by_hand_is_known_though_nothing_was_ever_submitted(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    by_hand(slurm, "7", runs / "small", "experts.sums")
    code, out, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "experts.sums: submitted already (job 7 waits: Priority)" in out
    assert "experts.sums" not in (slurm / "queue").read_text().split("\n", 1)[1]


def test_a_job_for_a_stage_that_is_done_changes_nothing(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("run", config)[0] == 0
    ledger = runs / "small" / "ledger.jsonl"
    before = ledger.read_text()
    by_hand(slurm, "7", runs / "small", "cold_start")
    code, out, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "cold_start: done already" in out
    assert not (slurm / "submitted").exists()
    assert braid("cancel", "small")[1] == "cold_start: cancelled (job 7)\n"
    assert (slurm / "cancelled").read_text() == "7\n"
    assert ledger.read_text() == before


def test_logs_are_what_the_job_printed(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    log = runs / "small" / "stages" / "cold_start" / "attempt_1" / "rank_0.log"
    log.write_text("")
    assert "rank_0.log is empty: ranks print errors only" in braid("logs", "small", "cold_start")[1]
    Ledger(runs / "small" / "ledger.jsonl").append("cold_start", "running", "x", 1, job="9")
    (runs / "small" / "slurm").mkdir()
    (runs / "small" / "slurm" / "small.cold_start-9.out").write_text("step 1/2\nstep 2/2\n")
    assert braid("logs", "small", "cold_start")[1] == "step 1/2\nstep 2/2\n"
    assert "is empty" in braid("logs", "small", "cold_start", "--rank", "0")[1]


def following(
    monkeypatch: pytest.MonkeyPatch, config: Path, braid: Braid, runs: Path, slurm: Path, calls: str
) -> Path:
    """Have the stand-in for squeue do one of these lines of shell a call, the last one for good.
    In them, `shows STATE` prints job 9 of cold_start, `$run` is the run's directory, and `$out`
    what the job prints. Returns the file `$out`."""
    monkeypatch.setattr("pipeline.report.explain.ASK_SECONDS", 0.0)
    monkeypatch.setattr("pipeline.report.explain.LOOK_SECONDS", 0.01)
    assert braid("run", config, "--only", "cold_start")[0] == 0
    run = runs / "small"
    (run / "slurm").mkdir()
    output = run / "slurm" / "small.cold_start-9.out"
    (slurm / "calls").write_text(calls)
    (slurm / "squeue").write_text(
        f"""#!/bin/bash
run='{run}'; out='{output}'; folder=$(dirname "$0")
shows() {{
    printf '9\\x1f%s\\x1fNone\\x1f0:01\\x1f4:00\\x1fn1\\x1f%s/cold_start\\n' "$1" "$run"
}}
echo >> "$folder/asked"
number=$(wc -l < "$folder/asked") lines=$(wc -l < "$folder/calls")
eval "$(sed -n "$((number < lines ? number : lines))p" "$folder/calls")"
"""
    )
    return output


def test_a_job_s_output_is_followed_until_the_job_has_ended(
    monkeypatch: pytest.MonkeyPatch, braid: Braid, config: Path, runs: Path, slurm: Path
) -> None:
    # The ledger has the stage as done before the job prints so, and before its table of results.
    calls = 'shows RUNNING\nshows RUNNING; echo "done in 1 s" >> "$out"\nshows COMPLETING\n:\n'
    output = following(monkeypatch, config, braid, runs, slurm, calls)
    output.write_text("step 2/2\n")
    ledger = Ledger(runs / "small" / "ledger.jsonl")
    ledger.append("cold_start", "running", "x", 1, job="9")
    ledger.append("cold_start", "done", "finished", 1, 1.0)
    assert braid("logs", "small", "cold_start", "-f") == (0, "step 2/2\ndone in 1 s\n", "")


def test_a_pending_job_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, braid: Braid, config: Path, runs: Path, slurm: Path
) -> None:
    line = {"time": "2026-01-01T00:00:00+00:00", "stage": "cold_start", "attempt": 1, "cause": "x"}
    done = json.dumps({**line, "state": "done"})
    calls = (
        'shows PENDING\nshows RUNNING; echo "step 1/2" >> "$out"\n'
        f"shows RUNNING; echo '{done}' >> \"$run/ledger.jsonl\"\n"
        ': ; echo "done in 1 s" >> "$out"\n:\n'
    )
    following(monkeypatch, config, braid, runs, slurm, calls)
    Ledger(runs / "small" / "ledger.jsonl").append("cold_start", "failed", "x", 1, 1.0)
    (runs / "small" / "stages" / "cold_start" / "attempt_1" / "rank_0.log").unlink()
    Ledger(runs / "small" / "ledger.jsonl").submitted("cold_start", "as job 9", 1, "9")
    code, out, err = braid("logs", "small", "cold_start", "-f")
    assert (code, err) == (0, "")
    assert out == "step 1/2\ndone in 1 s\n"


def test_a_job_that_cannot_start_its_stage_says_so_in_the_ledger(
    braid: Braid,
    config: Path,
    profile: Path,
    runs: Path,
    slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert braid("submit", config, "--cluster", profile, "--prepare")[0] == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    code, _, err = braid("stage", "small", "experts.sums")
    assert code == 1
    assert "experts.sums needs cold_start, which is pending\nrun those first, or make" in err
    [event] = Ledger(runs / "small" / "ledger.jsonl").events()
    assert (event.stage, event.state, event.job) == ("experts.sums", "failed", "7")
    assert "job 7 was refused: missing dependencies" in braid("why", "small", "experts.sums")[1]
    # What another job does is not talked over.
    Ledger(runs / "small" / "ledger.jsonl").append(
        "experts.sums", "submitted", "as job 8", 0, job="8"
    )
    assert braid("stage", "small", "experts.sums")[0] == 1
    assert Ledger(runs / "small" / "ledger.jsonl").events()[-1].job == "8"


def test_an_sbatch_that_outlives_its_caller_keeps_others_from_submitting(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    (slurm / "slow").touch()
    try:
        killed_submission(config, profile, runs, slurm)
        code, _, err = braid("submit", config, "--cluster", profile)
    finally:
        (slurm / "slow").unlink()
    assert code == 1
    assert "small is being run by process" in err
    deadline = time.monotonic() + PATIENCE_SECONDS
    while braid("submit", config, "--cluster", profile)[0]:
        assert time.monotonic() < deadline
    assert len((slurm / "submitted").read_text().splitlines()) == 5


def test_a_stage_s_attempts_restart_with_every_job(tmp_path: Path, settings: RunSettings) -> None:
    ledger, stage = Ledger(tmp_path / "ledger.jsonl"), compile_graph(settings)[0]
    for attempt in (1, 2):
        ledger.append(stage.name, "running", "from the start", attempt, job="7")
        ledger.append(stage.name, "submitted", "job 7 again: lost", attempt, job="7")
    assert len(_starts(ledger.events(), stage)) == 2
    ledger.append(stage.name, "running", "from step 4", 3, job="8")  # it began at once
    ledger.submitted(stage.name, "as job 8", 2, "8")
    assert _starts(ledger.events(), stage) == ["from step 4"]
    ledger.submitted(stage.name, "as job 9", 3, "9")
    assert _starts(ledger.events(), stage) == []


def test_a_job_that_ends_before_its_line_is_written_is_not_recorded_again(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    line = {"time": "2026-01-01T00:00:00+00:00", "stage": "cold_start", "attempt": 1, "job": "100"}
    states = ({"state": "running", "cause": "x"}, {"state": "failed", "cause": "its own"})
    lines = "\n".join(json.dumps({**line, **each}) for each in states)
    (slurm / "first").write_text(
        f"if [ $1 = 100 ]; then cat >> '{runs}/small/ledger.jsonl' <<'END'\n{lines}\nEND\nfi\n"
    )
    assert braid("submit", config, "--cluster", profile)[0] == 0
    events = Ledger(runs / "small" / "ledger.jsonl").events()
    found = [(each.state, each.cause) for each in events if each.stage == "cold_start"]
    assert found == [("running", "x"), ("failed", "its own")]


JOB = "\x1f".join(("9", "RUNNING", "None", "0:10", "4:00", "n1", "(null)"))


@pytest.mark.parametrize(
    "line",
    [
        *("half a line", "\x00" * 200_000, "\ufffd\x1f", JOB.rpartition("\x1f")[0]),
        *(JOB.replace("9", number, 1) for number in ("-x", "", "9;rm", "--me", "9_", "9_[a]", "٩")),
    ],
    ids=lambda line: ascii(line[:12]),
)
def test_a_line_of_squeue_that_cannot_be_read_is_an_error(
    line: str, braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    """A job on it would seem to have left the queue, and `submit` would submit it again."""
    assert braid("submit", config, "--cluster", profile)[0] == 0
    (slurm / "queue").write_text(f"{JOB}\n{line}\n")
    jobs, ledger = (slurm / "submitted").read_text(), (runs / "small/ledger.jsonl").read_text()
    for words in (["cancel", "small"], ["submit", config, "--cluster", profile]):
        code, out, err = braid(*words)
        assert (code, out) == (1, "")
        assert err.startswith("braid: squeue printed a line that cannot be read: '")
        assert len(err) < 700
    assert "Slurm was not asked about this run's jobs" in braid("status", "small")[2]
    assert not (slurm / "cancelled").exists()
    assert (slurm / "submitted").read_text() == jobs
    assert (runs / "small/ledger.jsonl").read_text() == ledger


def test_squeue_may_name_the_cluster_and_lists_one(slurm: Path, tmp_path: Path) -> None:
    """As `squeue -M` prints it, with --noheader too."""
    (slurm / "queue").write_text(f"CLUSTER: alpha\n{JOB}\n")
    assert queued(tmp_path, ["9"])["9"].state == "RUNNING"
    (slurm / "queue").write_text("CLUSTER: alpha\n")
    assert queued(tmp_path, ["9"]) == {}
    (slurm / "queue").write_text(f"CLUSTER: alpha\n{JOB}\n\nCLUSTER: beta\n{JOB}\n")
    with pytest.raises(SlurmError, match=r"the jobs of 2 clusters \(alpha, beta\)"):
        queued(tmp_path, ["9"])


def test_no_variable_is_an_option_of_slurms_commands(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the manual pages; accounts and partitions of sbatch are a user's defaults."""
    options = {
        *("SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SQUEUE_STATES", "SQUEUE_PARTITION"),
        *("SQUEUE_FORMAT2", "SQUEUE_FEDERATION", "SCANCEL_STATE", "SCANCEL_INTERACTIVE"),
        "SLURM_JOB_ID",
    }
    defaults = {"SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION"}
    for name in options | defaults:
        monkeypatch.setenv(name, "x")
    (slurm / "sprio").write_text("#!/bin/bash\nenv\n")
    (slurm / "sprio").chmod(0o755)
    names = {line.partition("=")[0] for line in call(["sprio"]).splitlines()}
    assert names & (options | defaults) == defaults


def test_a_separator_in_a_comment_is_part_of_it(slurm: Path, tmp_path: Path) -> None:
    (slurm / "queue").write_text(f"{JOB}\x1f of\x85mine\n")
    assert queued(tmp_path, ["9"])["9"].number == "9"


def test_a_job_is_known_by_its_comment(slurm: Path, tmp_path: Path) -> None:
    here = tmp_path / "my runs" / "small"
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    jobs = {
        "1": f"{here}/cold_start",
        "3_1": f"{here}/experts.a,experts.b",
        "4": f"{tmp_path}/link/cold_start",
        "5": "/other/runs/small/cold_start",  # Slurm reuses numbers
        "6": "(null)",
        "7": "(null)",
        "8": "a comment of 1/2 words",
        "3_[2-9]": f"{here}/experts.a,experts.b",
    }
    lines = [
        "\x1f".join((number, "PENDING", "Priority", "0:00", "4:00", "", comment))
        for number, comment in jobs.items()
    ]
    (slurm / "queue").write_text("\n".join(lines) + "\n")
    found = queued(here, ["5", "6", "8"])
    assert {number: job.stage for number, job in found.items()} == {
        "1": "cold_start",
        "3_1": "experts.b",
        "4": "cold_start",
        "6": None,
        "8": None,
    }
