"""What a gate has said, as `verdict.json` has it for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

from parallel.files import read_text
from pipeline.config.violations import shown
from pipeline.errors import BraidError, reason
from pipeline.run.directory import StageDirectory

STOPPED_MARK = "gate: "  # what the verdict of a gate that stopped begins with
OVERRIDDEN = "overridden: "  # what the cause of one that a person has overridden has in it

Outcome = Literal["passed", "warned", "stopped"]


@dataclass(frozen=True)
class GateVerdict:
    """What a gate says, with the numbers for it."""

    outcome: Outcome
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it stands in the ledger."""
        mark = STOPPED_MARK if self.outcome == "stopped" else f"{self.outcome}: "
        return f"{mark}{'; '.join(self.reasons)}"


class DamagedVerdict(BraidError):
    """A verdict.json that no gate has written."""


def read_verdict(directory: StageDirectory) -> GateVerdict | None:
    """What a gate said; None of other stages, and of a gate that was not judged yet.

    Raises DamagedVerdict.
    """
    path = directory.verdict
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedVerdict(f"{shown(path)} is damaged: {_why(error)}") from error
    outcome, reasons = None, None
    if isinstance(found, dict) and found.keys() == {"outcome", "reasons"}:
        outcome, reasons = found["outcome"], found["reasons"]
    told = isinstance(reasons, list) and all(isinstance(each, str) for each in reasons)
    if outcome is None or outcome not in get_args(Outcome) or not told or not reasons:
        raise DamagedVerdict(
            f"{shown(path)} is damaged: it is not an outcome ({', '.join(get_args(Outcome))}) with "
            "its reasons"
        )
    return GateVerdict(outcome, tuple(reasons))


def _why(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else f"it is no JSON ({error})"
