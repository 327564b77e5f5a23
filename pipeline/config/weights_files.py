"""Whether `model.initial_weights` names a Hugging Face checkpoint, as far as its small files say.

Its tensors are held to the model by the stage that takes them in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.families import FAMILIES
from parallel.files import WEIGHTS_INDEX, unreachable
from parallel.settings import ModelSettings
from pipeline.config.violations import hint, shown

Found = Iterator[tuple[str, str]]
KEY = "model.initial_weights"
MOST_BYTES = 1 << 26  # of a file of JSON, far above the index of any checkpoint


def weights_rules(model: ModelSettings) -> Found:
    """Yield the first error that keeps a run from starting with `model.initial_weights`."""
    if model.initial_weights is not None and (
        fault := _fault(Path(model.initial_weights), model.family)
    ):
        yield KEY, fault


def _fault(folder: Path, family: str) -> str | None:
    if (why := unreachable(folder)) is not None:
        return f"{shown(folder)} {why}"
    if not folder.is_dir():
        return f"no such folder: {shown(folder)}"
    return _of_config(folder / "config.json", family) or _of_files(folder)


def _of_config(path: Path, family: str) -> str | None:
    config, fault = _read(path)
    if fault is not None:
        return f"{fault}; name the folder of a Hugging Face checkpoint"
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        return f"{shown(path)}: model_type: should be the name of a family"
    if kind not in FAMILIES:
        known = hint(str(kind), FAMILIES)
        return f"{shown(path)}: model_type: {json.dumps(kind)} is no family known here; {known}"
    if kind != family:
        return f"{shown(path)}: model_type: {kind}, but model.family is {family}"
    return None


def _of_files(folder: Path) -> str | None:
    path = folder / WEIGHTS_INDEX
    if not path.exists() and not path.is_symlink():
        if found := sorted(folder.glob("*.safetensors")):
            return next(filter(None, map(_not_a_file, found)), None)
        return (
            f"{shown(folder)} has neither a *.safetensors file nor {WEIGHTS_INDEX}; of other "
            "formats transformers makes them with save_pretrained"
        )
    index, fault = _read(path)
    if fault is not None:
        return fault
    files = index.get("weight_map")
    named = files.values() if isinstance(files, dict) else ()
    if not named or not all(isinstance(name, str) for name in named):
        return f"{shown(path)}: weight_map: should name the file of every tensor"
    absent = sorted(name for name in set(named) if not (folder / name).is_file())
    if not absent:
        return None
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{shown(path)}: weight_map: names {absent[0]}{more}, and no such file is there"


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """A mapping from a file of JSON, or what is wrong with it."""
    try:
        if not path.exists() and not path.is_symlink():
            return {}, f"{shown(path.parent)} has no {path.name}"
        if (fault := _not_a_file(path)) is not None:
            return {}, fault
        if path.stat().st_size > MOST_BYTES:
            return {}, f"{shown(path)}: has more than {MOST_BYTES >> 20} MiB"
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"{shown(path)}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"{shown(path)}: is not valid JSON: {error}"
    return (found, None) if isinstance(found, dict) else ({}, f"{shown(path)}: is no JSON object")


def _not_a_file(path: Path) -> str | None:
    """What a name that is there stands for instead of a file, such as a pipe, which would never
    end, or what a download that was broken off leaves in a cache."""
    if path.is_file():
        return None
    if path.is_symlink() and not path.exists():
        return f"{shown(path)}: is a link to a file that is not there; download it once more"
    return f"{shown(path)}: is no file"
