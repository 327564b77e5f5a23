"""The directory of an export: nothing in it is removed but what the stage itself has written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from parallel.hugging_face.multi_token import MultiTokenTensors
from stages.export import LOCK, complete, publish, scratch
from tests.pipeline.checkpoint_headers import SMALL
from tests.runs import REPOSITORY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a finished model that has no name yet."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "config.json").write_text("{}")
    return tmp_path / "scratch"


def test_defaults_of_generation_are_those_of_the_start(tmp_path: Path) -> None:
    start, exported = tmp_path / "start", tmp_path / "exported"
    start.mkdir()
    exported.mkdir()
    none_kept = MultiTokenTensors(SMALL)
    complete(SMALL, exported, none_kept)
    assert not (exported / "generation_config.json").exists()
    begun = SMALL.model_copy(update={"initial_weights": start})
    for ends, both in ((7, [1, 7]), ([7, 1], [1, 7]), (None, [1])):
        defaults = {"eos_token_id": ends, "pad_token_id": 7, "top_k": 20}
        (start / "generation_config.json").write_text(json.dumps(defaults))
        complete(begun, exported, none_kept)
        found = json.loads((exported / "generation_config.json").read_text())
        assert found == {"eos_token_id": both, "pad_token_id": 0, "top_k": 20}
    (start / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read: .*end_tokens"):
        complete(begun, exported, none_kept)


def test_an_export_stops_where_the_policy_was_trained_to(tmp_path: Path) -> None:
    model = SMALL.model_copy(update={"end_tokens": ("[END]", 5)})
    complete(model, tmp_path, MultiTokenTensors(SMALL))
    stated = {"eos_token_id": [1, 5], "pad_token_id": 0}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == stated
    config = json.loads((tmp_path / "config.json").read_text())
    assert stated.items() <= config.items()


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


KILLED = """
import os, signal, sys
from pathlib import Path
from stages.export import scratch
with scratch(Path(sys.argv[1])) as unfinished:
    (unfinished / "model.safetensors").write_bytes(bytes(9))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_what_a_killed_export_to_the_same_place_left_is_removed(tmp_path: Path) -> None:
    output = tmp_path / "model[1]"
    mine = tmp_path / f".{output.name}.mine"
    mine.mkdir()
    for each in (output, tmp_path / "other"):
        subprocess.run([sys.executable, "-c", KILLED, str(each)], cwd=REPOSITORY, check=False)
    [left] = (lock.parent for lock in tmp_path.glob(f".model*/{LOCK}"))
    [other] = tmp_path.glob(".other.*")
    with scratch(output) as first, scratch(output) as second:
        assert not left.exists()
        assert first.is_dir()  # it still runs
        assert second.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])
