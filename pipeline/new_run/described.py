"""The settings of a model from its Hugging Face config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel.errors import UserError
from parallel.families import FAMILIES, Family, GptOssArchitecture, architecture, text_configuration
from parallel.files import unreachable
from parallel.settings import ModelSettings
from pipeline.config.checkpoints import dtype_violation, json_object
from pipeline.config.read import LONGEST_VALUE, shortened
from pipeline.text import shown

PAGE = "docs/how-to/model-family.md"
PRECISIONS = {"float32": "fp32", "float": "fp32", "float64": "fp32", "double": "fp32"}
OTHERS = {"max_position_embeddings": "max_positions"}  # of every family
# transformers 5 writes another family's name of it than publishers have.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ROPE = ("rope_theta", "partial_rotary_factor")  # that transformers 5 has in rope_parameters
NEEDED = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")  # of YaRN
NEEDED_BY_GPT_OSS = ("factor", "original_max_position_embeddings", "truncate")
UNUSED = {"sliding_window": "use_sliding_window"}  # a key, and the one that says whether it counts


def model_of(directory: Path) -> ModelSettings:
    """Return the settings that describe the checkpoint in a directory, without its weights' path.

    Raises:
        UserError: there is no config.json, its family is unknown, or it needs what Braid lacks.
    """
    config = _config(directory)
    path, kind = directory / "config.json", config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{shown(path)}: model_type: unknown family {json.dumps(kind)}; known: "
            f"{', '.join(FAMILIES)}. {PAGE} says how to add one"
        )
    family = FAMILIES[kind]
    if (problem := dtype_violation(path, config)) is not None:
        raise UserError(problem)
    config |= _family_keys(config, family)
    _check_fixed(path, config, family)
    _check_scaling(path, config, family)
    values: dict[str, Any] = {"family": kind, "precision": _precision(config)}
    for key, name in {**family.names, **OTHERS}.items():
        value = config.get(key)
        if value is None and name == "experts":
            value = next((config[alias] for alias in EXPERTS if alias in config), None)
        if value is None and name == "head_dim" and {"hidden_size", "layers"} <= values.keys():
            value = _quotient(config.get("hidden_size"), config.get("num_attention_heads"))
        if value is None:
            raise UserError(f"{shown(path)}: no {key}, which a {kind} has; download it again")
        values[name] = value
    # A stated null is no default: `q_lora_rank: null` compresses no queries. Only the null of a
    # scaling, which `_config` and `_rope_scaling` set where none is stated, is one.
    values["architecture"] = {
        key: config[key]
        for key in family.further.model_fields
        if key in config and not (key == "rope_scaling" and config[key] is None)
    }
    try:
        model = ModelSettings.model_validate(values, strict=True)
        architecture(model)
    except ValidationError as error:
        raise UserError(f"{shown(path)}: {_message(error, family)}") from error
    scaling = config["rope_scaling"] or {}
    numbers = {key: config.get(key) for key in family.names} | values["architecture"]
    numbers |= {f"rope_scaling.{key}": value for key, value in scaling.items()}
    if infinite := [key for key, value in numbers.items() if value == math.inf]:
        raise UserError(f"{shown(path)}: {infinite[0]}: must be a finite number, not Infinity")
    return model


def _message(error: ValidationError, family: Family) -> str:
    """Return the first error of settings by the key that config.json has."""
    details = error.errors(include_url=False)[0]
    keys = {name: key for key, name in {**family.names, **OTHERS}.items()}
    name, *below = map(str, details["loc"])
    where = ".".join([keys.get(name, name), *below])
    if details["type"] == "missing":
        return f"{where}: missing; download it again"
    stated = shortened(json.dumps(details["input"], default=str), LONGEST_VALUE)
    return f"{where}: {details['msg']}, not {stated}"


def _config(directory: Path) -> dict[str, Any]:
    """Return the object in config.json, with the keys of its rotary embedding at the top."""
    if (why := unreachable(directory)) is not None:
        raise UserError(f"{shown(directory)} {why}")
    if not directory.is_dir():
        raise UserError(f"no such directory: {shown(directory)}; name the one of a model's files")
    content, problem = json_object(directory / "config.json")
    if problem is not None:
        raise UserError(f"{problem}; name the directory of a Hugging Face checkpoint")
    config = text_configuration(content)
    rope = config.get("rope_parameters")  # of transformers 5
    flat = {key: rope[key] for key in ROPE if key in rope} if isinstance(rope, dict) else {}
    scaling = config.get("rope_scaling")
    return {**config, **flat, "rope_scaling": rope if scaling is None else scaling}


def _family_keys(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys that a family's settings have in another form than config.json."""
    keys: dict[str, Any] = {"rope_scaling": _rope_scaling(config["rope_scaling"], family)}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:  # transformers writes them alone
        keys["full_attention_interval"] = kinds.index("full_attention") + 1
    return keys


def _rope_scaling(scaling: Any, family: Family) -> Any:
    """Return the scaling of positions with its type under the family's key; None where none is.

    A wrong value is returned as it is, for the family's settings to refuse.
    """
    if not isinstance(scaling, dict):
        return scaling
    of_gpt_oss = family.further is GptOssArchitecture  # which scales unless config.json says not to
    stated = {key: value for key, value in scaling.items() if value is not None}
    kind = stated.get("rope_type", stated.get("type"))
    parameters = {
        key: value for key, value in stated.items() if key not in (*ROPE, "rope_type", "type")
    }
    if (kind == "default" and not of_gpt_oss) or (kind is None and not parameters):
        return None
    return {**parameters, "rope_type" if of_gpt_oss else "type": kind}


def _check_scaling(path: Path, config: dict[str, Any], family: Family) -> None:
    """Raise UserError where a scaling lacks a key for which transformers has another default."""
    scaling, form = config["rope_scaling"], family.further.model_fields.get("rope_scaling")
    if form is None or not isinstance(scaling, dict) or "yarn" not in scaling.values():
        return
    for key in NEEDED_BY_GPT_OSS if family.further is GptOssArchitecture else NEEDED:
        if key not in scaling:
            raise UserError(f"{shown(path)}: rope_scaling.{key}: missing; download it again")


def _check_fixed(path: Path, config: dict[str, Any], family: Family) -> None:
    """Raise UserError where a key has another value than the only one that runs here."""
    fixed = dict(family.fixed)
    if "rope_scaling" not in family.further.model_fields:
        fixed["rope_scaling"] = None
    for key, only in fixed.items():
        unused = key in UNUSED and config.get(UNUSED[key]) is False
        if key in config and config[key] != only and not unused:
            raise UserError(
                f"{shown(path)}: {key}: {json.dumps(config[key])} is not implemented for "
                f"{config['model_type']}, only {json.dumps(only)}. {PAGE} says what a family has"
            )


def _precision(config: dict[str, Any]) -> str:
    return PRECISIONS.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _quotient(whole: Any, divisor: Any) -> int | None:
    counts = isinstance(whole, int) and isinstance(divisor, int) and divisor
    return whole // divisor if counts else None
