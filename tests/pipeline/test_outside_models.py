"""Models from outside a run: what they may be, and how their change makes stages stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel.files import CHECKSUMS
from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.lineage import changes
from pipeline.run.run import Run
from tests.pipeline.violations import errors

QWEN = {"model_type": "qwen3_moe", "vocab_size": 80, "hidden_size": 96, "num_hidden_layers": 4}


@pytest.fixture
def teacher(start: Path) -> Path:
    """A Hugging Face checkpoint of the configuration's model."""
    (start / "config.json").write_text(json.dumps(QWEN))
    return start


@pytest.fixture
def other(config: Path, runs: Path) -> RunDirectory:
    """Another run of the same model, with a finished expert of the sums."""
    other = Run(runs / "other", load(config, ["name=other"]))
    other.create()
    other.write_settings()
    _checkpoint(other, "experts.sums", "first")
    return other


def _checkpoint(run: RunDirectory, stage: str, digest: str) -> Path:
    path = run.stage(stage).checkpoints / "step_2"
    path.mkdir(parents=True, exist_ok=True)
    (path / CHECKSUMS).write_text(json.dumps({"digest": digest, "files": {}}))
    return path


def taught_by(path: Path) -> str:
    return f"stages.merge.teachers={{sums: {path}, words: experts.words}}"


def test_a_teacher_may_be_a_stage_of_another_run_a_checkpoint_or_hugging_face_s(
    config: Path, run: RunDirectory, other: RunDirectory, teacher: Path
) -> None:
    stage = other.stage("experts.sums")
    checkpoint = stage.checkpoints / "step_2"
    for path, found in ((stage.path, checkpoint), (checkpoint, checkpoint), (teacher, teacher)):
        settings = load(config, [taught_by(path)])
        [merge] = [each for each in compile_graph(settings) if each.name == "merge"]
        assert merge.teachers == {"sums": str(path), "words": "experts.words"}
        assert merge.inputs == ("cold_start", "experts.words")
        assert Run(run.path, settings).model_path(merge.teachers["sums"]) == found


def test_a_path_is_relative_to_its_file(config: Path, other: RunDirectory) -> None:
    config.write_text(f"{config.read_text()}  again: {{kind: grpo, from: runs/other/stages/x}}\n")
    said = "\n".join(errors(config))
    assert "stages.again.from: runs/other/stages/x: no model there" in said


def test_a_change_outside_the_run_makes_its_readers_stale(
    config: Path, run: RunDirectory, other: RunDirectory
) -> None:
    here = Run(run.path, load(config, [taught_by(other.stage("experts.sums").path)]))
    [merge] = [each for each in here.stages if each.name == "merge"]
    before = here.lineage(merge)
    assert list(changes(before, here.lineage(merge))) == []
    _checkpoint(other, "experts.sums", "second")
    [said] = changes(before, here.lineage(merge))
    assert said == f"the checkpoint of {other.stage('experts.sums').path} changed"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 128, "vocab_size: 128, but model.vocabulary_size is 80"),
        ("num_hidden_layers", 8, "num_hidden_layers: 8, but model.layers is 4"),
        ("model_type", "mixtral", "model_type: mixtral, but model.family is qwen3_moe"),
        ("tie_word_embeddings", True, "tie_word_embeddings: true, but"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    config: Path, teacher: Path, key: str, value: object, message: str
) -> None:
    (teacher / "config.json").write_text(json.dumps({**QWEN, key: value}))
    assert message in "\n".join(errors(config, taught_by(teacher)))
    assert message in "\n".join(errors(config, f"model.initial_weights={teacher}"))


def test_a_run_of_another_model_is_refused(config: Path, other: RunDirectory) -> None:
    settings = Run(other.path, load(config, ["name=other", "model.experts=16"]))
    settings.write_settings()
    [said] = errors(config, taught_by(other.stage("experts.sums").path))
    assert said.endswith("another model: model.experts is 16 there and 8 here")


def test_a_path_without_a_model_is_refused(config: Path, tmp_path: Path) -> None:
    [said] = errors(config, taught_by(tmp_path))
    assert "stages.merge.teachers.sums" in said
    assert "no model there; name a stage's directory of a run" in said
