"""The lines of `braid domain check`: a domain's rows, rewards' scores, and a model's responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.tables import table
from pipeline.text import shown, visible
from stages.data.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.domains import DomainSettings
from stages.metric_ranges import RANGES
from stages.rewards.kinds.math import MathReward

WRONG = ("empty", "garbage")
EXAMPLES, MOST = 5, 60  # responses shown, and the most characters of each
MOST_LINES, MOST_LINE = 30, 400  # of the first prompt, and characters of a line
BINS = 10  # of a distribution with more values than this
MOST_DEMONSTRATIONS = 0.5  # that may exceed the limit of responses
Prompts = Sequence[dict[str, Any]]
Lengths = Mapping[str, Any] | None  # a ResponseLengths, as JSON


def described(
    settings: DomainSettings,
    lengths: dict[str, Any],
    unit: str = "tokens",
    references: Lengths = None,
) -> Iterator[str]:
    """Yield the source of the prompts, their counts and the lengths of prompts and references.

    `unit` is "characters" where the model's tokenizer is not known.
    """
    prompts, response = settings.prompts, settings.sampling.max_response_tokens
    rows, held_out, for_gates = (lengths[key] for key in ("rows", "held_out", "for_gates"))
    if isinstance(prompts, ReasoningGymPromptSettings):
        yield f"prompts: reasoning-gym's {prompts.dataset}, without end; {rows} sampled"
    else:
        yield f"prompts: {_files(prompts)}, {rows} rows"
    yield (
        f"  {lengths['duplicates']} repeated, {lengths['bad']} unusable: "
        f"{lengths['prompts'] - held_out - for_gates} to train on, {held_out} held out, {for_gates}"
        f" for gates; {lengths['too_long']} of all are too long"
    )
    if not isinstance(prompts, ReasoningGymPromptSettings):
        yield f"  a run's evaluation.problems is at most {held_out}, gate.problems {for_gates}"
    yield f"  {unit} of a prompt, by percentile: {_spread(lengths['tokens'])}"
    if unit != "tokens":
        yield "  its tokens are counted with the model's tokenizer: --tokenizer DIRECTORY"
        return
    if references is not None:
        yield f"  {unit} of a reference answer, by percentile: {_spread(references['tokens'])}"
    yield (
        f"  the longest prompt and sampling.max_response_tokens = {response} are "
        f"{lengths['tokens']['100'] + response} tokens; engine.max_model_tokens must allow them"
    )


def demonstrated(
    settings: DomainSettings, report: dict[str, Any] | None, unit: str = "tokens"
) -> Iterator[str]:
    """Yield the source of a cold start's demonstrations, their counts, lengths and examples.

    `unit` is as in `described`.
    """
    source = settings.demonstrations
    if report is None:
        yield "demonstrations: none; a run with a cold start needs them from files"
        return
    if isinstance(source, FileDemonstrationSettings):
        yield f"demonstrations: {_files(source)}, {report['rows']} rows"
    else:
        yield f"demonstrations: generated, {source.count} in a run; {report['rows']} checked"
    yield (
        f"  {report['duplicates']} repeated, {report['bad']} unusable: {report['usable']} to learn "
        f"from, {report['held_out']} whose prompts are held out"
    )
    if report["limit"] is None:
        yield "  those above model.max_positions tokens are too long: count them with --run"
    else:
        yield f"  {report['too_long']} of these are too long: more than {report['limit']} tokens"
    yield f"  {unit} of a demonstration, by percentile: {_spread(report['tokens'])}"
    if unit == "tokens" and report["turns"] is not None:
        yield f"  {unit} of its longest answer, by percentile: {_spread(report['turns']['tokens'])}"
    yield f"  {100 * report['learned']:.0f} % of {unit} are trained on: the assistant's"
    for prompt, response in report["examples"]:
        yield f"  {short(prompt)} is answered {short(response)}"


def cut_off(
    domain: str, references: Lengths, demonstrations: Lengths
) -> Iterator[tuple[str, bool]]:
    """Yield what `sampling.max_response_tokens` cuts off, and whether nothing can then be learned.

    That is so where more references than RANGES has of healthy `unfinished` are longer, or most
    demonstrations, of which a shorter one may be right. `references` and `demonstrations` are those
    of `stages.domain_tools.response_lengths`, None where there are none.
    """
    most = RANGES["unfinished"].healthy
    for what, lengths, bearable in (
        ("reference answers", references, most),
        ("demonstrated answers", demonstrations, MOST_DEMONSTRATIONS),
    ):
        if lengths is None or (share := lengths["too_long"] / lengths["checked"]) <= most:
            continue
        longest = lengths["tokens"]["100"]
        yield (
            f"domains.{domain}.sampling.max_response_tokens = {lengths['limit']}: {share:.0%} of"
            f" the {what} are longer, up to {longest} tokens with the end token; such responses"
            f" are truncated and earn nothing: raise it to {longest} or more",
            share > bearable,
        )


def unreadable(domain: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield the number of rows whose answers a reward cannot read, with the first of them."""
    if report["bad"]:
        more = report["bad"] - len(report["first"])
        of = "" if report["checked"] == report["rows"] else f" checked in time, of {report['rows']}"
        yield (
            f"domains.{domain}.prompts: rewards cannot use {report['bad']} of {report['checked']}"
            f" rows{of}: {'; '.join(map(visible, report['first']))}"
            f"{f'; and {more} more' if more else ''}; fix the rows, or remove them"
        )


def errors(domain: str, settings: DomainSettings, prompts: Prompts) -> Iterator[str]:
    """Yield rewards that fail, and those that do not score right answers above wrong ones.

    A reward that judges answers may do so together with the others, by their sum; where none
    judges, the sum must.
    """
    where, judging = f"domains.{domain}.rewards", _judging(settings)
    responses = [response for prompt in prompts for response in prompt["responses"]]
    if failures := [response["failure"] for response in responses if response["failure"]]:
        yield f"a reward failed on {len(failures)} responses, which then have none; {failures[0]}"
    sums = [prompt for prompt in prompts if _is_below(_scores(prompt))]

    def no_more(below: Prompts, name: str | None = None) -> str:
        prompt, score = below[0], _scores(below[0], name)["reference"]
        text = next(
            response["text"] for response in prompt["responses"] if response["what"] == "reference"
        )
        return (
            f"{score:g}, no more than a wrong response, on {len(below)} of {len(prompts)} prompts; "
            f"the first is {short(prompt['prompt'])} with {short(text)}"
        )

    for name in judging:
        if below := [prompt for prompt in sums if _is_below(_scores(prompt, name))]:
            yield (
                f"{where}.{name}: the reference scores {no_more(below, name)}. The reference of a "
                "row is its answer as it stands: where a reward wants more of a response, such as "
                "a format, have the column hold a whole one"
            )
        scores = [_scores(prompt, name) for prompt in prompts]
        for wrong in WRONG if not any("reference" in score for score in scores) else ():
            if all(score.get(wrong, 0.0) >= 1 for score in scores):
                yield (
                    f"{where}.{name}: the {wrong} response scores 1 on every prompt, as a right "
                    "answer should"
                )
    if sums and not judging:
        yield (
            f"{where}: none of them judges the answer, and the reference earns {no_more(sums)}. "
            "Naming rewards drops the default one, which may be named with them: "
            "exact: {kind: reasoning_gym}"
        )


def has_references(prompts: Prompts) -> bool:
    """Return whether the prompts have reference answers, which the rewards have scored."""
    return any(
        response["what"] == "reference" for prompt in prompts for response in prompt["responses"]
    )


def notes(domain: str, settings: DomainSettings, prompts: Prompts) -> Iterator[str]:
    """Yield what is worth knowing and not an error."""
    judging, count = _judging(settings), len(prompts)
    responses = [response for prompt in prompts for response in prompt["responses"]]
    if failures := [
        response["watch_failures"] for response in responses if response["watch_failures"]
    ]:
        yield (
            f"rewards of weight 0 failed on {len(failures)} responses, which keep the others' "
            f"rewards; the first: {failures[0][0]}"
        )
    if not has_references(prompts):
        yield "there are no reference answers: whether a right answer earns anything is untested"
    if not judging:
        yield "no reward judges the answer: evaluation counts as solved where every one is 1"
    for name in judging:
        where = f"domains.{domain}.rewards.{name}"
        scores = [(_scores(prompt, name), _scores(prompt)) for prompt in prompts]
        if alone := sum(_is_below(score) and not _is_below(total) for score, total in scores):
            yield (
                f"{where}: by itself it does not tell right from wrong on {alone} of {count} "
                "prompts; the sum of all rewards does"
            )
        right = [(score.get("reference", 1.0), _best_wrong(score)) for score, _ in scores]
        if partly := [score for score, wrong in right if wrong < score < 1]:
            yield (
                f"{where}: the reference scores {partly[0]:g} on {len(partly)} of {count} prompts, "
                "and evaluation counts only 1 as solved"
            )
    rewards = settings.rewards.values()
    boxed = any(isinstance(reward, MathReward) and reward.boxed for reward in rewards)
    if boxed and not any("boxed" in prompt["prompt"] for prompt in prompts):
        ask = r"{prompt}\nPut the final answer in \\boxed{}."
        yield (
            r"a reward reads the last \boxed{} alone, and no prompt asks for one; ask for it: "
            f'domains.{domain}.prompts.template: {{user: "{ask}"}}'
        )


def as_read(prompts: Prompts) -> Iterator[str]:
    """Yield the first prompt as the model reads it, rendered, up to MOST_LINES of its lines."""
    if not prompts:
        return
    yield "the first prompt as the model reads it:"
    lines = prompts[0]["prompt"].splitlines() or [""]
    shown_lines = lines
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        left_out = f"[{len(lines) - 2 * half} lines]"
        shown_lines = [*lines[:half], left_out, *lines[-half:]]
    yield from (f"  | {visible(line[:MOST_LINE])}" for line in shown_lines)


def previewed(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a checkpoint's responses: examples, what the groups teach, and rewards' distributions.

    `results` is the results.json of `stages.domain_tools.preview`.
    """
    groups: list[list[dict[str, Any]]] = results["groups"]
    firsts = [group[0] for group in groups[:EXAMPLES]]
    yield scored("prompt", ((short(sample["prompt"]), sample) for sample in firsts), "response")
    samples = [sample for group in groups for sample in group]
    rewarded = [sample for sample in samples if sample["reward"] is not None]
    alike = [group for group in groups if len({sample["reward"] for sample in group} - {None}) <= 1]
    right = sum(all(sample["solved"] for sample in group) for group in alike)
    wrong = sum(not any(sample["solved"] for sample in group) for group in alike)
    truncated = sum(not sample["finished"] for sample in samples)
    tokens = sum(sample["tokens"] for sample in samples)
    yield f"\n{len(samples)} responses to {len(groups)} prompts"
    yield f"  zero-variance groups, which teach nothing: {_share(len(alike), len(groups))}"
    yield f"    all right: {_share(right, len(groups))}; all wrong: {_share(wrong, len(groups))}"
    yield f"  truncated at sampling.max_response_tokens: {_share(truncated, len(samples))}"
    yield f"  tokens of a response: {tokens / len(samples):.1f} on average"
    if failures := results["failures"]:
        share = _share(len(failures), len(samples))
        yield f"  without a reward: {share}; the first: {visible(failures[0])}"
    if failures := results["watch_failures"]:
        failure = visible(failures[0])
        yield f"  a reward of weight 0 failed {len(failures)} times; the first: {failure}"
    values = {"reward": [sample["reward"] for sample in rewarded]}
    for sample in rewarded:
        for name, value in sample["parts"].items():
            values.setdefault(f"reward/{name}", []).append(value)
    for name, scores in values.items():
        if scores:
            shares = (f"{label}: {_share(n, len(scores))}" for label, n in binned(scores).items())
            yield f"  {name}: {sum(scores) / len(scores):.4g} on average; {', '.join(shares)}"


def binned(values: list[float]) -> dict[str, int]:
    """Return the counts of values, lowest first; by `BINS` equal ranges if there are more."""
    if len(single := Counter(values)) <= BINS:
        return {f"{value:g}": single[value] for value in sorted(single)}
    lowest, width = min(values), (max(values) - min(values)) / BINS
    counts = Counter(min(int((value - lowest) / width), BINS - 1) for value in values)
    edges = [lowest + width * place for place in range(BINS + 1)]
    return {f"{edges[b]:.3g} to {edges[b + 1]:.3g}": counts[b] for b in range(BINS)}


def short(text: str) -> str:
    """Return text as a literal on one line, its middle left out where it is long."""
    half = MOST // 2
    return repr(text if len(text) <= MOST else f"{text[:half]} … {text[-half:]}")


def scored(heading: str, responses: Iterable[tuple[str, dict[str, Any]]], key: str) -> str:
    """Return a table of labelled responses: each with its text, at `key`, and its rewards."""
    rows = [(label, response, response["parts"] or {}) for label, response in responses]
    names = list(dict.fromkeys(name for *_, reward_parts in rows for name in reward_parts))
    cells = []
    for label, response, reward_parts in rows:
        scores = [*map(reward_parts.get, names), response["reward"]]
        numbers = ("failed" if score is None else f"{score:g}" for score in scores)
        cells.append((label, short(response[key]), *numbers))
    return table("", (heading, "response", *names, "reward"), cells)


def _judging(settings: DomainSettings) -> list[str]:
    """Return the rewards whose 1 means that a problem is solved."""
    return [
        name
        for name, reward in settings.rewards.items()
        if reward.judges_answer and reward.weight > 0
    ]


def _scores(prompt: dict[str, Any], name: str | None = None) -> dict[str, float]:
    """Return each response's score by a reward, or by the sum; none where it failed."""
    scores = {
        response["what"]: response["reward"] if name is None else response["parts"].get(name)
        for response in prompt["responses"]
    }
    return {what: score for what, score in scores.items() if score is not None}


def _is_below(score: dict[str, float]) -> bool:
    """Return whether the reference, if there is one, is worth no more than a wrong response."""
    return "reference" in score and score["reference"] <= _best_wrong(score)


def _best_wrong(score: dict[str, float]) -> float:
    return max((score[what] for what in WRONG if what in score), default=0.0)


def _files(source: FilePromptSettings | FileDemonstrationSettings) -> str:
    first, *others = source.files()
    return f"{shown(first)} and {len(others)} more" if others else shown(first)


def _spread(tokens: dict[str, int]) -> str:
    return ", ".join(f"{count} ({percent} %)" for percent, count in tokens.items())


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.0f} %"
