"""Run directories are private, and a run that others own or may write to is refused."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands.support.registry import COMMANDS as REGISTERED
from pipeline.run import directory
from pipeline.run.directory import RunDirectory
from tests.pipeline.test_special_files import alarm

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
    "cancel": ["small"],
    "gate override --reason x": ["small", "gates.experts.sums"],
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
    code, _, err = braid(*words, "--trust-run")
    assert code == 0 or "there is no squeue here" in err or "has no stage gates.experts.sums" in err


def asked(command: str, config: Path, tmp_path: Path) -> list[object]:
    profile = tmp_path / "mine.yaml"
    profile.write_text("ranks_per_node: 2\n")
    paths = {"CONFIG": config, "PROFILE": profile, "TO": tmp_path / "exported"}
    name, *options = command.split()
    if options[:1] == ["override"]:
        name, options = "gate", options[1:]
        return [name, "override", *COMMANDS[command], *options]
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


# Every command, on another user's run: what it says where it refuses, or None where it only reads.
REFUSES, TAKES_PLACE = "; if you trust them, add --trust-run", "write the report of this run else"
ON_A_RUN: dict[str, tuple[list[str], str | None]] = {
    "audit": (["audit", "RUN"], REFUSES),
    "bundle": (["bundle", "RUN", "--to", "TO/small.tar.gz"], None),
    "cancel": (["cancel", "RUN"], REFUSES),
    "clean": (["clean", "RUN", "--yes"], REFUSES),
    "compare": (["compare", "RUN", "RUN"], None),
    "diff": (["diff", "RUN", "RUN"], None),
    "evaluate": (["evaluate", "RUN"], REFUSES),
    "export": (["export", "RUN", "--stage", "merge", "--to", "TO/model"], REFUSES),
    "gate override": (["gate", "override", "RUN", "merge", "--reason", "x"], REFUSES),
    "logs": (["logs", "RUN", "merge"], None),
    "look": (["look", "RUN", "--waits"], None),
    "plan": (["plan", "RUN/run.yaml"], None),
    "report": (["report", "RUN"], TAKES_PLACE),
    "resume": (["resume", "RUN"], REFUSES),
    "run": (["run", "RUN/run.yaml"], REFUSES),
    "simulate": (["simulate", "RUN/run.yaml", "--gpu", "h100"], None),
    "stage": (["stage", "RUN", "merge"], REFUSES),
    "status": (["status", "RUN"], None),
    "submit": (["submit", "RUN/run.yaml", "--cluster", "PROFILE", "--prepare"], REFUSES),
    "validate": (["validate", "RUN/run.yaml"], None),
    "why": (["why", "RUN", "merge"], None),
}
WITHOUT_A_RUN = {"doctor", "domain check", "domain new", "init", "runs"}
PLANTED = [
    *("run.lock", "submit.lock", "results.lock", "ledger.jsonl", "results.json", "report.html"),
    *("slurm/submit.sh", "stages/merge/stage.lock", ".report.html.1"),
]


@pytest.fixture
def planted(
    done: RunDirectory, of_a_stranger: Callable[[Path], None], tmp_path: Path
) -> tuple[RunDirectory, Path]:
    """Another user's run in which every file that a command could write is a link to one file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (done.path / "slurm").mkdir()
    for name in PLANTED:
        path = done.path / name
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
    of_a_stranger(done.path)
    return done, victim


def test_every_command_is_listed() -> None:
    cli.command_parser()
    assert REGISTERED.keys() == ON_A_RUN.keys() | WITHOUT_A_RUN


@pytest.mark.parametrize("command", ON_A_RUN)
def test_no_command_writes_into_the_run_of_another_user(
    command: str, planted: tuple[RunDirectory, Path], braid: Braid, tmp_path: Path
) -> None:
    run, victim = planted
    profile, to = tmp_path / "mine.yaml", tmp_path / "to"
    profile.write_text("ranks_per_node: 2\n")
    to.mkdir()
    before = {path: path.lstat().st_mtime_ns for path in (run.path, *run.path.rglob("*"))}
    words, refusal = ON_A_RUN[command]
    paths = {"RUN": str(run.path), "PROFILE": str(profile), "TO": str(to)}
    for name, path in paths.items():
        words = [re.sub(rf"^{name}\b", path, word) for word in words]
    code, _, err = braid(*words)
    assert victim.read_text() == "precious"
    assert {path: path.lstat().st_mtime_ns for path in (run.path, *run.path.rglob("*"))} == before
    if refusal is not None:
        assert code == 1
        assert err.startswith(f"braid: {run.path}: belongs to ")
        assert refusal in err


def test_a_report_of_another_users_run_is_written_elsewhere(
    planted: tuple[RunDirectory, Path], braid: Braid, tmp_path: Path
) -> None:
    run, victim = planted
    (run.path / "ledger.jsonl").unlink()
    output = tmp_path / "report.html"
    output.symlink_to(victim)
    assert braid("report", run.path, "--output", output)[::2] == (0, "")
    assert not output.is_symlink() and output.read_text().startswith("<!doctype html>")
    assert victim.read_text() == "precious"


IN_PLACE: dict[str, Callable[[RunDirectory], AbstractContextManager[object]]] = {
    "run.lock": RunDirectory.lock,
    "submit.lock": RunDirectory.lock_submission,
    "results.lock": RunDirectory.lock_results,
    "stages/merge/stage.lock": lambda run: run.lock_stage("merge"),
    "ledger.jsonl": lambda run: nullcontext(run.ledger.append("merge", "pending", "x", 1)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_link_in_a_run_of_ones_own_is_not_written_through(
    name: str, done: RunDirectory, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (done.path / name).unlink(missing_ok=True)
    (done.path / name).symlink_to(victim)
    message = "a symbolic link, through which nothing is written; remove it"
    with pytest.raises(OSError, match=message) as caught, IN_PLACE[name](done):
        pass
    assert caught.value.filename == str(done.path / name)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_fifo_in_the_place_of_a_file_is_an_error(name: str, done: RunDirectory) -> None:
    (done.path / name).unlink(missing_ok=True)
    os.mkfifo(done.path / name)
    with alarm(20), pytest.raises(OSError, match="not a regular file"), IN_PLACE[name](done):
        pass


def test_a_lock_with_two_names_is_refused(done: RunDirectory, braid: Braid, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (done.path / "run.lock").unlink()
    os.link(victim, done.path / "run.lock")
    code, _, err = braid("resume", "small")
    assert code == 1
    assert "run.lock: a lock with a second name (a hard link); remove it" in err
    assert victim.read_text() == "precious"


def test_a_run_behind_another_users_link_is_refused(
    done: RunDirectory, braid: Braid, runs: Path
) -> None:
    """In a directory of runs that all may write to, anybody can put a link under a run's name."""
    link = runs / "linked"
    link.symlink_to(done.path)
    assert braid("resume", "linked")[0] == 0
    if os.geteuid():
        pytest.skip("only root can give a link away")
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    code, _, err = braid("resume", "linked")
    assert code == 1
    assert err.startswith(f"braid: {link}: is a link that belongs to ")


NAMES = {
    "line break": "nl\nssh-ed25519 AAAA",
    "not UTF-8": os.fsdecode(b"bad\xff"),
    "escape": "esc\x1b[31m",
    "right to left": "rtl\u202ex",
    "tag": "</title><script>x",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_runs_name_is_one_visible_line_wherever_it_stands(
    name: str, done: RunDirectory, braid: Braid, runs: Path, tmp_path: Path
) -> None:
    path = runs / (name.replace("/", "") or "x")
    done.path.rename(path)
    output = tmp_path / "report.html"
    texts = [braid("report", path, "--output", output)]
    assert texts[0][::2] == (0, "")
    texts += [
        braid("report", path),
        braid("status", path),
        braid("status"),
        braid("why", path, "merge"),
    ]
    texts += [braid("validate", path / "run.yaml"), braid("submit", path / "run.yaml")]
    texts += [braid("status", "nobody"), braid("bundle", path, "--to", path / "b")]
    page = output.read_bytes().decode()
    title = page[page.index("<title>") : page.index("</title>")]
    for text in [title, *(each for _, out, err in texts for each in (out, err))]:
        assert "\nssh-ed25519" not in text
        assert not {*text} & {"\x1b", "\u202e"}
        assert not any("\ud800" <= letter <= "\udfff" for letter in text)
    assert "ssh-ed25519" not in page.replace(title, "")
    assert "<script>x" not in page
