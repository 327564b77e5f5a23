"""A mixture of sources by weights, exact in the long run. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


class Mixture:
    """The dealing of sequences to sources in proportion to their weights.

    Each sequence goes to the source that is furthest behind its share, the first of equal ones: no
    source is ever a whole sequence ahead of its share. Where weights are in the ratio of whole
    numbers, shares are exact after every multiple of their sum. `dealt` is the number of sequences
    of each source so far, the whole state.

    Example: sequence 2 goes to b, which is 0.8 of a sequence behind its share, and a 0.2.
        >>> mixture = Mixture({"a": 3, "b": 2})
        >>> ["a" if mixture.deal(1)["a"] else "b" for _ in range(5)]
        ['a', 'b', 'a', 'b', 'a']
        >>> mixture.deal(5)
        {'a': 3, 'b': 2}
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        # As they are written: the float 0.1 is not a tenth, and shares would never be exact.
        exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
        total = sum(exact.values())
        self._shares = {name: weight / total for name, weight in exact.items()}
        self.dealt = dict.fromkeys(weights, 0)

    def deal(self, count: int) -> dict[str, int]:
        """Return the number of the next `count` sequences that each source gives."""
        before = dict(self.dealt)
        total = sum(before.values())
        for number in range(total + 1, total + count + 1):
            shortfalls = {
                name: share * number - self.dealt[name] for name, share in self._shares.items()
            }
            # `max` takes the first of equal ones, so that a resumed mixture deals no differently.
            self.dealt[max(shortfalls, key=lambda name: shortfalls[name])] += 1
        return {name: self.dealt[name] - before[name] for name in before}
