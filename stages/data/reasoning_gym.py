"""Problems from reasoning-gym (arXiv 2505.24760), scored by reasoning-gym's own scorers.

Each dataset has a compact text, a prompt of a dozen characters, not a paragraph: to add a dataset,
add a `Format`. A response is `<working>answer`. Many of reasoning-gym's own scorers give the answer
to `eval` or to sympy's `parse_expr`, which runs it as code in a reward worker: such a dataset is
refused, whatever its `hand_in` accepts.

Importing reasoning_gym takes seconds and numpy, so only code that creates or scores problems
imports it. A dataset's options are parsed from its source in milliseconds: a login node validates a
configuration at once. Never imports torch.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from stages.data.problem import DomainError, Problem
from stages.data.settings import ReasoningGymPromptSettings

PACKAGE = "reasoning_gym"
UNBOUNDED = 2**62
EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}  # sympy's call eval
SET_BY_THE_STREAM = {"seed", "size"}
# The largest integer option (numbers, digits or letters of a problem): the highest level of
# reasoning-gym's own curricula. A million would take seconds for every problem.
MOST = 1000
TYPES: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
Entry = dict[str, Any]
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclass(frozen=True)
class Format:
    """A dataset's functions from an entry to its prompt, working, answer and a careless answer.

    `hand_in` converts a response's answer into the text that reasoning-gym's scorer reads, or
    returns None for an invalid answer. reasoning-gym's `module` defines the dataset's config class.
    """

    module: str
    prompt: Callable[[Entry], str]
    working: Callable[[Entry], str]
    answer: Callable[[Entry], str]
    careless: Callable[[str, Random], str]
    hand_in: Callable[[str], str | None]


def _running_totals(entry: Entry) -> str:
    """Return every intermediate result, left to right: `4 - 1 - 7` gives `3,-4`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, totals = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        totals.append(str(total))
    return ",".join(totals)


def _number_list(numbers: Sequence[str]) -> str:
    return ",".join(number.removesuffix(".0") for number in numbers)


def _hand_in_numbers(answer: str) -> str | None:
    """Return a JSON list of strings. Only numbers pass: a list of `nan` would score as right."""
    numbers = answer.split(",")
    return json.dumps(numbers) if all(map(NUMBER.fullmatch, numbers)) else None


def _hand_in_list(answer: str) -> str | None:
    """Return a list as Python prints it, which the scorer compares as text; `.` is an empty one."""
    if answer == ".":
        return "[]"
    numbers = answer.split(",")
    return str(numbers) if all(map(NUMBER.fullmatch, numbers)) else None


def _off_by_some(answer: str, random: Random) -> str:
    return str(int(answer) + random.choice([-3, -2, -1, 1, 2, 3]))


def _filter_sign(entry: Entry) -> str:
    """Return the sign of the numbers that are kept: `>`, `<`, or `>=` and `<=` of a removal."""
    keep, bound = entry["metadata"]["operation"].split("_")
    if keep == "keep":
        return ">" if bound == "larger" else "<"
    return "<=" if bound == "larger" else ">="


def _swap_neighbours(items: Sequence[str], random: Random) -> list[str]:
    """Return `items` with two unequal neighbours swapped; where all are equal, without the last."""
    places = [i for i in range(len(items) - 1) if items[i] != items[i + 1]]
    if not places:
        return list(items[:-1])
    i = random.choice(places)
    return [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


FORMATS: dict[str, Format] = {
    "chain_sum": Format(
        module="arithmetic.chain_sum",
        prompt=lambda entry: f"c{entry['metadata']['expression'].replace(' ', '')}=",
        working=_running_totals,
        answer=lambda entry: entry["answer"],
        careless=_off_by_some,
        hand_in=lambda answer: answer if NUMBER.fullmatch(answer) else None,
    ),
    # With no decimal places, sums and differences of integers, as chain_sum's.
    "decimal_chain_sum": Format(
        module="arithmetic.decimal_chain_sum",
        prompt=lambda entry: f"s{entry['metadata']['expression'].replace(' ', '')}=",
        working=lambda entry: str(entry["metadata"]["num_terms"]),
        answer=lambda entry: entry["answer"],
        careless=_off_by_some,
        hand_in=lambda answer: answer if NUMBER.fullmatch(answer) else None,
    ),
    "spell_backward": Format(
        module="algorithmic.spell_backward",
        prompt=lambda entry: f"r{entry['metadata']['word'].lower()}=",
        working=lambda entry: str(entry["metadata"]["word_len"]),
        answer=lambda entry: entry["answer"].lower(),
        careless=lambda answer, random: "".join(_swap_neighbours(answer, random)),
        hand_in=lambda answer: answer,
    ),
    "palindrome_generation": Format(
        module="algorithmic.palindrome_generation",
        prompt=lambda entry: f"p{''.join(entry['metadata']['letters'])}=",
        working=lambda entry: "".join(sorted(entry["metadata"]["letters"])),
        answer=lambda entry: entry["answer"],
        careless=lambda answer, random: answer[:-1],  # letters are missing: never right
        hand_in=lambda answer: answer,
    ),
    "number_filtering": Format(
        module="algorithmic.number_filtering",
        prompt=lambda entry: (
            f"f{_filter_sign(entry)}{entry['metadata']['filter_value']}:"
            f"{','.join(entry['metadata']['original_numbers'])}="
        ),
        working=lambda entry: str(len(entry["metadata"]["result"])),
        answer=lambda entry: ",".join(entry["metadata"]["result"]) or ".",
        careless=lambda answer, random: ",".join(_swap_neighbours(answer.split(","), random)),
        hand_in=_hand_in_list,
    ),
    "number_sorting": Format(
        module="algorithmic.number_sorting",
        prompt=lambda entry: (  # `a` for ascending, `d` for descending
            f"{entry['metadata']['direction'][0]}"
            f"{_number_list(entry['metadata']['original_numbers'])}="
        ),
        working=lambda entry: str(entry["metadata"]["numbers"]),
        answer=lambda entry: _number_list(entry["metadata"]["sorted_numbers"]),
        careless=lambda answer, random: ",".join(_swap_neighbours(answer.split(","), random)),
        hand_in=_hand_in_numbers,
    ),
}


class ReasoningGymSource:
    """An endless sequence of problems, each a pure function of the seed and its index.

    reasoning-gym draws item i with Random(seed + i): two seeds closer than the number of items
    drawn from them share items.
    Raises DomainError where the dataset or a key of its config is unknown or invalid, or where the
    dataset's scorer would execute a response's text.
    """

    key = "prompts.config"
    patience = 20_000

    def __init__(self, settings: ReasoningGymPromptSettings, domain: str, seed: int) -> None:
        self._domain = domain
        self._name = settings.dataset
        self._dataset = _create_dataset(settings, domain, seed)

    def problem(self, index: int) -> Problem:
        """Return the problem at `index`. Raises DomainError where the dataset cannot draw one."""
        try:
            entry: Entry = self._dataset[index]
        except Exception as error:
            why = f"no prompts: reasoning-gym's {self._name} cannot draw a problem ({error})"
            raise DomainError(self._domain, self.key, why) from error
        form, fields = FORMATS[self._name], {"dataset": self._name, "entry": entry}
        return Problem(self._domain, index, form.prompt(entry), form.answer(entry), fields)


def score(problem: Problem, answer: str) -> float:
    """Return reasoning-gym's score of `answer`, in [0, 1]; 0 for an invalid answer.

    reasoning-gym's number_sorting tolerates an error of 1 in each number.
    Raises ValueError for a problem of another source, which has no such scorer.
    """
    dataset = problem.fields.get("dataset")
    if dataset not in FORMATS:
        raise ValueError("only problems of source reasoning_gym have reasoning-gym's scorer")
    handed_in = FORMATS[dataset].hand_in(answer)
    if handed_in is None:
        return 0.0
    return float(_scorer(dataset)(handed_in, problem.fields["entry"]))


@cache  # each is a new dataset
def _scorer(dataset: str) -> Callable[[str, Entry], float]:
    return _reasoning_gym().get_score_answer_fn(dataset)


@cache
def options(dataset: str) -> dict[str, str] | None:
    """Return the type of every option of a dataset of FORMATS, by name.

    None: reasoning-gym is not installed, or in a version that this does not read.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    module = FORMATS[dataset].module.replace(".", "/")
    path = Path(spec.submodule_search_locations[0]) / f"{module}.py"
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            stated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            types = {ast.unparse(each.target): ast.unparse(each.annotation) for each in stated}
            return {name: of for name, of in types.items() if name not in SET_BY_THE_STREAM}
    return None


def value_violation(kind: str, value: Any) -> str | None:
    """Return what is wrong with an option's value, or None; `kind` is the option's type."""
    if (expected := TYPES.get(kind)) is None:
        return None
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        return f"should be {kind}, not {json.dumps(value, default=str)}"
    if kind == "int" and not -MOST <= value <= MOST:
        return f"should be between -{MOST} and {MOST}, not {value}"
    return None


def _create_dataset(settings: ReasoningGymPromptSettings, domain: str, seed: int) -> Any:
    name = settings.dataset
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise DomainError(domain, "prompts.dataset", f"no such dataset: {name}; known: {known}")
    if found := _evaluation(_reasoning_gym().factory.DATASETS[name][0]):
        raise DomainError(
            domain,
            "prompts.dataset",
            f"reasoning-gym's scorer would run a response's text: {found}; read the problems from"
            " a file and score them with your own reward",
        )
    if kinds := options(name):
        for key, value in settings.config.items():
            if key in kinds:
                wrong = value_violation(kinds[key], value)
            else:
                wrong = f"no such option of {name}; known: {', '.join(sorted(kinds))}"
            if wrong:
                raise DomainError(domain, f"prompts.config.{key}", wrong)
    try:
        return _reasoning_gym().create_dataset(name, seed=seed, size=UNBOUNDED, **settings.config)
    except Exception as error:  # its configs reject values by assertions and other errors
        raise DomainError(domain, "prompts.config", f"rejected by {name}: {error}") from error


def _evaluation(dataset_type: type[Any]) -> str | None:
    """Return where the module of a dataset's scorer evaluates text as code, or None.

    An entry alone is reasoning-gym's own text; anything else may be a response.
    """
    module = sys.modules[dataset_type.score_answer.__module__]
    path = Path(str(module.__file__))
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        names = {each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name)}
        if called.rpartition(".")[2] in EVALUATORS and names != {"entry"}:
            return f"{path.name}:{node.lineno} calls {ast.unparse(node)}"
    return None


def _reasoning_gym() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib compares with `is`
        import reasoning_gym

    return reasoning_gym
