"""A real Hugging Face tokenizer of a few hundred ids, made where a test runs."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MESSAGES = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|other|>")
# As GLM-4.5's writes turns: the next role ends one, and nothing the last.
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
GLM_ENDS = [0, 1, 3]  # of its generation_config.json: the text's end, the user's and tools' roles


def save_glm(folder: Path, ends: object = GLM_ENDS) -> Path:
    """Write a tokenizer with GLM's template and roles, and the end tokens beside it."""
    save_tokenizer(folder, GLM, GLM_TOKENS[0], special=(*GLM_TOKENS, "[gMASK]", "<sop>"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def save_tokenizer(
    folder: Path,
    template: str | None,
    end: str | None = "<|im_end|>",
    special: tuple[str, ...] = MESSAGES,
) -> Path:
    """Write byte-level BPE whose first ids are `special`, the first of them for padding."""
    folder.mkdir(exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system what is the sum of\n\n"] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=end, chat_template=template
    ).save_pretrained(folder)
    return folder
