"""Checks of models outside a run before any stage starts: they exist, and are of its model."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from yaml import CSafeLoader

from parallel.errors import hint
from parallel.families import (
    ADDING_A_FAMILY,
    FAMILIES,
    configuration,
    fp8_blocks,
    is_readable,
    text_configuration,
)
from parallel.files import (
    CHECKSUMS,
    WEIGHTS_INDEX,
    is_file_name,
    read_text,
    unindexed_weights,
    unreachable,
)
from parallel.settings import ModelSettings
from pipeline.config.tensor_headers import tensors_violation
from pipeline.text import shown

# Names that transformers 5 finds in torch, without which it loads no file beside config.json.
DTYPES = ("bfloat16", "float16", "half", "float32", "float", "float64", "double")
MOST_BYTES = 1 << 26  # of a JSON file, far above any checkpoint's index
# Of a model's settings, those in which a teacher may differ from its student.
ANY_VALUE = (
    *("initial_weights", "initialization", "precision", "head_precision", "tokenizer"),
    *("end_tokens", "chat_template_arguments", "chat_template_date"),
)
# Keys of a config.json that transformers writes in several forms; the stage that loads compares.
COMPUTED = ("rope_scaling", "mlp_only_layers", "sliding_window", "decoder_sparse_step")


# Keys that no setting has, whose values of other types transformers refuses when a stage loads it.
NUMBERS = ("initializer_range", "attention_dropout", "max_position_embeddings", "pretraining_tp")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_violation(path: Path, model: ModelSettings) -> str | None:
    """Return why a path outside the run is no model of these settings, or None.

    It may be a stage's directory of a run, a checkpoint of one, or a Hugging Face checkpoint.
    """
    if (why := unreachable(path)) is not None:
        return f"{shown(path)} {why}"
    if (path / "config.json").exists():
        return weights_violation(path, model)
    if not (path / "checkpoints").is_dir() and not (path / CHECKSUMS).exists():
        return (
            f"{shown(path)}: no model there; name a stage's directory of a run "
            "(runs/NAME/stages/STAGE), a checkpoint in one, or a Hugging Face checkpoint"
        )
    for above in path.resolve().parents:
        if (settings := above / "run.yaml").is_file():
            return _other_model(settings, model)
    return None


def teacher_violation(path: Path) -> str | None:
    """Return why a model of these settings outside the run cannot teach, or None."""
    config, _ = json_object(path / "config.json")
    if not is_readable(config.get("quantization_config")):
        return None
    return (
        f"{shown(path)}: its weights are in FP8 or MXFP4, which teachers are not read from again"
        " and again; import it by a stage of kind import, and name that stage"
    )


def _other_model(settings: Path, model: ModelSettings) -> str | None:
    """Return the first difference between the model of another run and this one's."""
    try:
        theirs = dict(yaml.load(read_text(settings), Loader=CSafeLoader)["model"])
    # ValueError: no UTF-8, or a date that does not exist. AttributeError: a tag without its value.
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        return f"{shown(settings)}: cannot be read: {error!r}"
    except RecursionError as error:
        return f"{shown(settings)}: cannot be read: {error!r}"
    for key, ours in model.model_dump(mode="json").items():
        field = ModelSettings.model_fields[key]
        # A run of an older version lacks later keys, whose defaults are what it did.
        absent = None if field.is_required() else field.get_default(call_default_factory=True)
        stated = theirs.get(key, absent)
        if key not in ANY_VALUE and stated != ours:
            return (
                f"{shown(settings)}: another model: model.{key} is {_as_json(stated)} there and"
                f" {json.dumps(ours)} here"
            )
    return None


def _as_json(value: Any) -> str:
    """Return a value of YAML as JSON, or as Python writes it: dates and loops have no JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)


def weights_violation(directory: Path, model: ModelSettings) -> str | None:
    """Return the first error in a Hugging Face checkpoint of a model, or None.

    Its small files are read, and the headers of its tensors.
    """
    if (why := unreachable(directory)) is not None:
        return f"{shown(directory)} {why}"
    if not directory.is_dir():
        return f"no such directory: {shown(directory)}"
    config, problem = json_object(path := directory / "config.json")
    if problem is not None:
        return f"{problem}; name the directory of a Hugging Face checkpoint"
    text_config = text_configuration(config)
    if (
        problem := _config_violation(path, text_config, model) or _files_violation(directory)
    ) is not None:
        return problem
    mismatch = tensors_violation(directory, model, fp8_blocks(config.get("quantization_config")))
    return mismatch and f"{shown(mismatch[0])}: {mismatch[1]}"


def _config_violation(path: Path, config: dict[str, Any], model: ModelSettings) -> str | None:
    """Return the first key of a config.json by which it is of another model, or None."""
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        return f"{shown(path)}: model_type: must be the name of a family"
    if kind not in FAMILIES:
        suggestion = hint(str(kind), FAMILIES)
        unknown = f"unknown family {json.dumps(kind)}; {suggestion}"
        return f"{shown(path)}: model_type: {unknown}; {ADDING_A_FAMILY}"
    if kind != model.family:
        return f"{shown(path)}: model_type: {kind}, but model.family is {model.family}"
    if (problem := dtype_violation(path, config)) is not None:
        return problem
    wrong_types = (_type_violation(path, key, value) for key, value in config.items())
    if (problem := next(filter(None, wrong_types), None)) is not None:
        return problem
    stated = config.get("quantization_config")
    if stated is not None and not is_readable(stated):
        return f"{shown(path)}: its weights are quantized; name the checkpoint before that"
    ours, names = configuration(model), FAMILIES[kind].names
    for key, value in ours.items():
        if key in config and key not in COMPUTED and config[key] != value:
            where = f"model.{names[key]}" if key in names else f"model.architecture.{key}"
            return (
                f"{shown(path)}: {key}: {json.dumps(config[key])}, but {where} is"
                f" {json.dumps(value)}"
            )
    return None


def _type_violation(path: Path, key: str, value: Any) -> str | None:
    """Return why transformers refuses a key's value of a config.json, or None."""
    if key in NUMBERS and type(value) not in (int, float, NoneType):
        expected = "a number"
    elif key in TOKENS and type(value) not in (int, list, NoneType):
        expected = "a token's id"
    elif key in ("use_cache", "output_router_logits") and not isinstance(value, bool):
        expected = "true or false"
    elif key == "hidden_act" and not isinstance(value, str | None):
        expected = "the name of a function"
    elif key in ("rope_parameters", "id2label") and not isinstance(value, dict | None):
        expected = "an object"
    else:
        return None
    return (
        f"{shown(path)}: {key}: must be {expected}, not {reprlib.repr(value)}, which transformers"
        " refuses; download the file again"
    )


def dtype_violation(path: Path, config: dict[str, Any]) -> str | None:
    """Return that a config.json has a dtype with which transformers cannot load it, or None."""
    for key in ("dtype", "torch_dtype"):
        if (value := config.get(key)) is not None and value not in DTYPES:
            return (
                f"{shown(path)}: {key}: {_as_json(value)} is no dtype that transformers reads;"
                ' write "bfloat16", "float16" or "float32", that of the weights'
            )
    return None


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a file of weights, or names one."""
    return bool(unindexed_weights(directory)) or (directory / WEIGHTS_INDEX).exists()


def _files_violation(directory: Path) -> str | None:
    path = directory / WEIGHTS_INDEX
    if not path.exists() and not path.is_symlink():
        if weight_files := unindexed_weights(directory):
            return next(filter(None, map(_not_a_file, weight_files)), None)
        return (
            f"{shown(directory)} has neither a *.safetensors file nor {WEIGHTS_INDEX}; download "
            "the weights, or convert other formats with transformers' save_pretrained"
        )
    index, problem = json_object(path)
    if problem is not None:
        return problem
    files = index.get("weight_map")
    file_names = files.values() if isinstance(files, dict) else ()
    if not file_names or not all(isinstance(name, str) for name in file_names):
        return f"{shown(path)}: weight_map: must name the file of every tensor"
    if paths := sorted(name for name in set(file_names) if not is_file_name(name)):
        return f"{shown(path)}: weight_map: {paths[0]!r} is no name of a file in the same directory"
    absent = sorted(name for name in set(file_names) if not (directory / name).is_file())
    if not absent:
        return None
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{shown(path)}: weight_map: no such file: {absent[0]}{more}"


def json_object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the object in a JSON file, or the problem with it."""
    try:
        if not path.exists() and not path.is_symlink():
            return {}, f"{shown(path.parent)} has no {path.name}"
        if (problem := _not_a_file(path)) is not None:
            return {}, problem
        if path.stat().st_size > MOST_BYTES:
            return {}, f"{shown(path)}: larger than {MOST_BYTES >> 20} MiB"
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"{shown(path)}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"{shown(path)}: is not valid JSON: {error}"
    if not isinstance(content, dict):
        return {}, f"{shown(path)}: is not a JSON object"
    return content, None


def _not_a_file(path: Path) -> str | None:
    """Return the problem with an existing path that is not a file.

    A pipe would be read for ever; an aborted download leaves a broken link in Hugging Face's cache.
    """
    if path.is_file():
        return None
    if path.is_symlink() and not path.exists():
        return f"{shown(path)}: is a broken symlink; download the file again"
    return f"{shown(path)}: is not a file"
