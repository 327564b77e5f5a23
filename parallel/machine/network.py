"""The addresses of this machine's network interfaces; never imports torch.

An interface has its system name (`ib0`); "" is the one that the host name resolves to, and
`LOOPBACK` accepts connections from this machine only.
"""

from __future__ import annotations

import fcntl
import socket
import struct

LOOPBACK = "lo"

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def environment_of(interface: str) -> dict[str, str]:
    """Return the variables that bind the process groups of torch.distributed to an interface."""
    # gloo and NCCL each choose an interface themselves where their variable is not set.
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return dict.fromkeys(names, interface) if interface else {}


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def address_of(interface: str) -> str:
    """Return the IPv4 address of this machine on an interface.

    Raises:
        OSError: there is no such interface, or it has no address; `filename` is its name.
    """
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    if interface == LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            message = f"{error.strerror}; network interfaces of this machine: {names}"
            raise OSError(error.errno, message, interface) from error
    return socket.inet_ntoa(answer[20:24])
