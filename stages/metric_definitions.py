"""Every metric a stage may log: its denominator, its meaning, and its healthy values. No torch.

`make docs` writes docs/reference/metrics.md from here; MetricsLog refuses any other name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stages.metric_ranges import RANGES


class Metric(NamedTuple):
    """A metric of metrics.jsonl; `denominator` is what its sum is divided by."""

    denominator: str
    meaning: str
    healthy: str = ""


# By denominator: name: "meaning | healthy values". RANGE stands for the metric's range in RANGES,
# and the bound of an alarm follows where that is another one.
_TABLE = {
    "step": {
        "loss": "the objective, normalised once by the step's global count | SFT, DPO, merge:"
        " falls. GRPO: near 0, and says little",
        "gradient_norm": "norm of the whole gradient before clipping | steady; a jump of ten times"
        " precedes trouble",
        "learning_rate": "learning rate of this step | follows the schedule",
        "too_long": "conversations, pairs or prompts skipped for their length, also prefetched |"
        " near 0; else raise `demonstrations.max_tokens`, `data.NAME.max_tokens`,"
        " `prompts.max_prompt_tokens`",
        "reward_failures": "samples whose reward failed, also of replaced and dropped prompts; in"
        " evaluation, since the line before | 0; the stage stops above"
        " `rewards.max_failed_fraction`",
        "watch_failures": "failures of rewards of weight 0, counted as in `reward_failures`; the"
        " samples keep other rewards | 0; `reward/NAME` is the mean where it did not fail",
        "reward_drop": "highest mean `reward` of `guards.reward_collapse.window` steps, minus the"
        " last window's | near 0; growing, learning is lost. Guard `reward_collapse`",
        "format_gain": "rise over `guards.format_gain.window` steps of weighted rewards that judge"
        " no answer, minus any rise of those that do | 0. Guard `format_gain`",
        "resampled_groups": "prompts that `rollout.dynamic_sampling` replaced | 0 where it is off;"
        " steadily at its bound, the domain is solved or out of reach",
        "passed_over": "prompts that `curriculum.name: frontier` passed over | `candidates` - 1"
        " for each prompt taken",
        "length_inflation": "mean `wrong_over_right` of `guards.length_inflation.window` steps"
        " over the first window's | near 1; growing, wrong answers grow. Guard `length_inflation`",
        "length_exponent": "lambda of the aggregation `lambda`; above 0 long responses weigh more"
        " | settles; drifting far below 0, brevity is all that is learned",
        "value_explained_variance": "share of the returns' variance that the critic's values"
        " explain; with `gae` | rises to 1; below 0, more `critic.warmup_steps` or a higher rate",
        "kl_coefficient": "coefficient of the KL in this step; with `objective.kl.target` |"
        " settles once `kl` is near the target",
        "kl_coefficient/NAME": "coefficient of the KL of domain NAME, in a stage on several with a"
        " target | as `kl_coefficient`, which is logged where all domains share it",
        "length_exponent/NAME": "lambda of domain NAME, in a stage on several with the aggregation"
        " `lambda` | as `length_exponent`, which is logged where all domains share it",
        "token_share/NAME": "share of the step's tokens that domain NAME has | what the domain"
        " would weigh with `averaged_over: tokens`",
        "data_token_share/NAME": "share of domain NAME's learned tokens that are of `data`; with"
        " `data_share` | near it where data are as long as what the student writes",
        "sampled_token_share/NAME": "share of domain NAME's learned tokens that the student"
        " sampled; with `data_share` | 1 - `data_token_share/NAME`",
        "data_too_long/NAME": "data of domain NAME skipped for their length; with `data_share` |"
        " near 0; else raise `demonstrations.max_tokens`",
        "gradient_share/NAME": "share of domain NAME in the gradient that enters the merge's model:"
        " |d loss / d logit|, summed over its tokens and the vocabulary | near its weight; one at"
        " 0.9 decides alone what the merge learns",
        "sampled_tokens": "tokens of the sampled responses, also of replaced prompts, not of those"
        " in `dropped_stale`; in evaluation, since the line before | equal in a fair comparison",
        "trained_tokens": "tokens of the step's groups or demonstrations that are learned: without"
        " prompts and masked tokens | equal in a fair comparison",
        "mismatch_max": "largest |log mu - log pi| under the same weights, nats; where older"
        " weights sampled, of probes | about 1e-5 in fp32; at most `engine.max_logprob_difference`,"
        " only reported in bf16",
        "drift_max": "largest |log mu - log pi| of a batch that older weights may have sampled,"
        " nats | as one step's change; `objective.correction` weighs what exceeds it",
        "staleness_max": "largest staleness of a response | at most `max_steps_ahead`; 1 with"
        " `oversampling` alone",
        "dropped_stale": "responses never trained on, since one of their group exceeded"
        " the bound of `staleness_max` | 0; else it is the long ones that are dropped. Guard"
        " `stale_drops`",
        "replayed": "responses taken from the rollout log after a resume instead of sampled | 0,"
        " except in the steps that a resumed stage repeats",
        "requeued": "responses requested again, with the same seeds, since their engine was lost |"
        " 0",
        "duplicates": "answers dropped as second ones or as those of a lost engine | 0",
        "engine_restarts": "engines replaced since they died, hung or violated the protocol | 0",
        "refit_bytes": "most bytes that one engine rank received in the weight sync | its own"
        " share of the model, no more",
        "refit_staging_bytes": "most staging memory of one engine rank in the weight sync | about"
        " one layer",
        "drawn": "responses of this line's prompts; in rejection sampling | `group_size` for each"
        " prompt",
        "kept": "responses that passed `keep`, of this line's prompts | a fair share of `drawn`;"
        " near 0, sample from a better model, or relax `keep`",
        "dropped/NAME": "responses that `keep` dropped for the reason NAME, the first that applied"
        " | mostly `reward`",
        "seconds_refit": "time to bring the weights to the engine, `seconds_start` included",
        "seconds_start": "part of `seconds_refit` in which the trainer waits for engines that"
        " start | in the first step of an attempt, and after a lost engine",
        "seconds_offload": "time to move models between their GPU and the host; where engines share"
        " the GPUs, in any of the other times",
        "seconds_wake": "time of engines to fall asleep and to wake; where they share the GPUs, in"
        " any of the other times",
        "seconds_rollout": "time to sample, grade and probe, as far as the trainer waits for it",
        "seconds_wait": "part of `seconds_rollout` in which the trainer waits for its batch | 0 in"
        " `overlap` and `async` where the engines keep up",
        "seconds_train": "time of all forward, backward and optimizer work",
    },
    "sequences": {
        "reward": "mean reward of the step's graded responses, replaced prompts included | rises,"
        " noisily",
        "reward/NAME": "mean reward NAME, before its weight, of graded responses of the domains"
        " that have it | rises; falling while `reward` rises, it is being traded away",
        "unfinished": "share of responses truncated before their end token | RANGE; else"
        " raise `max_response_tokens`. Guard `truncation`",
        "response_tokens": "mean response length, end token included | no steady growth without"
        " reward",
        "no_context/NAME": "share of domain NAME's responses without a context for the teacher"
        " `self`, which are masked | of `sibling` the prompts that none or one solves; else 0",
        "context_too_long/NAME": "share of domain NAME's responses masked since what the teacher"
        " `self` reads exceeds `model.max_positions` | 0; else a shorter context",
        "wrong_over_right": "mean length of the graded responses that do not solve their problem,"
        " over that of those that do; where there are both | steady; near 1",
        "identical_responses": "share of all but the first responses to a prompt that equal an"
        " earlier one, token by token | below 1; short answers of a solved domain repeat",
        "similar_responses": "share of all but the first responses to a prompt with 0.8 of their"
        " trigrams in an earlier one (Jaccard) | RANGE. Guard `similar_responses`",
        "ratio": "mean policy ratio | 1 with one update a rollout; near 1 otherwise",
        "clip_fraction": "mean share of a response that is clipped | 0 with one update a rollout",
        "correction": "mean weight of a response's tokens by `objective.correction`; 1 for samples"
        " of the current weights, unless `all` are corrected | 1 in `sync`; above 0.9",
        "masked_sequences": "share of the responses that `objective.sequence_mask` keeps out of"
        " the policy gradient | below 0.05; growing, samples are too old",
        "mismatch_sequence_k3": "mean of r - log r - 1, r the geometric mean of pi / mu over a"
        " response; estimates KL(mu ‖ pi) | within ±1e-7 in fp32, the sum's rounding",
        "drift_sequence_k3": "`mismatch_sequence_k3` of a batch of `drift_max` | below 1e-3; it"
        " grows before `drift_high_ratio` does",
        "staleness_mean": "training steps between the oldest weights that sampled a response and"
        " those it trains | 0 with `max_steps_ahead: 0`, 1 with 1, else below it",
        "staleness_N": "share of the responses that are N steps behind, for every N up to"
        " the bound of `staleness_max` | adds up to 1",
    },
    "groups": {
        "zero_variance": "share of the sampled prompts, also replaced ones, without any advantage;"
        " not with `gae` | RANGE; else see `all_right` and `all_wrong`. Guard `zero_variance`",
        "all_right": "share of the sampled prompts, also replaced ones, whose graded samples all"
        " solve them, as evaluation counts it | RANGE; near 1 the domain is solved",
        "all_wrong": "share of the sampled prompts, also replaced ones, whose graded samples all"
        " fail | RANGE; else easier prompts, a better start, `curriculum.name: frontier`; at"
        " 1 the reward may be wrong",
        "reward_spread": "mean population standard deviation of a prompt's rewards, where two"
        " samples are graded | RANGE; near 0 advantages are noise. Guard `reward_spread`",
    },
    "tokens": {
        "kept_saturated": "share of tokens whose kept set (`top_k`, `top_p`) has the engine's"
        " most, `top_k` or 4,096, and 64 ties: it may have been larger | 0; else a smaller `top_k`",
        "router_movement": "mean |log p - log p_old| of a token's experts in the routers, nats;"
        " with `rspo` | 0 in a rollout's first update; above 0.2 the floor of `rspo` holds",
        "value_loss": "mean clipped value loss of the critic, half a square of rewards; with the"
        " advantage `gae` | falls, then steady",
        "entropy": "mean -log pi of the sampled tokens, nats | falls slowly; RANGE:"
        " below, nothing is explored any more. Guard `entropy_collapse`",
        "full_entropy": "mean entropy over the ids that a token is sampled from, nats; with"
        " `objective.entropy_bonus` above 0 | near `entropy`; it is what the bonus holds up",
        "kl": "mean of the domain's KL estimator to its reference, nats; with a coefficient above"
        " 0, over the tokens of all domains that have one | grows slowly; RANGE",
        "kl/NAME": "`kl` over the tokens of domain NAME, by its own estimator; in a stage on"
        " several domains | grows slowly; near its `objective.kl.target`, if any",
        "teacher_kl/NAME": "mean full-vocabulary KL(student ‖ its teacher) over domain NAME's"
        " tokens, nats; of several teachers the mean by weight, and `teacher_kl/NAME/TEACHER` of"
        " each, a path being its place in `teachers` from 1 | falls; one that stays high is hard to"
        " follow, or weighs too little",
        "preflight_kl/NAME": "mean full-vocabulary KL(student ‖ its teacher) over the first step's"
        " samples of domain NAME, nats; in that step; of several teachers each one's is"
        " `preflight_kl/NAME/TEACHER` | above 0; at 0 it teaches nothing",
        "disjoint_tokens/NAME": "share of those tokens that the student gives more than 0.1 and the"
        " teacher of domain NAME less than 1e-6, by teacher as `preflight_kl` is | 0; else the log"
        " names the tokens",
        "data_loss/NAME": "mean loss of `method` over domain NAME's tokens of `data`; with"
        " `data_share` | falls; above `sampled_loss/NAME` where data are foreign to the student",
        "sampled_loss/NAME": "mean loss of `method` over domain NAME's sampled tokens; with"
        " `data_share` | falls",
        "mismatch_mean": "mean |log mu - log pi| of the tokens of `mismatch_max`, nats | a few"
        " 1e-7 in fp32",
        "high_ratio": "share of the tokens of `mismatch_max` with pi / mu or mu / pi above 2 |"
        " RANGE. Guard `mismatch`",
        "router_agreement_N": "share of routed layer N's top-k slots that the trainer's router"
        " fills with the engine's experts | one layer below the others: its weights or bias",
        "drift_mean": "mean |log mu - log pi| of a batch of `drift_max`, nats | below 0.05; steady",
        "drift_high_ratio": "share of the tokens of `drift_max` with pi / mu or mu / pi above 2 |"
        " RANGE; growth precedes collapse. Guard `drift`",
        "drift_router_agreement_N": "`router_agreement_N` of a batch of `drift_max` | above 0.9",
    },
    "layers": {
        "load_balance": "E * sum over experts of (share of slots) * (mean score), before"
        " `routing.load_balance` | near 1; near E / experts_per_token, few experts work",
        "idle_experts": "share of experts that no token chose, of the samples recorded with"
        " `logging.tokens`; with `routing.replay: r3` | near 0; far above, few experts work",
        "z_loss": "mean squared logsumexp of the routers' logits, before its coefficient"
        " `routing.z_loss` | steady; growth precedes overflow",
        "router_agreement": "mean `router_agreement_N` of all layers; with `routing.replay: r3` |"
        " 1 in fp32, RANGE in bf16; lower, the engine computes a router otherwise",
        "drift_router_agreement": "`router_agreement` of a batch of `drift_max` | above 0.9; the"
        " replay makes up for the rest",
    },
    "domains": {
        "teacher_kl": "mean `teacher_kl/NAME`, by `merge.averaged_over` and"
        " `merge.domain_weights`; of `method: full_vocab_reverse_kl` the loss | falls; at first"
        " 0.04 is a near teacher, 0.2 a foreign one",
    },
    "pairs": {
        "reward_chosen": "mean of beta * (log pi - log ref) of the chosen responses, by"
        " `loss.logprobs`; with `dpo` | 0 at first; falling, both responses lose probability",
        "reward_rejected": "`reward_chosen` of the rejected responses | 0 at first; falls",
        "reward_margin": "`reward_chosen` - `reward_rejected` | 0 at first; grows",
        "reward_accuracy": "share of the pairs whose chosen response has the higher reward | above"
        " 0.5 and growing; at 1 early, the pairs are too easy or seen too often",
    },
    "computed tokens": {
        "token_efficiency": "share of the tokens computed in training that are not padding | above"
        " 0.95",
    },
    "problems": {
        "accuracy": "share of the evaluated problems solved so far",
    },
}


def _metric(name: str, denominator: str, text: str) -> Metric:
    meaning, _, healthy = text.partition(" | ")
    if (bounds := RANGES.get(name)) is not None:
        healthy = healthy.replace("RANGE", str(bounds))
        if bounds.alarm != bounds.healthy:
            healthy += f". Alarm {bounds.side} {bounds.alarm:g}"
    return Metric(denominator, meaning, healthy)


METRICS = {
    name: _metric(name, denominator, text)
    for denominator, metrics in _TABLE.items()
    for name, text in metrics.items()
}
# What belongs together in a tracker's panels and in the report.
PANELS = {
    "learning": "loss reward reward/NAME accuracy teacher_kl teacher_kl/NAME data_loss/NAME"
    " sampled_loss/NAME reward_chosen reward_rejected reward_margin reward_accuracy value_loss"
    " value_explained_variance gradient_norm learning_rate",
    "policy": "entropy full_entropy kl kl/NAME kl_coefficient kl_coefficient/NAME ratio"
    " clip_fraction correction masked_sequences length_exponent length_exponent/NAME",
    "signal": "zero_variance all_right all_wrong reward_spread reward_drop format_gain"
    " identical_responses similar_responses resampled_groups passed_over",
    "responses": "unfinished response_tokens wrong_over_right length_inflation kept_saturated"
    " too_long reward_failures watch_failures drawn kept dropped/NAME no_context/NAME"
    " context_too_long/NAME",
    "domains": "token_share/NAME data_token_share/NAME sampled_token_share/NAME data_too_long/NAME"
    " gradient_share/NAME preflight_kl/NAME disjoint_tokens/NAME",
    "mismatch": "mismatch_max mismatch_mean mismatch_sequence_k3 high_ratio drift_max drift_mean"
    " drift_sequence_k3 drift_high_ratio",
    "routing": "router_agreement router_agreement_N drift_router_agreement"
    " drift_router_agreement_N router_movement load_balance idle_experts z_loss",
    "engines": "staleness_mean staleness_max staleness_N dropped_stale replayed requeued duplicates"
    " engine_restarts refit_bytes refit_staging_bytes",
    "cost": "sampled_tokens trained_tokens token_efficiency seconds_rollout seconds_train"
    " seconds_refit seconds_start seconds_wait seconds_wake seconds_offload",
}
PANEL_OF = {metric: panel for panel, metrics in PANELS.items() for metric in metrics.split()}
# Names before "/NAME": of a metric of every domain, or of every reward.
NAMED = sorted(name.removesuffix("/NAME") for name in METRICS if name.endswith("/NAME"))


def declared_as(name: str) -> str:
    """Return the name in METRICS of a metric with a number (staleness, layer) or a name in it."""
    numbered = re.sub(r"^(staleness|(?:drift_)?router_agreement)_\d+$", r"\1_N", name)
    return re.sub(rf"^({'|'.join(NAMED)})/.+$", r"\1/NAME", numbered)


def panel_of(name: str) -> str:
    """Return the panel of a metric; raise KeyError for one that is not declared."""
    return PANEL_OF[declared_as(name)]
