"""Every setting that may change a result does: in an audited step, or in a test that is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from effects import BLOCKS, CHECKED_BY, block_of, changed, differs, is_effective
from runs import REPOSITORY

from parallel.families import FAMILIES
from parallel.settings import Settings
from pipeline.config import load
from pipeline.slurm.settings import ClusterSettings
from stages.audit.recorded import read_run
from stages.settings import RunSettings

ODD = Path(__file__).parent / "odd.yaml"


@pytest.mark.usefixtures("read_once")
def test_another_value_of_a_setting_gives_another_step(odd: Path) -> None:
    """A few of what the test below tries: a coefficient, a schedule, a reference."""
    run = read_run(odd)
    for block, key, value in (
        ("experts.spell_backward", "objective.kl.coefficient", 0.1),
        ("experts.spell_backward", "sampling.temperature", 1.0),
        ("merge", "routing.replay", "none"),
        ("cold_start", "optimizer.warmup_steps", 3),
        ("model", "norm_epsilon", 1e-3),
        ("evaluation", "temperature", 0.5),
    ):
        assert differs(run, block, key, value), (block, key)


@pytest.mark.combinations
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("block", BLOCKS)
def test_every_setting_that_shapes_a_step_is_effective(odd: Path, block: str) -> None:
    run = read_run(odd)
    without = [
        key
        for key, value in changed(block_of(run.settings, block))
        if is_effective(block, key) and not differs(run, block, key, value)
    ]
    assert not without, without


def test_every_setting_is_tried_or_has_a_test() -> None:
    """A new setting is tried in odd.yaml, or CHECKED_BY names a test that mentions it."""
    settings = load(ODD)
    tried = set()
    for block in BLOCKS:
        found: Any = settings
        for part in block.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        tried |= {leaf for key, leaf in leaves(found) if is_effective(block, key)}
    unchecked = []
    leaves_of_all = {*schema(RunSettings), *schema(ClusterSettings)}
    for owner, field in sorted(leaves_of_all - tried):
        page = CHECKED_BY.get(f"{owner}.{field}", CHECKED_BY.get(owner))
        text = "" if page is None else (REPOSITORY / "tests" / page).read_text()
        if not re.search(rf"\b{field.rstrip('_')}\b", text):
            unchecked.append(f"{owner}.{field}: {page}")
    assert not unchecked, "\n".join(unchecked)


def leaves(block: Settings, prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Dotted key, and class and field, of every value that is not null."""
    for name, field in type(block).model_fields.items():
        value, key = getattr(block, name), f"{prefix}{field.alias or name}"
        if isinstance(value, Settings):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, dict):
            for inner, each in value.items():
                if isinstance(each, Settings):
                    yield from leaves(each, f"{key}.{inner}.")
                else:
                    yield f"{key}.{inner}", (owner(type(block), name), name)
        elif value is not None:
            yield key, (owner(type(block), name), name)


def schema(root: type[Settings]) -> Iterator[tuple[str, str]]:
    """Class and field of every leaf that a person may set, those of other families included."""
    further = [family.further for family in FAMILIES.values()]
    pending, known = [root, *further], set()
    while pending:
        block = pending.pop()
        if block in known:
            continue
        known.add(block)
        for name, field in block.model_fields.items():
            below = list(blocks_in(field.annotation))
            pending += below
            only = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
            if not below and not only:
                yield owner(block, name), name


def blocks_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for each in get_args(annotation):
        yield from blocks_in(each)


def owner(block: type[Settings], name: str) -> str:
    """The class that declares a field first."""
    declaring = [each for each in block.__mro__ if name in getattr(each, "model_fields", {})]
    return declaring[-1].__name__
