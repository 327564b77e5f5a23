"""The settings of sequences that a merge trains on beside the student's own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from parallel.settings import Settings
from stages.data.settings import GeneratedDemonstrationSettings, ReasoningGymPromptSettings
from stages.domains import SamplingSettings
from stages.kinds.distill.teaching import MethodBase
from stages.kinds.kind import Found, RunBlocks
from stages.kinds.rules import At


class CollectedDataSettings(Settings):
    """The responses to a domain's prompts that a stage collected."""

    stage: str = Field(
        description="a stage that collects responses, or the path of its directory in another run"
    )


def given_prompts(share: float, sampling: SamplingSettings) -> int:
    """Return how many of a step's prompt groups of a domain are data instead of samples."""
    return round(share * sampling.prompts_per_step)


def merge_data_rules(
    at: At,
    share: float,
    data: Mapping[str, CollectedDataSettings],
    method: MethodBase,
    sampling: SamplingSettings,
    run: RunBlocks,
    domains: Sequence[str],
    self_taught: Sequence[str],
) -> Found:
    """Check the share of data, and what each domain takes it from."""
    if not share:
        if data:
            yield at("data"), "only read with data_share above 0; set that, or delete it"
        return
    per_step, data_prompts = sampling.prompts_per_step, given_prompts(share, sampling)
    whole = math.isclose(share * per_step, data_prompts, abs_tol=1e-6)
    if not whole or not 0 < data_prompts < per_step:
        yield (
            at("data_share"),
            f"{share:g} x {at('sampling.prompts_per_step')} = {per_step} must be a whole number of"
            f" a step's groups, from 1 to {per_step - 1}; change either",
        )
    if method.samples:
        yield (
            at("data_share"),
            f"method {method.name} estimates a gradient from what the student samples, which data"
            " is not; use a method over the vocabulary, or 0",
        )
    for name in self_taught:
        yield (
            at("data_share"),
            f"the teacher of {name} is self, which grades the student's own samples: a"
            " demonstration would be graded by a teacher that reads it; name another teacher, or"
            " use 0",
        )
    for name in domains:
        of = run.domains[name]
        generated = isinstance(of.demonstrations, GeneratedDemonstrationSettings)
        if name in data or not generated or isinstance(of.prompts, ReasoningGymPromptSettings):
            continue
        yield (
            at("data_share"),
            f"domains.{name}.demonstrations are generated, which requires prompts.source:"
            f" reasoning_gym, not {of.prompts.source}; use source jsonl or parquet there, or name"
            f" a stage in data.{name}",
        )
