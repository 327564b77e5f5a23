"""What a person may set about rewards: one class for each kind, and the pool. Never imports torch.

A new kind is a class here, in `RewardSettings`, and a file that makes it, in `registry`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from parallel.settings import MOST, Count, Mebibytes, Settings, Tokens

Seconds = Annotated[float, Field(gt=0, le=MOST)]
RunSeconds = Annotated[float, Field(gt=0, le=600)]
Length = Annotated[int, Field(ge=0, le=1_000_000_000)]
Unfinished = Literal["zero", "score"]


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError(
            "pattern", "should be a regular expression ({reason})", {"reason": str(error)}
        ) from None
    return text


def _with_a_group(text: str) -> str:
    if not re.compile(text).groups:
        raise PydanticCustomError("pattern", "should have a group, (...), which is the score")
    return text


Pattern = Annotated[str, AfterValidator(_regular_expression)]


class RewardBase(Settings):
    """What every kind has. `judges_answer`: whether 1 says that a problem is solved."""

    judges_answer: ClassVar[bool] = True

    weight: float = Field(default=1.0, description="in the sample's reward; 0 only watches")
    unfinished: Unfinished = Field(
        default="zero", description="what a response earns that was cut off before its end token"
    )
    timeout_seconds: Seconds | None = Field(
        default=None, description="for one response; null is the pool's"
    )
    timed_out: float | None = Field(
        default=0.0,
        description="score of a response that it took longer for, which what was written may have"
        " caused; null leaves the sample without a reward, and out of the training",
    )


class ReasoningGymReward(RewardBase):
    """reasoning-gym's own scorer on `<working>answer`: the whole answer, or partial credit."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    credit: Literal["whole", "partial"] = "whole"


class MathReward(RewardBase):
    """1 where math-verify finds the response's answer equal to the problem's, else 0."""

    kind: Literal["math"] = "math"
    boxed: bool = Field(default=False, description="whether only a \\boxed{} answer counts")
    timeout_seconds: Seconds | None = 10.0


class InstructionReward(RewardBase):
    """The constraints that the problem's fields `instruction_id_list` and `kwargs` name (IFEval,
    arXiv 2311.07911): 1 where all are kept, or the share of them that is."""

    kind: Literal["instruction"] = "instruction"
    credit: Literal["all", "fraction"] = "all"


class JSONSchemaReward(RewardBase):
    """1 where the response is JSON that is valid against a schema, else 0."""

    kind: Literal["json_schema"] = "json_schema"
    schema_field: str = Field(default="schema", description="of the problem, which holds it")
    default_schema: dict[str, Any] | None = Field(
        default=None, description="for a problem without that field"
    )


class JudgeReward(RewardBase):
    """A rubric scored by a model behind any OpenAI-compatible endpoint, as a number in [0, 1]."""

    kind: Literal["judge"] = "judge"
    timed_out: float | None = None  # the service is slow then, not the response
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")] = Field(
        description="up to and including /v1"
    )
    model: str
    rubric: Annotated[str, Field(pattern=r"\{response\}")] = Field(
        description="the judge's prompt; {prompt}, {answer} and {response} are filled in"
    )
    verdict: Annotated[Pattern, AfterValidator(_with_a_group)] = Field(
        default=r"(?i)score:\s*(-?\d+(?:\.\d+)?)",
        description="its last match in what the judge says; group 1 is the score",
    )
    lowest: float = Field(default=0.0, description="the rubric's worst score, which earns 0")
    highest: float = Field(default=10.0, description="the rubric's best score, which earns 1")
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Tokens = 1024
    api_key_file: Path | None = Field(default=None, description="holds the key and nothing else")
    api_key_variable: str | None = Field(
        default=None, description="environment variable that holds the key"
    )
    attempts: Annotated[int, Field(gt=0, le=16)] = Field(
        default=4, description="of one request; after 1 second, and twice as many each time"
    )
    request_timeout_seconds: Seconds = 60.0
    timeout_seconds: Seconds | None = 300.0

    @property
    def longest_seconds(self) -> float:
        """How long all attempts and the pauses between them may take."""
        return self.attempts * self.request_timeout_seconds + 2 ** (self.attempts - 1) - 1


class CodeReward(RewardBase):
    """The share of a problem's tests that the response's program passes, run in the sandbox.

    Each pair of input and output is one run; asserts share one (docs/explanation/sandbox.md).
    """

    kind: Literal["code"] = "code"
    tests_field: str = Field(
        default="tests", description="of the problem: pairs of input and output, or asserts"
    )
    credit: Literal["fraction", "all"] = Field(
        default="fraction", description="fraction: of the tests passed; all: 1 for all, else 0"
    )
    wall_seconds: RunSeconds = Field(default=10.0, description="of one run, which is then killed")
    cpu_seconds: RunSeconds = Field(
        default=10.0, description="of all processes of one run together"
    )
    tests_seconds: Seconds = Field(
        default=60.0, description="of all runs of one response; tests that are left then fail"
    )
    memory_mebibytes: Annotated[int, Field(ge=64, le=1 << 20)] = Field(
        default=512, description="of the address space of a process, and in use by all of a run"
    )
    processes: Count = Field(default=16, description="and threads, of one run at a time")
    output_bytes: Annotated[int, Field(gt=0, le=1 << 30)] = Field(
        default=1 << 20, description="of one run's output, and as many of its error output"
    )
    timeout_seconds: Seconds | None = 120.0


class PythonReward(RewardBase):
    """A function of one's own: (problem, response text) -> float or `Steps`."""

    kind: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:\w+$", description="package.module:function")


class OverlongReward(RewardBase):
    """Section 1, soft overlong (DAPO): 0, falling to -1 over the last tokens before the limit."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["overlong"] = "overlong"
    max_tokens: Tokens = Field(description="L, end token included")
    buffer_tokens: Tokens = Field(description="c, the last of them, over which the reward falls")
    unfinished: Unfinished = "score"


class LengthReward(RewardBase):
    """1 where the response is as long as asked, else less: it falls to 0 over `slack`."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["length"] = "length"
    unit: Literal["tokens", "words", "characters"] = "tokens"
    at_least: Length = 0
    at_most: Annotated[Length, Field(gt=0)] | None = None
    slack: Length = 0
    unfinished: Unfinished = "score"


class FormatReward(RewardBase):
    """1 where the whole response matches a regular expression (`.` matches newlines too)."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["format"] = "format"
    pattern: Pattern


Script = Literal[
    "arabic",
    "bengali",
    "cyrillic",
    "devanagari",
    "greek",
    "han",
    "hangul",
    "hebrew",
    "hiragana",
    "katakana",
    "latin",
    "tamil",
    "thai",
]


class LanguageReward(RewardBase):
    """The share of the response's words that are written in the expected scripts alone."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["language"] = "language"
    scripts: Annotated[list[Script], Field(min_length=1)]
    unfinished: Unfinished = "score"


RewardSettings = Annotated[
    ReasoningGymReward
    | MathReward
    | InstructionReward
    | JSONSchemaReward
    | JudgeReward
    | CodeReward
    | PythonReward
    | OverlongReward
    | LengthReward
    | FormatReward
    | LanguageReward,
    Field(discriminator="kind"),
]


class RewardPoolSettings(Settings):
    """The processes that score responses, and what happens where they cannot."""

    workers: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="null: one a core, 8 at most; 16 where a judge is waited for",
    )
    timeout_seconds: Seconds = Field(
        default=60.0, description="for one reward of one response; its worker is then killed"
    )
    memory_mebibytes: Mebibytes = Field(default=4096, description="that one worker may allocate")
    max_failed_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02,
        description="share of a step's samples that may be left without a reward before the stage"
        " stops; above 0, one sample may always be",
    )
