"""An engine process that schedules asynchronously, as on a GPU: python -m ... ENGINE.json.

vLLM switches asynchronous scheduling off on CPUs as not required. Its scheduler, its queue of steps
and its model runner do it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel.engine import core, server
from parallel.settings import EngineJob

original = core.configuration


@contextmanager
def asynchronous(job: EngineJob) -> Iterator[Any]:
    with original(job) as config:
        config.scheduler_config.async_scheduling = True
        yield config


def install() -> None:
    """Have engines of this process schedule asynchronously."""
    core.configuration = asynchronous  # type: ignore[assignment]


def main() -> None:
    """Serve an engine that schedules asynchronously."""
    install()
    server.main()


if __name__ == "__main__":
    main()
