"""A rubric scored by another model, behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from math import isfinite
from pathlib import Path
from typing import Any

from parallel.files import write_atomically
from stages.data.problem import Problem
from stages.rewards.endpoint import hiding
from stages.rewards.reward import Response, Reward, RewardError
from stages.rewards.settings import JudgeReward

TRANSIENT = {408, 409, 425, 429}  # and all of 500 and above
SHOWN = 300  # characters of what the judge said, in an error
LONGEST_ANSWER, LONGEST_REFUSAL = 16 << 20, 1 << 16  # bytes


def make(settings: JudgeReward, directory: Path) -> Reward:
    """The score as a share of the way from the worst to the best, within [0, 1]."""
    judge = Judge(settings, directory / "judge")

    def reward(problem: Problem, response: Response) -> float:
        texts = {"prompt": problem.prompt, "answer": problem.answer, "response": response.text}
        filled = re.sub(
            r"\{(prompt|answer|response)\}", lambda match: texts[match[1]], settings.rubric
        )
        return judge.score(filled)

    return reward


class _Staying(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the key would go along, and the request would not."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the answer as it is, an error of its own status."""


_opener = urllib.request.build_opener(_Staying)


class Judge:
    """Asks for a verdict once: what it said is kept under a hash of the request.

    Only an answer that held a score is kept. Whatever the endpoint says is taken in without the
    key, which it may repeat: in an error's message, the reason of a status, or its answer.
    """

    def __init__(self, settings: JudgeReward, cache: Path) -> None:
        self._settings = settings
        self._cache = cache
        self._url = f"{settings.base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        key = _key(settings)
        self._hide = hiding(key)
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def score(self, rubric: str) -> float:
        """The verdict on a filled rubric. Raises RewardError where there is none to be had."""
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": rubric}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        text = json.dumps(body, sort_keys=True)
        name = hashlib.sha256(f"{self._url}\n{text}".encode()).hexdigest()
        file = self._cache / name[:2] / f"{name}.json"
        said = _kept(file)
        if said is None:
            said = self._ask(text.encode())
            score = self._verdict(said)
            write_atomically(file, json.dumps({"request": body, "said": said}))
            return score
        return self._verdict(said)

    def _ask(self, body: bytes) -> str:
        reason = ""
        for attempt in range(self._settings.attempts):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with _opener.open(
                    request, timeout=self._settings.request_timeout_seconds
                ) as answer:
                    return self._content(_read(answer))
            except urllib.error.HTTPError as error:
                reason = self._refusal(error)
                if error.code < 500 and error.code not in TRANSIENT:
                    # From None: the error's own text holds what the endpoint said.
                    raise RewardError(f"{self._url} refused: {reason}") from None
            except (OSError, HTTPException, ValueError, RecursionError) as error:
                reason = self._hide(str(error) or repr(error))
        raise RewardError(
            f"{self._url} gave no answer in {self._settings.attempts} attempts; the last: {reason}"
        )

    def _content(self, answer: Any) -> str:
        """The text of an answer. Raises ValueError where it is not one of chat completions."""
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            said = self._hide(json.dumps(answer, ensure_ascii=False))
            raise ValueError(f"not an answer of chat completions: {said[:SHOWN]}")
        return self._hide(content)

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        if target := error.headers.get("Location"):
            said = f"it is moved to {target}; state that as base_url"
        else:
            try:
                said = error.read(LONGEST_REFUSAL).decode(errors="replace")
            except (OSError, HTTPException):  # it broke off
                said = ""
        # What is shown is cut off last: half a key is no longer found.
        return f"{error.code} {self._hide(error.reason)[:SHOWN]}: {self._hide(said)[:SHOWN]}"

    def _verdict(self, said: str) -> float:
        found = list(re.finditer(self._settings.verdict, said))
        lowest, highest = self._settings.lowest, self._settings.highest
        try:
            value = float(found[-1][1])
        except (IndexError, ValueError, TypeError):
            raise RewardError(f"the judge gave no score: {said[-SHOWN:]!r}") from None
        if not (isfinite(value) and lowest <= value <= highest):
            raise RewardError(
                f"the judge's score {value:g} is not within {lowest:g} and {highest:g}:"
                f" {said[-SHOWN:]!r}"
            )
        return (value - lowest) / (highest - lowest)


def _key(settings: JudgeReward) -> str | None:
    if settings.api_key_file is not None:
        where = f"api_key_file: {settings.api_key_file}"
        key = settings.api_key_file.read_text(errors="replace").strip()
    elif settings.api_key_variable is not None:
        where = f"api_key_variable: {settings.api_key_variable}"
        try:
            key = os.environ[settings.api_key_variable].strip()
        except KeyError:
            raise RewardError(f"{settings.api_key_variable} is not set") from None
    else:
        return None
    if not (key.isascii() and key.isprintable() and key):  # http.client would show it in an error
        raise RewardError(f"{where} holds no key, which is one line of ASCII")
    return key


def _read(answer: HTTPResponse) -> Any:
    """The JSON of an answer. Raises ValueError where it is none, or has no end."""
    body = answer.read(LONGEST_ANSWER + 1)
    if len(body) > LONGEST_ANSWER:
        raise ValueError(f"its answer is longer than {LONGEST_ANSWER >> 20} MiB")
    return json.loads(body)


def _kept(file: Path) -> str | None:
    """What the judge said before; None where it was not asked, or the file is damaged."""
    try:
        said = json.loads(file.read_text())["said"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said if isinstance(said, str) else None
