"""The settings of a model from its Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel.errors import UserError
from parallel.families import (
    FAMILIES,
    Family,
    GptOssArchitecture,
    GptOssRopeScaling,
    RopeScaling,
    text_configuration,
)
from parallel.files import unreachable
from parallel.settings import ModelSettings
from pipeline.config.checkpoints import json_object
from pipeline.text import shown

PAGE = "docs/how-to/model-family.md"
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
OTHERS = {"max_position_embeddings": "max_positions"}  # of every family
# transformers 5 writes another family's name of it than publishers have.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
    config |= _family_keys(config, family)
    _check_fixed(path, config, family)
    values: dict[str, Any] = {"family": kind, "precision": _precision(config)}
    for key, name in {**family.names, **OTHERS}.items():
        value = config.get(key)
        if value is None and name == "experts":
            value = next((config[each] for each in EXPERTS if each in config), None)
        if value is None and name == "head_dim" and {"hidden_size", "layers"} <= values.keys():
            value = _quotient(config.get("hidden_size"), config.get("num_attention_heads"))
        if value is None:
            raise UserError(f"{shown(path)}: no {key}, which a {kind} has; download it again")
        values[name] = value
    values["architecture"] = {
        key: config[key] for key in family.further.model_fields if config.get(key) is not None
    }
    try:
        return ModelSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        key = next((key for key, each in family.names.items() if each == name), name)
        raise UserError(f"{shown(path)}: {key}: {first['msg']}, not {first['input']!r}") from error


def _config(directory: Path) -> dict[str, Any]:
    """Return the object in config.json, with the keys of its rotary embedding at the top."""
    if (why := unreachable(directory)) is not None:
        raise UserError(f"{shown(directory)} {why}")
    if not directory.is_dir():
        raise UserError(f"no such directory: {shown(directory)}; name the one of a model's files")
    given, problem = json_object(directory / "config.json")
    if problem is not None:
        raise UserError(f"{problem}; name the directory of a Hugging Face checkpoint")
    config = text_configuration(given)
    rope = config.get("rope_parameters")  # of transformers 5
    rope = rope if isinstance(rope, dict) else {}
    flat = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return {**config, **flat, "rope_scaling": config.get("rope_scaling") or rope}


def _family_keys(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys that a family's settings have in another form than config.json."""
    scaling, scaled = config["rope_scaling"], None
    kind = scaling.get("type", scaling.get("rope_type")) if isinstance(scaling, dict) else None
    form = GptOssRopeScaling if family.further is GptOssArchitecture else RopeScaling
    if kind not in (None, "default"):
        name = next(key for key in ("type", "rope_type") if key in form.model_fields)
        scaled = {**{key: scaling[key] for key in form.model_fields if key in scaling}, name: kind}
    found: dict[str, Any] = {"rope_scaling": scaled}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:  # transformers writes them alone
        found["full_attention_interval"] = kinds.index("full_attention") + 1
    return found


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


def _quotient(whole: Any, parts: Any) -> int | None:
    counts = isinstance(whole, int) and isinstance(parts, int) and parts
    return whole // parts if counts else None
