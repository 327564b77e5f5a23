"""The commands on a domain's file: `braid domain new` and `braid domain check`.

`check` looks at a domain's data and rewards before training, and at a model's responses.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from parallel.settings import CHARACTERS
from pipeline.commands import common
from pipeline.commands.common import GROUPS, JSON, TRUST, Argument, command, positive, print_json
from pipeline.config.rules import DOMAIN_NAME
from pipeline.config.validate import (
    dump_differing,
    is_run,
    load,
    load_domain,
    load_with_domain,
)
from pipeline.launch import one_off
from pipeline.report.capacity import check_capacity
from pipeline.report.gpu_memory import gpus_here
from pipeline.report.tables import Cell, table, terminal
from pipeline.run.graph import Stage
from pipeline.slurm.queue import check_not_queued
from pipeline.text import say, shown, visible
from stages.data.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.domains import DomainSettings
from stages.rewards.reward import RewardPoolSettings

DIRECTORY = Path("configs/domains")
STARTERS = Path(__file__).parents[2] / DIRECTORY  # with NAME, PATH and SOURCE to replace
WRONG = ("empty", "garbage")
EXAMPLES, MOST = 5, 60  # responses shown, and the most characters of each
RANGES = 10  # of a distribution with more values than this
Prompts = Sequence[dict[str, Any]]

DOMAIN_HELP = """\
  braid domain new geometry --source jsonl
  braid domain check configs/domains/geometry.yaml --tokenizer /models/tokenizer
  braid domain check configs/domains/geometry.yaml --run quickstart --stage cold_start
  braid domain check mine.yaml --domain math         # of the run that this file configures

`check` scores the reference answers, an empty response and a wrong one; the exit code is 1 where a
reward does not distinguish them. With --run it also samples one step's responses from a model and
shows their rewards. `new` never overwrites.

JSON of `check`: {"valid", "errors": [TEXT], "preview": the samples and rewards, or null}.
"""
GROUPS["domain"] = ("write a domain's file, and check one", DOMAIN_HELP)


@command(
    "domain check",
    "show a domain's prompts, and whether its rewards tell right from wrong",
    DOMAIN_HELP,
    Argument("file", type=Path, metavar="FILE", help="the domain's YAML file, or a run's"),
    Argument(
        "--domain",
        metavar="NAME",
        action="append",
        default=[],
        help="of a run's file, only this domain (repeatable)",
    ),
    Argument("--prompts", type=positive, default=5, help="prompts to show and score (default: 5)"),
    Argument(
        "--tokenizer",
        type=Path,
        help="directory of a Hugging Face tokenizer (default: the run's, else single characters)",
    ),
    Argument("--run", metavar="RUN", help="also sample responses, with this run's engine"),
    Argument("--stage", help="sample from the model of this finished stage of the run"),
    Argument(
        "--samples", type=positive, help="responses per prompt (default: sampling.group_size)"
    ),
    TRUST,
    JSON,
)
def domain_check(arguments: Namespace) -> None:
    """Show a domain and check its rewards; with a run, also on a model's responses."""
    path, tokenizer, found = arguments.file, arguments.tokenizer, None
    if arguments.run is None:
        if arguments.stage or arguments.samples:
            raise UserError("--stage and --samples need --run")
        wrong = _check_file(arguments)
    else:
        if tokenizer or not arguments.stage:
            raise UserError("--run needs --stage, and excludes --tokenizer: a run has its own")
        run = common.load_trusted_run(arguments)
        one_off.finished_training(run, arguments.stage)
        settings = load_with_domain(run.settings_file, path, arguments.samples)
        # Like an evaluation it samples, and trains nothing.
        check_capacity(settings, [Stage("preview", "evaluate")], gpus_here(settings))
        model = run.settings.model
        domain = load_domain(path, run.settings.rewards)
        pool, positions = run.settings.rewards, model.max_positions
        wrong = _check(arguments, path.stem, domain, pool, model.tokenizer, positions)
        checkpoint = run.checkpoint_path(arguments.stage)
        with run.lock():
            check_not_queued(run)
            programs = common.PROGRAMS
            found = one_off.preview(run, settings, terminal(), programs, checkpoint, path.stem)
        print("", *previewed(found), "", sep="\n")
    if arguments.json:
        print_json(arguments, {"valid": not wrong, "errors": wrong, "preview": found})
    if wrong:
        print(table("", (), [(Cell("✗", "red"), error) for error in wrong]))
        raise UserError(f"{shown(path)}: its rewards (✗) do not tell right from wrong")
    say(f"{shown(path)} is valid, and its rewards tell right from wrong on these prompts")


@command(
    "domain new",
    "write configs/domains/NAME.yaml as a starting point",
    DOMAIN_HELP,
    Argument("name", metavar="NAME", help="the domain's name"),
    Argument(
        "--source",
        choices=("reasoning_gym", "jsonl", "parquet"),
        default="reasoning_gym",
        help="where its problems come from (default: reasoning_gym)",
    ),
)
def domain_new(arguments: Namespace) -> None:
    """Write a new domain's file."""
    name, source = arguments.name, arguments.source
    if not re.fullmatch(DOMAIN_NAME, name):
        raise UserError(f"{name!r} is not a domain's name: use 1 to 100 letters, digits, _ and -")
    path = DIRECTORY / f"{name}.yaml"
    starter = "_starter.yaml" if source == "reasoning_gym" else "_starter_files.yaml"
    filled = {"NAME": name, "PATH": str(path), "SOURCE": source}
    text = (STARTERS / starter).read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(re.sub("NAME|PATH|SOURCE", lambda found: filled[found[0]], text))
    except FileExistsError:
        raise UserError(f"{shown(path)} exists already; it was not changed") from None
    say(f"wrote {shown(path)}; check it with: braid domain check {shown(path)}")


def _check_file(arguments: Namespace) -> list[str]:
    """Print the domain of a file, or the domains of a run's; return where rewards are wrong.

    Raises:
        UserError: the file is a domain's and --domain names one, or a run's and has no such domain.
    """
    path, tokenizer, names = arguments.file, arguments.tokenizer, arguments.domain
    given = None if tokenizer is None else str(tokenizer.absolute())
    if not is_run(path):
        if names:
            raise UserError(f"{shown(path)} is one domain; --domain needs a run's file")
        pool = RewardPoolSettings()
        domain = load_domain(path, pool)
        return _check(arguments, path.stem, domain, pool, given or CHARACTERS)
    run = load(path, to_start=False)
    if absent := next((name for name in names if name not in run.domains), None):
        raise UserError(f"{shown(path)}: no domain {absent}; {hint(absent, run.domains)}")
    wrong: list[str] = []
    for name in names or run.domains:
        say("", f"domain {name}")
        domain, model = run.domains[name], run.model
        found = (run.rewards, given or model.tokenizer, model.max_positions)
        wrong += _check(arguments, name, domain, *found)
    return wrong


def _check(
    arguments: Namespace,
    name: str,
    settings: DomainSettings,
    pool: RewardPoolSettings,
    tokenizer: str,
    max_positions: int | None = None,
) -> list[str]:
    """Print a domain and its rewards' scores; return where they do not tell right from wrong."""
    differing = (f"  {line}" for line in dump_differing(settings).splitlines())
    say("settings that differ from the defaults:", *differing)
    job = {
        "domain": name,
        "settings": settings.model_dump(mode="json"),
        "tokenizer": tokenizer,
        "pool": pool.model_dump(mode="json"),
        "prompts": arguments.prompts,
        "max_positions": max_positions,
    }
    found = one_off.answer_of("the check", "stages.domain_check", job)
    say("", *described(settings, found["lengths"]))
    for number, prompt in enumerate(found["prompts"], start=1):
        asked, answer = short(prompt["prompt"]), short(prompt["answer"])
        say("", f"{number}. {asked}, {prompt['tokens']} tokens; answer {answer}")
        print(_scored("", ((each["what"], each) for each in prompt["responses"]), "text"))
    say("", *demonstrated(settings, found["demonstrations"]), "")
    for note in notes(name, settings, found["prompts"]):
        say(f"· {note}")
    return [*unreadable(name, found["answers"]), *errors(name, settings, found["prompts"])]


def described(settings: DomainSettings, lengths: dict[str, Any]) -> Iterator[str]:
    """Yield the source of the prompts, their counts and their lengths."""
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
    yield f"  tokens of a prompt, by percentile: {_spread(lengths['tokens'])}"
    yield (
        f"  the longest prompt and sampling.max_response_tokens = {response} are "
        f"{lengths['tokens']['100'] + response} tokens; engine.max_model_tokens must allow them"
    )


def demonstrated(settings: DomainSettings, report: dict[str, Any] | None) -> Iterator[str]:
    """Yield the source of a cold start's demonstrations, their counts, lengths and examples."""
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
    yield f"  tokens of a demonstration, by percentile: {_spread(report['tokens'])}"
    yield f"  {100 * report['learned']:.0f} % of tokens are trained on: the assistant's"
    for asked, answered in report["examples"]:
        yield f"  {short(asked)} is answered {short(answered)}"


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
    responses = [each for prompt in prompts for each in prompt["responses"]]
    if failed := [each["failure"] for each in responses if each["failure"]]:
        yield f"a reward failed on {len(failed)} responses, which then have none; {failed[0]}"
    sums = [prompt for prompt in prompts if _is_below(_scores(prompt))]

    def no_more(below: Prompts, name: str | None = None) -> str:
        first, score = below[0], _scores(below[0], name)["reference"]
        text = next(each["text"] for each in first["responses"] if each["what"] == "reference")
        return (
            f"{score:g}, no more than a wrong response, on {len(below)} of {len(prompts)} prompts; "
            f"the first is {short(first['prompt'])} with {short(text)}"
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


def notes(domain: str, settings: DomainSettings, prompts: Prompts) -> Iterator[str]:
    """Yield what is worth knowing and not an error."""
    judging, count = _judging(settings), len(prompts)
    responses = [each for prompt in prompts for each in prompt["responses"]]
    if failed := [each["watch_failures"] for each in responses if each["watch_failures"]]:
        yield (
            f"rewards of weight 0 failed on {len(failed)} responses, which keep the others' "
            f"rewards; the first: {failed[0][0]}"
        )
    if not any(each["what"] == "reference" for each in responses):
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


def previewed(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a checkpoint's responses: examples, what the groups teach, and rewards' distributions.

    `found` is the results.json of `stages.preview`.
    """
    groups: list[list[dict[str, Any]]] = found["groups"]
    firsts = [group[0] for group in groups[:EXAMPLES]]
    yield _scored("prompt", ((short(each["prompt"]), each) for each in firsts), "response")
    samples = [sample for group in groups for sample in group]
    rewarded = [sample for sample in samples if sample["reward"] is not None]
    flat = [g for g in groups if len({each["reward"] for each in g} - {None}) <= 1]
    right = sum(all(sample["solved"] for sample in group) for group in flat)
    wrong = sum(not any(sample["solved"] for sample in group) for group in flat)
    truncated = sum(not sample["finished"] for sample in samples)
    tokens = sum(sample["tokens"] for sample in samples)
    yield f"\n{len(samples)} responses to {len(groups)} prompts"
    yield f"  zero-variance groups, which teach nothing: {_share(len(flat), len(groups))}"
    yield f"    all right: {_share(right, len(groups))}; all wrong: {_share(wrong, len(groups))}"
    yield f"  truncated at sampling.max_response_tokens: {_share(truncated, len(samples))}"
    yield f"  tokens of a response: {tokens / len(samples):.1f} on average"
    if failures := found["failures"]:
        share = _share(len(failures), len(samples))
        yield f"  without a reward: {share}; the first: {visible(failures[0])}"
    if failures := found["watch_failures"]:
        first = visible(failures[0])
        yield f"  a reward of weight 0 failed {len(failures)} times; the first: {first}"
    values = {"reward": [sample["reward"] for sample in rewarded]}
    for sample in rewarded:
        for name, value in sample["parts"].items():
            values.setdefault(f"reward/{name}", []).append(value)
    for name, each in values.items():
        if each:
            shares = (f"{label}: {_share(n, len(each))}" for label, n in binned(each).items())
            yield f"  {name}: {sum(each) / len(each):.4g} on average; {', '.join(shares)}"


def binned(values: list[float]) -> dict[str, int]:
    """Return the counts of values, lowest first; by `RANGES` equal ranges if there are more."""
    if len(single := Counter(values)) <= RANGES:
        return {f"{value:g}": single[value] for value in sorted(single)}
    lowest, width = min(values), (max(values) - min(values)) / RANGES
    counts = Counter(min(int((value - lowest) / width), RANGES - 1) for value in values)
    edges = [lowest + width * place for place in range(RANGES + 1)]
    return {f"{edges[b]:.3g} to {edges[b + 1]:.3g}": counts[b] for b in range(RANGES)}


def short(text: str) -> str:
    """Return text as a literal on one line, its middle left out where it is long."""
    half = MOST // 2
    return repr(text if len(text) <= MOST else f"{text[:half]} … {text[-half:]}")


def _scored(heading: str, responses: Iterable[tuple[str, dict[str, Any]]], key: str) -> str:
    """Return a table of labelled responses: each with its text, at `key`, and its rewards."""
    rows = [(label, each, each["parts"] or {}) for label, each in responses]
    names = list(dict.fromkeys(name for *_, parts in rows for name in parts))
    cells = []
    for label, each, parts in rows:
        scores = [*map(parts.get, names), each["reward"]]
        numbers = ("failed" if score is None else f"{score:g}" for score in scores)
        cells.append((label, short(each[key]), *numbers))
    return table("", (heading, "response", *names, "reward"), cells)


def _judging(settings: DomainSettings) -> list[str]:
    """Return the rewards whose 1 means that a problem is solved."""
    return [n for n, each in settings.rewards.items() if each.judges_answer and each.weight > 0]


def _scores(prompt: dict[str, Any], name: str | None = None) -> dict[str, float]:
    """Return each response's score by a reward, or by the sum; none where it failed."""
    found = {
        each["what"]: each["reward"] if name is None else each["parts"].get(name)
        for each in prompt["responses"]
    }
    return {what: score for what, score in found.items() if score is not None}


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


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
