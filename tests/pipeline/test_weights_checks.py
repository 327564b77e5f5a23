"""Checks of the directory `model.initial_weights` before a run starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.weights.names import tensors
from pipeline.config.validate import load
from tests.pipeline.checkpoint_headers import SMALL, write_tensors
from tests.pipeline.violations import errors

INDEX = "model.safetensors.index.json"
SEVERAL = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
OTHER_FORMATS = (
    f"start has neither a *.safetensors file nor {INDEX}; download the weights, or convert other "
    "formats with transformers' save_pretrained"
)


@pytest.mark.parametrize(
    ("files", "family", "message"),
    [
        ({"config.json": None}, "qwen3_moe", "start has no config.json; name the directory of a "),
        ({"config.json": "{"}, "qwen3_moe", "start/config.json: is not valid JSON: Expecting "),
        ({"config.json": "[]"}, "qwen3_moe", "start/config.json: is not a JSON object; name "),
        (
            {"config.json": {"model_type": "qwen2_moe"}},
            "qwen3_moe",
            'start/config.json: model_type: unknown family "qwen2_moe"; did you mean "qwen3_moe"?; '
            "docs/how-to/model-family.md adds one",
        ),
        (
            {"config.json": {}},
            "qwen3_moe",
            "start/config.json: model_type: unknown family null; known: qwen3_moe, ",
        ),
        (
            {"config.json": {"model_type": "glm4_moe"}},
            "qwen3_moe",
            "start/config.json: model_type: glm4_moe, but model.family is qwen3_moe",
        ),
        ({}, "mixtral", "start/config.json: model_type: qwen3_moe, but model.family is mixtral"),
        ({"model.safetensors": None, "model.bin": ""}, "qwen3_moe", OTHER_FORMATS),
        (
            {"model.safetensors": None, "adapter_model.safetensors": ""},
            "qwen3_moe",
            OTHER_FORMATS,
        ),
        (
            {INDEX: {"weight_map": ["model.safetensors"]}},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: must name the file of every tensor",
        ),
        (
            {INDEX: SEVERAL, "model-2.safetensors": ""},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: no such file: model-1.safetensors",
        ),
        (
            {INDEX: SEVERAL},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: no such file: model-1.safetensors and 1 more",
        ),
        *(
            (
                {INDEX: {"weight_map": {"a": name}}},
                "qwen3_moe",
                f"start/{INDEX}: weight_map: {name!r} is no name of a file in the same directory",
            )
            for name in ("../start/model.safetensors", "/dev/zero", "", "..", "\ud800", "a\0")
        ),
        (
            {INDEX: {"weight_map": {}}},
            "qwen3_moe",
            f"start/{INDEX}: weight_map: must name the file of every tensor",
        ),
        (
            {"config.json": {"model_type": ["qwen3_moe"]}},
            "qwen3_moe",
            "start/config.json: model_type: must be the name of a family",
        ),
        (
            {"config.json": {"model_type": {}}},
            "qwen3_moe",
            "start/config.json: model_type: must be the name of a family",
        ),
        ({"config.json": "[" * 100_000}, "qwen3_moe", "start/config.json: is not valid JSON: "),
        ({INDEX: '{"a":' * 100_000}, "qwen3_moe", f"start/{INDEX}: is not valid JSON: "),
    ],
)
def test_a_directory_that_is_not_a_checkpoint_is_one_error(
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
    [error] = errors(config, "model.initial_weights=start", f"model.family={family}")
    assert error.startswith(f"command line: model.initial_weights: {message}")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("config.json", huge, "larger than 64 MiB"),
        ("config.json", os.mkfifo, "is not a file"),
        ("config.json", Path.mkdir, "is not a file"),
        ("config.json", lambda path: path.symlink_to("blob"), "is a broken symlink"),
        (INDEX, huge, "larger than 64 MiB"),
        (INDEX, lambda path: path.symlink_to("blob"), "is a broken symlink; download"),
        (
            "model.safetensors",
            lambda path: path.symlink_to("blob"),
            "is a broken symlink; download the file again",
        ),
    ],
)
def test_an_unreadable_file_of_a_checkpoint_is_one_error(
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
    [error] = errors(config, "model.initial_weights=start")
    assert error.startswith(f"command line: model.initial_weights: start/{name}: {message}")


@pytest.mark.parametrize("family", ["[qwen3_moe]", "{a: 1}", "3"])
def test_a_family_of_another_type_is_a_schema_error(config: Path, start: Path, family: str) -> None:
    [error] = errors(config, f"model.initial_weights={start}", f"model.family={family}")
    assert error.startswith("command line: model.family: should be 'qwen3_moe', ")


def test_a_sharded_checkpoint_is_valid(config: Path, start: Path) -> None:
    (start / "model.safetensors").unlink()
    (start / INDEX).write_text(json.dumps(SEVERAL))
    found = list(tensors(SMALL).items())
    halves = {"model-1.safetensors": dict(found[:9]), "model-2.safetensors": dict(found[9:])}
    for name, shapes in halves.items():
        write_tensors(start / name, shapes)
    assert load(config, [f"model.initial_weights={start}"]).model.initial_weights == start


NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate.weight"
WHERE = "start: {} tensors are not those of its config.json and the run's model: "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shapes: shapes.pop(NORM), f"{WHERE.format(1)}{NORM} is missing; name the checkpo"),
        (
            lambda shapes: shapes.update({GATE: (4, 96), NORM: (95,)}),
            f"{WHERE.format(2)}{GATE} is [4, 96] in model.safetensors and should be [8, 96]; {NORM}"
            " is [95] in model.safetensors and should be [96]; name the checkpoint that belongs to"
            " this config.json, or download it again",
        ),
        (
            lambda shapes: shapes.clear(),
            f"{WHERE.format(len(tensors(SMALL)))}model.embed_tokens.weight is missing; model.layers"
            ".0.input_layernorm.weight is missing; model.layers.0.post_attention_layernorm.weight"
            f" is missing; and {len(tensors(SMALL)) - 3} more; name",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    config: Path,
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, tuple[int, ...]]], object],
    message: str,
) -> None:
    monkeypatch.chdir(start.parent)
    shapes = tensors(SMALL)
    change(shapes)
    write_tensors(start / "model.safetensors", shapes)
    [error] = errors(config, "model.initial_weights=start")
    assert error.startswith(f"command line: model.initial_weights: {message}")


STACK = "model.language_model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("shape", [(10**12, 2, 0), (0, 2, 2), (2, 3, 2), (10_001, 2, 1)])
def test_a_stack_that_is_none_of_experts_is_one_error(
    config: Path, start: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """A header may state a number of experts that takes for ever to count."""
    monkeypatch.chdir(start.parent)
    write_tensors(start / "model.safetensors", {STACK: shape})
    [error] = errors(config, "model.initial_weights=start")
    where = f"command line: model.initial_weights: start: {STACK} is {[*shape]}, which is no stack"
    assert error.startswith(where)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes without a header, so no safetensors file; download or export the file"),
        (b"version https://git-lfs", "23 bytes without a header, so no safetensors file; downl"),
        (b"\x02" + bytes(7) + b"[]", "its header cannot be read: AttributeError("),
        (b"\x04" + bytes(7) + b"{a: ", "its header cannot be read: JSONDecodeError("),
    ],
)
def test_a_file_without_tensors_is_one_error(
    config: Path, start: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    """A download that was stopped, or git's pointer to a file that was not fetched."""
    monkeypatch.chdir(start.parent)
    (start / "model.safetensors").write_bytes(content)
    [error] = errors(config, "model.initial_weights=start")
    where = "command line: model.initial_weights: start/model.safetensors"
    assert error.startswith(f"{where}: {message}")


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(shape=[1e999])}, "a: [inf] is no shape; download or export the file again"),
        ({"a": entry(shape="2")}, "a: '2' is no shape"),
        ({"a": entry(shape=[-2])}, "a: [-2] is no shape"),
        ({"a": entry(shape=[True, 2])}, "a: [True, 2] is no shape"),
        ({"a": entry(offsets=[0, "a"])}, "a: [0, 'a'] are no data_offsets"),
        ({"a": entry(offsets=[0, None])}, "a: [0, None] are no data_offsets"),
        ({"a": entry(offsets=[0, float("nan")])}, "a: [0, nan] are no data_offsets"),
        ({"a": entry(offsets=[-8, 0])}, "a: [-8, 0] are no data_offsets"),
        ({"a": entry(offsets=[8, 0])}, "a: [8, 0] are no data_offsets"),
        ({"a": entry(offsets=[8])}, "a: [8] are no data_offsets"),
        ({"a": entry(dtype="F33")}, "a: unknown dtype 'F33'"),
        ({"a": entry(dtype=[])}, "a: unknown dtype []"),
        ({"a": 1}, "a: unknown dtype None"),
        ({"a": entry(shape=[3])}, "a has 8 bytes, which F32 of shape [3] does not take"),
        ({"a": entry(), "b": entry()}, "b begins at byte 0, and must at 8"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, "b begins at byte 12, and must at 8"),
        ({"a" * 300: 1}, f"'{'a' * 12}...{'a' * 13}': unknown"),
    ],
)
def test_a_damaged_header_is_one_error(
    config: Path, start: Path, monkeypatch: pytest.MonkeyPatch, header: object, message: str
) -> None:
    monkeypatch.chdir(start.parent)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(32)
    (start / "model.safetensors").write_bytes(content)
    [error] = errors(config, "model.initial_weights=start")
    where = "command line: model.initial_weights: start/model.safetensors"
    assert error.startswith(f"{where}: {message}")


def test_a_file_that_ends_early_is_one_error(config: Path, start: Path) -> None:
    path = start / "model.safetensors"
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    [error] = errors(config, f"model.initial_weights={start}")
    assert f"{whole - 1} bytes, and its header says {whole}; download or export" in error


def test_an_unknown_family_says_which_are_known_and_how_to_add_one(config: Path) -> None:
    [error] = errors(config, "model.family=qwen2_moe")
    assert error.startswith("command line: model.family: should be 'qwen3_moe', ")
    assert error.endswith(
        'not "qwen2_moe"; did you mean "qwen3_moe"?; docs/how-to/model-family.md adds one'
    )
