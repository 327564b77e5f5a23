"""The Hugging Face configuration of a model, and the tensors of its checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from parallel.families import (
    FAMILIES,
    Qwen35MoeArchitecture,
    architecture,
    configuration,
    text_configuration,
    traits,
)
from parallel.hugging_face.stored import mtp_pattern
from parallel.machine.device import DTYPES
from parallel.settings import END_TOKEN, PAD_TOKEN, ModelSettings


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def hugging_face_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the model's Hugging Face configuration."""
    decisive = configuration(settings)
    config = AutoConfig.for_model(
        settings.family,
        # Of dense layers; transformers requires it also in families without any.
        **{"intermediate_size": settings.expert_hidden_size, **decisive},
        max_position_embeddings=settings.max_positions,
        router_aux_loss_coef=0.0,
        pad_token_id=PAD_TOKEN,
        eos_token_id=END_TOKEN,
        bos_token_id=None,
        dtype=DTYPES[settings.precision],
    )
    if hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = 0  # Braid builds none; `export` counts those that it keeps
    for key, value in traits(settings).unlisted.items():
        setattr(config, key, value)
    config.architectures = [_model_class(config).__name__]
    # transformers 5 keeps these in rope_parameters; mbridge 0.15.1 reads them from the config.
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in decisive:
            setattr(config, key, decisive[key])
    if isinstance(further := architecture(settings), Qwen35MoeArchitecture):
        # Published configurations have it beside the layer_types that transformers makes of it.
        config.full_attention_interval = further.full_attention_interval
    return config


def settings_of(config: PretrainedConfig) -> ModelSettings:
    """Return the settings that decide a model's tensors, from its `hugging_face_config`."""
    family = FAMILIES[config.model_type]
    decisive = [key for key in family.further.model_fields if key != "rope_scaling"]
    return ModelSettings(
        family=config.model_type,
        architecture={key: getattr(config, key) for key in decisive},
        **{name: getattr(config, key) for key, name in family.names.items()},
    )


def contradictions(settings: ModelSettings, config_json: dict[str, Any]) -> list[str]:
    """Return the differences between a config.json and the settings."""
    config_json = text_configuration(config_json)
    if (kind := config_json.get("model_type")) != settings.family:
        return [f"config.json: model_type is {kind}, but model.family is {settings.family}"]
    config = hugging_face_config(settings)
    try:
        stated = type(config).from_dict(config_json)
        theirs = {**vars(stated), **stated.rope_parameters}
    except Exception as error:  # of wrong values transformers raises anything
        return [f"config.json: transformers refuses it: {' '.join(str(error).split())}"]
    ours = {**vars(config), **config.rope_parameters}
    names = FAMILIES[settings.family].names
    decisive = [key for key in configuration(settings) if key != "rope_scaling"]
    errors = []
    for key in dict.fromkeys([*decisive, *config.rope_parameters]):
        key_here = config.attribute_map.get(key, key)
        if (their_value := theirs.get(key_here)) != ours[key_here]:
            setting = f"model.{names[key]} is" if key in names else "the run's model has"
            errors.append(f"config.json: {key} is {their_value}, but {setting} {ours[key_here]}")
    return errors


def expected_tensors(config: PretrainedConfig) -> dict[str, TensorSpec]:
    """Return every tensor, in order, of a checkpoint that transformers writes for this model.

    In memory transformers fuses the experts of a layer; in a checkpoint they are separate.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = {}
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        precise = any(module in name for module in model._keep_in_fp32_modules_strict)
        specs[name] = TensorSpec(torch.float32 if precise else tensor.dtype, tuple(tensor.shape))
    return specs


def ignored_tensors(config: PretrainedConfig) -> list[str]:
    """Return patterns of tensor names that a checkpoint may have and that are not loaded.

    transformers' own list, the frequencies that transformers 4.32 and before saved of each layer,
    and the multi-token prediction layers.
    """
    return [
        mtp_pattern(config.num_hidden_layers),
        r"\.rotary_emb\.inv_freq$",
        *(_model_class(config)._keys_to_ignore_on_load_unexpected or ()),
    ]


def _model_class(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM._model_mapping[type(config)]
