"""A real Hugging Face tokenizer of a few hundred ids, made where a test runs."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None, end: str | None = "<|im_end|>") -> Path:
    """Byte-level BPE; ids 0 to 3 are pad, the beginning and the end of a message, and another."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|other|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system what is the sum of\n\n"] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token=end, chat_template=template
    ).save_pretrained(folder)
    return folder
