"""Mistakes in the parts themselves."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "k3 is k2",
        "stages/objectives/kl.py",
        "return bounded_exp(difference) - difference - 1",
        "return difference.square() / 2",
        "tests/unit/objectives/test_kl.py",
    ),
    Mutant(
        "GSPO takes the sum of log-ratios",
        "stages/objectives/sequence_ratio.py",
        "return bounded_exp(sequence_means(log_ratio, mask)).unsqueeze(-1)",
        "return bounded_exp(log_ratio.masked_fill(~mask, 0).sum(-1)).unsqueeze(-1)",
        "tests/unit/objectives/test_ratios.py",
    ),
    Mutant(
        "the clip takes the better of two surrogates",
        "stages/objectives/surrogate.py",
        "gain, clipped = free.minimum(bound), bound < free",
        "gain, clipped = free.maximum(bound), bound < free",
        "tests/unit/objectives/test_ratios.py",
    ),
    Mutant(
        "IcePop keeps what is far off",
        "stages/objectives/correction.py",
        "(ratio < settings.low) | (ratio > settings.high)",
        "(ratio < settings.low) & (ratio > settings.high)",
        "tests/unit/objectives/test_correction.py",
    ),
    Mutant(
        "the sequence mask compares with pi_old",
        "stages/objectives/policy_loss.py",
        "            tokens.engine_log_probs,\n            tokens.advantages,",
        "            tokens.old_log_probs,\n            tokens.advantages,",
        "tests/unit/objectives/test_policy_loss.py",
    ),
    Mutant(
        "a failed grade is solved in an evaluation",
        "stages/evaluate.py",
        "return sample.reward is not None and solved",
        "return sample.reward is None or solved",
        "tests/unit/test_evaluate.py",
    ),
    Mutant(
        "gates are decided on the problems that are reported",
        "stages/evaluate.py",
        '"gate" if job.kind == "gate" else "held_out"',
        '"held_out"',
        "tests/unit/test_evaluate.py",
    ),
    Mutant(
        "training sees held-out prompts",
        "stages/domains/prompts.py",
        "return split_of(problem, self._settings.held_out_fraction) == self.split",
        "return True",
        "tests/unit/test_domains.py",
    ),
    Mutant(
        "steps do not wait for groups that would grow too old",
        "stages/backlog.py",
        "            if due >= room + later * self._backlog.sampling.prompts_per_step:",
        "            if due >= 10**9:",
        "tests/unit/test_slow_prompts.py",
    ),
    Mutant(
        "groups are trained on however old they are",
        "stages/backlog.py",
        "if self._version - group.weight_version > self._settings.max_staleness:",
        "if self._version - group.weight_version > 10**9:",
        "tests/unit/test_backlog.py",
    ),
    Mutant(
        "an engine's slice comes from another place of the parameter",
        "parallel/weights/planner.py",
        "Slice(chunk, ours + name, (offset, box[1]), theirs + tensor, box)",
        "Slice(chunk, ours + name, (box[0], box[1]), theirs + tensor, box)",
        "tests/unit/test_weight_plan.py",
    ),
    Mutant(
        "checksums of a checkpoint are not compared",
        "parallel/checkpoints.py",
        "return None if sha256(path) == expected else",
        "return None if sha256(path) else",
        "tests/layouts/test_checkpoints.py",
    ),
    Mutant(
        "the random numbers are not restored",
        "parallel/checkpoint_state.py",
        '    torch.set_rng_state(states["torch"])\n',
        "",
        "tests/layouts/test_checkpoints.py",
    ),
    Mutant(
        "a step that is not finite is saved",
        "stages/loop.py",
        "        if not finite:\n",
        "        if not finite and step < 0:\n",
        "tests/layouts/test_loop.py",
    ),
    Mutant(
        "a batch beyond max_logprob_difference is trained on",
        "stages/rollout_modes.py",
        'if mismatch["mismatch_max"] <= self.bound:\n                self.rollouts.drawn(step)',
        'if mismatch["mismatch_max"] <= 1e9:\n                self.rollouts.drawn(step)',
        "tests/unit/test_rollout_modes.py",
    ),
    Mutant(
        "load balance is not counted over the ranks",
        "parallel/routing.py",
        "            dist.all_reduce(load, group=router.tp_dp_cp_group)\n",
        "",
        "tests/layouts/test_layouts.py",
    ),
    Mutant(
        "a kept set is dropped",
        "parallel/responses.py",
        "targets, kept = self.batch.own_targets, self.batch.kept",
        "targets, kept = self.batch.own_targets, None",
        "tests/unit/test_expert.py tests/audit",
    ),
    Mutant(
        "gradients are averaged over the data-parallel ranks",
        "parallel/policy.py",
        "finalize_model_grads(model, None, **keywords)",
        "finalize_model_grads(model, torch.tensor(2), **keywords)",
        "tests/layouts/test_layouts.py",
    ),
]
