"""config.json with a wrong value: one line that names the key, and no guess."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.families import architecture, configuration
from parallel.hugging_face.config import contradictions
from parallel.weights.names import tensors
from pipeline.config.checkpoints import weights_violation
from pipeline.config.environment import unusable_tokenizer
from pipeline.new_run.described import model_of
from tests.pipeline.hugging_face_directories import published

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("glm-4.5-air", {"n_group": -1}, "n_group: Input should be greater than 0, not -1"),
        ("glm-4.5-air", {"max_position_embeddings": -1}, "max_position_embeddings: Input should"),
        ("qwen3-30b-a3b", {"rope_theta": float("inf")}, "rope_theta: must be a finite number"),
        ("qwen3-30b-a3b", {"rope_theta": True}, "rope_theta: Input should be a valid number"),
        ("qwen3-30b-a3b", {"rms_norm_eps": True}, "rms_norm_eps: Input should be a valid number"),
        ("qwen3-30b-a3b", {"rope_scaling": "yarn"}, 'rope_scaling: "yarn" is not implemented'),
        ("deepseek-v3", {"rope_scaling": "yarn"}, "rope_scaling: Input should be a valid"),
        ("deepseek-v3", {"rope_scaling": -1}, "rope_scaling: Input should be a valid"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: missing"),
        ("deepseek-v3", {"rope_scaling": {"factor": 40}}, "rope_scaling.type: Input"),
        ("deepseek-v3", {"rope_scaling": {**YARN, "type": None}}, "rope_scaling.type: Input"),
        ("deepseek-v3", {"rope_scaling": {**YARN, "type": "linear"}}, 'yarn\', not "linear"'),
        ("deepseek-v3", {"rope_scaling": {**YARN, "factor": "big"}}, "rope_scaling.factor: Input"),
        ("deepseek-v3", {"rope_scaling": {**YARN, "factor": 1e999}}, "factor: must be a finite"),
        ("deepseek-v3", {"routed_scaling_factor": 1e999}, "routed_scaling_factor: must be a fini"),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: missing"),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "default"}}, "rope_scaling.rope_type: Inp"),
    ],
)
def test_one_line_names_config_json_and_the_key(
    model: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = published(tmp_path, model, **changes)
    with pytest.raises(UserError) as caught:
        model_of(path)
    text = str(caught.value)
    assert text.startswith(f"{path}/config.json: ") and "\n" not in text
    assert message in text


def test_heads_without_a_width_share_the_hidden_size(tmp_path: Path) -> None:
    """As Mixtral is published."""
    assert model_of(published(tmp_path, "mixtral-8x7b", head_dim=None)).head_dim == 4096 // 32


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("head_dim", "mixtral-8x7b"),
        ("num_key_value_heads", "deepseek-v3"),
        ("mlp_only_layers", "qwen3-30b-a3b"),
        ("layer_types", "gpt-oss-20b"),
        ("layer_types", "qwen3.5-35b-a3b"),
    ],
)
def test_a_null_that_transformers_computes_is_absent(key: str, model: str, tmp_path: Path) -> None:
    """transformers 4.57.6 writes `"head_dim": null` for Mixtral; its classes compute the others.

    `init`, `validate` and the stage that loads the weights read the same.
    """
    path = published(tmp_path, model)
    file = path / "config.json"
    before = model_of(path)
    stated = json.loads(file.read_text()) | {key: None}
    file.write_text(json.dumps(stated))
    assert configuration(model_of(path)) == configuration(before)
    assert weights_violation(path, before) is None
    assert contradictions(before, stated) == []


@pytest.mark.parametrize("value", ["auto", "torch.float32", "nonsense", 3, {"": "float32"}])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_a_dtype_that_transformers_cannot_load_is_named_early(
    key: str, value: object, tmp_path: Path
) -> None:
    """transformers 5 looks the name up in torch, and fails: AttributeError, for tokenizers too."""
    path = published(tmp_path, "mixtral-8x7b")
    model = model_of(path)
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | {key: value})
    )
    message = rf'config\.json: {key}: .* is no dtype that transformers reads; write "bfloat16"'
    with pytest.raises(UserError, match=message):
        model_of(path)
    for problem in (weights_violation(path, model), unusable_tokenizer(str(path))):
        assert problem is not None
        assert re.search(message, problem)


def test_every_name_of_a_float_is_read(tmp_path: Path) -> None:
    names = {"half": "bf16", "float16": "bf16", "bfloat16": "bf16", "float": "fp32"}
    for name, precision in (names | {"float32": "fp32", "double": "fp32"}).items():
        path = published(tmp_path / name, "mixtral-8x7b", torch_dtype=name)
        assert model_of(path).precision == precision
        assert unusable_tokenizer(str(path)) is None


def test_yarn_is_read_whole(tmp_path: Path) -> None:
    found = model_of(published(tmp_path, "deepseek-v3", rope_scaling=YARN))
    assert architecture(found).rope_scaling.factor == 40
    found = model_of(published(tmp_path, "deepseek-v3", rope_scaling={"rope_type": "default"}))
    assert architecture(found).rope_scaling is None


def test_a_null_is_no_default(tmp_path: Path) -> None:
    """`q_lora_rank: null`: queries are not compressed, where the default is a rank of 1536."""
    path = published(tmp_path, "deepseek-v3")
    file = path / "config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({**stated, "q_lora_rank": None}))
    found = model_of(path)
    assert architecture(found).q_lora_rank is None
    names = "\n".join(tensors(found))
    assert "self_attn.q_proj" in names and "self_attn.q_a_proj" not in names
    file.write_text(json.dumps({**stated, "n_group": None}))
    with pytest.raises(UserError, match=r"config\.json: n_group: Input .*, not null"):
        model_of(path)
    file.write_text(json.dumps({key: stated[key] for key in stated if key != "q_lora_rank"}))
    assert architecture(model_of(path)).q_lora_rank == 1536
