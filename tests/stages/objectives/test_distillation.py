"""Every method of a merge against its formula in float64, by whole rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from parallel.batch import MicroBatch, RankPlace, Responses, collate
from parallel.model.divergences import nucleus_floor, prefix_sums
from parallel.model.vocabulary import HeadLogits
from parallel.sample import Sample
from stages.kinds.distill.losses import MethodSettings
from stages.kinds.distill.losses.top_k import generalised_kl
from stages.kinds.distill.teaching import MethodBase, TaughtTokens
from stages.objectives.registry import METHODS
from stages.objectives.surrogate import correction_weights

pytestmark = pytest.mark.usefixtures("one_rank")

SIZE, HIDDEN = 24, 24
BOUND = {torch.float64: 1e-10, torch.float32: 1e-6}
BETA, LAMBDA, TOP_P, K, GAMMA, ALPHA = 0.3, 1.25, 0.8, 5, 0.7, 0.4
EVERYWHERE = {"name": "exopd", "lambda": LAMBDA, "extrapolate": "everywhere"}
NUCLEUS = {"name": "exopd", "lambda": LAMBDA, "extrapolate": "nucleus", "top_p": TOP_P}


def method(keys: Any) -> MethodBase:
    return TypeAdapter(MethodSettings).validate_python(keys)


def sampled(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "correction": {"name": "icepop", "low": 0.5, "high": 5.0}, **keys}


def batch() -> MicroBatch:
    """Return three responses with advantages; a token of one is not learned."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            domain="a",
            prompt=np.array([2, 3], np.int32),
            response=draw.integers(0, SIZE, length).astype(np.int32),
            logprobs=-3 - draw.random(length).astype(np.float32),
            loss_mask=np.arange(length) != 2 if length == 5 else None,
            advantage=float(draw.normal()),
        )
        for length in (4, 5, 1)
    ]
    return collate(samples, RankPlace(), replay=False)


def drawn(rows: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return logits of student, teacher and start; the teachers' are made of hidden states."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return (torch.randn(rows, SIZE, generator=random, dtype=torch.float64) * scale).to(dtype)

    return {"student": normal(2.0), "teacher": normal(2.0), "start": normal(1.5)}


def lazy(logits: Tensor) -> HeadLogits:
    return HeadLogits(logits, torch.eye(SIZE, dtype=logits.dtype))


def taught(
    settings: MethodBase,
    logits: dict[str, Tensor],
    micro_batch: MicroBatch,
    temperature: float = 1.0,
) -> TaughtTokens:
    responses = Responses(logits["student"], micro_batch)
    logprobs = responses.logprobs(temperature)
    if settings.weighing.name != "none":
        mu = micro_batch.engine_logprobs.to(logprobs.dtype)
        micro_batch.weights = correction_weights(
            logprobs.detach(), mu, micro_batch.mask, settings.weighing
        )
    start = lazy(logits["start"]) if settings.start_model is not None else None
    return TaughtTokens(responses, lazy(logits["teacher"]), start, logprobs, temperature)


def values(keys: Any, logits: dict[str, Tensor], micro_batch: MicroBatch) -> Tensor:
    """Return the method's loss of every learned token."""
    settings = method(keys)
    losses = METHODS[settings.name].function(taught(settings, logits, micro_batch), settings)
    return losses[micro_batch.mask]


# The formulas, on log-probabilities [n, vocabulary] of student, teacher and start in float64.

Rows = dict[str, Tensor]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def jsd(p: Tensor, q: Tensor, beta: float = BETA) -> Tensor:
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def top_k(of: Rows, lumped: bool) -> Tensor:
    ids = of["teacher"].topk(K).indices
    p, q = (of[name].exp().gather(1, ids) for name in ("student", "teacher"))
    value = (p * (p / q).log() - p + q).sum(-1)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    tail = rest_p * (rest_p / rest_q).log() - rest_p + rest_q
    return value + tail if lumped else value


def nucleus(log_q: Tensor) -> Tensor:
    """Return a mask of the fewest ids with TOP_P of the probability, row by row."""
    held = torch.zeros_like(log_q, dtype=torch.bool)
    for row, row_mask in zip(log_q.exp(), held, strict=True):
        total = 0.0
        for at in row.argsort(descending=True).tolist():
            row_mask[at] = True
            total += float(row[at])
            if total >= TOP_P:
                break
    return held


def beyond(of: Rows, where: Tensor | None) -> Tensor:
    learned = of["teacher"] - of["start"]
    learned = learned if where is None else learned.where(where, 0.0)
    return (of["teacher"] + (LAMBDA - 1) * learned).log_softmax(-1)


def gate(of: Rows, micro_batch: MicroBatch) -> Tensor:
    """Return IcePop's weights of the learned tokens."""
    mu = micro_batch.engine_logprobs[micro_batch.mask].double()
    ratio = (chosen(of["student"], micro_batch).detach() - mu).exp()
    return ratio.where((ratio >= 0.5) & (ratio <= 5.0), 0.0)


def chosen(log_p: Tensor, micro_batch: MicroBatch) -> Tensor:
    return log_p.gather(1, micro_batch.targets[micro_batch.mask].unsqueeze(1)).squeeze(1)


def surrogate(of: Rows, micro_batch: MicroBatch, advantages: Tensor) -> Tensor:
    return -gate(of, micro_batch) * advantages.detach() * chosen(of["student"], micro_batch)


def gain(of: Rows, micro_batch: MicroBatch) -> Tensor:
    return chosen(of["teacher"], micro_batch) - chosen(of["student"], micro_batch)


def of_rewards(micro_batch: MicroBatch) -> Tensor:
    return micro_batch.advantages[micro_batch.mask].double()


def exopd_sampled(of: Rows, micro_batch: MicroBatch, where: Tensor | None) -> Tensor:
    ours, theirs, base = (chosen(of[name], micro_batch) for name in ("student", "teacher", "start"))
    factor = torch.full_like(ours, LAMBDA)
    if where is not None:
        held = where.gather(1, micro_batch.targets[micro_batch.mask].unsqueeze(1)).squeeze(1)
        factor = factor.where(held, 1.0)
    # With a factor of 1 the start cancels: what remains is the teacher's advantage.
    return surrogate(of, micro_batch, -(ours - base - factor * (theirs - base)))


def iw(of: Rows, micro_batch: MicroBatch) -> Tensor:
    advantages = gain(of, micro_batch).detach()
    weights = torch.empty_like(advantages)
    rows = (
        torch.arange(len(micro_batch.mask))
        .unsqueeze(1)
        .expand_as(micro_batch.mask)[micro_batch.mask]
    )
    for row in rows.unique():
        sizes = advantages[rows == row].abs()
        before = torch.stack([sizes[:at].sum() for at in range(len(sizes))])
        weights[rows == row] = 1 + GAMMA * (1 - before / sizes.sum())
    return surrogate(of, micro_batch, weights * advantages)


CASES: dict[str, tuple[Any, Callable[[Rows, MicroBatch], Tensor]]] = {
    "reverse": ("full_vocab_reverse_kl", lambda of, micro_batch: kl(of["student"], of["teacher"])),
    "forward": ("forward_kl", lambda of, micro_batch: kl(of["teacher"], of["student"])),
    "jsd": (
        {"name": "jsd", "beta": BETA},
        lambda of, micro_batch: jsd(of["student"], of["teacher"]),
    ),
    "top_k": (
        {"name": "top_k_reverse_kl", "k": K},
        lambda of, micro_batch: top_k(of, lumped=False),
    ),
    "lumped": (
        {"name": "top_k_reverse_kl", "k": K, "tail": "lumped"},
        lambda of, micro_batch: top_k(of, lumped=True),
    ),
    "everywhere": (EVERYWHERE, lambda of, micro_batch: kl(of["student"], beyond(of, None))),
    "nucleus": (
        NUCLEUS,
        lambda of, micro_batch: kl(of["student"], beyond(of, nucleus(of["teacher"]))),
    ),
    "sampled": (
        sampled("sampled_token", reward_weight=ALPHA),
        lambda of, micro_batch: surrogate(
            of, micro_batch, gain(of, micro_batch) + ALPHA * of_rewards(micro_batch)
        ),
    ),
    "exopd sampled": (
        {**EVERYWHERE, **sampled("exopd", over="sampled")},
        lambda of, micro_batch: exopd_sampled(of, micro_batch, None),
    ),
    "exopd sampled nucleus": (
        {**NUCLEUS, **sampled("exopd", over="sampled")},
        lambda of, micro_batch: exopd_sampled(of, micro_batch, nucleus(of["teacher"])),
    ),
    "opd_reward": (
        sampled("opd_reward", teacher_weight=1.5),
        lambda of, micro_batch: surrogate(
            of, micro_batch, of_rewards(micro_batch) + 1.5 * gain(of, micro_batch)
        ),
    ),
    "iw_opd": (sampled("iw_opd", gamma=GAMMA), iw),
}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_formula_s(name: str, dtype: torch.dtype) -> None:
    keys, formula = CASES[name]
    micro_batch = batch()
    logits = drawn(len(micro_batch.place), dtype)
    whole = {key: tensor.double().clone() for key, tensor in logits.items()}
    for held in (logits, whole):
        held["student"].requires_grad_()
    keys = {"name": keys} if isinstance(keys, str) else keys
    losses = values(keys, logits, micro_batch)
    # Rows are in the order of the learned tokens: one rank, no padding.
    truth = formula({key: tensor.log_softmax(-1) for key, tensor in whole.items()}, micro_batch)
    upstream = torch.linspace(-1, 2, len(losses), dtype=torch.float64)
    (losses * upstream).sum().backward()
    (truth * upstream).sum().backward()
    assert losses.dtype == dtype
    size = truth.detach().abs().max().clamp(min=1)
    assert float((losses.double() - truth).detach().abs().max() / size) < BOUND[dtype]
    assert logits["student"].grad is not None and whole["student"].grad is not None
    error = (logits["student"].grad.double() - whole["student"].grad).abs().max() / size
    assert float(error) < BOUND[dtype]


def gradient(
    keys: Any, logits: dict[str, Tensor], micro_batch: MicroBatch
) -> tuple[Tensor, Tensor]:
    ours = {**logits, "student": logits["student"].clone().requires_grad_()}
    losses = values(keys, ours, micro_batch)
    losses.sum().backward()
    assert ours["student"].grad is not None
    return losses.detach(), ours["student"].grad


@pytest.mark.parametrize("dtype", BOUND)
def test_with_lambda_1_exopd_is_the_reverse_kl_or_the_sampled_token_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    logits = drawn(len(batch().place), dtype)
    for over, other in (("vocabulary", "full_vocab_reverse_kl"), ("sampled", "sampled_token")):
        for where in ("everywhere", "nucleus"):
            keys = {"name": "exopd", "lambda": 1.0, "over": over, "extrapolate": where}
            pairs = zip(
                gradient(keys, logits, batch()),
                gradient({"name": other}, logits, batch()),
                strict=True,
            )
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    "keys",
    [
        {"name": "full_vocab_reverse_kl"},
        {"name": "forward_kl"},
        {"name": "jsd", "beta": 0.1},
        {"name": "jsd", "beta": 0.5},
        {"name": "top_k_reverse_kl", "k": K},
        {"name": "top_k_reverse_kl", "k": K, "tail": "lumped"},
        {"name": "top_k_reverse_kl", "k": SIZE},
        {"name": "top_k_reverse_kl", "k": SIZE, "tail": "lumped"},
        sampled("sampled_token"),
        sampled("iw_opd"),
    ],
    ids=str,
)
def test_a_student_that_is_its_teacher_learns_nothing(keys: Any, dtype: torch.dtype) -> None:
    logits = drawn(len(batch().place), dtype)
    logits["teacher"] = logits["student"].clone()
    for zero in gradient(keys, logits, batch()):
        assert not zero.any()


@pytest.mark.parametrize("over", ["vocabulary", "sampled"])
def test_a_teacher_that_learned_nothing_is_not_extrapolated(over: str) -> None:
    logits = drawn(len(batch().place), torch.float64)
    logits["start"] = logits["teacher"].clone()
    other = "full_vocab_reverse_kl" if over == "vocabulary" else "sampled_token"
    for keys in (EVERYWHERE, NUCLEUS):
        pair = gradient({**keys, "over": over}, logits, batch())
        for ours, theirs in zip(pair, gradient({"name": other}, logits, batch()), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_logit_s_constant_changes_no_target() -> None:
    """Logits of two models differ by any constant in each row."""
    logits = drawn(len(batch().place), torch.float64)
    moved = {**logits, "start": logits["start"] + 7, "teacher": logits["teacher"] - 3}
    for keys in (EVERYWHERE, NUCLEUS):
        for ours, theirs in zip(
            gradient(keys, logits, batch()), gradient(keys, moved, batch()), strict=True
        ):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_jsd_tends_to_both_kls() -> None:
    logits = drawn(len(batch().place), torch.float64)
    for beta, scale, name in (
        (1e-9, 1e-9, "forward_kl"),
        (1 - 1e-9, 1e-9, "full_vocab_reverse_kl"),
    ):
        pair = gradient({"name": "jsd", "beta": beta}, logits, batch())
        limit = gradient({"name": name}, logits, batch())
        for ours, theirs in zip(pair, limit, strict=True):
            assert torch.allclose(ours / scale, theirs, rtol=0, atol=1e-4)


def test_the_sampled_advantage_estimates_the_gradient_of_the_vocabulary() -> None:
    """Summed over all tokens by their probability, the estimate is the gradient."""
    exact = {"name": "exopd", "lambda": LAMBDA, "extrapolate": "everywhere"}
    one = Sample(
        domain="a",
        prompt=np.array([2], np.int32),
        response=np.array([0], np.int32),
        logprobs=np.zeros(1, np.float32),
    )
    logits = drawn(1, torch.float64)
    micro_batch = collate([one], RankPlace(), replay=False)
    _, truth = gradient(exact, logits, micro_batch)
    log_p = logits["student"].log_softmax(-1)[0]
    total = torch.zeros_like(truth)
    for token in range(SIZE):
        one.response = np.array([token], np.int32)
        micro_batch = collate([one], RankPlace(), replay=False)
        keys = {**exact, "over": "sampled", "correction": {"name": "none"}}
        total += log_p[token].exp() * gradient(keys, logits, micro_batch)[1]
    assert torch.allclose(total, truth, rtol=0, atol=1e-12)


def test_the_correction_is_what_keeps_the_optimum() -> None:
    """At the teacher p log(p / q) - p + q has no slope in p; without its last terms it has."""
    q = torch.tensor([0.5, 0.3], dtype=torch.float64).log()
    p = q.clone().requires_grad_()
    generalised_kl(p, q).sum().backward()
    assert p.grad is not None and not p.grad.any()


def test_a_rest_below_rounding_keeps_its_precision() -> None:
    """In fp32 1 less the probability of a sure teacher's likeliest tokens is rounding alone."""
    logits = drawn(len(batch().place), torch.float32)
    logits["teacher"] = logits["teacher"] * 20
    wide = {name: tensor.double() for name, tensor in logits.items()}
    keys = {"name": "top_k_reverse_kl", "k": K, "tail": "lumped"}
    tail = wide["teacher"].softmax(-1).sort(descending=True).values[:, K:].sum(-1)
    assert float(tail.min()) < 1e-9
    pairs = zip(gradient(keys, logits, batch()), gradient(keys, wide, batch()), strict=True)
    for ours, truth in pairs:
        assert float((ours - truth).abs().max() / truth.abs().max()) < 1e-6


def test_vector_6() -> None:
    """p_S = [.7, .2, .1], p_T = [.5, .3, .2], of which the top 2 are compared."""
    p, q = (torch.tensor(x, dtype=torch.float64).log() for x in ([0.7, 0.2], [0.5, 0.3]))
    assert float(generalised_kl(p, q).sum()) == pytest.approx(0.0544375, abs=1e-7)
    # As one token the rest are [.1] and [.2]: .1 log(.1 / .2) + .1 more, the whole KL of three.
    lumped = float(generalised_kl(p, q).sum()) + 0.1 * np.log(0.5) + 0.1
    assert lumped == pytest.approx(0.0851228, abs=1e-7)


def test_iw_opd_by_hand() -> None:
    """|A| = [1, 2, 1] over four nats in all: prefixes of 0, 1/4 and 3/4 weigh 1.5, 1.375, 1.125."""
    distance = torch.tensor([[1.0, 2.0, 1.0]])
    assert prefix_sums(distance).tolist() == [[0.0, 1.0, 3.0]]
    weights = 1 + 0.5 * (1 - prefix_sums(distance) / distance.sum())
    assert weights.tolist() == [[1.5, 1.375, 1.125]]
    many = torch.arange(37.0)
    assert prefix_sums(many).tolist() == (many.cumsum(0) - many).tolist()


@pytest.mark.parametrize(("top_p", "held"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.95, 3), (0.999, 4)])
def test_a_nucleus_has_the_fewest_ids_with_its_probability(top_p: float, held: int) -> None:
    p = torch.tensor([[0.5, 0.3, 0.16, 0.04]], dtype=torch.float64)
    logits = HeadLogits(p.log() + 5, torch.eye(4, dtype=torch.float64))
    floor = nucleus_floor(logits, top_p)
    assert int((p.log() > floor).sum()) == held


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "jsd", "beta": 1.0}, "less than 1"),
        ({"name": "jsd", "beta": 0.0}, "greater than 0"),
        ({"name": "top_k_reverse_kl", "k": 0}, "greater than 0"),
        ({"name": "exopd", "lambda": 0}, "greater than 0"),
        ({"name": "exopd", "top_p": 1.0}, "less than 1"),
        ({"name": "opd_reward", "teacher_weight": 0}, "greater than 0"),
        ({"name": "iw_opd", "gamma": -1}, "greater than or equal to 0"),
        ({"name": "sampled_token", "reward_weight": -1}, "greater than or equal to 0"),
        ({"name": "kl"}, "does not match any of the expected tags"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        method(keys)
