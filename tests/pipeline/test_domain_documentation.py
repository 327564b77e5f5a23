"""docs/domains.md names every key of a domain's file, and its defaults are the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from stages.settings import DomainSettings

TEXT = (Path(__file__).parents[2] / "docs" / "domains.md").read_text()
REQUIRED = {"dataset": "chain_sum", "learning_rate": 1.0, "steps": 1}


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every settings class that an annotation names, and those of its fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from classes(field.annotation)
    for argument in get_args(annotation):
        yield from classes(argument)


def filled_in(value: Any) -> Any:
    """The block with something in place of what has no default."""
    if isinstance(value, dict):
        return {
            name: REQUIRED[name] if child == "REQUIRED" else filled_in(child)
            for name, child in value.items()
        }
    return value


def test_the_defaults_are_the_defaults() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    written = filled_in(yaml.safe_load(block))
    least = {
        "prompts": {"dataset": REQUIRED["dataset"]},
        "optimizer": {"learning_rate": REQUIRED["learning_rate"]},
        "loop": {"steps": REQUIRED["steps"]},
    }
    settings = DomainSettings.model_validate(least)
    assert DomainSettings.model_validate(written) == settings
    # Every default is written out: nothing of the settings is missing in the block.
    assert written == settings.model_dump(mode="json")


def test_every_key_of_every_choice_is_named() -> None:
    found = list(classes(DomainSettings))
    assert len(found) > 30
    names = {f.alias or name for each in found for name, f in each.model_fields.items()}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", TEXT)) == []
    chosen = {
        field.default
        for each in found
        for name, field in each.model_fields.items()
        if name in ("kind", "source") and isinstance(field.default, str)
    }
    assert sorted(name for name in chosen if not re.search(rf"\b{name}\b", TEXT)) == []
