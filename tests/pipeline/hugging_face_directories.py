"""Directories of Hugging Face checkpoints with a model's true sizes and no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from parallel.families import configuration
from parallel.settings import ModelSettings
from tests.layouts.real_models import real_model
from tests.pipeline.checkpoint_headers import SMALL, write_checkpoint

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
TINY = SMALL.model_copy(update={"vocabulary_size": 258, "max_positions": 256})

Published = Callable[..., Path]


def published(directory: Path, model: str | ModelSettings, **changes: Any) -> Path:
    """Write config.json as its publisher has it, with a tokenizer of bytes; None removes a key.

    `model` may be the name of a file in configs/models.
    """
    settings = real_model(model) if isinstance(model, str) else model
    config = {
        "model_type": settings.family,
        **configuration(settings),
        "max_position_embeddings": settings.max_positions,
        "torch_dtype": DTYPES[settings.precision],
        **changes,
    }
    directory.mkdir(parents=True, exist_ok=True)
    stated = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(stated))
    write_checkpoint(directory, settings)
    for name, text in _tokenizer().items():
        (directory / name).write_text(text)
    return directory


@cache
def _tokenizer() -> dict[str, str]:
    """Return the files of a tokenizer with a token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {each: id for id, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
    backend = Tokenizer(models.BPE(vocab={"[PAD]": 0, "[END]": 1, **letters}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "eos_token": "[END]",
        "chat_template": TEMPLATE,
    }
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(stated)}


def rows(path: Path, kind: str, count: int = 60) -> Path:
    """Write rows that a domain of configs/domains reads."""
    own: dict[str, Callable[[int], dict[str, Any]]] = {
        "math": lambda n: {"answer": str(n)},
        "code": lambda n: {"tests": [{"input": "", "output": f"{n}\n"}]},
        "json": lambda n: {"schema": {"type": "object", "required": [f"key_{n}"]}},
        "instructions": lambda n: {
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        },
    }
    asked = ({"prompt": f"question {n}", **own[kind](n)} for n in range(count))
    path.write_text("".join(json.dumps(each) + "\n" for each in asked))
    return path
