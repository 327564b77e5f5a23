"""Fixtures of the pipeline's tests: the smallest configuration and a run directory for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands.support import starting
from pipeline.config.validate import load
from pipeline.launch import runner
from pipeline.launch.processes import POLL_SECONDS
from pipeline.run.directory import RunDirectory
from stages.settings import RunSettings
from tests.pipeline.checkpoint_headers import write_checkpoint
from tests.pipeline.fake_launcher import fake_programs
from tests.pipeline.light_machine import LightMachine, is_light

Braid = Callable[..., tuple[int, str, str]]

CONFIG = """\
name: small
model:
  vocabulary_size: 80
  hidden_size: 96
  layers: 4
  attention_heads: 4
  key_value_heads: 2
  head_dim: 32
  experts: 8
  experts_per_token: 2
  expert_hidden_size: 96
layout: {ranks: 2, expert: 2}
domains:
  sums:
    prompts: {dataset: chain_sum}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
  words:
    prompts: {dataset: spell_backward}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
stages:
  cold_start:
    kind: sft
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
  experts: {kind: grpo, from: cold_start, for_each: domain}
  merge:
    kind: distill
    from: cold_start
    teachers: experts
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
  evaluate: {kind: evaluate}
  export: {kind: export, from: merge}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The smallest configuration, with two domains."""
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """The folder of a Hugging Face checkpoint, as far as it is looked at before a run."""
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    write_checkpoint(folder)
    return folder


@pytest.fixture
def settings(config: Path) -> RunSettings:
    return load(config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "small")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPUs: the fakes need none, and a test that wants some puts them there."""
    monkeypatch.setattr("parallel.machine.gpus.built_for_cpu", lambda: True)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def braid(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Braid:
    """Run `braid` with fake stages and return its exit code, its output and its error output.

    Stages are calls in this process where their actions allow it, unless they are to be `children`.
    """
    this_machine = runner.ThisMachine

    def run(
        command: str, *arguments: object, actions: dict | None = None, children: bool = False
    ) -> tuple[int, str, str]:
        light = is_light(actions or {}) and not children
        monkeypatch.setattr(runner, "ThisMachine", LightMachine if light else this_machine)
        monkeypatch.setattr(runner, "POLL_SECONDS", 0.0 if light else POLL_SECONDS)
        monkeypatch.setattr(starting, "PROGRAMS", fake_programs(actions or {}))
        try:
            code = cli.main([command, "--runs-dir", str(runs), *map(str, arguments)])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a queue: sbatch adds a line to its `queue`, squeue prints that file.

    With a file `refuses`, sbatch fails with its text; with `killer`, it kills its caller; while
    there is `slow`, it waits.
    """
    folder = tmp_path / "slurm"
    folder.mkdir()
    sbatch = """\
folder=$(dirname "$0")
if [ -e "$folder/refuses" ]; then cat "$folder/refuses" >&2; exit 1; fi
number=$((100 + $(cat "$folder/submitted" 2>/dev/null | wc -l)))
options=()
while [[ "$1" == --* ]]; do options+=("$1"); shift; done
echo "${options[*]}" >> "$folder/submitted"
tasks=$(printf '%s\\n' "${options[@]}" | sed -n 's/^--array=0-\\([0-9]*\\).*/\\1/p')
each() {
    printf '%s\\x1fPENDING\\x1fPriority\\x1f0:00\\x1f4:00\\x1f\\x1f%s\\n' "$1" "$comment" \\
        >> "$folder/queue"
}
comment=$(printf '%s\\n' "${options[@]}" | sed -n 's/^--comment=//p')
if [ -n "$tasks" ]; then
    for task in $(seq 0 "$tasks"); do each "${number}_$task"; done
else
    each "$number"
fi
if [ -e "$folder/killer" ]; then kill -9 $PPID; fi
while [ -e "$folder/slow" ]; do sleep 0.1; done
if [ -e "$folder/first" ]; then bash "$folder/first" "$number" "$2" "$3"; fi
echo "$number"
"""
    programs = {
        "sbatch": sbatch,
        "squeue": 'cat "$(dirname "$0")/queue" 2>/dev/null\nexit 0\n',
        "scancel": 'echo "$@" >> "$(dirname "$0")/cancelled"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("ranks_per_node: 2\n")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The rows of a domain of files."""
    path = tmp_path / "data/rows.jsonl"
    path.parent.mkdir()
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(40)]
    path.write_text("\n".join(lines))
    return path
