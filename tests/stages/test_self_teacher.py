"""The teacher `self`: an average of the student that reads a context, against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.sample import Sample
from stages.audit import recorded
from stages.audit.model import Model, from_megatron
from stages.audit.recorded import RecordedSample
from stages.data.problem import DomainError, Problem
from stages.data.tokenizer import CharacterTokenizer, TokenizerError
from stages.kinds.distill.losses.top_k import generalised_kl
from stages.kinds.distill.self_teacher import Contexts
from stages.kinds.distill.source_settings import SelfTeacherSettings
from stages.objectives.groups import Group
from stages.sampling.sample_files import read_samples, samples_file
from tests.fake_engines import MODEL, FakeEngine, toy_domain
from tests.stages.toy_merges import check_kills, gradients, merge, run, save, sharpen, written
from tests.stages.toys import after

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENIZER = CharacterTokenizer()
SELF: dict[str, Any] = {"teachers": {"sums": "self", "words": "self"}}
A_STEP = 2 * 2 * 4  # responses


def read(model: Model, sample: Sample, prompt: np.ndarray) -> torch.Tensor:
    """Return log-probabilities [learned, vocabulary] in float64 after a prompt."""
    of = RecordedSample(
        domain="",
        prompt=torch.from_numpy(prompt).long(),
        response=torch.from_numpy(sample.response).long(),
        logprobs=torch.zeros(0),
        learned=torch.from_numpy(sample.learned),
        update=0,
        group=0,
        fields={},
        routes=None,
        kept_ids=None,
    )
    with torch.no_grad():
        return model.read(of, replay=False).distribution(1.0)


def reverse(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def jsd(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    m = (0.3 * q.exp() + 0.7 * p.exp()).log()
    return 0.3 * reverse(q, m) + 0.7 * reverse(p, m)


def top_k(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    ids = q.topk(5).indices
    rest = torch.ones_like(q, dtype=torch.bool).scatter(1, ids, False)
    lumped = [torch.logsumexp(x.masked_fill(~rest, -torch.inf), -1) for x in (p, q)]
    kept = generalised_kl(p.gather(1, ids), q.gather(1, ids)).sum(-1)
    return kept + generalised_kl(*lumped)


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        ("full_vocab_reverse_kl", reverse),
        ("forward_kl", lambda p, q: reverse(q, p)),
        ({"name": "jsd", "beta": 0.3}, jsd),
        ({"name": "top_k_reverse_kl", "k": 5, "tail": "lumped"}, top_k),
    ],
    ids=["reverse_kl", "forward_kl", "jsd", "top_k"],
)
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_the_loss_is_to_the_average_after_the_privileged_prompt(
    method: Any, loss: Any, decay: float, tmp_path: Path
) -> None:
    stage = merge(tmp_path, method=method, self_teacher={"ema_decay": decay}, **SELF)
    start = stage.policy.named_weights()
    start = {name: weight.clone() for name, weight in start.items()}
    stage.step(1)
    averages = stage.policy.averages
    for name, average in averages["ema"].named_weights().items() if averages else ():
        expected = decay * start[name] + (1 - decay) * stage.policy.named_weights()[name]
        torch.testing.assert_close(average, expected)
    assert (list(averages) == ["ema"]) == (decay == 0.5)
    frozen = stage.self_teacher._average if stage.self_teacher else None
    others = [] if frozen is None else [frozen._policy]
    sharpen(stage.policy, *others)
    held = recorded.tensors(save(stage, tmp_path, 1))
    shape = MODEL.model_dump()
    student = Model(shape, from_megatron(held, shape))
    teacher = student
    if decay == 0.5:
        teacher = Model(shape, from_megatron(held, shape, "ema."))
    elif decay == 1:
        stage.policy.averages["start"] = others[0]  # saves it as a reader knows it
        held = recorded.tensors(save(stage, tmp_path / "again", 1))
        teacher = Model(shape, from_megatron(held, shape, "start."))
    samples = [*written("sums", [5, 3]), *written("words", [1, 2, 7], seed=1)]
    samples[1].loss_mask = np.zeros(3, bool)  # as without a context
    found = gradients(stage, samples)
    for domain, own in (("sums", samples[:1]), ("words", samples[2:])):
        values, kls = [], []
        for each in own:
            assert each.teacher_prompt is not None
            p, q = read(student, each, each.prompt), read(teacher, each, each.teacher_prompt)
            values.append(loss(p, q))
            kls.append(reverse(p, q))
        kl = torch.cat(kls).mean().item()
        assert found[f"teacher_kl/{domain}"] == pytest.approx(kl, rel=1e-4)
        found[domain] = torch.cat(values).mean().item()
    assert found["loss"] == pytest.approx((found["sums"] + found["words"]) / 2, rel=1e-4)
    assert found["token_share/sums"] == pytest.approx(5 / 15)  # the masked one has no tokens


def test_a_step_of_masked_samples_alone_has_no_loss(tmp_path: Path) -> None:
    stage = merge(tmp_path, **SELF)
    samples = [*written("sums", [5, 3]), *written("words", [1])]
    for each in samples:
        each.loss_mask = np.zeros(len(each.response), bool)
    found = gradients(stage, samples)
    assert found["loss"] == found["token_share/sums"] == found["gradient_share/sums"] == 0
    assert stage.policy.step() == 0


@pytest.mark.parametrize("context", ["answer", "sibling", "demonstration"])
def test_a_stage_steps_with_every_context(context: str, tmp_path: Path) -> None:
    """The other domain keeps its own teacher."""
    teachers = {"sums": "self", "words": "experts"}
    stage = merge(tmp_path, teachers=teachers, self_teacher={"context": context})
    metrics = stage.step(1)
    assert metrics["teacher_kl/sums"] > 0 and metrics["gradient_norm"] > 0
    assert metrics["context_too_long/sums"] == 0
    assert "no_context/words" not in metrics
    assert 0 <= metrics["no_context/sums"] < 1
    samples = read_samples(samples_file(tmp_path / "rollouts", 1))
    masked = [each["learned"] == [] for each in samples]
    assert sum(masked) == metrics["no_context/sums"] * len(masked) / 2


def test_a_killed_merge_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Weights, averages, metrics; killed in the first, the second and the fourth step."""
    kills = [A_STEP // 2, A_STEP + 3, A_STEP + 2]
    check_kills(
        tmp_path,
        [FakeEngine(trouble=after(answers)) for answers in kills],
        self_teacher={"context": "sibling", "ema_decay": 0.5},
        averaged_over="gap",
        **SELF,
    )


def test_the_context_matters_and_weights_of_a_decay_do(tmp_path: Path) -> None:
    found = []
    for number, own in enumerate(
        ({}, {"ema_decay": 0.0}, {"template": "{prompt}{context}"}, {"context": "demonstration"})
    ):
        _, measured = run(tmp_path / str(number), FakeEngine(), self_teacher=own, **SELF)
        found.append([each["loss"] for each in measured[:2]])
    assert found[0][0] == found[1][0]  # no update has moved the average away
    assert len({each[1] for each in found}) == 4


# Contexts.


def contexts(most: int = 200, domain: Any = None, **settings: Any) -> Contexts:
    given = SelfTeacherSettings.model_validate({"template": "{context}:{prompt}", **settings})
    domain = domain or toy_domain()
    return Contexts(given, {"sums": domain}, TOKENIZER, most)


def group(rewards: list[float | None], **problem: Any) -> Group:
    fields = {"domain": "sums", "index": 0, "prompt": "1+1=", "answer": "2", **problem}
    drawn = [
        Sample(
            "sums",
            np.array(TOKENIZER.encode("1+1="), np.int32),
            np.array([*TOKENIZER.encode(f"r{number}"), TOKENIZER.end_token], np.int32),
            reward=reward,
            reward_parts=None if reward is None else {"parity": reward},
        )
        for number, reward in enumerate(rewards)
    ]
    return Group(Problem(**fields), 0, list(drawn), ended=1)


def prompts(of: Contexts, given: Group) -> tuple[list[str | None], dict[str, float]]:
    metrics = of.assign([given])
    texts = []
    for sample in given.samples:
        prompt = sample.teacher_prompt
        texts.append(None if prompt is None else TOKENIZER.decode(prompt))
        assert (prompt is None) == (not len(sample.learned))
    return texts, metrics


def test_the_answer_is_put_into_the_template_in_one_pass() -> None:
    assert prompts(contexts(), group([1.0]))[0] == ["2:1+1="]
    assert prompts(contexts(template="{prompt}{context}"), group([1.0]))[0] == ["1+1=2"]
    with pytest.raises(TokenizerError, match=r"the teacher self of sums reads of problem 0$"):
        prompts(contexts(), group([1.0], answer="{prompt}"))  # not put in again
    assert prompts(contexts(), group([1.0, 0.0], answer="")) == (
        [None, None],
        {"no_context/sums": 1.0, "context_too_long/sums": 0.0},
    )


def test_a_sibling_is_another_right_response_the_next_in_a_circle() -> None:
    found, metrics = prompts(contexts(context="sibling"), group([1.0, 0.0, 1.0, None]))
    assert found == ["r2:1+1=", "r2:1+1=", "r0:1+1=", "r0:1+1="]
    assert metrics == {"no_context/sums": 0.0, "context_too_long/sums": 0.0}
    found, metrics = prompts(contexts(context="sibling"), group([0.0, 1.0, 0.0]))
    assert found == ["r1:1+1=", None, "r1:1+1="]  # never itself
    assert metrics["no_context/sums"] == pytest.approx(1 / 3)
    assert prompts(contexts(context="sibling"), group([0.0, None]))[0] == [None, None]


def test_a_prompt_that_does_not_fit_the_model_is_masked_and_counted() -> None:
    """`2:1+1=` and two of three response tokens are read."""
    assert prompts(contexts(most=8), group([1.0]))[0] == ["2:1+1="]
    found, metrics = prompts(contexts(most=7), group([1.0]))
    assert (found, metrics["context_too_long/sums"]) == ([None], 1.0)


def test_a_column_is_of_the_prompt_s_row(tmp_path: Path) -> None:
    of = contexts(context="column", column="hint")
    assert prompts(of, group([1.0], fields={"hint": "add"}))[0] == ["add:1+1="]
    assert prompts(of, group([1.0], fields={"hint": 7}))[0] == ["7:1+1="]
    assert prompts(of, group([1.0], fields={"hint": None}))[0] == [None]
    with pytest.raises(DomainError, match="no column 'hint', which self_teacher"):
        prompts(of, group([1.0], fields={"hnit": "add"}))
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "2+2="}\n{"prompt": "1+1=", "hint": "caf\u00e9"}\n')
    read = toy_domain(
        prompts={"source": "jsonl", "path": str(file)}, rewards={"a": {"kind": "math"}}
    )
    of = contexts(context="column", column="hint", domain=read)
    with pytest.raises(TokenizerError, match=rf"teacher self of sums reads of {file}:2$"):
        prompts(of, group([1.0], fields={"hint": "caf\u00e9"}))


def test_chat_messages_keep_their_roles() -> None:
    chat = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="})
    text = TOKENIZER.render(chat, generation_prompt=True)
    found, _ = prompts(contexts(), group([1.0], prompt=text, messages=chat))
    assert found == ["system: be brief user: 2:1+1= assistant: "]


def test_a_demonstration_is_of_the_very_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "response": "1,2"},
        {"prompt": "2+1=", "response": "3"},
        {"prompt": "1+1=", "response": "again 2"},
    ]
    file = tmp_path / "shown.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": "jsonl", "path": str(file), "response": "response"}
    of = contexts(context="demonstration", domain=toy_domain(demonstrations=settings))
    assert prompts(of, group([1.0]))[0] == ["1,2:1+1="]
    assert prompts(of, group([1.0], prompt="5+1="))[0] == [None]
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    of = contexts(
        context="demonstration",
        domain=toy_domain(demonstrations={"source": "jsonl", "path": str(chat)}),
    )
    assert prompts(of, group([1.0]))[0] == ["two:1+1="]
