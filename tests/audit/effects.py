"""The settings that odd.yaml's audited steps depend on, and the tests of all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stages.audit.evaluation import evaluation_rows
from stages.audit.recorded import NotAuditable, RecordedRun
from stages.audit.stage_audit import audit_step

# The tests of settings that no audited step depends on, by the setting's class or a base of it.
CHECKED_BY = {
    "CispoRatioSettings": "stages/objectives/test_ratios.py",
    "ClusterSettings": "pipeline/test_cluster_profiles.py",
    "ClusterSettings.array_task_throttle": "pipeline/test_slurm_jobs.py",
    "ClusterSettings.gpu_memory_gib": "pipeline/test_capacity.py",
    "ClusterSettings.network_interface": "pipeline/test_slurm_jobs.py",
    "ClusterSettings.restarts": "slurm/test_slurm.py",
    "ClusterSettings.setup": "pipeline/test_slurm_jobs.py",
    "CodeReward": "stages/test_code_reward.py",
    "BestWorstPairSettings": "pipeline/test_dpo_settings.py",
    "BestWorstPairSettings.max_tokens": "stages/test_pairs.py",
    "CollectedDataSettings": "pipeline/test_merge_sources.py",
    "ContainerSettings": "pipeline/test_slurm_jobs.py",
    "ConversationFileSettings": "stages/test_conversations.py",
    "CriticSettings": "stages/test_critic.py",
    "DareSettings": "stages/test_weight_methods.py",
    "DeepseekV3Architecture": "layouts/hugging_face_cases.py",
    "GptOssArchitecture": "layouts/hugging_face_cases.py",
    "GptOssRopeScaling": "layouts/hugging_face_cases.py",
    "GptOssRopeScaling.truncate": "parallel/test_model_families.py",
    "DomainSettings": "pipeline/test_graph.py",
    "DomainDemonstrationsSettings": "stages/test_sft_mixture.py",
    "DpoSettings": "layouts/dpo_cases.py",
    "DomainEvaluationSettings": "stages/test_evaluate.py",
    "DrawSettings": "layouts/sft_cases.py",
    "EngineSettings": "engine/test_client.py",
    "EngineSettings.check_refit": "engine/test_refit.py",
    "EngineSettings.count": "pipeline/test_engines.py",
    "EngineSettings.expert_parallel": "engine/test_arguments.py",
    "EngineSettings.kv_cache_mebibytes": "parallel/test_memory_counts.py",
    "EngineSettings.max_high_ratio": "parallel/test_mismatch.py",
    "EngineSettings.max_logprob_difference": "fake_engines.py",
    "EngineSettings.max_mean_logprob_difference": "parallel/test_mismatch.py",
    "EngineSettings.max_restarts": "pipeline/test_engines.py",
    "EngineSettings.max_sequences": "parallel/test_memory_counts.py",
    "EngineSettings.placement": "pipeline/test_engines.py",
    "EngineSettings.request_timeout_seconds": "engine/test_client.py",
    "EngineSettings.tensor": "parallel/test_memory_counts.py",
    "EngineSettings.transport": "engine/test_refit.py",
    "EngineSettings.weights": "engine/test_arguments.py",
    "EvaluationSettings": "stages/test_evaluate.py",
    "FileDemonstrationSettings": "stages/test_conversations.py",
    "FilePromptSettings": "stages/test_file_prompts.py",
    "FileSettings": "stages/test_file_prompts.py",
    "FormatReward": "stages/test_rewards.py",
    "FrontierSettings": "stages/test_curriculum.py",
    "GaeSettings": "stages/test_critic.py",
    "GainGateSettings": "pipeline/test_gates.py",
    "GateSettings": "pipeline/test_gates.py",
    "GeneratedDemonstrationSettings": "stages/test_domains.py",
    "GeometricRatioSettings": "stages/objectives/test_ratios.py",
    "GfpoSettings": "stages/objectives/test_advantages.py",
    "Glm4MoeArchitecture": "layouts/hugging_face_cases.py",
    "GuardSettings": "stages/test_guards.py",
    "ImportanceSettings": "stages/test_expert.py",
    "InitializationSettings": "parallel/test_model_families.py",
    "InstructionReward": "stages/test_rewards.py",
    "JSONSchemaReward": "stages/test_json_schemas.py",
    "ToolCallReward": "stages/test_tool_calls.py",
    "IpoSettings": "stages/objectives/test_preference.py",
    "JsonlPairSettings": "stages/test_pairs.py",
    "JsonlSourceSettings": "stages/test_sft_mixture.py",
    "JudgeReward": "stages/test_judge.py",
    "KindSettings": "pipeline/test_cluster_profiles.py",
    "KindSettings.gpu_memory_gib": "pipeline/test_capacity.py",
    "LanguageReward": "stages/test_rewards.py",
    "LaunchSettings": "pipeline/test_attempts.py",
    "LaunchSettings.hang_timeout_seconds": "pipeline/test_launcher.py",
    "KeepSettings": "stages/test_sample.py",
    "LayoutSettings": "layouts/cases.py",
    "LayoutSettings.dispatcher": "parallel/test_capabilities.py",
    "LayoutSettings.recompute_modules": "layouts/test_recompute.py",
    "LengthReward": "stages/test_rewards.py",
    "LoggingSettings": "stages/test_metrics.py",
    "LoggingSettings.auditable": "stages/test_evaluate.py",
    "LoggingSettings.response_log": "stages/test_rollout_log.py",
    "LoggingSettings.tokens": "stages/test_recording.py",
    "LoggingSettings.wandb": "stages/test_trackers.py",
    "LoopSettings": "layouts/loop_cases.py",
    "LoopSettings.keep_best": "layouts/checkpoint_cases.py",
    "LoopSettings.keep_last": "layouts/checkpoint_cases.py",
    "LoopSettings.micro_batch_tokens": "stages/toys.py",
    "LossGateSettings": "pipeline/test_quantize_settings.py",
    "MathReward": "stages/test_rewards.py",
    "MergeGateSettings": "pipeline/test_gates.py",
    "MergeWeightsSettings": "pipeline/test_merge_weights_settings.py",
    "MethodBase": "stages/objectives/test_distillation.py",
    "ModelSettings": "layouts/hugging_face_cases.py",
    "ModelSettings.chat_template_arguments": "pipeline/test_chat_template_settings.py",
    "ModelSettings.chat_template_date": "pipeline/test_chat_template_settings.py",
    "ModelSettings.end_tokens": "stages/test_end_tokens.py",
    "ModelSettings.max_positions": "pipeline/test_rules.py",
    "ModelSettings.tokenizer": "layouts/test_sft.py",
    "OptimizerSettings": "stages/test_critic.py",
    "OptimizerSettings.cpu_offload": "layouts/host_state_cases.py",
    "OptimizerSettings.precision_aware": "layouts/fake_ranks.py",
    "OverlongReward": "stages/test_rewards.py",
    "ParquetPairSettings": "stages/test_pairs.py",
    "ParquetSourceSettings": "stages/test_sft_mixture.py",
    "PromptRolloutSettings": "stages/test_rollout_modes.py",
    "PromptTemplateSettings": "stages/test_prompt_template.py",
    "PythonReward": "stages/test_rewards.py",
    "QuantizeSettings": "pipeline/test_quantize_settings.py",
    "RamSettings": "stages/test_weight_methods.py",
    "Qwen35MoeArchitecture": "layouts/hugging_face_cases.py",
    "ReasoningGymPromptSettings": "stages/test_domains.py",
    "ReasoningGymPromptSettings.form": "stages/test_reasoning_gym_scorers.py",
    "ReasoningGymPromptSettings.instruction": "stages/test_reasoning_gym_scorers.py",
    "ReasoningGymReward": "stages/test_rewards.py",
    "RecalibrationSettings": "pipeline/test_merge_weights_settings.py",
    "ReinforcePPBaselineSettings": "stages/objectives/test_advantages.py",
    "ReinforcePPSettings": "stages/objectives/test_advantages.py",
    "RewardBase": "stages/test_reward_pool.py",
    "RewardBase.thought_markers": "stages/test_thoughts.py",
    "ToolFileSettings": "stages/test_rows_from_outside.py",
    "RewardPoolSettings": "stages/test_reward_pool.py",
    "RolloutSettings": "stages/test_backlog.py",
    "RolloutSettings.dynamic_sampling_by": "stages/test_expert.py",
    "RopeScaling": "layouts/hugging_face_cases.py",
    "RoutingLossSettings": "layouts/dpo_cases.py",
    "RspoRatioSettings": "stages/objectives/test_ratios.py",
    "RunSettings": "pipeline/test_graph.py",
    "RunSettings.deterministic": "stages/test_replay.py",
    "RunSettings.seed": "pipeline/test_attempts.py",
    "SamplingSettings": "stages/test_kept_limits.py",
    "SamplingSettings.max_response_tokens": "fake_engines.py",
    "SceSettings": "stages/test_weight_methods.py",
    "SelfTeacherSettings": "stages/test_self_teacher.py",
    "SequenceMaskSettings": "stages/objectives/test_policy_loss.py",
    "SequenceRatioSettings": "stages/objectives/test_ratios.py",
    "SequenceTokenRatioSettings": "stages/objectives/test_ratios.py",
    "SampleSettings": "pipeline/test_sample_settings.py",
    "ScriptFilterSettings": "stages/test_sample.py",
    "SftSettings": "stages/test_sft_mixture.py",
    "StageSettings": "pipeline/test_stage_blocks.py",
    "StageSettings.for_each": "pipeline/conftest.py",
    "SigmoidSettings": "stages/objectives/test_preference.py",
    "SourceSettings": "layouts/dpo_cases.py",
    "StageSourceSettings": "stages/test_sft_mixture.py",
    "Standardised": "stages/objectives/test_advantages.py",
    "StopSettings": "stages/test_guards.py",
    "TaskArithmeticSettings": "stages/test_weight_methods.py",
    "TiesSettings": "stages/test_weight_methods.py",
    "WindowGuardSettings": "stages/test_guards.py",
}


def block_key(stage: str) -> str:
    """Return the key of the block that a stage of odd.yaml trains by."""
    experts, _, domain = stage.partition("experts.")
    return f"domains.{domain}" if domain else f"stages.{experts}"


STEPS = {
    "cold_start": 4,
    "experts.chain_sum": 3,
    "experts.spell_backward": 3,
    "experts.number_sorting": 3,
    "merge": 4,
    "mixed": 3,
    "tuned": 3,
}
# The blocks of settings, each with the stage whose audit depends on it. The objectives of `mixed`
# are those of the domains.
BLOCKS = {
    **{block_key(stage): stage for stage in STEPS if stage != "mixed"},
    "model": "cold_start",
    "evaluation": "evaluate",
}
OTHER: dict[str, dict[Any, Any]] = {  # numbers are increased instead
    "algorithm": {"adam": "sgd", "sgd": "adam"},
    "decay": {"cosine": "linear", "linear": "cosine"},
    "replay": {"r3": "none", "none": "r3"},
    "aggregation": {"token_mean": "sequence_mean", "constant": "token_mean", "lambda": "constant"},
    "estimator": {"k3": "k2", "unbiased_k3": "k3", "full": "k3"},
    "reference": {
        **{"cold_start": "ema", "parent": "ema", "ema": "parent"},
        "experts.chain_sum": "parent",
    },
    "std": {"population": "sample"},
    "by": {"reward_per_token": "length"},
    "scaling": {"none": "edge", "edge": "none"},
    "averaged_over": {"domains": "tokens"},
    "method": {"full_vocab_reverse_kl": {"name": "jsd", "beta": 0.5}},
    "level": {"token": "sequence", "sequence": "token"},
    "samples": {"stale": "all"},
    "logprobs": {"mean": "sum"},
    "family": {"qwen3_moe": "mixtral"},
    "precision": {"fp32": "bf16"},
    "norm_epsilon": {1e-6: 1e-3},
}
NAMES = {  # another algorithm of a block, with all its keys
    "objective.advantage": {"name": "dr_grpo"},
    "objective.ratio": {"name": "cispo", "cap": 0.9, "floor": 0.0},
    "objective.correction": {"name": "none"},
}
# Leaves without effect on a stage's audited step, with the reason.
WITHOUT_EFFECT = {
    "loop.micro_batch_tokens": "tokens that are computed at once",
    "loop.checkpoint_every": "checkpoints only",
    "loop.keep_last": "checkpoints only",
    "loop.keep_best": "checkpoints only",
    "loop.async_checkpoints": "checkpoints only",
    "rollout": "which samples are used: the audit reads the recorded ones",
    "sampling.top_p": "the sets of stale samples are taken as they are",
    "sampling.top_k": "the sets of stale samples are taken as they are",
    "sampling.max_response_tokens": "ends responses; only the aggregation `constant` reads it",
    "optimizer.momentum": "of SGD alone",
    "optimizer.betas": "of Adam alone",
    "optimizer.precision_aware": "in which precision its state is kept",
    "optimizer.cpu_offload": "where its state is kept",
    "objective.lambda_learning_rate": "of the aggregation `lambda` alone",
    "objective.kl.coefficient": "the initial value; kl.target changes it",
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
    "prompts": "which problems are used: the audit reads the recorded ones",
    "demonstrations": "the data of a cold start: the audit reads the recorded samples",
    "curriculum": "which problems are used",
    "rewards.exact": "nothing is solved after three steps: all its parts are 0",
    "rewards": "the recorded rewards; their weights are changed",
    "data": "which pairs are used: the audit reads the recorded ones",
    "loss.name": "each loss has its own keys; the formulas are compared in test_formulas",
    "from": "tried separately, since it needs another stage",
    "teachers": "tried separately, since it needs other stages",
    "kind": "tried separately, since a kind has its own keys",
    "for_each": "tried separately, since it needs another name",
    "as": "tried separately, since it needs another name",
    "domains": "tried separately, since it needs another name",
    "after": "when the stage starts",
    "was": "which random numbers were drawn: the audit reads the recorded samples",
    "tokenizer": "the audit reads tokens",
    "max_positions": "how long a sample may be",
    "architecture": "of other families",
    "initialization": "initial weights: the audit reads the weights before the step",
    "problems": "how many are used: the audit reads the recorded ones",
    "sampling_seed": "which answers are sampled: the audit reads the recorded ones",
}
# Leaves whose effect does not show in this run's samples.
BY_CHANCE = {
    ("domains.spell_backward", "objective.ratio.clip_low"): "what it clips is masked",
    ("domains.spell_backward", "objective.ratio.clip_high"): "what it clips is masked",
    ("domains.spell_backward", "objective.correction.samples"): "all samples are stale",
    ("domains.spell_backward", "objective.sequence_mask.delta"): "no sample is so near to it",
    ("domains.number_sorting", "objective.advantage.by"): "both keep the same responses",
    ("domains.number_sorting", "objective.ratio.clip_low"): "no ratio is so near to it",
    ("domains.number_sorting", "objective.correction"): "no ratio is near its cap",
    ("domains.number_sorting", "objective.mask_truncated"): "no response is truncated",
    ("stages.tuned", "optimizer.decay"): "linear and cosine meet at the middle of the decay",
}
EFFECTIVE = {  # leaves with an effect only here
    ("domains.spell_backward", "optimizer.momentum"),
    ("domains.spell_backward", "routing.replay"),
    ("domains.spell_backward", "objective.kl.coefficient"),
    ("domains.number_sorting", "objective.kl.coefficient"),
    ("stages.merge", "routing.replay"),
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
    ("stages.cold_start", "optimizer.betas"),
    ("stages.merge", "optimizer.betas"),
    ("stages.tuned", "optimizer.betas"),
}


def differs(run: RecordedRun, block: str, key: str, value: Any) -> bool:
    """Return true if the audit differs, or is refused, under another value of a setting."""
    settings = copy.deepcopy(run.settings)
    *path, last = key.split(".")
    leaf_block = block_of(settings, block)
    for name in path:
        leaf_block = leaf_block[name]
    leaf_block[last] = value
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
    """Yield every leaf of a block with another value."""
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
            yield key, [element * 0.9 for element in value]
        elif not named(key) and name != "name" and value is not None:
            pytest.fail(f"{key}: no other value than {value!r} is known to try")


def is_effective(block: str, key: str) -> bool:
    """Return true if another value of a block's leaf must show in the audit."""
    without = named(key) and (block, key) not in EFFECTIVE
    return not without and (block, key) not in BY_CHANCE


def named(key: str) -> bool:
    """Return true if a leaf is listed as without effect."""
    weight = key == "rewards.brief.weight"
    return not weight and any(
        key == prefix or key.startswith(f"{prefix}.") for prefix in WITHOUT_EFFECT
    )


def block_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a block of a run's settings, by its dotted key."""
    block: dict[str, Any] = settings
    for key in name.split("."):
        block = block[key]
    return block
