"""A rubric scored by another model, behind any endpoint of OpenAI's chat completions API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from parallel.errors import valid_text
from parallel.files import write_atomically
from parallel.settings import Tokens
from stages.data.problem import Problem
from stages.rewards.reward import (
    AnswerReward,
    Explained,
    Pattern,
    Response,
    Reward,
    RewardContext,
    RewardError,
    Seconds,
    register,
)

TRANSIENT = {408, 409, 425, 429}  # HTTP statuses that are retried, as all of 500 and above are
SHOWN = 300  # characters of the judge's answer in an error
LONGEST_ANSWER, LONGEST_REFUSAL = 16 << 20, 1 << 16  # bytes
NAME = re.compile(r"\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*\.?", re.ASCII)
FILLED = re.compile(r"\{(prompt|answer|response)\}")


def _with_a_group(text: str) -> str:
    if not re.compile(text).groups:
        raise PydanticCustomError("pattern", "should have a group, (...), which is the score")
    return text


class JudgeReward(AnswerReward):
    """A rubric scored by a model behind any OpenAI-compatible endpoint, as a number in [0, 1]."""

    waits: ClassVar[bool] = True
    kind: Literal["judge"] = "judge"
    timed_out: float | None = None  # the service is slow then, not the response
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")] = Field(
        description="address up to and including /v1"
    )
    model: str = Field(description="name of the judging model at the endpoint")
    rubric: Annotated[str, Field(pattern=r"\{response\}")] = Field(
        description="the judge's prompt; {prompt}, {answer} and {response} are filled in"
    )
    verdict: Annotated[Pattern, AfterValidator(_with_a_group)] = Field(
        # Markdown may stand around the number, and no other end of it: 1e999, 1,000, 0.5.1.
        default=r"(?i)score:[\s*_\x60]*(-?\d+(?:\.\d+)?)(?!\w|[.,]\d)",
        description="regular expression; group 1 of its last match in the judge's answer is the"
        " score",
    )
    lowest: float = Field(default=0.0, description="the rubric's worst score, which maps to 0")
    highest: float = Field(default=10.0, description="the rubric's best score, which maps to 1")
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="temperature of the judge"
    )
    max_tokens: Tokens = Field(default=1024, description="longest answer of the judge")
    api_key_file: Path | None = Field(default=None, description="file that holds only the API key")
    api_key_variable: str | None = Field(
        default=None, description="environment variable that holds the API key"
    )
    attempts: Annotated[int, Field(gt=0, le=16)] = Field(
        default=4, description="tries of one request; the pause between two is 1 s, then doubles"
    )
    request_timeout_seconds: Seconds = Field(default=60.0, description="time limit of one request")
    timeout_seconds: Seconds | None = 300.0

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        if error := _address_error(self.base_url):
            yield f"{at.key}.base_url", error
        lowest, highest = self.lowest, self.highest
        if lowest >= highest:
            yield f"{at.key}.lowest", f"{lowest:g} must be less than highest = {highest:g}"
        if self.api_key_file is not None and self.api_key_variable is not None:
            yield f"{at.key}.api_key_variable", "api_key_file is set too; keep one of the two"
        what = f"{self.attempts} attempts and the pauses between them may take"
        longest = self.attempts * self.request_timeout_seconds + 2 ** (self.attempts - 1) - 1
        yield from self.time_rule(at, longest, what)

    def caution(self) -> str | None:
        """Return a warning where others on the network can read the key."""
        address = urlsplit(self.base_url)
        host = address.hostname or ""
        keyless = self.api_key_file is None and self.api_key_variable is None
        if keyless or address.scheme != "http" or _is_loopback(host):
            return None
        return f"base_url: the key goes to {host} unencrypted; use https"


def _address_error(url: str) -> str | None:
    """Return what is wrong with an address of http or https, or None.

    The address is not repeated, since a password or a key may stand in it.
    """
    if not (url.isascii() and url.isprintable()):
        return "must be printable ASCII: xn--NAME for an international host, %XX in a path"
    if "?" in url or "#" in url:
        return "must have no query (?) and no fragment (#); a key belongs in api_key_variable"
    if "@" in url.split("/")[2]:
        return "must have no user and no password (@); a key belongs in api_key_variable"
    with suppress(ValueError):  # a bracket that is not closed, or an invalid address
        address = urlsplit(url)
        if _is_host(address.hostname or ""):
            with suppress(ValueError):
                return "must have a port from 1 to 65535" if address.port == 0 else None
            return "must have a port from 1 to 65535"
    return "has no valid host: a name, an IPv4 address, or an IPv6 address in brackets"


def _is_host(host: str) -> bool:
    """Return whether `host` is a valid name. Raises ValueError where it is an invalid address."""
    if ":" in host:
        IPv6Address(host)
    elif re.fullmatch(r"(.*\.)?\d+\.?", host):  # a name does not end with a number
        IPv4Address(host)
    else:
        return len(host) <= 253 and NAME.fullmatch(host) is not None
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@register(JudgeReward)
def make(settings: JudgeReward, directory: Path) -> Reward:
    """Return the reward, which keeps the judge's answers in `directory`."""
    return Judge(settings, directory / "judge")


class _Staying(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect, which would forward the key without the body."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: the redirect stays an error."""


_opener = urllib.request.build_opener(_Staying)


class Judge:
    """A client of the endpoint; an answer with a score is cached by its request.

    The key is removed from everything that the endpoint returns, since it may repeat the key in an
    error's message, the reason of a status, or its answer.
    """

    def __init__(self, settings: JudgeReward, cache: Path) -> None:
        self._settings = settings
        self._cache = cache
        self._url = f"{settings.base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        self._secret: re.Pattern[str] | None = None
        if (key := _key(settings)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"
            self._secret = re.compile("".join(map(_written, key)), re.IGNORECASE)

    def __call__(self, problem: Problem, response: Response) -> Explained:
        """Return the score of a response, in [0, 1], and what the judge said.

        Raises RewardError without a score.
        """
        texts = {"prompt": problem.prompt, "answer": problem.answer, "response": response.text}
        rubric = FILLED.sub(lambda match: texts[match[1]], self._settings.rubric)
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": rubric}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        # Sorted, since the text names the answer in the cache.
        text = json.dumps(body, sort_keys=True)
        name = hashlib.sha256(f"{self._url}\n{text}".encode()).hexdigest()
        file = self._cache / name[:2] / f"{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # no such file, or a damaged one
            reply = json.loads(file.read_text())["said"]
            return self._verdict(reply), reply
        reply = self._ask(text.encode())
        score = self._verdict(reply)
        # After the score: an answer without one is asked for again.
        write_atomically(file, json.dumps({"request": body, "said": reply}))
        return score, reply

    def _ask(self, body: bytes) -> str:
        reason = ""
        timeout = self._settings.request_timeout_seconds
        for attempt in range(self._settings.attempts):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with _opener.open(request, timeout=timeout) as answer:
                    return self._content(answer)
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

    def _content(self, answer: HTTPResponse) -> str:
        """Return the answer's text. Raises ValueError where it is not a chat completion."""
        body = answer.read(LONGEST_ANSWER + 1)
        if len(body) > LONGEST_ANSWER:
            raise ValueError(f"its answer is longer than {LONGEST_ANSWER >> 20} MiB")
        completion = json.loads(body)
        with suppress(KeyError, IndexError, TypeError):
            if isinstance(content := completion["choices"][0]["message"]["content"], str):
                return self._hide(valid_text(content))
        # Hide the key before cutting the text: half a key would not be found.
        shown = self._hide(valid_text(json.dumps(completion, ensure_ascii=False)))[:SHOWN]
        raise ValueError(f"not a chat completion: {shown}")

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        detail = ""
        if target := error.headers.get("Location"):
            detail = f"it is moved to {target}; state that as base_url"
        else:
            with suppress(OSError, HTTPException):  # it broke off
                detail = error.read(LONGEST_REFUSAL).decode(errors="replace")
        return f"{error.code} {self._hide(error.reason)[:SHOWN]}: {self._hide(detail)[:SHOWN]}"

    def _hide(self, text: str) -> str:
        return text if self._secret is None else self._secret.sub("[key]", text)

    def _verdict(self, reply: str) -> float:
        matches = list(re.finditer(self._settings.verdict, reply))
        lowest, highest = self._settings.lowest, self._settings.highest
        try:
            value = float(matches[-1][1])
        except (IndexError, ValueError, TypeError):
            raise RewardError(f"the judge gave no score: {reply[-SHOWN:]!r}") from None
        if not (isfinite(value) and lowest <= value <= highest):
            raise RewardError(
                f"the judge's score {value:g} is not within {lowest:g} and {highest:g}:"
                f" {reply[-SHOWN:]!r}"
            )
        return (value - lowest) / (highest - lowest)


def _key(settings: JudgeReward) -> str | None:
    file, variable = settings.api_key_file, settings.api_key_variable
    if file is not None:
        where, key = f"api_key_file: {file}", file.read_text(errors="replace").strip()
    elif variable is None:
        return None
    elif (unstripped := os.environ.get(variable)) is None:
        raise RewardError(f"{variable} is not set")
    else:
        where, key = f"api_key_variable: {variable}", unstripped.strip()
    if not (key.isascii() and key.isprintable() and key):  # http.client would show it in an error
        raise RewardError(f"{where} holds no key, which is one line of ASCII")
    return key


def _written(character: str) -> str:
    """Return a pattern of one character, plain or escaped (JSON, URLs)."""
    itself, code = re.escape(character), ord(character)
    return rf"(?:{itself}|\\{itself}|\\u{code:04x}|%{code:02x})"
