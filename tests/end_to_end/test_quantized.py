"""A model of two domains is quantized, gated and evaluated, in a run of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel.files import read_checkpoint
from stages.directory import StageDirectory
from stages.statistics import Answers, paired_difference
from tests.runs import braid, finish

CONFIG = Path(__file__).with_name("quantized.yaml")
DOMAINS = ["chain_sum", "spell_backward"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The path of the finished run, and what it printed."""
    directory = tmp_path_factory.mktemp("quantized")
    said = finish(braid(directory, "run", str(CONFIG)))
    return directory / "quantized", said


def test_accuracy_is_measured_before_and_after_on_every_domain(run: tuple[Path, str]) -> None:
    path, said = run
    gate = StageDirectory(path / "stages" / "gates.quantized")
    models = ("cold_start", "quantized")
    before, after = (json.loads((gate.solved / f"{name}.json").read_text()) for name in models)
    assert list(before) == list(after) == DOMAINS
    verdict = json.loads(gate.verdict.read_text())
    assert verdict["outcome"] == "passed"
    for domain, reason in zip(DOMAINS, verdict["reasons"], strict=True):
        answers = Answers(before[domain]), Answers(after[domain])
        lost = 100 * paired_difference(*answers).difference
        change = f"loses {lost:+.1f}" if lost >= 0 else f"gains {-lost:.1f}"
        assert reason.startswith(f"quantized {change} points ")
        assert f" cold_start on {domain}" in reason and reason in " ".join(said.split())
    results = json.loads(StageDirectory(path / "stages" / "evaluate").results.read_text())
    assert list(results["models"]) == ["cold_start", "quantized"]
    assert list(results["models"]["quantized"]) == DOMAINS


def test_it_leaves_a_checkpoint_of_the_run_and_one_for_vllm(run: tuple[Path, str]) -> None:
    stage = StageDirectory(run[0] / "stages" / "quantized")
    assert read_checkpoint(stage.checkpoints / "step_0") is not None
    config = json.loads((stage.exported / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert (stage.exported / "tokenizer.json").is_file()
    assert not list(stage.path.glob(".huggingface.*"))
