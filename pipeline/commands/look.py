"""The command that shows what a run does: `braid look`."""

from __future__ import annotations

import re
import sys
import time
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from parallel.errors import UserError
from pipeline.commands.support.arguments import JSON, RUN, TRUST, positive, print_json, whole
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_run, measured
from pipeline.launch.one_off import regrade
from pipeline.report.compare.comparison import held_out_gains
from pipeline.report.status import summary
from pipeline.report.view.health import judged
from pipeline.report.view.next_commands import run_argument
from pipeline.report.view.overview import (
    Overview,
    health_lines,
    metric_by_stage,
    metric_table,
    overview_json,
    stage_table,
)
from pipeline.report.view.waits import waits, waits_table
from pipeline.run.run import Run
from pipeline.slurm.queue import states_now
from pipeline.tables import table
from pipeline.text import say, shown, warn

SECONDS = 2.0  # between two looks at a run that is followed
COUNT = 5  # samples that are shown
SAMPLE_OPTIONS = (
    *("step", "domain", "model", "prompt", "reward", "finish", "grep", "order", "count"),
    *("tokens", "routes", "grade", "changed"),
)
# What is shown instead of a run or a stage's samples, and the options that go with it.
MODES: dict[str, tuple[str, ...]] = {
    "waits": ("stage",),
    "metric": ("stage",),
    "experts": ("stage",),
    "versus": ("model", "domain", "solved_by", "count"),
}


# Which of two models, --model and --versus, solves a problem.
SOLVED_BY = {"model": "only_first", "versus": "only_second", "both": "both", "neither": "neither"}
ALONE = ["only_first", "only_second"]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _reward(text: str) -> tuple[str, float]:
    """Return the reward's name and score of `NAME=SCORE`; "" is the name of the sum."""
    name, _, score = text.rpartition("=")
    try:
        value = float(score)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not SCORE or NAME=SCORE, such as right=0")
    return name, value


def _order(name: str, text: str) -> Argument:
    return Argument(f"--{name}", dest="order", action="store_const", const=name, help=text)


@command(
    "look",
    "show how a run does: its health, its curves, and its samples",
    "  braid look quickstart                                  health, curves, where time goes\n"
    "  braid look quickstart experts.chain_sum                samples of a stage\n"
    "  braid look quickstart experts.chain_sum --worst --count 3\n"
    "  braid look quickstart experts.chain_sum --flipped      once wrong, later right, or back\n"
    "  braid look quickstart experts.chain_sum --reward exact=0 --step 12 --tokens\n"
    "  braid look quickstart experts.chain_sum --worst --grade     by the rewards as they are now\n"
    "  braid look quickstart experts.chain_sum --grade --changed   which samples they change\n"
    "  braid look quickstart evaluate --model merge --grep '^<>'\n"
    "  braid look quickstart --model cold_start --versus merge    who solves what\n"
    "  braid look quickstart --plain --follow                 again after each step\n"
    "  braid look quickstart --metric kl                      one metric of all stages\n"
    "  braid look quickstart merge --experts                  the experts of each domain\n\n"
    "On a terminal the first two open screens whose keys do the same, and which follow the run;\n"
    "--plain prints them instead, as a pipe gets them.\n\n"
    "Of each token --tokens shows the engine's and the trainer's log-probability, the entropy and\n"
    "the advantage, as far as they are recorded (logging.tokens).\n\n"
    "With --waits: each rank and engine of what runs, its phase, and since when.\n"
    "With --versus, McNemar's p is of the exact test that both models solve equally many.\n\n"
    'JSON: {"run", "health": [{"stage", "what", "remedy", "command", "alarm", "word"}],\n'
    '"verdicts": [{"stage", "word", "evidence", "alarm"}], "stages": [{"name", "state", "step",\n'
    '"steps", "metric", "values"}]}; with STAGE {"count", "samples": [...]},\n'
    'whose columns docs/reference/samples.md explains; with --waits {"processes": [{"stage",\n'
    '"process", "phase", "waits_for", "seconds"}]}; with --metric {"metric": [{"stage", "name",\n'
    '"values"}]}; with --experts {"experts": {DOMAIN: [[LAYER, EXPERT, TIMES]]}}.',
    RUN,
    Argument("stage", metavar="STAGE", nargs="?", help="show samples of this stage"),
    (
        _order("worst", "lowest reward first, the newest of these first"),
        _order("longest", "most tokens first"),
        _order("flipped", "prompts right in their first step and wrong in their last, or back"),
    ),
    Argument(
        "--step",
        type=whole,  # an evaluation's first problems are of step 0
        action="append",
        metavar="N",
        help="only this step; may be repeated",
    ),
    Argument("--domain", metavar="DOMAIN", help="only this domain"),
    Argument("--model", metavar="MODEL", help="only answers of this model, in an evaluation"),
    Argument(
        "--solved-by",
        choices=SOLVED_BY,
        help="with --versus: show the answers to these problems (default: solved by one alone)",
    ),
    Argument("--prompt", metavar="KEY", help="only prompts whose problem begins with this key"),
    Argument(
        "--reward",
        type=_reward,
        metavar="[NAME=]SCORE",
        help="only samples with this score of a reward, or this reward",
    ),
    Argument(
        "--grep", type=_pattern, metavar="PATTERN", help="only prompts or responses that match"
    ),
    Argument("--finish", choices=("stop", "length"), help="only samples that ended so"),
    Argument(
        "--count",
        type=positive,
        metavar="N",
        help="at most N (default 5), the newest first and of every prompt one before a second",
    ),
    Argument("--tokens", action="store_true", help="show the tokens of each response"),
    Argument(
        "--routes",
        action="store_true",
        help="show the experts of each token, where they are recorded (logging.auditable)",
    ),
    Argument(
        "--grade",
        action="store_true",
        help="grade them again, by the run's rewards as they are now",
    ),
    Argument(
        "--changed",
        action="store_true",
        help="with --grade: grade all, and show those whose reward is another now",
    ),
    (
        Argument(
            "--versus",
            metavar="MODEL",
            help="compare --model with this one, or OTHER_RUN/MODEL, on the problems of both",
        ),
        Argument(
            "--waits",
            action="store_true",
            help="show what every process does, and whom it waits for",
        ),
        Argument("--metric", metavar="NAME", help="show this metric of every stage and domain"),
        Argument(
            "--experts",
            action="store_true",
            help="show the experts that STAGE's domains use most",
        ),
    ),
    Argument("--plain", action="store_true", help="print, also on a terminal"),
    Argument(
        "-f",
        "--follow",
        action="store_true",
        help="print the run again after each step, until nothing runs",
    ),
    TRUST,
    JSON,
    place=80,
)
def look(arguments: Namespace) -> None:
    """Show a run, or samples of a stage."""
    run = load_run(arguments)
    mode = next((name for name in MODES if getattr(arguments, name) not in (None, False)), None)
    _check_options(arguments, mode)
    if arguments.stage:
        [stage] = run.chosen([arguments.stage])
        arguments.stage = stage.name
    arguments.count = arguments.count or COUNT
    if mode is not None:
        SHOWN_BY[mode](arguments, run)
    elif _on_terminal(arguments):
        # textual takes a third of a second to import, which no other command should wait for.
        from pipeline.report.screens.overview import LookApp

        app = LookApp(run, arguments.stage, partial(regrade, run, trusted=arguments.trust_run))
        app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
    elif arguments.stage is None:
        _show_run(arguments, run)
    else:
        _show_samples(arguments, run)


def _check_options(arguments: Namespace, mode: str | None) -> None:
    """Raise UserError for an option that what is asked for would ignore."""
    if (mode == "versus" or arguments.solved_by) and not (arguments.model and mode == "versus"):
        raise UserError("--versus compares two models: name both, with --model and --versus")
    if arguments.changed and not arguments.grade:
        raise UserError("--changed is about samples that are graded again: add --grade")
    taken = SAMPLE_OPTIONS if mode is None and arguments.stage else MODES.get(mode or "", ())
    for name in (*SAMPLE_OPTIONS, "solved_by"):
        if getattr(arguments, name) and name not in taken:
            option = arguments.order if name == "order" else name.replace("_", "-")
            if mode is None:
                raise UserError(f"--{option} is about samples: name a STAGE")
            raise UserError(f"--{option} does not go with --{mode}")
    if arguments.follow and (arguments.stage or mode):
        raise UserError("--follow is about the whole run: name no STAGE and no other view")
    if arguments.follow and arguments.json:
        raise UserError("--follow prints again and again, which is no JSON: leave one of both out")
    if arguments.stage and mode is not None and "stage" not in MODES[mode]:
        raise UserError(f"--{mode} is about the whole run: name no STAGE")


def _on_terminal(arguments: Namespace) -> bool:
    """Return whether to open screens: on a terminal, where no option says what to print."""
    # `count` has its default by now, and says nothing about what was asked.
    printing = [*(name for name in SAMPLE_OPTIONS if name != "count"), "plain", "json"]
    printing_options = [name for name in printing if getattr(arguments, name)]
    return not printing_options and sys.stdin.isatty() and sys.stdout.isatty()


def _show_waits(arguments: Namespace, run: Run) -> None:
    states = states_now(run)
    processes = [
        process for process in waits(run, states) if arguments.stage in (None, process["stage"])
    ]
    if arguments.json:
        print_json(arguments, {"processes": processes})
    elif processes:
        print(waits_table(processes))
    else:
        time_spent = f"braid report {run_argument(run)}, Time"
        say(f"no stage is running ({summary(states)}); where the time went: {time_spent}")


def _show_metric(arguments: Namespace, run: Run) -> None:
    overview = Overview.of(run)
    if arguments.stage:
        lines = {arguments.stage: overview.lines[arguments.stage]}
        overview = replace(overview, lines=lines)
    if arguments.json:
        curves = metric_by_stage(overview, arguments.metric)
        rows = [{"stage": stage, "name": name, "values": values} for stage, name, values in curves]
        print_json(arguments, {"metric": rows})
    else:
        print(metric_table(overview, arguments.metric))


def _show_experts(arguments: Namespace, run: Run) -> None:
    from pipeline.report.view.experts import expert_table, owned_by_domain

    if arguments.stage is None:
        raise UserError("--experts is about a stage: name a STAGE")
    experts = owned_by_domain(run.stage(arguments.stage))
    if arguments.json:
        print_json(arguments, {"experts": experts})
    elif any(experts.values()):
        print(expert_table(experts))
    else:
        few, usual = (
            ("its 1 domain uses", "an equal share")
            if len(experts) == 1
            else (f"none of its {len(experts)} domains uses", "the other domains do")
        )
        say(f"{arguments.stage}: {few} no expert twice as much as {usual}")


def _show_run(arguments: Namespace, run: Run) -> None:
    overview = Overview.of(run)
    _print_run(arguments, run, overview)
    while arguments.follow and overview.is_running:
        before = overview.progress
        while overview.progress == before and overview.is_running:
            time.sleep(SECONDS)
            if not run.path.exists():
                raise UserError(f"{shown(run.path)} is gone")
            overview = Overview.of(run.refresh())
        _print_run(arguments, run, overview)


def _print_run(arguments: Namespace, run: Run, overview: Overview) -> None:
    gains = held_out_gains(run, overview.states)
    health = judged(run, overview.states, overview.lines, gains)
    if arguments.json:
        print_json(arguments, overview_json(overview, health))
        return
    print(table("", (), [[line] for line in health_lines(health)]), end="\n\n")
    print(stage_table(overview), flush=True)


def _show_samples(arguments: Namespace, run: Run) -> None:
    # pyarrow takes a fifth of a second to import, which no other command should wait for.
    from pipeline.report.view.listing import Listing, listing_json, print_samples
    from pipeline.run.samples import Query, StageSamples

    grading = partial(regrade, run, arguments.stage, trusted=arguments.trust_run)
    samples = StageSamples(run.stage(arguments.stage))
    matches = samples.find(Query(**_query_options(arguments), order=arguments.order or "newest"))
    again = grading if arguments.grade else None
    listing = Listing.of(samples, matches, arguments.count, again, arguments.changed)
    if arguments.json:
        print_json(arguments, listing_json(samples, listing, arguments.routes))
    else:
        print_samples(run, samples, listing, arguments.tokens, arguments.routes)
    warn(f"left out: {why}" for why in samples.damaged)


def _query_options(arguments: Namespace) -> dict[str, Any]:
    """Return what the options ask of a sample, as a Query takes it."""
    return {
        "steps": tuple(arguments.step or ()),
        "domain": arguments.domain,
        "problem": arguments.prompt,
        "model": arguments.model,
        "reward": arguments.reward,
        "finish": arguments.finish,
        "grep": arguments.grep,
    }


def _show_outcomes(arguments: Namespace, run: Run) -> None:
    from pipeline.report.view.listing import print_outcomes
    from pipeline.report.view.versus import outcomes, outcomes_json

    names = (arguments.model, arguments.versus)
    model, versus = (measured(arguments, run, name) for name in names)
    problems = outcomes(model, versus, arguments.domain)
    if arguments.json:
        print_json(arguments, outcomes_json(problems, names))
    else:
        kinds = [SOLVED_BY[arguments.solved_by]] if arguments.solved_by else ALONE
        print_outcomes((model, versus), names, problems, kinds, arguments.count)


SHOWN_BY = {
    "waits": _show_waits,
    "metric": _show_metric,
    "experts": _show_experts,
    "versus": _show_outcomes,
}
