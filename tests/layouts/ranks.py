"""Real gloo ranks that stay alive for the whole session and run one function after another."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Ranks:
    """`ranks(function, *arguments)` runs a function of `cases` on every rank."""

    def __init__(self, world: int, expert: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, expert, port))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Every rank's answer. Raises AssertionError with the traceback of one that failed."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(120), f"rank {rank} did not answer"
            worked, answer = pipe.recv()
            assert worked, f"rank {rank}:\n{answer}"
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def _serve(pipe: Connection, rank: int, world: int, expert: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from parallel.distributed import process_groups
    from parallel.settings import LayoutSettings

    with process_groups(LayoutSettings(ranks=world, expert=expert), seed=0):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
