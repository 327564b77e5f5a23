"""A run's folder that was copied or moved: no command takes it for the one it came from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run.directory import RunDirectory

Braid = Callable[..., tuple[int, str, str]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copy(braid: Braid, config: Path, runs: Path) -> Path:
    """Return a copy of a run that has started."""
    assert braid("run", config, "--only", "cold_start")[0] == 0
    shutil.copytree(runs / "small", runs / "copy")
    return runs / "copy"


@pytest.mark.parametrize("command", ["run", "plan", "submit"])
def test_a_copy_is_not_taken_for_the_original(
    braid: Braid, runs: Path, copy: Path, command: str
) -> None:
    before = contents(runs)
    code, out, err = braid(command, copy / "run.yaml")
    assert (code, out) == (1, "")
    assert err == (
        f"braid: {copy}/run.yaml belongs to the run in {copy}, but its name is small and would "
        f"resume {runs}/small\n"
        f"to resume {copy}: braid resume {copy}, or add --name copy\n"
        f"to start a new run from it: add --name NAME --fork {copy}\n"
    )
    assert contents(runs) == before


def test_what_the_refusal_names_works_on_the_copy(braid: Braid, runs: Path, copy: Path) -> None:
    original = contents(runs / "small")
    code, out, err = braid("run", copy / "run.yaml", "--name", "copy", "--only", "experts.sums")
    assert (code, err) == (0, "")
    assert 'name: "small" there, "copy" here\n' in out
    assert "copy: 2 done, 4 pending\n" in out
    assert braid("run", copy / "run.yaml", "--only", "experts.words")[0] == 0  # its name by now
    assert braid("resume", "copy")[0] == 0
    code, out, _ = braid("run", copy / "run.yaml", "--name", "third", "--fork", copy)
    assert (code, "] cold_start" in out) == (0, False)
    assert contents(runs / "small") == original


def test_another_name_may_also_be_an_override(braid: Braid, copy: Path) -> None:
    assert braid("plan", copy / "run.yaml")[0] == 1
    assert braid("plan", copy / "run.yaml", "name=third")[0] == 0


def test_a_folder_in_another_place_is_named_with_it(
    braid: Braid, runs: Path, copy: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = (runs / "small").rename(elsewhere / "small")
    code, _, err = braid("run", moved / "run.yaml")
    assert code == 1
    assert f"would start {runs}/small" in err
    assert f"braid resume {moved}, or add --runs-dir {elsewhere}\n" in err
    assert not (runs / "small").exists()
    copy.rename(elsewhere / "copy")
    _, _, err = braid("run", elsewhere / "copy" / "run.yaml", "--only", "cold_start")
    assert f"add --name copy --runs-dir {elsewhere}\n" in err


def test_a_run_continues_by_its_own_run_yaml(braid: Braid, runs: Path, copy: Path) -> None:
    assert braid("run", runs / "small" / "run.yaml")[0] == 0
    linked = runs.parent / "linked"
    linked.symlink_to(runs / "small")
    assert braid("run", linked / "run.yaml")[0] == 0


def test_a_configuration_may_be_called_run_yaml(braid: Braid, config: Path, runs: Path) -> None:
    named = config.rename(config.with_name("run.yaml"))
    assert braid("run", named, "--only", "cold_start")[0] == 0


def test_the_command_to_go_on_finds_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, options in (("runs", ""), ("scratch", " --runs-dir scratch")):
        run = RunDirectory(tmp_path / folder / "small")
        run.path.mkdir(parents=True)
        run.cluster.touch()
        assert run.resume_command() == f"braid submit {folder}/small/run.yaml{options}"
