"""What the pipeline's tests share: the smallest configuration and a run directory for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.run_directory import RunDirectory
from stages.settings import RunSettings

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
experts:
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
def settings(config: Path) -> RunSettings:
    return load(config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "small")
