"""The README.md of an export: where the model is from, and which programs read it.

It names directories without their paths, since an export may be published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from parallel.families import FAMILIES
from parallel.files import read_text
from parallel.settings import ModelSettings
from stages.directory import StageDirectory

README = "README.md"


def model_card(model: ModelSettings, parent: Path | None, ends: str) -> str:
    """Return the card of a model whose weights are those of the checkpoint `parent`.

    `ends` is the text of its end tokens. A parent of None, or one outside a run, has no stages.
    """
    base = model.initial_weights
    stages = [*history(parent)] if parent is not None else []
    rows = {
        "base": base.name if base is not None else "none: its weights were random",
        "family": model.family,
        "stages": ", ".join(stages) or "unknown",
        "end tokens": ends,
        "read by": _readers(model),
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [braid]\n---\n"
        "# A model trained with Braid\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "Its licence follows from its base's and from the data that it was trained on.\n"
    )


def history(checkpoint: Path) -> Iterator[str]:
    """Yield the stages that led to a checkpoint of a run, the newest first, each once."""
    if checkpoint.parent.name != "checkpoints":
        yield checkpoint.name
        return
    directory = checkpoint.parents[1]
    step = f", {checkpoint.name.replace('_', ' ')}"
    names, seen = [directory.name], set()
    while names:
        name, *names = names
        if name in seen:
            continue
        seen.add(name)
        if Path(name).is_absolute():  # a model outside the run
            yield Path(name).name
            continue
        stage = StageDirectory(directory.with_name(name))
        yield f"{name} ({_kind(stage)}{step if stage.path == directory else ''})"
        names += stage.parents()


def _kind(stage: StageDirectory) -> str:
    try:
        return str(json.loads(read_text(stage.manifest))["settings"]["kind"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return "unknown"


def _readers(model: ModelSettings) -> str:
    """Return the versions that read the export's files, by what the tests compare."""
    newest, oldest = metadata.version("transformers"), FAMILIES[model.family].transformers
    readers = f"transformers {oldest} to {newest}"
    return f"{readers}, and vLLM that runs {model.family} with one of them"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
