"""DAPO's soft overlong punishment of responses that near their limit (arXiv 2503.14476)."""

from __future__ import annotations


def soft_overlong(length: int, limit: int, margin: int) -> float:
    """0 up to `limit` - `margin` tokens, then linearly down to -1 at `limit`, and -1 beyond.

    Raises ValueError unless 0 < margin <= limit.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens below a limit of {limit}")
    return max(min((limit - margin - length) / margin, 0.0), -1.0)
