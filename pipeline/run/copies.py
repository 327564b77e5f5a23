"""Refuses the run.yaml of one folder where it would work on the run in another.

A run is found by its name, and a folder that was copied or moved still has the name that it had.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory


def refuse_another_run_s(config: Path, run: RunDirectory) -> None:
    """Raise BraidError where a configuration is the run.yaml of a begun run other than `run`, which
    was found by the name in it."""
    own = RunDirectory(config.parent)
    begun = own.ledger.exists() or own.settings_for_programs.exists()
    if config.name != own.settings.name or not begun or own.path.resolve() == run.path.resolve():
        return
    there, here = shown(own.path.resolve()), shown(run.path)
    effect = "continue" if run.settings.exists() else "begin"
    raise BraidError(
        f"{shown(config)} is of the run in {there}, and would {effect} that in {here}, since its "
        f"name is {run.name}\n"
        f"to continue {there}: braid resume {there}, or add {_options(own, run)}\n"
        f"for a run of its own: add --name NAME --fork {there}"
    )


def _options(own: RunDirectory, run: RunDirectory) -> str:
    """Those by which a configuration that would work on `run` works on `own`."""
    wanted, given = own.path.resolve(), run.path.absolute()
    options = [f"--name {wanted.name}"] if wanted.name != given.name else []
    if wanted.parent != given.parent.resolve():
        options.append(f"--runs-dir {shown(wanted.parent)}")
    return " ".join(options)
