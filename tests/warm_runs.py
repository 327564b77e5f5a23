"""`braid` in the test's process, whose fork servers serve every run of the session.

A run that is started as a person does (`tests.runs.braid`) first imports what its ranks and its
engines need, 22 s of CPU time, more than a short run then takes. Here the test's process is the
launcher, and the servers stay: everything else is as in `braid run`. A test that kills the launcher
starts that one as a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.launch import one_off, runner
from pipeline.launch.placement import ForkServers

# `warm_braid(directory, "run", config)` is the output of a command that is expected to succeed.
WarmBraid = Callable[..., str]


@pytest.fixture(scope="session")
def warm_braid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmBraid]:
    """Return a function that runs `braid ARGUMENTS`, with its runs in a directory."""
    with ForkServers(tmp_path_factory.mktemp("warm_servers"), enabled=True) as servers:

        def run(directory: Path, *arguments: str) -> str:
            with _serving(servers):
                code, printed, progress = command(directory, *arguments)
            assert code == 0, printed + progress
            return printed + progress

        yield run


@contextmanager
def _serving(servers: ForkServers) -> Iterator[None]:
    """Have commands of this process fork from these servers, and leave them running."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (runner, one_off):
            patch.setattr(module, "ForkServers", lambda _logs, _enabled: nullcontext(servers))
        yield


def command(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, its output and its error output."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = cli.main([*arguments, "--runs-dir", str(directory)])
    return code, out.getvalue(), err.getvalue()
