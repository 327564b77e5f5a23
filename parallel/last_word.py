"""A process's last word to the launcher: why it failed, in one line. Never imports torch."""

from __future__ import annotations

import contextlib
import os

from parallel.settings import ERROR_MARK, LAST_WORD

LONGEST = 4000  # bytes; a pipe takes as many at once


def say_last_word(reason: str) -> None:
    """Tell the launcher, if one listens, and the log, if it can still be written."""
    line = (ERROR_MARK + " ".join(reason.split())).encode()[:LONGEST] + b"\n"
    for descriptor in (int(os.environ.get(LAST_WORD, "1")), 1):
        with contextlib.suppress(OSError):
            os.write(descriptor, line)
