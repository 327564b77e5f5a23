"""The commands on a domain's file: `braid domain new` and `braid domain check`.

`check` looks at a domain's data and rewards before training, and at a model's responses.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from parallel.settings import CHARACTERS
from pipeline.commands.support import starting
from pipeline.commands.support.arguments import JSON, TRUST, positive, print_json
from pipeline.commands.support.registry import Argument, command, group
from pipeline.commands.support.runs import load_trusted_run
from pipeline.config.rules import DOMAIN_NAME
from pipeline.config.validate import dump_differing, is_run, load, load_domain, load_with_domain
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.stage_memory import gpus_here
from pipeline.launch import one_off
from pipeline.report.domain_scores import (
    as_read,
    cut_off,
    demonstrated,
    described,
    errors,
    has_references,
    notes,
    previewed,
    scored,
    short,
    unreadable,
)
from pipeline.run.graph import Stage
from pipeline.slurm.queue import check_not_queued
from pipeline.tables import Cell, table, terminal
from pipeline.text import say, shown
from stages.domains import DomainSettings
from stages.kinds.evaluate.settings import EVALUATE
from stages.rewards.reward import RewardPoolSettings

DIRECTORY = Path("configs/domains")
STARTERS = Path(__file__).parents[2] / DIRECTORY  # with NAME, PATH and SOURCE to replace

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
group("domain", "write a domain's file, and check one", DOMAIN_HELP, place=210)


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
    path, tokenizer, preview = arguments.file, arguments.tokenizer, None
    if arguments.run is None:
        if arguments.stage or arguments.samples:
            raise UserError("--stage and --samples need --run")
        verdict = _check_file(arguments)
    else:
        if tokenizer or not arguments.stage:
            raise UserError("--run needs --stage, and excludes --tokenizer: a run has its own")
        run = load_trusted_run(arguments)
        one_off.finished_training(run, arguments.stage)
        settings = load_with_domain(run.settings_file, path, arguments.samples)
        # Like an evaluation it samples, and trains nothing.
        check_capacity(settings, [Stage("preview", EVALUATE.name)], gpus_here(settings))
        model = run.settings.model
        domain = load_domain(path, run.settings.rewards)
        pool, positions = run.settings.rewards, model.max_positions
        verdict = _check(arguments, path.stem, domain, pool, model.tokenizer_keys, positions)
        checkpoint = run.checkpoint_path(arguments.stage)
        with run.lock():
            check_not_queued(run)
            programs = starting.PROGRAMS
            preview = one_off.preview(run, settings, terminal(), programs, checkpoint, path.stem)
        print("", *previewed(preview), "", sep="\n")
    wrong, untested = verdict.wrong, verdict.untested
    if arguments.json:
        verdict_json = {"valid": not wrong, "errors": wrong, "untested": untested}
        print_json(arguments, {**verdict_json, "preview": preview})
    if wrong:
        print(table("", (), [(Cell("✗", "red"), error) for error in wrong]))
        raise UserError(f"{shown(path)}: a model cannot learn from it as it is (✗)")
    if untested:
        say(
            f"{shown(path)} is valid; whether a right answer earns more than a wrong one is "
            f"untested, without reference answers: {', '.join(untested)}"
        )
        return
    say(f"{shown(path)} is valid, and its rewards tell right from wrong on these prompts")


@command(
    "domain new",
    "write configs/domains/NAME.yaml as a starting point",
    DOMAIN_HELP,
    Argument("name", metavar="NAME", help="the domain's name"),
    Argument(
        "--source",
        choices=("reasoning_gym", "jsonl", "parquet", "arrow"),
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
            file.write(re.sub("NAME|PATH|SOURCE", lambda match: filled[match[0]], text))
    except FileExistsError:
        raise UserError(f"{shown(path)} exists already; it was not changed") from None
    say(f"wrote {shown(path)}; check it with: braid domain check {shown(path)}")


@dataclass(frozen=True)
class _Verdict:
    """The errors of rewards, and the domains without a right answer to test them with."""

    wrong: list[str]
    untested: list[str]


def _check_file(arguments: Namespace) -> _Verdict:
    """Print the domain of a file, or the domains of a run's; return what the rewards do.

    Raises:
        UserError: the file is a domain's and --domain names one, or a run's and has no such domain.
    """
    path, tokenizer, names = arguments.file, arguments.tokenizer, arguments.domain
    tokenizer_keys = None if tokenizer is None else {"tokenizer": str(tokenizer.absolute())}
    if not is_run(path):
        if names:
            raise UserError(f"{shown(path)} is one domain; --domain needs a run's file")
        pool = RewardPoolSettings()
        domain = load_domain(path, pool)
        return _check(arguments, path.stem, domain, pool, tokenizer_keys)
    run = load(path, to_start=False)
    if absent := next((name for name in names if name not in run.domains), None):
        raise UserError(f"{shown(path)}: no domain {absent}; {hint(absent, run.domains)}")
    verdict = _Verdict([], [])
    for name in names or run.domains:
        say("", f"domain {name}")
        domain, model = run.domains[name], run.model
        keys = tokenizer_keys or model.tokenizer_keys
        checked = _check(arguments, name, domain, run.rewards, keys, model.max_positions)
        verdict.wrong.extend(checked.wrong)
        verdict.untested.extend(checked.untested)
    return verdict


def _check(
    arguments: Namespace,
    name: str,
    settings: DomainSettings,
    pool: RewardPoolSettings,
    tokenizer: Mapping[str, Any] | None,
    max_positions: int | None = None,
) -> _Verdict:
    """Print a domain and its rewards' scores; return what these do.

    `tokenizer` has the keys of a model's settings that are about it; without one, lengths are in
    characters.
    """
    differing = (f"  {line}" for line in dump_differing(settings).splitlines())
    say("settings that differ from the defaults:", *differing)
    job = {
        "domain": name,
        "settings": settings.model_dump(mode="json"),
        **(tokenizer or {"tokenizer": CHARACTERS}),
        "pool": pool.model_dump(mode="json"),
        "prompts": arguments.prompts,
        "max_positions": max_positions,
    }
    findings = one_off.answer_of("the check", "stages.domain_tools.domain_check", job)
    unit = "tokens" if tokenizer else "characters"
    references, demonstrations = findings["references"], findings["demonstrations"]
    say("", *described(settings, findings["lengths"], unit, references))
    say("", *as_read(findings["prompts"]))
    for number, prompt in enumerate(findings["prompts"], start=1):
        question, answer = short(prompt["prompt"]), short(prompt["answer"])
        say("", f"{number}. {question}, {prompt['tokens']} {unit}; answer {answer}")
        print(
            scored("", ((response["what"], response) for response in prompt["responses"]), "text")
        )
    say("", *demonstrated(settings, demonstrations, unit), "")
    turns = demonstrations and demonstrations["turns"]
    cut = [*cut_off(name, references, turns)] if tokenizer else []
    noted = [text for text, prevents in cut if not prevents]
    for note in (*notes(name, settings, findings["prompts"]), *noted):
        say(f"· {note}")
    wrong = [
        *unreadable(name, findings["answers"]),
        *errors(name, settings, findings["prompts"]),
        *(text for text, prevents in cut if prevents),
    ]
    return _Verdict(wrong, [] if has_references(findings["prompts"]) else [name])
