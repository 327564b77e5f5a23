"""Fixtures of the pipeline's tests: the smallest configuration and a run directory for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands import common as commands
from pipeline.config.validate import load
from pipeline.launch import runner
from pipeline.launch.processes import POLL_SECONDS
from pipeline.run.directory import RunDirectory
from stages.settings import RunSettings
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
cold_start:
  optimizer: {learning_rate: 1e-3}
  loop: {steps: 2}
domains:
  sums:
    prompts: {dataset: chain_sum}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
  words:
    prompts: {dataset: spell_backward}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
merge:
  optimizer: {learning_rate: 1e-3}
  loop: {steps: 2}
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
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def settings(config: Path) -> RunSettings:
    return load(config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "small")


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
        monkeypatch.setattr(commands, "PROGRAMS", fake_programs(actions or {}))
        try:
            code = cli.main([command, "--runs-dir", str(runs), *map(str, arguments)])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
