"""The audit of a stage that samples data: what it kept and why, its counts, its files."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain, groupby, zip_longest
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pyarrow.parquet as parquet
import regex

from parallel.files import open_file, read_text
from stages.audit.blocks import RecordedStage, recorded_stage
from stages.audit.recorded import NotAuditable, RecordedRun, document, naming
from stages.audit.rows import Comparison, exact, numbers

Row = dict[str, Any]  # a response, as it was drawn


def collection_rows(run: RecordedRun, stage: str) -> list[Comparison]:
    """Compare every response's verdict with the filter, and the files and counts with the verdicts.

    Raises:
        NotAuditable: the stage has not finished, or what it drew is gone.
    """
    directory, of = run.stage(stage), recorded_stage(run, stage)
    if not (directory / "collection.json").exists():
        raise NotAuditable(f"no {directory}/collection.json: {stage} has not finished")
    collection = document(directory / "collection.json")
    part_paths = sorted((directory / "drawn").glob("part_*.parquet"))
    if not part_paths:
        raise NotAuditable(f"no parts at {directory}/drawn: what {stage} drew is gone")
    responses = _DrawnResponses(run, of)
    for part_path in part_paths:
        responses.add(list(_read(part_path)))
    return [
        *responses.rows(collection),
        *responses.lines(directory),
        *_collected_rows(run, of, part_paths, collection),
    ]


class _DrawnResponses:
    """All responses that a stage drew, added part by part: a part is never held with another."""

    def __init__(self, run: RecordedRun, of: RecordedStage) -> None:
        self.run, self.of, self.keep = run, of, of.settings["keep"]
        # Of responses by domain, by the reason why they were dropped; None: kept.
        self.counts: dict[str, Counter[str | None]] = defaultdict(Counter)
        self.prompts: dict[str, set[str]] = defaultdict(set)
        self.wrong: dict[str, Counter[str]] = defaultdict(Counter)
        self.rewards: list[tuple[float, float]] = []  # stored, and the weighted sum of the parts
        self.part_metrics: list[tuple[str, dict[str, float]]] = []  # domain and metrics of each

    def add(self, rows: list[Row]) -> None:
        for (domain, problem), group in groupby(rows, lambda row: (row["domain"], row["problem"])):
            self._add_prompt(domain, problem, list(group))
        graded = [row["reward"] for row in rows if row["reward"] is not None]
        metrics = {
            "reward": sum(graded) / max(len(graded), 1),
            "unfinished": fmean(row["finish_reason"] != "stop" for row in rows),
            "response_tokens": fmean(len(row["token_ids"]) for row in rows),
            "drawn": len(rows),
            "kept": sum(row["dropped"] is None for row in rows),
            "reward_failures": len(rows) - len(graded),
        }
        self.part_metrics.append((rows[0]["domain"], metrics))

    def _add_prompt(self, domain: str, problem: str, rows: list[Row]) -> None:
        weights = self.run.settings["domains"][domain]["rewards"]
        sampling = self.of.settings["sampling"] or self.run.settings["domains"][domain]["sampling"]
        most, size = sampling["max_response_tokens"], sampling["group_size"]
        place, begin = len(self.prompts[domain]), _seed(self.run, self.of, domain)
        self.prompts[domain].add(problem)
        verdicts = _verdicts(rows, self.keep, _seed(self.run, self.of, problem, "keep"))
        wrong = self.wrong[domain]
        wrong["responses to a prompt"] += len(rows) != size
        for number, (row, why) in enumerate(zip(rows, verdicts, strict=True)):
            self.counts[domain][why] += 1
            wrong["verdicts"] += row["dropped"] != why
            wrong["tokens"] += row["tokens"] != len(row["token_ids"])
            wrong["seeds"] += row["seed"] != begin + place * size + number
            wrong["finish reasons"] += row["finish_reason"] != "stop" and row["tokens"] != most
            if row["reward"] is not None:
                reward_parts = dict(row["reward_parts"])
                weighted_sum = sum(
                    reward["weight"] * reward_parts.get(name, 0) for name, reward in weights.items()
                )
                self.rewards.append((row["reward"], weighted_sum))

    def rows(self, collection: dict[str, Any]) -> Iterator[Comparison]:
        """Yield the comparisons of rewards, verdicts and counts, by domain."""
        yield numbers("rewards", *([pair[side] for pair in self.rewards] for side in (0, 1)))
        for domain in self.of.domains:
            counts, logged = self.counts[domain], collection["domains"][domain]
            count, prompts = counts.total(), len(self.prompts[domain])
            for what, wrong in self.wrong[domain].items():
                yield exact(f"{domain}: wrong {what}", wrong, 0)
            yield exact(f"{domain}: prompts", logged["prompts"], prompts)
            yield exact(f"{domain}: prompts to draw", self.of.settings["prompts"], prompts)
            yield exact(f"{domain}: drawn", logged["drawn"], count)
            yield exact(f"{domain}: kept", logged["kept"], counts[None])
            for why in sorted({reason for reason in counts if reason} | logged["dropped"].keys()):
                yield exact(f"{domain}: {why}", logged["dropped"].get(why, 0), counts[why])
        total: Counter[str | None] = Counter()
        for counts in self.counts.values():
            total.update(counts)
        yield exact("drawn", collection["drawn"], total.total())
        yield exact("dropped", sum(collection["dropped"].values()), total.total() - total[None])

    def lines(self, directory: Path) -> Iterator[Comparison]:
        """Yield the comparisons of the logged metrics with the parts, one line a part."""
        path = directory / "metrics.jsonl"
        with naming(path):
            lines = [json.loads(line) for line in read_text(path).splitlines()]
            domains = [line["domain"] for line in lines]
            yield exact("metrics: lines", len(lines), len(self.part_metrics))
            yield exact(
                "metrics: domains", domains == [name for name, _ in self.part_metrics], True
            )
            for name in self.part_metrics[0][1]:
                logged = [float(line[name]) for line in lines]
                yield numbers(
                    f"metrics: {name}", logged, [metrics[name] for _, metrics in self.part_metrics]
                )


def _collected_rows(
    run: RecordedRun, of: RecordedStage, part_paths: Sequence[Path], collection: dict[str, Any]
) -> Iterator[Comparison]:
    """Yield the comparisons of collected.parquet with the kept rows of the parts, in order."""
    path = run.stage(of.name) / "collected.parquet"
    parents = dict(document(run.stage(of.name) / "manifest.json")["parents"])
    model = parents.get(of.parent)
    expected_rows = (
        row for part_path in part_paths for row in _read(part_path) if row.pop("dropped") is None
    )
    count = wrong = other_model_rows = 0
    for row, expected in zip_longest(_read(path), expected_rows):
        count += row is not None
        wrong += row is None or expected is None or _plain(row) != _plain(expected)
        other_model_rows += row is not None and row["model"] != model
    yield exact("collected.parquet: rows", collection["rows"], count)
    yield exact("collected.parquet: other rows than were kept", wrong, 0)
    yield exact("collected.parquet: rows of another model", other_model_rows, 0)
    with open_file(path) as file:
        digest = sha256(file.read()).hexdigest()
    yield exact("collected.parquet: digest", collection["digest"] == digest, True)


def _read(path: Path) -> Iterator[Row]:
    with naming(path), open_file(path) as file:
        for batch in parquet.ParquetFile(file).iter_batches(1000, use_threads=False):
            yield from batch.to_pylist()


def _plain(row: Row) -> Row:
    """Return a row without the null keys of its messages, which files of more rows have."""
    messages = row["messages"] and [
        {name: value for name, value in message.items() if value is not None}
        for message in row["messages"]
    ]
    return {**row, "messages": messages}


def _seed(run: RecordedRun, of: RecordedStage, *purpose: str) -> int:
    """Return the seed that a purpose has in a stage, from the first 62 bits of a hash."""
    # Below 2^62: a response's number is added, and the sum must fit an int64.
    text = "/".join([str(run.settings["seed"]), of.seeded_as, *purpose])
    return int(sha256(text.encode()).hexdigest()[:16], base=16) >> 2


def _verdicts(rows: Sequence[Row], keep: dict[str, Any], seed: int) -> list[str | None]:
    """Return why each response to a prompt is dropped, the first reason that applies."""
    reasons = [next(chain(_reasons(row, keep), [None])) for row in rows]
    seen: set[str] = set()
    for place, row in enumerate(rows):
        if reasons[place] is None:
            if row["response"] in seen and not keep["duplicates"]:
                reasons[place] = "duplicate"
            seen.add(row["response"])
    left = [place for place, why in enumerate(reasons) if why is None]
    most = len(left) if keep["per_prompt"] is None else keep["per_prompt"]
    if len(left) > most:
        Random(seed).shuffle(left)
        if keep["choose"] == "best":
            left.sort(key=lambda place: rows[place]["reward"], reverse=True)  # stable
        for place in left[most:]:
            reasons[place] = "per_prompt"
    return reasons


def _reasons(row: Row, keep: dict[str, Any]) -> Iterator[str]:
    """Yield every reason against a response that the other responses have no part in."""
    reward, tokens = row["reward"], len(row["token_ids"])
    if reward is None:
        yield "ungraded"
        reward = math.nan
    if not row["response"].strip():
        yield "empty"
    if keep["finished"] and row["finish_reason"] != "stop":
        yield "truncated"
    if keep["reward"] is not None and not reward >= keep["reward"]:
        yield "reward"
    if keep["min_tokens"] is not None and tokens < keep["min_tokens"]:
        yield "min_tokens"
    if keep["max_tokens"] is not None and tokens > keep["max_tokens"]:
        yield "max_tokens"
    script = keep["script"]
    if script and _foreign(row["response"], script["allowed"]) > script["max_other"]:
        yield "script"


def _foreign(text: str, allowed: Sequence[str]) -> float:
    """Return the share of a text's letters that are of none of the scripts; Common has none."""
    of_any = regex.compile(r"[\p{Script=Common}\p{Script=Inherited}]")
    of_allowed = regex.compile("[" + "".join(rf"\p{{Script={name}}}" for name in allowed) + "]")
    letters = [letter for letter in text if letter.isalpha() and not of_any.match(letter)]
    return sum(not of_allowed.match(letter) for letter in letters) / max(len(letters), 1)
