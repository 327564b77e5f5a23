"""The stores of torch.distributed, at which ranks meet before they know one another."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def host_store(host: str, port: int, timeout: timedelta, ranks: int | None = None) -> dist.TCPStore:
    """Host a store that listens on `host` alone, on any free port where `port` is 0.

    A store has no password: whoever reaches it may read and change it. torch's own listens on every
    interface, whatever its host is called. With `ranks` given, wait until all of them are there.

    Raises OSError when this machine has no such address, or the port is in use.
    """
    [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listening = socket.create_server(address[:2], family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=ranks is not None,
        master_listen_fd=listening.detach(),  # the store closes it
    )
