"""Real gloo ranks of one layout, that stay alive and run one function after another."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from parallel.settings import LayoutSettings
from tests.awaiting import PATIENCE_SECONDS

# Forked from a process that has imported all this once, eight ranks start as fast as one.
IMPORTED_ONCE = ["tests.preloaded"]  # found from the root of the repository


On = Callable[..., list[Any]]  # what the fixture `on` is


class Ranks:
    """`ranks(function, *arguments)` runs a function of a test's module on every rank."""

    def __init__(self, layout: LayoutSettings, serve: Callable[..., None] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(layout.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve or serve_rank, args=(theirs, rank, layout, port), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's answer.

        Raises:
            AssertionError: a rank failed; with its traceback.
        """
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} did not answer"
            worked, answer = pipe.recv()
            assert worked, f"rank {rank}:\n{answer}"
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def serve_rank(pipe: Connection, rank: int, layout: LayoutSettings, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(layout.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from parallel.distributed import process_groups

    with process_groups(layout, seed=0):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
