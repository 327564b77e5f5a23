"""What is looked for in the folder of `model.initial_weights`, before anything is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.validate import load
from tests.pipeline.test_config import faults

INDEX = "model.safetensors.index.json"
SEVERAL = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
OTHER_FORMATS = (
    f"start has neither a *.safetensors file nor {INDEX}; of other formats transformers makes "
    "them with save_pretrained"
)


@pytest.mark.parametrize(
    ("files", "family", "message"),
    [
        ({"config.json": None}, "qwen3_moe", "start has no config.json; name the folder of a "),
        ({"config.json": "{"}, "qwen3_moe", "start/config.json: is not valid JSON: Expecting "),
        ({"config.json": "[]"}, "qwen3_moe", "start/config.json: is no JSON object; name the "),
        (
            {"config.json": {"model_type": "qwen2_moe"}},
            "qwen3_moe",
            'start/config.json: model_type: "qwen2_moe" is no family known here; did you mean '
            '"qwen3_moe"?',
        ),
        (
            {"config.json": {}},
            "qwen3_moe",
            "start/config.json: model_type: null is no family known here; known: qwen3_moe, ",
        ),
        (
            {"config.json": {"model_type": "glm4_moe"}},
            "qwen3_moe",
            "start/config.json: model_type: glm4_moe, but model.family is qwen3_moe",
        ),
        ({}, "mixtral", "start/config.json: model_type: qwen3_moe, but model.family is mixtral"),
        ({"model.safetensors": None, "model.bin": ""}, "qwen3_moe", OTHER_FORMATS),
        (
            {INDEX: {"weight_map": ["model.safetensors"]}},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: should name the file of every tensor",
        ),
        (
            {INDEX: SEVERAL, "model-2.safetensors": ""},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: names model-1.safetensors, and no such file is there",
        ),
        (
            {INDEX: SEVERAL},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: names model-1.safetensors and 1 more, and no such file",
        ),
        (
            {INDEX: {"weight_map": {}}},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: should name the file of every tensor",
        ),
        (
            {"config.json": {"model_type": ["qwen3_moe"]}},
            "qwen3_moe",
            "start/config.json: model_type: should be the name of a family",
        ),
        (
            {"config.json": {"model_type": {}}},
            "qwen3_moe",
            "start/config.json: model_type: should be the name of a family",
        ),
        ({"config.json": "[" * 100_000}, "qwen3_moe", "start/config.json: is not valid JSON: "),
        ({INDEX: '{"a":' * 100_000}, "qwen3_moe", f"start/{INDEX}: is not valid JSON: "),
    ],
)
def test_a_folder_of_something_else_is_one_fault(
    config: Path,
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, object],
    family: str,
    message: str,
) -> None:
    monkeypatch.chdir(start.parent)
    for name, content in files.items():
        if content is None:
            (start / name).unlink()
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (start / name).write_text(text)
    [fault] = faults(config, "model.initial_weights=start", f"model.family={family}")
    assert fault.startswith(f"command line: model.initial_weights: {message}")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("config.json", huge, "has more than 64 MiB"),
        ("config.json", os.mkfifo, "is no file"),
        ("config.json", Path.mkdir, "is no file"),
        ("config.json", lambda path: path.symlink_to("blob"), "is a link to a file that is not"),
        (INDEX, huge, "has more than 64 MiB"),
        (INDEX, lambda path: path.symlink_to("blob"), "is a link to a file that is not there"),
        (
            "model.safetensors",
            lambda path: path.symlink_to("blob"),
            "is a link to a file that is not there; download it once more",
        ),
    ],
)
def test_a_name_without_a_file_that_could_be_read_is_one_fault(
    config: Path,
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.chdir(start.parent)
    (start / name).unlink(missing_ok=True)
    make(start / name)
    [fault] = faults(config, "model.initial_weights=start")
    assert fault.startswith(f"command line: model.initial_weights: start/{name}: {message}")


@pytest.mark.parametrize("family", ["[qwen3_moe]", "{a: 1}", "3"])
def test_a_family_that_is_no_name_is_the_schema_s_fault_to_tell(
    config: Path, start: Path, family: str
) -> None:
    [fault] = faults(config, f"model.initial_weights={start}", f"model.family={family}")
    assert fault.startswith("command line: model.family: should be 'qwen3_moe', ")


def test_a_checkpoint_of_several_files_is_taken(config: Path, start: Path) -> None:
    (start / "model.safetensors").unlink()
    (start / INDEX).write_text(json.dumps(SEVERAL))
    for name in SEVERAL["weight_map"].values():
        (start / name).touch()
    assert load(config, [f"model.initial_weights={start}"]).model.initial_weights == start
