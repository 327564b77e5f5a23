"""The 95 % intervals of learning claims: over seeds, and over problems that two models share.

The unit of a claim about a method is the seed. A paired interval over problems says only how far
two trained models differ; other seeds would train others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from stages.statistics import Z_95, Difference

# Student's t, the 97.5 % quantiles by degrees of freedom.
T_95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=1))


def paired(after: Sequence[float], before: Sequence[float]) -> Difference:
    """after - before on the same problems: the mean difference a problem, and its interval by the
    normal distribution, which holds for hundreds of problems."""
    each = [one - other for one, other in zip(after, before, strict=True)]
    half = Z_95 * stdev(each) / len(each) ** 0.5
    return Difference(mean(each), mean(each) - half, mean(each) + half)


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of the mean over seeds (Student's t); of two seeds to ten."""
    return T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def over_seeds(values: Sequence[float], form: str = "+.1f") -> str:
    """The mean over seeds, with half of its interval where there are several."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{mean(values):{form}} ± {half_width(values):{form.lstrip('+')}}"


def row(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
