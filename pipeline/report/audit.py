"""`braid audit`: steps of a run computed again from its files, beside what the run logged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel.files import write_atomically
from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError
from pipeline.launch.processes import Child, Signals, kill, python_module, wait_for_all
from pipeline.report.columns import Cell, table
from pipeline.run.run import Run

MODULE = "stages.audit.main"
LOOK_SECONDS = 0.5  # between two looks for a signal
AUDITED = ("sft", "grpo", "mixed", "distill", "gate", "evaluate")
HEADINGS = ("quantity", "run", "audit", "difference", "")

Found = list[dict[str, Any]]


def audit(
    run: Run,
    name: str | None,
    step: int | None,
    console: Console,
    signals: Signals,
) -> Found:
    """Return what `stages.audit.main` writes of one stage, or of all that have begun.

    Raises:
        BraidError: there is no such stage, nothing of it can be audited, or a file cannot be read.
        Stopped: a signal asked for it.
    """
    names = _named(run, name, step)
    with tempfile.TemporaryDirectory(prefix="braid-audit-") as temporary:
        folder = Path(temporary)
        job = {
            "run": str(run.path.absolute()),
            "stages": names,
            "step": step,
            "result": str(folder / "result.json"),
        }
        write_atomically(folder / "job.json", json.dumps(job))
        child = Child("the audit", python_module(MODULE, folder / "job.json"), folder / "log", {})
        try:
            while child.status() is None:
                signals.check()
                wait_for_all([child], LOOK_SECONDS)
                for notice in child.notices():
                    console.print(notice, markup=False, highlight=False, soft_wrap=True)
            if child.status():
                failure = child.failure()
                raise BraidError("\n".join([failure.cause, *failure.tail]))
            found: Found = json.loads((folder / "result.json").read_text())
            return found
        finally:
            kill([child])


def _named(run: Run, name: str | None, step: int | None) -> list[str]:
    """The stages to audit: the one asked for, or all that can be and have begun."""
    known = [stage.name for stage in run.stages if stage.kind in AUDITED]
    if name is not None and name not in known:
        raise BraidError(f"no stage {name} can be audited; {hint(name, known)}")
    if name is None and step is not None:
        raise BraidError(f"--step {step} is of one stage; name it: braid audit RUN STAGE --step N")
    begun = [each for each in known if run.stage(each).path.exists()]
    if name is not None and name not in begun:
        raise BraidError(f"{shown(run.path)}: stage {name} has not begun; nothing of it is there")
    if not begun:
        raise BraidError(f"{shown(run.path)}: no stage has begun; nothing is there to audit")
    return begun if name is None else [name]


def lines(found: Found, colour: bool) -> list[str]:
    """A table for each step, and what could not be compared."""
    printed: list[str] = []
    for each in found:
        step = "" if each["step"] is None else f", step {each['step']}"
        title = f"{each['stage']}{step}"
        if each["refused"]:
            printed += ["", f"{title} is not audited: {each['refused']}"]
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
        printed += ["", table(title, HEADINGS, rows, colour), *each["notes"]]
    return printed


def differing(found: Found) -> list[str]:
    """What the run and the audit disagree about, as 'stage: quantity'."""
    return [
        f"{each['stage']}: {row['quantity']}"
        for each in found
        for row in each["rows"]
        if not row["agrees"]
    ]
