"""Whether a run may go on with other settings than it has."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.config.validate import differing_keys
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run import resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph, matches
from pipeline.run.neutral import CHANGES_NO_RESULT, MAY_CHANGE
from pipeline.run.selection import following, to_make_anew
from pipeline.run.stale import refuse_stale
from pipeline.run.states import derive
from pipeline.text import say
from stages.settings import RunSettings


def refuse_other_configuration(
    run: RunDirectory, settings: RunSettings, anew: Sequence[str] = ()
) -> None:
    """Raise BraidError where stages have work of other settings and are not to be made `anew`."""
    if not run.settings.exists():
        return
    differing = differing_keys(resolved.read(run), settings)
    if not differing:
        say(f"{shown(run.path)} holds a run of this very configuration: continuing it")
        return
    lines = [
        f"  {key}: {json.dumps(there)} there, {json.dumps(here)} here"
        for key, (there, here) in differing.items()
    ]
    stages = compile_graph(settings)
    states = derive(run, settings, stages)
    stale = [stage.name for stage in stages if states[stage.name].state == "stale"]
    if not set(stale) - {stage.name for stage in following(stages, anew)}:
        say(f"continuing {shown(run.path)} with other settings:", *lines)
        return
    if all(any(matches(key, each) for each in CHANGES_NO_RESULT) for key in differing):
        refuse_stale(run, settings, stages, record=False)
    raise BraidError(
        "\n".join([f"{shown(run.path)} holds a run of another configuration:", *lines])
        + f"\nwith which these were made that are done or begun: {', '.join(stale)}"
        + "\nname this one otherwise with --name NAME, continue that one with "
        + f"`braid resume {shown(run.path)}`, or make\nanew what depends on it with "
        + f"{to_make_anew(stages, stale)};\n"
        + f"for all stages, only these settings may change:\n{MAY_CHANGE}"
    )
