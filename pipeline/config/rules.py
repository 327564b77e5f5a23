"""Rules between blocks of settings that are valid by their schema, block by block.

A block's rules on itself stand with it: `parallel.settings`, `stages.objectives.loss` and the
kinds of rewards. All yield (dotted key, message).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from parallel.engine_rules import engine_rules
from parallel.errors import hint
from parallel.families import FAMILIES, architecture, family_violations, full_attention_layers
from parallel.layout_rules import layout_violations, optimizer_violations
from parallel.settings import (
    CHARACTERS,
    TOKENIZER_SIZE,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
)
from pipeline.config.unroll import Blocks, graph_rules, pair_rules, policies
from stages.data.settings import (
    PLACEHOLDER,
    FileDemonstrationSettings,
    FilePromptSettings,
    PromptTemplateSettings,
    ReasoningGymPromptSettings,
    template_of,
)
from stages.domains import DomainSettings, PolicySettings
from stages.guards.settings import GainGateSettings
from stages.kinds.evaluate.settings import EvaluationSettings
from stages.kinds.export.settings import ExportSettings
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.kind import Violations
from stages.kinds.quantize.settings import QuantizeSettings
from stages.kinds.rules import At, policy_rules, too_few, under
from stages.kinds.sft.settings import SftSettings
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.loss import ObjectiveSettings
from stages.objectives.surrogate import ImportanceSettings
from stages.rewards.kinds.python import PythonReward
from stages.rewards.reward import RewardContext, RewardPoolSettings
from stages.settings import RunSettings

BOUNDS = ("max_mismatch", "min_router_agreement", "max_drift", "max_router_movement", "max_kl")
DOMAIN_NAME = r"[A-Za-z0-9_-]{1,100}"
DOMAIN_RULE = "a domain's name must be 1 to 100 letters, digits, _ or -, since it names a directory"


def unreadable(run: RunSettings) -> Violations:
    """Yield the broken rules without which not even a run of an older version can be shown.

    They make the model's architecture and the graph of stages. Every other rule is about what may
    start: a run that has started is shown, compared and bundled whatever this version would start.
    """
    yield from _architecture_rules(run.model)
    yield from graph_rules(run)


def violations(
    run: RunSettings, *, graph: bool = True, starting: Collection[str] | None = None
) -> Violations:
    """Yield every broken rule of a run's settings; without `graph`, not of what stages refer to.

    With `starting`, only of these stages, of their domains, and of the blocks that all share.
    """
    yield from _model_rules(run.model, run.layout)
    yield from _engine_rules(run.model, run.engine)
    yield from _quantized_rollout_rules(run, starting)
    uses = _uses(run)
    trained_on = {name for stage in Blocks(run).among(starting) for name in stage.domains}
    for name, domain in run.domains.items():
        if starting is None or name in trained_on:
            yield from _domain_rules(name, domain, run.rewards, run, uses[name])
    yield from _split_rules(run.domains)
    # Before the rules of stages, which resolve references: a broken graph has none to resolve.
    broken = [*graph_rules(run)] if graph else []
    yield from broken
    if not broken:
        yield from _stage_rules(run, starting)
        if graph:
            # The stages of a block with for_each break a rule alike: it is reported once.
            yield from dict.fromkeys(pair_rules(run, starting))
            yield from _requantized(run, starting)
    yield from evaluation_rules(run.evaluation, run.layout)
    yield from answer_rules(run)


def domain_violations(name: str, domain: DomainSettings, pool: RewardPoolSettings) -> Violations:
    """Yield the broken rules of a domain outside a run."""
    yield from _domain_rules(name, domain, pool, None, _Use())
    yield from policy_rules(under(f"domains.{name}"), domain, domain.rewards, None)


def policy_cautions(settings: RunSettings) -> Violations:
    """Yield each valid setting of a policy with an effect that is easy to miss."""
    precision = settings.model.precision
    for at, policy, objective in policies(settings):
        correction, replay = objective.correction, policy.routing.replay
        if not isinstance(correction, ImportanceSettings):
            continue
        if correction.samples == "auto" and correction.applies_to_all(replay, precision):
            why = (
                "routing.replay is none" if replay == "none" else f"model.precision is {precision}"
            )
            yield (
                at("objective.correction"),
                "all samples are weighted by pi_old / mu, not only stale ones, since "
                f"{why}; set samples: stale to weight only those",
            )


# Model, layout and engine.


def _model_rules(model: ModelSettings, layout: LayoutSettings) -> Violations:
    # Stages check a tokenizer from a directory.
    if model.tokenizer == CHARACTERS and model.vocabulary_size != TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} must be {TOKENIZER_SIZE}, the number of token ids of "
            f"tokenizer: {CHARACTERS}",
        )
    yield from layout_violations(model, layout)
    # The family's rules read the architecture, so it must be valid.
    yield from list(_architecture_rules(model)) or family_violations(model, layout)


def _architecture_rules(model: ModelSettings) -> Violations:
    try:
        architecture(model)
    except ValidationError as error:
        keys = FAMILIES[model.family].further.model_fields
        for details in error.errors():
            key = ".".join(map(str, ("model.architecture", *details["loc"])))
            if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
                yield key, f"unknown key of {model.family}; {hint(str(details['loc'][0]), keys)}"
            else:
                should = details["msg"].removeprefix("Input ")
                yield key, f"{should}, not {json.dumps(details['input'], default=str)}"


def _engine_rules(model: ModelSettings, engine: EngineSettings) -> Violations:
    longest = engine.max_model_tokens
    if longest > model.max_positions:
        more = f"{longest} is more than model.max_positions = {model.max_positions}"
        yield "engine.max_model_tokens", more
    if any(_architecture_rules(model)) or not full_attention_layers(model):
        return  # which `_model_rules` says
    yield from engine_rules(model, engine)


# Stages.


def _stage_rules(run: RunSettings, starting: Collection[str] | None) -> Violations:
    """Check the `starting` stages by their kind, optimizers, and what their gates may measure."""
    broken: dict[tuple[str, str], None] = {}  # two stages may state the same in their domain
    for stage in Blocks(run).among(starting):
        block, key, domains = stage.settings, stage.key, stage.domains
        broken.update(dict.fromkeys(block.violations(key, run, domains)))
        trained, policy = block.trained_by(run, domains), block.policy(run, domains)
        at, objectives = under(key), [policy.objective] if policy else []
        if isinstance(block, GrpoSettings):
            at = block.keys(key, domains, domains[0])
            objectives = [*block.objectives(run, domains).values()]
        optimizers = {"optimizer": trained[0]} if trained and trained[0] else {}
        if policy and isinstance(advantage := policy.objective.advantage, GaeSettings):
            optimizers["objective.advantage.critic.optimizer"] = advantage.critic.optimizer
        for name, optimizer in optimizers.items():
            for setting, message in optimizer_violations(optimizer, run.model, run.layout):
                broken[at(f"{name}.{setting}"), message] = None
        if stage.gate is not None and (gate := block.gated):
            if gate.problems < run.layout.data:
                few = f"{gate.problems} is {too_few(run.layout)}"
                broken[f"{key}.gate.problems", few] = None
            coldest = min(run.answer_sampling(name).temperature for name in domains)
            for message in _repeated(gate.samples_per_problem, coldest):
                broken[f"{key}.gate.samples_per_problem", message] = None
            if isinstance(gate, GainGateSettings):
                broken.update(dict.fromkeys(_bound_rules(key, gate, policy, objectives, at)))
    yield from broken


def _bound_rules(
    key: str,
    gate: GainGateSettings,
    policy: PolicySettings | None,
    objectives: Sequence[ObjectiveSettings],
    at: At,
) -> Violations:
    """Yield the gate's limits on metrics that the stage never logs."""
    if policy is None:
        for name in BOUNDS:
            if (bound := getattr(gate, name)) is not None:
                yield f"{key}.gate.{name}", f"{bound:g} limits a metric of rollouts; use null"
        return
    rollout, replay = policy.rollout, policy.routing.replay
    for name, never, when, instead in (
        (
            "max_kl",
            not any(objective.kl.coefficient for objective in objectives),
            f"not logged with {at('objective.kl.coefficient')} = 0",
            "or a coefficient above 0",
        ),
        (
            "max_drift",
            not rollout.max_steps_ahead and rollout.oversampling == 1,
            f"not logged with {at('rollout.max_steps_ahead')} = 0 and no oversampling, where "
            "no sample is stale",
            "",
        ),
        (
            "min_router_agreement",
            replay != "r3",
            f"not logged with {at('routing.replay')} = {replay}",
            "or r3",
        ),
        (
            "max_router_movement",
            not any(objective.ratio.needs_router_shift for objective in objectives),
            f"only logged with {at('objective.ratio.name')} = rspo",
            "",
        ),
    ):
        if never and (bound := getattr(gate, name)) is not None:
            use = ", ".join(filter(None, ("use null", instead)))
            yield f"{key}.gate.{name}", f"{bound:g} limits a metric that is {when}; {use}"


# Domains.


@dataclass
class _Use:
    """The use that the stages of a run make of a domain.

    `objectives` are those that blocks state for it, by block; `shown_in` is the first block that
    trains on its demonstrations, and `longest` the most response tokens that a stage samples.
    """

    objectives: dict[str, ObjectiveSettings] = field(default_factory=dict)
    shown_in: str | None = None
    longest: int = 0


def _uses(run: RunSettings) -> dict[str, _Use]:
    """Return the use of every domain, in one walk of the stages."""
    uses = {name: _Use() for name in run.domains}
    for name, block in run.stages.items():
        key, block_domains = f"stages.{name}", run.domains_of(block)
        if isinstance(block, GrpoSettings) and block.objective:
            for domain in block_domains:
                uses[domain].objectives[key] = block.objective
        if isinstance(block, SftSettings):
            for domain in block.demonstrated(block_domains):
                uses[domain].shown_in = uses[domain].shown_in or key
    for _, domains, sampling, _ in run.rollouts():
        for domain in domains:
            uses[domain].longest = max(uses[domain].longest, sampling.max_response_tokens)
    return uses


def _domain_rules(
    name: str,
    domain: DomainSettings,
    pool: RewardPoolSettings,
    run: RunSettings | None,
    use: _Use,
) -> Violations:
    key = f"domains.{name}"
    if not re.fullmatch(DOMAIN_NAME, name):
        yield key, DOMAIN_RULE
    yield from _reward_rules(f"{key}.rewards", domain, pool)
    for where, objective in {key: domain.objective, **use.objectives}.items():
        if objective.advantage.needs_step_rewards:
            yield from _step_rules(f"{key}.rewards", domain, f"{where}.objective")
            break  # the same rewards: once is enough
    yield from _prompt_rules(name, domain, run, use.longest)
    if run and use.shown_in:
        yield from _demonstration_rules(f"{key}.demonstrations", domain, run.model, use.shown_in)


def _prompt_rules(
    name: str, domain: DomainSettings, run: RunSettings | None, longest: int
) -> Violations:
    """Check a domain's prompts against all that sample them."""
    key, prompts = f"domains.{name}", domain.prompts
    if template := template_of(prompts):
        yield from _template_rules(f"{key}.prompts.template", template)
    if run and isinstance(prompts, FilePromptSettings) and prompts.max_prompt_tokens:
        response = max(domain.sampling.max_response_tokens, longest)
        if prompts.max_prompt_tokens + response > run.engine.max_model_tokens:
            yield (
                f"{key}.prompts.max_prompt_tokens",
                f"{prompts.max_prompt_tokens} prompt and {response} response tokens exceed "
                f"engine.max_model_tokens = {run.engine.max_model_tokens}",
            )


def _template_rules(key: str, template: PromptTemplateSettings) -> Violations:
    """Check a template of prompts."""
    if (count := template.user.count(PLACEHOLDER)) != 1:
        how = "{prompt}, where the row's prompt stands, must be in it once"
        yield f"{key}.user", f"{how}, not {count} times"
    if template.form == "text" and template.system is not None:
        yield f"{key}.system", "a prompt of form: text has no messages; write it into user"


def _demonstration_rules(
    key: str, domain: DomainSettings, model: ModelSettings, block: str
) -> Violations:
    """Check the demonstrations that `block` trains on against the domain's prompts and model."""
    demonstrations, most = domain.demonstrations, model.max_positions
    if isinstance(demonstrations, FileDemonstrationSettings):
        if (longest := demonstrations.max_tokens) and longest > most:
            yield f"{key}.max_tokens", f"{longest} is more than model.max_positions = {most}"
    elif (unfit := _no_compact_text(domain)) is not None:
        yield (
            f"{key}.source",
            f"generated demonstrations require {unfit}; use jsonl or parquet, or start without"
            f" {block}: extends: pipelines/experts-merge-from-weights.yaml, with"
            " model.initial_weights",
        )


def _no_compact_text(domain: DomainSettings) -> str | None:
    """Return which setting has no text that demonstrations are generated for, or None."""
    if not isinstance(prompts := domain.prompts, ReasoningGymPromptSettings):
        return f"prompts.source: reasoning_gym, not {prompts.source}"
    return None if prompts.form == "compact" else f"prompts.form: compact, not {prompts.form}"


def _reward_rules(key: str, domain: DomainSettings, pool: RewardPoolSettings) -> Violations:
    if not any(reward.weight for reward in domain.rewards.values()):
        yield key, "every weight is 0, so that all responses score the same; give one a weight"
    for name, reward in domain.rewards.items():
        reward_key, longest = f"{key}.{name}", domain.sampling.max_response_tokens
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield (
                reward_key,
                "a reward's name must be letters, digits, _ or -, since it names a metric",
            )
        yield from reward.rules(RewardContext(reward_key, domain.prompts.source, longest, pool))


def _step_rules(key: str, domain: DomainSettings, objective: str) -> Violations:
    """Check that the rewards at `key` score steps, as advantage `process` requires."""
    python_rewards = [
        reward for reward in domain.rewards.values() if isinstance(reward, PythonReward)
    ]
    required = f"{objective}.advantage process requires step rewards"
    if not python_rewards:
        yield key, f"{required}, which only kind: python has"
    elif all(
        reward.unfinished == "zero" or reward.timed_out is not None for reward in python_rewards
    ):
        yield (
            key,
            f"{required}, and a truncated or timed-out response has none; set unfinished: score "
            "and timed_out: null in the reward with steps",
        )


def _split_rules(domains: Mapping[str, DomainSettings]) -> Violations:
    """Require one fraction, since the split is by text and two domains may share prompts."""
    first, *others = domains
    shared = domains[first].prompts.held_out_fraction
    for name in others:
        if (fraction := domains[name].prompts.held_out_fraction) != shared:
            yield (
                f"domains.{name}.prompts.held_out_fraction",
                f"{fraction} must be {shared}, as in domains.{first}, or one domain could train on "
                "another's evaluation prompts",
            )


# The evaluation, which `braid evaluate` overrides.


def evaluation_rules(evaluation: EvaluationSettings, layout: LayoutSettings) -> Violations:
    """Yield the broken rules of an evaluation."""
    if evaluation.problems < layout.data:
        yield "evaluation.problems", f"{evaluation.problems} is {too_few(layout)}"
    for message in _repeated(evaluation.samples_per_problem, evaluation.temperature):
        yield "evaluation.samples_per_problem", message


def answer_rules(run: RunSettings) -> Violations:
    """Check how each domain's held-out problems are answered."""
    size, broken = run.model.vocabulary_size, dict[tuple[str, str], None]()
    for name, domain in run.domains.items():
        evaluation, sampling = domain.evaluation, run.answer_sampling(name)
        if sampling.top_k > size:
            key = "evaluation" if evaluation.top_k is None else f"domains.{name}.evaluation"
            more = f"{sampling.top_k} is more than model.vocabulary_size = {size}"
            broken[f"{key}.top_k", f"{more}; use 0 for all tokens"] = None
        if evaluation.temperature is not None:
            for message in _repeated(run.evaluation.samples_per_problem, evaluation.temperature):
                broken[f"domains.{name}.evaluation.temperature", message] = None
    yield from broken


def _repeated(samples: int, temperature: float) -> Iterator[str]:
    if samples > 1 and temperature == 0:
        why = "greedy answers to a problem are identical"
        yield f"{samples} {why}; use 1, or a temperature above 0"


def _requantized(run: RunSettings, starting: Collection[str] | None) -> Violations:
    """Yield each stage that would export or quantize a quantized model, as (dotted key, message).

    Its checkpoint has the weights that the quantized ones stand for, in the model's precision: an
    export would write those.
    """
    blocks = Blocks(run)
    for stage in blocks.among(starting):
        parent = blocks.inputs(stage).parent
        parent_stage = (
            blocks.by_name.get(blocks.resolve(parent, stage.domain) or "") if parent else None
        )
        if parent_stage is None or not isinstance(parent_stage.settings, QuantizeSettings):
            continue
        if isinstance(stage.settings, ExportSettings):
            yield (
                f"{stage.key}.from",
                f"{parent_stage.name} is quantized, and its stage already leaves the export:"
                f" stages/{parent_stage.name}/huggingface; remove this stage, or export"
                f" {parent_stage.settings.from_}",
            )
        elif isinstance(stage.settings, QuantizeSettings):
            yield (
                f"{stage.key}.from",
                f"{parent_stage.name} is quantized already; name the model before that,"
                f" {parent_stage.settings.from_}",
            )


def _quantized_rollout_rules(run: RunSettings, starting: Collection[str] | None) -> Violations:
    """Require that fp8 rollouts are corrected for: mu is then never the policy, not even fresh."""
    if run.engine.weights != "fp8":
        return
    for at, policy, objective in policies(run, starting):
        correction, replay = objective.correction, policy.routing.replay
        if isinstance(correction, ImportanceSettings):
            if correction.applies_to_all(replay, run.model.precision):
                continue
            yield (
                at("objective.correction.samples"),
                f"{correction.samples} leaves fresh samples uncorrected, which engine.weights: fp8 "
                "samples from another distribution than the policy; use all",
            )
        else:
            yield (
                at("objective.correction"),
                "none, but engine.weights: fp8 samples from another distribution than the policy; "
                "use tis or icepop, with samples: all",
            )
