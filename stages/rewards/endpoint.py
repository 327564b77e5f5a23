"""The endpoint of a judge: what its address may be, who can read the key on its way, and how the
key is kept out of what the endpoint says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from stages.rewards.settings import JudgeReward, RewardSettings

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


def cautions(rewards: Mapping[str, Mapping[str, RewardSettings]]) -> Iterator[str]:
    """Yield a line for each judge of these domains whose key others on the network can read."""
    for domain, own in rewards.items():
        for name, settings in own.items():
            if settings.kind == "judge" and (host := _unencrypted(settings)):
                key = f"domains.{domain}.rewards.{name}.base_url"
                yield f"{key}: the key goes to {host} unencrypted; use https"


def _unencrypted(judge: JudgeReward) -> str | None:
    """The host, other than this machine, to which a key goes by http."""
    parts = urlsplit(judge.base_url)
    host = parts.hostname or ""
    has_key = judge.api_key_file is not None or judge.api_key_variable is not None
    return host if has_key and parts.scheme == "http" and not _is_loopback(host) else None


def hiding(key: str | None) -> Callable[[str], str]:
    """Return a function that replaces `key` in a text, in upper and lower case, as it is or as JSON
    and URLs escape it."""
    if key is None:
        return lambda text: text
    pattern = re.compile("".join(map(_written, key)), re.IGNORECASE)
    return lambda text: pattern.sub(HIDDEN, text)


def _written(character: str) -> str:
    """A pattern of one character, escaped or not."""
    itself, code = re.escape(character), ord(character)
    return rf"(?:{itself}|\\{itself}|\\u{code:04x}|%{code:02x})"


def _is_host(host: str) -> bool:
    """Whether this is a name or an address. Raises ValueError for an address that is none."""
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
