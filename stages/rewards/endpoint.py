"""A judge's endpoint: checks of its address, and removal of the key from all that it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

HIDDEN = "[key]"
LONGEST_NAME = 253
NAME = re.compile(r"\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*\.?", re.ASCII)


def address_error(url: str) -> str | None:
    """Return what is wrong with a `base_url` of http or https, or None.

    The address is not repeated, since a password or a key may stand in it.
    """
    if not (url.isascii() and url.isprintable()):
        return "must be printable ASCII: xn--NAME for an international host, %XX in a path"
    if "?" in url or "#" in url:
        return "must have no query (?) and no fragment (#); a key belongs in api_key_variable"
    if "@" in url.split("/")[2]:
        return "must have no user and no password (@); a key belongs in api_key_variable"
    try:
        parts = urlsplit(url)
        valid = _is_host(parts.hostname or "")
    except ValueError:  # a bracket that is not closed
        valid = False
    if not valid:
        return "has no valid host: a name, an IPv4 address, or an IPv6 address in brackets"
    try:
        valid = parts.port != 0
    except ValueError:
        valid = False
    return None if valid else "must have a port from 1 to 65535"


def unencrypted_host(url: str) -> str | None:
    """Return the host, other than this machine, that an address of http leads to, or None."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return host if parts.scheme == "http" and not _is_loopback(host) else None


def hiding(key: str | None) -> Callable[[str], str]:
    """Return a function that hides `key` in a text, in any case, plain or escaped (JSON, URLs)."""
    if key is None:
        return lambda text: text
    pattern = re.compile("".join(map(_written, key)), re.IGNORECASE)
    return lambda text: pattern.sub(HIDDEN, text)


def _written(character: str) -> str:
    """Return a pattern of one character, escaped or not."""
    itself, code = re.escape(character), ord(character)
    return rf"(?:{itself}|\\{itself}|\\u{code:04x}|%{code:02x})"


def _is_host(host: str) -> bool:
    """Return whether `host` is a valid name. Raises ValueError where it is an invalid address."""
    if ":" in host:
        IPv6Address(host)
    elif re.fullmatch(r"(.*\.)?\d+\.?", host):  # a name does not end with a number
        IPv4Address(host)
    else:
        return len(host) <= LONGEST_NAME and NAME.fullmatch(host) is not None
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
