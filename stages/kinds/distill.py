"""`distill`: the merge of several models into one, by on-policy distillation from each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
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
    with_domains,
)
from stages.kinds.merge_data import CollectedDataSettings, merge_data_rules
from stages.kinds.rules import At, sampling_rules, under, warmup_rules
from stages.kinds.self_teacher import SELF, SelfTeacherSettings, self_teacher_rules
from stages.objectives.distillation import MethodSettings
from stages.objectives.distillation.reverse_kl import ReverseKLSettings
from stages.objectives.distillation.top_k import TopKReverseKLSettings
from stages.objectives.teaching import PARENT


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
        f" own stage of it. Each is {SOURCE}; or self, the student with `self_teacher`"
    )
    self_teacher: SelfTeacherSettings = Field(
        default=SelfTeacherSettings(), description="the teacher `self`, where `teachers` names it"
    )
    method: MethodSettings = Field(
        default=ReverseKLSettings(), description="loss of a token; its name, or a block with keys"
    )
    averaged_over: Literal["domains", "tokens", "gap"] = Field(
        default="domains",
        description="domains: mean over domains of each one's mean over tokens. tokens: mean over"
        " all tokens, most of them of the domain with the longest responses. gap: as domains, each"
        " weighted by the `teacher_kl` that is left, a moving average of the steps before",
    )
    domain_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="relative weights of domains in that mean; of the others 1"
    )
    data_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of a step's sequences of each domain that come from `data` instead of"
        " the student, and that its teacher grades alike; 0: all are the student's samples",
    )
    data: dict[str, CollectedDataSettings] = Field(
        default={},
        description="what domains take that share from, by domain: {stage: NAME}; a domain that is"
        " not named takes its own demonstrations",
    )
    sampling: DistillSamplingSettings = DistillSamplingSettings()
    rollout: PromptRolloutSettings = PromptRolloutSettings()
    routing: RoutingSettings = RoutingSettings()
    gate: MergeGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _block_of_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        start = self.method.start_model
        models = {start: start} if start not in (None, PARENT, self.from_) else {}
        named = self.teachers_of(domains).items()
        return Inputs(
            parent=self.from_,
            teachers={domain: teacher for domain, teacher in named if teacher != SELF},
            models=models,
            data={name: self.data[name].stage for name in domains if name in self.data},
        )

    def key_of(self, role: str, name: str = "") -> str:
        if role == "models":
            return "method.start"
        one = role == "teachers" and isinstance(self.teachers, str)
        return "teachers" if one else super().key_of(role, name)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return the block, and the domains' rewards and advantages where the method reads them."""
        found = super().read(run, domains)
        # Absent where they say nothing: else every finished merge would be stale.
        if not self.self_taught(domains):
            del found["self_teacher"]
        if not self.data_share:
            del found["data_share"]
        del found["data"]  # the lineage has what it names
        if self.method.needs_rewards:
            found["graded_by"] = {
                name: {
                    "advantage": run.domains[name].objective.advantage.model_dump(mode="json"),
                    **run.domains[name].model_dump(mode="json", include={"rewards"}),
                }
                for name in domains
            }
        return found

    def teachers_of(self, domains: Sequence[str]) -> Mapping[str, str]:
        """Return the teacher of each domain that has one, as it is named."""
        if isinstance(self.teachers, str):
            return dict.fromkeys(domains, self.teachers)
        return {name: self.teachers[name] for name in domains if name in self.teachers}

    def self_taught(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains that the student itself teaches."""
        named = self.teachers_of(domains)
        return [domain for domain in domains if named.get(domain) == SELF]

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it reads."""
        shown = self.self_taught(domains) if self.self_teacher.context == "demonstration" else ()
        given = [name for name in domains if self.data_share and name not in self.data]
        return [name for name in domains if name in given or name in shown]

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        yield from super().run_keys(domains)
        yield from with_domains(["domains.{domain}.demonstrations"], self.demonstrated(domains))
        if self.self_teacher.context == "sibling":  # which responses are right
            yield from with_domains(["domains.{domain}.rewards"], self.self_taught(domains))

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
        by_domain = {
            "teachers": self.teachers,
            "domain_weights": self.domain_weights,
            "data": self.data,
        }
        for block, named in by_domain.items():
            for name in sorted(set(named) - set(known)) if isinstance(named, dict) else ():
                yield at(f"{block}.{name}"), f"no such domain: {name}; {hint(name, known)}"
        yield from self._method_violations(under(f"{key}.method"), at, run, domains)
        if self.self_teacher != SelfTeacherSettings() and not self.self_taught(known):
            why = "only read where a teacher is self; name self in teachers, or delete it"
            yield at("self_teacher"), why
        own, group = self.self_taught(domains), self.sampling.group_size
        yield from self_teacher_rules(at, self.self_teacher, self.method, group, run, own)
        of = self.data_share, self.data, self.method, self.sampling
        yield from merge_data_rules(at, *of, run, domains, own)
        yield from warmup_rules(at, self.optimizer, self.loop)
        yield from sampling_rules(at, self.sampling, self.rollout, run)

    def _method_violations(
        self, method: At, at: At, run: RunBlocks, domains: Sequence[str]
    ) -> Found:
        """Check the method's keys, and what it reads of the domains."""
        for name, message in self.method.violations(self.sampling.group_size):
            yield method(name), message
        vocabulary = run.model.vocabulary_size
        if isinstance(self.method, TopKReverseKLSettings) and self.method.k > vocabulary:
            yield method("k"), f"{self.method.k} is more than model.vocabulary_size = {vocabulary}"
        for name in domains if self.method.needs_rewards else ():
            advantage = run.domains[name].objective.advantage
            if advantage.baseline == "critic":
                yield (
                    method("name"),
                    f"{self.method.name} reads advantages, but domains.{name}.objective.advantage"
                    f" {advantage.name} needs a critic, which a merge does not train; use another"
                    " advantage there, or a method without rewards",
                )
            elif advantage.baseline == "group" and self.sampling.group_size < 2:
                yield (
                    at("sampling.group_size"),
                    f"{self.method.name} reads advantages, and a group of one has none: it is its"
                    f" own mean; use 2 or more, or advantage reinforce_pp in domains.{name}",
                )


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
