"""Models from outside a run: what they may be, and how their change makes stages stale."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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
        ("quantization_config", {}, "its weights are quantized; name the checkpoint before that"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    config: Path, teacher: Path, key: str, value: object, message: str
) -> None:
    (teacher / "config.json").write_text(json.dumps({**QWEN, key: value}))
    assert message in "\n".join(errors(config, taught_by(teacher)))
    assert message in "\n".join(errors(config, f"model.initial_weights={teacher}"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("initializer_range", "x"), ("attention_dropout", []), ("use_cache", 3)),
        *(("eos_token_id", {}), ("hidden_act", 3), ("rope_parameters", [1])),
    ],
)
def test_a_value_that_transformers_refuses_is_an_error_before_any_stage(
    key: str, value: object, config: Path, teacher: Path
) -> None:
    (teacher / "config.json").write_text(json.dumps({**QWEN, key: value}))
    [error] = errors(config, taught_by(teacher))
    assert f"config.json: {key}: must be " in error and "transformers refuses" in error
    transformers = pytest.importorskip("transformers")
    with pytest.raises(Exception):  # noqa: B017 - several of its own, none of a common class
        transformers.Qwen3MoeConfig.from_dict({**QWEN, key: value})


def test_a_checkpoint_in_blocks_of_fp8_may_start_a_run_but_not_teach(
    config: Path, teacher: Path
) -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (teacher / "config.json").write_text(json.dumps({**QWEN, "quantization_config": blocks}))
    assert load(config, [f"model.initial_weights={teacher}"])
    [said] = errors(config, taught_by(teacher))
    assert said.endswith("import it by a stage of kind import, and name that stage")


def test_a_run_of_another_model_is_refused(config: Path, other: RunDirectory) -> None:
    settings = Run(other.path, load(config, ["name=other", "model.experts=16"]))
    settings.write_settings()
    [said] = errors(config, taught_by(other.stage("experts.sums").path))
    assert said.endswith("another model: model.experts is 16 there and 8 here")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("model.head_precision=model", "model.head_precision=fp32"),
        ("model.precision=fp32", "model.precision=bf16"),
        ("model.precision=bf16", "model.end_tokens=[1]"),
    ],
)
def test_a_teacher_may_differ_in_what_is_not_its_weights(
    there: str, here: str, config: Path, other: RunDirectory
) -> None:
    Run(other.path, load(config, ["name=other", there])).write_settings()
    assert load(config, [taught_by(other.stage("experts.sums").path), here])


@pytest.mark.parametrize("key", ["head_precision", "end_tokens", "architecture", "max_positions"])
def test_a_run_from_before_a_key_has_its_default(
    key: str, config: Path, other: RunDirectory
) -> None:
    recorded = yaml.safe_load(other.settings_file.read_text())
    del recorded["model"][key]
    other.settings_file.write_text(yaml.safe_dump(recorded))
    path = other.stage("experts.sums").path
    assert load(config, [taught_by(path)])
    if key == "max_positions":  # whose default is 256
        [said] = errors(config, taught_by(path), "model.max_positions=512")
        assert said.endswith("another model: model.max_positions is 256 there and 512 here")


def test_a_path_without_a_model_is_refused(config: Path, tmp_path: Path) -> None:
    [said] = errors(config, taught_by(tmp_path))
    assert "stages.merge.teachers.sums" in said
    assert "no model there; name a stage's directory of a run" in said


def tokenizer(directory: Path, tokens: list[str], template: str = "{{ messages }}") -> Path:
    """Write a tokenizer's files, as far as they are compared."""
    directory.mkdir(exist_ok=True)
    last = {"id": len(tokens) - 1, "content": tokens[-1]}
    vocabulary = {token: number for number, token in enumerate(tokens[:-1])}
    document = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [last]}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_a_teacher_of_as_many_but_other_tokens_is_refused_with_both_names(
    config: Path, teacher: Path, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path / "ours", ["a", "b", "<end>"])
    given = [taught_by(teacher), f"model.tokenizer={ours}"]
    load(config, given)  # a teacher without a tokenizer has nothing to compare
    tokenizer(teacher, ["a", "c", "<end>"])
    [error] = errors(config, *given)
    assert "stages.merge.teachers.sums" in error
    assert 'another tokenizer: id 1 is "c" in start and "b" in model.tokenizer = ours' in error
    tokenizer(teacher, ["b", "a", "<end>"])  # the same tokens under other ids
    assert 'id 0 is "b" in start and "a" in model.tokenizer' in errors(config, *given)[0]
    tokenizer(teacher, ["a", "b", "<stop>"])
    assert 'id 2 is "<stop>"' in errors(config, *given)[0]
    # Unigram has pairs, and an id that only one of them has is never sampled.
    document = {"model": {"vocab": [["a", 0.0], ["b", -1.5], ["<end>", 0.0], ["more", -2.0]]}}
    (teacher / "tokenizer.json").write_text(json.dumps(document))
    load(config, given)


def test_a_teacher_of_another_run_with_other_tokens_is_refused(
    config: Path, other: RunDirectory, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path / "ours", ["a", "b", "<end>"])
    path = other.stage("experts.sums").path
    [error] = errors(config, taught_by(path), f"model.tokenizer={ours}")
    expected = 'another tokenizer: id 0 is "[PAD]" in characters and "a" in model.tokenizer = ours'
    assert expected in error
    load(config, [taught_by(path)])


def test_a_teacher_with_another_chat_template_is_a_warning(
    braid: Callable[..., tuple[int, str, str]], config: Path, teacher: Path, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path / "ours", ["a", "b", "<end>"])
    tokenizer(teacher, ["a", "b", "<end>"])
    given = (config, taught_by(teacher), f"model.tokenizer={ours}")
    assert braid("validate", *given)[2] == ""
    tokenizer(teacher, ["a", "b", "<end>"], "{{ other }}")
    code, _, err = braid("validate", *given)
    assert code == 0
    assert f"{teacher} has another chat template than {ours}" in err
    assert "another chat template" in braid("run", *given, "--dry-run")[2]
    (teacher / "chat_template.jinja").unlink()  # such as a base model
    assert braid("validate", *given)[2] == ""


def test_a_teacher_of_another_start_is_a_warning(
    braid: Callable[..., tuple[int, str, str]], config: Path, teacher: Path
) -> None:
    assert braid("validate", config)[2] == ""
    text = config.read_text()
    start, experts = text.index("  cold_start:"), text.index("  experts: {")
    cold_start = text[start:experts]
    apart = text.replace("from: cold_start, for_each", "from: second, for_each")
    config.write_text(
        apart.replace(cold_start, cold_start + cold_start.replace("cold_start", "second"))
    )
    code, _, err = braid("validate", config)
    assert code == 0
    for domain in ("sums", "words"):
        expected = (
            f"experts.{domain} and cold_start, which merge starts from, have no common ancestor"
        )
        assert f"stages.merge.teachers: {expected}" in err
    # Two imports of the same weights are of one start.
    both = "  cold_start: {kind: import}\n  second: {kind: import}\n"
    config.write_text(apart.replace(cold_start, both))
    code, _, err = braid("validate", config, f"model.initial_weights={teacher}")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("models", ["experts", "{one: experts.sums, two: experts.words}"])
def test_a_student_of_averaged_models_has_their_ancestors(
    models: str, braid: Callable[..., tuple[int, str, str]], config: Path
) -> None:
    soup = f"  soup: {{kind: merge_weights, models: {models}}}\n  merge:\n"
    text = config.read_text().replace("  merge:\n", soup)
    merge = text.index("  merge:\n")
    config.write_text(text[:merge] + text[merge:].replace("from: cold_start", "from: soup", 1))
    code, out, err = braid("validate", config)
    assert code == 0, err
    assert "common ancestor" not in out


@pytest.mark.parametrize(
    "text",
    [
        "model: [1]",
        "model: !!set {layers}",
        "model: {vocabulary_size: 2020-01-01}",
        "model: {vocabulary_size: !!binary aGk=}",
        "model: {vocabulary_size: &a [*a]}",
        "model: {tokenizer: !!timestamp a}",
    ],
)
def test_a_damaged_run_yaml_of_another_run_is_one_error(
    text: str, config: Path, other: RunDirectory
) -> None:
    other.settings_file.write_text(text)
    [said] = errors(config, taught_by(other.stage("experts.sums").path))
    assert "stages.merge.teachers.sums: runs/other/run.yaml: " in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b'{"model": {"vocab": {"a": Infinity}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {}}, "added_tokens": [{"id": Infinity}]}'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", None),
        ("tokenizer_config.json", b"null"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}'),
        ("tokenizer_config.json", None),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_left_to_the_stage_that_loads_it(
    file: str,
    content: bytes | None,
    braid: Callable[..., tuple[int, str, str]],
    config: Path,
    teacher: Path,
    tmp_path: Path,
) -> None:
    """Without content it is a FIFO, which would be read for ever."""
    ours = tokenizer(tmp_path / "ours", ["a", "b", "<end>"])
    damaged = tokenizer(teacher, ["a", "b", "<end>"]) / file
    if file == "tokenizer_config.json":
        (teacher / "chat_template.jinja").unlink()
    damaged.unlink(missing_ok=True)
    os.mkfifo(damaged) if content is None else damaged.write_bytes(content)
    code, out, err = braid("validate", config, taught_by(teacher), f"model.tokenizer={ours}")
    assert (code, "chat template" in out) == (0, False), err


def test_the_ancestors_of_a_teacher_outside_the_run_are_not_known(
    braid: Callable[..., tuple[int, str, str]], config: Path, teacher: Path
) -> None:
    code, out, err = braid("validate", config, taught_by(teacher))
    assert code == 0, err
    assert "common ancestor" not in out
