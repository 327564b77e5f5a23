"""The tokens that end a response: one answer for engines, rewards, targets, exports and lineage.

A model may end its turn with several tokens: GLM-4.5 with `<|endoftext|>`, or with the role of
whoever speaks next, `<|user|>` or `<|observation|>`. They are those of `model.end_tokens`, else the
tokenizer's `eos_token` and the `eos_token_id` of the checkpoint's generation_config.json, as vLLM
stops. The first of them ends what no chat template renders. Never imports torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from parallel.errors import UserError
from parallel.files import GENERATION, read_text
from parallel.settings import CHARACTERS, ModelSettings

KEY = "model.end_tokens"


def end_tokens(
    model: ModelSettings, eos_token: int, encode: Callable[[str], list[int]]
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response of a model, each once, the main one first.

    Ids that the model does not have are left out of a file's, since they are never sampled.

    Raises:
        UserError: `model.end_tokens` names no token, or generation_config.json cannot be read.

    Example: `eos_token` is 0, the model has 80 ids, and generation_config.json says
        {"eos_token_id": [3, 1, 0, 99]}   end_tokens = (0, 3, 1)
        model.end_tokens: ["<|user|>"]    end_tokens = (3,), the id of that token alone
    """
    if model.end_tokens is not None:
        size = model.vocabulary_size
        return tuple(dict.fromkeys(_stated_id(token, size, encode) for token in model.end_tokens))
    weights = model.initial_weights
    if weights is not None and not weights.is_dir():
        raise UserError(
            f"model.initial_weights: no such directory: {weights}; its {GENERATION} says which"
            f" tokens end a response: restore it, or set {KEY}"
        )
    ids = generation_ids(weights, model.tokenizer) or ()
    # A dict keeps the order: the main token stays the first.
    return tuple(dict.fromkeys([eos_token, *(i for i in ids if i < model.vocabulary_size)]))


def generation_ids(initial_weights: Path | None, tokenizer: str) -> tuple[int, ...] | None:
    """Return the `eos_token_id` of the checkpoint's generation_config.json, empty without one.

    The file is that of `model.initial_weights`, else of the tokenizer's directory. None where
    neither directory exists.

    Raises:
        UserError: the file cannot be read, or has no ids there.
    """
    tokenizers = [] if tokenizer == CHARACTERS else [Path(tokenizer)]
    directories = [path for path in (initial_weights, *tokenizers) if path and path.is_dir()]
    file = next(
        (path for directory in directories if (path := directory / GENERATION).is_file()), None
    )
    if file is None:
        return () if directories else None
    try:
        ids = dict(json.loads(read_text(file))).get("eos_token_id")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}; restore it, or set {KEY}") from error
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
        raise UserError(f"{file}: eos_token_id: {ids!r} is no token id, nor a list; set {KEY}")
    return tuple(listed)


def _stated_id(token: str | int, vocabulary: int, encode: Callable[[str], list[int]]) -> int:
    """Return the id of a token of `model.end_tokens`."""
    ids = encode(token) if isinstance(token, str) else [token]
    if len(ids) != 1:
        raise UserError(f"{KEY}: {token!r} is {len(ids)} tokens of model.tokenizer; name one")
    if ids[0] >= vocabulary:
        raise UserError(f"{KEY}: {token!r} is not below model.vocabulary_size = {vocabulary}")
    return ids[0]
