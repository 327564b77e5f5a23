"""Every setting that may change a result does so in an audited step or a listed test."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from parallel.families import FAMILIES
from parallel.settings import Settings
from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load
from stages.audit.recorded import RecordedRun, read_run
from stages.audit.stage_audit import audit_step
from stages.settings import RunSettings
from tests.audit.effects import BLOCKS, CHECKED_BY, block_of, changed, differs, is_effective
from tests.runs import REPOSITORY

ODD = Path(__file__).parent / "odd.yaml"
Leaf = tuple[type[Settings], str]


@pytest.mark.usefixtures("read_once")
def test_another_value_of_a_setting_gives_another_step(odd: Path) -> None:
    """Three settings stand for all: a coefficient, a schedule, a reference."""
    run = read_run(odd)
    for block, key, value in (
        ("domains.spell_backward", "objective.kl.coefficient", 0.1),
        ("domains.spell_backward", "sampling.temperature", 1.0),
        ("stages.merge", "routing.replay", "none"),
        ("stages.cold_start", "optimizer.warmup_steps", 3),
        ("model", "norm_epsilon", 1e-3),
        ("evaluation", "temperature", 0.5),
    ):
        [recorded] = [leaf for name, leaf in values(block_of(run.settings, block)) if name == key]
        assert not differs(run, block, key, recorded), (block, key)
        assert differs(run, block, key, value), (block, key)


@pytest.mark.usefixtures("read_once")
def test_other_blocks_of_stages_give_another_step(odd: Path) -> None:
    run = read_run(odd)
    swapped = {
        "chain_sum": "experts.spell_backward",
        "spell_backward": "experts",
        "number_sorting": "experts",
    }
    for block, key, value in (
        ("stages.merge", "teachers", swapped),
        ("stages.merge", "domains", ["chain_sum", "spell_backward"]),
        ("stages.merge", "as", "other"),
        ("stages.cold_start", "kind", "grpo"),
    ):
        assert differs(run, block, key, value), (block, key)
    same = {**dict.fromkeys(swapped, "experts"), "chain_sum": "experts.chain_sum"}
    assert not differs(run, "stages.merge", "teachers", same)
    stated = copy.deepcopy(run.settings)
    stated["stages"]["experts"]["optimizer"] = stated["stages"]["merge"]["optimizer"]
    rows = audit_step(RecordedRun(odd, stated), "experts.chain_sum", 3).rows
    assert not all(row.agrees for row in rows)
    optimizer = stated["domains"]["chain_sum"]["optimizer"]
    stated["stages"]["experts"]["optimizer"] = optimizer
    stated["domains"]["chain_sum"]["optimizer"] = stated["stages"]["merge"]["optimizer"]
    rows = audit_step(RecordedRun(odd, stated), "experts.chain_sum", 3).rows
    assert all(row.agrees for row in rows)


@pytest.mark.combinations
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("block", BLOCKS)
def test_every_setting_that_shapes_a_step_is_effective(odd: Path, block: str) -> None:
    run = read_run(odd)
    key, recorded = next(values(block_of(run.settings, block)))
    assert not differs(run, block, key, recorded)  # else every other value would differ too
    without = [
        key
        for key, value in changed(block_of(run.settings, block))
        if is_effective(block, key) and not differs(run, block, key, value)
    ]
    assert not without, without


def test_every_setting_is_tried_or_has_a_test() -> None:
    """A new setting is tried in odd.yaml, or CHECKED_BY names a test that sets it."""
    settings = load(ODD)
    tried = set()
    for block in BLOCKS:
        node: Any = settings
        for key in block.split("."):
            node = node[key] if isinstance(node, dict) else getattr(node, key)
        tried |= {leaf for key, leaf in leaves(node) if is_effective(block, key)}
    unchecked = []
    leaves_of_all = {*schema(RunSettings), *schema(ClusterSettings)}
    for block, name in leaves_of_all - tried:
        pages = checked_by(block, name)
        names = {name, block.model_fields[name].alias or name}
        if not any(names & set(settings_in(REPOSITORY / "tests" / page)) for page in pages):
            unchecked.append(f"{block.__name__}.{name}: {', '.join(pages) or 'no test'}")
    assert not unchecked, "\n".join(sorted(unchecked))


def checked_by(block: type[Settings], name: str) -> list[str]:
    """Return the tests that CHECKED_BY names for a field of a class or of those it extends."""
    entries = [e for base in block.__mro__ for e in (f"{base.__name__}.{name}", base.__name__)]
    return [CHECKED_BY[entry] for entry in entries if entry in CHECKED_BY]


@cache
def settings_in(test: Path) -> list[str]:
    """Return the names that a test sets: keyword arguments, keys of dicts, KEY= or KEY: in text.

    The text may be YAML or an override.
    """
    names = []
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.keyword) and node.arg is not None:
            names.append(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += [node.value, *re.findall(r"(\w+)[=:]", node.value)]
    return names


def values(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a block of run.yaml with its value."""
    for name, value in block.items():
        if isinstance(value, dict) and value:
            yield from values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def leaves(block: Settings, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield dotted key, class and field of every value that is not null."""
    for name, field in type(block).model_fields.items():
        value, key = getattr(block, name), f"{prefix}{field.alias or name}"
        if isinstance(value, Settings):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, dict):
            for inner, nested in value.items():
                if isinstance(nested, Settings):
                    yield from leaves(nested, f"{key}.{inner}.")
                else:
                    yield f"{key}.{inner}", (type(block), name)
        elif value is not None:
            yield key, (type(block), name)


def schema(root: type[Settings]) -> Iterator[Leaf]:
    """Yield class and field of every leaf that a person may set, of other families too."""
    further = [family.further for family in FAMILIES.values()]
    pending, visited = [root, *further], set()
    while pending:
        block = pending.pop()
        if block in visited:
            continue
        visited.add(block)
        for name, field in block.model_fields.items():
            below = list(blocks_in(field.annotation))
            pending += below
            only = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
            if not below and not only:
                yield block, name


def blocks_in(annotation: Any) -> Iterator[type[Settings]]:
    """Yield the classes of settings in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for argument in get_args(annotation):
        yield from blocks_in(argument)
