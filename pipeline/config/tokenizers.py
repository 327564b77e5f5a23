"""Checks of the tokenizers of models from outside a run, before any stage starts.

A teacher grades the student's tokens by their ids: where an id means another token, every grade is
of other text, and vocabularies of one size do not show it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml import CSafeLoader

from parallel.files import read_text
from parallel.settings import CHARACTERS, END_TOKEN, PAD_TOKEN, ModelSettings
from pipeline.config.unroll import Blocks, is_path
from pipeline.text import shown
from stages.data.thoughts import KNOWN
from stages.data.tokenizer import CHARACTERS as LETTERS
from stages.data.tokenizer import END, PAD
from stages.settings import RunSettings

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
BESIDE = ("special_tokens_map.json", "added_tokens.json", "config.json")  # which loading reads too
# What transformers passes to a template, or takes for itself.
RESERVED_ARGUMENTS = (
    *("messages", "tools", "documents", "add_generation_prompt", "strftime_now"),
    *("conversation", "chat_template", "tokenize", "continue_final_message", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "tekken.json")


def outside_models(blocks: Blocks) -> list[tuple[str, Path]]:
    """Return each model outside the run with its key, once however many stages name it."""
    models = {
        (key, path)
        for stage in blocks.stages
        for key, reference, domain, leaves in blocks.references(stage)
        if leaves == "checkpoints" and (path := blocks.resolve(reference, domain)) and is_path(path)
    }
    return [(key, Path(path)) for key, path in sorted(models)]


def tokenizer_violation(path: Path, model: ModelSettings) -> str | None:
    """Return the first id that means another token to a model outside the run, or None.

    None too where either tokenizer has no `tokenizer.json`, and for ids that only one of them has.
    """
    name = _tokenizer_of(path)
    if name is None or _same(name, model.tokenizer):
        return None
    ours, theirs = _tokens(model.tokenizer), _tokens(name)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            return (
                f"{shown(path)}: another tokenizer: id {number} is {json.dumps(theirs[number])} in"
                f" {_shown(name)} and {json.dumps(ours[number])} in model.tokenizer ="
                f" {_shown(model.tokenizer)}; name a model of the run's tokenizer"
            )
    return None


def size_violation(model: ModelSettings) -> str | None:
    """Return that the model's tokenizer has more ids than the model, or None."""
    size = max(_tokens(model.tokenizer), default=-1) + 1
    if model.tokenizer == CHARACTERS or size <= model.vocabulary_size:
        return None
    return (
        f"{model.vocabulary_size} is less than the {size} ids of the tokenizer "
        f"{_shown(model.tokenizer)}; use the model's own tokenizer, or a larger vocabulary"
    )


def template_cautions(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each model outside the run with another chat template, as (dotted key, message)."""
    tokenizer = settings.model.tokenizer
    for key, path in outside_models(Blocks(settings)):
        name = _tokenizer_of(path)
        if name is None or CHARACTERS in (name, tokenizer) or _same(name, tokenizer):
            continue
        ours, theirs = template_digest(Path(tokenizer)), template_digest(Path(name))
        if None not in (ours, theirs) and ours != theirs:
            yield (
                key,
                f"{shown(path)} has another chat template than {_shown(tokenizer)}; the run's"
                " renders its prompts, which this model may not have been trained on",
            )


def template_violation(name: str, key: str) -> str | None:
    """Return that a tokenizer cannot render the chat messages of the settings at `key`, or None."""
    if name == CHARACTERS or _has_template(Path(name)):
        return None
    return (
        f"{_shown(name)} has no chat template, which the chat messages of {key} need; put the"
        f" model's {TEMPLATE_FILE} there (gpt-oss and newer models publish it as a file of its own)"
        ", name another tokenizer, or write prompts as text"
    )


def _has_template(directory: Path) -> bool:
    """Return whether a directory has a chat template; True for one that cannot be read.

    The stage that loads a broken one reports it.
    """
    if (directory / TEMPLATE_FILE).exists() or (directory / TEMPLATES).is_dir():
        return True
    try:
        return bool(json.loads(read_text(directory / CONFIG_FILE)).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError, AttributeError):
        return True


def directory_violation(directory: Path) -> str | None:
    """Return why a directory is no tokenizer's, or None: a pipe in it would be read for ever."""
    for name in (*TOKENIZER_FILES, CONFIG_FILE, TEMPLATE_FILE, *BESIDE):
        path = directory / name
        if (path.exists() or path.is_symlink()) and not path.is_file():
            return f"{shown(path)}: is not a file; copy the tokenizer's there"
    return missing_files(directory, chats=False)


def missing_files(directory: Path, *, chats: bool) -> str | None:
    """Return what a directory lacks to be a tokenizer, with `chats` for chat messages, or None."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return (
            f"{shown(directory)} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's "
            "files of it there"
        )
    if not chats or _has_template(directory):
        return None
    return (
        f"{shown(directory)} has no chat template, which prompts of chat messages need; add its "
        f"{TEMPLATE_FILE} (gpt-oss and newer models publish it as a file of its own), or write "
        "prompts as text"
    )


def template_digest(directory: Path) -> str | None:
    """Return the SHA-256 of a tokenizer's chat template; None where none can be read.

    The stage that loads a broken one reports it.
    """
    try:
        return hashlib.sha256(_template(directory).encode()).hexdigest()
    # ValueError: no UTF-8, no JSON, or half of a surrogate pair. AttributeError: several templates.
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _template(directory: Path) -> Any:
    """Return a tokenizer's chat template, or several as tokenizer_config.json has them."""
    try:
        return read_text(directory / TEMPLATE_FILE).replace("\r\n", "\n").replace("\r", "\n")
    except OSError:
        return json.loads(read_text(directory / CONFIG_FILE))["chat_template"]


def has_thoughts(directory: Path) -> bool:
    """Return whether a chat template of a tokenizer's directory writes or opens thoughts."""
    texts = _template_texts(str(directory))
    return any(opening in texts for opening, _ in KNOWN)


def is_dated(model: ModelSettings) -> bool:
    """Return whether the chat template of a model's tokenizer shows the date."""
    return model.tokenizer != CHARACTERS and "strftime_now" in _template_texts(model.tokenizer)


def argument_violation(model: ModelSettings) -> str | None:
    """Return the first argument of the chat template that it does not read, or None."""
    for name in model.chat_template_arguments:
        if name in RESERVED_ARGUMENTS:
            return f"{name} is reserved for the messages and their rendering; remove it"
        if model.tokenizer == CHARACTERS or name not in _template_texts(model.tokenizer):
            return f"the chat template of {_shown(model.tokenizer)} does not read {name}; remove it"
    return None


def _template_texts(name: str) -> str:
    """Return the text of all chat templates of a tokenizer's directory, "" where none is read.

    The stage that loads a broken one reports it.
    """
    texts = []
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        texts.append(str(_template(Path(name))))
    for file in sorted((Path(name) / TEMPLATES).glob("*.jinja")):
        with suppress(OSError, ValueError):
            texts.append(read_text(file))
    return "\n".join(texts)


def _tokenizer_of(path: Path) -> str | None:
    """Return the tokenizer of a model, as `model.tokenizer` names it; None where none is known."""
    if (path / "config.json").exists():
        return str(path)
    settings = (above / "run.yaml" for above in path.resolve().parents)
    if (run := next(filter(Path.is_file, settings), None)) is None:
        return None
    try:
        name = yaml.load(read_text(run), Loader=CSafeLoader)["model"]["tokenizer"]
    # `model_violation` reports a run.yaml that cannot be read.
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError):
        return None
    except RecursionError:
        return None
    return name if isinstance(name, str) else None


def _same(one: str, other: str) -> bool:
    return one == other or (
        CHARACTERS not in (one, other) and Path(one).resolve() == Path(other).resolve()
    )


def _tokens(name: str) -> dict[int, str]:
    """Return a tokenizer's tokens by id; none where its tokenizer.json cannot be read.

    The stage that loads a broken one reports it.
    """
    if name == CHARACTERS:
        first_letter = max(PAD_TOKEN, END_TOKEN) + 1
        special = {PAD_TOKEN: PAD, END_TOKEN: END}
        return special | dict(enumerate(LETTERS, start=first_letter))
    try:
        content = json.loads(read_text(Path(name) / TOKENIZER_FILE))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):  # of BPE and WordPiece; Unigram has pairs with scores
            tokens = {int(number): token for token, number in vocabulary.items()}
        else:
            tokens = {number: str(pair[0]) for number, pair in enumerate(vocabulary)}
        added = {
            int(added_token["id"]): str(added_token["content"])
            for added_token in content.get("added_tokens", ())
        }
    # OverflowError: the id Infinity, which Python's JSON has.
    except (OSError, LookupError, TypeError, ValueError, RecursionError, AttributeError):
        return {}
    except OverflowError:
        return {}
    return tokens | added


def _shown(name: str) -> str:
    return name if name == CHARACTERS else shown(Path(name))
