"""Causes that failed Slurm steps state, and a job that Slurm requeues itself; without Slurm."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from parallel.errors import ERROR_MARK
from pipeline.launch.processes import wait_for_all
from pipeline.slurm.queue import SlurmError
from pipeline.slurm.stage import requeue
from pipeline.slurm.steps import Step
from tests.awaiting import PATIENCE_SECONDS


def failed_step(directory: Path, said: list[str], logs: list[str]) -> Step:
    """Return a step whose srun printed these lines, and whose ranks left these logs."""
    paths = [directory / f"rank_{rank}.log" for rank in range(len(logs))]
    write = "; ".join(
        [
            *(
                f"open({str(path)!r}, 'w').write({log!r})"
                for path, log in zip(paths, logs, strict=True)
            ),
            f"print({chr(10).join(said)!r})",
            "raise SystemExit(1)",
        ]
    )
    step = Step("rank", [sys.executable, "-c", write], directory / "srun.log", paths, {})
    wait_for_all([step], seconds=PATIENCE_SECONDS)
    return step


@pytest.mark.parametrize(
    ("said", "logs", "cause", "lost"),
    [
        (
            ["srun: error: n2: task 1: Exited with exit code 3", "srun: error: n1: task 0: Killed"],
            ["", "ValueError: broken"],
            "rank 1 on n2: Exited with exit code 3",
            False,
        ),
        (
            ["srun: error: n1: task 0: Exited with exit code 1", "srun: error: n2: task 1: Killed"],
            ["RuntimeError: Connection closed by peer", ""],
            "rank 1 on n2: Killed",
            True,
        ),
        (
            ["srun: error: n1: tasks 0-1: Exited with exit code 1"],
            ["nothing", f"{ERROR_MARK}what to fix"],
            "what to fix",
            False,
        ),
        (
            ["srun: error: Node failure on n2", "srun: error: n1: task 0: Killed"],
            ["", ""],
            "Node failure on n2",
            True,
        ),
        (
            ["srun: error: n1: task 0: Out Of Memory"],
            ["", ""],
            "rank 0 on n1: Out Of Memory",
            False,
        ),
    ],
)
def test_one_task_explains_the_others(
    tmp_path: Path, said: list[str], logs: list[str], cause: str, lost: bool
) -> None:
    step = failed_step(tmp_path, said, logs)
    failure = step.failure()
    step.reap()
    assert (failure.cause, failure.lost) == (cause, lost)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("17_2: Job is pending execution", None),  # Slurm had requeued it, since its node failed
        ("17_2: Access/permission denied", "scontrol failed: 17_2: Access/permission denied"),
    ],
)
def test_a_job_that_slurm_has_requeued_itself_is_in_the_queue(
    said: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/bash\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with nullcontext() if fault is None else pytest.raises(SlurmError, match=fault):
        requeue("17_2")
