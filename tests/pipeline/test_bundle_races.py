"""Two commands on one bundle at once, and what a killed one left."""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from pipeline.config.validate import load
from pipeline.run.bundle.reproduce import bundle_at
from pipeline.run.bundle.writer import write_bundle
from pipeline.run.run import Run
from tests.awaiting import wait_until

Braid = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(braid: Braid, config: Path, runs: Path) -> Run:
    """A finished run."""
    assert braid("run", config)[0] == 0
    return Run(runs / "small", load(runs / "small/run.yaml"))


@pytest.fixture
def archive(run: Run, tmp_path: Path) -> Path:
    return write_bundle(run, tmp_path / "moved/small.tar.gz", "reference")


def in_the_middle(
    monkeypatch: pytest.MonkeyPatch, name: str, other: Callable[[], object]
) -> list[Any]:
    """Start `other` in a thread when the function is first called, and give it half a second there.

    Returns a list that gets what it returns, or the UserError that it raises.
    """
    module, _, function = name.rpartition(".")
    own = getattr(import_module(module), function)
    started, found = threading.Event(), []

    def run() -> None:
        try:
            found.append(other())
        except UserError as error:
            found.append(error)

    def beside(*given: Any) -> Any:
        if not started.is_set():
            started.set()
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(0.5)
        return own(*given)

    monkeypatch.setattr(name, beside)
    return found


def ended(found: list[Any]) -> Any:
    """Return what a thread has left."""
    wait_until(lambda: bool(found), 10)
    return found[0]


def test_two_commands_that_unpack_one_archive_have_the_whole_bundle(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = archive.parent / ".small.unfinished/bundle/data"  # by a killed process
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    second = in_the_middle(monkeypatch, "pipeline.run.archive._unpack", lambda: bundle_at(archive))
    first = bundle_at(archive)
    assert first == ended(second)
    assert first is not None
    with tarfile.open(archive) as packed:
        files = {member.name for member in packed}
    found = {str(path.relative_to(first.path)) for path in first.path.rglob("*") if path.is_file()}
    assert found == files | {".archive"}
    assert sorted(path.name for path in archive.parent.iterdir()) == ["small", "small.tar.gz"]


@pytest.mark.parametrize("name", ["b.tar.gz", "b"])
def test_the_second_of_two_bundles_to_one_path_is_refused(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to" / name
    left = to.with_name(f".{name}.unfinished")  # by a killed process
    (left / "bundle/half").mkdir(parents=True)
    (left / "packed.tar.gz").write_bytes(b"half of an archive")
    second = in_the_middle(
        monkeypatch,
        "pipeline.run.bundle.writer.copy_inputs",
        lambda: write_bundle(run, to, "reference"),
    )
    assert write_bundle(run, to, "reference") == to
    assert f"{to} is being written by process {os.getpid()} on " in str(ended(second))
    bundle = bundle_at(to)
    assert bundle is not None and bundle.index.run == "small"
    assert not (bundle.path / "half").exists()
    assert not left.exists()
    with pytest.raises(UserError, match="exists; choose another path"):
        write_bundle(run, to, "reference")
