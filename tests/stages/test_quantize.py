"""The stage that quantizes: both forms of the model are one model, tensor by tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from parallel import batch
from parallel.batch import RankPlace
from parallel.checkpoint import load
from parallel.hugging_face.files import WeightsError
from parallel.model.moments import InputMoments
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from stages.kinds.export.work import export
from stages.kinds.quantize import work as quantize
from stages.kinds.quantize.calibration import calibration_samples
from stages.kinds.quantize.settings import QuantizeSettings
from stages.settings import StageJob
from tests.fake_engines import MODEL, toy_domain, toy_job, toy_run

pytestmark = pytest.mark.usefixtures("one_rank")

WIDE = MODEL.model_copy(update={"hidden_size": 64, "expert_hidden_size": 32})
FORMATS = [("fp8", None), ("nvfp4", None), ("int8", 32), ("int4", 32)]


@pytest.fixture(scope="module")
def parent(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, as a Hugging Face checkpoint."""
    directory = tmp_path_factory.mktemp("parent") / "model"
    policy = Policy(WIDE, LayoutSettings())
    policy.start_fresh(3)
    export(policy, directory)
    return directory


def job(directory: Path, parent: Path, **block: Any) -> StageJob:
    words = toy_domain(prompts={"dataset": "spell_backward"})
    run = toy_run(sums=toy_domain(), words=words)
    own = QuantizeSettings.model_validate({"from": "merge", "calibration": 4, **block})
    run = run.model_copy(update={"model": WIDE, "stages": {"small": own}})
    of: dict[str, Any] = {"stage": "small", "kind": "quantize", "block": "small", "domain": None}
    return toy_job(directory, run, **of, parent=parent, seeded_as="small")


def weights(checkpoint: Path) -> dict[str, Tensor]:
    policy = Policy(WIDE, LayoutSettings())
    load.weights(policy, checkpoint)
    return {name: tensor.clone() for name, tensor in policy.weights()}


def decoded(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a quantized checkpoint as vLLM's library reads them."""
    given = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**given["config_groups"]["group_0"])
    reader = BaseCompressor.get_value_from_registry(given["format"])
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, key = name.rpartition(".")
        modules[module][key] = tensor
    found = {}
    for module, parts in modules.items():
        plain = parts if len(parts) == 1 else {"weight": reader.decompress(parts, scheme)["weight"]}
        found |= {f"{module}.{key}": tensor for key, tensor in plain.items()}
    return found


@pytest.mark.parametrize(("name", "group"), FORMATS)
def test_the_run_s_checkpoint_is_what_the_quantized_one_stands_for(
    name: str, group: int | None, parent: Path, tmp_path: Path
) -> None:
    of = job(tmp_path, parent, format=name, group_size=group)
    quantize.run(of)
    before = weights(parent)
    ours, theirs = weights(of.files.checkpoints / "step_0"), decoded(of.files.exported)
    assert ours.keys() == theirs.keys() == before.keys()
    matrices = {part for each in of.block_settings.quantized(WIDE) for part, _ in each.tensors}
    assert len(matrices) == WIDE.layers * (4 + 3 * WIDE.experts)
    for tensor, value in ours.items():
        if tensor not in matrices:  # routers, head, embeddings and norms
            assert torch.equal(value, before[tensor])
            assert torch.equal(value, theirs[tensor])
            continue
        change = (value - before[tensor]).norm() / before[tensor].norm()
        assert 1e-3 < change < 0.15, (tensor, change)
        if name == "nvfp4":  # its decoder computes in bf16
            torch.testing.assert_close(theirs[tensor].float(), value, rtol=2**-7, atol=0)
        else:
            assert torch.equal(theirs[tensor], value)


def test_what_is_excluded_stays_as_it_is(parent: Path, tmp_path: Path) -> None:
    of = job(tmp_path, parent, format="int8", group_size=32, exclude=["*.experts.*", "*.1.*attn*"])
    quantize.run(of)
    before, after = weights(parent), weights(of.files.checkpoints / "step_0")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    given = json.loads((of.files.exported / "config.json").read_text())["quantization_config"]
    assert set(given["ignore"]) == {
        "lm_head",
        *(f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"),
        *(f"model.layers.{layer}.mlp.gate" for layer in range(2)),
        *(f"model.layers.{layer}.mlp.experts" for layer in range(2)),
        *(rf"re:model\.layers\.{layer}\.mlp\.experts\..*" for layer in range(2)),
    }


def test_layers_for_multi_token_prediction_are_kept_as_they_are(
    parent: Path, tmp_path: Path
) -> None:
    layer = f"model.layers.{WIDE.layers}"
    kept = {f"{layer}.eh_proj.weight": torch.randn(4, 8).bfloat16()}
    (start := tmp_path / "start").mkdir()
    save_file(kept, start / "model.safetensors")
    of = job(tmp_path, parent, format="int8", group_size=32)
    model = WIDE.model_copy(update={"initial_weights": start})
    of = of.model_copy(update={"settings": of.settings.model_copy(update={"model": model})})
    quantize.run(of)
    written = load_file(of.files.exported / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in kept.items())
    given = json.loads((of.files.exported / "config.json").read_text())
    assert rf"re:model\.layers\.{WIDE.layers}\..*" in given["quantization_config"]["ignore"]
    assert given["mtp_num_hidden_layers"] == 1  # Qwen3's configuration has no key for them


def test_it_repeats_bit_for_bit_and_starts_no_run(parent: Path, tmp_path: Path) -> None:
    twice = [job(tmp_path / each, parent, format="int4", group_size=32) for each in "ab"]
    left = twice[1].files.path / ".huggingface.left"  # by a killed attempt
    (left / "huggingface").mkdir(parents=True)
    for each in twice:
        quantize.run(each)
    assert not left.exists()
    files = [(each.files.exported / "model.safetensors").read_bytes() for each in twice]
    assert files[0] == files[1]
    policy = Policy(WIDE, LayoutSettings())
    with pytest.raises(WeightsError, match="its weights are quantized; name the checkpoint before"):
        policy.load_hugging_face(twice[0].files.exported)


def test_moments_are_those_of_transformers(parent: Path, tmp_path: Path) -> None:
    of = job(tmp_path, parent, format="int8", group_size=32)
    samples = calibration_samples(of, of.domains, 4)
    assert [sample.domain for sample in samples] == ["sums"] * 4 + ["words"] * 4
    policy = Policy(WIDE, LayoutSettings())
    load.weights(policy, parent)
    moments = InputMoments(policy, of.block_settings.quantized(WIDE))
    with moments.watching():
        policy.evaluate(batch.split(samples, RankPlace.here(), 64, replay=False), lambda _: None)
    ours = moments.by_tensor()
    model = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32).eval()
    seen: dict[str, list[Tensor]] = defaultdict(list)
    watched = [
        f"model.layers.{layer}.{part}"
        for layer in range(WIDE.layers)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp")
    ]
    for name in watched:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda _, given, name=name: seen[name].append(given[0].flatten(0, -2))
        )
    for sample in samples:
        with torch.no_grad():
            model(torch.from_numpy(sample.prompt.astype(np.int64))[None])
    for name in watched:
        theirs = torch.cat(seen[name]).square().mean(0)
        if not name.endswith("mlp"):
            torch.testing.assert_close(ours[f"{name}.weight"], theirs, rtol=1e-4, atol=1e-6)
            continue
        # An expert sees the tokens that are routed to it, experts_per_token of all of them.
        each = [ours[f"{name}.experts.{expert}.up_proj.weight"] for expert in range(WIDE.experts)]
        assert torch.equal(each[0], ours[f"{name}.experts.0.gate_proj.weight"])
        assert not torch.allclose(each[0], each[1]) and not torch.allclose(each[0], theirs)
        assert (torch.stack(each).amin(0) <= theirs * 1.0001).all()
        assert (torch.stack(each).amax(0) >= theirs * 0.9999).all()
