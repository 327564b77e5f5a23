"""A run's settings as they stand in run.yaml; and as JSON beside it, since reading the YAML of a
thousand stages takes half a minute and `braid status` should answer at once."""

from __future__ import annotations

from pydantic import ValidationError

from parallel.files import read_file, read_text, write_atomically
from pipeline.config.validate import dump_resolved, load
from pipeline.run import compiled
from pipeline.run.compiled import Compiled, digest_of
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings


def write(run: RunDirectory, settings: RunSettings) -> None:
    """Write run.yaml, and beside it what programs read sooner."""
    write_atomically(run.settings, dump_resolved(settings))
    write_for_programs(run, settings)


def write_for_programs(run: RunDirectory, settings: RunSettings) -> None:
    """Write what programs read sooner than the run.yaml of these settings, which stands."""
    body = settings.model_dump_json()
    seal = digest_of([read_file(run.settings), body.encode()])
    write_atomically(run.settings_for_programs, f"{seal}\n{body}\n")
    compiled.write(run, settings.layout.model_dump(), compile_graph(settings))


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


def compile_anew(run: RunDirectory) -> Compiled:
    """A run's stages from its settings. Raises ConfigError as `read` does."""
    settings = read(run)
    return Compiled(settings.layout.model_dump(), compile_graph(settings))


def _known(run: RunDirectory) -> RunSettings | None:
    """Those of the JSON; None where it is damaged, where run.yaml has changed since, or where this
    version cannot read it."""
    try:
        text = read_text(run.settings_for_programs)
        seal, _, body = text.rstrip("\n").partition("\n")
        if seal == digest_of([read_file(run.settings), body.encode()]):
            return RunSettings.model_validate_json(body, strict=True)
    except (OSError, ValidationError, UnicodeDecodeError):
        pass
    return None
