"""The Jaccard similarity of two responses' shingles, runs of a few tokens.

A long response is represented by the smallest hashes of its shingles (bottom-k sketches, Broder
1997), so that a pair costs the same at any length; a short one by all of them, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHINGLE = 3  # tokens
SKETCH = 256  # hashes; the estimate's standard error is then at most 0.03
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's


@dataclass(frozen=True)
class Sketch:
    """The `SKETCH` smallest hashes of a response's shingles; `whole` where there are no others."""

    hashes: frozenset[int]
    whole: bool


def sketch(tokens: np.ndarray) -> Sketch:
    """Return the sketch of tokens, int [length]; fewer than `SHINGLE` tokens are one shingle."""
    size = min(SHINGLE, len(tokens))
    count = len(tokens) - size + 1
    hashes = np.zeros(count if size else 0, np.uint64)
    for place in range(size):
        hashes = _mixed(hashes + tokens[place : place + count].astype(np.uint64) + np.uint64(1))
    smallest = np.unique(hashes)
    return Sketch(frozenset(smallest[:SKETCH].tolist()), len(smallest) <= SKETCH)


def jaccard(one: Sketch, other: Sketch) -> float:
    """Return the share of the shingles of either that both have, in [0, 1]; 1 if both are empty."""
    either = one.hashes | other.hashes
    if not either:
        return 1.0
    both = one.hashes & other.hashes
    if one.whole and other.whole:
        return len(both) / len(either)
    smallest = sorted(either)[:SKETCH]
    return sum(each in both for each in smallest) / len(smallest)


def repeats(responses: list[np.ndarray], similar: float) -> tuple[int, int]:
    """Count responses equal to an earlier one of the group, and those similar to an earlier one.

    Similar ones share at least `similar` of their shingles; equal ones are among them.
    """
    seen: set[bytes] = set()
    sketches: list[Sketch] = []
    identical = alike = 0
    for response in responses:
        text = response.tobytes()
        if text in seen:
            identical += 1
            continue
        seen.add(text)
        own = sketch(response)
        alike += any(_alike(own, each, similar) for each in sketches)
        sketches.append(own)
    return identical, identical + alike


def _alike(one: Sketch, other: Sketch, similar: float) -> bool:
    """Return true where two unequal sketches are similar; most need no union."""
    most = max(len(one.hashes), len(other.hashes))
    return len(one.hashes & other.hashes) >= similar * most and jaccard(one, other) >= similar


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread the bits over all 64; arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
