"""`distill`: the merge of several models into one, by on-policy distillation from each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from parallel.errors import hint
from parallel.settings import Count, Settings
from stages.domains import PromptRolloutSettings, RoutingSettings, SamplingSettings
from stages.guards.settings import MergeGateSettings
from stages.kinds.distill.losses import MethodSettings
from stages.kinds.distill.losses.reverse_kl import ReverseKLSettings
from stages.kinds.distill.losses.top_k import TopKReverseKLSettings
from stages.kinds.distill.source_settings import (
    SELF,
    CollectedDataSettings,
    SelfTeacherSettings,
    merge_data_rules,
    self_teacher_rules,
)
from stages.kinds.distill.teaching import PARENT
from stages.kinds.kind import (
    MODEL,
    SAMPLED,
    SOURCE,
    Inputs,
    RunBlocks,
    StageKind,
    TrainedStageSettings,
    Violations,
    register,
    with_domains,
)
from stages.kinds.rules import At, sampling_rules, under, warmup_rules

MOST_OFF = 1e-6  # by which weights of teachers may miss 1
Weighted = dict[str, float]  # weights by what they are of


def domain_of(label: str) -> str:
    """Return the domain of a teacher's label: DOMAIN, or DOMAIN/N where the domain has several."""
    return label.partition("/")[0]


def _teachers(value: Any) -> Any:
    """Reject what is no form of teachers, in one message instead of one for each."""

    def one_or_weighted(teachers: Any) -> bool:
        weighted = (
            isinstance(teachers, dict) and teachers and all(map(_is_number, teachers.values()))
        )
        return bool(weighted) or isinstance(teachers, str)

    by_domain = isinstance(value, dict) and all(map(one_or_weighted, value.values()))
    if not by_domain and not isinstance(value, str):
        message = (
            "should be a block, or a mapping of domains to blocks or stages, or to several of them"
            " with a weight each"
        )
        raise PydanticCustomError("teachers", message)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class TeacherMemorySettings(Settings):
    """The memory that teachers take, and that of the hidden states they leave for a step."""

    resident: Literal["one", "all"] = Field(
        default="one",
        description="teachers whose weights a rank holds. one: each is read from its files when its"
        " turn comes, with equal results. all: faster where they fit",
    )
    hidden_states: Literal["device", "host", "disk"] = Field(
        default="device",
        description="where a step's last hidden states of teachers are until the student's pass."
        " disk: in the stage's directory, one file a rank",
    )
    hidden_states_precision: Literal["model", "bf16", "fp16"] = Field(
        default="model", description="precision they are kept in; other than model's it rounds them"
    )


class DistillSamplingSettings(SamplingSettings):
    """The rollouts of one step, for each domain, whose teacher grades each alone."""

    group_size: Count = Field(default=1, description="responses to each prompt")


class DistillSettings(TrainedStageSettings):
    """Multi-teacher on-policy distillation: each prompt is graded by its own domain's teacher."""

    kind: Literal["distill"] = "distill"
    teachers: Annotated[str | dict[str, str | Weighted], BeforeValidator(_teachers)] = Field(
        description="teachers by domain; or one block for all: with for_each: domain, each domain's"
        " own stage of it. Several of a domain have weights, which sum to 1: `{math: {experts: 0.7,"
        f" ../other/run: 0.3}}}}`. Each is {SOURCE}; or self, the student with `self_teacher`"
    )
    self_teacher: SelfTeacherSettings = Field(
        default=SelfTeacherSettings(), description="the teacher `self`, where `teachers` names it"
    )
    teacher_memory: TeacherMemorySettings = TeacherMemorySettings()
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
    def _block_of_name(cls, method: Any) -> Any:
        return {"name": method} if isinstance(method, str) else method

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        start = self.method.start_model
        models = {start: start} if start not in (None, PARENT, self.from_) else {}
        teachers = self.teachers_of(domains).items()
        return Inputs(
            parent=self.from_,
            teachers={label: teacher for label, teacher in teachers if teacher != SELF},
            models=models,
            data={name: self.data[name].stage for name in domains if name in self.data},
        )

    def key_of(self, role: str, name: str = "") -> str:
        if role == "models":
            return "method.start"
        if role == "teachers":
            one = isinstance(self.teachers, str)
            return "teachers" if one else f"teachers.{domain_of(name)}"
        return super().key_of(role, name)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return the block, and the domains' rewards and advantages where the method reads them."""
        block = super().read(run, domains)
        weights = {name: self.teacher_weights(name) for name in domains}
        if several := {
            name: list(by_teacher.values())
            for name, by_teacher in weights.items()
            if len(by_teacher) > 1
        }:
            block["teacher_weights"] = several
        # Absent where they say nothing: else every finished merge would be stale.
        if not self.self_taught(domains):
            del block["self_teacher"]
        if not self.data_share:
            del block["data_share"]
        del block["data"]  # the lineage has what it names
        if self.method.needs_rewards:
            block["graded_by"] = {
                name: {
                    "advantage": run.domains[name].objective.advantage.model_dump(mode="json"),
                    **run.domains[name].model_dump(mode="json", include={"rewards"}),
                }
                for name in domains
            }
        return block

    def teachers_of(self, domains: Sequence[str]) -> Mapping[str, str]:
        """Return the teachers of domains that have any, as they are named, by label."""
        return {
            label: name for domain in domains for label, (name, _) in self._by_label(domain).items()
        }

    def teacher_weights(self, domain: str) -> Weighted:
        """Return the weight of each of a domain's teachers in its loss, by label."""
        return {label: weight for label, (_, weight) in self._by_label(domain).items()}

    def main_teacher(self, domain: str) -> str:
        """Return the label of a domain's teacher with the largest weight, the first of several."""
        weights = self.teacher_weights(domain)
        return max(weights, key=weights.__getitem__)

    def teacher_names(self, domain: str) -> dict[str, str]:
        """Return the names of a domain's teachers in metrics, by label; paths have numbers."""
        return {
            label: label.partition("/")[2] if "/" in name else name
            for label, (name, _) in self._by_label(domain).items()
        }

    def _by_label(self, domain: str) -> dict[str, tuple[str, float]]:
        """Return the name and weight of each of a domain's teachers."""
        teachers = (
            self.teachers if isinstance(self.teachers, str) else self.teachers.get(domain, {})
        )
        if isinstance(teachers, str):
            return {domain: (teachers, 1.0)}
        labels = (
            [f"{domain}/{n + 1}" for n in range(len(teachers))] if len(teachers) > 1 else [domain]
        )
        return dict(zip(labels, teachers.items(), strict=False))

    def self_taught(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains that the student itself teaches, and none beside it."""
        teachers = self.teachers_of(domains)
        return [domain for domain in domains if teachers.get(domain) == SELF]

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it reads."""
        shown = self.self_taught(domains) if self.self_teacher.context == "demonstration" else ()
        reads_data = [name for name in domains if self.data_share and name not in self.data]
        return [name for name in domains if name in reads_data or name in shown]

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        yield from super().run_keys(domains)
        yield from with_domains(["domains.{domain}.demonstrations"], self.demonstrated(domains))
        if self.self_teacher.context == "sibling":  # which responses are right
            yield from with_domains(["domains.{domain}.rewards"], self.self_taught(domains))

    def replay(self, run: RunBlocks, domains: Sequence[str]) -> str:
        return self.routing.replay

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        at = under(key)
        if self.from_ is None:
            yield at("from"), "must name what the student starts from"
        # With for_each: domain, a stage reads its own entry of those for all domains of the block.
        block_domains = [
            name for name in run.domains if self.domains is None or name in self.domains
        ]
        if isinstance(self.teachers, dict):
            taught = ", ".join(name for name in block_domains if name in self.teachers)
            if missing := [name for name in domains if name not in self.teachers]:
                names, it = f"domain {missing[0]}", "it"
                if len(missing) > 1:
                    names, it = f"domains {', '.join(missing)}", "them"
                instead = f", or leave {it} out of domains: [{taught}]" if taught else ""
                yield at("teachers"), f"no teacher for the {names}; add one{instead}"
        yield from self._weight_violations(at)
        by_domain = {
            "teachers": self.teachers,
            "domain_weights": self.domain_weights,
            "data": self.data,
        }
        for block, mapping in by_domain.items():
            for name in (
                sorted(set(mapping) - set(block_domains)) if isinstance(mapping, dict) else ()
            ):
                yield at(f"{block}.{name}"), f"no such domain: {name}; {hint(name, block_domains)}"
        yield from self._method_violations(under(f"{key}.method"), at, run, domains)
        if self.self_teacher != SelfTeacherSettings() and not self.self_taught(block_domains):
            why = "only read where a teacher is self; name self in teachers, or delete it"
            yield at("self_teacher"), why
        self_taught, group = self.self_taught(domains), self.sampling.group_size
        yield from self_teacher_rules(at, self.self_teacher, self.method, group, run, self_taught)
        of = self.data_share, self.data, self.method, self.sampling
        yield from merge_data_rules(at, *of, run, domains, self_taught)
        yield from warmup_rules(at, self.optimizer, self.loop)
        yield from sampling_rules(at, self.sampling, self.rollout, run)

    def _weight_violations(self, at: At) -> Violations:
        """Check the weights of domains with several teachers."""
        for domain, teachers in self.teachers.items() if isinstance(self.teachers, dict) else ():
            weights = teachers if isinstance(teachers, dict) else {}
            if SELF in weights and len(weights) > 1:
                yield (
                    at(f"teachers.{domain}"),
                    f"{SELF} is one of several teachers: a response without a context for it is"
                    " masked, and would lose the others' grades too; name it alone, or leave it"
                    " out",
                )
            for name, weight in weights.items():
                if not weight > 0 or not math.isfinite(weight):
                    yield (
                        at(f"teachers.{domain}"),
                        f"the weight of {name} is {weight:g}, but must be more than 0; leave the"
                        " teacher out, or give it a weight",
                    )
                    break
            else:
                if weights and abs(sum(weights.values()) - 1) > MOST_OFF:
                    total = f"the weights of the teachers sum to {sum(weights.values()):g}"
                    listed = ", ".join(f"{name}: {weight:g}" for name, weight in weights.items())
                    yield (
                        at(f"teachers.{domain}"),
                        f"{total}, but must sum to 1: {{{listed}}}; null drops a teacher of an"
                        " extended file",
                    )

    def _method_violations(
        self, method: At, at: At, run: RunBlocks, domains: Sequence[str]
    ) -> Violations:
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
        "stages.kinds.distill.work",
        "checkpoints",
        (*MODEL, *SAMPLED, "domains.{domain}.prompts"),
        DistillSettings,
        samples=True,
        audited=True,
    )
)
