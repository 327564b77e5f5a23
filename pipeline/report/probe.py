"""Asks `python -m parallel.doctor` what works here, so that torch never enters this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console

COMMAND = (sys.executable, "-m", "parallel.doctor")
TIMEOUT_SECONDS = 300.0  # imports from a busy network disk take minutes

TIMED_OUT = signal.SIGALRM  # no import ends with it by itself

# By imported name: what its probe found, or {"missing": True}, or {"error": one line}.
Findings = dict[str, dict[str, Any]]


def probe(
    console: Console, command: Sequence[str] = COMMAND, timeout: float = TIMEOUT_SECONDS
) -> Findings:
    """Run the probes and say which one is going on; one that dies or hangs is found at fault."""
    findings: Findings = {}
    current = "torch"
    with tempfile.TemporaryFile() as said, _running(command, timeout, said) as process:
        with _progress(console) as say:
            assert process.stdout is not None
            for line in process.stdout:
                answer = json.loads(line)
                if "looking_at" in answer:
                    current = answer["looking_at"]
                    say(f"trying out {current}")
                else:
                    findings[answer.pop("found")] = answer
        if status := process.wait():
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            findings[current] = {"error": ": ".join([_ending(status, timeout), *last])}
    return findings


@contextmanager
def _running(
    command: Sequence[str], timeout: float, said: IO[bytes]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True
    )
    alarm = threading.Timer(timeout, process.send_signal, [TIMED_OUT])
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()
        process.kill()
        process.wait()


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that is redrawn on a terminal; elsewhere one that says how long it may take."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        console.print("trying out what is installed; this takes some ten seconds", highlight=False)
        yield lambda _: None


def _ending(status: int, timeout: float) -> str:
    if status == -TIMED_OUT:
        return f"its import took more than {timeout:g} s"
    if status < 0:
        return f"its import was killed by {signal.Signals(-status).name}"
    return f"its import ended with exit status {status}"
