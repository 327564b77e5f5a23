"""Recorded samples as text: a line of what each earned, its prompt, its response, its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.tables import Cell, table
from pipeline.text import visible

Grade = dict[str, Any]  # the `reward`, `parts`, `messages` and `failure` of a sample now
# Grades samples of a stage; the last argument is called again and again, and raises to stop.
Regrade = Callable[[str, Sequence[dict[str, Any]], Callable[[], None]], list[Grade]]
KEY_DIGITS = 12  # of a problem's key, which are enough to tell problems apart
TOKEN_COLUMNS = ("logprobs", "trainer_logprobs", "entropies", "advantages", "teacher_kl")
HEADINGS = ("", "token", "engine", "trainer", "difference", "entropy", "advantage", "teacher_kl")


def sample_lines(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a sample: where it is from, what it earned, what it says."""
    place = [f"step {row['step']}", f"group {row['group']}", row["domain"]]
    if row["model"] is not None:
        place = [row["model"], row["domain"]]
    if row["problem"] is not None:
        place.append(f"problem {row['problem'][:KEY_DIGITS]}")
    tokens = f"{row['tokens']} token{'s' if row['tokens'] != 1 else ''}"
    if row["finish_reason"] == "length":
        tokens += ", truncated"
    place.append(tokens)
    if row["staleness"]:
        place.append(f"{row['staleness']} steps old")
    yield visible(" · ".join(place))
    yield from _earned(row)
    yield visible(f"  prompt    {row['prompt']}", keep="\n")
    if row["answer"]:
        yield visible(f"  answer    {row['answer']}", keep="\n")
    yield visible(f"  response  {row['response']}", keep="\n")


def _earned(row: dict[str, Any]) -> Iterator[str]:
    if row["reward_failure"] is not None:
        yield visible(f"  no reward: {row['reward_failure']}")
    if row["reward"] is None:
        return
    messages, reward_parts = row["reward_messages"] or {}, row["reward_parts"] or {}
    scores = [f"{name} {score:g}" for name, score in reward_parts.items()]
    advantage = "" if row["model"] is not None else f", advantage {row['advantage']:+.3g}"
    yield visible(f"  reward    {row['reward']:g} ({', '.join(scores)}){advantage}")
    for name, message in messages.items():
        yield visible(f"            {name}: {message}", keep="\n")


def token_table(row: dict[str, Any], texts: Sequence[str]) -> str:
    """Return a table of a response's tokens, `texts`, with a column of each recorded value."""
    series_of = [row[name] for name in TOKEN_COLUMNS]
    learned = range(len(texts)) if row["learned"] is None else row["learned"]
    lines: list[list[str | Cell]] = []
    for place, text in enumerate(texts):
        engine, trainer, entropy, advantage, teacher_kl = (
            None if series is None else series[place] for series in series_of
        )
        if place not in learned:
            trainer = entropy = teacher_kl = None
        apart = None if engine is None or trainer is None else trainer - engine
        advantage = row["advantage"] if advantage is None else advantage
        numbers = [engine, trainer, apart, entropy, advantage, teacher_kl]
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        lines.append([str(place), repr(text), *cells])
    # Without the columns of values that no token has.
    filled = (n for n in range(2, len(HEADINGS)) if any(line[n] for line in lines))
    columns = [0, 1, *filled]
    headings = [HEADINGS[column] for column in columns]
    lines = [[line[column] for column in columns] for line in lines]
    return table("", headings, lines, right=range(2, len(columns)))


def regraded_line(rows: Sequence[dict[str, Any]], grades: Sequence[dict[str, Any]]) -> str:
    """Return how many samples earn more, less, and nothing now, and the mean rewards."""
    pairs = [(row["reward"], grade["reward"]) for row, grade in zip(rows, grades, strict=True)]
    both = [(before, now) for before, now in pairs if None not in (before, now)]
    more, less = (sum(sign * (now - before) > 0 for before, now in both) for sign in (1, -1))
    failed = sum(now is None for _, now in pairs)
    line = f"graded again: {more} of {len(rows)} earn more, {less} less, {failed} have no reward"
    if both:
        before, now = (sum(values) / len(both) for values in zip(*both, strict=True))
        line += f"; mean {before:.3g}, now {now:.3g}"
    return line


def grade_lines(grade: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the grade that a sample would earn now, as `regrade` returns it."""
    if grade["reward"] is None:
        yield visible(f"  now       no reward: {grade['failure']}")
        return
    scores = [f"{name} {score:g}" for name, score in grade["parts"].items()]
    yield visible(f"  now       {grade['reward']:g} ({', '.join(scores)})")
    for name, message in (grade["messages"] or {}).items():
        yield visible(f"            {name}: {message}", keep="\n")


def route_table(routes: Sequence[Sequence[Sequence[int]]] | None, texts: Sequence[str]) -> str:
    """Return a table of a response's tokens, `texts`, with their experts by routed layer."""
    if routes is None:
        return "its experts are not recorded: set logging.auditable=true, with routing.replay: r3"
    layers = [f"layer {number}" for number in range(len(routes[0]))]
    lines: list[list[str | Cell]] = [
        [str(place), repr(text), *(" ".join(map(str, experts)) for experts in layers_of)]
        for place, (text, layers_of) in enumerate(zip(texts, routes, strict=True))
    ]
    return table("", ("", "token", *layers), lines)
