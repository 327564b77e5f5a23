"""The shared device of gloo's process groups, without CUDA.

torch gives every gloo group a device: a listening socket and a thread that wakes 100 times a
second even when the group is idle. Megatron creates some twenty groups: every rank spent 3 % of a
core on wake-ups, and each message woke one more thread.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

GLOO: Any = dist.ProcessGroupGloo


@functools.cache
def share_device() -> None:
    """Make all gloo groups that this process creates later share their devices.

    torch's `new_group` passes gloo a timeout and never options (torch 2.13, distributed_c10d.py),
    so the constructor is the only place to set a device. The devices are created with the first
    group: their threads would not survive a fork.
    """
    construct = GLOO.__init__

    @functools.wraps(construct)
    def construct_sharing(
        self: Any, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout
    ) -> None:
        # gloo's other constructor has options, which include devices, in the timeout's place.
        if isinstance(timeout, timedelta):
            timeout = _options(timeout, _shared_devices(os.getpid()))
        construct(self, store, rank, size, timeout)

    GLOO.__init__ = construct_sharing


def separate_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group whose device is destroyed with it, for peers that may never connect.

    A device keeps pending connections until it is destroyed: a shared one would hand a late peer to
    a group that no longer exists.
    """
    return GLOO(store, rank, size, _options(timeout, _devices()))


@functools.cache
def _shared_devices(_process: int) -> list[Any]:
    return _devices()


def _devices() -> list[Any]:
    """Return devices on the interfaces that torch would use."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [GLOO.create_device(interface=name) for name in names.split(",")]
    return [GLOO.create_default_device()]


def _options(timeout: timedelta, devices: list[Any]) -> Any:
    options = GLOO._Options()
    options._timeout = timeout
    options._devices = devices
    options._threads = 2 * len(devices)  # as torch does
    return options
