"""Mixtures of sources: exact shares, restored cursors, and no held-out prompt in any of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.files import sha256
from stages.data.collected import prompt_columns, write_joined, write_part
from stages.data.mixture import Mixture
from stages.data.problem import DomainError, Problem
from stages.data.prompts import is_held_out
from stages.data.tokenizer import CharacterTokenizer
from stages.kinds.dpo.settings import DpoSettings
from stages.kinds.dpo.work import _stream
from stages.kinds.sft.settings import SftSettings
from stages.kinds.sft.work import Sft
from tests.fake_engines import toy_domain, toy_job, toy_run

TOKENIZER = CharacterTokenizer()


@pytest.mark.parametrize(
    ("weights", "count", "dealt"),
    [
        ({"a": 3, "b": 1}, 4, {"a": 3, "b": 1}),
        ({"a": 0.1, "b": 0.9}, 10, {"a": 1, "b": 9}),
        ({"a": 0.3, "b": 0.3, "c": 0.3}, 2, {"a": 1, "b": 1, "c": 0}),
        ({"a": 5}, 3, {"a": 3}),
    ],
)
def test_a_step_is_dealt_by_weights(
    weights: dict[str, float], count: int, dealt: dict[str, int]
) -> None:
    assert Mixture(weights).deal(count) == dealt


def test_shares_are_exact_in_the_long_run_and_no_source_is_a_sequence_ahead() -> None:
    weights = {"a": 0.7, "b": 0.25, "c": 0.05}  # 14 : 5 : 1
    mixture, total = Mixture(weights), Counter[str]()
    for step in range(1, 101):
        given = mixture.deal(7)
        assert sum(given.values()) == 7 and min(given.values()) >= 0
        total.update(given)
        for name, weight in weights.items():
            assert -1 < total[name] - weight * 7 * step < 1
        if 7 * step % 20 == 0:
            assert [total[name] * 20 for name in weights] == [7 * step * n for n in (14, 5, 1)]
    assert mixture.dealt == total == {"a": 490, "b": 175, "c": 35}


def test_steps_of_any_size_deal_alike() -> None:
    weights = {"a": 2.0, "b": 1.5, "c": 0.1}
    one, other = Mixture(weights), Mixture(weights)
    for _ in range(60):
        one.deal(1)
    for _ in range(4):
        other.deal(15)
    assert one.dealt == other.dealt


# The stage: its sources without its policy, which a step does not need to draw.


@pytest.fixture
def without_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("stages.kinds.sft.work.TrainedPolicy", lambda *_: SimpleNamespace())
    monkeypatch.setattr("stages.kinds.sft.work.look_for_held_out", lambda *_: None)
    monkeypatch.setattr("stages.kinds.sft.work.is_main", lambda: True)
    yield


def collected(directory: Path, problems: list[Problem]) -> Path:
    """Write what a stage collected: one response to each problem."""
    rows = [
        {
            **prompt_columns(problem),
            "response": f"c{number}",
            "reward": 1.0,
            "dropped": None,
        }
        for number, problem in enumerate(problems)
    ]
    write_part(directory / "part.parquet", rows)
    path = directory / "collected.parquet"
    write_joined(path, [directory / "part.parquet"], only_kept=True)
    (directory / "collection.json").write_text(json.dumps({"digest": sha256(path)}))
    return path


def problems(held_out: bool, count: int, messages: bool = False) -> list[Problem]:
    """Return problems of one side of the split, as text or as chat messages."""
    found = []
    for number in range(1000):
        chat = ({"role": "user", "content": f"{number}+1="},)
        text = TOKENIZER.render(chat, generation_prompt=True) if messages else f"{number}+1="
        problem = Problem("sums", number, text, "", {}, chat if messages else None)
        if is_held_out(problem, 0.25) == held_out:
            found.append(problem)
    return found[:count]


def stage(directory: Path, sources: dict[str, Any], count: int = 6, **given: Any) -> Sft:
    block = SftSettings.model_validate(
        {
            "data": sources,
            "sequences_per_step": count if sources else None,
            "optimizer": {"learning_rate": 1e-3},
            "loop": {"steps": 4},
        }
    )
    shown = {"demonstrations": {"count": 30, "sequences_per_step": 5}}
    settings = toy_run(sums=toy_domain(**shown)).model_copy(update={"stages": {"tuned": block}})
    fields = {"kind": "sft", "domain": None, "domains": ["sums"], **given}
    return Sft(toy_job(directory, settings, stage="tuned", block="tuned", **fields))


def responses(samples: list[Any]) -> list[str]:
    return [TOKENIZER.decode(sample.response) for sample in samples]


@pytest.mark.usefixtures("without_policy")
def test_sources_are_mixed_by_weights_and_continue_where_they_were(tmp_path: Path) -> None:
    lines = [json.dumps({"q": p.prompt, "a": f"f{n}"}) for n, p in enumerate(problems(False, 9))]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    data = {
        "kept": {"stage": "collect", "weight": 3},
        "own": {"source": "jsonl", "path": tmp_path / "own.jsonl", "prompt": "q", "response": "a"},
        "shown": {"domain": "sums", "weight": 2},
    }
    path = {"kept": collected(tmp_path, problems(False, 20))}
    first = stage(tmp_path, data, 5, data=path)
    first.sources["own"].too_long = 3  # of earlier steps, which a step's metric leaves out
    steps, states = [], []
    for step in range(1, 13):
        states.append(json.loads(json.dumps(first.state())))
        drawn, too_long = first.draw(step)
        assert too_long == 0
        steps.append(responses(drawn))
    kinds = Counter(text[0] for step in steps for text in step)
    assert (kinds["c"], kinds["f"], kinds["<"]) == (30, 10, 20)
    assert Counter(text for step in steps for text in step if text[0] == "c").total() == 30
    assert len({text for step in steps[:6] for text in step if text[0] == "c"}) == 15  # no repeat
    for step in (1, 4, 11):
        resumed = stage(tmp_path, data, 5, data=path)
        resumed.restore(states[step - 1])
        assert [responses(resumed.draw(n)[0]) for n in range(step, 13)] == steps[step - 1 :]


@pytest.mark.usefixtures("without_policy")
def test_a_step_has_its_sources_in_the_order_of_the_block(tmp_path: Path) -> None:
    """And each source's rows in the order that its stream gives them."""
    data = {"kept": {"stage": "collect", "weight": 1}, "shown": {"domain": "sums", "weight": 3}}
    path = {"kept": collected(tmp_path, problems(False, 20))}
    of, same = (stage(tmp_path, data, 8, data=path) for _ in range(2))
    drawn = responses(of.draw(1)[0])
    assert [text[0] for text in drawn] == ["c"] * 2 + ["<"] * 6
    assert drawn[:2] == responses(list(same.sources["kept"].draw(1, 2)))
    assert drawn[2:] == responses(list(same.sources["shown"].draw(1, 6)))
    of.sources["kept"].too_long, before = 5, of.sources["kept"].draw

    def skip(step: int, count: int) -> Any:
        of.sources["kept"].too_long += 2
        return before(step, count)

    of.sources["kept"].draw = skip  # type: ignore[method-assign]
    assert of.draw(2)[1] == 2.0  # those of this step alone


@pytest.mark.usefixtures("without_policy")
@pytest.mark.parametrize("messages", [False, True])
def test_held_out_prompts_never_come_in(tmp_path: Path, messages: bool) -> None:
    """Also where the collected prompt is the rendering of chat messages, which are split."""
    mixed = [*problems(True, 8, messages), *problems(False, 8, messages)]
    data = {"kept": {"stage": "collect"}}
    of = stage(tmp_path, data, 4, data={"kept": collected(tmp_path, mixed)})
    drawn = [sample for step in range(4) for sample in of.draw(step)[0]]
    assert set(responses(drawn)) == {f"c{number}" for number in range(8, 16)}
    prompts = {TOKENIZER.decode(sample.prompt) for sample in drawn}
    assert prompts == {problem.prompt for problem in problems(False, 8, messages)}
    (tmp_path / "alone").mkdir()
    only = collected(tmp_path / "alone", problems(True, 3, messages))
    with pytest.raises(DomainError, match=r"stages\.tuned\.data\.kept\.path: none of the 3 usable"):
        stage(tmp_path, data, data={"kept": only})


@pytest.mark.usefixtures("without_policy")
def test_damaged_responses_are_not_trained_on(tmp_path: Path) -> None:
    path = collected(tmp_path, problems(False, 8))
    path.write_bytes(path.read_bytes()[:-20] + b"x" + path.read_bytes()[-19:])
    with pytest.raises(UserError, match=r"collected\.parquet: damaged: its SHA-256 differs"):
        stage(tmp_path, {"kept": {"stage": "collect"}}, data={"kept": path})
    pairs = {"kind": "dpo", "from": "x", "data": {"kept": {"stage": "collect"}}}
    own = DpoSettings.model_validate(
        {**pairs, "optimizer": {"learning_rate": 1}, "loop": {"steps": 4}}
    )
    job = toy_job(tmp_path, toy_run(sums=toy_domain()), kind="dpo", block="b", data={"kept": path})
    with pytest.raises(UserError, match=r"collected\.parquet: damaged: its SHA-256 differs"):
        _stream(job, own, "kept", TOKENIZER)


@pytest.mark.usefixtures("without_policy")
def test_messages_name_the_source(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n')
    bad = {"source": "jsonl", "path": tmp_path / "bad.jsonl", "response": "response"}
    message = r"^stages\.tuned\.data\.mine: .*bad\.jsonl:1: no column 'response'"
    with pytest.raises(DomainError, match=message):
        stage(tmp_path, {"mine": bad})


@pytest.mark.usefixtures("without_policy")
def test_without_data_each_domain_gives_what_it_says(tmp_path: Path) -> None:
    of = stage(tmp_path, {})
    assert of.state() == {"cursors": {"sums": 0}}
    drawn = responses(of.draw(1)[0])
    assert len(drawn) == 5
    again = stage(tmp_path, {})
    again.restore({"cursors": {"sums": 0}})
    assert responses(again.draw(1)[0]) == drawn
