"""An exported directory's small files, made readable by transformers 4.57 and vLLM of its time too.

transformers 5 writes several keys under new names alone. A reader of the former names takes its
default where one is missing, in silence: 128 experts for `num_experts`, no YaRN for `rope_scaling`.
The current names stay beside them, and a reader of either finds the same values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel.families import configuration
from parallel.files import HUGGING_FACE, write_atomically
from parallel.settings import ModelSettings

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# The class that reads tokenizer.json as it is written, under the name that both versions have.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
OF_THE_WRITER = ("backend", "is_local", "local_files_only")  # of how it was loaded
OF_PARAMETERS = ("rope_theta", "partial_rotary_factor")  # which are no scaling


def make_portable(directory: Path, settings: ModelSettings) -> None:
    """Add the former names to config.json and tokenizer_config.json of an exported model."""
    _edit(directory / HUGGING_FACE, lambda config: config | former_keys(config, settings))
    if (directory / TOKENIZER).exists():
        _edit(directory / TOKENIZER_CONFIG, former_tokenizer)


def former_keys(config: dict[str, Any], settings: ModelSettings) -> dict[str, Any]:
    """Return the keys of a config.json that transformers 5 has under other names.

    Example: `{"num_local_experts": 8, "dtype": "bfloat16"}` of a qwen3_moe lacks
    `{"num_experts": 8, "torch_dtype": "bfloat16", "rope_scaling": None}`.
    """
    published = configuration(settings)
    renamed = {key: value for key, value in published.items() if key not in config}
    scaling = dict(config.get("rope_parameters") or {})
    kind = scaling.get("rope_type", "default")
    scaling = {key: value for key, value in scaling.items() if key not in OF_PARAMETERS}
    # vLLM of before transformers 4.45's `rope_type` reads `type`.
    scaled = None if kind == "default" else {**scaling, "rope_type": kind, "type": kind}
    return {**renamed, "rope_scaling": scaled, "torch_dtype": config["dtype"]}


def former_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json with a class and lists of tokens that both versions read."""
    former = {key: value for key, value in config.items() if key not in OF_THE_WRITER}
    further = former.get("extra_special_tokens")
    if isinstance(further, list):  # in 4.57 a mapping, and a list stops it
        del former["extra_special_tokens"]
        former["additional_special_tokens"] = further
    return former | {"tokenizer_class": TOKENIZER_CLASS}


def _edit(path: Path, change: Any) -> None:
    text = json.dumps(change(json.loads(path.read_text())), indent=2, sort_keys=True)
    write_atomically(path, f"{text}\n")
