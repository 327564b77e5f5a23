"""Rejection sampling: responses to training prompts, graded, filtered, and written as data.

What is drawn is saved part by part, with the filter's verdict on each response, and a resumed stage
continues after the last whole part. A part has the prompts of one step of one domain, and a digest.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.checkpoint import load
from parallel.distributed import is_main, on_main
from parallel.errors import UserError, report_notice
from parallel.files import keep_steps, read_checkpoint, sha256, weights_digest, write_atomically
from parallel.mismatch import bounds_of
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.collected import (
    Row,
    messages_type,
    prompt_columns,
    read_part,
    whole_part,
    write_joined,
    write_part,
)
from stages.data.problem import DomainError, Problem, seed_of
from stages.data.prompts import PromptStream
from stages.data.tokenizer import Tokenizer
from stages.domains import SamplingSettings
from stages.kinds.sample.keep import REASONS, drop_reasons
from stages.kinds.sample.settings import SampleSettings
from stages.metrics import MetricsLog, reward_metrics
from stages.objectives.groups import Group, groups_of
from stages.sampling.engines import StageEngines
from stages.sampling.logprob_check import check_samples
from stages.settings import StageJob

CHECKED = 64  # samples whose log-probabilities are compared
VERSION = 1  # of the weights: there is one checkpoint


@dataclass(frozen=True)
class DrawnPart:
    """The prompts `begin` to `end` of a domain, which are drawn and saved together."""

    number: int
    domain: str
    begin: int
    end: int
    size: int  # responses to each prompt


def run(job: StageJob) -> None:
    """Draw what is still to be drawn, then write what was kept. Collective."""
    stage = RejectionSampling(job)
    stage.draw()
    stage.finish()


class RejectionSampling:
    """The stage that samples from one model; the main rank grades, filters and writes."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        assert isinstance(job.block_settings, SampleSettings)
        assert job.parent is not None
        self.block_settings = job.block_settings
        self.sampled = {
            name: job.block_settings.sampled(job.settings, name) for name in job.domains
        }
        self.parts = parts_of(self.block_settings.prompts, self.sampled)
        self.policy = Policy(job.settings.model, job.settings.layout)
        self.engines = StageEngines(job, self.policy, job.own_domains)
        self.problems: dict[str, list[Problem]] = {}  # of the main rank
        on_main(self._take_problems)
        self.missing: list[DrawnPart] = on_main(self._missing)
        if is_main():
            done = self.parts[: len(self.parts) - len(self.missing)]
            self.drawn = sum(drawn_part.end - drawn_part.begin for drawn_part in done)
            keep_steps(job.files.metrics, self.drawn)
            self.log = MetricsLog(job, self.block_settings.prompts * len(job.domains))
            whole = read_checkpoint(job.parent)
            self.model = whole.digest if whole else weights_digest(job.parent)

    def draw(self) -> None:
        """Draw and save every missing part. Collective.

        Raises MismatchError when the engine's log-probabilities differ from the model's.
        """
        if not self.missing:
            return
        assert self.job.parent is not None
        load.weights(self.policy, self.job.parent)
        self.engines.sync_weights(VERSION)
        self._check()
        # One part ahead, so that engines have work while the longest responses of a part end; not
        # where the bits of a response may depend on the requests beside it.
        ahead = 0 if self.job.settings.deterministic else 1
        requested: deque[list[Group]] = deque()  # of the main rank, until their part is saved
        for place, drawn_part in enumerate(self.missing):
            if is_main():
                for following in self.missing[place + len(requested) : place + ahead + 1]:
                    requested.append(self._request(following))
            self._collect(drawn_part, requested.popleft() if is_main() else [])
        self.engines.sleep()

    def finish(self) -> None:
        """Write collected.parquet, and last collection.json. Collective.

        Raises UserError where the filter left nothing; then all that was drawn is in drawn.parquet.
        """
        self.engines.close()
        on_main(self._write)
        if is_main():
            self.log.close()

    def file(self, drawn_part: DrawnPart) -> Path:
        """Return the file of a part."""
        return self.job.files.drawn / f"part_{drawn_part.number:06d}.parquet"

    def _take_problems(self) -> None:
        """Take the prompts of every domain: training prompts, all different."""
        settings = self.job.settings
        for name, domain in self.job.own_domains.items():
            longest = settings.longest_prompt(self.sampled[name])
            stream = PromptStream(
                domain.prompts,
                self.engines.tokenizer,
                name,
                settings.seed,
                self.job.seeded_as,
                longest=longest,
            )
            try:
                self.problems[name] = stream.take_distinct(self.block_settings.prompts)
            except DomainError as error:
                raise UserError(f"{error}, or lower {self._key}.prompts") from error
        # All go into one file at the end, which must not fail after everything was drawn.
        chats = [
            (name, messages)
            for name, problems in self.problems.items()
            for problem in problems
            if (messages := prompt_columns(problem)["messages"]) is not None
        ]
        messages_type(chats)

    def _missing(self) -> list[DrawnPart]:
        """Return the parts after the last whole one; delete what is there of them."""
        whole = 0
        for drawn_part in self.parts:
            rows = read_part(self.file(drawn_part))
            if rows is None or not self._is_of(rows, drawn_part):
                if self.file(drawn_part).exists():
                    why = "damaged" if rows is None else "of other prompts"
                    report_notice(
                        f"{self.file(drawn_part)} is {why}; drawing it again, and all after it"
                    )
                break
            whole += 1
        if self.job.files.drawn.is_dir():
            whole_files = {self.file(drawn_part) for drawn_part in self.parts[:whole]}
            for file in self.job.files.drawn.iterdir():
                if file not in whole_files:
                    file.unlink()
        return self.parts[whole:]

    def _is_of(self, rows: list[Row], drawn_part: DrawnPart) -> bool:
        """Return whether rows are the responses to the prompts of a part."""
        prompts = self.problems[drawn_part.domain][drawn_part.begin : drawn_part.end]
        return [row["problem"] for row in rows] == [
            problem.key for problem in prompts for _ in range(drawn_part.size)
        ]

    def _check(self) -> None:
        """Compare the log-probabilities of some responses with the policy's. Collective."""
        name = self.job.domains[0]
        sampling = self.sampled[name]

        def draw(attempt: int) -> list[Sample]:
            if self.engines.version is None:
                self.engines.sync_weights(VERSION)
            groups: list[Group] = []
            if is_main():
                purpose = f"check, attempt {attempt}" if attempt else "check"
                seed = seed_of(self.job.settings.seed, self.job.seeded_as, name, purpose)
                groups = groups_of(self.problems[name][:CHECKED], 1, seed)
                self.engines.request(groups, sampling)
            samples = self.engines.wait_for(groups, VERSION)
            # On shared devices, so that the policy has room for the pass that compares.
            self.engines.sleep()
            return samples

        bounds = bounds_of(self.job.settings.model, self.job.settings.engine)
        check_samples(self.policy, draw, sampling.temperature, bounds)
        if self.engines.version is None:
            self.engines.sync_weights(VERSION)

    def _request(self, drawn_part: DrawnPart) -> list[Group]:
        problems = self.problems[drawn_part.domain][drawn_part.begin : drawn_part.end]
        seed = seed_of(self.job.settings.seed, self.job.seeded_as, drawn_part.domain)
        groups = groups_of(problems, drawn_part.size, seed + drawn_part.begin * drawn_part.size)
        self.engines.rewards.expect(groups)
        self.engines.request(groups, self.sampled[drawn_part.domain])
        return groups

    def _collect(self, drawn_part: DrawnPart, groups: list[Group]) -> None:
        """Wait for the grades of a part, filter and save it. Collective."""

        def graded() -> bool | None:
            return all(self.engines.rewards.graded(group) for group in groups) or None

        self.engines.wait(graded, VERSION)
        if not is_main():
            return
        failures = [failure for group in groups for failure in group.failures]
        self.engines.rewards.check_failures(failures, sum(len(group.slots) for group in groups))
        rows = [row for group in groups for row in self._rows(group)]
        self.drawn += len(groups)
        samples = [sample for group in groups for sample in group.samples]
        dropped = Counter(row["dropped"] for row in rows)
        metrics = {
            **reward_metrics(samples),
            "unfinished": sum(not sample.finished for sample in samples) / len(samples),
            "response_tokens": sum(len(sample.response) for sample in samples) / len(samples),
            "sampled_tokens": float(sum(len(sample.response) for sample in samples)),
            "drawn": float(len(rows)),
            "kept": float(dropped[None]),
            **{f"dropped/{why}": float(dropped[why]) for why in REASONS if dropped[why]},
            "reward_failures": float(len(failures)),
            "watch_failures": float(sum(len(group.watch_failures) for group in groups)),
        }
        # The line first: killed in between, the part is drawn again, and the line written again.
        self.log.write(self.drawn, metrics, domain=drawn_part.domain)
        write_part(self.file(drawn_part), rows)

    def _rows(self, group: Group) -> list[Row]:
        """Return the responses of a group as rows, with the filter's verdict on each."""
        prompt, shared = prompt_columns(group.problem), {"model": self.model}
        rows = [
            {
                **prompt,
                **response_columns(sample, self.engines.tokenizer),
                **shared,
                "stage": self.job.seeded_as,  # not its name, so that a renamed stage repeats
                "seed": group.seed + number,
            }
            for number, sample in enumerate(group.samples)
        ]
        seed = seed_of(self.job.settings.seed, self.job.seeded_as, group.problem.key, "keep")
        reasons = drop_reasons(rows, self.block_settings.keep, seed)
        return [{**row, "dropped": why} for row, why in zip(rows, reasons, strict=True)]

    def _write(self) -> None:
        files, part_files = self.job.files, [self.file(drawn_part) for drawn_part in self.parts]
        counts = self._counts()
        total: Counter[str] = Counter()
        for domain_counts in counts.values():
            total.update(domain_counts["dropped"])
        responses = sum(domain_counts["drawn"] for domain_counts in counts.values())
        if not any(domain_counts["kept"] for domain_counts in counts.values()):
            write_joined(files.all_drawn, part_files, only_kept=False)
            left = nothing_left(f"{self._key}.keep", responses, total, files.all_drawn)
            raise UserError(f"{left}, and rerun with --from {self.job.stage}")
        for name, domain_counts in counts.items():
            if not domain_counts["kept"]:
                dropped = listed(domain_counts["dropped"])
                report_notice(f"{self._key}.keep: nothing is left of the domain {name}: {dropped}")
        files.all_drawn.unlink(missing_ok=True)
        rows = write_joined(files.collected, part_files, only_kept=True)
        collection = {
            "digest": sha256(files.collected),
            "rows": rows,
            "drawn": responses,
            "dropped": dict(total),
            "model": self.model,
            "domains": counts,
        }
        write_atomically(files.collection, json.dumps(collection, indent=2) + "\n")

    def _counts(self) -> dict[str, dict[str, Any]]:
        """Return the counts of every domain, from its parts."""
        counts: dict[str, dict[str, Any]] = {}
        for name in self.job.domains:
            why: Counter[str | None] = Counter()
            for drawn_part in self.parts:
                if drawn_part.domain == name:
                    why.update(row["dropped"] for row in whole_part(self.file(drawn_part)))
            counts[name] = {
                "prompts": self.block_settings.prompts,
                "drawn": why.total(),
                "kept": why[None],
                "dropped": {reason: why[reason] for reason in REASONS if why[reason]},
            }
        return counts

    @property
    def _key(self) -> str:
        return f"stages.{self.job.block}"


def parts_of(prompts: int, sampled: dict[str, SamplingSettings]) -> list[DrawnPart]:
    """Return the parts of all domains: `prompts_per_step` prompts each, the last maybe fewer."""
    drawn_parts: list[DrawnPart] = []
    for name, sampling in sampled.items():
        for begin in range(0, prompts, sampling.prompts_per_step):
            end = min(begin + sampling.prompts_per_step, prompts)
            drawn_parts.append(DrawnPart(len(drawn_parts), name, begin, end, sampling.group_size))
    return drawn_parts


def response_columns(sample: Sample, tokenizer: Tokenizer) -> Row:
    """Return the columns of a sampled and graded response."""
    return {
        "response": tokenizer.decode(sample.response),
        "tokens": len(sample.response),
        "token_ids": sample.response.tolist(),
        "reward": sample.reward,
        "reward_parts": sorted((sample.reward_parts or {}).items()),
        "finish_reason": "stop" if sample.finished else "length",
        "weight_version": sample.weight_version,
    }


def nothing_left(key: str, responses: int, dropped: Counter[str], file: Path) -> str:
    """Return the message about a filter that keeps nothing."""
    return (
        f"{key}: nothing is left of {responses} responses: {listed(dropped)}; they are in {file}; "
        "relax the filter, or sample from a better model"
    )


def listed(dropped: dict[str, int]) -> str:
    """Return the number of responses dropped for each reason, the most frequent first."""
    order = sorted(dropped, key=lambda why: (-dropped[why], REASONS.index(why)))
    return ", ".join(f"{dropped[why]} by {why}" for why in order)
