"""Every metric a stage may log: its denominator, its meaning, and its healthy values. No torch.

`make docs` writes docs/reference/metrics.md from here; MetricsLog refuses any other name.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A metric of metrics.jsonl; `denominator` is what its sum is divided by."""

    denominator: str
    meaning: str
    healthy: str = ""


METRICS = {
    "loss": Metric(
        "step",
        "the objective, normalised once by the step's global count",
        "SFT and merge: falls. GRPO: near 0, and says little",
    ),
    "gradient_norm": Metric(
        "step",
        "norm of the whole gradient before clipping",
        "steady; a jump of ten times precedes trouble",
    ),
    "learning_rate": Metric("step", "learning rate of this step", "follows the schedule"),
    "load_balance": Metric(
        "layers",
        "E * sum over experts of (share of routing slots) * (mean score), before its"
        " coefficient; with `routing.load_balance` above 0",
        "near 1; rising towards E / experts_per_token, few experts do all the work",
    ),
    "z_loss": Metric(
        "layers",
        "mean squared logsumexp of the routers' logits, before its coefficient; with"
        " `routing.z_loss` above 0",
        "steady; growth precedes overflow",
    ),
    "token_efficiency": Metric(
        "computed tokens",
        "share of the tokens computed in training that are not padding",
        "above 0.95",
    ),
    "too_long": Metric(
        "step",
        "conversations (cold start) or prompts skipped for their length, those of prefetched"
        " steps included",
        "near 0; else raise `demonstrations.max_tokens` or `prompts.max_prompt_tokens`, or cut"
        " the data",
    ),
    "reward": Metric(
        "sequences",
        "mean reward of the step's graded responses, those of replaced prompts included",
        "rises, noisily",
    ),
    "reward/NAME": Metric(
        "sequences",
        "mean of the reward NAME, before its weight, over the graded responses of the domains"
        " that have it",
        "rises; one that falls while `reward` rises is being traded away",
    ),
    "reward_failures": Metric(
        "step",
        "samples without a reward, since one raised, died, returned no finite number or did not"
        " reach its service; replaced and dropped prompts count too. In evaluation: of the"
        " problems since the line before",
        "0; above `rewards.max_failed_fraction` of the step, and above one, the stage stops",
    ),
    "watch_failures": Metric(
        "step",
        "failures of rewards of weight 0, whose samples keep the other rewards; replaced and"
        " dropped prompts count too. In evaluation: of the problems since the line before",
        "0; `reward/NAME` is the mean where it did not fail",
    ),
    "zero_variance": Metric(
        "groups",
        "share of the sampled prompts, replaced ones included, none of whose samples has an"
        " advantage; not with the advantage `gae`",
        "below 0.5; near 1 the domain is solved (`all_right`) or out of reach (`all_wrong`)."
        " Guard `flat_groups`",
    ),
    "all_right": Metric(
        "groups",
        "share of the sampled prompts, replaced ones included, whose graded samples all solve"
        " them, as evaluation counts it",
        "below 0.5; near 1 the domain is solved",
    ),
    "all_wrong": Metric(
        "groups",
        "share of the sampled prompts, replaced ones included, whose graded samples all fail",
        "below 0.5; near 1 it is out of reach: easier prompts, a better cold start, or"
        " `curriculum.name: frontier`",
    ),
    "reward_spread": Metric(
        "groups",
        "population standard deviation of a prompt's rewards, mean over the sampled prompts with"
        " two graded samples or more",
        "above 0.1; near 0 advantages are noise. Guard `reward_spread`",
    ),
    "reward_drop": Metric(
        "step",
        "highest mean of `reward` over `guards.reward_collapse.window` steps so far, minus that"
        " of the last window",
        "near 0; growing, what was learned is being lost. Guard `reward_collapse`",
    ),
    "format_gain": Metric(
        "step",
        "rise of the weighted rewards that judge no answer from one window of"
        " `guards.format_gain.window` steps to the next, minus any rise of those that do; in"
        " domains with both",
        "0; above that, the reward is gained by form alone. Guard `format_gain`",
    ),
    "resampled_groups": Metric(
        "step",
        "prompts that `rollout.dynamic_sampling` replaced",
        "0 where it is off; steadily at its bound, the domain is solved or out of reach",
    ),
    "passed_over": Metric(
        "step",
        "prompts that `curriculum.name: frontier` passed over",
        "`candidates` - 1 for each prompt taken",
    ),
    "unfinished": Metric(
        "sequences",
        "share of responses truncated before their end token",
        "below 0.05; else raise `max_response_tokens`. Guard `truncation`",
    ),
    "kept_saturated": Metric(
        "tokens",
        "share of tokens whose kept set is as large as the engine was asked for (`top_k` and 64"
        " ties; 4,096 and 64 without a `top_k`) and may have been larger; with `top_k` or `top_p`",
        "0; above that, pi is normalised over less than was sampled from: a smaller `top_k`",
    ),
    "response_tokens": Metric(
        "sequences",
        "mean response length, end token included",
        "no steady growth without reward",
    ),
    "wrong_over_right": Metric(
        "sequences",
        "mean length of the graded responses that do not solve their problem, over that of those"
        " that do; where there are both",
        "steady; near 1",
    ),
    "length_inflation": Metric(
        "step",
        "mean of `wrong_over_right` over `guards.length_inflation.window` steps, over its mean"
        " in the stage's first window",
        "near 1; growing, length hides in wrong answers. Guard `length_inflation`",
    ),
    "identical_responses": Metric(
        "sequences",
        "share of the responses that repeat an earlier one to their prompt, token by token; of"
        " all but the first of each prompt",
        "well below 1; short answers of a solved domain repeat",
    ),
    "similar_responses": Metric(
        "sequences",
        "share of the responses that share 0.8 of their trigrams of tokens with an earlier one"
        " to their prompt (Jaccard); of all but the first of each prompt",
        "below 0.9; near 1 there is one sample a prompt. Guard `similar_responses`",
    ),
    "ratio": Metric(
        "sequences",
        "mean policy ratio",
        "1 with one update a rollout; near 1 otherwise",
    ),
    "clip_fraction": Metric(
        "sequences",
        "mean share of a response that is clipped",
        "0 with one update a rollout",
    ),
    "router_movement": Metric(
        "tokens",
        "|log p - log p_old| of the routers, nats, mean over layers and the experts that a token"
        " chose when the step began; with the ratio `rspo`",
        "0 in the first update of a rollout; above 0.2 the floor of `rspo` holds",
    ),
    "correction": Metric(
        "sequences",
        "mean weight of a response's tokens by `objective.correction`; 1 for samples of the"
        " current weights, unless `all` are corrected",
        "1 in `sync`; above 0.9",
    ),
    "masked_sequences": Metric(
        "sequences",
        "share of the responses that `objective.sequence_mask` keeps out of the policy gradient;"
        " where it is enabled",
        "below 0.05; growing, samples are too old",
    ),
    "length_exponent": Metric(
        "step",
        "lambda of the aggregation `lambda` in this step; above 0 long responses weigh more",
        "settles; drifting far below 0, brevity is all that is learned",
    ),
    "value_loss": Metric(
        "tokens",
        "mean clipped value loss of the critic, half a square of rewards; with the advantage `gae`",
        "falls, then steady",
    ),
    "value_explained_variance": Metric(
        "step",
        "share of the variance of the tokens' returns that the critic's values explain; 0 where"
        " all returns are equal; with the advantage `gae`",
        "rises from 0 towards 1; below 0 the values are worse than their mean: more"
        " `critic.warmup_steps` or a higher rate",
    ),
    "entropy": Metric(
        "tokens",
        "mean -log pi of the sampled tokens, nats",
        "falls slowly; near 0 nothing is explored any more. Guard `entropy_collapse`",
    ),
    "full_entropy": Metric(
        "tokens",
        "mean entropy over the whole vocabulary, nats; with `objective.entropy_bonus` above 0",
        "near `entropy`; it is what the bonus holds up",
    ),
    "kl": Metric(
        "tokens",
        "mean of the domain's KL estimator to its reference, nats; with a coefficient above 0",
        "grows slowly",
    ),
    "kl_coefficient": Metric(
        "step",
        "coefficient of the KL in this step; with `objective.kl.target`",
        "settles once `kl` is near the target",
    ),
    "teacher_kl": Metric(
        "domains",
        "mean of `teacher_kl/NAME` over the domains, as `merge.averaged_over` and"
        " `merge.domain_weights` weigh them; the loss",
        "falls; about 0.04 at first is a near teacher, 0.2 a foreign one",
    ),
    "teacher_kl/NAME": Metric(
        "tokens",
        "mean full-vocabulary KL(student ‖ its teacher) over the tokens of domain NAME, nats",
        "falls; one that stays above the others has a teacher that the student cannot follow, or"
        " too little weight",
    ),
    "token_share/NAME": Metric(
        "step",
        "share of the step's tokens that domain NAME has",
        "what the domain would weigh with `averaged_over: tokens`",
    ),
    "mismatch_max": Metric(
        "step",
        "largest |log mu - log pi| under the same weights, nats: of any token of the batch, or,"
        " where other weights sampled it, of a few probes after the weight sync",
        "about 1e-5 in fp32; above `engine.max_logprob_difference` twice in a row the stage stops",
    ),
    "mismatch_mean": Metric(
        "tokens",
        "mean |log mu - log pi| of the tokens of `mismatch_max`, nats",
        "a few 1e-7 in fp32",
    ),
    "mismatch_sequence_k3": Metric(
        "sequences",
        "mean of r - log r - 1, with r the geometric mean of pi / mu over a response's tokens;"
        " estimates KL(mu ‖ pi)",
        "within ±1e-7 in fp32, the rounding of the sum",
    ),
    "high_ratio": Metric(
        "tokens",
        "share of the tokens of `mismatch_max` with pi / mu or mu / pi above 2",
        "0. Guard `mismatch`",
    ),
    "router_agreement": Metric(
        "layers",
        "mean of `router_agreement_N` over the routed layers; with `routing.replay: r3`",
        "1 in fp32, 0.95 to 1 in bf16; a fall with a steady `mismatch_max`: the replay hides a"
        " router that the engine computes otherwise",
    ),
    "router_agreement_N": Metric(
        "tokens",
        "share of the top-k slots of routed layer N that the trainer's router, under the same"
        " weights, fills with the engine's experts; of the tokens of `mismatch_max`",
        "as above; one layer alone below the others is a bug in its weights or its bias",
    ),
    "drift_max": Metric(
        "step",
        "largest |log mu - log pi| of any token of a batch that older weights may have sampled,"
        " nats; no drift is logged in `sync` without oversampling",
        "of the order of one step's change; `objective.correction` weighs what exceeds it, by"
        " default by at most 2",
    ),
    "drift_mean": Metric(
        "tokens",
        "mean |log mu - log pi| of such a batch, nats",
        "below 0.05; steady",
    ),
    "drift_sequence_k3": Metric(
        "sequences",
        "`mismatch_sequence_k3` of such a batch",
        "below 1e-3; it grows before `drift_high_ratio` does",
    ),
    "drift_high_ratio": Metric(
        "tokens",
        "share of its tokens with pi / mu or mu / pi above 2",
        "below 1e-3; above 0.1 it precedes collapse. Guard `drift`",
    ),
    "drift_router_agreement": Metric(
        "layers",
        "`router_agreement` of such a batch",
        "above 0.9; the replay makes up for the rest",
    ),
    "drift_router_agreement_N": Metric(
        "tokens",
        "`router_agreement_N` of such a batch",
        "above 0.9",
    ),
    "staleness_mean": Metric(
        "sequences",
        "training steps between the oldest weights that sampled a response and those that it"
        " trains",
        "0 in `sync`, 1 in `overlap`, below `max_staleness` in `async`",
    ),
    "staleness_max": Metric("step", "largest staleness of a response", "at most `max_staleness`"),
    "staleness_N": Metric(
        "sequences",
        "share of the responses that are N steps behind, for every N up to `max_staleness`",
        "adds up to 1",
    ),
    "dropped_stale": Metric(
        "step",
        "responses never trained on, since one of their group exceeded `max_staleness`",
        "0; else long responses are the ones dropped. Guard `stale_drops`",
    ),
    "replayed": Metric(
        "step",
        "responses taken from the log of rollouts after a resume instead of sampled",
        "0, except in the steps that a resumed stage repeats",
    ),
    "requeued": Metric(
        "step",
        "responses requested again, with the same seeds, since their engine was lost",
        "0",
    ),
    "duplicates": Metric(
        "step",
        "answers dropped as second ones or as those of a lost engine",
        "0",
    ),
    "engine_restarts": Metric(
        "step",
        "engines replaced since they died, hung or violated the protocol",
        "0",
    ),
    "refit_bytes": Metric(
        "step",
        "most bytes that one engine rank received in the weight sync",
        "its own share of the model, no more",
    ),
    "refit_staging_bytes": Metric(
        "step",
        "most staging memory of one engine rank in the weight sync",
        "about one layer",
    ),
    "seconds_refit": Metric("step", "time to bring the weights to the engine"),
    "seconds_rollout": Metric(
        "step",
        "time to sample, grade and probe, as far as the trainer waits for it",
    ),
    "seconds_wait": Metric(
        "step",
        "part of `seconds_rollout` in which the trainer waits for its batch",
        "0 in `overlap` and `async` where the engines keep up",
    ),
    "seconds_train": Metric("step", "time of all forward, backward and optimizer work"),
    "accuracy": Metric("problems", "share of the evaluated problems solved so far"),
}
