"""A run's settings as they stand in run.yaml; and as JSON beside it, since reading the YAML of a
thousand stages takes half a minute and `braid status` should answer at once."""

from __future__ import annotations

import hashlib

from pydantic import ValidationError

from parallel.files import write_atomically
from pipeline.config import dump_resolved, load
from pipeline.run_directory import RunDirectory
from stages.settings import RunSettings


def write(run: RunDirectory, settings: RunSettings) -> None:
    """Write run.yaml, and the JSON with the digest of the YAML that it stands for."""
    text = dump_resolved(settings)
    write_atomically(run.settings, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(run.settings_for_programs, f"{digest}\n{settings.model_dump_json()}\n")


def read(run: RunDirectory, *, to_start: bool = False) -> RunSettings:
    """The settings of a run.

    Args:
        run: one that has a run.yaml.
        to_start: also look for what the stages will need around them.

    Raises:
        ConfigError: with every violation in run.yaml.
    """
    known = None if to_start else _known(run)
    return known or load(run.settings, to_start=to_start)


def _known(run: RunDirectory) -> RunSettings | None:
    """Those of the JSON; None where run.yaml has changed since, or this version cannot read it."""
    try:
        digest, _, text = run.settings_for_programs.read_text(encoding="utf-8").partition("\n")
        if hashlib.sha256(run.settings.read_bytes()).hexdigest() == digest:
            return RunSettings.model_validate_json(text, strict=True)
    except (OSError, ValidationError, UnicodeDecodeError):
        pass
    return None
