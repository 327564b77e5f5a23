"""Whatever a reward does, its sample is graded or dropped loudly, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from stages.data.problem import Problem
from stages.rewards.kinds import RewardSettings
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Grade, Grader, Response, RewardError, RewardPoolSettings
from tests.awaiting import PATIENCE_SECONDS

Made = Callable[..., RewardPool]
SECONDS = float(PATIENCE_SECONDS)
LIMIT = 2  # seconds: no reward of these tests that ends takes so long on a busy machine


def rewards(**given: dict[str, Any]) -> dict[str, RewardSettings]:
    return {name: TypeAdapter(RewardSettings).validate_python(one) for name, one in given.items()}


def own(function: str, **more: Any) -> dict[str, Any]:
    return {"kind": "python", "function": f"tests.stages.small_rewards:{function}", **more}


def problem(domain: str = "sums") -> Problem:
    return Problem(domain, 0, "c1+1=", "2")


def response(text: str, finished: bool = True) -> Response:
    return Response(text, len(text) + 1, finished)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Made]:
    made: list[RewardPool] = []

    def make(
        seconds: float = 30.0, workers: int = 1, memory: int = 4096, **given: dict[str, Any]
    ) -> RewardPool:
        settings = RewardPoolSettings(
            workers=workers, timeout_seconds=seconds, memory_mebibytes=memory
        )
        made.append(RewardPool({"sums": rewards(**given)}, settings, tmp_path))
        return made[-1]

    yield make
    for each in made:
        started = time.monotonic()
        each.close()
        assert time.monotonic() - started < SECONDS / 2


def graded(pool: RewardPool, *texts: str) -> list[Grade]:
    futures = pool.submit(problem(), [response(text) for text in texts])
    assert not wait(futures, SECONDS).not_done
    return [future.result() for future in futures]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_pool_grades_as_one_process_does_in_the_same_order(
    pool: Made, workers: int, tmp_path: Path
) -> None:
    given = {"odd": own("does", weight=2.0), "steps": own("lines"), "short": {"kind": "length"}}
    texts = [f"{'raise ' * (i % 7 == 0)}{'a,' * (i % 5)}b{i}" for i in range(300)]
    found = graded(pool(workers=workers, **given), *texts)
    grader = Grader("sums", rewards(**given), tmp_path)
    assert found == [grader.grade(problem(), response(text)) for text in texts]
    assert sum(grade.reward is None for grade in found) == 43


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise it", r"raised ZeroDivisionError('it') at small_rewards.py:"),
        ("exit", "raised SystemExit('') at small_rewards.py:"),
        ("mute", "raised Mute at small_rewards.py:"),
        ("much 5000", f"raised ZeroDivisionError('{'x' * 900}"),
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("text", "returned '1.0', not a finite number"),
        ("none", "returned None, not a finite number"),
        ("eat", "raised MemoryError()"),
        ("die 3", "its process ended with exit status 3"),
        ("hang", f"took more than {LIMIT} seconds and was killed"),
        ("spin", f"took more than {LIMIT} seconds and was killed"),
    ],
)
def test_a_reward_that_fails_drops_its_own_sample_alone(
    pool: Made, text: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    dropping = pool(seconds=LIMIT, odd=own("does", timed_out=None))
    before, failed, after = graded(dropping, "one", text, "three")
    assert (before.reward, after.reward) == (3.0, 5.0)
    assert failed.reward is None
    assert failed.failure is not None
    assert failed.failure.startswith(f"domains.sums.rewards.odd: {reason}")
    assert failed.failure.endswith(
        f"for problem 'c1+1=' ({problem().key[:12]}) and response {text!r}"
    )
    said = capfd.readouterr().err
    assert said.count("the sample is dropped") == 1
    assert failed.failure.split(" for problem")[0] in said


def test_every_worker_may_be_lost_many_times(pool: Made) -> None:
    texts = [("die 1" if i % 5 == 0 else "hang" if i % 13 == 0 else f"{i:03}") for i in range(60)]
    found = graded(pool(seconds=LIMIT, workers=2, odd=own("does", timed_out=None)), *texts)
    for text, grade in zip(texts, found, strict=True):
        assert (grade.reward is None) == (text in ("die 1", "hang"))


def test_children_of_a_killed_reward_are_killed_too(pool: Made, tmp_path: Path) -> None:
    [grade] = graded(pool(seconds=1, odd=own("does")), f"child {tmp_path / 'number'}")
    assert grade.reward == 0
    child = int((tmp_path / "number").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or ") Z " in status.read_text()


def test_a_reward_may_have_its_own_time_limit(pool: Made) -> None:
    quick = own("does", timeout_seconds=0.3, timed_out=None)
    [grade] = graded(pool(seconds=60, quick=quick, slow=own("length")), "sleep 5")
    assert grade.failure is not None
    assert "rewards.quick: took more than 0.3 seconds" in grade.failure


def test_a_response_whose_grading_times_out_earns_the_reward_s_timed_out(
    pool: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else whatever makes its grader hang is not trained on, which is better than being wrong."""
    odd = own("does", weight=2.0, timed_out=-0.5)
    [grade] = graded(pool(seconds=1, size=own("length"), odd=odd, late=own("does")), "hang")
    assert grade == Grade(3.0, {"size": 4.0, "odd": -0.5, "late": 0.0})
    said = capfd.readouterr().err
    assert "domains.sums.rewards.odd: took more than 1 seconds and was killed for problem" in said
    assert "it earns -0.5 (timed_out)" in said


def test_slow_rewards_run_in_parallel(pool: Made, tmp_path: Path) -> None:
    """Each waits until all of them are there, which none would be after another."""
    found = graded(pool(workers=8, odd=own("does")), *(f"meet {tmp_path}/{i}" for i in range(8)))
    assert [grade.reward for grade in found] == [8.0] * 8


def test_no_worker_imports_torch(pool: Made) -> None:
    [torch, problems] = graded(
        pool(odd=own("does"), whole={"kind": "length"}), "modules torch", "modules stages.rewards"
    )
    assert (torch.parts["odd"], problems.parts["odd"]) == (0.0, 1.0)


def test_a_reward_that_cannot_be_loaded_fails_every_future(pool: Made) -> None:
    broken = pool(odd=own("no_such"))
    for _ in range(2):
        [future] = broken.submit(problem(), [response("x")])
        with pytest.raises(
            RewardError, match=r"domains\.sums\.rewards\.odd: tests\.stages\.small_rewards has no"
        ):
            future.result(SECONDS)
    assert broken.pending == 0


def test_a_closed_pool_leaves_no_process(pool: Made, tmp_path: Path) -> None:
    made = pool(odd=own("does"))
    made.submit(problem(), [response(f"child {tmp_path / 'number'}")])
    deadline = time.monotonic() + SECONDS
    while not (number := tmp_path / "number").exists() or not number.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes = [made._forkserver.pid, *(worker.process for worker in made._workers)]
    made.close()
    processes.append(int(number.read_text()))
    while any(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_a_reward_leaves_end_with_the_pool(pool: Made, tmp_path: Path) -> None:
    made = pool(odd=own("does"))
    [grade] = graded(made, f"daemon {tmp_path / 'number'}")
    assert grade.reward == 1.0
    deadline = time.monotonic() + SECONDS
    while not (left := tmp_path / "number").exists() or not left.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    made.close()
    assert not Path(f"/proc/{left.read_text()}").exists()


def test_a_reward_that_forks_answers_once(pool: Made) -> None:
    found = graded(pool(odd=own("does")), "fork", *["two"] * 100)
    assert [grade.reward for grade in found] == [4.0, *[3.0] * 100]


def test_a_reward_s_changes_to_its_problem_reach_no_other_reward(pool: Made) -> None:
    found = graded(pool(first=own("notes"), second=own("notes")), *["a"] * 50)
    assert [grade.parts for grade in found] == [{"first": 1.0, "second": 1.0}] * 50


def test_a_sum_of_rewards_is_finite(pool: Made) -> None:
    [grade] = graded(pool(odd=own("does", weight=10.0)), "huge")
    assert grade.reward is None
    assert grade.failure is not None
    assert "rewards.odd: returned 1e+308, which makes the sum of rewards inf" in grade.failure


def test_a_stopped_worker_is_replaced(pool: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.rewards.forkserver.REST_SECONDS", 1.0)
    made = pool(odd=own("does"))
    graded(made, "one")
    os.kill(made._workers[0].process, signal.SIGSTOP)
    assert [grade.reward for grade in graded(made, "two", "three")] == [3.0, 5.0]


def test_a_response_whose_worker_is_killed_is_graded_by_another(
    pool: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    made = pool(odd=own("does"))
    graded(made, "warm")
    futures = made.submit(problem(), [response("sleep 0.5"), response("two")])
    worker = made._workers[0]
    deadline = time.monotonic() + SECONDS
    while worker.clock.read()[0] < 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker.process, signal.SIGKILL)
    assert not wait(futures, SECONDS).not_done
    assert [future.result().reward for future in futures] == [0.5, 3.0]
    assert worker not in made._workers
    assert "dropped" not in capfd.readouterr().err


def test_a_response_whose_workers_are_always_killed_is_dropped_alone(pool: Made) -> None:
    before, failed, after = graded(pool(odd=own("does")), "one", "kill", "three")
    assert (before.reward, after.reward) == (3.0, 5.0)
    assert failed.failure is not None
    assert "its process was killed by SIGKILL (out of memory?)" in failed.failure


def test_a_worker_s_memory_is_limited_by_the_settings(pool: Made) -> None:
    text = f"reserve {1 << 31}"
    [enough] = graded(pool(odd=own("does")), text)
    assert enough.reward == 1 << 31
    [short] = graded(pool(memory=1500, odd=own("does")), text)
    assert short.failure is not None
    assert "MemoryError" in short.failure


def test_a_signal_to_the_whole_process_group_ends_no_reward(pool: Made) -> None:
    """As `timeout` and systemd send it: the stage saves first, and needs them for its last step."""
    made = pool(odd=own("does"))
    graded(made, "one")
    for process in (made._forkserver.pid, *(worker.process for worker in made._workers)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(process, number)
    assert [grade.reward for grade in graded(made, "two", "three")] == [3.0, 5.0]


@pytest.mark.parametrize(("number", "why"), [(9, "was killed by SIGKILL"), (19, "not answered")])
def test_a_lost_forkserver_ends_the_stage(
    pool: Made, number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.rewards.pool.FORKSERVER_SECONDS", 1.0)
    monkeypatch.setattr("stages.rewards.pool.CLOSING_SECONDS", 0.5)
    made = pool(odd=own("does"))
    graded(made, "one")
    os.kill(made._forkserver.pid, number)
    [future] = made.submit(problem(), [response("die 1")])
    with pytest.raises(RewardError, match=why):
        future.result(SECONDS)
    made.close()


def test_a_forkserver_s_exit_is_awaited_after_its_connection_breaks(
    pool: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the kernel ends a process: it closes its files, and a while later it can be waited for."""
    dying = tmp_path / "dying"
    dying.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        "os.close(int(sys.argv[-1]))\ntime.sleep(0.5)\nos.kill(os.getpid(), 9)\n"
    )
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    [future] = pool(odd=own("does")).submit(problem(), [response("one")])
    with pytest.raises(RewardError, match="the forkserver was killed by SIGKILL"):
        future.result(SECONDS)


def test_too_many_failures_stop_a_stage() -> None:
    pool = RewardPool.__new__(RewardPool)
    pool._settings = RewardPoolSettings(max_failed_fraction=0.25)
    pool.check_failures([], 0)
    pool.check_failures(["a"], 4)
    with pytest.raises(
        RewardError, match=r"2 of 4 samples have no reward, which exceeds rewards\.m"
    ):
        pool.check_failures(["a", "b"], 4)
    pool._settings = RewardPoolSettings()
    pool.check_failures(["a"], 4)  # one may always lack it
    pool.check_failures(["a", "b"], 100)
    with pytest.raises(RewardError, match="2 of 99"):
        pool.check_failures(["a", "b"], 99)
    pool._settings = RewardPoolSettings(max_failed_fraction=0)
    with pytest.raises(RewardError, match="1 of 99"):
        pool.check_failures(["a"], 99)


def test_a_failed_grade_says_too_which_rewards_of_weight_0_failed(tmp_path: Path) -> None:
    grader = Grader("sums", rewards(watched=own("does", weight=0.0), odd=own("does")), tmp_path)
    grade = grader.grade(problem(), response("raise x"))
    assert grade.reward is None
    assert grade.failure and grade.failure.startswith("domains.sums.rewards.odd: raised ")
    [line] = grade.watch_failures
    assert line.startswith("domains.sums.rewards.watched: raised ")


def test_parts_add_up_by_weight_and_each_decides_on_truncated_responses(tmp_path: Path) -> None:
    given = rewards(
        length=own("length", weight=0.5),
        anyway=own("length", unfinished="score"),
        watched=own("length", weight=0.0),
    )
    grader = Grader("sums", given, tmp_path)
    assert grader.grade(problem(), response("four")) == Grade(
        6.0, {"length": 4.0, "anyway": 4.0, "watched": 4.0}
    )
    assert grader.grade(problem(), response("four", finished=False)) == Grade(
        4.0, {"length": 0.0, "anyway": 4.0, "watched": 0.0}
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise it", "raised ZeroDivisionError('it') at small_rewards.py:"),
        ("nan", "returned nan, not a finite number"),
        ("die 3", "its process ended with exit status 3"),
        ("hang", "took more than 1 seconds and was killed"),
        ("kill", "its process was killed by SIGKILL"),
    ],
)
def test_a_failed_reward_of_weight_0_drops_no_sample(
    pool: Made, text: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"odd": own("does", weight=0.0), "size": own("length"), "late": own("does", weight=0.0)}
    before, failed, after = graded(pool(seconds=1, **given), "one", text, "three")
    for grade, size in ((before, 3.0), (after, 5.0)):
        assert grade == Grade(size, {"odd": size, "size": size, "late": size})
    assert (failed.reward, failed.parts, failed.failure) == (len(text), {"size": len(text)}, None)
    for name, line in zip(("odd", "late"), failed.watch_failures, strict=True):
        assert line.startswith(f"domains.sums.rewards.{name}: {reason}")
    said = capfd.readouterr().err
    assert said.count("its weight is 0, so no sample is dropped") == 2
    assert "the sample is dropped" not in said


def test_steps_of_weight_0_are_not_used(tmp_path: Path) -> None:
    given = rewards(watched=own("lines", weight=0.0), steps=own("lines", weight=2.0))
    grade = Grader("sums", given, tmp_path).grade(problem(), response("ab,c"))
    assert grade == Grade(4.0, {"watched": 2.0, "steps": 2.0}, steps=((3, 6.0), (4, 2.0)))


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (["backwards"], "whose ends must rise from above 0 to 3 at most"),
        (["lost"], "returned nan, not a finite number"),
        (["lines", "lines"], "only one reward of a domain may return steps"),
    ],
)
def test_invalid_steps_are_errors(functions: list[str], reason: str, tmp_path: Path) -> None:
    given = rewards(**{f"r{i}": own(function) for i, function in enumerate(functions)})
    grade = Grader("sums", given, tmp_path).grade(problem(), response("a,b"))
    assert grade.reward is None
    assert grade.failure is not None
    assert reason in grade.failure


def test_steps_end_at_the_tokens_of_their_text(tmp_path: Path) -> None:
    grader = Grader("sums", rewards(steps=own("lines", weight=2.0)), tmp_path)
    grade = grader.grade(problem(), response("ab,c"))
    assert grade == Grade(4.0, {"steps": 2.0}, steps=((3, 6.0), (4, 2.0)))
    nothing = grader.grade(problem(), response(""))
    assert nothing == Grade(0.0, {"steps": 0.0}, steps=((0, 0.0),))


def test_the_output_of_rewards_is_logged_up_to_a_limit(
    pool: Made, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.rewards.pool.LARGEST_OUTPUT", 100_000)
    made = pool(workers=2, own=own("does"))
    assert [grade.reward for grade in graded(made, "print 500")] == [9.0]
    graded(made, *["print 90000"] * 20)
    made.close()
    printed = capfd.readouterr().err
    assert "x" * 500 in printed
    assert printed.count("x") < 100_100
    assert printed.count("printed more than 100000 bytes; the rest is not logged") == 1
