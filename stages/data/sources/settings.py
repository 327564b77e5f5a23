"""What a person may set about a domain's prompts and demonstrations. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Count, Fraction, Settings, Tokens

HeldOutFraction = Annotated[float, Field(gt=0, lt=1)]
MOST_FOLDERS = 20_000  # that are looked through for files, in a second or two


class TooManyFolders(OSError):
    """A path below which files cannot be looked for."""


class ReasoningGymPromptSettings(Settings):
    """Problems that reasoning-gym makes, and which share of them training never sees."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="name of the dataset in reasoning-gym")
    config: dict[str, Any] = Field(
        default_factory=dict, description="options of the dataset's config class"
    )
    held_out_fraction: HeldOutFraction = Field(
        default=0.25,
        description="share of the problems never trained on; the same in every domain",
    )


class FileSettings(Settings):
    """Rows of files, and what becomes of those that cannot be used."""

    source: Literal["jsonl", "parquet"]
    path: Path = Field(
        description="a file, a pattern such as data/*.jsonl, or a folder: all that lies below it;"
        " relative to the file that states it"
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop", description="stop: a row that cannot be used is an error; skip: is counted"
    )

    def files(self) -> list[Path]:
        """The files, sorted by name; none where there are none.

        A folder may be called as files are, and a pipe or a device has no end to read to. Raises
        TooManyFolders for a path below which they cannot be looked for in seconds, such as /.
        """
        if self.path.is_file():
            return [self.path]
        if self.path.is_dir():
            return sorted(path for path in _below(self.path, f".{self.source}") if path.is_file())
        root = Path(self.path.anchor)
        try:
            found = root.glob(str(self.path.relative_to(root)))
            return sorted(path for path in found if path.is_file())
        except (OSError, ValueError):  # a folder is gone meanwhile, or it is no pattern at all
            return []


def _below(folder: Path, suffix: str) -> Iterator[Path]:
    """The paths below a folder whose names end so; what is gone meanwhile is passed over."""
    for number, (parent, _, names) in enumerate(os.walk(folder)):
        if number == MOST_FOLDERS:
            raise TooManyFolders(f"has over {MOST_FOLDERS} folders below it; name a smaller one")
        yield from (Path(parent, name) for name in names if name.endswith(suffix))


class FilePromptSettings(FileSettings):
    """Problems that stand in files, one a row, and which share of them training never sees."""

    prompt: str = Field(
        default="prompt", description="column of the prompt: text, or a list of chat messages"
    )
    answer: str | None = Field(
        default=None, description="column of the reference answer, for rewards that want one"
    )
    max_prompt_tokens: Tokens | None = Field(
        default=None,
        description="longer prompts are skipped and counted, as are those that leave no room for a"
        " response in engine.max_model_tokens",
    )
    held_out_fraction: HeldOutFraction = Field(
        default=0.25,
        description="share of the problems never trained on; the same in every domain",
    )


class JsonlPromptSettings(FilePromptSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetPromptSettings(FilePromptSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


class DrawSettings(Settings):
    """How many of a domain's demonstrations each step of the cold start trains on."""

    sequences_per_step: Count = Field(
        default=32, description="of this domain, in a step of the cold start"
    )


class GeneratedDemonstrationSettings(DrawSettings):
    """The cold start's demonstrations of one domain: `worked_fraction` show careful work."""

    source: Literal["generated"] = "generated"
    count: Count = Field(default=4000, description="demonstrations to generate")
    worked_fraction: Fraction = Field(
        default=0.45, description="share of them that shows careful work"
    )


class FileDemonstrationSettings(DrawSettings, FileSettings):
    """Conversations that stand in files, one a row; every turn of the assistant is learned."""

    messages: str = Field(default="messages", description="column of whole conversations")
    prompt: str = Field(default="prompt", description="column of the prompts of `response`")
    response: str | None = Field(
        default=None, description="column of responses to `prompt`; null reads `messages` instead"
    )
    max_tokens: Tokens | None = Field(
        default=None,
        description="longer conversations are skipped and counted; null is model.max_positions",
    )


class JsonlDemonstrationSettings(FileDemonstrationSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetDemonstrationSettings(FileDemonstrationSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


def _prompt_source(given: Any) -> str:
    return _source(given, "reasoning_gym")


def _demonstration_source(given: Any) -> str:
    return _source(given, "generated")


def _source(given: Any, default: str) -> str:
    """Which settings are meant; a block that states no `source` means the default one."""
    if isinstance(given, dict):
        return str(given.get("source", default))
    return str(getattr(given, "source", default))


PromptSettings = Annotated[
    Annotated[ReasoningGymPromptSettings, Tag("reasoning_gym")]
    | Annotated[JsonlPromptSettings, Tag("jsonl")]
    | Annotated[ParquetPromptSettings, Tag("parquet")],
    Discriminator(_prompt_source),
]
DemonstrationSettings = Annotated[
    Annotated[GeneratedDemonstrationSettings, Tag("generated")]
    | Annotated[JsonlDemonstrationSettings, Tag("jsonl")]
    | Annotated[ParquetDemonstrationSettings, Tag("parquet")],
    Discriminator(_demonstration_source),
]
