"""The directory of an export: nothing in it is removed but what the stage itself has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.errors import UserError
from stages.export import publish


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a finished model that has no name yet."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "config.json").write_text("{}")
    return tmp_path / "scratch"


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_takes_an_empty_directory(exists: bool, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    if exists:
        output.mkdir()
    publish(model, output, replaces=False)
    assert [path.name for path in output.iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_appears_during_an_export_is_kept_and_so_is_the_model(
    kind: str, model: Path, tmp_path: Path
) -> None:
    output, notes = tmp_path / "model", tmp_path / "model" / "notes.txt"
    if kind == "directory":
        output.mkdir()
        notes.write_text("mine")
    elif kind == "file":
        output.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        output.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "model-2").write_text("mine too")
    with pytest.raises(UserError, match=r"verified in .*/model-3$"):
        publish(model, output, replaces=False)
    kept = {"directory": notes, "file": output}.get(kind, tmp_path / "model-2")
    assert kept.read_text().startswith("mine")
    assert (tmp_path / "model-3" / "config.json").exists()


def test_a_stage_replaces_its_own_output(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "huggingface"
    output.mkdir()
    (output / "old.json").write_text("{}")
    publish(model, output, replaces=True)
    assert [path.name for path in output.iterdir()] == ["config.json"]
