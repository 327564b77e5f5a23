"""Model families have the keys, defaults and rules of their Hugging Face configurations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from parallel import families
from parallel.estimates.tensor_sizes import parameter_count
from parallel.families import (
    FAMILIES,
    architecture,
    family_violations,
    once_per_settings,
    traits,
)
from parallel.hugging_face.config import contradictions, expected_tensors, hugging_face_config
from parallel.model.parameters import initialize
from parallel.model.policy import Policy
from parallel.settings import InitializationSettings, LayoutSettings, ModelSettings
from parallel.weights.names import stored_tensors, tensors
from tests.layouts.real_models import QWEN3_30B, real_model

pytestmark = pytest.mark.usefixtures("one_rank")

BASE = {
    "vocabulary_size": 80,
    "hidden_size": 32,
    "layers": 4,
    "attention_heads": 4,
    "key_value_heads": 4,
    "head_dim": 8,
    "experts": 8,
    "experts_per_token": 4,
    "expert_hidden_size": 16,
}
GROUPS = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}


def model(family: str, **changes: object) -> ModelSettings:
    further = GROUPS if FAMILIES[family].dense_layers else {}
    return ModelSettings.model_validate(
        {**BASE, "family": family, "architecture": further, **changes}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = AutoConfig.for_model(family)
    theirs.partial_rotary_factor = theirs.rope_parameters.get("partial_rotary_factor", 0.5)
    theirs.rope_scaling = (
        {key: value for key, value in theirs.rope_parameters.items() if key != "rope_theta"}
        if family == "gpt_oss"
        else None
    )
    theirs.full_attention_interval = 4  # transformers makes its layer_types of it
    if family == "glm4_moe_lite":
        theirs.first_k_dense_replace = theirs.mlp_layer_types.index("sparse")
    further = FAMILIES[family].further()
    assert further.model_dump() == {name: getattr(theirs, name) for name in further.model_dump()}


def test_a_random_start_has_the_deviations_of_the_settings() -> None:
    start = InitializationSettings(embedding_std=0.3, router_std=0.07)
    policy = Policy(model("qwen3_moe", initialization=start), LayoutSettings())
    policy.start_fresh(seed=1)
    weights = policy.named_weights()
    embeddings = [value for name, value in weights.items() if "word_embeddings" in name]
    routers = [value for name, value in weights.items() if "router" in name]
    assert [value.std().item() for value in embeddings] == pytest.approx([0.3], rel=0.1)
    assert [value.std().item() for value in routers] == pytest.approx([0.07] * 4, rel=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_agrees_with_its_own_configuration(family: str) -> None:
    settings = model(family, rope_base=5e5)
    config = hugging_face_config(settings)
    given = config.to_dict()
    assert contradictions(settings, given) == []
    older = {key: value for key, value in given.items() if key != "rope_parameters"}
    assert contradictions(settings, older) == []  # as transformers 4 writes it
    plain = config.architectures[0].lower().replace("_", "")
    assert plain.startswith(family.removesuffix("_text").replace("_", ""))
    assert len(expected_tensors(config)) > 60


def test_a_published_configuration_of_a_vision_language_model_agrees() -> None:
    """Qwen3.5-35B-A3B's, with what else is in its text_config."""
    settings = real_model("qwen3.5-35b-a3b")
    inner = hugging_face_config(settings).to_dict() | {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    given = {"model_type": "qwen3_5_moe", "text_config": inner, "vision_config": {"depth": 27}}
    assert contradictions(settings, given) == []
    whole, used = parameter_count(settings)
    assert (round(whole / 1e9, 1), round(used / 1e9, 1)) == (34.7, 3.5)
    del inner["layer_types"]
    inner["full_attention_interval"] = 5
    [found] = contradictions(settings, given)
    assert found.startswith("config.json: layer_types is ['linear_attention', ")


def test_a_published_configuration_of_glm_4_7_flash_agrees() -> None:
    """It states the number of dense layers; transformers reads a list, or makes it of one."""
    settings = model("glm4_moe_lite", norm_epsilon=1e-5)
    given = hugging_face_config(settings).to_dict()
    assert given["first_k_dense_replace"] == 1
    del given["mlp_layer_types"]
    assert contradictions(settings, given) == []
    assert list(family_violations(settings, LayoutSettings())) == []
    two = model(
        "glm4_moe_lite", norm_epsilon=1e-5, architecture={**GROUPS, "first_k_dense_replace": 2}
    )
    [error] = contradictions(two, {**given, "first_k_dense_replace": 2})
    assert error.startswith("config.json: mlp_layer_types is ['dense', 'sparse', 'sparse', ")


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("hidden_size", 64, "hidden_size is 64, but model.hidden_size is 32"),
        ("num_local_experts", 4, "num_experts is 4, but model.experts is 8"),
        ("norm_topk_prob", False, "norm_topk_prob is False, but the run's model has True"),
        ("attention_bias", True, "attention_bias is True, but the run's model has False"),
        ("rope_parameters", {"rope_theta": 1e6}, "rope_theta is 1000000.0, but model.rope_base is"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type is linear, but the run's"),
        ("model_type", "mixtral", "model_type is mixtral, but model.family is qwen3_moe"),
    ],
)
def test_a_contradiction_is_named(key: str, value: object, fault: str) -> None:
    settings = model("qwen3_moe")
    given = hugging_face_config(settings).to_dict()
    if key == "rope_scaling":
        del given["rope_parameters"]
    [found] = contradictions(settings, {**given, key: value})
    assert found.startswith(f"config.json: {fault}")


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("layer_types", ["full_attention"] * 4, "layer_types is ['full_attention', 'full_att"),
        ("sliding_window", 64, "sliding_window is 64, but the run's model has 128"),
        ("swiglu_limit", 6.0, "swiglu_limit is 6.0, but the run's model has 7.0"),
        ("rope_scaling", {"rope_type": "yarn", "truncate": True}, "truncate is True, but"),
    ],
)
def test_a_contradiction_of_gpt_oss_is_named(key: str, value: object, fault: str) -> None:
    settings = model("gpt_oss", norm_epsilon=1e-5)
    given = hugging_face_config(settings).to_dict()
    if isinstance(value, dict):
        scaling = given.pop("rope_parameters")
        value = {**scaling, **value}
    [found] = contradictions(settings, {**given, key: value})
    assert found.startswith(f"config.json: {fault}")


def test_rules_of_gpt_oss() -> None:
    settings, layout = model("gpt_oss", norm_epsilon=1e-5), LayoutSettings(ranks=2, expert=2)
    assert list(family_violations(settings, layout)) == []
    whole = LayoutSettings(ranks=2, expert_tensor=2)
    wrong = settings.model_copy(update={"norm_epsilon": 1e-6})
    assert [key for key, _ in family_violations(wrong, whole)] == [
        "model.norm_epsilon",
        "layout.expert_tensor",
    ]


def test_centred_norms_of_transformer_engine_start_at_zero() -> None:
    """They are in the linear layers after them; the norm of a delta net is not centred."""
    part, linear = torch.nn.Module(), torch.nn.Module()
    part.config = SimpleNamespace(layernorm_zero_centered_gamma=True)
    linear.layer_norm_weight = torch.nn.Parameter(torch.full((2,), torch.nan))
    part.linear_qkv, part.out_norm = linear, torch.nn.RMSNorm(2)
    initialize(part, model("qwen3_5_moe_text"), seed=0)
    assert linear.layer_norm_weight.tolist() == [0, 0]
    assert part.out_norm.weight.tolist() == [1, 1]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_key_of_another_family_is_unknown(family: str) -> None:
    with pytest.raises(ValidationError, match="use_qk_norm"):
        architecture(model(family, architecture={"use_qk_norm": True}))


@pytest.mark.parametrize(
    ("further", "key"),
    [
        ({"full_attention_interval": 5}, "full_attention_interval: 5 leaves none of model.layers"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads: 24 is not a multiple of 16"),
        ({"linear_num_key_heads": 1}, "linear_num_key_heads: 1 is not a multiple of 2"),
        (
            {"shared_expert_intermediate_size": 15},
            "shared_expert_intermediate_size: 15 is not a multiple of 2",
        ),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor: rotates 3.2 of model.head_dim"),
    ],
)
def test_rules_of_delta_nets(further: dict[str, object], key: str) -> None:
    layout, family = LayoutSettings(ranks=2, tensor=2), "qwen3_5_moe_text"
    assert list(family_violations(model(family), layout)) == []
    [(where, message)] = family_violations(model(family, architecture=further), layout)
    assert f"{where}: {message}".startswith(f"model.architecture.{key}")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"experts_per_token": 1}, "model.experts_per_token"),
        ({"key_value_heads": 2}, "model.key_value_heads"),
        ({"norm_epsilon": 1e-5}, "model.norm_epsilon"),
        ({"layers": 1}, "model.architecture.first_k_dense_replace"),
        ({"experts_per_token": 2}, "model.architecture.topk_group"),
        ({"experts": 6}, "model.architecture.n_group"),
        ({"architecture": {**GROUPS, "n_group": 1}}, "model.architecture.topk_group"),
        ({"architecture": {**GROUPS, "intermediate_size": 15}}, "model.architecture.intermediate"),
    ],
)
def test_rules_of_a_family(changes: dict[str, object], key: str) -> None:
    layout = LayoutSettings(ranks=2, tensor=2)
    assert list(family_violations(model("deepseek_v3"), layout)) == []
    found = [key for key, _ in family_violations(model("deepseek_v3", **changes), layout)]
    assert any(each.startswith(key) for each in found), found


@pytest.mark.parametrize("family", FAMILIES)
def test_traits_are_those_of_the_weights_and_the_configuration(family: str) -> None:
    settings = model(family)
    has, names = traits(settings), " ".join(tensors(settings))
    assert has.latent_attention == ("kv_a_proj_with_mqa" in names)
    assert has.qk_norm == ("q_norm" in names)
    assert has.sinks == ("self_attn.sinks" in names)
    assert has.delta_nets == ("linear_attn" in names)
    assert has.correction_bias == ("e_score_correction_bias" in names)
    assert has.shared_experts == ("shared_expert" in names)
    assert has.biased_experts == ("experts.0.down_proj.bias" in names)
    assert has.biased_experts == any(stack for _, _, stack in stored_tensors(settings))
    assert has.dense_layers == ("first_k_dense_replace" in has.further.model_fields)
    assert has.windows == ("sliding_window" in has.further.model_fields)


def test_results_are_kept_for_settings_and_numbers_and_only_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "MOST_RESULTS", 4)
    computed: list[int] = []

    @once_per_settings
    def layers(model: ModelSettings, times: int = 1) -> int:
        computed.append(times * model.layers)
        return computed[-1]

    for count in range(1, 9):  # each model is gone before the next, which may get its id
        assert layers(QWEN3_30B.model_copy(update={"layers": count})) == count
    for _ in range(2):
        assert layers(QWEN3_30B) == 48
        assert layers(QWEN3_30B, times=2) == 96
    assert computed == [*range(1, 9), 48, 96]
    [results] = [
        cell.cell_contents for cell in layers.__closure__ if type(cell.cell_contents) is dict
    ]
    assert len(results) <= 4
