"""Fork servers: what they fork is what exec would have started, and nothing depends on them."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.launch import placement, processes
from pipeline.launch.placement import ForkServers
from pipeline.launch.processes import Child
from tests.awaiting import PATIENCE_SECONDS, is_alive, wait_until

HERE = Path(__file__).parent
MODULE = "forked_program"
Start = Callable[..., Child]
SECONDS = PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `forked_program` one that has a server."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setitem(placement.PRELOADS, MODULE, "forked_preload")
    monkeypatch.setitem(placement.OWN_ENVIRONMENT, MODULE, {})
    monkeypatch.setattr(placement, "GPU_FILE", Path("/nonexistent"))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ForkServers]:
    with ForkServers(tmp_path / "servers", enabled=True) as servers:
        yield servers


@pytest.fixture
def start(tmp_path: Path, servers: ForkServers) -> Iterator[Start]:
    """`start(action)`: a child that is forked if that is possible."""
    children = []

    def begin(action: str, name: str = "child", **environment: str) -> Child:
        command = [sys.executable, "-m", MODULE, str(tmp_path), action]
        log = tmp_path / f"{name}.log"
        child = Child(name, command, log, environment, [0], servers.of(command))
        children.append(child)
        return child

    yield begin
    for child in children:
        child.reap()


def ended(child: Child) -> int:
    wait_until(lambda: child.status() is not None, SECONDS)
    status = child.status()
    assert status is not None
    return status


def report_of(child: Child) -> dict[str, Any]:
    """Return the last line that the program printed."""
    return json.loads(child.log.read_text().splitlines()[-1])


def runs(directory: Path) -> list[int]:
    """Return the processes that have run the program."""
    path = directory / "runs"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def server_process(servers: ForkServers) -> int:
    [server] = servers._servers.values()
    process = server.process._process
    assert process is not None
    return process.pid


def test_what_is_forked_is_what_exec_would_have_started(start: Start, tmp_path: Path) -> None:
    forked = start("finish", TEST_VALUE="a=b\nc")
    assert ended(forked) == 0
    command = [sys.executable, "-m", MODULE, str(tmp_path), "finish"]
    executed = Child("other", command, tmp_path / "other.log", {"TEST_VALUE": "a=b\nc"}, [0])
    assert ended(executed) == 0
    executed.reap()
    expected = {**report_of(executed), "forked": True}
    assert report_of(forked) == expected
    assert expected["parent"] == os.getpid()
    assert expected["leads_its_session"]


def test_a_forked_process_is_found_by_its_command(start: Start, tmp_path: Path) -> None:
    child = start("wait")
    wait_until(lambda: child.status() is None and bool(runs(tmp_path)), SECONDS)
    [process] = runs(tmp_path)
    shown = Path(f"/proc/{process}/cmdline").read_text().rstrip("\0")
    assert shown == f"{sys.executable} -m {MODULE} {tmp_path} wait"


def test_its_exit_status_and_last_word_arrive(start: Start) -> None:
    failed = start("fail")
    assert ended(failed) == 3
    assert failed.failure().cause == "it was asked to"
    assert failed.failure().stated


def test_killing_the_server_ends_nothing_that_it_forked(
    start: Start, servers: ForkServers, tmp_path: Path
) -> None:
    waiting = start("wait")
    wait_until(lambda: waiting.status() is None and bool(runs(tmp_path)), SECONDS)
    first = server_process(servers)
    os.kill(first, signal.SIGKILL)
    again = start("finish", name="again")
    assert ended(again) == 0
    assert waiting.status() is None
    waiting.send(signal.SIGTERM)
    assert ended(waiting) == -signal.SIGTERM
    later = start("finish", name="later")
    assert ended(later) == 0
    assert report_of(later)["forked"]
    assert server_process(servers) != first


@pytest.mark.parametrize("moment", ["importing", "stopped"])
def test_a_server_that_does_not_answer_is_done_without(
    moment: str,
    start: Start,
    servers: ForkServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if moment == "importing":
        monkeypatch.setenv("TEST_PRELOAD", "slow")
        child = start("finish")
        assert child.status() is None
        os.kill(server_process(servers), signal.SIGKILL)
    else:
        assert ended(start("finish", name="before")) == 0
        (tmp_path / "runs").unlink()
        os.kill(server_process(servers), signal.SIGSTOP)
        monkeypatch.setattr(processes, "FORK_SECONDS", 0.5)
        child = start("finish")
    assert ended(child) == 0
    assert not report_of(child)["forked"]
    monkeypatch.delenv("TEST_PRELOAD", raising=False)
    monkeypatch.setattr(processes, "FORK_SECONDS", SECONDS)
    after = start("finish", name="after")  # by a new server
    assert ended(after) == 0
    assert report_of(after)["forked"] or moment == "importing"
    assert len(runs(tmp_path)) == 2


def test_what_is_cancelled_never_runs(start: Start, servers: ForkServers, tmp_path: Path) -> None:
    assert ended(start("finish", name="before")) == 0
    (tmp_path / "runs").unlink()
    os.kill(server_process(servers), signal.SIGSTOP)
    child = start("finish")
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM
    os.kill(server_process(servers), signal.SIGCONT)
    assert ended(start("finish", name="after")) == 0  # it comes after the other in the queue
    assert len(runs(tmp_path)) == 1


def test_a_fork_that_waits_for_the_launcher_is_ended_by_a_signal(start: Start) -> None:
    """It may have begun to run, as a process of exec that is signalled when it has just started."""
    child = start("wait")
    assert child._fork is not None
    link = child._fork._link
    assert select.select([link], [], [], SECONDS)[0]  # it is there, and waits for the launcher
    process = int(link.recv(64, socket.MSG_PEEK))
    child.send(signal.SIGTERM)
    assert ended(child) == -signal.SIGTERM
    wait_until(lambda: not is_alive(process), SECONDS)


def test_the_servers_own_environment_ends_with_the_fork(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(placement.OWN_ENVIRONMENT, MODULE, {"TEST_OWN": "of the server"})
    forked = start("finish", TEST_VALUE="x")
    assert ended(forked) == 0
    assert report_of(forked)["forked"]
    assert report_of(forked)["environment"] == {"TEST_VALUE": "x"}


def test_a_server_keeps_no_descriptor_of_what_it_forked(start: Start, servers: ForkServers) -> None:
    def held() -> int:
        return len(list(Path(f"/proc/{server_process(servers)}/fd").iterdir()))

    assert ended(start("finish", name="first")) == 0
    before = held()
    assert ended(start("finish", name="second")) == 0
    wait_until(lambda: held() <= before, SECONDS)


def test_requests_that_a_busy_server_has_no_room_for_do_not_wait(
    start: Start, servers: ForkServers, tmp_path: Path
) -> None:
    assert ended(start("finish", name="before")) == 0
    os.kill(server_process(servers), signal.SIGSTOP)
    large = {f"TEST_{number}": "x" * 60_000 for number in range(2)}
    children = [start("finish", name=f"child{number}", **large) for number in range(8)]
    assert any(child._fork is None for child in children)
    os.kill(server_process(servers), signal.SIGCONT)
    assert [ended(child) for child in children] == [0] * 8
    assert len(runs(tmp_path)) == 9


def test_where_exec_fails_too_the_process_has_ended(
    start: Start, servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PRELOAD", "slow")
    child = start("finish")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    os.kill(server_process(servers), signal.SIGKILL)
    assert ended(child) == 1
    assert "cannot be started" in child.failure().cause


def test_threads_are_counted_as_openmp_would(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PRELOAD", "torch")
    child = start("finish", OMP_NUM_THREADS="3,2", TEST_PRELOAD="torch")
    assert ended(child) == 0
    assert report_of(child)["threads"] == 3


@pytest.mark.parametrize("kind", ["raise", "thread"])
def test_what_cannot_be_forked_is_started_with_exec(
    kind: str, start: Start, servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PRELOAD", kind)
    child = start("finish")
    assert ended(child) == 0
    assert not report_of(child)["forked"]
    assert servers.of([sys.executable, "-m", MODULE]) is None  # and not tried again


@pytest.mark.parametrize("why", ["setting", "driver"])
def test_servers_are_off(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "driver":
        monkeypatch.setattr(placement, "GPU_FILE", tmp_path)
    with ForkServers(tmp_path, enabled=why != "setting") as servers:
        assert servers.of([sys.executable, "-m", MODULE]) is None


def test_what_was_forked_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from pipeline.launch import placement
from pipeline.launch.processes import Child
placement.PRELOADS["{MODULE}"] = "forked_preload"
placement.OWN_ENVIRONMENT["{MODULE}"] = {{}}
directory = Path(sys.argv[1])
servers = placement.ForkServers(directory, True)
command = [sys.executable, "-m", "{MODULE}", str(directory), "wait"]
child = Child("child", command, directory / "child.log", {{}}, None, servers.of(command))
while child.status() is None:
    time.sleep(0.05)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        wait_until(lambda: bool(runs(tmp_path)), SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    [process] = runs(tmp_path)
    wait_until(lambda: not is_alive(process), SECONDS)
