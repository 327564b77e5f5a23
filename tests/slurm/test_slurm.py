"""Runs as jobs of a real Slurm complete whatever happens; checkpointed steps never repeat."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.text import shown
from tests.awaiting import PATIENCE_SECONDS
from tests.runs import REPOSITORY
from tests.slurm.on_slurm import STAGES, Braid
from tests.virtual_cluster import Cluster

# Each takes 10 to 50 seconds; two of them cover everything that talks to Slurm.
more = pytest.mark.combinations


def no_step_is_repeated_beyond_a_checkpoint(braid: Braid, stage: str, every: int = 5) -> None:
    """Check that each attempt continues after a periodic checkpoint, or after a signal's."""
    steps = braid.steps(stage)
    assert [step for _, step, _ in steps][-1] == 20
    for (attempt, step, _), (following, next_step, _) in pairwise(steps):
        if following == attempt:
            assert next_step == step + 1
        else:
            assert next_step in (step + 1, step - step % every + 1)
    times = Counter(step for _, step, _ in steps)
    assert set(times) == set(range(1, 21))


def test_a_run_is_submitted_and_ends(braid: Braid) -> None:
    jobs = braid.submit()
    assert list(jobs) == STAGES
    assert jobs["experts.words"] == jobs["experts.sums"].removesuffix("_0") + "_1"
    assert "submitted" in braid("status", "small") or "running" in braid("status", "small")
    assert braid.submit() == {}  # every stage is queued
    braid.wait_for_the_end(jobs)
    status = braid("status", "small")
    assert status.count(" done ") == 6
    assert "accuracy in %" in status
    assert (braid.run / "results.json").exists()
    for stage in STAGES[:4]:
        no_step_is_repeated_beyond_a_checkpoint(braid, stage)
        ranks = [braid("logs", "small", stage, "--rank", rank).strip() for rank in (0, 1)]
        nodes = {said.rpartition(" ")[2] for said in ranks}
        assert len(nodes) == 2  # a stage of two nodes
    assert braid("submit", braid.run / "run.yaml").count("done already") == 6
    assert "done already" in braid("stage", "small", "merge")


@more
def test_a_node_that_dies_costs_the_steps_since_the_checkpoint(
    braid: Braid, cluster: Cluster
) -> None:
    braid.hold("cold_start", 8)
    jobs = braid.submit("--only", "cold_start")
    braid.wait_for_step("cold_start", 8)
    [*_, (_, _, node)] = braid.steps("cold_start")
    cluster.control("kill-node", node)
    braid.wait_for_the_end(jobs)
    cluster.control("start-node", node)
    no_step_is_repeated_beyond_a_checkpoint(braid, "cold_start")
    assert len({attempt for attempt, _, _ in braid.steps("cold_start")}) == 2
    assert node not in {where for attempt, _, where in braid.steps("cold_start") if attempt == 2}


@more
def test_the_other_node_may_die_as_well(braid: Braid, cluster: Cluster) -> None:
    braid.hold("cold_start", 8)
    jobs = braid.submit("--only", "cold_start")
    braid.wait_for_step("cold_start", 8)
    first = braid.steps("cold_start")[-1][2]
    nodes = cluster.call("scontrol", "show", "job", jobs["cold_start"])
    listed = nodes.partition("\n   NodeList=")[2].split()[0]
    [other] = set(cluster.call("scontrol", "show", "hostnames", listed).split()) - {first}
    cluster.control("kill-node", other)
    braid.wait_for_the_end(jobs)
    cluster.control("start-node", other)
    no_step_is_repeated_beyond_a_checkpoint(braid, "cold_start")


@more
def test_a_preempted_job_continues_later(braid: Braid, cluster: Cluster) -> None:
    braid.hold("cold_start", 8)
    jobs = braid.submit("--only", "cold_start")
    braid.wait_for_step("cold_start", 8)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive"]
    cluster.call(*urgent, "--output=/dev/null", "--wrap=sleep 3")
    braid.wait_for_the_end(jobs)
    no_step_is_repeated_beyond_a_checkpoint(braid, "cold_start")
    assert len({attempt for attempt, _, _ in braid.steps("cold_start")}) == 2


def test_a_stage_continues_in_another_slice_after_its_walltime(
    braid: Braid, cluster: Cluster
) -> None:
    braid.hold("cold_start", 7)
    jobs = braid.submit("--only", "cold_start")
    braid.wait_for_step("cold_start", 7)
    # What --signal=B:USR1@... has Slurm send; a walltime is counted in minutes.
    cluster.call("scancel", "--batch", "--signal=USR1", jobs["cold_start"])
    braid.wait_for_the_end(jobs)
    no_step_is_repeated_beyond_a_checkpoint(braid, "cold_start")
    [first, *_] = [step for attempt, step, _ in braid.steps("cold_start") if attempt == 2]
    [*_, last] = [step for attempt, step, _ in braid.steps("cold_start") if attempt == 1]
    assert first == last + 1  # it had saved, so no step repeats
    assert "again: the walltime is near" in (braid.run / "ledger.jsonl").read_text()


@more
def test_a_task_of_an_array_is_requeued_alone(braid: Braid, cluster: Cluster) -> None:
    braid.hold("experts.words", 3)
    jobs = braid.submit()
    braid.wait_for_step("experts.words", 3)  # the last task, whose job has the array's own number
    cluster.call("scancel", "--batch", "--signal=USR1", jobs["experts.words"])
    braid.wait_for_the_end(jobs)
    for stage, attempts in (("experts.sums", {1}), ("experts.words", {1, 2})):
        no_step_is_repeated_beyond_a_checkpoint(braid, stage)
        assert {attempt for attempt, _, _ in braid.steps(stage)} == attempts


@more
def test_a_stage_without_progress_fails(braid: Braid, cluster: Cluster) -> None:
    with braid.profile.open("a") as profile:
        profile.write("restarts: 0\n")
    braid.hold("cold_start", 2)
    jobs = braid.submit("--only", "cold_start")
    braid.wait_for_step("cold_start", 2)
    pids = subprocess.run(
        ["pgrep", "--full", "slow_stage.py"], capture_output=True, text=True, check=True
    )
    for pid in pids.stdout.split():
        if str(braid.run).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), 9)
    cluster.wait_until(lambda: cluster.state(jobs["cold_start"]) == "FAILED")
    status = braid("status", "small")
    assert "failed" in status
    log = braid.run / "slurm" / f"small.cold_start-{jobs['cold_start']}.out"
    assert "1 attempts in a row started from the start" in log.read_text()


@more
def test_the_controller_may_be_down_for_a_while(braid: Braid, cluster: Cluster) -> None:
    jobs = braid.submit()
    braid.wait_for_step("cold_start", 5)
    cluster.control("stop-controller")
    assert "Slurm was not asked about this run's jobs: squeue failed" in braid("status", "small")
    cluster.control("start-controller")
    braid.wait_for_the_end(jobs)
    for stage in STAGES[:4]:
        no_step_is_repeated_beyond_a_checkpoint(braid, stage)


@more
def test_a_stage_script_may_be_submitted_by_hand(braid: Braid, cluster: Cluster) -> None:
    printed = braid("submit", braid.config, "--cluster", braid.profile, "--dry-run")
    assert not braid.run.exists()
    braid("submit", braid.config, "--cluster", braid.profile, "--prepare")
    said = (braid.run / "slurm" / "submit.sh").read_text()
    assert printed.startswith(said)
    script = said.partition("job_0=$(")[2].splitlines()[0].removesuffix(")").split()
    job = cluster.call(*script)
    braid.wait_for_the_end({"cold_start": job})
    assert " done " in braid("status", "small")
    # The same script runs the remaining stages; the finished stage says so and ends.
    subprocess.run(
        ["bash", str(braid.run / "slurm" / "submit.sh")],
        env=cluster.environment,
        cwd=braid.directory,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    cluster.wait_until(lambda: braid("status", "small").count(" done ") == 6)


@more
def test_jobs_whose_submission_was_killed_are_found_and_not_submitted_again(
    braid: Braid, cluster: Cluster
) -> None:
    # sbatch queues the job, and its caller is killed before it reads the number.
    sbatch = braid.program.parent / "sbatch"
    sbatch.write_text(f'#!/bin/bash\n{shutil.which("sbatch")} --hold "$@"\nkill -9 $PPID\n')
    sbatch.chmod(0o755)
    path = cluster.environment["PATH"]
    cluster.environment["PATH"] = f"{sbatch.parent}:{path}"
    try:
        braid("submit", braid.config, "--cluster", braid.profile, code=-9)
    finally:
        cluster.environment["PATH"] = path
    sbatch.unlink()
    job = cluster.call("squeue", "--noheader", "--format=%i")
    assert not (braid.run / "ledger.jsonl").exists()
    assert f"job {job} waits" in braid("status", "small")
    said = braid("submit", braid.run / "run.yaml")
    assert f"cold_start: submitted already (job {job} waits: " in said
    assert said.count(": job ") == 5
    assert '"as job ' in (braid.run / "ledger.jsonl").read_text()
    cluster.call("scontrol", "release", job)
    cluster.wait_until(lambda: braid("status", "small").count(" done ") == 6)
    assert {attempt for attempt, _, _ in braid.steps("cold_start")} == {1}


@more
def test_a_failed_stage_blocks_its_dependents_and_is_submitted_again(
    braid: Braid, cluster: Cluster
) -> None:
    model = braid.directory / "runs" / "small" / "stages" / "experts.words"
    model.mkdir(parents=True)
    (model / "checkpoints").touch()  # no directory can be created there
    jobs = braid.submit()
    cluster.wait_until(lambda: cluster.state(jobs["merge"]) == "CANCELLED")
    cluster.wait_until(lambda: cluster.state(jobs["experts.sums"]) == "COMPLETED")
    status = braid("status", "small")
    assert "left the queue before it started" in status
    (model / "checkpoints").unlink()
    again = braid.submit()
    assert list(again) == ["experts.words", "merge", "evaluate", "export"]
    braid.wait_for_the_end(again)


@more
def test_cancelled_jobs_save_and_leave_the_queue(braid: Braid, cluster: Cluster) -> None:
    braid.hold("cold_start", 6)
    jobs = braid.submit()
    braid.wait_for_step("cold_start", 6)
    said = braid("cancel", "small")
    assert said.count(": cancelled") == 5
    assert f"cold_start: checkpoints and ends (job {jobs['cold_start']})" in said
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader"))
    [*_, (_, last, _)] = braid.steps("cold_start")
    assert (braid.run / "stages/cold_start/checkpoints" / f"step_{last}").exists()
    assert "has no job in the queue" in braid("cancel", "small")
    braid.wait_for_the_end(braid.submit())
    no_step_is_repeated_beyond_a_checkpoint(braid, "cold_start")


@more
def test_a_log_is_followed_to_the_end_of_the_stage(braid: Braid) -> None:
    braid.submit("--only", "cold_start")
    assert "cold_start  done in " in braid("logs", "small", "cold_start", "-f")
    assert "rank 0 on n" in braid("logs", "small", "cold_start", "--rank", "0")
    assert braid("status", "small").count(" done ") == 1


@more
def test_a_job_that_ends_before_its_stage_begins_shows_why(braid: Braid, cluster: Cluster) -> None:
    setup = "setup: ['echo no such module; exit 7', "
    braid.profile.write_text(braid.profile.read_text().replace("setup: [", setup))
    jobs = braid.submit("--only", "cold_start")
    cluster.wait_until(lambda: cluster.state(jobs["cold_start"]) == "FAILED")
    assert "ended before the stage started; see " in braid("status", "small")
    assert "no such module" in braid("logs", "small", "cold_start")


@more
def test_dependents_of_a_cancelled_stage_are_cancelled(braid: Braid) -> None:
    jobs = braid.submit()
    others = ("submit", braid.config, "--cluster", braid.profile, "seed=1")
    assert "cancel them first with: braid cancel runs/small" in braid(*others, code=1)
    said = braid("cancel", "small", "experts.words")
    assert {line.partition(":")[0] for line in said.splitlines()} == {
        "experts.words",
        "merge",
        "evaluate",
        "export",
    }
    braid.wait_for_the_end({"experts.sums": jobs["experts.sums"]})


def test_a_stage_script_without_options_says_which_its_run_needs(
    braid: Braid, cluster: Cluster
) -> None:
    profile = braid.profile.read_text().replace("ranks_per_node: 1", "ranks_per_node: 2")
    braid.profile.write_text(profile)
    braid("submit", braid.config, "--cluster", braid.profile, "--prepare")
    script = REPOSITORY / "slurm" / "sft.sbatch"
    asked = ["sbatch", "--parsable", f"--output={braid.directory}/by_hand.out"]
    job = cluster.call(*asked, str(script), str(braid.run), "cold_start")
    cluster.wait_until(lambda: cluster.state(job) == "FAILED")
    said = (braid.directory / "by_hand.out").read_text()
    why = braid("why", "small", "cold_start")
    needed = "--nodes=1 --ntasks-per-node=2 --cpus-per-task=1"
    for text in (said, why):
        assert "has 1 CPU for this job, and cold_start needs 2 there" in text
        assert f"submit it with: sbatch {needed} {shown(script)} {braid.run} cold_start" in text
    job = cluster.call(*asked, *needed.split(), str(script), str(braid.run), "cold_start")
    braid.wait_for_the_end({"cold_start": job})
