"""Disks that are full or not to be written, clocks that jump, two launchers, damaged files: one
clear message, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from parallel.files import read_checkpoint
from pipeline.launch.progress import Progress
from pipeline.launch.runner import close_killed_attempts
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.ledger import minutes
from pipeline.run.run import Run
from stages.settings import RunSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.fake_launcher import HERE, launch

Braid = Callable[..., tuple[int, str, str]]


@contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a separate file system at `folder`; skip the test where this process may mount none."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def summary(braid: Braid) -> str:
    return braid("status")[1].removeprefix("small: ").rstrip()


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    braid: Braid, config: Path, runs: Path
) -> None:
    with disk(runs, "size=1m"):
        assert braid("run", config, "--only", "cold_start")[0] == 0
        done = snapshot(runs / "small" / "stages" / "cold_start")
        filler = runs / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        code, _, err = braid("resume", "small")
        assert code == 1
        # Both experts could start, and each says which of its files has no room.
        first, second = err.splitlines()
        assert first.startswith(f"braid: {runs}/small/stages/experts.sums/")
        assert second.startswith(f"and {runs}/small/stages/experts.words/")
        assert all(line.endswith(": No space left on device") for line in (first, second))
        assert summary(braid).startswith("1 done, ")
        assert snapshot(runs / "small" / "stages" / "cold_start") == done
        filler.unlink()
        assert braid("resume", "small")[0] == 0
        assert summary(braid) == "6 done"


def test_a_folder_that_is_not_to_be_written_is_named(
    braid: Braid, config: Path, runs: Path
) -> None:
    with disk(runs, "size=4m"):
        assert braid("run", config, "--only", "cold_start")[0] == 0
        before = snapshot(runs)
        subprocess.run(["mount", "-o", "remount,ro", str(runs)], check=True)
        expected = f"braid: {runs}/small/run.lock: Read-only file system\n"
        for command in (["run", config], ["resume", "small"]):
            assert braid(*command) == (1, "", expected)
        assert braid("run", config, "--name", "other")[2] == (
            f"braid: {runs}/other: Read-only file system\n"
        )
        assert summary(braid) == "1 done, 5 pending"
        assert braid("why", "small", "merge")[0] == braid("plan", config)[0] == 0
        assert snapshot(runs) == before


def test_a_file_that_may_not_grow_fails_the_stage_and_keeps_what_is_done(
    config: Path, run: RunDirectory, settings: RunSettings
) -> None:
    """As a quota has it, without being root: no file may have more bytes than the ledger."""
    launcher = [sys.executable, str(HERE / "fake_launcher.py"), str(run.path), str(config)]
    limited = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", limited, *launcher, "{}", "wait"],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    [*_, last] = found.stderr.splitlines()
    assert last.endswith("stages/cold_start/manifest.json'")
    assert "File too large" in last
    assert not list(run.path.rglob(".manifest.json*"))
    assert {state.state for state in derived(run, settings)} == {"pending"}


def derived(run: RunDirectory, settings: RunSettings) -> list:
    return list(Run(run.path, settings).states.values())


def test_two_launchers_of_one_run_do_its_stages_once(
    run: RunDirectory, config: Path, settings: RunSettings
) -> None:
    both = [launch(run, config, {}) for _ in range(2)]
    errors = {process.pid: process.communicate(timeout=PATIENCE_SECONDS)[1] for process in both}
    refused = [process for process in both if process.returncode]
    # The later one is refused, or finds everything done where it came after the end.
    for process in refused:
        other = next(each.pid for each in both if each is not process)
        assert f"is being run by process {other} on " in errors[process.pid]
    assert len(refused) < 2
    begun = [event.stage for event in run.ledger.events() if event.state == "running"]
    assert begun == [stage.name for stage in compile_graph(settings)]
    assert {state.state for state in derived(run, settings)} == {"done"}


def test_a_ledger_cut_at_any_byte_keeps_every_whole_line(
    run: RunDirectory, settings: RunSettings
) -> None:
    ledger = run.ledger
    run.path.mkdir(parents=True)
    ledger.append("cold_start", "running", "from the start", 1)
    ledger.append("cold_start", "failed", "rank 0: naïve cause", 1, seconds=3.5)
    whole = run.ledger.path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        run.ledger.path.write_bytes(whole[:end])
        kept = [event.state for event in ledger.events()]
        # Without its line's end alone, the line says all that it said.
        assert kept == ["running"] if end < len(whole) - 1 else ["running", "failed"], end
        ledger.append("merge", "running", "from the start", 1)
        assert [event.stage for event in ledger.events()][-1] == "merge"
        derived(run, settings)


@pytest.mark.parametrize("bit", [1, 4, 64])
def test_a_flipped_bit_of_the_ledger_spoils_one_line_at_most(run: RunDirectory, bit: int) -> None:
    ledger = run.ledger
    run.path.mkdir(parents=True)
    for attempt in (1, 2, 3):
        ledger.append("cold_start", "failed", "rank 0 was killed", attempt, seconds=1.0)
    whole = run.ledger.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for position in range(len(lines[0]), len(lines[0]) + len(lines[1]) - 1):
        run.ledger.path.write_bytes(flipped(whole, position, bit))
        found = ledger.events()
        assert [found[0].attempt, found[-1].attempt] == [1, 3], position
        assert all(event.timestamp for event in found)
        minutes(found)


def flipped(content: bytes, position: int, bit: int = 4) -> bytes:
    return content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :]


def test_the_order_of_the_ledger_counts_and_not_its_clock(
    run: RunDirectory, settings: RunSettings
) -> None:
    run.path.mkdir(parents=True)
    years = {"running": "2099", "failed": "1970"}
    lines = [
        json.dumps(
            {
                "time": f"{year}-01-01T00:00:00.000+00:00",
                "stage": "cold_start",
                "state": state,
                "cause": "",
                "attempt": 1,
                **({"seconds": 30.0} if state == "failed" else {}),
            }
        )
        for state, year in years.items()
    ]
    run.ledger.path.write_text("".join(f"{line}\n" for line in lines))
    events = run.ledger.events()
    assert [event.state for event in events] == ["running", "failed"]
    assert minutes(events) == {"cold_start": 0.5}


def test_an_attempt_that_a_clock_set_back_ends_before_it_began_took_no_time(
    run: RunDirectory, settings: RunSettings
) -> None:
    job = run.stage("merge").job(1)
    job.parent.mkdir(parents=True)
    job.write_text("{}")
    ledger = run.ledger
    ledger.append("merge", "running", "from the start", 1)
    os.utime(job, (0, 0))
    close_killed_attempts(Run(run.path, settings), compile_graph(settings))
    assert (ledger.events()[-1].state, ledger.events()[-1].seconds) == ("failed", 0.0)


def test_a_clock_set_back_gives_no_time_left() -> None:
    progress = Progress(0.0, 10)
    progress.add({"step": 1, "steps": 10, "time": 1000.0, "loss": 1.0})
    progress.add({"step": 2, "steps": 10, "time": 400.0, "loss": 1.0})
    assert progress.seconds_left is None
    assert progress.describe() == "step 2/10  loss 1"


@pytest.fixture
def finished(braid: Braid, config: Path, runs: Path) -> RunDirectory:
    assert braid("run", config)[0] == 0
    return RunDirectory(runs / "small")


def test_a_damaged_manifest_is_no_lineage(finished: RunDirectory, braid: Braid) -> None:
    path = finished.stage("experts.sums").manifest
    whole = path.read_bytes()
    nested = b"[" * 100_000
    for content in (b"", nested, whole[:-20], whole.replace(b'"settings"', b'"setting{"', 1), None):
        path.unlink() if content is None else path.write_bytes(content)
        code, _, err = braid("resume", "small")
        assert code == 1
        assert "\n  experts.sums: its manifest.json is missing or damaged\n" in err
        assert "or rerun with --from experts.sums, which also reruns\neverything" in err
    path.write_bytes(whole)
    assert summary(braid) == "6 done"


def test_a_flipped_bit_of_a_manifest_is_never_believed_nor_a_crash(
    finished: RunDirectory, settings: RunSettings
) -> None:
    """A stage is done or stale; only what is written for people may be another."""
    path = finished.stage("experts.words").manifest
    whole = path.read_bytes()
    for_people = {"layout", "routing", "stage", "code", "versions", "config", "data"}
    # Digests of inputs stand under their names and under their roles: a flipped name of a role
    # leaves the other.
    for_people.add("roles")
    for position in range(0, len(whole), 23):
        path.write_bytes(flipped(whole, position))
        state = Run(finished.path, settings).states["experts.words"]
        assert state.state in ("done", "stale"), position
        if state.state == "done":
            read, written = stated(path.read_bytes()), stated(whole)
            changed = {key for key in written if read.get(key) != written[key]}
            # Without its name the seed is unknown, as in a manifest of an older version.
            changed -= {"seeded_as"} - read.keys()
            if written["files"].keys() - read.get("files", {}).keys():  # likewise a digest
                changed.discard("files")
            assert changed <= for_people, position


def stated(manifest: bytes) -> dict:
    """Return a manifest without the settings that are null, which equal missing ones."""
    found = json.loads(manifest)
    given = {key: value for key, value in found.get("settings", {}).items() if value is not None}
    return {**found, "settings": given}


def test_a_flipped_bit_of_run_yaml_starts_nothing(finished: RunDirectory, braid: Braid) -> None:
    whole, ledger = finished.settings_file.read_bytes(), finished.ledger.path.read_bytes()
    seed = whole.index(b"seed: 0") + len("seed: ")
    finished.settings_file.write_bytes(flipped(whole, seed))
    code, _, err = braid("resume", "small")
    assert code == 1
    assert "\n  cold_start: seed was 0 and is now 4\n" in err
    finished.settings_file.write_bytes(flipped(whole, whole.index(b"seed")))
    code, _, err = braid("status", "small")
    assert code == 1
    assert err.startswith("braid: 1 configuration error:\n")
    assert "small/run.yaml:" in err
    assert ': weed: unknown key; did you mean "seed"?\n' in err
    finished.settings_file.write_bytes(whole)
    assert summary(braid) == "6 done"
    assert finished.ledger.path.read_bytes().startswith(ledger)


def test_a_damaged_job_of_an_ended_attempt_matters_to_nobody(
    finished: RunDirectory, braid: Braid
) -> None:
    finished.stage("merge").job(1).write_text('{"sta')
    assert summary(braid) == "6 done"
    assert braid("resume", "small")[0] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"models": {"merge": {"sums": {"n": "4"}}}}'])
def test_damaged_results_say_how_to_mend_them(
    finished: RunDirectory, braid: Braid, content: str
) -> None:
    finished.stage("evaluate").results.write_text(content)
    code, _, err = braid("resume", "small")
    path = finished.stage("evaluate").results
    assert (code, err) == (
        1,
        f"braid: {path} is damaged; rerun the evaluation with --from evaluate\n",
    )
    assert braid("resume", "small", "--from", "evaluate")[0] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"models": 5}', "\xff", '{"a":' * 100_000])
def test_a_status_goes_on_without_results_that_are_damaged(
    finished: RunDirectory, braid: Braid, content: str
) -> None:
    whole = braid("status", "small")[1]
    finished.results.write_bytes(content.encode("latin-1"))
    code, out, err = braid("status", "small")
    assert (code, err) == (0, "")
    table, said = out.split("\n\n")
    assert whole.startswith(f"{table}\n\n")
    assert said == f"{finished.results} is damaged; rerun the evaluation with --from evaluate\n"
    assert braid("resume", "small")[0] == 0
    assert braid("status", "small")[1] == whole


@pytest.mark.parametrize("content", ["", "[" * 100_000, "[]", '{"digest": "1", "files": 5}'])
def test_a_checkpoint_whose_checksums_are_damaged_is_not_whole(
    finished: RunDirectory, content: str
) -> None:
    stage = finished.stage("merge")
    path = stage.path / "checkpoints" / "step_2"
    assert read_checkpoint(path) == stage.newest_checkpoint()
    (path / "checksums.json").write_text(content)
    assert read_checkpoint(path) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_not_absent(
    finished: RunDirectory, braid: Braid, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoint = finished.stage("merge").path / "checkpoints" / "step_2"
    sums, really_open = checkpoint / "checksums.json", os.open

    def refuse(file: Any, *arguments: Any, **keywords: Any) -> int:
        if str(file) == str(sums):
            raise OSError(number, os.strerror(number), str(file))
        return really_open(file, *arguments, **keywords)

    whole = braid("status", "small")[1]
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        check_unreadable(finished, braid, checkpoint, number)
    assert braid("status", "small")[1] == whole


def test_checksums_that_cannot_be_opened_are_not_absent(
    finished: RunDirectory, braid: Braid
) -> None:
    checkpoint = finished.stage("merge").path / "checkpoints" / "step_2"
    sums = checkpoint / "checksums.json"
    sums.unlink()
    sums.symlink_to(sums)  # which nobody can open, root neither
    check_unreadable(finished, braid, checkpoint, errno.ELOOP)


def check_unreadable(run: RunDirectory, braid: Braid, checkpoint: Path, number: int) -> None:
    """Check that every command reports it, and none takes the checkpoint for missing."""
    sums = checkpoint / "checksums.json"
    said = (
        f"{sums}: cannot be read ({os.strerror(number)}); make it readable, or continue without "
        f"this checkpoint: mv {checkpoint} {checkpoint}.unreadable"
    )
    for command in (["status", "small"], ["resume", "small"], ["why", "small", "merge"]):
        code, _, err = braid(*command)
        assert (code, err) == (1, f"braid: {said}\n")
    assert braid("status")[1] == f"small: {said}\n"
    assert checkpoint.is_dir()


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_empty(
    finished: RunDirectory, braid: Braid
) -> None:
    folder = finished.stage("merge").path / "checkpoints"
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder)
    code, _, err = braid("status", "small")
    why = os.strerror(errno.ELOOP)
    assert (code, err) == (1, f"braid: {folder}: cannot be read ({why}); make it readable\n")


def test_a_checkpoint_with_another_digest_makes_its_children_stale(
    finished: RunDirectory, braid: Braid
) -> None:
    sums = finished.stage("cold_start").path / "checkpoints" / "step_2" / "checksums.json"
    whole = sums.read_bytes()
    sums.write_bytes(flipped(whole, whole.index(b"cold_start"), 1))
    code, _, err = braid("resume", "small")
    assert code == 1
    assert "\n  experts.sums: the checkpoint of cold_start changed\n" in err
    sums.write_bytes(whole)
    assert summary(braid) == "6 done"
