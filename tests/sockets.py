"""The addresses that processes of this machine listen on, from /proc."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"  # of Linux, in /proc/net/tcp


def listening(process: int) -> set[str]:
    """Return the addresses that a process listens on over TCP, such as "127.0.0.1" or "::"."""
    held = set()
    with suppress(OSError):  # it has just ended
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                held.add(str(descriptor.readlink()))
    return {address for number, address in _sockets() if f"socket:[{number}]" in held}


def _sockets() -> Iterable[tuple[str, str]]:
    """Yield the inode and the address of every listening TCP socket of this machine."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == LISTENING:
                yield fields[9], _address(local.partition(":")[0])


def _address(words: str) -> str:
    """Return the address of 32-bit words in hexadecimal, each in this machine's byte order."""
    parts = [bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8)]
    return str(ipaddress.ip_address(b"".join(parts)))
