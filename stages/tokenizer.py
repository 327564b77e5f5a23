"""A tokenizer of single characters, small enough for a model of a million parameters.

It encodes and decodes without importing transformers, and saves as an ordinary Hugging Face
tokenizer that `AutoTokenizer`, and so vLLM, loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.settings import END_TOKEN, PAD_TOKEN, TOKENIZER_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=<>,.:?"
# Named with brackets, which are no characters of the vocabulary: no text can spell a special token.
PAD, END = "[PAD]", "[END]"


class CharacterTokenizer:
    """80 ids: pad 0, end 1, then `CHARACTERS` in order, then reserved ones."""

    pad_id = PAD_TOKEN
    end_id = END_TOKEN
    vocabulary_size = TOKENIZER_SIZE

    def __init__(self) -> None:
        named = [PAD, END, *CHARACTERS]
        self._reserved = [f"[RESERVED_{i}]" for i in range(len(named), TOKENIZER_SIZE)]
        self._tokens = named + self._reserved
        self._ids = {token: i for i, token in enumerate(self._tokens)}

    def encode(self, text: str) -> list[int]:
        """One id a character, without an end token.

        Raises ValueError where a character is not in the vocabulary.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as unknown:
            raise ValueError(
                f"character {unknown} of {text!r} is not in the vocabulary {CHARACTERS!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first end token. Pad and reserved ids show by name, never vanish."""
        tokens = []
        for i in ids:
            if i == self.end_id:
                break
            tokens.append(self._tokens[i])
        return "".join(tokens)

    def save(self, directory: Path) -> None:
        """Write the Hugging Face tokenizer's files into `directory`."""
        self.hugging_face().save_pretrained(directory)

    def hugging_face(self) -> PreTrainedTokenizerFast:
        """The same ids as a transformers tokenizer. It, too, refuses unknown characters."""
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
        )
