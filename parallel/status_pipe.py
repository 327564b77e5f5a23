"""What a process tells the launcher: what to know meanwhile, and why it failed; each in one line.

Never imports torch.
"""

from __future__ import annotations

import contextlib
import os

from parallel.settings import ERROR_MARK, LAST_WORD, NOTICE_MARK

LONGEST = 4000  # bytes; a pipe takes as many at once
OUTPUT, ERRORS = 1, 2


def say_last_word(reason: str) -> None:
    """Tell the launcher, if one listens, and the log, if it can still be written."""
    _say(ERROR_MARK + reason, OUTPUT)


def say_notice(text: str) -> None:
    """Tell a person what went wrong and was mended, on the terminal and in the log."""
    _say(NOTICE_MARK + text, ERRORS)


def _say(text: str, log: int) -> None:
    # A file's name may hold what is no text.
    line = " ".join(text.split()).encode(errors="backslashreplace")[:LONGEST] + b"\n"
    for descriptor in {int(os.environ.get(LAST_WORD, log)), log}:
        with contextlib.suppress(OSError):
            os.write(descriptor, line)
