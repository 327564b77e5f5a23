"""Hugging Face import and export are equal under every layout."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from parallel.families import families_with
from parallel.files import WEIGHTS_INDEX
from parallel.hugging_face.files import WeightFiles
from parallel.machine.device import DTYPES
from parallel.settings import LayoutSettings
from pipeline.config.checkpoints import weights_violation
from tests.layouts.cases import SPREAD
from tests.layouts.hugging_face_cases import (
    FAMILIES,
    MODELS,
    compiled_activation,
    errors_of_gradients,
    export,
    export_checkpoint,
    export_other_weights,
    gradient_error,
    import_and_compare,
    import_checkpoint,
    import_mxfp4,
    input_moments,
    packing_errors,
    save_checkpoint,
    start_from,
    stored,
    tensors,
)
from tests.ranks import On
from tests.tiers import tiered

MATRIX = {
    "1 rank": {},
    "TP2": {"ranks": 2, "tensor": 2},  # whose experts are whole on both ranks
    "ETP2": {"ranks": 2, "expert_tensor": 2},
    "TP2 ETP2": {"ranks": 2, "tensor": 2, "expert_tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "PP2 uneven": {"ranks": 2, "pipeline": 2, "last_stage_layers": 3},
    "EP2": {"ranks": 2, "expert": 2},
    "CP2": {"ranks": 2, "context": 2},
    "TP2 EP2 PP2": {"ranks": 4, "tensor": 2, "expert": 2, "pipeline": 2},
    "TP2 EP2 ETP2": {"ranks": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    "TP2 CP2 EP2": {"ranks": 4, "tensor": 2, "context": 2, "expert": 2},
}
# Each layout's ranks once. megatron-core does not split experts with biases.
PAIRS = [
    (name, family)
    for name, family in product(list(MATRIX)[1:], FAMILIES)
    if family != "gpt_oss" or "ETP" not in name
]
ONE_DEVICE = [pytest.param("1 rank", marks=pytest.mark.one_device)]
# Nats from transformers' log-probabilities in fp32. At most 1.9e-6 is measured, four units in the
# last place of values from -8 to -4; two more are left for the kernels of other CPUs. Over 1,551
# tokens ours were up to 1.9e-6 off fp64, transformers' up to 2.7e-6 (Qwen3.5's).
LOGPROBS = 3e-6


@pytest.fixture(scope="session")
def exported(on: On, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model with random weights, as one rank writes it."""
    folders = {model: tmp_path_factory.mktemp("exports") / model for model in MODELS}
    for model, folder in folders.items():
        on(LayoutSettings(), export, LayoutSettings(), model, str(folder))
    return folders


@pytest.mark.parametrize(
    ("name", "family"),
    [pytest.param("1 rank", family, marks=pytest.mark.one_device) for family in FAMILIES]
    + tiered(
        PAIRS,
        lambda name, family: (
            name == ("TP2 CP2 EP2" if family == "gpt_oss" else "TP2 EP2 ETP2")
            or (family == "qwen3_moe" and name in ("TP2 EP2 PP2", "VPP2", "PP2 uneven"))
            or (family in ("qwen3_moe", "qwen3_5_moe_text") and name == "CP2")
        ),
    ),
)
def test_checkpoints_are_equal_under_every_layout(
    family: str, name: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    """Exports are equal bit for bit; imports give the model that transformers loads."""
    layout = LayoutSettings(**MATRIX[name])
    on(layout, export, layout, family, str(tmp_path / "out"))
    assert stored(str(tmp_path / "out")) == stored(str(exported[family]))
    for found in on(layout, import_and_compare, layout, family, str(exported[family])):
        assert found["tensors"]
        assert found["in_order"]
        assert found["logprobs"] <= LOGPROBS, found
        assert found["rotary"] > 0.0


@pytest.mark.parametrize("family", tiered(FAMILIES, {"qwen3_moe", "deepseek_v3"}))
def test_the_stage_exports_a_checkpoint_of_any_layout(family: str, on: On, tmp_path: Path) -> None:
    layout, another = (LayoutSettings(**MATRIX[name]) for name in ("TP2 EP2 PP2", "TP2"))
    saved = on(layout, save_checkpoint, layout, family, str(tmp_path))[0]
    on(another, export_checkpoint, another, family, str(tmp_path / "step_1"), str(tmp_path / "out"))
    assert stored(str(tmp_path / "out")) == saved


def test_the_stage_imports_a_checkpoint_for_any_layout(
    on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    layout, another = (LayoutSettings(**MATRIX[name]) for name in ("TP2 EP2 PP2", "TP2"))
    for model in ("qwen3_moe", "bf16"):
        directory, output = tmp_path / model, tmp_path / f"{model} again"
        on(layout, import_checkpoint, layout, model, str(exported[model]), str(directory))
        [checkpoint] = (directory / "checkpoints").iterdir()
        assert checkpoint.name == "step_0"
        on(another, export_checkpoint, another, model, str(checkpoint), str(output))
        assert stored(str(output)) == stored(str(exported[model]))


def as_vision_language_model(source: Path, directory: Path) -> None:
    """Write a text model's checkpoint as Qwen3.5-MoE is published."""
    directory.mkdir()
    files, stacks = WeightFiles(source), dict[str, list[torch.Tensor]]()
    saved = {"model.visual.pos_embed.weight": torch.randn(3, 2), "mtp.fc.weight": torch.randn(2, 4)}
    for name in sorted(files.stored, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        outer = name.replace("model.", "model.language_model.", 1)
        if match := re.match(r"(.*\.experts)\.\d+\.(gate|up|down)_proj", outer):
            stacks.setdefault(f"{match[1]}.{match[2]}", []).append(files.read(name))
        else:
            saved[outer] = files.read(name)
    for name in [name for name in stacks if name.endswith(".gate")]:
        layer = name.removesuffix(".gate")
        gate, up, down = (torch.stack(stacks[f"{layer}.{part}"]) for part in ("gate", "up", "down"))
        saved[f"{layer}.gate_up_proj"] = torch.cat([gate, up], 1)
        saved[f"{layer}.down_proj"] = down
    save_file(saved, directory / "model.safetensors")
    inner = json.loads((source / "config.json").read_text())
    config = {"model_type": "qwen3_5_moe", "text_config": inner, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))


def test_the_text_model_of_a_vision_language_model_is_imported(
    on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    family, source = "qwen3_5_moe_text", tmp_path / "published"
    layout, another = (LayoutSettings(**MATRIX[name]) for name in ("TP2 EP2 ETP2", "TP2"))
    as_vision_language_model(exported[family], source)
    assert weights_violation(source, MODELS[family]) is None
    on(layout, import_checkpoint, layout, family, str(source), str(tmp_path))
    step, output = tmp_path / "checkpoints" / "step_0", tmp_path / "out"
    on(another, export_checkpoint, another, family, str(step), str(output))
    assert stored(str(output)) == stored(str(exported[family]))


def with_layer_for_multi_token_prediction(source: Path, directory: Path, module: str) -> None:
    """Copy a checkpoint and add a layer for multi-token prediction, of bf16 and fp32."""
    shutil.copytree(source, directory)
    last = f"model.layers.{MODELS['qwen3_moe'].layers - 1}."
    added = {
        f"{module}.{name.removeprefix(last)}": torch.randn(stored.shape)
        for name, stored in WeightFiles(source).stored.items()
        if name.startswith(last)
    }
    # Stored in another precision than the model's.
    added[f"{module.split('.layers.0')[0]}.eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    save_file(added, directory / "mtp.safetensors")
    index = json.loads((directory / WEIGHTS_INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(added, "mtp.safetensors")
    (directory / WEIGHTS_INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("family", "module", "key"),
    [
        ("glm4_moe", f"model.layers.{MODELS['glm4_moe'].layers}", "num_nextn_predict_layers"),
        ("deepseek_v3", f"model.layers.{MODELS['glm4_moe'].layers}", "num_nextn_predict_layers"),
        ("qwen3_5_moe_text", "mtp.layers.0", "mtp_num_hidden_layers"),
    ],
)
def test_layers_for_multi_token_prediction_are_exported_as_they_were_imported(
    family: str, module: str, key: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    layout, another = (LayoutSettings(**MATRIX[name]) for name in ("TP2 EP2 PP2", "TP2"))
    source, output, bare = tmp_path / "source", tmp_path / "out", tmp_path / "bare"
    with_layer_for_multi_token_prediction(exported[family], source, module)
    on(layout, import_checkpoint, layout, family, str(source), str(tmp_path))
    step = str(tmp_path / "checkpoints" / "step_0")
    on(another, export_checkpoint, another, family, step, str(output), str(source))
    assert stored(str(output)) == stored(str(source))
    assert json.loads((output / "config.json").read_text())[key] == 1
    on(another, export_checkpoint, another, family, step, str(bare))  # the run names no checkpoint
    assert stored(str(bare)) == stored(str(exported[family]))
    assert not json.loads((bare / "config.json").read_text()).get(key)


def in_blocks(source: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint with its matrices in FP8, as DeepSeek-V3; return what it means in fp32."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    files, written, meant = WeightFiles(source), {}, {}
    for name in files.stored:
        tensor = written[name] = meant[name] = files.read(name)
        if tensor.dim() < 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            continue
        grid = [-(-length // 16) for length in tensor.shape]
        scales = torch.rand(grid) + 0.5
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        spread = spread[: tensor.shape[0], : tensor.shape[1]]
        written[name] = (tensor / spread).to(torch.float8_e4m3fn)
        written[f"{name}_scale_inv"] = scales
        meant[name] = written[name].float() * spread
    save_file(written, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("name", ["TP2 EP2 PP2", "TP2 EP2 ETP2"])
def test_weights_in_blocks_are_imported_under_any_layout(
    name: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    layout = LayoutSettings(**MATRIX[name])
    meant = in_blocks(exported["deepseek_v3"], tmp_path / "fp8")
    on(layout, import_checkpoint, layout, "deepseek_v3", str(tmp_path / "fp8"), str(tmp_path))
    step, output = tmp_path / "checkpoints" / "step_0", tmp_path / "out"
    on(layout, export_checkpoint, layout, "deepseek_v3", str(step), str(output))
    assert stored(str(output)) == tensors(meant.items())


@pytest.mark.parametrize("model", ["deepseek_v3", "bf16"])
def test_layers_for_multi_token_prediction_in_blocks_are_exported_in_the_model_s_precision(
    model: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    layout, another = (LayoutSettings(**MATRIX[name]) for name in ("TP2 EP2 PP2", "TP2"))
    module, precision = f"model.layers.{MODELS[model].layers}.", DTYPES[MODELS[model].precision]
    plain, source, output = tmp_path / "plain", tmp_path / "fp8", tmp_path / "out"
    with_layer_for_multi_token_prediction(exported[model], plain, module[:-1])
    meant = in_blocks(plain, source)
    given = load_file(source / "model.safetensors")
    coded = [name for name, tensor in given.items() if tensor.dtype == torch.float8_e4m3fn]
    expected = meant | {name: meant[name].to(precision) for name in coded}
    assert weights_violation(source, MODELS[model]) is None
    on(layout, import_checkpoint, layout, model, str(source), str(tmp_path))
    step = str(tmp_path / "checkpoints" / "step_0")
    on(another, export_checkpoint, another, model, step, str(output), str(source))
    assert stored(str(output)) == tensors(expected.items())  # and so no scale
    files, compared = WeightFiles(output), 0
    for name in coded:
        if name.startswith(module) and not any(length % 16 for length in given[name].shape):
            scales = given[f"{name}_scale_inv"]
            theirs = Fp8Dequantize(None)._dequantize_one(given[name], scales)
            assert torch.equal(files.read(name), theirs.to(precision))
            compared += 1
    assert compared
    config = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", [*ONE_DEVICE, "TP2 EP2 PP2"])
def test_scaled_positions_and_queries_without_compression_equal_those_of_transformers(
    name: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    layout = LayoutSettings(**MATRIX[name])
    on(layout, export, layout, "yarn", str(tmp_path / "out"))
    kept = stored(str(tmp_path / "out"))
    assert kept == stored(str(exported["yarn"]))
    assert "model.layers.0.self_attn.q_proj.weight" in kept
    for found in on(layout, import_and_compare, layout, "yarn", str(exported["yarn"])):
        assert found["tensors"]
        assert found["logprobs"] <= LOGPROBS, found


def test_experts_in_mxfp4_are_those_that_transformers_restores(on: On, tmp_path: Path) -> None:
    assert on(LayoutSettings(), import_mxfp4, str(tmp_path)) == [[]]


@pytest.mark.parametrize("name", [*ONE_DEVICE, "TP2 EP2 PP2"])
def test_bf16_is_kept(name: str, on: On, exported: dict[str, Path], tmp_path: Path) -> None:
    layout = LayoutSettings(**MATRIX[name])
    on(layout, export, layout, "bf16", str(tmp_path / "out"))
    kept = stored(str(tmp_path / "out"))
    assert kept == stored(str(exported["bf16"]))
    assert {tensor.split()[0] for tensor in kept.values()} == {"torch.bfloat16", "torch.float32"}
    for found in on(layout, import_and_compare, layout, "bf16", str(exported["bf16"])):
        assert found["tensors"]
        assert found["logprobs"] < 0.1, found


@pytest.mark.parametrize(
    ("names", "family"),
    tiered(
        [
            *product(
                ["TP2 EP2 PP2", "TP2, CP2, EP2, PP2, VPP2, PP2 uneven"],
                [family for family in FAMILIES if family != "qwen3_moe"],
            ),
            *product(
                ["ETP2, TP2 ETP2, TP2 EP2 ETP2"],
                [family for family in FAMILIES if family not in ("qwen3_moe", "gpt_oss")],
            ),
            ("TP2 CP2 EP2", "gpt_oss"),
        ],
        lambda names, family: names in ("TP2 EP2 PP2", "TP2 CP2 EP2"),
    ),
)
def test_every_family_trains_alike_under_every_layout(
    names: str, family: str, on: On, tmp_path: Path
) -> None:
    for name in ("1 rank", *names.split(", ")):
        layout = LayoutSettings(**MATRIX[name])
        for found in on(layout, gradient_error, layout, family, str(tmp_path)):
            assert found < (1e-5, ""), (name, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_trains_as_its_sequences_do(family: str, on: On) -> None:
    """No attention, convolution, state or sink crosses from one sequence into the next."""
    [errors] = on(LayoutSettings(), packing_errors, family)
    name = max(errors, key=errors.__getitem__)
    assert errors[name] < 1e-5, name
    assert errors["loss"] < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(
    family: str, on: On, exported: dict[str, Path]
) -> None:
    """Compare a packed row's: attention, delta nets, sinks, norms, routers, embeddings, head."""
    [errors] = on(LayoutSettings(), errors_of_gradients, family, str(exported[family]))
    own = {"gpt_oss": "sinks", "qwen3_5_moe_text": "A_log"}
    own |= dict.fromkeys(families_with("latent_attention"), "kv_b_proj.weight")
    assert any(name.endswith(own.get(family, "q_proj.weight")) for name in errors)
    name = max(errors, key=errors.__getitem__)
    assert errors[name] < 1e-5, name


def test_gpt_oss_s_compiled_activation_is_the_plain_one(on: On) -> None:
    """The ranks of the tests do not compile it; those of a run do."""
    [(error, frames)] = on(LayoutSettings(), compiled_activation)
    assert error < 1e-6 and frames


def test_an_export_with_other_logits_fails_and_leaves_no_files(on: On, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for message in on(SPREAD, export_other_weights, SPREAD, str(output)):
        assert message == f"{output}: verification failed: other logits than the policy's"
    assert not list(tmp_path.iterdir())


def damages(directory: Path) -> Iterator[str]:
    """Damage a checkpoint in one way after another; yield the expected error of each."""
    shard = min(directory.glob("*.safetensors"))
    whole = shard.read_bytes()
    rest = load_file(shard)
    name = "lm_head.weight"
    head = rest.pop(name)
    save_file(rest, shard)
    yield f"{name} is missing"
    save_file({**rest, name: head[:, :8].contiguous()}, shard)
    yield f"{shard.name}: {name} is [80, 8], but should be [80, 32]"
    save_file({**rest, name: head.to(torch.float8_e4m3fn)}, shard)
    yield f"{shard.name}: {name} is F8_E4M3, but should be one of F32, BF16, F16"
    save_file({**rest, name: head, "model.more": head.clone()}, shard)
    yield f"{shard.name}: model.more is no tensor of this model"
    shard.write_bytes(whole)
    config = directory / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"hidden_size": 32', '"hidden_size": 48'))
    yield "config.json: hidden_size is 48, but model.hidden_size is 32"
    config.write_text(text[:-9])
    yield "config.json: "
    config.unlink()
    yield "config.json: "
    config.write_text(text)
    shutil.rmtree(directory)
    yield "no such directory"
    directory.mkdir()
    yield "no *.safetensors file; config.json: "


def test_a_start_reports_every_error_and_changes_no_weight(
    on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(exported["qwen3_moe"], folder)
    for damage in damages(folder):
        for message, same in on(SPREAD, start_from, SPREAD, str(folder)):
            assert message.startswith(f"{folder}: no checkpoint of this model: ")
            assert damage in message
            assert same


@pytest.mark.parametrize("layer", [1, MODELS["qwen3_moe"].layers])  # the latter is kept as it is
def test_a_start_with_nan_on_one_rank_is_an_error_on_all(
    layer: int, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    last = f"model.layers.{MODELS['qwen3_moe'].layers}"
    with_layer_for_multi_token_prediction(exported["qwen3_moe"], folder, last)
    name = f"model.layers.{layer}.mlp.experts.3.down_proj.weight"
    file = WeightFiles(folder).stored[name].file
    found = load_file(file)
    found[name][0, 0] = torch.nan
    save_file(found, file)
    for message, _ in on(SPREAD, start_from, SPREAD, str(folder)):
        wrong = f"{file.name}: {name} has NaN or infinite elements"
        assert message == f"{folder}: no model can start from it: {wrong}"


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_of_inputs_are_equal_under_every_layout(family: str, on: On) -> None:
    """Column- and row-parallel layers, experts of other ranks and other pipeline stages."""
    [alone] = on(LayoutSettings(), input_moments, LayoutSettings(), family)
    layout = LayoutSettings(**MATRIX["TP2 EP2 PP2"])
    for found in on(layout, input_moments, layout, family):
        assert found.keys() == alone.keys()
        seen = [name for name, values in alone.items() if set(values) != {1.0}]
        assert all(name in seen for name in alone if ".experts." not in name)
        assert any(".experts." in name for name in seen)  # no token is routed to some
        for name, values in found.items():
            expected = torch.tensor(alone[name])
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-7)
