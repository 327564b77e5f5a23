"""One gloo device for all process groups of a process, on machines without CUDA.

torch gives every gloo group a device of its own: a listening socket and a thread that wakes 100
times a second, however idle the group is. Megatron makes some twenty groups, so that every rank
spent 3 % of a core on waking up, and each message woke one thread more.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


def share_device() -> None:
    """Let every gloo group that this process makes from now on use the same devices.

    torch's own `new_group` hands gloo a timeout and no options (distributed_c10d.py, "GLOO options
    not supported"), so that its constructor is the only place to name a device. The devices are
    made with the first group: their threads would not survive a fork.
    """
    group: Any = dist.ProcessGroupGloo
    construct = group.__init__
    options = getattr(group, "_Options", None)
    if options is None or getattr(construct, "shares_device", False):
        return

    @functools.wraps(construct)
    def construct_sharing(
        self: Any, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout
    ) -> None:
        chosen = options()
        chosen._timeout = timeout
        chosen._devices = _devices(os.getpid())
        chosen._threads = 2 * len(chosen._devices)  # as torch does
        construct(self, store, rank, size, chosen)

    construct_sharing.shares_device = True  # type: ignore[attr-defined]
    group.__init__ = construct_sharing


@functools.cache
def _devices(_process: int) -> list[Any]:
    """Return this process's devices, on the interfaces that torch would have taken."""
    group: Any = dist.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [group.create_device(interface=name) for name in names.split(",")]
    return [group.create_default_device()]
