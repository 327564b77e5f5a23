"""Files of a run that nothing needs any more: no resume, report, audit, gate or stage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel.files import CHECKSUMS
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.lineage import read_manifest
from pipeline.run.run import Run
from stages.directory import StageDirectory

# By pattern, in a stage that is done; of one that is not, a resumed attempt decides.
OF_A_DONE_STAGE = {
    "checkpoints/tmp_step_*": "a checkpoint that was never complete",
    "checkpoints/damaged_step_*": "a damaged checkpoint, of a stage that is done",
    "hidden_states": "hidden states of teachers, which a merge needs while it trains",
}
PREVIEW = "responses of `braid domain check`, which has printed them"
# By pattern, in the run.
OF_THE_RUN = {
    "replaced/*": "the output of a stage from before it was rerun",
    "stages/.*": "a copy of another run's stage that was never complete",
}


@dataclass(frozen=True)
class Leftover:
    """A directory or file that nothing needs, why so, and the bytes that its deletion frees."""

    path: Path
    why: str
    freed_bytes: int


def started_from(runs: Iterable[RunDirectory]) -> set[str]:
    """Return the digests of all checkpoints that a stage of these runs has started from."""
    manifests = (
        read_manifest(StageDirectory(path)) for run in runs for path in run.path.glob("stages/*")
    )
    return {
        digest
        for manifest in manifests
        if manifest
        for digest in manifest.parents.values()
        if digest
    }


def leftovers(run: Run, in_use: Collection[str]) -> Iterator[Leftover]:
    """Yield what nothing needs; `in_use` are digests of checkpoints that stages started from."""
    for pattern, why in OF_THE_RUN.items():
        yield from _matching(run.path, pattern, why)
    for results in sorted(run.path.glob("previews/*/results.json")):  # without, it may be running
        yield Leftover(results.parent, PREVIEW, size_of(results.parent))
    for stage in run.stages:
        if run.states[stage.name].state != "done":
            continue
        directory = run.stage(stage.name)
        for pattern, why in OF_A_DONE_STAGE.items():
            yield from _matching(directory.path, pattern, why)
        # An audit recomputes the step after any checkpoint, and the best ones were asked for.
        if run.settings.logging.auditable or _keeps_best(run, stage):
            continue
        checkpoints = directory.whole_checkpoints()
        for checkpoint in checkpoints[:-1]:
            if checkpoint.digest not in in_use:
                why = f"a checkpoint before step {checkpoints[-1].step}, the last of a stage done"
                yield Leftover(checkpoint.path, why, size_of(checkpoint.path))


def _keeps_best(run: Run, stage: Stage) -> bool:
    blocks = [run.settings.stages[stage.block]] if stage.block in run.settings.stages else []
    loops = [getattr(block, "loop", None) for block in blocks]
    loops += [run.settings.domains[domain].loop for domain in stage.domains]
    return any(loop is not None and loop.keep_best for loop in loops)


def _matching(directory: Path, pattern: str, why: str) -> Iterator[Leftover]:
    for path in sorted(directory.glob(pattern)):
        yield Leftover(path, why, size_of(path))


def size_of(path: Path) -> int:
    """Return the bytes of the files that are in this place alone; links are not followed.

    A fork's checkpoints are hard links: while another run has a file, its deletion frees nothing.
    """
    places = [path]
    for directory, _, files in os.walk(path):
        places += [Path(directory) / name for name in files]
    total = 0
    for place in places:
        try:
            status = place.lstat()
        except FileNotFoundError:  # a running stage deletes as well
            continue
        total += status.st_size if status.st_nlink == 1 else 0
    return total


def delete(leftover: Leftover) -> None:
    """Delete a leftover; a link is deleted, not what it leads to."""
    if leftover.path.is_symlink() or not leftover.path.is_dir():
        leftover.path.unlink(missing_ok=True)
        return
    # Without its checksums a checkpoint that a kill leaves half deleted is never taken for whole.
    (leftover.path / CHECKSUMS).unlink(missing_ok=True)
    shutil.rmtree(leftover.path)
