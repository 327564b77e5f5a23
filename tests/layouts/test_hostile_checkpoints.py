"""Loading a checkpoint runs nothing in it, whatever its files contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.layouts import checkpoint_cases
from tests.layouts import hostile_cases as cases
from tests.layouts.cases import SPREAD
from tests.ranks import On

ONE = LayoutSettings()
Poison = Callable[[Path, Path], str]
ANYWHERE: list[Poison] = [
    cases.in_metadata,
    cases.in_planner_data,
    cases.through_an_allowed_module,
    cases.in_a_weight,
    cases.in_common,
    cases.in_old_common,
]
LOADS = [(cases.resume, each) for each in [*ANYWHERE, cases.in_random_numbers]]
LOADS += [(cases.take_weights, each) for each in ANYWHERE]
LOADS += [
    (cases.resume_with_unsafe_torch_load, each)
    for each in (cases.in_common, cases.in_old_common, cases.in_random_numbers)
]


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("load", "poison"), LOADS, ids=name_of)
def test_nothing_in_a_checkpoint_runs_when_it_is_loaded(
    load: Callable[..., str], poison: Poison, on: On, tmp_path: Path
) -> None:
    check_refusal(load, poison, ONE, on, tmp_path)


@pytest.mark.parametrize("poison", [cases.in_metadata, cases.in_a_weight], ids=name_of)
def test_every_rank_refuses_a_hostile_checkpoint(poison: Poison, on: On, tmp_path: Path) -> None:
    check_refusal(cases.take_weights, poison, SPREAD, on, tmp_path)


def check_refusal(
    load: Callable[..., str], poison: Poison, layout: LayoutSettings, on: On, tmp_path: Path
) -> None:
    directory, marker = tmp_path / "checkpoints", tmp_path / "it ran"
    on(layout, checkpoint_cases.begin, layout, "sgd", str(directory))
    checkpoint = directory / "step_3"
    victim = checkpoint / poison(checkpoint, marker)
    cases.seal(checkpoint)
    found = set(on(layout, load, layout, str(directory)))
    assert not marker.exists()
    [message] = found
    assert message.startswith(f"{victim}: holds ")
    assert "os.system" in message.replace("posix", "os")
    assert f"remove {checkpoint} and resume the run" in message


@pytest.mark.parametrize("where", ["../elsewhere", "/elsewhere", "below"])
def test_metadata_that_point_out_of_the_checkpoint_are_refused(
    where: str, on: On, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    on(ONE, checkpoint_cases.begin, ONE, "sgd", str(directory))
    checkpoint = directory / "step_3"

    def point_elsewhere(found: object) -> None:
        for info in found.storage_data.values():  # type: ignore[attr-defined]
            info.relative_path = f"{where}/{info.relative_path}"

    cases.change_metadata(checkpoint, point_elsewhere)
    cases.seal(checkpoint)
    [message] = on(ONE, cases.take_weights, ONE, str(directory))
    assert message.startswith(f"{checkpoint / '.metadata'}: names {where}/__0_")


@pytest.mark.parametrize("place", [".metadata", "common.pt", "common_state"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"hello", b"\x80\x04N."])
def test_files_of_another_format_are_an_error(
    place: str, content: bytes, on: On, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    on(ONE, checkpoint_cases.begin, ONE, "sgd", str(directory))
    checkpoint = directory / "step_3"
    victim = checkpoint / place
    if place != "common_state":
        victim.write_bytes(content)
    else:
        victim = checkpoint / cases.replace_object(checkpoint, place, content)
    cases.seal(checkpoint)
    [message] = on(ONE, cases.take_weights, ONE, str(directory))
    assert message.startswith(f"{victim}: ")
    assert f"remove {checkpoint} and resume the run" in message


def test_the_weights_of_a_checkpoint_are_tensors_only(on: On) -> None:
    assert on(ONE, cases.objects_of_weights, ONE) == [[]]
