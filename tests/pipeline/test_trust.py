"""Run directories are private, and a run that others own or may write to is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.run import directory
from pipeline.run.directory import RunDirectory

Braid = Callable[..., tuple[int, str, str]]
STRANGER = 54321  # a user's number that nobody here has
RAN = "6 done"


@pytest.fixture(params=[0o002, 0o000, 0o077], ids="umask {:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path another user's; where this process may give nothing away, it becomes another
    user for Braid."""

    def give_away(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give_away


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is in the queue of a machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def done(braid: Braid, config: Path, run: RunDirectory) -> RunDirectory:
    assert braid("run", config)[0] == 0
    return run


def test_a_run_directory_is_private_whatever_the_umask(
    umask: int, braid: Braid, config: Path, run: RunDirectory
) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    assert mode(run.path) == 0o700
    code, _, err = braid("resume", "small")
    assert (code, err) == (0, "")


def test_a_prepared_submission_is_private(
    umask: int, braid: Braid, config: Path, run: RunDirectory, tmp_path: Path
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("ranks_per_node: 2\n")
    assert braid("submit", config, "--cluster", profile, "--prepare")[0] == 0
    assert mode(run.path) == 0o700


def test_a_run_that_others_can_read_works_and_says_so(done: RunDirectory, braid: Braid) -> None:
    done.path.chmod(0o755)
    code, _, err = braid("resume", "small")
    assert (code, err) == (
        0,
        f"warning: {done.path}: other users can read this run (mode 755); to make it private: "
        f"chmod 700 {done.path}\n",
    )
    assert mode(done.path) == 0o755  # it may be meant so
    assert braid("status", "small")[2] == ""


COMMANDS = {
    "run": ["CONFIG"],
    "run --dry-run": ["CONFIG"],
    "resume": ["small"],
    "stage": ["small", "merge"],
    "evaluate": ["small"],
    "export": ["small", "--stage", "merge", "--to", "TO"],
    "submit --prepare": ["CONFIG", "--cluster", "PROFILE"],
    "run --fork small --name other": ["CONFIG"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_change_a_run_refuse_one_writable_by_others(
    command: str, done: RunDirectory, braid: Braid, config: Path, tmp_path: Path
) -> None:
    words = asked(command, config, tmp_path)
    done.path.chmod(0o770)
    before = sorted(done.path.rglob("*"))
    code, out, err = braid(*words)
    assert (code, out, err) == (
        1,
        "",
        f"braid: {done.path}: other users may write to it (mode 770), and code in a run runs "
        "as whoever works on the run; if nobody else has, run: "
        f"chmod -R go-w {done.path}\nor add --trust-run to trust them\n",
    )
    assert sorted(done.path.rglob("*")) == before
    assert braid(*words, "--trust-run")[0] == 0


def asked(command: str, config: Path, tmp_path: Path) -> list[object]:
    profile = tmp_path / "mine.yaml"
    profile.write_text("ranks_per_node: 2\n")
    paths = {"CONFIG": config, "PROFILE": profile, "TO": tmp_path / "exported"}
    name, *options = command.split()
    return [name, *(paths.get(word, word) for word in COMMANDS[command]), *options]


def test_a_run_of_another_user_is_refused(
    done: RunDirectory, braid: Braid, of_a_stranger: Callable[[Path], None]
) -> None:
    of_a_stranger(done.path)
    code, _, err = braid("export", "small", "--stage", "merge", "--to", done.path.with_name("to"))
    assert code == 1
    assert err.startswith(f"braid: {done.path}: belongs to ")
    assert err.endswith(
        ", and code in a run runs as whoever works on the run; if you trust them, add --trust-run\n"
    )
    assert braid("resume", "small", "--trust-run")[0] == 0


@pytest.mark.parametrize("inside", ["run.yaml", "stages/merge/checkpoints/step_2"])
def test_a_run_with_files_of_another_user_is_refused(
    inside: str, done: RunDirectory, braid: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = directory._looked_at

    def given_away(run: RunDirectory) -> Iterator[tuple[Path, os.stat_result]]:
        for path, status in looked_at(run):
            fields = list(status)
            if path == done.path / inside:
                fields[stat.ST_UID] = STRANGER
            yield path, os.stat_result(fields)

    monkeypatch.setattr(directory, "_looked_at", given_away)
    code, _, err = braid("resume", "small")
    assert code == 1
    assert err.startswith(f"braid: {done.path / inside}: belongs to ")


@pytest.mark.parametrize(
    "inside",
    [
        "run.yaml",
        "stages/merge",
        "stages/merge/checkpoints",
        "stages/merge/checkpoints/step_2",
        "stages/merge/checkpoints/step_2/checksums.json",
    ],
)
def test_a_run_with_a_directory_writable_by_others_is_refused(
    inside: str, done: RunDirectory, braid: Braid
) -> None:
    path = done.path / inside
    path.chmod(mode(path) | 0o020)
    assert braid("resume", "small")[0] == 0  # nobody else gets there
    done.path.chmod(0o750)
    code, _, err = braid("resume", "small")
    assert code == 1
    assert err.startswith(f"braid: {path}: other users may write to it (mode ")


def test_commands_that_only_read_accept_any_run(done: RunDirectory, braid: Braid) -> None:
    done.path.chmod(0o777)
    for words in (["status", "small"], ["why", "small", "merge"], ["logs", "small", "merge"]):
        assert braid(*words)[0] == 0


def test_a_fork_of_a_trusted_run_cannot_be_changed_through_it(
    done: RunDirectory, braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, "--fork", "small", "--name", "linked")[0] == 0
    done.path.chmod(0o770)
    assert braid("run", config, "--fork", "small", "--name", "copied", "--trust-run")[0] == 0
    sums = Path("stages/merge/checkpoints/step_2/checksums.json")
    assert (runs / "linked" / sums).samefile(done.path / sums)
    assert not (runs / "copied" / sums).samefile(done.path / sums)


def test_the_way_to_continue_asks_for_the_same_trust(done: RunDirectory, braid: Braid) -> None:
    done.path.chmod(0o770)
    actions = {"merge": {"0": "break_down"}}
    words = ["resume", "small", "--from", "merge", "--trust-run"]
    code, _, err = braid(*words, actions=actions)
    assert code == 1
    assert f"continue with: braid resume {done.path} --trust-run\n" in err
