"""Real gloo ranks that stay alive for the whole session and run one function after another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from parallel.settings import LayoutSettings

# Forked from a process that has imported all this once, eight ranks start as fast as one.
IMPORTED_ONCE = ["preloaded"]


class Ranks:
    """`ranks(layout, function, *arguments)` runs a function of a test's module on every rank."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(
        self, layout: LayoutSettings, function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """Every rank's answer. Raises AssertionError with the traceback of one that failed."""
        for pipe in self.pipes:
            pipe.send((layout, function, arguments))
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


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from parallel.distributed import meeting, model_parallel

    current: LayoutSettings | None = None
    groups = contextlib.ExitStack()
    with meeting():
        while True:
            layout, function, arguments = pipe.recv()
            try:
                if current is None or groups_of(layout) != groups_of(current):
                    groups.close()
                    groups.enter_context(model_parallel(layout, seed=0))
                    current = layout
                pipe.send((True, function(*arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))


def groups_of(layout: LayoutSettings) -> dict[str, Any]:
    """What of a layout its process groups depend on."""
    return layout.model_dump(exclude={"distributed_optimizer", "recompute"})
