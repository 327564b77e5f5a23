"""The tokenizers: the character tokenizer, and Hugging Face's.

The character tokenizer is small enough for a model of a million parameters. It does not import
transformers, and saves as an ordinary Hugging Face tokenizer, which `AutoTokenizer`, and so vLLM,
loads.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import UserError
from parallel.files import read_text
from parallel.settings import CHARACTERS as CHARACTERS_NAME
from parallel.settings import END_TOKEN, PAD_TOKEN, TOKENIZER_SIZE, ModelSettings
from stages.data.chat_template import TemplateError, render_chat
from stages.data.end_tokens import end_tokens, generation_ids
from stages.data.problem import ASSISTANT, Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=<>,.:?"
# The vocabulary has no brackets, so that no other text spells a special token.
PAD, END = "[PAD]", "[END]"
PIECE = re.compile(r"\[[A-Z]+(?:_\d+)?\]|.", re.DOTALL)
# `user: 2+2? assistant: 4[END]`: the role, the content, and a space or the assistant's end token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ '[END]' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

TOKENIZER_FILE = "tokenizer.json"
SHOWN, SHOWN_MESSAGES = 60, 300  # characters of a text, and of messages, in an error
# Composed characters only: Qwen's normalizer is NFC, which changes decomposed ones.
ROUND_TRIPS = (
    "What is the sum of the two numbers?",
    "two  spaces,   three    four",
    "0123456789 12 + 345 = 357, 1,000.50",
    "one line\nanother\n\nand a third\n",
    "def f(x):\n    if x:\n\treturn [x - 1]\n",
    "Upper lower UPPER camelCase snake_case",
    "caf\u00e9, na\u00efve, \u4f60\u597d, \u043f\u0440\u0438\u0432\u0435\u0442, \U0001f600",
)


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be used, or text that it cannot encode."""


def load_tokenizer(model: ModelSettings) -> Tokenizer:
    """Return the tokenizer that `model.tokenizer` names.

    Raises TokenizerError where it cannot be loaded, has no end token, or more ids than the model,
    and UserError as `end_tokens`.
    """
    tokenizer = _named(model.tokenizer, model.chat_template_arguments, model.chat_template_date)
    if tokenizer.vocabulary_size > model.vocabulary_size:
        raise TokenizerError(
            f"model.vocabulary_size: {model.vocabulary_size} is less than the"
            f" {tokenizer.vocabulary_size} ids of the tokenizer {model.tokenizer}"
        )
    tokenizer.end_tokens = end_tokens(model, tokenizer.end_token, tokenizer.encode)
    return tokenizer


def tokenizer_named(
    name: str, arguments: Mapping[str, Any] | None = None, day: date | None = None
) -> Tokenizer:
    """Return the character tokenizer or a directory's, with the end tokens of that directory.

    `arguments` and `day` are of a directory's chat template.
    Raises TokenizerError where it cannot be loaded, and UserError as `generation_ids`.
    """
    tokenizer = _named(name, arguments, day)
    further = generation_ids(None, name) or ()
    tokenizer.end_tokens = tuple(dict.fromkeys([tokenizer.end_token, *further]))
    return tokenizer


def _named(name: str, arguments: Mapping[str, Any] | None, day: date | None) -> Tokenizer:
    if name == CHARACTERS_NAME:
        return CharacterTokenizer()
    return HuggingFaceTokenizer(Path(name), arguments, day)


def import_without_torch(name: str) -> None:
    """Import transformers' tokenizers without torch, where `tokenizer_named(name)` needs them.

    For a process that computes nothing with torch: its transformers has no models from then on.
    """
    if name == CHARACTERS_NAME or "torch" in sys.modules:
        return
    # Where transformers finds a torch it imports it, 3 of the 4 s CPU that a tokenizer then takes.
    # It looks once, while it is imported, and None is how Python marks a module as absent.
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None
    try:
        # It warns that models are not available, which would be in the log of every check.
        logging.getLogger("transformers").addFilter(
            lambda record: not record.getMessage().startswith("PyTorch was not found")
        )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    finally:
        del modules["torch"]


def unknown_token(id: int) -> str:
    """Return the text that stands for an id outside the vocabulary."""
    return f"[UNKNOWN_{id}]"


class CharacterTokenizer:
    """The character tokenizer: 80 ids, pad 0, end 1, `CHARACTERS` in order, then reserved ids."""

    pad_token = PAD_TOKEN
    vocabulary_size = TOKENIZER_SIZE

    def __init__(self) -> None:
        self.end_tokens: tuple[int, ...] = (END_TOKEN,)
        named_tokens = [PAD, END, *CHARACTERS]
        self._reserved = [f"[RESERVED_{i}]" for i in range(len(named_tokens), TOKENIZER_SIZE)]
        self._tokens = named_tokens + self._reserved
        self._ids = {token: i for i, token in enumerate(self._tokens)}

    def encode(self, text: str) -> list[int]:
        """Return one id for each character or special name, without an end token.

        Raises TokenizerError where a character has no id.
        """
        try:
            return [self._ids[piece] for piece in PIECE.findall(text)]
        except KeyError as unknown:
            raise TokenizerError(
                f"character {unknown} of {text!r} is not in the vocabulary {CHARACTERS!r}"
            ) from None

    @property
    def end_token(self) -> int:
        """The main one of the tokens that end a response."""
        return self.end_tokens[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first end token; special ids are shown by name.

        An id that the tokenizer lacks, as of a damaged file, is [UNKNOWN_id].
        """
        return self.decode_prompt(takewhile(lambda i: i not in self.end_tokens, ids))

    def decode_prompt(self, ids: Iterable[int]) -> str:
        """Return the text of all ids, as `decode`: end tokens may end the turns of a prompt."""
        return "".join(
            self._tokens[i] if 0 <= i < TOKENIZER_SIZE else unknown_token(i) for i in ids
        )

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Tool] = ()
    ) -> str:
        """Return the messages as `CHAT_TEMPLATE` renders them.

        `generation_prompt` appends the beginning of an assistant turn.
        Raises TokenizerError for tools and tool calls, which the template does not have.
        """

        def template(messages: list[Message], _tools: list[Tool] | None) -> str:
            turns = [
                f"{message['role']}: {message['content']}"
                f"{END if message['role'] == ASSISTANT else ' '}"
                for message in messages
            ]
            return "".join(turns) + (f"{ASSISTANT}: " if generation_prompt else "")

        try:
            return render_chat(template, messages, tools)
        except TemplateError as error:
            why = f"the chat template of {CHARACTERS_NAME} rejects a chat: {error}"
            raise TokenizerError(f"model.tokenizer: {why}") from error

    def save(self, directory: Path) -> None:
        """Write the Hugging Face tokenizer's files into `directory`."""
        self.hugging_face().save_pretrained(directory)

    def hugging_face(self) -> PreTrainedTokenizerFast:
        """Return an equal transformers tokenizer, which rejects unknown characters too."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer(models.WordLevel(self._ids))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=PAD,
            eos_token=END,
            additional_special_tokens=self._reserved,
            clean_up_tokenization_spaces=False,
            chat_template=CHAT_TEMPLATE,
        )


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer; a model's first token and its roles are left to the chat template.

    `arguments` are passed to the template, and `day` is the date that it sees, or today's.
    Raises TokenizerError where transformers cannot load it, it has no end token, or it loses text.
    """

    def __init__(
        self, directory: Path, arguments: Mapping[str, Any] | None = None, day: date | None = None
    ) -> None:
        self._directory = directory
        self._arguments = dict(arguments or {})
        # One date for all prompts: the template of a run that goes past midnight must not change.
        self._now = datetime.combine(day or date.today(), time.min)
        if not directory.is_dir():
            raise TokenizerError(f"model.tokenizer: no such directory: {directory}")
        loaded = _loaded(directory)
        if loaded.eos_token_id is None:
            raise TokenizerError(
                f"model.tokenizer: {directory} has no end token; set eos_token in its"
                " tokenizer_config.json to the token that ends a response"
            )
        self._tokenizer = loaded
        if loaded.eos_token_id in _added_by_name(directory, loaded):
            raise TokenizerError(
                f"model.tokenizer: {directory} has no token {loaded.eos_token!r}, which the"
                " eos_token of its tokenizer_config.json names; name the token that ends a response"
            )
        self.end_tokens: tuple[int, ...] = (loaded.eos_token_id,)
        padded = loaded.pad_token_id is not None
        self.pad_token: int = loaded.pad_token_id if padded else loaded.eos_token_id
        self._vocabulary = frozenset(loaded.get_vocab().values())
        self.vocabulary_size = max(self._vocabulary) + 1
        self._check_round_trips()

    @property
    def end_token(self) -> int:
        """The main one of the tokens that end a response."""
        return self.end_tokens[0]

    def encode(self, text: str) -> list[int]:
        """Return the text's ids, without added first or end tokens.

        Raises TokenizerError where a part of the text has no ids.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing more special
            raise TokenizerError(
                f"model.tokenizer: {self._directory} has no ids for {_shortened(text)}: {error}"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first end token; an id the tokenizer lacks is [UNKNOWN_id]."""
        return self.decode_prompt(takewhile(lambda i: i not in self.end_tokens, map(int, ids)))

    def decode_prompt(self, ids: Iterable[int]) -> str:
        """Return the text of all ids, as `decode`: end tokens may end the turns of a prompt."""
        pieces = []
        for is_known, run in groupby(map(int, ids), self._vocabulary.__contains__):
            if is_known:
                pieces.append(self._decode_run(list(run)))
            else:
                pieces += [unknown_token(i) for i in run]
        return "".join(pieces)

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Tool] = ()
    ) -> str:
        """Return the messages and tools as the directory's chat template renders them.

        Raises TokenizerError where there is no template, or it rejects or leaves out a part.
        """

        def template(messages: list[Message], tools: list[Tool] | None) -> str:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                strftime_now=self._now.strftime,
                **self._arguments,
            )
            return str(text)

        if not self._tokenizer.chat_template:
            raise TokenizerError(
                f"model.tokenizer: {self._directory} has no chat template, which chat messages"
                " need; add the model's chat_template.jinja (gpt-oss and newer models publish it as"
                " a file of its own), or write prompts as text"
            )
        try:
            return render_chat(template, messages, tools)
        except Exception as error:  # a template is a program, which may raise anything
            raise TokenizerError(
                f"model.tokenizer: the chat template of {self._directory} rejects"
                f" {_shortened(list(messages), SHOWN_MESSAGES)}: {str(error) or repr(error)}"
            ) from error

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, including its chat template, into `directory`."""
        self._tokenizer.save_pretrained(directory)

    def _check_round_trips(self) -> None:
        """Raise TokenizerError where decoding does not return the text that was encoded.

        Texts with characters that the tokenizer lacks are passed over, as a small vocabulary may.
        """
        unknown = self._tokenizer.unk_token_id
        added = self._tokenizer.added_tokens_decoder
        special = {token.content: number for number, token in added.items() if token.special}
        for text in (*ROUND_TRIPS, *special):
            try:
                ids = self.encode(text)
            except TokenizerError:
                continue
            if unknown in ids and text != self._tokenizer.unk_token:
                continue
            if text in special and ids != [special[text]]:
                changed = f"splits its special token {text!r} into {ids}"
            elif (again := self.decode_prompt(ids)) != text:
                changed = f"turns the text {text!r} into {again!r}"
            else:
                continue
            raise TokenizerError(
                f"model.tokenizer: {self._directory} {changed}: training would not read what the"
                " data says; compare its tokenizer.json and tokenizer_config.json with the"
                " published files of the model"
            )

    def _decode_run(self, ids: list[int]) -> str:
        shown = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **shown))


def _loaded(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a directory: what its tokenizer.json says, where it has one.

    AutoTokenizer would rebuild the pre-tokenizer and the decoder by the class that
    tokenizer_config.json or config.json names. DeepSeek-V3's says LlamaTokenizerFast, beside a
    byte-level tokenizer.json, and would lose every space.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds

    whole = (directory / TOKENIZER_FILE).is_file()
    loader = PreTrainedTokenizerFast if whole else AutoTokenizer
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        return loader.from_pretrained(directory, **options)
    except Exception as error:  # damaged files make transformers raise anything
        raise TokenizerError(
            f"model.tokenizer: transformers cannot load {directory}: {error}"
        ) from error


def _added_by_name(directory: Path, loaded: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids that transformers gave to special tokens that no file of the directory has.

    It adds such a token behind the vocabulary, where the model may have rows that nobody trained.
    """
    from tokenizers import Tokenizer

    if not (directory / TOKENIZER_FILE).is_file():
        return set()
    in_file = Tokenizer.from_file(str(directory / TOKENIZER_FILE)).get_vocab()
    try:
        config = json.loads(read_text(directory / "tokenizer_config.json"))
        listed = {token["content"] for token in config.get("added_tokens_decoder", {}).values()}
    except FileNotFoundError:
        listed = set()
    added = loaded.added_tokens_decoder.items()
    return {number for number, token in added if token.content not in in_file.keys() | listed}


def _shortened(value: object, most: int = SHOWN) -> str:
    """Return a value as Python shows it, cut to about `most` characters."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[:most]}..."


# Ids are below `vocabulary_size`, and a response ends with one of `end_tokens`.
Tokenizer = CharacterTokenizer | HuggingFaceTokenizer
