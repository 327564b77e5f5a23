"""`sample`: rejection sampling, the responses of a model that pass a filter, as data of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel.settings import MOST, Count, Fraction, Settings, Tokens
from stages.data.scripts import Script
from stages.domains import SamplingSettings
from stages.kinds.kind import (
    MODEL,
    SAMPLED,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    Violations,
    register,
)
from stages.kinds.rules import At, response_rules, too_few, under


class ScriptFilterSettings(Settings):
    """A filter of language mixing, by the Unicode scripts of a response's letters."""

    allowed: Annotated[tuple[Script, ...], Field(min_length=1)] = Field(
        description="scripts of the language, such as [Latin], or [Han, Hiragana, Katakana]"
    )
    max_other: Fraction = Field(
        default=0.0, description="maximum share of letters of other scripts in a response"
    )


class KeepSettings(Settings):
    """The filter of sampled responses; a response is kept that passes every part of it."""

    reward: float | None = Field(
        description="minimum reward, such as 1.0; null keeps responses of any reward"
    )
    per_prompt: Count | None = Field(
        default=None, description="most responses kept of one prompt; null: all that pass"
    )
    choose: Literal["random", "best"] = Field(
        default="random",
        description="which of more than per_prompt. random: a seeded draw. best: the highest"
        " rewards, and of equal ones a seeded draw",
    )
    min_tokens: Tokens | None = Field(
        default=None, description="minimum tokens of a response, end token included"
    )
    max_tokens: Tokens | None = Field(
        default=None, description="maximum tokens of a response, end token included"
    )
    finished: bool = Field(
        default=True,
        description="drop truncated responses; kept, fine-tuning teaches to end where they do",
    )
    script: ScriptFilterSettings | None = Field(
        default=None, description="drop responses with letters of other scripts (language mixing)"
    )
    duplicates: bool = Field(
        default=False, description="keep responses that equal an earlier one to the same prompt"
    )


class SampleSettings(StageSettings):
    """The sampling, grading and filtering of responses to training prompts.

    What is kept becomes collected.parquet, which an `sft` stage names in `data`.
    """

    kind: Literal["sample"] = "sample"
    prompts: Annotated[int, Field(gt=0, le=MOST)] = Field(
        description="training prompts of each domain, all different, to draw"
    )
    sampling: SamplingSettings | None = Field(
        default=None,
        description="responses to each prompt, and their distribution; prompts_per_step prompts"
        " are sampled at once and then saved. null: each domain's own",
    )
    keep: KeepSettings = Field(description="filter of the responses")

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        return Inputs(parent=self.from_)

    def sampled(self, run: RunBlocks, domain: str) -> SamplingSettings:
        """Return the settings that a domain is sampled with."""
        return self.sampling or run.domains[domain].sampling

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        samplings = {name: self.sampled(run, name).model_dump(mode="json") for name in domains}
        return {**self.model_dump(mode="json"), "sampling": samplings}

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        at = under(key)
        if self.from_ is None:
            yield at("from"), "must name what responses are sampled from"
        if self.prompts < run.layout.data:
            yield at("prompts"), f"{self.prompts} is {too_few(run.layout)}"
        if self.sampling is not None:
            yield from response_rules(at, self.sampling, run)
        for name in domains:
            where = at if self.sampling else under(f"domains.{name}")
            yield from self._domain_rules(at, where("sampling"), self.sampled(run, name))

    def _domain_rules(self, at: At, sampling: str, sampled: SamplingSettings) -> Violations:
        """Check the filter against what a domain is sampled with, as the key `sampling` says."""
        keep, longest = self.keep, sampled.max_response_tokens
        count = sampled.prompts_per_step * sampled.group_size
        if count > MOST:
            yield (
                f"{sampling}.prompts_per_step",
                f"{sampled.prompts_per_step} prompts x {sampled.group_size} samples are {count} at"
                f" once; at most {MOST} are allowed",
            )
        if keep.per_prompt is not None and keep.per_prompt > sampled.group_size:
            yield (
                at("keep.per_prompt"),
                f"{keep.per_prompt} is more than {sampling}.group_size = {sampled.group_size}"
                " responses to a prompt; lower it, or use null",
            )
        if keep.min_tokens is not None and keep.min_tokens > longest:
            yield (
                at("keep.min_tokens"),
                f"{keep.min_tokens} drops every response: {sampling}.max_response_tokens ="
                f" {longest}",
            )
        if keep.min_tokens and keep.max_tokens and keep.min_tokens > keep.max_tokens:
            yield (
                at("keep.max_tokens"),
                f"{keep.max_tokens} is less than keep.min_tokens = {keep.min_tokens}, which drops"
                " every response",
            )


SAMPLE = register(
    StageKind(
        "sample",
        "stages.kinds.sample.work",
        "data",
        (*MODEL, *SAMPLED, "domains.{domain}.prompts", "domains.{domain}.rewards"),
        SampleSettings,
        samples=True,
        audited=True,
    )
)
