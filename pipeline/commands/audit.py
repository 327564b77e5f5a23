"""The command that recomputes steps of a run: `braid audit`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from parallel.errors import UserError, hint
from pipeline.commands.support.arguments import JSON, RUN, TRUST, print_json, whole
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_trusted_run
from pipeline.launch import one_off
from pipeline.run.run import Run
from pipeline.tables import Cell, table
from pipeline.text import shown, visible


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
    place=170,
)
def audit(arguments: Namespace) -> None:
    """Recompute steps of a run from its files, and compare."""
    run = load_trusted_run(arguments)
    names = _audited(run, arguments.stage, arguments.step)
    # In another process, since it needs torch.
    job = {"run": str(run.path.absolute()), "stages": names, "step": arguments.step}
    audits = one_off.answer_of("the audit", "stages.audit.main", job)
    if arguments.json:
        print_json(arguments, audits)
    else:
        print(*_audit_tables(audits), sep="\n")
    if differing := [
        f"{step_audit['stage']}: {row['quantity']}"
        for step_audit in audits
        for row in step_audit["rows"]
        if not row["agrees"]
    ]:
        raise UserError("the audit differs from the run: " + "; ".join(differing))
    if all(step_audit["refused"] for step_audit in audits):
        raise UserError("nothing was audited")


def _audited(run: Run, name: str | None, step: int | None) -> list[str]:
    """Return the stages to audit: the named one, or all auditable ones that have started.

    Raises:
        UserError: there is no such stage, or nothing of it can be audited.
    """
    auditable = [stage.name for stage in run.stages if stage.declared.audited]
    if name is not None and name not in auditable:
        raise UserError(f"no stage {name} can be audited; {hint(name, auditable)}")
    if name is None and step is not None:
        raise UserError(f"--step {step} needs a stage: braid audit RUN STAGE --step N")
    started = [stage_name for stage_name in auditable if run.stage(stage_name).path.exists()]
    if name not in (None, *started):
        raise UserError(f"{shown(run.path)}: stage {name} has not started; nothing to audit")
    if not started:
        raise UserError(f"{shown(run.path)}: no stage has started; nothing to audit")
    return started if name is None else [name]


def _audit_tables(audits: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of each step; after them each cause why stages could not be audited."""
    refused: dict[str, list[str]] = {}
    for step_audit in audits:
        title = (
            step_audit["stage"]
            if step_audit["step"] is None
            else f"{step_audit['stage']}, step {step_audit['step']}"
        )
        if step_audit["refused"]:
            refused.setdefault(step_audit["refused"], []).append(title)
        else:
            yield _audit_table(title, step_audit)
    for cause, titles in refused.items():
        verb = "is" if len(titles) == 1 else "are"
        yield visible(f"\n{'; '.join(titles)} {verb} not audited: {cause}", keep="\n")


def _audit_table(title: str, step_audit: dict[str, Any]) -> str:
    """Return the table of a step."""
    rows = [
        [
            row["quantity"],
            *(f"{row[side]:.8g}" for side in ("run", "audit")),
            f"{row['difference']:.1e}",
            Cell("" if row["agrees"] else f"DIFFERS by more than {row['bound']:g}", "red"),
        ]
        for row in step_audit["rows"]
    ]
    headings = ("quantity", "run", "audit", "difference", "")
    return "\n".join(["", table(title, headings, rows), *map(visible, step_audit["notes"])])
