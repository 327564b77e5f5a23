"""The model and the domains that `braid init` is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from parallel.families import architecture
from parallel.settings import ModelSettings
from pipeline.config.checkpoints import ANY_VALUE, weights_violation
from pipeline.config.described import model_of
from pipeline.config.read import CONFIGS, Reader, find, plain
from pipeline.text import shown

MODELS, DOMAINS = CONFIGS / "models", CONFIGS / "domains"


def model_named(given: str, weights: Path | None) -> tuple[ModelSettings, Path | None, Path]:
    """Return the model, the shipped file that describes it, and its weights' directory.

    Raises:
        UserError: there is no such model, or the directory is no checkpoint of it.
    """
    named = next((each for each in shipped_models() if each.stem == given), None)
    if named is None:
        weights = Path(given).expanduser()
        if not weights.is_dir() and "/" not in given:
            names = [each.stem for each in shipped_models()]
            raise UserError(f"--model {given}: no such directory, and none of {', '.join(names)}")
        model = model_of(weights)
        alike = (each for each in shipped_models() if _sizes(_shipped(each)) == _sizes(model))
        named = next(alike, None)
    elif weights is None:
        raise UserError(f"--model {given}: name the directory of its weights too: --weights PATH")
    else:
        model = _shipped(named)
    if problem := weights_violation(weights, model):
        raise UserError(problem)
    return model, named, weights


def _shipped(path: Path) -> ModelSettings:
    return ModelSettings.model_validate(plain(Reader().file(path)))


def _sizes(model: ModelSettings) -> dict[str, Any]:
    """Return all that says which model it is, with the family's defaults."""
    own = model.model_dump(mode="json", exclude=set(ANY_VALUE) - {"precision"})
    return {**own, "architecture": architecture(model).model_dump()}


def shipped_models() -> list[Path]:
    """Return the files of configs/models."""
    return sorted(MODELS.glob("[a-z]*.yaml"))


def shipped_kinds() -> list[str]:
    """Return the shipped domains that read rows."""
    found = sorted(DOMAINS.glob("[a-z]*.yaml"))
    trees = {each.stem: Reader().file(each) for each in found}
    return [name for name, tree in trees.items() if find(tree, ("prompts", "prompt")) is not None]


def distinct(given: Sequence[str]) -> Sequence[str]:
    """Return the domains as they are given; raise UserError where two have one name."""
    names = [each.partition("=")[0].partition(":")[0] for each in given]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--domains: {', '.join(repeated)} named twice; NAME:KIND=ROWS renames one")
    return given


def domain_named(given: str) -> tuple[str, tuple[Path, Path | None]]:
    """Return a domain's name, the file that it extends, and its rows."""
    name, equals, rows = given.partition("=")
    name, _, kind = name.partition(":")
    if not equals or not rows:
        raise UserError(f"--domains {given}: write NAME=ROWS, such as math=/data/math.jsonl")
    path = Path(rows).expanduser()
    if not path.exists():
        raise UserError(f"--domains {given}: no such file: {shown(path)}")
    if path.suffix in (".yaml", ".yml"):
        return name, (path, None)
    known = shipped_kinds()
    if (kind := kind or name) not in known:
        raise UserError(
            f"--domains {given}: no domain {kind} that reads rows; {hint(kind, known)}. "
            "NAME=FILE.yaml is one of yours: braid domain new NAME --source jsonl"
        )
    return name, (DOMAINS / f"{kind}.yaml", path)
