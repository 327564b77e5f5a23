"""The rollouts' write-ahead log: what is whole in it is given back, each to its own question."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from parallel.engine.log import RolloutLog, frame
from parallel.engine.wire import (
    Generation,
    GenerationRequest,
    Prompt,
    Sampling,
    model_digest,
    sample_of,
)
from parallel.estimates.engine_memory import response_bytes
from parallel.sample import Sample
from parallel.settings import END_TOKEN
from stages.data.problem import Problem
from stages.domains import RolloutSettings, SamplingSettings
from stages.objectives.groups import Group, groups_of
from stages.sampling.engines import StageEngines, rollout_log
from tests.fake_engines import (
    MODEL,
    FakeEngine,
    RefittedFleet,
    answer,
    toy_domain,
    toy_job,
    toy_run,
)
from tests.stages.toys import Killed, after, asked

pytestmark = pytest.mark.usefixtures("one_rank")

SAMPLING = Sampling(temperature=1.0, max_tokens=12, end_tokens=(END_TOKEN,))
Answered = tuple[GenerationRequest, Generation]


def answered(seed: int, version: int = 3, later: int | None = None) -> Answered:
    """Return a question and its answer; every third answer has the sets of its tokens."""
    draw = random.Random(seed)
    prompt = [draw.randrange(2, 70) for _ in range(draw.randrange(1, 9))]
    question = GenerationRequest(draw.choice(("sums", "Wörter")), prompt, seed, SAMPLING)
    given = answer(Prompt(0, prompt, seed), SAMPLING, version, later)
    if seed % 3 == 0:
        tokens = np.frombuffer(given.tokens, np.int32)
        sizes = np.array([draw.randrange(1, 5) for _ in tokens], np.int32)
        kept = np.repeat(tokens, sizes).tobytes()
        given = msgspec.structs.replace(given, kept=kept, kept_sizes=sizes.tobytes())
    return question, given


def opened(directory: Path, origin: str = "a", deterministic: bool = False) -> Any:
    """Return a log whose notices go to a mock."""
    return RolloutLog(directory, origin, MODEL, deterministic, mock.Mock())


def written(directory: Path, entries: Sequence[Answered], **how: Any) -> Path:
    """Return the one file of a log with these entries."""
    log = opened(directory, **how)
    for entry in entries:
        log.add(*entry)
    log.close()
    [path] = directory.iterdir()
    return path


def same(found: Sample | None, entry: Answered) -> bool:
    """Return true if a sample equals the entry's, field by field."""
    expected = vars(sample_of(*entry, MODEL))
    if found is None:
        return False
    for name, value in vars(found).items():
        if isinstance(value, np.ndarray):
            if not np.array_equal(value, expected[name]) or value.dtype != expected[name].dtype:
                return False
        elif name == "kept" and value is not None:
            if [each.tolist() for each in value] != [e.tolist() for e in expected[name]]:
                return False
        elif value != expected[name]:
            return False
    return True


def test_every_written_answer_is_read(tmp_path: Path) -> None:
    entries = [answered(seed) for seed in range(60)]
    written(tmp_path, entries)
    log = opened(tmp_path)
    questions = [question for question, _ in reversed(entries)]
    found = log.take(3, questions)
    assert all(map(same, found, reversed(entries)))
    assert log.take(3, questions) == [None] * 60  # each is used once
    log._notify.assert_not_called()


def test_an_answer_matches_only_its_own_question(tmp_path: Path) -> None:
    question, given = answered(5)
    written(tmp_path, [(question, given)])
    cooler = msgspec.structs.replace(SAMPLING, temperature=0.5)
    others = [
        GenerationRequest("others", question.prompt, 5, SAMPLING),
        GenerationRequest(question.domain, [*question.prompt, 2], 5, SAMPLING),
        GenerationRequest(question.domain, question.prompt, 6, SAMPLING),
        GenerationRequest(question.domain, question.prompt, 5, cooler),
    ]
    log = opened(tmp_path)
    assert log.take(3, others) == [None] * 4
    assert log.take(2, [question]) == log.take(4, [question]) == [None]
    assert same(log.take(3, [question])[0], (question, given))


def test_a_file_truncated_in_its_last_frame_loses_only_that_frame(tmp_path: Path) -> None:
    first, second, last = (answered(seed) for seed in (1, 2, 3))
    path = written(tmp_path, [first, second, last])
    whole = path.read_bytes()
    for cut in range(1, len(frame(last)) + 1):
        path.write_bytes(whole[:-cut])
        log = opened(tmp_path)
        found = log.take(3, [first[0], second[0], last[0]])
        assert same(found[0], first) and same(found[1], second) and found[2] is None
        log._notify.assert_not_called()
        log.add(*last)  # it continues where the whole ones end
        log.close()
        assert path.read_bytes() == whole


def test_entries_after_a_flipped_bit_are_dropped_and_reported(tmp_path: Path) -> None:
    entries = [answered(seed) for seed in range(4)]
    path = written(tmp_path, entries)
    whole = path.read_bytes()
    ends = np.cumsum(
        [len(whole) - sum(map(len, map(frame, entries))), *map(len, map(frame, entries))]
    )
    for place in random.Random(0).sample(range(8 * len(whole)), 400):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        log = opened(tmp_path)
        before = int(np.searchsorted(ends, place // 8, side="right")) - 1  # entries, -1: no origin
        found = log.take(3, [question for question, _ in entries])
        for number, (sample, entry) in enumerate(zip(found, entries, strict=True)):
            assert same(sample, entry) if number < before else sample is None
        [[message]] = [call.args for call in log._notify.call_args_list]
        assert str(path) in message and "damaged at byte" in message
        log.close()


def changed(entry: Answered, **changes: Any) -> Answered:
    """Return the entry with other fields of the answer."""
    return entry[0], msgspec.structs.replace(entry[1], **changes)


def nonsense() -> dict[str, Any]:
    """Return invalid contents of a frame with the right checksum, by a regex of their message."""
    entry = answered(1)
    plain: Any = msgspec.to_builtins(entry, builtin_types=(bytes,))
    return {
        "is not a valid response: .*routes": changed(entry, routes=b"abc"),
        "is not a valid response: a token outside": changed(
            entry, tokens=np.full(len(entry[1].tokens) // 4, -1, np.int32).tobytes()
        ),
        "is not a valid response: .*codec can't decode": [
            {**plain[0], "domain": msgspec.Raw(NO_TEXT)},
            *plain[1:],
        ],
        "above 0, infinite or NaN": changed(
            entry, logprobs=np.full(len(entry[1].tokens) // 4, np.nan, np.float32).tobytes()
        ),
        "is not a valid response: another weight version": changed(
            entry, versions=np.full(len(entry[1].tokens) // 4, 7, np.int32).tobytes()
        ),
        "missing required field `prompt`": [{"domain": "sums"}, plain[1]],
        "Expected `int`, got `str`": [{**plain[0], "seed": "five"}, plain[1]],
        "is not a valid response: unknown keys": [{**plain[0], "colour": "red"}, plain[1]],
        "is not a valid response: Expected `array": 17,
        "is not a valid response: .*length 2": [plain[0]],
        "is not a valid response: .*": [{**plain[0], "prompt": [2**60]}, plain[1]],
        "not a valid response: .*[Rr]ecursion": [
            {**plain[0], "colour": msgspec.Raw(DEEP)},
            plain[1],
        ],
    }


NO_TEXT = b"\xa1\xff"
DEEP = b"\x91" * 100_000 + b"\xc0"  # lists in lists


@pytest.mark.parametrize("message", nonsense())
def test_an_invalid_frame_is_reported_and_put_aside(message: str, tmp_path: Path) -> None:
    good, other = answered(0), answered(2)
    path = written(tmp_path, [good])
    whole = path.read_bytes()
    path.write_bytes(whole + frame(nonsense()[message]) + frame(other))
    log = opened(tmp_path)
    [first, *rest] = log.take(3, [good[0], answered(1)[0], other[0]])
    assert same(first, good)
    assert rest == [None, None]
    [[said]] = [call.args for call in log._notify.call_args_list]
    assert re.search(message, said), said
    assert said.startswith(f"{path}: ")
    log.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ({"format": 2, "digest": "a"}, "it has format 2, expected 1"),
        ({"format": "new"}, "its first frame is not an origin: Expected `int`, got `str`"),
        (None, "its first frame is not an origin"),
    ],
)
def test_a_log_with_an_invalid_origin_is_restarted(
    first: object, message: str, tmp_path: Path
) -> None:
    entry = answered(1)
    path = written(tmp_path, [entry])
    sound = path.read_bytes()
    path.write_bytes(frame(first) + frame(entry))
    log = opened(tmp_path)
    assert log.take(3, [entry[0]]) == [None]
    assert message in log._notify.call_args.args[0]
    log.add(*entry)
    log.close()
    assert path.read_bytes() == sound


def test_a_log_outlives_what_only_the_prompt_shows() -> None:
    """Every request states the prompt's tokens: another rendering is another request."""
    shown = {"chat_template_date": date(2026, 2, 3), "chat_template_arguments": {"style": "terse"}}
    assert model_digest(MODEL.model_copy(update=shown)) == model_digest(MODEL)
    assert model_digest(MODEL.model_copy(update={"rope_base": 7.0})) != model_digest(MODEL)


def test_a_log_of_another_origin_is_not_used(tmp_path: Path) -> None:
    entry = answered(1)
    written(tmp_path, [entry])
    log = opened(tmp_path, origin="b")
    assert log.take(3, [entry[0]]) == [None]
    assert "another model, parent or sampling" in log._notify.call_args.args[0]
    log.close()
    again = opened(tmp_path, origin="a")
    assert again.take(3, [entry[0]]) == [None]  # it was started again


def test_answers_sampled_by_several_weights_are_dropped(tmp_path: Path) -> None:
    seeds = [seed for seed in range(9) if len(answered(seed)[1].tokens) > 4]  # of a token or more
    log = opened(tmp_path)
    for seed in seeds:
        log.add(*answered(seed, version=3, later=4))
    assert not list(tmp_path.iterdir())


def test_covered_entries_and_those_of_other_weights_are_forgotten(tmp_path: Path) -> None:
    def versions() -> list[str]:
        return sorted(path.stem.removeprefix("version_") for path in tmp_path.iterdir())

    log = opened(tmp_path)
    for version in range(1, 8):
        log.add(*answered(version, version))
    log.cover(2)
    log.add(*answered(9, 2))  # late
    assert versions() == ["3", "4", "5", "6", "7"]
    log.begin(4, later=True)
    assert versions() == ["4", "5", "6", "7"]
    log.close()
    log = opened(tmp_path)
    assert not log.forget(7)
    assert same(log.take(6, [answered(6)[0]])[0], answered(6, 6))
    assert log.forget(6)
    assert not log.forget(6)
    assert versions() == ["4", "5"]
    log.begin(4, later=False)
    assert versions() == ["4"]


def test_a_deterministic_run_uses_a_version_whole_or_not_at_all(tmp_path: Path) -> None:
    entries = [answered(seed) for seed in range(4)]
    questions = [question for question, _ in entries]
    written(tmp_path, entries, deterministic=True)
    log = opened(tmp_path, deterministic=True)
    assert log.take(3, questions[:2]) == [None] * 2  # who knows what else was asked
    log.end(3)
    log.close()
    log = opened(tmp_path, deterministic=True)
    assert log.take(3, [*questions, answered(9)[0]]) == [None] * 5
    assert all(map(same, log.take(3, questions), entries))


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path) -> None:
    log = opened(tmp_path)
    full = mock.patch.object(log, "_write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match=r"No space left on device: .*version_3\.log"):
        log.add(*answered(1))


class SlowestLast(FakeEngine):
    """Answers the shortest first, as real engines do, and is killed with its stage by a `trouble`
    that raises."""

    def generate(self, request: Any) -> Any:
        def length(prompt: Prompt) -> int:
            return len(answer(prompt, request.sampling, 1).tokens)

        prompts = sorted(request.prompts, key=length)
        return super().generate(msgspec.structs.replace(request, prompts=prompts))


def prompts(count: int) -> list[Group]:
    problems = [Problem("sums", index, f"{index}+1=", "") for index in range(count)]
    return groups_of(problems, 4, seed=100)


def opened_engines(
    directory: Path, engine: FakeEngine, deterministic: bool = False
) -> StageEngines:
    """Return the engines of a stage, refitted to version 1."""
    settings = toy_run(sums=toy_domain()).model_copy(update={"deterministic": deterministic})
    with mock.patch("stages.sampling.engines.Fleet", RefittedFleet):
        log = opened(directory / "log", deterministic=deterministic)
        made = StageEngines(toy_job(directory, settings, engine), mock.Mock(), {}, log)
    made.fleet.sequences = 1000  # type: ignore[attr-defined]  # one stream a call
    made.sync_weights(1)
    return made


def drawn(made: StageEngines, groups: list[Group]) -> list[Sample]:
    """Return the samples of at most 24 tokens, unless the stage is killed."""
    made.request(groups, SamplingSettings(max_response_tokens=24))
    if made.log is not None and all(made.wait_for(groups, 1)):
        made.log.end(1)
    made.close()
    return made.wait_for(groups, 1)


def test_after_a_kill_missing_responses_are_requested_with_their_seeds(tmp_path: Path) -> None:
    first = SlowestLast(trouble=after(11))
    with pytest.raises(Killed):
        drawn(opened_engines(tmp_path, first), prompts(8))
    assert first.drawn.total() == 11
    second = SlowestLast()
    made = opened_engines(tmp_path, second)
    heard: list[tuple[int, int]] = []
    made._rewards = mock.Mock(pending=False)
    made._rewards.dispatch = lambda group, index, sample: heard.append((group.seed, index))
    assert len(drawn(made, prompts(8))) == 32
    assert asked(second) == Counter(range(100, 132)) - first.drawn
    assert made.events()["replayed"] == 11
    assert sorted(heard) == [(100 + 4 * group, index) for group in range(8) for index in range(4)]


def test_interruptions_do_not_change_the_lengths_of_responses(tmp_path: Path) -> None:
    peaceful = drawn(opened_engines(tmp_path / "peaceful", SlowestLast()), prompts(30))
    expected = [sample.response.tolist() for sample in peaceful]
    draw, total, kills = random.Random(4), Counter[int](), 0
    early: list[int] = []
    while True:
        engine = SlowestLast(trouble=after(draw.randrange(25)))
        try:
            found = drawn(opened_engines(tmp_path / "killed", engine), prompts(30))
            break
        except Killed:
            kills += 1
        finally:
            total += engine.drawn
        if kills == 3:
            log = opened(tmp_path / "killed" / "log")
            early = [len(given.tokens) // 4 for _, given in log._of(1).answers.values()]
            log.close()
    assert kills > 5
    assert set(total.values()) == {1}  # nothing that was finished is drawn again
    assert [sample.response.tolist() for sample in found] == expected
    # What is there early is short: had the others been drawn with other seeds, this would show.
    assert np.mean(early) < 0.6 * np.mean([len(response) for response in expected])


def test_a_run_without_a_log_keeps_no_response_and_drops_an_older_log(tmp_path: Path) -> None:
    """Else a later attempt with a log again would replay what these weights never sampled."""
    job = toy_job(tmp_path, toy_run(1e9, sums=toy_domain()), FakeEngine())
    drawing = SamplingSettings(), RolloutSettings()
    log = rollout_log(job, *drawing)
    assert log is not None
    log.add(*answered(1))
    log.close()
    assert [*(job.files.rollouts / "log").iterdir()]
    recorded = job.settings.logging.model_copy(update={"response_log": False})
    settings = job.settings.model_copy(update={"logging": recorded})
    assert rollout_log(job.model_copy(update={"settings": settings}), *drawing) is None
    assert not (job.files.rollouts / "log").exists()


def test_planned_bytes_are_those_of_a_frame(tmp_path: Path) -> None:
    """The plan for 4,000 tokens of Qwen3-30B-A3B: 48 layers x 8 experts x 2 bytes each."""
    large = MODEL.model_copy(update={"layers": 48, "experts": 128, "experts_per_token": 8})
    tokens = 4000
    routes = np.zeros((tokens, 48, 8), np.uint16)
    _, given = answered(1)
    numbers = np.zeros(tokens, np.int32).tobytes()
    given = msgspec.structs.replace(
        given, tokens=numbers, logprobs=numbers, versions=numbers, routes=routes.tobytes()
    )
    size = len(frame((answered(1)[0], given)))
    assert size == pytest.approx(tokens * response_bytes(large), rel=1e-3)


def test_a_deterministic_call_is_never_mixed(tmp_path: Path) -> None:
    for answers in (7, 32):
        engine = SlowestLast(trouble=after(answers))
        made = opened_engines(tmp_path, engine, deterministic=True)
        if answers == 7:
            with pytest.raises(Killed):
                drawn(made, prompts(8))
        else:
            drawn(made, prompts(8))
        assert asked(engine) == Counter(range(100, 132))
    unused = SlowestLast()
    assert len(drawn(opened_engines(tmp_path, unused, deterministic=True), prompts(8))) == 32
    assert not unused.requests


def test_probes_are_never_answered_from_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        engine = FakeEngine()
        made = opened_engines(tmp_path, engine)
        groups = prompts(2)
        made.request(groups, SamplingSettings(), at_once=True)
        made.wait_for(groups, 1)
        made.close()
        assert asked(engine).total() == 8
    assert not (tmp_path / "log").exists()


def test_a_full_disk_ends_the_stage(tmp_path: Path) -> None:
    made = opened_engines(tmp_path, FakeEngine())
    full = mock.patch.object(made.log, "_write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match=r"No space left on device: .*version_1\.log"):
        drawn(made, prompts(1))
