"""The commands that run stages: run, resume, evaluate, export, audit and the override of a gate."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from pipeline.commands import common
from pipeline.commands.common import (
    CONFIG_HELP,
    GROUPS,
    JSON,
    PARALLEL,
    RUN,
    SELECTION,
    STARTING,
    STEP,
    TRUST,
    Argument,
    command,
    positive,
    print_json,
    whole,
)
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.gpu_memory import gpus_here
from pipeline.launch import one_off
from pipeline.launch.launcher import JobFailed
from pipeline.launch.processes import Stopped
from pipeline.launch.runner import machine_shares, run_stages
from pipeline.report import status as report
from pipeline.report.explain import dry_run
from pipeline.run import gates
from pipeline.run.bundle.reproduce import compare, foreseen
from pipeline.run.directory import TRUST_OPTION, check_owner, warn_of_readers
from pipeline.run.edits import moved_lines
from pipeline.run.former import move_renamed
from pipeline.run.gates import GateStopped
from pipeline.run.graph import Stage
from pipeline.run.metrics import Models
from pipeline.run.run import Run
from pipeline.run.select import (
    MAY_CHANGE,
    check_selection,
    check_settings,
    planned_states,
    unfinished,
)
from pipeline.slurm.queue import check_not_queued
from pipeline.tables import Cell, table, terminal
from pipeline.text import say, shown, visible, warn

AUDITED = ("sft", "grpo", "distill", "dpo", "sample", "gate", "evaluate")
GATE_HELP = """\
  braid gate override quickstart gates.experts.spell_backward --reason "noise: 3 of 500 problems"

`gate` in a block of stages adds the stage gates.STAGE; the quickstart has none.

The ledger keeps the reason, and `braid status` and `braid why` show it. The stages that wait for
the gate start with the next `braid resume`. Only a gate that has stopped can be overridden.
"""
GROUPS["gate"] = ("override a gate that has stopped a run", GATE_HELP)


@command(
    "run",
    "run a configuration on this machine",
    CONFIG_HELP + "  braid run configs/quickstart.yaml\n"
    "  braid run configs/quickstart.yaml --name no-kl "
    "domains.spell_backward.objective.kl.coefficient=0\n\n"
    "The run's directory is runs/NAME. The same command again resumes the run: no finished stage\n"
    "runs twice. Under the same name, a different config is refused where it would change\n"
    "finished stages; --from reruns those. `braid resume --help` lists what may always differ.\n\n"
    "  braid run configs/quickstart.yaml --only cold_start --only experts.chain_sum\n"
    "  braid run configs/quickstart.yaml domains.chain_sum.loop.steps=80 --from experts.chain_sum\n"
    "  braid run configs/quickstart.yaml --name no-kl --fork quickstart "
    "domains.spell_backward.objective.kl.coefficient=0\n\n"
    "  braid run quickstart.tar.gz --runs-dir elsewhere\n"
    "reproduces the run of a bundle (`braid bundle`) and compares the outputs of its stages.\n\n"
    "JSON, at the end: as `braid status RUN --json`; with --dry-run as `braid plan CONFIG --json`\n"
    'and "commands": {"engines": [COMMAND], "ranks": {STAGE: COMMAND}}.',
    Argument(
        "--dry-run",
        action="store_true",
        help="show the plan and the commands of these options, and run nothing",
    ),
    PARALLEL,
    JSON,
    *STARTING,
)
def run(arguments: Namespace) -> None:
    """Run the configuration, or resume the run of it."""
    run = common.load_configured_run(arguments)
    common.warn_of_graph(arguments, run.settings)
    check_owner(run, arguments.trust_run)
    other, fork = common.forked(arguments, run)
    check_selection(run, arguments.only, arguments.rerun, fork.reused)
    _check_machine(run, arguments, fork.reused)
    if arguments.dry_run:
        _show_dry_run(run, arguments, fork.reused)
        return
    warn_of_readers(run)
    if arguments.bundle is not None:
        warn(foreseen(arguments.bundle, run))
    with run.lock():
        check_not_queued(run)
        check_settings(run, arguments.rerun, moved_lines(run))
        run.write_settings()
        move_renamed(run)
        if other is not None:
            common.reuse_from(run, other)
        _run_stages(run, arguments)
    if arguments.bundle is not None:
        say(*compare(arguments.bundle, run.refresh(), arguments.only))


@command(
    "resume",
    "continue a run from the newest whole checkpoint of each unfinished stage",
    "  braid resume quickstart\n"
    "  braid resume /scratch/runs/quickstart\n\n"
    "To resume with other settings, `braid run` the configuration with them under the same name.\n"
    f"These may change, since they decide no result:\n{MAY_CHANGE}\n\n"
    "JSON, at the end: as `braid status RUN --json`.",
    *SELECTION,
    PARALLEL,
    RUN,
    TRUST,
    JSON,
)
def resume(arguments: Namespace) -> None:
    """Resume a run."""
    run = common.load_run_to_start(arguments, arguments.only, arguments.rerun)
    check_selection(run, arguments.only, arguments.rerun)
    _check_machine(run, arguments)
    warn_of_readers(run)
    with run.lock():
        check_not_queued(run)
        move_renamed(run)
        _run_stages(run, arguments)


@command(
    "evaluate",
    "evaluate the finished stages of a run again",
    "  braid evaluate quickstart --stage merge --problems 5000\n"
    "  braid evaluate quickstart --stage cold_start --domain chain_sum --samples 8\n"
    "  braid evaluate quickstart --stage experts.chain_sum --step 40\n\n"
    "The run's own results.json does not change.\n\n"
    'JSON: {"models": {MODEL: {DOMAIN: {"accuracy", "low", "high", "n"}}}, "results": FILE}.',
    RUN,
    TRUST,
    Argument("--stage", help="only this stage's model (default: all finished ones)"),
    Argument(
        "--domain",
        metavar="NAME",
        action="append",
        default=[],
        help="only this domain, repeatable (default: all)",
    ),
    Argument(
        "--problems",
        metavar="N",
        type=positive,
        help="problems per domain (the defaults of this and the next four: the configuration's)",
    ),
    Argument(
        "--samples",
        dest="samples_per_problem",
        metavar="K",
        type=positive,
        help="answers per problem; more than one also gives pass@K",
    ),
    Argument(
        "--temperature", metavar="T", type=float, help="sampling temperature; 0 is greedy decoding"
    ),
    Argument("--top-p", metavar="P", type=float, help="nucleus sampling threshold, up to 1"),
    Argument("--top-k", metavar="K", type=int, help="sample from the K most likely tokens; 0: all"),
    JSON,
    STEP,
)
def evaluate(arguments: Namespace) -> None:
    """Evaluate finished stages again."""
    run, step = common.load_trusted_run(arguments), arguments.step
    changes = {key: each for key in one_off.FLAGS if (each := getattr(arguments, key)) is not None}
    check_capacity(run.settings, [Stage("evaluate", "evaluate")], gpus_here(run.settings))
    with run.lock():
        check_not_queued(run)
        on, stage, domains = (terminal(), common.PROGRAMS), arguments.stage, arguments.domain
        models, path = one_off.evaluate(run, *on, stage, step, domains, changes)
    if arguments.json:
        print_json(arguments, {"models": models, "results": str(path)})
        return
    print(report.results_table(models, step, run.own_domains))
    say(f"\nresults: {shown(path)}")


@command(
    "export",
    "write a finished stage's model as a Hugging Face checkpoint",
    "  braid export quickstart --stage experts.chain_sum --to /tmp/chain_sum\n"
    "  braid export quickstart --stage experts.chain_sum --step 40 --to /tmp/at_its_best\n\n"
    "loop.keep_last and loop.keep_best decide which steps have a checkpoint.",
    RUN,
    TRUST,
    STEP,
    Argument("--stage", required=True, help="the stage whose model to write, e.g. merge"),
    Argument("--to", required=True, type=Path, help="a directory that is new or empty"),
)
def export(arguments: Namespace) -> None:
    """Write a finished stage's model for transformers and vLLM."""
    run = common.load_trusted_run(arguments)
    with run.lock():
        check_not_queued(run)
        one_off.export(
            run, terminal(), common.PROGRAMS, arguments.stage, arguments.to, arguments.step
        )
    which = "" if arguments.step is None else f" of step {arguments.step}"
    say(f"exported {arguments.stage}{which} to {shown(arguments.to)}")


@command(
    "audit",
    "recompute steps from the run's files and compare them with the logged metrics",
    "  braid audit quickstart                       the newest possible step of every stage\n"
    "  braid audit quickstart experts.chain_sum --step 40\n\n"
    "An independent implementation, in float64, on transformers' model classes: losses,\n"
    "advantages, KL, corrections, routing losses, gradients, the optimizer and the weights.\n"
    "It needs a run with logging.auditable=true and the checkpoint that the step started from\n"
    "(loop.checkpoint_every=1); with the step's own checkpoint, weights are compared too.\n"
    "Of a stage of kind sample, all that it drew, kept and counted is compared instead.\n"
    "The exit code is 1 where something differs.\n\n"
    'JSON: [{"stage", "step", "rows", "notes", "refused": why it cannot be audited, or null}].',
    RUN,
    TRUST,
    Argument("stage", metavar="STAGE", nargs="?", help="only this stage (default: all)"),
    Argument("--step", metavar="N", type=whole, help="only this step of the stage"),
    JSON,
)
def audit(arguments: Namespace) -> None:
    """Recompute steps of a run from its files, and compare."""
    run = common.load_trusted_run(arguments)
    names = _audited(run, arguments.stage, arguments.step)
    asked = {"run": str(run.path.absolute()), "stages": names, "step": arguments.step}
    found = one_off.answer_of("the audit", "stages.audit.main", asked)
    if arguments.json:
        print_json(arguments, found)
    else:
        print(*_audit_tables(found), sep="\n")
    if differing := [
        f"{each['stage']}: {row['quantity']}"
        for each in found
        for row in each["rows"]
        if not row["agrees"]
    ]:
        raise UserError("the audit differs from the run: " + "; ".join(differing))
    if all(each["refused"] for each in found):
        raise UserError("nothing was audited")


def _audited(run: Run, name: str | None, step: int | None) -> list[str]:
    """Return the stages to audit: the named one, or all auditable ones that have started.

    Raises:
        UserError: there is no such stage, or nothing of it can be audited.
    """
    known = [stage.name for stage in run.stages if stage.kind in AUDITED]
    if name is not None and name not in known:
        raise UserError(f"no stage {name} can be audited; {hint(name, known)}")
    if name is None and step is not None:
        raise UserError(f"--step {step} needs a stage: braid audit RUN STAGE --step N")
    started = [each for each in known if run.stage(each).path.exists()]
    if name not in (None, *started):
        raise UserError(f"{shown(run.path)}: stage {name} has not started; nothing to audit")
    if not started:
        raise UserError(f"{shown(run.path)}: no stage has started; nothing to audit")
    return started if name is None else [name]


def _audit_tables(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of each step; after them each cause why stages could not be audited."""
    refused: dict[str, list[str]] = {}
    for each in found:
        title = each["stage"] if each["step"] is None else f"{each['stage']}, step {each['step']}"
        if each["refused"]:
            refused.setdefault(each["refused"], []).append(title)
        else:
            yield _audit_table(title, each)
    for cause, titles in refused.items():
        verb = "is" if len(titles) == 1 else "are"
        yield visible(f"\n{'; '.join(titles)} {verb} not audited: {cause}", keep="\n")


def _audit_table(title: str, each: dict[str, Any]) -> str:
    """Return the table of a step."""
    rows = [
        [
            row["quantity"],
            *(f"{row[side]:.8g}" for side in ("run", "audit")),
            f"{row['difference']:.1e}",
            Cell("" if row["agrees"] else f"DIFFERS by more than {row['bound']:g}", "red"),
        ]
        for row in each["rows"]
    ]
    headings = ("quantity", "run", "audit", "difference", "")
    return "\n".join(["", table(title, headings, rows), *map(visible, each["notes"])])


@command(
    "gate override",
    "let the stages that wait for a stopped gate start, and record why",
    GATE_HELP,
    RUN,
    TRUST,
    Argument("stage", metavar="STAGE", help="the gate, e.g. gates.experts.math"),
    Argument("--reason", required=True, help="why, in a sentence, for the ledger"),
)
def gate_override(arguments: Namespace) -> None:
    """Override a gate that has stopped."""
    run = common.load_trusted_run(arguments)
    with run.lock(shared=True):
        gates.override(run, arguments.stage, arguments.reason)
    say(f"{arguments.stage} is overridden; continue with: {run.resume_command()}")


def _check_machine(run: Run, arguments: Namespace, reused: Iterable[str] = ()) -> None:
    """Raise UserError where this machine has too little for the stages that will run."""
    states = planned_states(run, run.states, reused, arguments.rerun)
    if stages := unfinished(run.chosen(arguments.only), states):
        check_capacity(run.settings, stages, gpus_here(run.settings, arguments.parallel))
        machine_shares(arguments.parallel, run.settings, stages)


def _run_stages(run: Run, arguments: Namespace) -> None:
    console = terminal()
    common.rerun(run, arguments.rerun)
    try:
        run_stages(run, console, common.PROGRAMS, arguments.only, arguments.parallel)
    except (JobFailed, GateStopped, Stopped) as error:
        if not isinstance(error, GateStopped):  # which names its own ways to continue
            error.add_note(f"finished stages are kept; continue with: {_again(run, arguments)}")
        models = _written_results(run, arguments.only)
        if models is not None and not arguments.json:
            _show_results(run, models)
        raise
    models = _written_results(run, arguments.only)
    if arguments.json:
        print_json(arguments, report.run_state(run, run.states))
    elif models is None:
        say(f"{shown(run.path)}: {report.summary(run.states)}")
    else:
        _show_results(run, models)


def _written_results(run: Run, only: Collection[str]) -> Models | None:
    """Write results.json where an evaluation of the chosen stages is done; return its models."""
    states = run.refresh().states
    done = (stage for stage in run.chosen(only) if states[stage.name].state == "done")
    return run.write_results() if any(stage.kind == "evaluate" for stage in done) else None


def _show_results(run: Run, models: Models) -> None:
    print("", report.results_table(models, own=run.own_domains), sep="\n")
    say(f"\nresults: {shown(run.results)}")
    for stage in run.stages:
        if stage.kind in ("export", "quantize") and run.states[stage.name].state == "done":
            model = stage.parent if stage.kind == "export" else stage.name
            say(f"model of {model}: {shown(run.stage(stage.name).exported)}")


def _again(run: Run, arguments: Namespace) -> str:
    """Return the command that resumes the run with the options of this one."""
    only = [f"--only {name}" for name in arguments.only]
    parallel = [f"--parallel {arguments.parallel}"] if arguments.parallel > 1 else []
    trust = [TRUST_OPTION] if arguments.trust_run else []
    return " ".join(["braid resume", shown(run.path), *only, *parallel, *trust])


def _show_dry_run(run: Run, arguments: Namespace, reused: Mapping[str, str]) -> None:
    check_not_queued(run)
    check_settings(run, arguments.rerun, moved_lines(run))
    only, parallel = arguments.only, arguments.parallel
    found = dry_run(run, common.PROGRAMS, reused, only, arguments.rerun, parallel)
    plan = run, found.states, found.actions, found.left
    if arguments.json:
        commands = {"engines": found.engines, "ranks": found.ranks}
        print_json(arguments, {**report.plan_json(*plan), "commands": commands})
        return
    print(report.plan_text(*plan), end="\n\n")
    if not found.ranks:
        say("no command: nothing would start")
        return
    members = run.settings.engine.members
    for index, line in enumerate(found.engines):
        say(f"engine {members[index % len(members)]}: {line}")
    say(f"every stage, as ranks 0 to {run.settings.layout.ranks - 1}:")
    say(*(f"  {line}" for line in found.ranks.values()))
