"""The shared device of gloo's process groups, without CUDA.

torch gives every gloo group a device: a listening socket and a thread that wakes 100 times a
second, however idle the group is. Megatron makes some twenty groups, so that every rank spent 3 %
of a core on waking up, and each message woke one thread more.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


def share_device() -> None:
    """Let the gloo groups that this process makes from now on use the same devices.

    torch's own `new_group` passes gloo a timeout and never options (torch 2.13,
    distributed_c10d.py), so that the constructor is the only place to name a device. The devices
    are made with the first group: their threads would not survive a fork.
    """
    group: Any = dist.ProcessGroupGloo
    construct = group.__init__
    if getattr(construct, "shares_device", False):
        return

    @functools.wraps(construct)
    def construct_sharing(
        self: Any, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout
    ) -> None:
        # gloo's other constructor has options in the timeout's place: they name their devices.
        if isinstance(timeout, timedelta):
            timeout = _options(timeout, _shared_devices(os.getpid()))
        construct(self, store, rank, size, timeout)

    construct_sharing.shares_device = True  # type: ignore[attr-defined]
    group.__init__ = construct_sharing


def separate_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group with a device that ends with the group, for members that may never come.

    A device keeps what it waits for until its end: on a shared one, a member that came too late
    would be handed to a group that is gone.
    """
    group: Any = dist.ProcessGroupGloo
    return group(store, rank, size, _options(timeout, _devices()))


@functools.cache
def _shared_devices(_process: int) -> list[Any]:
    return _devices()


def _devices() -> list[Any]:
    """Make devices on the interfaces that torch would take."""
    group: Any = dist.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [group.create_device(interface=name) for name in names.split(",")]
    return [group.create_default_device()]


def _options(timeout: timedelta, devices: list[Any]) -> Any:
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._timeout = timeout
    options._devices = devices
    options._threads = 2 * len(devices)  # as torch does
    return options
