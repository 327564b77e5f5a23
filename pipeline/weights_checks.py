"""Whether `model.initial_weights` names a Hugging Face checkpoint, as far as its small files say.

Its tensors are held to the model by the stage that takes them in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.families import FAMILIES
from parallel.files import WEIGHTS_INDEX
from parallel.settings import ModelSettings
from pipeline.violations import hint, shown

Found = Iterator[tuple[str, str]]
KEY = "model.initial_weights"


def weights_rules(model: object) -> Found:
    """What keeps a run from starting with its weights, the first fault alone, as (dotted key,
    message); `model` is the block as written."""
    named = model.get("initial_weights") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(named, str):
        fault = _fault(
            Path(named), model.get("family", ModelSettings.model_fields["family"].default)
        )
        if fault is not None:
            yield KEY, fault


def _fault(folder: Path, family: object) -> str | None:
    if not folder.is_dir():
        return f"no such folder: {shown(folder)}"
    return _of_config(folder / "config.json", family) or _of_files(folder)


def _of_config(path: Path, family: object) -> str | None:
    config, fault = _read(path)
    if fault is not None:
        return f"{fault}; name the folder of a Hugging Face checkpoint"
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = hint(str(kind), FAMILIES)
        return f"{shown(path)}: model_type: {json.dumps(kind)} is no family known here; {known}"
    if family in FAMILIES and kind != family:
        return f"{shown(path)}: model_type: {kind}, but model.family is {family}"
    return None


def _of_files(folder: Path) -> str | None:
    path = folder / WEIGHTS_INDEX
    if not path.exists():
        if any(folder.glob("*.safetensors")):
            return None
        return (
            f"{shown(folder)} has neither a *.safetensors file nor {WEIGHTS_INDEX}; of other "
            "formats transformers makes them with save_pretrained"
        )
    index, fault = _read(path)
    if fault is not None:
        return fault
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        return f"{shown(path)}: weight_map: should name the file of every tensor"
    absent = sorted(name for name in set(files.values()) if not (folder / name).is_file())
    if not absent:
        return None
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{shown(path)}: weight_map: names {absent[0]}{more}, and no such file is there"


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """A mapping from a file of JSON, or what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{shown(path.parent)} has no {path.name}"
    except OSError as error:
        return {}, f"{shown(path)}: cannot be read: {error.strerror}"
    except ValueError as error:
        return {}, f"{shown(path)}: is not valid JSON: {error}"
    return (found, None) if isinstance(found, dict) else ({}, f"{shown(path)}: is no JSON object")
