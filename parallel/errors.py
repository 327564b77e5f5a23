"""Errors that a user can fix, and the pipe on which a process reports them to the launcher.

Never imports torch.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable

# Names the descriptor of the pipe. Not the log: its disk may be full.
STATUS_DESCRIPTOR = "BRAID_STATUS_DESCRIPTOR"
ERROR_MARK = "braid-error: "
NOTICE_MARK = "braid-notice: "
# Parts of what gloo ("Connection closed by peer", "reset by peer"; "Timed out waiting 1800000ms for
# send operation to complete"), NCCL ("Connection closed by remote peer"; "remote process exited or
# there was a network error"), torch's watchdog of NCCL ("caught collective operation timeout") and
# its store ("Timed out after 1801 seconds waiting for clients"; "wait timeout after 1800000ms") say
# when another rank is gone. The rank that died knows the cause better. Not "Timed out waiting"
# alone, which vLLM says of its own processes.
LOST_PEER = (
    *("by peer", "by remote peer", "remote process exit"),
    *("ms for send operation to complete", "ms for recv operation to complete"),
    *("caught collective operation timeout", "seconds waiting for clients", "wait timeout after"),
)

LONGEST = 4000  # bytes; a longer write to a pipe is not atomic (PIPE_BUF is 4096)
OUTPUT, ERRORS = 1, 2


class UserError(Exception):
    """An error whose message alone says what is wrong, where, and how to fix it.

    A program ends with the message, without a traceback, and with `exit_code`.
    """

    exit_code = 1


def hint(name: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or all."""
    names = list(choices)
    # A name may look like a known one and have a Cyrillic or Greek letter.
    other = "" if name.isascii() else f"{name!a} has non-ASCII letters; "
    if near := nearest_name(name, names):
        return f"{other}{near}"
    return f"{other}known: {', '.join(names)}" if names else f"{other}none is defined"


def nearest_name(name: str, choices: Iterable[str]) -> str | None:
    """Return the question whether the nearest known name was meant; None where none is near."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f'did you mean "{near[0]}"?' if near else None


def valid_text(text: str) -> str:
    """Return a text that UTF-8 can encode: half of a surrogate pair becomes a question mark.

    JSON, a template and a file's name may hold one, and no file or table can be written with it.
    Text from outside is made valid where it enters.
    """
    return text.encode(errors="replace").decode()


def is_lost_peer(text: str) -> bool:
    """Return whether an error or a line of a log says that another rank is gone."""
    return any(phrase in text for phrase in LOST_PEER)


def report_error(reason: str) -> None:
    """Report why this process fails, to the launcher and on standard output."""
    _report(ERROR_MARK + reason, OUTPUT)


def report_notice(text: str) -> None:
    """Report what a person should know while the stage continues, also on standard error."""
    _report(NOTICE_MARK + text, ERRORS)


def _report(text: str, log: int) -> None:
    # The name of a file may hold bytes that are not UTF-8.
    line = " ".join(text.split()).encode(errors="backslashreplace")[:LONGEST] + b"\n"
    for descriptor in {int(os.environ.get(STATUS_DESCRIPTOR, log)), log}:
        with contextlib.suppress(OSError):
            os.write(descriptor, line)
