"""The copy of the rewards' output in the stage's log, up to a limit.

A reward that prints without end would otherwise fill the disk of the checkpoints.
"""

from __future__ import annotations

import contextlib
import os

from parallel.status_pipe import ERRORS, report_notice

LARGEST = 16 << 20  # bytes of one attempt at a stage
PIECE = 1 << 16


def pass_on(printed: int) -> None:
    """Copy from a pipe until all writers are gone; report once that output is dropped."""
    left, reported = LARGEST, False
    with open(printed, "rb", buffering=0) as pipe:
        while piece := pipe.read(PIECE):
            with contextlib.suppress(OSError):  # a full disk must not stop the rewards
                os.write(ERRORS, piece[:left])
            if len(piece) > left and not reported:
                reported = True
                report_notice(
                    f"the rewards printed more than {LARGEST} bytes; the rest is not logged: make"
                    " them print less"
                )
            left = max(0, left - len(piece))
