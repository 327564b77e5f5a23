"""The filter of rejection sampling: why a response to a prompt is dropped, or None."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from stages.data.scripts import other_letters
from stages.kinds.sample.settings import KeepSettings

Row = dict[str, Any]  # of `stages.data.collected`

# In the order in which they are tested: a response has the first that applies.
REASONS = (
    *("ungraded", "empty", "truncated", "reward", "min_tokens", "max_tokens", "script"),
    *("duplicate", "per_prompt"),
)


def drop_reasons(rows: Sequence[Row], keep: KeepSettings, seed: int) -> list[str | None]:
    """Return why each response to one prompt is dropped; None where it is kept.

    Of equal responses the first that passes is kept. `seed` decides among more than
    `keep.per_prompt`.
    """
    reasons = [_own_reason(row, keep) for row in rows]
    seen: set[str] = set()
    for place, row in enumerate(rows):
        if reasons[place] is None and not keep.duplicates:
            if row["response"] in seen:
                reasons[place] = "duplicate"
            seen.add(row["response"])
    passing = [place for place, why in enumerate(reasons) if why is None]
    if keep.per_prompt is not None and len(passing) > keep.per_prompt:
        Random(seed).shuffle(passing)
        if keep.choose == "best":
            passing.sort(key=lambda place: -rows[place]["reward"])  # stable: ties stay shuffled
        for place in passing[keep.per_prompt :]:
            reasons[place] = "per_prompt"
    return reasons


def _own_reason(row: Row, keep: KeepSettings) -> str | None:
    """Return why a response is dropped that does not depend on the others to its prompt."""
    reward, tokens, text = row["reward"], row["tokens"], row["response"]
    if reward is None:
        return "ungraded"
    if not text.strip():
        return "empty"  # nothing to learn from, and no demonstration
    if keep.finished and row["finish_reason"] != "stop":
        return "truncated"
    if keep.reward is not None and reward < keep.reward:
        return "reward"
    if keep.min_tokens is not None and tokens < keep.min_tokens:
        return "min_tokens"
    if keep.max_tokens is not None and tokens > keep.max_tokens:
        return "max_tokens"
    script = keep.script
    if script is not None and other_letters(text, script.allowed) > script.max_other:
        return "script"
    return None
