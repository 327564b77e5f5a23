"""Written files equal their input, or an error names the tensor and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.files import WEIGHTS_INDEX, unindexed_weights
from parallel.hugging_face.config import TensorSpec, hugging_face_config, ignored_tensors
from parallel.hugging_face.files import WeightFiles, WeightsError
from parallel.hugging_face.text_model import StackError, text_tensors
from parallel.hugging_face.weights import ModelFiles, fill_parts
from parallel.hugging_face.writer import verify, write
from parallel.weights.boxes import Box
from parallel.weights.names import stored_tensors, tensors
from tests.layouts.hugging_face_cases import FAMILIES
from tests.pipeline.checkpoint_headers import SMALL

SHARD_BYTES = 100
EXPECTED = {
    "norm": TensorSpec(torch.bfloat16, (3,)),
    "bias": TensorSpec(torch.float32, (5,)),
    "large": TensorSpec(torch.float32, (8, 8)),  # more than a file should hold
    "last": TensorSpec(torch.bfloat16, (4, 2)),
}
Stream = list[tuple[str, torch.Tensor]]


def drawn() -> dict[str, torch.Tensor]:
    return {name: torch.randn(spec.shape).to(spec.dtype) for name, spec in EXPECTED.items()}


def test_tensors_come_back_from_several_files(tmp_path: Path) -> None:
    tensors = drawn()
    digests = write(tmp_path, EXPECTED, reversed(tensors.items()), SHARD_BYTES)
    verify(tmp_path, EXPECTED, digests)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads((tmp_path / WEIGHTS_INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 + 20 + 256 + 16
    for file in files:
        for name, tensor in load_file(file).items():
            assert index["weight_map"].pop(name) == file.name
            assert torch.equal(tensor, tensors[name])
    assert not index["weight_map"]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    verify(tmp_path, EXPECTED, write(tmp_path, EXPECTED, drawn().items()))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("shards", [1, 3])
def test_files_beside_a_checkpoint_are_not_of_it(shards: int, tmp_path: Path) -> None:
    """Mistral's form of the same weights, an adapter, and what a trainer left, without an index."""
    write(tmp_path, EXPECTED, drawn().items(), SHARD_BYTES if shards > 1 else 1 << 20)
    (tmp_path / WEIGHTS_INDEX).unlink(missing_ok=True)
    beside = ["consolidated.safetensors", "adapter_model.safetensors"]
    for name in [*beside, *(["optimizer.safetensors"] if shards == 1 else [])]:
        save_file({"layers.0.wq.weight": torch.zeros(2)}, tmp_path / name)
    files = WeightFiles(tmp_path)
    assert files.errors == []
    assert files.check(EXPECTED) == []
    assert len(unindexed_weights(tmp_path)) == shards


def test_saved_rotary_frequencies_are_ignored() -> None:
    """As transformers ignores them, `_adjust_unexpected_keys`."""
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"
    patterns = ignored_tensors(hugging_face_config(SMALL))
    assert any(re.search(pattern, name) for pattern in patterns)
    assert not any(re.search(pattern, f"{name}.weight") for pattern in patterns)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda stream: stream[1:], "norm is missing"),
        (lambda stream: [*stream, stream[1]], "bias arrived twice, for model-00001-of-00003"),
        (lambda stream: [*stream, ("more", stream[0][1])], "more is no tensor of this model"),
        (
            lambda stream: [("large", torch.zeros(64)), *stream],
            r"large is .*shape=\(64,\)\), but should be .*\(8, 8\)\), in model-00002-of-00003",
        ),
        (lambda stream: [("norm", torch.zeros(3)), *stream], "norm is .*float32, .*bfloat16"),
    ],
)
def test_a_stream_that_is_not_the_model_is_refused(
    change: Callable[[Stream], Stream], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=fault):
        write(tmp_path, EXPECTED, change(list(drawn().items())), SHARD_BYTES)


def damaged(directory: Path, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """Damage the files in one way after another; yield the expected error of each."""
    first, second, third = sorted(directory.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    yield f"{second.name}: large is not what was written"
    second.write_bytes(whole[:-1])
    yield f"{second.name}: .*large is missing|{second.name}: Error while deserializing"
    second.unlink()
    yield f"{second.name}: No such file"
    save_file({"large": torch.zeros(8, 4)}, second)
    yield rf"{second.name}: large is \[8, 4\], but should be \[8, 8\]"
    save_file({"large": tensors["large"].bfloat16()}, second)
    yield f"{second.name}: large is BF16, not torch.float32"
    second.write_bytes(whole)
    save_file({"last": tensors["last"], "bias": tensors["bias"]}, third)
    yield f"{third.name}: bias is also in {first.name}"
    save_file({"last": tensors["last"], "more": tensors["bias"]}, third)
    yield f"{third.name}: more is no tensor of this model"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.hugging_face.files.PART_BYTES", 8)  # of all tensors but norm


def test_damage_is_named(tmp_path: Path) -> None:
    tensors = drawn()
    digests = write(tmp_path, EXPECTED, tensors.items(), SHARD_BYTES)
    for fault in damaged(tmp_path, tensors):
        with pytest.raises(WeightsError, match=fault):
            verify(tmp_path, EXPECTED, digests)


@pytest.mark.parametrize(("poison", "row"), [(torch.nan, 0), (torch.inf, 3)])
def test_a_non_finite_tensor_is_named(poison: float, row: int, tmp_path: Path) -> None:
    tensors = drawn()
    tensors["last"][row, 1] = poison
    digests = write(tmp_path, EXPECTED, tensors.items(), SHARD_BYTES)
    with pytest.raises(
        WeightsError, match=r"model-00003-of-00003\.safetensors: last has NaN or inf"
    ):
        verify(tmp_path, EXPECTED, digests)


def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, EXPECTED, drawn().items(), SHARD_BYTES)
    index = tmp_path / WEIGHTS_INDEX
    text = index.read_text()
    index.write_text(text.replace('"norm": "model-00001', '"norm": "model-00003'))
    assert "norm should be in model-00003" in WeightFiles(tmp_path).errors[0]
    index.write_text(text[:-9])
    assert WEIGHTS_INDEX in WeightFiles(tmp_path).errors[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"weight_map":' * 10_000, "RecursionError"),
        ('{"weight_map": {"a": 3}}', "3 is no name of a file in the same directory"),
        ('{"weight_map": {"a": ["b"]}}', "['b'] is no name of a file in the same directory"),
        ('{"weight_map": {"a": "\\ud800"}}', "'\\\\ud800' is no name of a file in the same dire"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "'../b.safetensors' is no name of a file"),
        ('{"weight_map": {"a": "/dev/zero"}}', "'/dev/zero' is no name of a file in the same di"),
    ],
)
def test_an_index_that_names_no_files_is_an_error(text: str, fault: str, tmp_path: Path) -> None:
    write(tmp_path, EXPECTED, drawn().items())
    (tmp_path / WEIGHTS_INDEX).write_text(text)
    [error] = WeightFiles(tmp_path).errors
    assert error.startswith(f"{WEIGHTS_INDEX}: ")
    assert fault in error


def test_a_config_that_is_nested_too_deeply_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, EXPECTED, drawn().items())
    (tmp_path / "config.json").write_text('{"a":' * 10_000)
    [error] = WeightFiles(tmp_path).errors
    assert error.startswith("config.json: RecursionError")


def test_a_stack_that_is_none_of_experts_is_an_error(tmp_path: Path) -> None:
    stack = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    save_file({stack: torch.zeros(2, 3, 1)}, tmp_path / "model.safetensors")
    [error] = WeightFiles(tmp_path).errors
    assert error.startswith(f"{stack} is [2, 3, 1], which is no stack of 1 to 10000 experts")


def test_a_stack_of_experts_in_bf16_is_read_part_by_part(tmp_path: Path) -> None:
    """As Qwen3.5-MoE is published; other tests' stacks are in fp32."""
    layer = "model.language_model.layers.0.mlp.experts"
    gate_up, down = torch.randn(2, 6, 4).bfloat16(), torch.randn(2, 4, 3).bfloat16()
    stacks = {f"{layer}.gate_up_proj": gate_up, f"{layer}.down_proj": down}
    save_file(stacks, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert not files.errors
    assert len(files.stored) == 6
    for expert in range(2):
        own = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(files.read(f"{own}.gate_proj.weight"), gate_up[expert, :3])
        assert torch.equal(files.read(f"{own}.up_proj.weight"), gate_up[expert, 3:])
        assert torch.equal(files.read(f"{own}.down_proj.weight"), down[expert])
        part = files.read(f"{own}.up_proj.weight", ((1, 2), (2, 1)))
        assert torch.equal(part, gate_up[expert, 4:6, 2:3])


def test_a_long_list_of_errors_is_cut_short() -> None:
    error = WeightsError("no", [f"fault {i}" for i in range(25)])
    assert str(error).endswith("fault 19; and 5 more")


class CountedFiles(WeightFiles):
    """Files that count the bytes that are read of their tensors."""

    count = 0

    def _stored(self, name: str, box: Box | None) -> torch.Tensor:
        found = super()._stored(name, box)
        self.count += found.untyped_storage().nbytes()
        return found


def test_what_a_checkpoint_stacks_is_read_once(tmp_path: Path) -> None:
    """gpt-oss interleaves the gate's and the up projection's outputs, which are read in turn."""
    model = FAMILIES["gpt_oss"]
    specs = {name: TensorSpec(torch.float32, shape) for name, shape, _ in stored_tensors(model)}
    drawn = {name: torch.randn(spec.shape) for name, spec in specs.items()}
    write(tmp_path, specs, drawn.items())
    counted = CountedFiles(tmp_path)
    files = ModelFiles(model, counted)
    read = {name: files.read(name) for name in tensors(model)}
    assert counted.count == sum(tensor.nbytes for tensor in drawn.values())
    for name, whole in drawn.items():
        if name.endswith("gate_up_proj"):
            experts = name.removesuffix("gate_up_proj")
            for expert, (part, first) in product(range(model.experts), (("gate", 0), ("up", 1))):
                found = read[f"{experts}{expert}.{part}_proj.weight"]
                assert torch.equal(found, whole[expert, :, first::2].T)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_part_that_is_not_finite_is_named(poison: float, tmp_path: Path) -> None:
    model = FAMILIES["gpt_oss"]
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape, _ in stored_tensors(model)}
    drawn = {name: torch.randn(spec.shape).bfloat16() for name, spec in specs.items()}
    norm, stack = "model.norm.weight", "model.layers.0.mlp.experts.down_proj"
    drawn[norm][3] = drawn[stack][1, 2, 0] = poison
    write(tmp_path, specs, drawn.items())
    wholes = [(name, torch.zeros(shape)) for name, shape in tensors(model).items()]
    parts = [(name, ((0,) * whole.ndim, tuple(whole.shape)), whole) for name, whole in wholes]
    files = ModelFiles(model, WeightFiles(tmp_path))
    expert = f"{stack.replace('down', '1.down')}.weight"
    assert fill_parts(parts, files) == {norm, expert}
    assert files.place(norm) == f"model.safetensors: {norm}"
    assert files.place(expert) == f"model.safetensors: {stack}"
    whole = dict(wholes)[expert]
    others = expert, ((1, 0), (len(whole) - 1, whole.shape[1])), whole[1:]
    assert fill_parts([others], files) == set()  # elements of another rank are not read


def test_a_header_may_not_state_more_experts_than_any_model_has() -> None:
    """A thousand stacks of 10,000 experts are 130 KB of a header, and took 6 GB."""
    names = (f"model.language_model.layers.{n}.mlp.experts.gate_up_proj" for n in range(1000))
    shapes = dict.fromkeys(names, (10_000, 2, 1))
    count = 0
    with pytest.raises(StackError, match="have over 262,144 tensors"):
        for _ in text_tensors(shapes):
            count += 1
    assert count <= 262_144
    real = {
        f"model.language_model.layers.{n}.mlp.experts.gate_up_proj": (512, 4, 2) for n in range(94)
    }
    assert len([*text_tensors(real)]) == 94 * 512 * 2
