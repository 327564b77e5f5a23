"""Problems from reasoning-gym (arXiv 2505.24760), scored by reasoning-gym's own scorers.

The form `compact` has a short text of a few datasets (`stages.data.compact_forms`); `chat` asks
any dataset's own question and reads the answer between `<answer>` and `</answer>`.

Importing reasoning_gym takes seconds and numpy, so only code that creates or scores problems
imports it. Never imports torch.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from stages.data.answer_readers import read_expression, read_literal
from stages.data.compact_forms import FORMATS, Entry
from stages.data.problem import DomainError, Message, Problem
from stages.data.reasoning_gym_options import prompt_violations, version_violation
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import Tokenizer
from stages.data.whole_answers import whole_answer_score

UNBOUNDED = 2**62
# Datasets that build all problems at once, or draw from numpy's seeds: each problem is the first of
# a dataset of size 1, whose seed is below 2^32.
ONE_BY_ONE = {"acre", "gsm_symbolic", "list_functions", "pool_matrix", "word_ladder"}
SEEDS = 2**32
# Scorers compare floats, and nan passes some of their comparisons.
NO_NUMBER = re.compile(r"(?i)\b(nan|inf|infinity)\b")
BEGIN, END = "<answer>", "</answer>"

SCORER = "score_answer"
READERS: dict[str, Callable[..., Any]] = {"eval": read_literal, "parse_expr": read_expression}
# What a dataset's scorer calls on a response's text, as its module names it. All other scorers of
# the pinned version only compare the text. tests/stages/scorer_source.py follows the answer through
# the source of the installed package, and a test compares what it finds.
EVALUATORS = {
    "binary_matrix": "eval",
    "countdown": "parse_expr",
    "intermediate_integration": "sympy.parse_expr",
    "n_queens": "eval",
    "polynomial_multiplication": "sp.parse_expr",
    "puzzle24": "parse_expr",
    "simple_integration": "sympy.parse_expr",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
}


class ReasoningGymSource:
    """An endless sequence of problems, each a pure function of the seed and its index.

    reasoning-gym draws item i with Random(seed + i): two seeds closer than the number of items
    drawn from them share items.
    Raises DomainError where the dataset or a key of its config is unknown or invalid, or another
    version of reasoning-gym is installed, whose scorers might execute a response's text.
    """

    key = "prompts.config"
    patience = 20_000

    def __init__(
        self, settings: ReasoningGymPromptSettings, tokenizer: Tokenizer, domain: str, seed: int
    ) -> None:
        self._domain, self._settings, self._seed = domain, settings, seed
        self._render = tokenizer.render
        self._name = settings.dataset
        for key, message in prompt_violations(settings):
            raise DomainError(domain, f"prompts.{key}", message)
        self._dataset = _create_dataset(settings, domain, seed)

    def problem(self, index: int) -> Problem:
        """Return the problem at `index`.

        Raises DomainError where the dataset cannot draw one, TokenizerError where the tokenizer
        cannot render it.
        """
        settings, dataset = self._settings, self._dataset
        try:
            if self._name in ONE_BY_ONE:
                dataset = _create_dataset(settings, self._domain, self._seed + index)
            entry: Entry = dataset[0 if self._name in ONE_BY_ONE else index]
        except DomainError:
            raise
        except Exception as error:
            why = f"no prompts: reasoning-gym's {self._name} cannot draw a problem ({error})"
            raise DomainError(self._domain, self.key, why) from error
        fields = {"dataset": self._name, "entry": entry, "config": settings.config}
        if settings.form == "compact":
            form = FORMATS[self._name]
            return Problem(self._domain, index, form.prompt(entry), form.answer(entry), fields)
        content = "\n\n".join(filter(None, (entry["question"], settings.instruction)))
        messages: tuple[Message, ...] = ({"role": "user", "content": content},)
        answer = "" if entry["answer"] is None else str(entry["answer"])
        text = self._render(messages, generation_prompt=True)
        return Problem(self._domain, index, text, answer, fields, messages)


def is_compact(problem: Problem) -> bool:
    """Return whether a problem of reasoning-gym has its compact text, so no chat messages."""
    return problem.messages is None


def tagged(answer: str, working: str) -> str:
    """Return a response to a problem with chat messages."""
    return f"{working}{BEGIN}{answer}{END}"


def tagged_answer(response: str) -> tuple[str, str] | None:
    """Return the text before the last `<answer>`, and between it and `</answer>`; None without.

    Example:
        >>> tagged_answer("2 + 2, so <answer> 4 </answer>.")
        ('2 + 2, so ', '4')
    """
    end = response.rfind(END)
    begin = response.rfind(BEGIN, 0, max(end, 0))
    if begin < 0:
        return None
    return response[:begin], response[begin + len(BEGIN) : end].strip()


def score(problem: Problem, answer: str) -> float:
    """Return reasoning-gym's score of `answer`, in [0, 1]; 0 for an invalid answer.

    Where its scorer gives all to more than the right text, `whole_answer_score` corrects it.
    reasoning-gym's number_sorting tolerates an error of 1 in each number.
    Raises ValueError for a problem of another source, which has no such scorer.
    """
    dataset = problem.fields.get("dataset")
    if not isinstance(dataset, str) or "entry" not in problem.fields:
        raise ValueError("only problems of source reasoning_gym have reasoning-gym's scorer")
    handed_in: str | None = answer
    if is_compact(problem):
        handed_in = FORMATS[dataset].hand_in(answer)
    elif NO_NUMBER.search(answer) and not NO_NUMBER.search(problem.answer):
        handed_in = None
    if handed_in is None:
        return 0.0
    scorer = _scorer(dataset, json.dumps(problem.fields.get("config", {}), sort_keys=True))
    try:
        credit = float(scorer(handed_in, problem.fields["entry"]))
    except Exception:  # several scorers raise on an answer of a form that they do not expect
        return 0.0
    # Above 1 counts as right, and a negative score or nan as wrong.
    credit = credit if 0 <= credit <= 1 else float(credit > 1)
    return whole_answer_score(dataset, credit, handed_in, str(problem.fields["entry"]["answer"]))


@cache  # each is a new dataset
def _scorer(dataset: str, config: str) -> Callable[[str, Entry], float]:
    dataset_type, config_type = _reasoning_gym().factory.DATASETS[dataset]
    return contained(dataset, dataset_type(config=config_type(**json.loads(config))))


def _create_dataset(settings: ReasoningGymPromptSettings, domain: str, seed: int) -> Any:
    name = settings.dataset
    stream_options = {"seed": seed, "size": UNBOUNDED}
    if name in ONE_BY_ONE:
        stream_options = {"seed": seed % SEEDS, "size": 1}
    try:
        return _reasoning_gym().create_dataset(name, **stream_options, **settings.config)
    except Exception as error:  # its configs reject values by assertions and other errors
        raise DomainError(domain, "prompts.config", f"rejected by {name}: {error}") from error


def _reasoning_gym() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib compares with `is`
        import reasoning_gym

    return reasoning_gym


def contained(dataset: str, instance: Any) -> Callable[[str, Any], float]:
    """Return the scorer of a dataset's `instance`, in which a reader stands for the evaluator.

    Raises ValueError for another version of reasoning-gym than EVALUATORS is of.
    """
    if why := version_violation():
        raise ValueError(why)
    scorer: FunctionType = getattr(type(instance), SCORER)
    if (evaluator := EVALUATORS.get(dataset)) is None:
        return getattr(instance, SCORER)
    module = sys.modules[scorer.__module__].__dict__
    library, _, function = evaluator.rpartition(".")
    replaced: dict[str, Any] = {function: READERS[function]}
    if library:  # as sympy.parse_expr
        replaced = {library: SimpleNamespace(**{**vars(module[library]), **replaced})}
    # A copy with other globals: the package's own module stays as it is.
    copy = FunctionType(
        scorer.__code__,
        {**module, **replaced},
        scorer.__name__,
        scorer.__defaults__,
        scorer.__closure__,
    )
    return copy.__get__(instance)
