"""`braid audit`: a run's steps recomputed from its files, compared with what the run logged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from parallel.files import write_atomically
from pipeline.errors import BraidError
from pipeline.launch.processes import Child, Signals, kill, python_module, wait_for_all
from pipeline.report.tables import Cell, table
from pipeline.run.run import Run
from pipeline.text import hint, say, shown, visible

MODULE = "stages.audit.main"
LOOK_SECONDS = 0.5  # between two checks for a signal
AUDITED = ("sft", "grpo", "mixed", "distill", "gate", "evaluate")
HEADINGS = ("quantity", "run", "audit", "difference", "")

Found = list[dict[str, Any]]


def audit(run: Run, name: str | None, step: int | None, signals: Signals) -> Found:
    """Return the findings of `stages.audit.main` on one stage, or on all that have started.

    Raises:
        BraidError: there is no such stage, nothing of it can be audited, or a file cannot be read.
        Stopped: a signal stopped the audit.
    """
    names = _named(run, name, step)
    with tempfile.TemporaryDirectory(prefix="braid-audit-") as temporary:
        directory = Path(temporary)
        job, result = directory / "job.json", directory / "result.json"
        asked = {"run": str(run.path.absolute()), "stages": names, "step": step}
        write_atomically(job, json.dumps({**asked, "result": str(result)}))
        found: Found = answer_of("the audit", MODULE, job, result, signals)
        return found


def answer_of(name: str, module: str, job: Path, result: Path, signals: Signals) -> Any:
    """Run a module on a job file as a process of its own, and return the JSON of its result file.

    The module may import everything that this process must not.

    Raises:
        BraidError: the module failed.
        Stopped: a signal stopped it.
    """
    child = Child(name, python_module(module, job), job.with_name("log"), {})
    try:
        while child.status() is None:
            signals.check()
            wait_for_all([child], LOOK_SECONDS)
            for notice in child.notices():
                say(notice)
        if child.status():
            failure = child.failure()
            raise BraidError("\n".join([failure.cause, *failure.tail]))
        return json.loads(result.read_text())
    finally:
        kill([child])


def _named(run: Run, name: str | None, step: int | None) -> list[str]:
    """Return the stages to audit: the named one, or all auditable ones that have started."""
    known = [stage.name for stage in run.stages if stage.kind in AUDITED]
    if name is not None and name not in known:
        raise BraidError(f"no stage {name} can be audited; {hint(name, known)}")
    if name is None and step is not None:
        raise BraidError(f"--step {step} needs a stage: braid audit RUN STAGE --step N")
    started = [each for each in known if run.stage(each).path.exists()]
    if name is not None and name not in started:
        raise BraidError(f"{shown(run.path)}: stage {name} has not started; nothing to audit")
    if not started:
        raise BraidError(f"{shown(run.path)}: no stage has started; nothing to audit")
    return started if name is None else [name]


def lines(found: Found) -> list[str]:
    """Return a table for each step, and the steps that could not be audited."""
    printed: list[str] = []
    for each in found:
        step = "" if each["step"] is None else f", step {each['step']}"
        title = f"{each['stage']}{step}"
        if each["refused"]:
            printed += ["", visible(f"{title} is not audited: {each['refused']}")]
            continue
        rows = [
            [
                Cell(row["quantity"]),
                *(Cell(f"{row[side]:.8g}") for side in ("run", "audit")),
                Cell(f"{row['difference']:.1e}"),
                Cell("" if row["agrees"] else f"DIFFERS by more than {row['bound']:g}", "red"),
            ]
            for row in each["rows"]
        ]
        printed += ["", table(title, HEADINGS, rows), *map(visible, each["notes"])]
    return printed


def differing(found: Found) -> list[str]:
    """Return where run and audit differ, as 'stage: quantity'."""
    return [
        f"{each['stage']}: {row['quantity']}"
        for each in found
        for row in each["rows"]
        if not row["agrees"]
    ]
