"""Which settings the audited steps of odd.yaml depend on, and which tests check the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stages.audit.evaluation import evaluation_rows
from stages.audit.recorded import NotAuditable, RecordedRun
from stages.audit.stage_audit import audit_step
from stages.kinds import settings_key

# The tests of what the audited steps do not depend on, or the cases of these tests, by the class of
# the setting or one that it inherits the setting from.
CHECKED_BY = {
    "CispoRatioSettings": "unit/objectives/test_ratios.py",
    "ClusterSettings": "pipeline/test_slurm_jobs.py",
    "ClusterSettings.restarts": "slurm/test_slurm.py",
    "CodeReward": "unit/test_code_reward.py",
    "ContainerSettings": "pipeline/test_slurm_jobs.py",
    "Correction": "unit/test_expert.py",
    "CriticSettings": "unit/test_critic.py",
    "DeepseekV3Architecture": "layouts/hugging_face_cases.py",
    "DomainSettings": "pipeline/test_graph.py",
    "DrawSettings": "layouts/sft_cases.py",
    "EngineSettings": "engine/test_client.py",
    "EngineSettings.check_refit": "engine/test_refit.py",
    "EngineSettings.count": "pipeline/test_engines.py",
    "EngineSettings.kv_cache_mebibytes": "unit/test_memory_counts.py",
    "EngineSettings.max_logprob_difference": "unit/fake_engines.py",
    "EngineSettings.max_restarts": "pipeline/test_engines.py",
    "EngineSettings.max_sequences": "unit/test_memory_counts.py",
    "EngineSettings.placement": "pipeline/test_engines.py",
    "EngineSettings.request_timeout_seconds": "engine/test_client.py",
    "EngineSettings.tensor": "unit/test_memory_counts.py",
    "EngineSettings.transport": "engine/test_refit.py",
    "EvaluationSettings": "unit/test_evaluate.py",
    "ExpertGateSettings": "pipeline/test_gates.py",
    "FileDemonstrationSettings": "unit/test_conversations.py",
    "FilePromptSettings": "unit/test_file_prompts.py",
    "FileSettings": "unit/test_file_prompts.py",
    "FormatReward": "unit/test_rewards.py",
    "FrontierSettings": "unit/test_curriculum.py",
    "GaeSettings": "unit/test_critic.py",
    "GateSettings": "pipeline/test_gates.py",
    "GeneratedDemonstrationSettings": "unit/test_domains.py",
    "GeometricRatioSettings": "unit/objectives/test_ratios.py",
    "GfpoSettings": "unit/objectives/test_advantages.py",
    "Glm4MoeArchitecture": "layouts/hugging_face_cases.py",
    "GuardSettings": "unit/test_guards.py",
    "InitializationSettings": "unit/test_model_families.py",
    "InstructionReward": "unit/test_rewards.py",
    "JSONSchemaReward": "unit/test_rewards.py",
    "JudgeReward": "unit/test_judge.py",
    "KindSettings": "pipeline/test_slurm_jobs.py",
    "LanguageReward": "unit/test_rewards.py",
    "LaunchSettings": "pipeline/test_attempts.py",
    "LayoutSettings": "layouts/cases.py",
    "LengthReward": "unit/test_rewards.py",
    "LoggingSettings": "unit/test_metrics.py",
    "LoggingSettings.auditable": "unit/test_evaluate.py",
    "LoopSettings": "layouts/cases.py",
    "LoopSettings.keep_best": "layouts/checkpoint_cases.py",
    "LoopSettings.keep_last": "layouts/checkpoint_cases.py",
    "LoopSettings.micro_batch_tokens": "unit/test_expert.py",
    "MathReward": "unit/test_rewards.py",
    "MergeGateSettings": "pipeline/test_gates.py",
    "MergeRolloutSettings": "unit/test_rollout_modes.py",
    "MixedSettings": "unit/test_expert.py",
    "ModelSettings": "layouts/hugging_face_cases.py",
    "ModelSettings.max_positions": "pipeline/test_config.py",
    "ModelSettings.tokenizer": "layouts/test_sft.py",
    "OptimizerSettings": "unit/test_critic.py",
    "OverlongReward": "unit/test_rewards.py",
    "PythonReward": "unit/test_rewards.py",
    "ReasoningGymPromptSettings": "unit/test_domains.py",
    "ReasoningGymReward": "unit/test_rewards.py",
    "ReinforcePPSettings": "unit/objectives/test_advantages.py",
    "RewardBase": "unit/test_reward_pool.py",
    "RewardPoolSettings": "unit/test_reward_pool.py",
    "RolloutSettings": "unit/test_backlog.py",
    "RolloutSettings.dynamic_sampling_by": "unit/test_expert.py",
    "RopeScaling": "layouts/hugging_face_cases.py",
    "RspoRatioSettings": "unit/objectives/test_ratios.py",
    "RunSettings": "pipeline/test_graph.py",
    "RunSettings.deterministic": "unit/test_replay.py",
    "RunSettings.seed": "pipeline/test_attempts.py",
    "SamplingSettings": "unit/test_kept_limits.py",
    "SamplingSettings.max_response_tokens": "unit/fake_engines.py",
    "SequenceMaskSettings": "unit/objectives/test_policy_loss.py",
    "SequenceRatioSettings": "unit/objectives/test_ratios.py",
    "SequenceTokenRatioSettings": "unit/objectives/test_ratios.py",
    "Standardised": "unit/objectives/test_advantages.py",
    "StopSettings": "unit/test_guards.py",
    "WindowGuardSettings": "unit/test_guards.py",
}
STEPS = {
    "cold_start": 4,
    "experts.chain_sum": 3,
    "experts.spell_backward": 3,
    "experts.number_sorting": 3,
    "merge": 4,
}
# The blocks of settings, each with the stage whose audit depends on it.
BLOCKS = {
    **{settings_key(stage): stage for stage in STEPS},
    "model": "cold_start",
    "evaluation": "evaluate",
}
OTHER: dict[str, dict[Any, Any]] = {  # beside numbers, which are made larger
    "algorithm": {"adam": "sgd", "sgd": "adam"},
    "decay": {"cosine": "linear", "linear": "cosine"},
    "replay": {"r3": "none", "none": "r3"},
    "aggregation": {"token_mean": "sequence_mean", "constant": "token_mean", "lambda": "constant"},
    "estimator": {"k3": "k2", "unbiased_k3": "k3", "full": "k3"},
    "reference": {"cold_start": "ema", "parent": "ema", "ema": "parent"},
    "std": {"population": "sample"},
    "by": {"reward_per_token": "length"},
    "scaling": {"none": "edge", "edge": "none"},
    "averaged_over": {"domains": "tokens"},
    "level": {"token": "sequence", "sequence": "token"},
    "samples": {"stale": "all"},
    "family": {"qwen3_moe": "mixtral"},
    "precision": {"fp32": "bf16"},
    "norm_epsilon": {1e-6: 1e-3},
}
NAMES = {  # what another algorithm of a block is, whole
    "objective.advantage": {"name": "dr_grpo"},
    "objective.ratio": {"name": "cispo", "cap": 0.9, "floor": 0.0},
    "objective.correction": {"name": "none"},
}
# Leaves that the audited step of a stage does not depend on, and why.
WITHOUT_EFFECT = {
    "loop.micro_batch_tokens": "how much is computed at once",
    "loop.checkpoint_every": "what is saved",
    "loop.keep_last": "what is saved",
    "loop.keep_best": "what is saved",
    "loop.async_checkpoints": "what is saved",
    "rollout": "which samples are drawn, by which weights: the audit takes those that were",
    "sampling.top_p": "the sets of stale samples are taken as they are",
    "sampling.top_k": "the sets of stale samples are taken as they are",
    "sampling.max_response_tokens": "ends responses; only the aggregation `constant` reads it",
    "optimizer.momentum": "of SGD alone",
    "optimizer.betas": "of Adam alone",
    "objective.lambda_learning_rate": "of the aggregation `lambda` alone",
    "objective.kl.coefficient": "steered, by kl.target, from where it begins",
    "objective.kl.ema_decay": "of the reference `ema` alone",
    "objective.sequence_mask.delta": "only where the mask is enabled",
    "objective.ratio.dual_clip": "null but in one domain",
    "objective.correction.level": "engine and trainer agree but for stale samples",
    "objective.correction.samples": "engine and trainer agree but for stale samples",
    "objective.correction.cap": "engine and trainer agree but for stale samples",
    "routing.replay": "engine and trainer route alike but for stale samples",
    "guards": "when to warn or stop, of metrics that are logged",
    "stop": "when to stop",
    "gate": "measured after the stage",
    "prompts": "which problems are drawn: the audit takes those that were",
    "demonstrations": "what a cold start learns from: the audit takes what it read",
    "curriculum": "which problems are drawn",
    "rewards.exact": "nothing is solved in so few steps: all its parts are 0",
    "rewards": "what a response earns; but for the weights, which are changed",
    "method": "there is one",
    "from": "tried by itself, since it needs another stage",
    "tokenizer": "the audit reads tokens",
    "max_positions": "how long a sample may be",
    "architecture": "of other families",
    "initialization": "where a cold start begins: the audit takes the weights before the step",
    "problems": "how many are drawn: the audit takes those that were",
    "sampling_seed": "which answers are drawn: the audit takes those that were",
}
# What other samples than those of this run would show.
BY_CHANCE = {
    ("domains.spell_backward", "objective.ratio.clip_low"): "what it clips is masked",
    ("domains.spell_backward", "objective.ratio.clip_high"): "what it clips is masked",
    ("domains.spell_backward", "objective.correction.samples"): "all samples are stale",
    ("domains.spell_backward", "objective.sequence_mask.delta"): "no sample is so near to it",
    ("domains.number_sorting", "objective.advantage.by"): "both keep the same responses",
    ("domains.number_sorting", "objective.ratio.clip_low"): "no ratio is so near to it",
    ("domains.number_sorting", "objective.correction"): "no ratio is near its cap",
    ("domains.number_sorting", "objective.mask_truncated"): "no response is cut off",
}
EFFECTIVE = {  # where a leaf that has no effect elsewhere does have one
    ("domains.spell_backward", "optimizer.momentum"),
    ("domains.spell_backward", "routing.replay"),
    ("domains.spell_backward", "objective.kl.coefficient"),
    ("domains.number_sorting", "objective.kl.coefficient"),
    ("merge", "routing.replay"),
    ("domains.spell_backward", "sampling.max_response_tokens"),
    ("domains.spell_backward", "objective.correction.level"),
    ("domains.chain_sum", "optimizer.betas"),
    ("domains.chain_sum", "sampling.top_p"),
    ("domains.chain_sum", "objective.ratio.dual_clip"),
    ("domains.chain_sum", "sampling.top_k"),
    ("domains.number_sorting", "sampling.top_p"),
    ("domains.number_sorting", "sampling.top_k"),
    ("domains.chain_sum", "objective.correction.cap"),
    ("domains.number_sorting", "optimizer.betas"),
    ("domains.number_sorting", "objective.lambda_learning_rate"),
    ("domains.number_sorting", "objective.kl.ema_decay"),
    ("cold_start", "optimizer.betas"),
    ("merge", "optimizer.betas"),
}


def differs(run: RecordedRun, block: str, key: str, value: Any) -> bool:
    """Return whether an audit differs, or is refused, under another value of a setting."""
    settings = copy.deepcopy(run.settings)
    *path, last = key.split(".")
    part = block_of(settings, block)
    for name in path:
        part = part[name]
    part[last] = value
    torch.set_num_threads(1)
    changed_run, stage = RecordedRun(run.path, settings), BLOCKS[block]
    try:
        if stage == "evaluate":
            rows = evaluation_rows(changed_run, stage)
        else:
            rows = audit_step(changed_run, stage, STEPS[stage]).rows
    except (KeyError, IndexError, RuntimeError, ValueError, NotAuditable):
        return True  # a model of another shape, an algorithm without its settings
    return not all(row.agrees for row in rows)


def changed(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a block with another value."""
    for name, value in block.items():
        key = f"{prefix}{name}"
        if key in NAMES:
            yield key, {**value, **NAMES[key]}
        if isinstance(value, dict) and value:
            yield from changed(value, f"{key}.")
        elif not isinstance(value, dict | list) and value in OTHER.get(name, {}):
            yield key, OTHER[name][value]
        elif isinstance(value, bool):
            yield key, not value
        elif isinstance(value, int):
            yield key, value + 1
        elif isinstance(value, float):
            yield key, value * 0.9 if value else 0.1
        elif isinstance(value, list):
            yield key, [each * 0.9 for each in value]
        elif not named(key) and name != "name" and value is not None:
            pytest.fail(f"{key}: no other value than {value!r} is known to try")


def is_effective(block: str, key: str) -> bool:
    """Return whether another value of a block's leaf has to show in the audit."""
    without = named(key) and (block, key) not in EFFECTIVE
    return not without and (block, key) not in BY_CHANCE


def named(key: str) -> bool:
    """Return whether a leaf is one of those without effect."""
    weight = key == "rewards.brief.weight"
    return not weight and any(key == each or key.startswith(f"{each}.") for each in WITHOUT_EFFECT)


def block_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A block of a run's settings, by its dotted key."""
    block: dict[str, Any] = settings
    for part in name.split("."):
        block = block[part]
    return block
