"""Settings that a slip makes huge are refused at once; so is a file, or a tree, without end."""

from __future__ import annotations

import importlib
import pkgutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

import parallel
import stages
from parallel.engine_rules import engine_violations
from parallel.settings import LayoutSettings, ModelSettings, Settings
from pipeline.estimate.memory import memory_report
from stages.settings import RunSettings
from tests.pipeline.checkpoint_headers import SMALL
from tests.pipeline.violations import errors

INTERNAL = {"EngineJob", "StageJob", "DomainCheckJob"}  # written by programs alone


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the block uses more CPU time than `seconds`."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer after {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.vocabulary_size", 9 * 10**18),
        ("model.hidden_size", 9 * 10**18),
        ("model.attention_heads", 96_000_000_000_000),
        ("model.key_value_heads", 96_000_000_000_000),
        ("model.expert_hidden_size", 96_000_000_000_000),
        ("model.experts", 96_000_000_000_000),
        ("model.layers", 4_000_000),
        ("model.layers", 4_000_000_000),
        ("model.head_dim", 9 * 10**18),
        ("layout.pipeline", 9 * 10**18),
        ("layout.virtual_pipeline", 9 * 10**18),
        ("engine.tensor", 9 * 10**18),
        ("engine.max_model_tokens", 9 * 10**18),
        ("domains.sums.rollout.oversampling", 9 * 10**18),
        ("stages.experts.gate.window", 9 * 10**18),
        ("rewards.memory_mebibytes", 9 * 10**18),
    ],
)
def test_a_slip_in_a_size_is_one_clear_error_at_once(config: Path, key: str, value: int) -> None:
    with within(4):
        found = errors(config, f"{key}={value}")
    assert any(
        each.startswith(f"command line: {key}: should be less than or equal to ")
        and each.endswith(f", not {value}")
        for each in found
    ), found


def _integer(annotation: object) -> bool:
    """Return true if an annotation is `int`, however it is wrapped."""
    return annotation is int or any(map(_integer, get_args(annotation)))


def _bounded(annotation: object, metadata: tuple[object, ...]) -> bool:
    if annotation is int:
        return any(hasattr(each, "le") or hasattr(each, "lt") for each in metadata)
    if hasattr(annotation, "__metadata__"):
        inner, *more = get_args(annotation)
        bounds = [part for each in more for part in (each, *getattr(each, "metadata", ()))]
        return _bounded(inner, (*metadata, *bounds))
    return all(_bounded(arm, metadata) for arm in get_args(annotation) if _integer(arm))


def settings_classes() -> list[type[Settings]]:
    for package in (parallel, stages):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith(".settings"):
                importlib.import_module(found.name)
    classes = [Settings]
    for each in classes:
        classes += each.__subclasses__()
    return classes[1:]


def test_every_integer_setting_has_an_upper_bound() -> None:
    unbounded = [
        f"{each.__name__}.{name}"
        for each in settings_classes()
        if each.__name__ not in INTERNAL
        for name, field in each.model_fields.items()
        if _integer(field.annotation) and not _bounded(field.annotation, tuple(field.metadata))
    ]
    assert not unbounded


LARGEST = {
    "vocabulary_size": 999_936,
    "hidden_size": 1_000_000,
    "layers": 2000,
    "attention_heads": 720_720,
    "key_value_heads": 720_720,
    "head_dim": 128,
    "experts": 10_000,
    "experts_per_token": 8,
    "expert_hidden_size": 720_720,
    "max_positions": 1_000_000,
}


def test_divisors_of_large_sizes_are_found_at_once_and_few_are_shown(config: Path) -> None:
    model = ModelSettings(**LARGEST)
    with within(2):
        found = dict(engine_violations(model, 17))
        [other] = [
            each
            for each in errors(config, "model.key_value_heads=720720", "layout.tensor=19")
            if "model.key_value_heads = 720720" in each
        ]
    assert found["engine.tensor"].endswith(
        "use one of [1, 2, 3, 4, 6, 7, 8, 9, 12, 14, 16, 18, 21, 24, 28, 36, 42, 48, 56, 63] or "
        "10 larger"
    )
    assert other.endswith(
        "use one of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 21, 22] or "
        "220 larger"
    )


@pytest.mark.parametrize("ranks", [1, 2000])
def test_the_largest_model_is_planned_within_seconds(
    settings: RunSettings, tmp_path: Path, ranks: int
) -> None:
    layout = LayoutSettings(ranks=ranks, pipeline=ranks)
    largest = settings.model_copy(update={"model": ModelSettings(**LARGEST), "layout": layout})
    with within(5):
        assert list(memory_report(largest))


def test_engine_ranks_that_fit_are_what_every_split_allows() -> None:
    model = SMALL.model_copy(update={"attention_heads": 12})
    fits = [size for size in range(1, 200) if not list(engine_violations(model, size))]
    assert fits == [1, 2, 4]
    for key, message in engine_violations(model, 3):
        assert (key, message.partition("; ")[2]) == ("engine.tensor", "use one of [1, 2, 4]")
