"""A judge behind a real server that answers, fails, talks nonsense, or is not there."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote

import numpy as np
import pytest

from parallel.sample import Sample
from stages.data.problem import DomainError, Problem
from stages.data.tokenizer import CharacterTokenizer
from stages.rewards.kinds.judge import JudgeReward
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Grader, Response, RewardError, RewardPoolSettings, make
from stages.sampling.recording import record
from stages.sampling.sample_files import read_samples
from tests.awaiting import PATIENCE_SECONDS

RUBRIC = "Asked {prompt}, where {answer} is right, it said {response}. {Good}?"
ASKED = Problem("essays", 0, "2+{answer}?", "4")


KEY = "sk-Very/secret+0123456789"
FORMS: dict[bytes, Callable[[str], str]] = {
    b"AUTHORIZATION": str,
    b"LOWER": str.lower,
    b"QUOTED": lambda key: quote(key, safe=""),
    b"ESCAPED": lambda key: "".join(f"\\u{ord(each):04X}" for each in key),
    b"SLASHED": lambda key: key.replace("/", "\\/"),
}


class Service(ThreadingHTTPServer):
    """Answers with what `script` says next, and with its last item from then on.

    Where it says AUTHORIZATION, it repeats what the request had there.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, Any]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.server.script
        status, said = script.pop(0) if len(script) > 1 else script[0]
        self.server.requests.append((self.path, dict(self.headers), body))
        key = self.headers.get("Authorization", "")
        if status == 0:
            threading.Event().wait(2)
        if isinstance(said, str):
            said = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(status or 200, key if status == 402 else None)
        if status == 302:
            self.send_header("Location", f"http://127.0.0.1:9/{key}")
        self.end_headers()
        for written, form in FORMS.items():
            said = said.replace(written, form(key).encode())
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def without_pauses() -> Iterator[mock.Mock]:
    with mock.patch("stages.rewards.kinds.judge.time.sleep") as paused:
        yield paused


def judged(service: Service | str, cache: Path, text: str = "four", **given: Any) -> float:
    url = service if isinstance(service, str) else service.base_url
    settings = JudgeReward(base_url=url, model="large", rubric=RUBRIC, **given)
    found = make("essays", "style", settings, cache)(ASKED, Response(text, 5))
    assert isinstance(found, tuple)
    score, said = found
    assert isinstance(score, float) and said  # the judge's answer, also from the cache
    return score


def test_a_verdict_is_requested_once(service: Service, tmp_path: Path) -> None:
    service.script = [(200, "Score: 3. No, on reflection\nscore: 7.5")]
    assert judged(service, tmp_path) == judged(service, tmp_path) == 0.75
    [(path, headers, body)] = service.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body == {
        "model": "large",
        "messages": [
            {
                "role": "user",
                "content": "Asked 2+{answer}?, where 4 is right, it said four. {Good}?",
            }
        ],
        "temperature": 0.0,
        "max_tokens": 1024,
    }
    assert judged(service, tmp_path, text="five") == 0.75
    assert judged(service, tmp_path, temperature=0.5) == 0.75
    assert len(service.requests) == 3


def test_a_damaged_file_of_the_cache_is_requested_again(service: Service, tmp_path: Path) -> None:
    service.script = [(200, "score: 10")]
    judged(service, tmp_path)
    [file] = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:20])
    assert judged(service, tmp_path) == 1.0
    assert len(service.requests) == 2


@pytest.mark.parametrize("first", [500, 503, 429])
def test_a_failed_request_is_retried_after_a_pause(
    service: Service, tmp_path: Path, without_pauses: mock.Mock, first: int
) -> None:
    service.script = [(first, "busy"), (200, b"<html>"), (200, b"{}"), (200, "score: 5")]
    assert judged(service, tmp_path) == 0.5
    assert [call.args[0] for call in without_pauses.call_args_list] == [1, 2, 4]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, b"out of order"), "gave no answer in 2 attempts; the last: 500 .*: out of order"),
        ((401, b"who are you"), "refused: 401 Unauthorized: who are you"),
        ((200, b"[]"), r"gave no answer in 2 attempts; the last: not a chat compl"),
        ((0, "score: 5"), "gave no answer in 2 attempts; the last: .*timed out"),
        ((200, "wonderful"), "the judge gave no score: 'wonderful'"),
        ((200, "score: 11"), "the judge's score 11 is not within 0 and 10: 'score: 11'"),
        ((200, "score: -1"), "the judge's score -1 is not within 0 and 10"),
        ((200, ""), "the judge gave no score: ''"),
        # The first digits of another number are no score.
        *(
            ((200, f"Score: {number}"), f"the judge gave no score: 'Score: {number}'")
            for number in ("1e999", "1E5", "1,000", "0.5.1", "7x", "1_0")
        ),
    ],
)
def test_without_a_verdict_there_is_no_reward_and_nothing_is_kept(
    service: Service, tmp_path: Path, answer: tuple[int, Any], message: str
) -> None:
    service.script = [answer]
    with pytest.raises(RewardError, match=message):
        judged(service, tmp_path, attempts=2, request_timeout_seconds=30 if answer[0] else 0.3)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize(
    "text",
    [
        "Score: 7",
        "**Score:** 7",
        "Score: **7**",
        "score:`7`",
        "Score: 7/10",
        "Score: 7.",
        "SCORE:7.0",
    ],
)
def test_a_score_may_stand_in_markdown(service: Service, tmp_path: Path, text: str) -> None:
    service.script = [(200, text)]
    assert judged(service, tmp_path) == 0.7


def test_half_of_a_surrogate_pair_ends_no_stage(service: Service, tmp_path: Path) -> None:
    """JSON may escape it, and neither UTF-8 nor a table can hold it."""
    settings = JudgeReward(base_url=service.base_url, model="m", rubric=RUBRIC, attempts=1)
    grader = Grader("essays", {"style": settings}, tmp_path)
    ids = np.array([5, 1], np.int32)
    for body, reward in (
        (b'{"error": "overloaded \\ud800"}', None),
        (b'{"choices": [{"message": {"content": "\\ud800 Score: 5"}}]}', 0.5),
        (b'{"choices": [{"message": {"content": "\\ud800 Score: none"}}]}', None),
    ):
        service.script = [(200, body)]
        grade = grader.grade(ASKED, Response(f"four{reward}{body[2:4]!r}", 5))
        assert grade.reward == reward
        sample = Sample("essays", ids, ids)
        sample.reward_messages, sample.reward_failure = grade.messages, grade.failure
        record(tmp_path / "step.parquet", 1, [[sample]], CharacterTokenizer(), {}, auditable=False)
        [row] = read_samples(tmp_path / "step.parquet")
        shown = row["reward_failure"] or row["reward_messages"]["style"]
        assert "? Score" in shown or "overloaded ?" in shown


def test_no_redirect_is_followed_with_the_key(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "abc123")
    service.script = [(302, b""), (200, "score: 5")]
    with pytest.raises(RewardError, match="refused: 302 Found: it is moved to http://127"):
        judged(service, tmp_path, api_key_variable="A_KEY")
    assert len(service.requests) == 1


def test_an_endless_answer_is_cut_off(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.rewards.kinds.judge.LONGEST_ANSWER", 1 << 20)
    service.script = [(200, b" " * (2 << 20))]
    with pytest.raises(RewardError, match="the last: its answer is longer than 1 MiB"):
        judged(service, tmp_path, attempts=1)


@pytest.mark.parametrize("key", ["abc\n123", "cl\u00e9", ""])
def test_an_invalid_key_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("A_KEY", key)
    with pytest.raises(DomainError) as caught:
        judged("http://127.0.0.1:9/v1", tmp_path, api_key_variable="A_KEY")
    assert str(caught.value).endswith(
        "api_key_variable: A_KEY holds no key, which is one line of ASCII"
    )


def test_a_missing_service_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"127\.0\.0\.1:9/v1/chat/completions gave no answer in 4"
    ):
        judged("http://127.0.0.1:9/v1", tmp_path)


def test_a_rubric_may_set_its_scale_and_verdict(service: Service, tmp_path: Path) -> None:
    service.script = [(200, "[[2]]")]
    scale = {"verdict": r"\[\[(\d)\]\]", "lowest": 1, "highest": 5}
    assert judged(service, tmp_path, **scale) == 0.25


@pytest.mark.parametrize("stated", ["file", "variable"])
def test_the_key_is_sent_and_never_written(
    service: Service, tmp_path: Path, stated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.script = [(200, "score: 5")]
    (tmp_path / "key").write_text("abc123\n")
    monkeypatch.setenv("A_KEY", "abc123")
    keys = {"file": {"api_key_file": tmp_path / "key"}, "variable": {"api_key_variable": "A_KEY"}}
    judged(service, tmp_path / "cache", **keys[stated])
    assert service.requests[0][1]["Authorization"] == "Bearer abc123"
    kept = list((tmp_path / "cache").rglob("*.json"))
    assert len(kept) == 1
    assert "abc123" not in kept[0].read_text()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, b"who is FORM?"),
        (500, b"%s key was FORM" % (b"x" * 270)),  # what is shown ends within the key
        (402, b"FORM"),  # and in the reason
        (302, b""),
        (200, b'{"error": "FORM"}'),
        (200, b'{"error": "%s FORM"}' % (b"x" * 260)),  # what is shown ends within the key
        (200, b'{"choices": [{"message": {"content": "FORM is no score"}}]}'),
        (200, b'{"choices": [{"message": {"content": "FORM %s"}}]}' % (b"x" * 285)),
        (200, b'{"choices": [{"message": {"content": "FORM score: 99"}}]}'),
    ],
)
def test_no_message_contains_the_key(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    said: bytes,
    form: bytes,
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    service.script = [(status, said.replace(b"FORM", form))]
    with pytest.raises(RewardError) as caught:
        judged(service, tmp_path, api_key_variable="A_KEY", attempts=1)
    written = unquote("".join(traceback.format_exception(caught.value)))
    for each in (KEY, KEY[:12], KEY[-12:]):
        assert each.lower() not in written.lower().replace("\\", "")
    assert b"FORM" not in said or "[key]" in written or b"x" in said


def test_no_file_contains_the_key_though_the_judge_repeats_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    service.script = [(200, "You sent AUTHORIZATION. Score: 5")]
    assert judged(service, tmp_path, api_key_variable="A_KEY") == 0.5
    [kept] = tmp_path.rglob("*.json")
    assert json.loads(kept.read_text())["said"] == "You sent Bearer [key]. Score: 5"
    assert judged(service, tmp_path, api_key_variable="A_KEY") == 0.5
    assert len(service.requests) == 1


def test_an_endless_verdict_is_ended_with_its_worker(service: Service, tmp_path: Path) -> None:
    service.script = [(200, "a" * 60)]
    settings = JudgeReward(
        base_url=service.base_url,
        model="large",
        rubric=RUBRIC,
        verdict=r"(a+)+!",
        timeout_seconds=1.0,
    )
    pool = RewardPool({"essays": {"style": settings}}, RewardPoolSettings(workers=1), tmp_path)
    try:
        [future] = pool.submit(ASKED, [Response("four", 5)])
        failure = future.result(PATIENCE_SECONDS).failure
    finally:
        pool.close()
    assert failure is not None
    assert "rewards.style: took more than 1 seconds and was killed" in failure


def test_an_unencrypted_key_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for url, count in [
        ("http://node7:8000/v1", 1),
        ("https://node7/v1", 0),
        ("http://[::1]/v1", 0),
    ]:
        settings = JudgeReward(base_url=url, model="large", rubric=RUBRIC, api_key_variable="A_KEY")
        RewardPool({"essays": {"style": settings}}, RewardPoolSettings(), tmp_path).close()
        line = "domains.essays.rewards.style.base_url: the key goes to node7 unencrypted; use https"
        assert capfd.readouterr().err.count(line) == count


def test_a_missing_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"domains\.essays\.rewards\.style: NO_KEY is not set"):
        judged("http://127.0.0.1:9/v1", tmp_path, api_key_variable="NO_KEY")
