"""`distill`: the merge of several models into one, by on-policy distillation from each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from parallel.errors import hint
from parallel.settings import Count
from stages.domains import PromptRolloutSettings, RoutingSettings, SamplingSettings
from stages.guards.settings import MergeGateSettings
from stages.kinds.kind import (
    MODEL,
    SAMPLED,
    SOURCE,
    Found,
    Inputs,
    RunBlocks,
    StageKind,
    TrainedStageSettings,
    register,
)
from stages.kinds.rules import sampling_rules, under, warmup_rules


def _teachers(value: Any) -> Any:
    """Reject what is neither form, in one message instead of one for each."""
    by_domain = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if not by_domain and not isinstance(value, str):
        message = "should be a block, or a mapping of domains to blocks or stages"
        raise PydanticCustomError("teachers", message)
    return value


class DistillSamplingSettings(SamplingSettings):
    """The rollouts of one step, for each domain, whose teacher grades each alone."""

    group_size: Count = Field(default=1, description="responses to each prompt")


class DistillSettings(TrainedStageSettings):
    """Multi-teacher on-policy distillation: each prompt is graded by its own domain's teacher."""

    kind: Literal["distill"] = "distill"
    teachers: Annotated[str | dict[str, str], BeforeValidator(_teachers)] = Field(
        description="teachers by domain; or one block for all: with for_each: domain, each domain's"
        f" own stage of it. Each is {SOURCE}"
    )
    method: Literal["full_vocab_reverse_kl"] = Field(
        default="full_vocab_reverse_kl", description="loss"
    )
    averaged_over: Literal["domains", "tokens"] = Field(
        default="domains",
        description="domains: mean over domains of each one's mean over tokens. tokens: mean over"
        " all tokens, most of them of the domain with the longest responses",
    )
    domain_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="relative weights of domains in that mean; of the others 1"
    )
    sampling: DistillSamplingSettings = DistillSamplingSettings()
    rollout: PromptRolloutSettings = PromptRolloutSettings()
    routing: RoutingSettings = RoutingSettings()
    gate: MergeGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        return Inputs(parent=self.from_, teachers=self.teachers_of(domains))

    def key_of(self, role: str, name: str = "") -> str:
        one = role == "teachers" and isinstance(self.teachers, str)
        return "teachers" if one else super().key_of(role, name)

    def teachers_of(self, domains: Sequence[str]) -> Mapping[str, str]:
        """Return the teacher of each domain that has one, as it is named."""
        if isinstance(self.teachers, str):
            return dict.fromkeys(domains, self.teachers)
        return {name: self.teachers[name] for name in domains if name in self.teachers}

    def replay(self, run: RunBlocks, domains: Sequence[str]) -> str:
        return self.routing.replay

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Found:
        at = under(key)
        if self.from_ is None:
            yield at("from"), "must name what the student starts from"
        # With for_each: domain, a stage reads its own entry of those for all domains of the block.
        known = [name for name in run.domains if self.domains is None or name in self.domains]
        if isinstance(self.teachers, dict):
            taught = ", ".join(name for name in known if name in self.teachers)
            if missing := [name for name in domains if name not in self.teachers]:
                names, it = f"domain {missing[0]}", "it"
                if len(missing) > 1:
                    names, it = f"domains {', '.join(missing)}", "them"
                instead = f", or leave {it} out of domains: [{taught}]" if taught else ""
                yield at("teachers"), f"no teacher for the {names}; add one{instead}"
        for block, named in (("teachers", self.teachers), ("domain_weights", self.domain_weights)):
            for name in sorted(set(named) - set(known)) if isinstance(named, dict) else ():
                yield at(f"{block}.{name}"), f"no such domain: {name}; {hint(name, known)}"
        yield from warmup_rules(at, self.optimizer, self.loop)
        yield from sampling_rules(at, self.sampling, self.rollout, run)


DISTILL = register(
    StageKind(
        "distill",
        "stages.distill",
        "checkpoints",
        (*MODEL, *SAMPLED, "domains.{domain}.prompts"),
        DistillSettings,
        samples=True,
    )
)
