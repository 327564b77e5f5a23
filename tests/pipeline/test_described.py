"""config.json with a wrong value: one line that names the key, and no guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.families import architecture
from parallel.weights.names import tensors
from pipeline.config.described import model_of
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
