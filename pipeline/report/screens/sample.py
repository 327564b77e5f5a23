"""One sample on a terminal: its tokens, coloured, and how it differs from another one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from math import isfinite

from rich.style import Style
from rich.text import Text

from pipeline.text import visible
from stages.sampling.sample_files import Row

# What tokens are coloured by: its name, and the columns of which it is the value or difference.
COLOURINGS = (
    ("|engine - trainer|", ("logprobs", "trainer_logprobs")),
    ("entropy", ("entropies",)),
    ("advantage", ("advantages",)),
    ("the merge's loss", ("teacher_kl",)),
    ("the engine's log-probability", ("logprobs",)),
)
SHADES = 5  # of a colour
POSITIVE, NEGATIVE = (200, 120, 0), (0, 110, 180)  # distinct without red and green
MOST_WORDS = 1500  # and spaces, of a response that are compared with another one's
WORDS = re.compile(r"\s+|\S+")


def coloured_tokens(row: Row, colouring: int, text_of: Callable[[int], str]) -> Text:
    """Return a response's tokens, the darker the larger the value; `colouring` counts from 1."""
    name, columns = COLOURINGS[colouring - 1]
    values = _values(row, columns)
    learned = row["learned"]
    if values is None:
        return Text(f"{name}: not recorded of this sample (logging.tokens)", style="dim")
    if learned is not None:  # of the others the trainer's values are 0 and mean nothing
        values = [value if place in learned else 0.0 for place, value in enumerate(values)]
    most = max((abs(value) for value in values if isfinite(value)), default=0.0) or 1.0
    text = Text(f"tokens by {name}, at most {most:.3g}\n", style="bold")
    for token, value in zip(row["response_tokens"], values, strict=True):
        text.append(visible(text_of(token), keep="\n"), style=_style(value / most))
    return text


def _values(row: Row, columns: Sequence[str]) -> list[float] | None:
    series = [row[name] for name in columns]
    if any(values is None for values in series):
        return None
    if len(series) == 1:
        return [*series[0]]
    return [abs(one - other) for one, other in zip(*series, strict=True)]


def _style(share: float) -> Style:
    shade = round(abs(share) * SHADES) if isfinite(share) else 0
    if not shade:
        return Style()
    red, green, blue = POSITIVE if share > 0 else NEGATIVE
    scale = shade / SHADES
    return Style(bgcolor=f"rgb({red * scale:.0f},{green * scale:.0f},{blue * scale:.0f})")


def difference(marked: Row, shown: Row) -> Text:
    """Return the words of two responses: struck out what only the marked one has."""
    pieces = (WORDS.findall(row["response"] or "") for row in (marked, shown))
    before, after = (words[:MOST_WORDS] for words in pieces)
    text = Text("difference from the marked sample\n", style="bold")
    for kind, start, end, other, until in SequenceMatcher(None, before, after, False).get_opcodes():
        if kind == "equal":
            text.append(visible("".join(before[start:end]), keep="\n"))
            continue
        text.append(visible("".join(before[start:end]), keep="\n"), style="strike red")
        text.append(visible("".join(after[other:until]), keep="\n"), style="underline green")
    return text
