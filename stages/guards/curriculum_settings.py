"""What a person may set about the order in which a stage takes its prompts. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Count, Settings


class NoCurriculumSettings(Settings):
    """Prompts are taken as their stream gives them."""

    name: Literal["none"] = "none"


class FrontierSettings(Settings):
    """Of the next few prompts, the one is taken that the policy is likeliest to be half able to
    solve; the others are passed over, and counted."""

    name: Literal["frontier"] = "frontier"
    candidates: Annotated[int, Field(ge=2, le=1000)] = Field(
        default=4, description="prompts that one is taken from, and so how strong the choice is"
    )
    field: str | None = Field(
        default=None,
        description="of a prompt's row, such as level or entry.metadata.difficulty: prompts with"
        " the same value are of one difficulty; null goes by the prompt's length",
    )
    length_step: Count = Field(
        default=4, description="tokens by which lengths of one difficulty differ at most"
    )
    memory: Count = Field(
        default=256, description="samples of one difficulty that its estimate is of, newest most"
    )


def _by_name(given: Any) -> str:
    """Which class is meant; a block that states no `name` means none."""
    if isinstance(given, dict):
        return str(given.get("name", "none"))
    return str(getattr(given, "name", "none"))


CurriculumSettings = Annotated[
    Annotated[NoCurriculumSettings, Tag("none")] | Annotated[FrontierSettings, Tag("frontier")],
    Discriminator(_by_name),
]
