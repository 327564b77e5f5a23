"""A reward: a function of a problem and a response; and the grade that a domain's rewards give.

A kind of reward is one file of `stages.rewards.kinds`: its settings, and beside them the decorated
function that makes the reward from them. Never imports torch.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from parallel.errors import UserError, valid_text
from parallel.settings import MOST, Mebibytes, Settings
from stages.data.problem import DomainError, Problem
from stages.data.thoughts import KNOWN, Markers, split_thoughts

Seconds = Annotated[float, Field(gt=0, le=MOST)]
Unfinished = Literal["zero", "score"]

SOLVED = 1.0
LONGEST = 1000  # characters of what went wrong


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError(
            "pattern", "should be a regular expression ({reason})", {"reason": str(error)}
        ) from None
    return text


Pattern = Annotated[str, AfterValidator(_regular_expression)]


class RewardError(UserError):
    """A reward that failed on a response: its sample has no reward, which differs from reward 0."""


@dataclass(frozen=True)
class Response:
    """A policy's response; `tokens` includes the end token, which a `finished` response has.

    A reward of the answer reads the answer as `text`, with the `thoughts` before it.
    """

    text: str
    tokens: int
    finished: bool = True
    thoughts: str = ""


@dataclass(frozen=True)
class Steps:
    """A reward for each step of a response.

    Step i ends before character `ends[i]` of the response's text; the ends rise. An empty response
    has one step, which ends at 0.

    Example: "2+2=4. So 5." has a right step of 6 characters and a wrong one that ends at 12:
        Steps(ends=[6, 12], rewards=[1.0, 0.0])   as a score of the response: their mean, 0.5
    """

    ends: list[int]
    rewards: list[float]


Score = float | Steps
Explained = tuple[Score, str]  # with what a person who reads the sample should know of the score
Reward = Callable[[Problem, Response], Score | Explained]


class RewardPoolSettings(Settings):
    """The processes that score responses, and how many failures a stage tolerates."""

    workers: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="number of processes; null is one per core, at most 8, and 16 with a judge",
    )
    timeout_seconds: Seconds = Field(
        default=60.0,
        description="time limit of one reward on one response; then its worker is killed",
    )
    memory_mebibytes: Mebibytes = Field(default=4096, description="memory limit of one worker")
    max_failed_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02,
        description="maximum share of a step's samples without a reward; above it the stage stops"
        " (one sample is always tolerated unless this is 0)",
    )


@dataclass(frozen=True)
class RewardContext:
    """The settings around a reward's, which stand at the dotted `key`."""

    key: str
    source: str  # prompts.source of the domain
    max_response_tokens: int
    pool: RewardPoolSettings | None


class RewardBase(Settings):
    """Settings that every kind of reward has."""

    judges_answer: ClassVar[bool] = True  # a score of 1 says that the problem is solved
    waits: ClassVar[bool] = False  # for something outside this machine, so it needs no core

    weight: float = Field(
        default=1.0, description="factor in the sample's reward; 0 only records the score"
    )
    unfinished: Unfinished = Field(
        default="zero", description="score of a truncated response: zero, or the reward's own score"
    )
    timeout_seconds: Seconds | None = Field(
        default=None, description="time limit for one response; null is rewards.timeout_seconds"
    )
    timed_out: float | None = Field(
        default=0.0,
        description="score of a response whose scoring times out, which its text may have caused;"
        " null drops the sample from training",
    )
    kind: str

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        """Yield each broken rule of these settings, as (dotted key, message)."""
        yield from ()

    def time_rule(self, at: RewardContext, longest: float, what: str) -> Iterator[tuple[str, str]]:
        """Yield a broken rule where the reward may take more seconds than its time limit."""
        limit, name = self.timeout_seconds, f"{at.key}.timeout_seconds"
        if limit is None and at.pool:
            limit, name = at.pool.timeout_seconds, "rewards.timeout_seconds"
        if limit is not None and longest >= limit:
            yield name, f"{limit:g} must be more than the {longest:g} seconds that {what}"

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        """Return why no answer to a row can be scored, or None, without importing a library.

        `answer` is the row's reference, "" without one.
        """
        return None

    def problem_violation(self, problem: Problem) -> str | None:
        """Return why no answer to a problem can be scored, or None."""
        return self.row_violation(problem.fields, problem.answer)

    def reference_response(self, problem: Problem) -> str | None:
        """Return a response that earns most, where it is not the answer as it stands, or None."""
        return None

    def caution(self) -> str | None:
        """Return a warning that starts with the name of a field, or None."""
        return None

    def check_machine(self) -> None:
        """Raise RewardError where this machine can never run the reward."""


class AnswerReward(RewardBase):
    """Settings of a kind that scores a response's answer, which follows the thoughts."""

    thought_markers: tuple[Markers, ...] = Field(
        default=KNOWN,
        description="pairs of texts that open and close thoughts; what follows them is scored, and"
        " thoughts that do not end score 0; []: the whole response is scored",
    )


@dataclass(frozen=True)
class RewardKind:
    """A kind's settings class, its maker of rewards, and the heavy modules that this imports."""

    settings: type[RewardBase]
    make: Callable[[Any, Path], Reward]  # of the settings and a directory for the reward's files
    imports: tuple[str, ...]


REGISTERED: dict[str, RewardKind] = {}
type Make[KindSettings: RewardBase] = Callable[[KindSettings, Path], Reward]


def register[KindSettings: RewardBase](
    settings: type[KindSettings], imports: tuple[str, ...] = ()
) -> Callable[[Make[KindSettings]], Make[KindSettings]]:
    """Return a decorator that registers a function as the maker of rewards of these settings.

    Name in `imports` the heavy modules that the function imports: the rewards' forkserver loads
    them once, and `pipeline` never.
    """

    def decorate(make: Make[KindSettings]) -> Make[KindSettings]:
        kind = settings.model_fields["kind"].default
        if kind in REGISTERED:
            raise ValueError(f"{settings.__name__}: another reward has the kind {kind!r}")
        REGISTERED[kind] = RewardKind(settings, make, imports)
        return make

    return decorate


def make(domain: str, name: str, settings: RewardBase, directory: Path) -> Reward:
    """Return the reward called `name` of a domain. Raises DomainError where it cannot be made."""
    try:
        reward = REGISTERED[settings.kind].make(settings, directory)
    except Exception as error:  # a library or a user's module may raise anything
        raise DomainError(domain, f"rewards.{name}", str(error) or repr(error)) from error
    return _of_answer(reward, settings) if isinstance(settings, AnswerReward) else reward


def _of_answer(reward: Reward, settings: AnswerReward) -> Reward:
    """Return the reward of a response's answer: thoughts are split off here alone."""

    def scored(problem: Problem, response: Response) -> Score | Explained:
        markers = settings.thought_markers
        thoughts, answer = split_thoughts(problem.prompt, response.text, markers)
        if answer is None:
            return 0.0, "no answer: the thoughts do not end"
        return reward(problem, replace(response, text=answer, thoughts=thoughts))

    return scored


def check_machine(rewards: Mapping[str, Mapping[str, RewardBase]]) -> None:
    """Raise DomainError where this machine can never run a reward, before anything is sampled."""
    for domain, domain_rewards in rewards.items():
        for name, settings in domain_rewards.items():
            try:
                settings.check_machine()
            except RewardError as error:
                raise DomainError(domain, f"rewards.{name}", str(error)) from error


def cautions(rewards: Mapping[str, Mapping[str, RewardBase]]) -> Iterator[str]:
    """Yield the warnings about these domains' rewards, each a line that starts with its key."""
    for domain, domain_rewards in rewards.items():
        for name, settings in domain_rewards.items():
            if caution := settings.caution():
                yield f"domains.{domain}.rewards.{name}.{caution}"


@dataclass(frozen=True)
class Grade:
    """The rewards of a response.

    `parts` holds every reward before its weight. `steps`, where one of them gave any, are (number
    of characters that the step ends with, weighted reward). Where a reward failed, `reward` is None
    and `failure` one line that says why. A reward of weight 0 is only recorded: where it fails it
    has no score but a line in `watch_failures`, and the grade stands. `messages` are what rewards
    said of their scores. `braid domain check` and grading again write these names.

    Example: `math` of weight 1 and `length` of weight 0.5 score 1 and 0.8; then `math` fails.
        reward = 1.4    parts = {"math": 1.0, "length": 0.8}
        reward = None   parts = {}   failure = "domains.sums.rewards.math: raised ..."
    """

    reward: float | None
    parts: dict[str, float]
    steps: tuple[tuple[int, float], ...] = ()
    failure: str | None = None
    watch_failures: tuple[str, ...] = ()
    messages: dict[str, str] = field(default_factory=dict)


class Grader:
    """The rewards of one domain. Raises DomainError where a reward cannot be made."""

    def __init__(self, domain: str, settings: Mapping[str, RewardBase], directory: Path) -> None:
        self._settings = settings
        self._rewards = {
            name: make(domain, name, reward_settings, directory)
            for name, reward_settings in settings.items()
        }

    def grade(
        self,
        problem: Problem,
        response: Response,
        begin: Callable[[int, float | None], None] = lambda index, seconds: None,
        fixed_scores: Mapping[str, float | None] = MappingProxyType({}),
    ) -> Grade:
        """Return the grade of a response.

        Rewards in `fixed_scores` are not run: they have that score, or are skipped where it is
        None. `begin` is called before every other reward, with its index and its time limit in
        seconds.
        """
        scores: dict[str, float] = {}
        total = 0.0
        steps: tuple[tuple[int, float], ...] = ()
        watch_failures: list[str] = []
        messages: dict[str, str] = {}
        for index, (name, settings) in enumerate(self._settings.items()):
            if (fixed_score := fixed_scores.get(name)) is None and name in fixed_scores:
                continue
            try:
                score: float | Steps = 0.0 if fixed_score is None else fixed_score
                if fixed_score is None:
                    begin(index, settings.timeout_seconds)
                    if settings.unfinished == "score" or response.finished:
                        returned, message = _score_and_message(
                            self._rewards[name](problem, response)
                        )
                        score = _checked(returned, len(response.text))
                        if message:
                            messages[name] = message
                if isinstance(score, Steps):
                    if settings.weight:
                        if steps:
                            raise RewardError("only one reward of a domain may return steps")
                        weighted = [settings.weight * step_reward for step_reward in score.rewards]
                        steps = tuple(zip(score.ends, weighted, strict=True))
                    score = sum(score.rewards) / len(score.rewards)
                scores[name] = score
                total += settings.weight * score
                # Finite rewards may overflow in their sum, and spoil the advantages of the group.
                if not isfinite(total):
                    raise RewardError(f"returned {score!r}, which makes the sum of rewards {total}")
            except BaseException as error:  # also SystemExit: a reward must not end its worker
                line = failure(problem, response, name, _description(error))
                if settings.weight:
                    return Grade(None, scores, (), line, tuple(watch_failures), messages)
                watch_failures.append(line)
        return Grade(total, scores, steps, None, tuple(watch_failures), messages)


def failure(problem: Problem, response: Response, reward: str, what: str) -> str:
    """Return one line about a reward that failed on a response."""
    what = valid_text(what if len(what) <= LONGEST else f"{what[:LONGEST]}...")
    return (
        f"domains.{problem.domain}.rewards.{reward}: {what} for problem {problem.prompt!r}"
        f" ({problem.key[:12]}) and response {response.text!r}"
    )


def solved(settings: Mapping[str, RewardBase], scores: Mapping[str, float]) -> bool:
    """Return whether every reward that judges the answer is 1; where none does, every reward.

    Rewards of weight 0 do not count.

    Example: `format` does not judge the answer, and `math` does.
        >>> from stages.rewards.kinds.format import FormatReward
        >>> from stages.rewards.kinds.math import MathReward
        >>> rewards = {"math": MathReward(), "format": FormatReward(pattern=".*")}
        >>> solved(rewards, {"math": 1.0, "format": 0.0})
        True
        >>> solved({"format": rewards["format"]}, {"format": 0.0})
        False
    """
    judging = [
        name for name, reward in settings.items() if reward.judges_answer and reward.weight > 0
    ]
    counting = [name for name, reward in settings.items() if reward.weight]
    return all(scores.get(name, 0.0) >= SOLVED for name in judging or counting or settings)


def _score_and_message(returned: Score | Explained) -> tuple[Score, str]:
    """Return a score, and what the reward says of it, "" for nothing."""
    if not isinstance(returned, tuple):
        return returned, ""
    if len(returned) != 2 or not isinstance(returned[1], str):
        raise RewardError(f"returned {returned!r}, not a score or (score, text)")
    score, message = returned
    return score, valid_text(message if len(message) <= LONGEST else f"{message[:LONGEST]}...")


def _checked(score: Score, characters: int) -> float | Steps:
    if not isinstance(score, Steps):
        return _finite(score)
    if len(score.ends) != len(score.rewards) or not score.ends:
        raise RewardError(f"returned {score!r}, which must have a reward for each of its ends")
    ends = [0 if characters else -1, *score.ends]  # no text is one step, which ends at 0
    if any(before >= after for before, after in pairwise(ends)) or ends[-1] > characters:
        raise RewardError(
            f"returned {score!r}, whose ends must rise from above 0 to {characters} at most"
        )
    return Steps([int(end) for end in score.ends], [_finite(reward) for reward in score.rewards])


def _finite(score: float) -> float:
    if not isinstance(score, Real) or not isfinite(score):
        raise RewardError(f"returned {score!r}, not a finite number")
    return float(score)


def _description(error: BaseException) -> str:
    if isinstance(error, RewardError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    try:
        description = repr(error)
    except Exception:  # a user's exception class may fail in __repr__
        description = type(error).__name__
    return f"raised {description}{where}"
