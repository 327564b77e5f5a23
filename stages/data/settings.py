"""The settings of a domain's prompts, curriculum and demonstrations. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Count, Fraction, Settings, Tokens

HELD_OUT = "share of the problems never trained on; the same in every domain"
HeldOutFraction = Annotated[float, Field(gt=0, lt=1, description=HELD_OUT)]
INSTRUCTION = (
    "Think step by step. Then write the answer alone, in the form that the question asks for,"
    " between <answer> and </answer>."
)
PLACEHOLDER = "{prompt}"  # in a template
MOST_DIRECTORIES = 20_000  # that are searched for files, in a second or two


class TooManyDirectories(OSError):
    """A path with too many directories below it to search for files."""


class ReasoningGymPromptSettings(Settings):
    """Problems that reasoning-gym generates, and their held-out share."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="name of the dataset in reasoning-gym")
    config: dict[str, Any] = Field(
        default_factory=dict, description="options of the dataset's config class"
    )
    form: Literal["compact", "chat"] = Field(
        default="compact",
        description="compact: a dozen characters, of the few datasets that have such a text. chat:"
        " any dataset's own question as a message of the user",
    )
    instruction: str = Field(
        default=INSTRUCTION, description="follows the question of form chat, after an empty line"
    )
    held_out_fraction: HeldOutFraction = 0.25


class FileSettings(Settings):
    """Rows of files, and the treatment of unusable rows."""

    source: Literal["jsonl", "parquet", "arrow"]
    path: Path = Field(
        description="a file, a pattern such as data/*.jsonl, or a directory, which is searched with"
        " all below it; relative to the file that states it"
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop", description="stop: an unusable row is an error; skip: it is counted"
    )

    def columns(self) -> dict[str, str]:
        """Return the columns that every row must have, by the keys that name them."""
        return {}

    def files(self) -> list[Path]:
        """Return the files, sorted by name.

        Raises TooManyDirectories for a path such as /, which takes more than seconds to search.
        """
        # Only regular files: a directory may have the suffix, and a pipe or a device has no end.
        if self.path.is_file():
            return [self.path]
        if self.path.is_dir():
            return sorted(path for path in _below(self.path, f".{self.source}") if path.is_file())
        root = Path(self.path.anchor)
        try:
            matches = root.glob(str(self.path.relative_to(root)))
            return sorted(path for path in matches if path.is_file())
        except (OSError, ValueError):  # a directory vanished meanwhile, or the pattern is invalid
            return []


def _below(directory: Path, suffix: str) -> Iterator[Path]:
    """Yield the paths with a suffix below a directory; skips directories that vanish meanwhile."""
    for number, (parent, _, names) in enumerate(os.walk(directory)):
        if number == MOST_DIRECTORIES:
            why = f"has more than {MOST_DIRECTORIES} directories below it; name a smaller one"
            raise TooManyDirectories(why)
        yield from (
            Path(parent, name)
            for name in names
            # `datasets` leaves what `map` and `filter` made beside the data that it was made of.
            if name.endswith(suffix) and not (suffix == ".arrow" and name.startswith("cache-"))
        )


class ToolFileSettings(FileSettings):
    """Rows that may have tools."""

    tools: str | None = Field(
        default="tools",
        description="column of the tools that the chat template shows, if the files have it: a list"
        " in OpenAI's form, or JSON text; null: none",
    )


class PromptTemplateSettings(Settings):
    """The chat messages that a row's prompt becomes, also in the domain's demonstrations."""

    system: str | None = Field(default=None, description="text of a system's message before it")
    user: str = Field(
        default=PLACEHOLDER,
        description=f"text around the prompt, which stands at {PLACEHOLDER}: around a text, or the"
        " user's last message",
    )
    form: Literal["chat", "text"] = Field(
        default="chat",
        description="chat: text becomes a user's message, for the model's chat template. text: it"
        " stays text, for a base model",
    )


class FilePromptSettings(ToolFileSettings):
    """Problems in files, one a row, and their held-out share."""

    prompt: str = Field(
        default="prompt",
        description="column of the prompt: text, or a list of chat messages, also as JSON text",
    )
    answer: str | None = Field(
        default=None, description="column of the reference answer, for rewards that want one"
    )
    template: PromptTemplateSettings | None = Field(
        default=None, description="what is put around each prompt; null: it is read as it is"
    )
    max_prompt_tokens: Tokens | None = Field(
        default=None,
        description="longer prompts are skipped and counted, as are those that leave no room for a"
        " response in engine.max_model_tokens",
    )
    held_out_fraction: HeldOutFraction = 0.25

    def columns(self) -> dict[str, str]:
        answer = {} if self.answer is None else {"answer": self.answer}
        return {"prompt": self.prompt, **answer}


class JsonlPromptSettings(FilePromptSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetPromptSettings(FilePromptSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


class ArrowPromptSettings(FilePromptSettings):
    """Arrow files of Hugging Face's `save_to_disk`, or of its cache."""

    source: Literal["arrow"] = "arrow"


class NoCurriculumSettings(Settings):
    """Prompts in the order of their stream."""

    name: Literal["none"] = "none"


class FrontierSettings(Settings):
    """A choice among the next few prompts: the one whose success rate is nearest to one half.

    The others are passed over, and counted.
    """

    name: Literal["frontier"] = "frontier"
    candidates: Annotated[int, Field(ge=2, le=1000)] = Field(
        default=4, description="prompts that one is chosen from; more make the choice stronger"
    )
    field: str | None = Field(
        default=None,
        description="field of a prompt's row, such as level or entry.metadata.difficulty: prompts"
        " with equal values are of one difficulty; null groups them by the prompt's length",
    )
    length_step: Count = Field(
        default=4, description="maximum difference of lengths of one difficulty, in tokens"
    )
    memory: Count = Field(
        default=256, description="newest samples of a difficulty that its success rate is taken of"
    )


def _by_name(block: Any) -> str:
    if isinstance(block, dict):
        return str(block.get("name", "none"))
    return str(getattr(block, "name", "none"))


CurriculumSettings = Annotated[
    Annotated[NoCurriculumSettings, Tag("none")] | Annotated[FrontierSettings, Tag("frontier")],
    Discriminator(_by_name),
]


class DrawSettings(Settings):
    """The number of a domain's demonstrations that each step of the cold start trains on."""

    sequences_per_step: Count = Field(
        default=32, description="demonstrations of this domain in a step of the cold start"
    )


class GeneratedDemonstrationSettings(DrawSettings):
    """Generated demonstrations of a domain; `worked_fraction` of them show careful work."""

    source: Literal["generated"] = "generated"
    count: Count = Field(default=4000, description="demonstrations to generate")
    worked_fraction: Fraction = Field(
        default=0.45, description="share of them that shows careful work"
    )
    unworked: Literal["wrong", "right"] = Field(
        default="wrong",
        description="answers of the others. wrong: careless, to be unlearned. right: the same"
        " answers without the work",
    )


class ConversationFileSettings(ToolFileSettings):
    """Conversations in files, one a row; every assistant turn is trained on, but of weight 0."""

    messages: str = Field(default="messages", description="column of whole conversations")
    prompt: str = Field(default="prompt", description="column of the prompts of `response`")
    response: str | None = Field(
        default=None, description="column of responses to `prompt`; null reads `messages` instead"
    )
    max_tokens: Tokens | None = Field(
        default=None,
        description="longer conversations are skipped and counted; null is model.max_positions",
    )

    def columns(self) -> dict[str, str]:
        if self.response is None:
            return {"messages": self.messages}
        return {"prompt": self.prompt, "response": self.response}


class CollectedFileSettings(ConversationFileSettings):
    """The responses that a stage collected: prompts are chat messages where a row has them."""

    source: Literal["parquet"] = "parquet"
    response: str | None = "response"
    domain: str | None = Field(default=None, description="the only domain to read; null: all")


class FileDemonstrationSettings(DrawSettings, ConversationFileSettings):
    """A domain's conversations in files."""


class JsonlDemonstrationSettings(FileDemonstrationSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetDemonstrationSettings(FileDemonstrationSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


class ArrowDemonstrationSettings(FileDemonstrationSettings):
    """Arrow files of Hugging Face's `save_to_disk`, or of its cache."""

    source: Literal["arrow"] = "arrow"


def _by_source(default: str) -> Discriminator:
    """Return the choice of a settings class by its `source`, which may be left out."""

    def source(block: Any) -> str:
        if isinstance(block, dict):
            return str(block.get("source", default))
        return str(getattr(block, "source", default))

    return Discriminator(source)


PromptSettings = Annotated[
    Annotated[ReasoningGymPromptSettings, Tag("reasoning_gym")]
    | Annotated[JsonlPromptSettings, Tag("jsonl")]
    | Annotated[ParquetPromptSettings, Tag("parquet")]
    | Annotated[ArrowPromptSettings, Tag("arrow")],
    _by_source("reasoning_gym"),
]
DemonstrationSettings = Annotated[
    Annotated[GeneratedDemonstrationSettings, Tag("generated")]
    | Annotated[JsonlDemonstrationSettings, Tag("jsonl")]
    | Annotated[ParquetDemonstrationSettings, Tag("parquet")]
    | Annotated[ArrowDemonstrationSettings, Tag("arrow")],
    _by_source("generated"),
]


def template_of(prompts: PromptSettings) -> PromptTemplateSettings | None:
    """Return the template of a domain's prompts; generated ones have none."""
    return prompts.template if isinstance(prompts, FilePromptSettings) else None
