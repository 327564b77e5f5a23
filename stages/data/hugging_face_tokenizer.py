"""A Hugging Face tokenizer from a folder, as transformers loads it; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from transformers import AutoTokenizer

from stages.data.chat import Message
from stages.data.tokenizer import TokenizerError, digest_of_template


class HuggingFaceTokenizer:
    """Encodes text as it stands: what a model wants around it (a first token, roles) is the chat
    template's part.

    Raises TokenizerError where the folder holds no tokenizer, or one without an end token.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not directory.is_dir():
            raise TokenizerError(f"model.tokenizer: no such folder: {directory}")
        try:
            loaded = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its files make it raise
            raise TokenizerError(
                f"model.tokenizer: {directory} holds no tokenizer that transformers loads: {error}"
            ) from error
        if loaded.eos_token_id is None:
            raise TokenizerError(
                f"model.tokenizer: {directory} names no end token; set eos_token in its"
                " tokenizer_config.json to what ends an answer"
            )
        self._tokenizer = loaded
        self.end_token: int = loaded.eos_token_id
        padded = loaded.pad_token_id is not None
        self.pad_token: int = loaded.pad_token_id if padded else loaded.eos_token_id
        self._known = frozenset(loaded.get_vocab().values())
        self.vocabulary_size = max(self._known) + 1
        self.template_digest = digest_of_template(self._template())

    def encode(self, text: str) -> list[int]:
        """The ids of the text, without a first or an end token of their own."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first end token; an id of the model that the tokenizer lacks is
        [UNKNOWN_id]."""
        until_end = []
        for i in ids:
            if i == self.end_token:
                break
            until_end.append(int(i))
        pieces = []
        for known, run in groupby(until_end, self._known.__contains__):
            if known:
                pieces.append(self._decode_known(list(run)))
            else:
                pieces += [f"[UNKNOWN_{i}]" for i in run]
        return "".join(pieces)

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """What the folder's chat template makes of the messages."""
        if not self._template():
            raise TokenizerError(
                f"model.tokenizer: {self._directory} has no chat template, which chat messages"
                " need; add its chat_template.jinja, or give prompts as text"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is a program, and fails in any way it likes
            raise TokenizerError(
                f"model.tokenizer: the chat template of {self._directory} refuses"
                f" {list(messages)!r}: {error}"
            ) from error
        return str(text)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, its chat template among them, into `directory`."""
        self._tokenizer.save_pretrained(directory)

    def _decode_known(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _template(self) -> str:
        return self._tokenizer.get_chat_template() if self._tokenizer.chat_template else ""
