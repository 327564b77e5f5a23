"""Every requested response arrives exactly once, whatever the engines do."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from parallel.engine.client import EngineRefused
from parallel.engine.scheduler import NoEngine, Scheduler, Task
from parallel.engine.wire import (
    Generation,
    GenerationRequest,
    InvalidResponse,
    Prompt,
    Sampling,
    sample_of,
)
from parallel.sample import Sample
from parallel.settings import END_TOKEN
from tests.awaiting import PATIENCE_SECONDS, wait_until
from tests.fake_engines import MODEL, FakeEngine, FakeFleet, answer

OTHER_END = 71  # which no answer of `tests.fake_engines` has before its end
SAMPLING = Sampling(temperature=1.0, max_tokens=12, end_tokens=(END_TOKEN, OTHER_END))


def tasks(count: int, first: int = 0, domain: str = "sums") -> list[Task]:
    return [
        Task(seed, GenerationRequest(domain, [5, 6, 7][: 1 + seed % 3], seed, SAMPLING))
        for seed in range(first, first + count)
    ]


def once(trouble: str, seeds: set[int]) -> Callable[[Prompt], str | None]:
    """Return a function that gives `trouble` at the first try of each of `seeds`."""
    left = set(seeds)

    def tell(prompt: Prompt) -> str | None:
        if prompt.seed in left:
            left.remove(prompt.seed)
            return trouble
        return None

    return tell


def gather(scheduler: Scheduler, fleet: FakeFleet, restarts: int = 100) -> dict[int, Sample]:
    """Return all owed samples by key; restart a fleet without engines, as a refit does."""
    found: dict[int, Sample] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while scheduler.owed:
        assert time.monotonic() < deadline, f"{scheduler.owed} are still owed"
        try:
            ended = scheduler.collect(0.5)
        except NoEngine:
            assert restarts > 0
            restarts -= 1
            with scheduler.held():
                fleet.restart()
            continue
        for task, sample in ended:
            assert task.key not in found
            found[task.key] = sample
    return found


def expected(asked: list[Task]) -> dict[int, list[int]]:
    return {
        task.key: np.frombuffer(
            answer(Prompt(0, task.request.prompt, task.request.seed), SAMPLING, 1).tokens,
            np.int32,
        ).tolist()
        for task in asked
    }


def responses(found: dict[int, Sample]) -> dict[int, list[int]]:
    return {key: sample.response.tolist() for key, sample in found.items()}


def test_an_engine_is_kept_full_with_few_streams() -> None:
    engine = FakeEngine()
    fleet = FakeFleet(engine, sequences=16)
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    asked = tasks(200)
    scheduler.submit(asked)
    assert responses(gather(scheduler, fleet)) == expected(asked)
    sizes = [len(request.prompts) for request in engine.requests]
    assert sizes[0] == 20  # a quarter more than it samples at once
    assert len(sizes) <= 1 + 180 / 4
    assert scheduler.requeued == scheduler.duplicates == 0


def test_the_longest_expected_go_first_and_to_the_engine_with_the_least_to_do() -> None:
    fast, slow = FakeEngine("engine 0"), FakeEngine("engine 1")
    fleet = FakeFleet(fast, slow, sequences=64)
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(40, domain="learned"))
    found = gather(scheduler, fleet)
    means = {
        size: np.mean([len(s.response) for key, s in found.items() if 1 + key % 3 == size])
        for size in (1, 2, 3)
    }
    fast.requests.clear()
    slow.requests.clear()
    scheduler.submit(tasks(40, first=40, domain="learned"))
    gather(scheduler, fleet)
    counts = [sum(len(r.prompts) for r in engine.requests) for engine in (fast, slow)]
    assert sum(counts) == 40
    assert min(counts) >= 15
    for engine in (fast, slow):
        sent = [means[len(prompt.tokens)] for prompt in engine.requests[0].prompts]
        assert sent == sorted(sent, reverse=True)
        priorities = [prompt.priority for prompt in engine.requests[0].prompts]
        assert priorities == sorted(priorities)
        assert max(priorities) < 0


def test_deterministic_assigns_all_at_once_in_the_order_given() -> None:
    engines = [FakeEngine(f"engine {number}") for number in range(2)]
    fleet = FakeFleet(*engines, sequences=4)
    scheduler = Scheduler(fleet, MODEL, deterministic=True)
    for first in (0, 21):
        scheduler.submit(tasks(21, first))
        gather(scheduler, fleet)
    for number, engine in enumerate(engines):
        sent = [[prompt.seed for prompt in request.prompts] for request in engine.requests]
        assert sent == [[*range(number, 21, 2)], [*range(21 + number, 42, 2)]]


def test_deterministic_requeues_the_whole_call_of_a_lost_engine() -> None:
    """A batch without the answered prompts would give other bits."""
    engine = FakeEngine("engine 0", once("dies", {7}))
    fleet = FakeFleet(engine)
    scheduler = Scheduler(fleet, MODEL, deterministic=True)
    scheduler.submit(tasks(10))
    assert responses(gather(scheduler, fleet)) == expected(tasks(10))
    first, second = engine.requests
    assert first == second
    assert scheduler.requeued == 10


def test_at_once_reaches_every_engine_even_if_full() -> None:
    engines = [FakeEngine(f"engine {number}", lambda _: "waits") for number in range(2)]
    for engine in engines:
        engine.gate.clear()
    fleet = FakeFleet(*engines, sequences=4)
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(40))
    scheduler.submit(tasks(4, first=100), at_once=True)
    wait_until(lambda: all(len(engine.requests) == 2 for engine in engines))
    for engine in engines:
        first, probe = engine.requests
        assert [prompt.seed // 100 for prompt in probe.prompts] == [1, 1]
        assert max(p.priority for p in probe.prompts) < min(p.priority for p in first.prompts)
        engine.gate.set()
    assert len(gather(scheduler, fleet)) == 44


@pytest.mark.parametrize("trouble", ["dies", "ends", "garbage"])
@pytest.mark.parametrize("engines", [1, 2])
def test_responses_of_a_lost_engine_are_requeued_with_their_seeds(
    trouble: str, engines: int
) -> None:
    bad = FakeEngine("engine 0", once(trouble, {2, 9, 30}))
    fleet = FakeFleet(bad, *[FakeEngine("engine 1") for _ in range(engines - 1)])
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    asked = tasks(60)
    scheduler.submit(asked)
    assert responses(gather(scheduler, fleet)) == expected(asked)
    assert scheduler.requeued > 0
    assert len(fleet.reasons) >= 1
    if trouble == "garbage":
        assert fleet.reasons[0].startswith("sent an invalid response: logprobs that end within")


def test_an_answer_that_comes_twice_counts_once() -> None:
    fleet = FakeFleet(FakeEngine(trouble=once("repeats", {1, 4})))
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(10))
    assert len(gather(scheduler, fleet)) == 10
    assert (scheduler.duplicates, scheduler.requeued, fleet.reasons) == (2, 0, [])


def test_an_answer_to_no_request_is_invalid() -> None:
    class Confused(FakeEngine):
        def generate(self, request: object) -> Iterator[Generation]:
            for generation in super().generate(request):
                yield msgspec.structs.replace(generation, number=generation.number + 1000)

    fleet = FakeFleet(Confused())
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(2))
    with pytest.raises(NoEngine, match="no engine is left for 2 responses"):
        scheduler.collect(5)
    assert fleet.reasons == [
        "sent an invalid response: an answer to unknown request 1000"
    ] or fleet.reasons == ["sent an invalid response: an answer to unknown request 1001"]


def test_a_late_answer_of_a_lost_engine_is_dropped_and_counted() -> None:
    """One stream hangs on an answer while another detects that the engine is lost."""
    hung = FakeEngine("engine 0", lambda p: {0: "waits", 1: "dies"}.get(p.seed))
    hung.gate.clear()
    fleet = FakeFleet(hung)
    scheduler = Scheduler(fleet, MODEL, deterministic=True)
    scheduler.submit(tasks(1))
    scheduler.submit(tasks(1, first=1))
    with pytest.raises(NoEngine):
        scheduler.collect(5)
    assert scheduler.requeued == 2
    hung.trouble = lambda _: None
    with scheduler.held():
        fleet.restart()
    found = gather(scheduler, fleet)
    assert responses(found) == expected(tasks(2))
    hung.gate.set()
    wait_until(lambda: scheduler.duplicates > 0)
    assert scheduler.collect(0.1) == []


def test_a_failure_during_a_refit_is_handled_after_it() -> None:
    """The failed engine was replaced meanwhile; its replacement must not be lost."""
    engine = FakeEngine(trouble=lambda _: "waits")
    engine.gate.clear()
    fleet = FakeFleet(engine)
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(3))
    wait_until(lambda: bool(engine.drawn))
    with scheduler.held():
        engine.trouble = lambda _: "dies"
        engine.gate.set()  # the old stream gets one answer out, and then dies
        time.sleep(0.2)
        assert fleet.reasons == []
        fleet.gone.add(engine)
        fleet.restart()
        engine.trouble = lambda _: None
    assert responses(gather(scheduler, fleet)) == expected(tasks(3))
    assert fleet.reasons == []
    assert scheduler.requeued == 2


def test_a_healthy_engine_that_refuses_ends_the_stage() -> None:
    fleet = FakeFleet(FakeEngine(trouble=lambda _: "refuses"))
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(3))
    with pytest.raises(EngineRefused):
        scheduler.collect(5)


def test_an_unhealthy_engine_that_refuses_is_lost() -> None:
    ill = FakeEngine("engine 0", once("refuses", {3}), well=False)
    fleet = FakeFleet(ill)
    scheduler = Scheduler(fleet, MODEL, deterministic=False)
    scheduler.submit(tasks(6))
    assert len(gather(scheduler, fleet)) == 6
    assert fleet.reasons == ["engine 0 refused"]


def test_collecting_waits_no_longer_than_its_timeout() -> None:
    engine = FakeEngine(trouble=lambda _: "waits")
    engine.gate.clear()
    scheduler = Scheduler(FakeFleet(engine), MODEL, deterministic=False)
    scheduler.submit(tasks(1))
    start = time.monotonic()
    assert scheduler.collect(0.2) == []
    assert time.monotonic() - start < 60
    scheduler.close()
    engine.gate.set()


def test_collect_can_be_woken() -> None:
    scheduler = Scheduler(FakeFleet(FakeEngine()), MODEL, deterministic=False)
    assert scheduler.collect(5) == []  # nothing is owed
    threading.Timer(0.2, scheduler.wake).start()
    started = time.monotonic()
    assert scheduler.collect(600, more=True) == []
    assert 0.1 < time.monotonic() - started < 300
    scheduler.wake()
    assert scheduler.collect(20, more=True) == []  # though it was not waiting then
    assert scheduler.collect(0.1, more=True) == []


@pytest.mark.parametrize("seed", range(12))
def test_no_response_is_lost_or_doubled_whatever_dies(seed: int) -> None:
    draw = random.Random(seed)
    deterministic = draw.random() < 0.3
    calm = 600 if deterministic else 60  # where one failure costs all of a call

    def trouble(_: Prompt) -> str | None:
        return draw.choices([None, "dies", "ends", "garbage", "repeats"], [calm, 1, 1, 1, 4])[0]

    engines = [
        FakeEngine(f"engine {number}", trouble, pace=0.0005)
        for number in range(draw.choice((1, 2, 3)))
    ]
    fleet = FakeFleet(*engines, sequences=draw.choice((1, 5, 32)))
    heard: list[object] = []
    scheduler = Scheduler(
        fleet, MODEL, deterministic, lambda task, answer, sample: heard.append(task.key)
    )
    asked = tasks(120)
    for first in range(0, 120, 40):
        scheduler.submit(asked[first : first + 40])
    assert responses(gather(scheduler, fleet)) == expected(asked)
    drawn = sum((engine.drawn for engine in engines), Counter())
    assert drawn.total() >= 120
    assert sorted(heard, key=str) == sorted((task.key for task in asked), key=str)


def good() -> tuple[GenerationRequest, Generation]:
    question = GenerationRequest("sums", [3, 4], 5, SAMPLING)
    return question, answer(Prompt(0, question.prompt, 5), SAMPLING, 7)


def changed(data: bytes, dtype: str, index: int, value: float) -> bytes:
    values = np.frombuffer(data, dtype).copy()
    values[index] = value
    return values.tobytes()


def test_a_good_answer_becomes_a_sample() -> None:
    question, generation = good()
    kept = [np.array([token, 9], np.int32) for token in np.frombuffer(generation.tokens, np.int32)]
    sizes = np.full(len(kept), 2, np.int32)
    sample = sample_of(
        question,
        msgspec.structs.replace(
            generation, kept=np.concatenate(kept).tobytes(), kept_sizes=sizes.tobytes()
        ),
        MODEL,
    )
    assert sample.weight_version == 7
    assert sample.finished
    assert sample.routes is not None
    assert sample.routes.shape == (sample.length, 2, 2)
    assert sample.kept is not None
    assert [each.tolist() for each in sample.kept] == [each.tolist() for each in kept]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("tokens", lambda g: g.tokens[:-4], "arrays of different lengths"),
        ("tokens", lambda g: g.tokens[:-1], "end within a number"),
        ("tokens", lambda g: changed(g.tokens, "i4", 0, 80), "outside the vocabulary"),
        ("tokens", lambda g: changed(g.tokens, "i4", 0, -1), "outside the vocabulary"),
        ("tokens", lambda g: changed(g.tokens, "i4", 0, END_TOKEN), "after an end token"),
        ("tokens", lambda g: changed(g.tokens, "i4", 0, OTHER_END), "after an end token"),
        ("tokens", lambda g: changed(g.tokens, "i4", -1, 5), "contradicts `finished`"),
        ("finished", lambda g: False, "contradicts `finished`"),
        ("logprobs", lambda g: changed(g.logprobs, "f4", 0, 0.1), "or NaN"),
        ("logprobs", lambda g: changed(g.logprobs, "f4", 0, np.nan), "or NaN"),
        ("logprobs", lambda g: changed(g.logprobs, "f4", 0, -np.inf), "infinite"),
        ("versions", lambda g: changed(g.versions, "i4", 0, 8), "versions that decrease"),
        ("routes", lambda g: changed(g.routes, "u2", 0, 4), "does not have"),
        ("routes", lambda g: g.routes[:-2], "routes for"),
        ("routes_shape", lambda g: (1, 2, 2), "instead of"),
        ("kept_sizes", lambda g: np.ones(1, np.int32).tobytes(), "without a kept set"),
    ],
)
def test_an_invalid_response_is_refused_with_the_reason(
    field: str, change: Callable[[Generation], object], message: str
) -> None:
    question, generation = good()
    with pytest.raises(InvalidResponse, match=message):
        sample_of(
            question, msgspec.structs.replace(generation, **{field: change(generation)}), MODEL
        )
