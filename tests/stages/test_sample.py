"""Rejection sampling: a real policy and real rewards on the responses of fake engines."""

from __future__ import annotations

import gc
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pyarrow.parquet as parquet
import pytest

from parallel.checkpoint import load
from parallel.errors import UserError
from parallel.files import sha256
from parallel.model.policy import Policy
from stages.data.collected import read_part
from stages.data.scripts import Script, other_letters
from stages.kinds.sample import work as sampling_stage
from stages.kinds.sample.keep import drop_reasons
from stages.kinds.sample.settings import KeepSettings, SampleSettings
from stages.kinds.sample.work import RejectionSampling, parts_of
from stages.objectives.groups import Group
from stages.sampling.logprob_check import MismatchError
from stages.settings import StageJob
from tests.fake_engines import FakeEngine, RefittedFleet, toy_domain, toy_job, toy_run
from tests.stages.conftest import OPENED
from tests.stages.toys import measuring

PROMPTS, STEP, SIZE = 20, 6, 4  # prompts of a domain, of a part, responses to each


def row(response: str = "12", reward: float | None = 1.0, **given: Any) -> dict[str, Any]:
    return {
        "response": response,
        "reward": reward,
        "tokens": len(response) + 1,
        "finish_reason": "stop",
        **given,
    }


def reasons(rows: list[dict[str, Any]], seed: int = 0, **keep: Any) -> list[str | None]:
    return drop_reasons(rows, KeepSettings(**{"reward": 1.0, **keep}), seed)


@pytest.mark.parametrize(
    ("given", "keep", "expected"),
    [
        ({}, {}, None),
        ({"reward": 0.9}, {}, "reward"),
        ({"reward": 0.9}, {"reward": 0.9}, None),
        ({"reward": -5.0}, {"reward": None}, None),
        ({"reward": None}, {"reward": None}, "ungraded"),
        ({"response": " "}, {}, "empty"),
        ({"response": ""}, {"reward": None}, "empty"),
        ({"finish_reason": "length"}, {}, "truncated"),
        ({"finish_reason": "length"}, {"finished": False}, None),
        ({"tokens": 4}, {"min_tokens": 4}, None),
        ({"tokens": 3}, {"min_tokens": 4}, "min_tokens"),
        ({"tokens": 4}, {"max_tokens": 4}, None),
        ({"tokens": 5}, {"max_tokens": 4}, "max_tokens"),
        ({"response": "ab是"}, {"script": {"allowed": ["Latin"]}}, "script"),
        ({"response": "ab是"}, {"script": {"allowed": ["Latin"], "max_other": 0.34}}, None),
        ({"response": "ab是"}, {"script": {"allowed": ["Latin", "Han"]}}, None),
        ({"response": "1 + 2 = 3"}, {"script": {"allowed": ["Latin"]}}, None),
    ],
)
def test_a_response_is_dropped_for_its_own_reason(
    given: dict[str, Any], keep: dict[str, Any], expected: str | None
) -> None:
    assert reasons([row(**given)], **keep) == [expected]


def test_of_equal_responses_the_first_that_passes_is_kept() -> None:
    rows = [row("a", 0.0), row("a"), row("b"), row("a"), row("b ")]
    assert reasons(rows) == ["reward", None, None, "duplicate", None]
    assert reasons(rows, duplicates=True) == ["reward", None, None, None, None]


def test_at_most_per_prompt_are_kept_by_a_seeded_draw() -> None:
    rows = [row(str(number)) for number in range(10)]
    kept = Counter(
        place
        for seed in range(300)
        for place, why in enumerate(reasons(rows, seed, per_prompt=3))
        if why is None
    )
    assert sum(kept.values()) == 900
    assert min(kept.values()) > 50  # of 90: no place is preferred
    assert reasons(rows, 7, per_prompt=3) == reasons(rows, 7, per_prompt=3)
    assert set(reasons(rows, per_prompt=3)) == {None, "per_prompt"}
    assert reasons(rows, per_prompt=10) == [None] * 10


def test_the_best_are_kept_and_equal_ones_are_drawn() -> None:
    rows = [row(str(number), reward) for number, reward in enumerate([1.0, 3.0, 1.0, 2.0, 1.0])]
    kept = [
        {
            place
            for place, why in enumerate(reasons(rows, seed, per_prompt=3, choose="best"))
            if not why
        }
        for seed in range(40)
    ]
    assert all({1, 3} < each for each in kept)
    assert len({frozenset(each) for each in kept}) == 3


def test_letters_have_the_scripts_that_unicode_gives_them() -> None:
    """Compare with the first words of the letters' names, which begin with the script's."""
    for script in set(get_args(Script)) - {"Han"}:
        letters = [
            chr(code)
            for code in range(0x10000)
            if chr(code).isalpha() and unicodedata.name(chr(code)).startswith(script.upper())
        ]
        others = [letter for letter in letters if other_letters(letter, (script,))]
        assert len(letters) > 20, script
        assert not others, script
        assert other_letters("".join(letters), ("Han",)) > 0.99, script
    assert other_letters("是", ("Han",)) == 0


def test_letters_of_no_script_are_not_counted() -> None:
    for common in "\N{DOUBLE-STRUCK CAPITAL R}5\N{MATHEMATICAL ITALIC SMALL X}+\N{ARABIC TATWEEL}":
        assert other_letters(f"{common}是", ("Latin",)) == 1.0
    assert other_letters("x² + 是", ("Latin",)) == 0.5
    assert other_letters("ﾊ", ("Katakana",)) == 0
    assert other_letters("1ª", ("Han",)) == 1.0  # a modifier of the script Latin


# The stage.


def job(directory: Path, bound: float = 1e9, domains: int = 1, **given: Any) -> StageJob:
    block = SampleSettings.model_validate(
        {
            "from": "cold_start",
            "prompts": PROMPTS,
            "sampling": {"prompts_per_step": STEP, "group_size": SIZE, "max_response_tokens": 8},
            "keep": {"reward": 1.0, "per_prompt": 2, **given.pop("keep", {})},
            **given,
        }
    )
    names = ["sums", "words"][:domains]
    settings = toy_run(bound, **{name: toy_domain() for name in names}).model_copy(
        update={"deterministic": True, "stages": {"collect": block}}
    )
    return toy_job(
        directory,
        settings,
        FakeEngine(),
        stage="collect",
        block="collect",
        kind="sample",
        domain=None,
        domains=names,
        parent=directory / "step_2",
    )


def start_elsewhere(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a checkpoint."""
    assert checkpoint.name == "step_2"
    policy.start_fresh(seed=1)


@pytest.fixture
def faked(one_rank: None) -> Iterator[None]:
    with (
        mock.patch("stages.sampling.engines.Fleet", RefittedFleet),
        mock.patch.object(load, "weights", start_elsewhere),
    ):
        yield


def run(of: StageJob) -> RejectionSampling:
    stage = RejectionSampling(of)
    OPENED.append(stage.engines)
    stage.draw()
    stage.finish()
    return stage


def kept(directory: Path) -> list[dict[str, Any]]:
    return parquet.read_table(directory / "collected.parquet").to_pylist()


@pytest.mark.usefixtures("faked")
def test_what_passes_is_written_with_its_provenance(tmp_path: Path) -> None:
    stage = run(job(tmp_path, domains=2))
    rows, found = kept(tmp_path), json.loads((tmp_path / "collection.json").read_text())
    assert found["digest"] == sha256(tmp_path / "collected.parquet")
    assert found["rows"] == len(rows) == sum(each["kept"] for each in found["domains"].values())
    assert found["drawn"] == 2 * PROMPTS * SIZE == len(rows) + sum(found["dropped"].values())
    for each in found["domains"].values():
        assert each["kept"] + sum(each["dropped"].values()) == each["drawn"] == PROMPTS * SIZE
    assert set(found["dropped"]) >= {"reward", "per_prompt"}
    assert max(Counter((row["domain"], row["problem"]) for row in rows).values()) == 2
    assert len({(row["domain"], row["seed"]) for row in rows}) == len(rows)
    for each in rows:
        assert "dropped" not in each
        assert each["reward"] == 1.0 and dict(each["reward_parts"]) == {"parity": 1.0}
        assert each["tokens"] == len(each["token_ids"])
        assert each["response"] == stage.engines.tokenizer.decode(each["token_ids"])
        assert (each["finish_reason"], each["stage"], each["weight_version"]) == (
            "stop",
            "collect",
            1,
        )
        problem = stage.problems[each["domain"]]
        assert [p.index for p in problem if p.key == each["problem"]] == [each["index"]]
        assert [p.prompt for p in problem if p.key == each["problem"]] == [each["prompt"]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 12, 18, 20, 26, 32, 38, 40]
    assert sum(line["kept"] for line in lines) == len(rows)
    assert sum(line["drawn"] for line in lines) == found["drawn"]
    assert all(line["steps"] == 2 * PROMPTS for line in lines)


@pytest.mark.usefixtures("faked")
def test_only_training_prompts_are_sampled_and_none_twice(tmp_path: Path) -> None:
    stage = run(job(tmp_path))
    problems = stage.problems["sums"]
    assert len({problem.key for problem in problems}) == PROMPTS
    fraction = stage.job.settings.domains["sums"].prompts.held_out_fraction
    assert all(int(problem.key, 16) >= fraction * 2**256 for problem in problems)
    drawn = [row for part in stage.parts for row in read_part(stage.file(part)) or ()]
    assert {row["problem"] for row in drawn} == {problem.key for problem in problems}


@pytest.mark.usefixtures("faked")
def test_one_check_beyond_the_bound_is_drawn_again(tmp_path: Path) -> None:
    with measuring(2.0, 0.5):
        run(job(tmp_path, bound=1.0))
    assert (tmp_path / "collection.json").exists()


@pytest.mark.usefixtures("faked")
def test_samples_of_another_model_are_not_kept(tmp_path: Path) -> None:
    """Fake engines make their log-probabilities up."""
    with pytest.raises(MismatchError):
        run(job(tmp_path, bound=1e-4))
    assert not (tmp_path / "collection.json").exists()
    assert not list((tmp_path / "drawn").glob("*"))


@pytest.mark.usefixtures("faked")
def test_a_filter_that_leaves_nothing_fails_and_keeps_what_was_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(job(tmp_path, keep={"reward": 2.0}))
    drawn = parquet.read_table(tmp_path / "drawn.parquet").to_pylist()
    dropped = Counter(row["dropped"] for row in drawn)
    assert len(drawn) == PROMPTS * SIZE and set(dropped) <= {"reward", "truncated", "empty"}
    message = str(caught.value)
    assert message.startswith(f"stages.collect.keep: nothing is left of {len(drawn)} responses: ")
    for why, count in dropped.items():
        assert f"{count} by {why}" in message
    assert str(tmp_path / "drawn.parquet") in message
    assert message.endswith("better model, and rerun with --from collect")
    assert not (tmp_path / "collection.json").exists()
    nothing_drawn = mock.patch.object(RejectionSampling, "_request", side_effect=AssertionError)
    with nothing_drawn, pytest.raises(UserError) as again:
        run(job(tmp_path, keep={"reward": 2.0}))
    assert str(again.value) == message


@pytest.mark.usefixtures("faked")
def test_too_few_prompts_are_named_with_the_setting(tmp_path: Path) -> None:
    few = {"source": "jsonl", "path": tmp_path / "few.jsonl"}
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n' * 3)
    of = job(tmp_path)
    domain = toy_domain(prompts=few)
    settings = of.settings.model_copy(update={"domains": {"sums": domain}})
    with pytest.raises(
        UserError, match=r"distinct train prompts.* or lower stages\.collect\.prompts"
    ):
        run(of.model_copy(update={"settings": settings}))


@pytest.mark.usefixtures("faked")
def test_a_stage_killed_at_any_part_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = run(job(tmp_path / "whole", domains=2))
    expected = (tmp_path / "whole" / "collected.parquet").read_bytes()
    counts = json.loads((tmp_path / "whole" / "collection.json").read_text())
    save = sampling_stage.write_part
    for stop in range(len(whole.parts)):
        directory = tmp_path / f"killed_{stop}"

        def killed(path: Path, rows: Any, stop: int = stop) -> None:
            if path.name == f"part_{stop:06d}.parquet":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(f".{path.name}.99").write_bytes(b"half of a part")
                raise KeyboardInterrupt
            save(path, rows)

        with (
            mock.patch.object(sampling_stage, "write_part", killed),
            pytest.raises(KeyboardInterrupt),
        ):
            run(job(directory, domains=2))
        assert len(list((directory / "drawn").glob("part_*"))) == stop
        resumed = run(job(directory, domains=2))
        assert len(resumed.missing) == len(whole.parts) - stop
        assert (directory / "collected.parquet").read_bytes() == expected
        assert json.loads((directory / "collection.json").read_text()) == counts
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [6, 12, 18, 20, 26, 32, 38, 40]
        assert not list((directory / "drawn").glob(".*"))


@pytest.mark.usefixtures("faked")
def test_a_part_that_is_damaged_or_of_other_prompts_is_drawn_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(job(tmp_path / "whole"))
    expected = (tmp_path / "whole" / "collected.parquet").read_bytes()
    for number, (content, why) in enumerate(
        [(b"PAR1", "damaged"), (whole.file(whole.parts[2]).read_bytes(), "of other prompts")]
    ):
        directory = tmp_path / str(number)
        run(job(directory))
        (directory / "collection.json").unlink()
        part = directory / "drawn" / "part_000001.parquet"
        part.write_bytes(content)
        capfd.readouterr()
        assert len(run(job(directory)).missing) == 3
        assert f"{part} is {why}; drawing it again, and all after it" in capfd.readouterr().err
        assert (directory / "collected.parquet").read_bytes() == expected


@pytest.mark.usefixtures("faked")
def test_a_renamed_stage_that_samples_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    run(job(tmp_path / "old"))
    of = job(tmp_path / "new")
    block = of.settings.stages["collect"]
    settings = of.settings.model_copy(update={"stages": {"renamed": block}})
    new = {"stage": "renamed", "block": "renamed", "seeded_as": "collect", "settings": settings}
    run(of.model_copy(update=new))
    old, renamed = (tmp_path / name / "collected.parquet" for name in ("old", "new"))
    assert renamed.read_bytes() == old.read_bytes()


@pytest.mark.usefixtures("faked")
def test_parts_are_requested_one_ahead_unless_deterministic(tmp_path: Path) -> None:
    order: list[str] = []
    request, collect = RejectionSampling._request, RejectionSampling._collect

    def requested(self: Any, part: Any) -> Any:
        order.append(f"+{part.number}")
        return request(self, part)

    def waited(self: Any, part: Any, groups: Any) -> None:
        order.append(f"-{part.number}")
        collect(self, part, groups)

    one = job(tmp_path / "one")
    free = one.settings.model_copy(update={"deterministic": False})
    other = job(tmp_path / "other").model_copy(update={"settings": free})
    with (
        mock.patch.object(RejectionSampling, "_request", requested),
        mock.patch.object(RejectionSampling, "_collect", waited),
    ):
        run(one)
        assert order == ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]
        order.clear()
        run(other)
        assert order == ["+0", "+1", "-0", "+2", "-1", "+3", "-2", "-3"]


@pytest.mark.usefixtures("faked")
def test_a_stage_killed_beside_a_saved_part_has_the_metrics_of_every_part(tmp_path: Path) -> None:
    save = sampling_stage.write_part

    def killed(path: Path, rows: Any) -> None:
        save(path, rows)
        if path.name == "part_000001.parquet":
            raise KeyboardInterrupt

    with mock.patch.object(sampling_stage, "write_part", killed), pytest.raises(KeyboardInterrupt):
        run(job(tmp_path))
    assert len(run(job(tmp_path)).missing) == 2
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [6, 12, 18, 20]


@pytest.mark.usefixtures("faked")
def test_what_was_saved_is_not_held(tmp_path: Path) -> None:
    """The tokens, routes and log-probabilities of a million responses do not fit into memory."""
    held = []
    collect = RejectionSampling._collect

    def counted(self: Any, part: Any, groups: Any) -> None:
        collect(self, part, groups)
        gc.collect()
        held.append(sum(isinstance(each, Group) for each in gc.get_objects()))

    with mock.patch.object(RejectionSampling, "_collect", counted):
        run(job(tmp_path))
    assert len(held) == 4 and max(held) <= held[0]


@pytest.mark.usefixtures("faked")
def test_a_part_that_cannot_be_read_is_an_error_and_not_drawn_again(tmp_path: Path) -> None:
    """Such as of a busy disk; all later parts would be deleted with it."""
    run(job(tmp_path))
    part = tmp_path / "drawn" / "part_000001.parquet"
    part.unlink()
    part.symlink_to("/proc/self/mem")  # reading it fails
    with pytest.raises(OSError, match=r"part_000001\.parquet"):
        run(job(tmp_path))
    assert len(list((tmp_path / "drawn").iterdir())) == 4


@pytest.mark.usefixtures("faked")
def test_chat_messages_of_two_shapes_are_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    """Each part fits into Parquet, but not all of them into one file."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1=", "of": "x" if n < 9 else n}]}
        for n in range(50)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = {"source": "jsonl", "path": tmp_path / "chats.jsonl", "prompt": "messages"}
    of = job(tmp_path)
    settings = of.settings.model_copy(update={"domains": {"sums": toy_domain(prompts=chats)}})
    drawn = mock.patch.object(RejectionSampling, "_request", side_effect=AssertionError)
    with drawn, pytest.raises(UserError, match=r"domains\.sums\.prompts\.path: its chat messages"):
        run(of.model_copy(update={"settings": settings}))


def test_parts_cover_every_prompt_once() -> None:
    sampled = {name: toy_domain().sampling for name in ("a", "b")}
    parts = parts_of(11, sampled)
    assert [part.number for part in parts] == list(range(len(parts)))
    for name in sampled:
        covered = [i for part in parts if part.domain == name for i in range(part.begin, part.end)]
        assert covered == list(range(11))
