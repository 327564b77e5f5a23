"""A bundle of a run: all that a second machine needs to reproduce it, in one directory or archive.

bundle.json has the digests of every input and of every finished stage's output; config.yaml names
the copied inputs relative to the bundle, and the others by their absolute paths.
"""

from __future__ import annotations

import json
import platform
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from parallel.errors import UserError
from parallel.files import files_digest, read_text, write_atomically
from pipeline.config.unroll import is_path
from pipeline.config.yaml_core import dump
from pipeline.run.bundle.inputs import Tree, Weights, copy_inputs
from pipeline.run.bundle.unfinished import ARCHIVES, CONFIG, INDEX, unfinished
from pipeline.run.graph import Stage, digest
from pipeline.run.ledger import Event
from pipeline.run.lineage import read_manifest
from pipeline.run.run import Run, StageState, has_stopped, read_verdict
from pipeline.text import shown
from stages.directory import StageDirectory
from stages.kinds.distill.settings import DistillSettings
from stages.kinds.distill.source_settings import SELF

FORMAT = 1


def write_bundle(run: Run, to: Path, weights: Weights) -> Path:
    """Write the bundle of a run as a directory, or as an archive where `to` is named like one.

    Raises:
        UserError: `to` exists or is being written, or an input of the run is missing.
    """
    if to.name in ("", *ARCHIVES):  # as of "." and "/"; an archive is unpacked to its name's rest
        raise UserError(f"{shown(to)}: not a bundle's name; choose another path with --to")
    # Complete bundles alone have the name. Two commands at once: the second is refused.
    with unfinished(to, timeout=0) as place:
        if to.exists():
            raise UserError(f"{shown(to)} exists; choose another path with --to")
        directory, packed = place / "bundle", place / "packed.tar.gz"
        shutil.rmtree(directory, ignore_errors=True)  # of a killed process
        directory.mkdir()
        _fill(run, directory, weights)
        if to.name.endswith(ARCHIVES):
            _pack(directory, packed)
            packed.rename(to)
        else:
            directory.rename(to)
    return to


def _fill(run: Run, directory: Path, weights: Weights) -> None:
    tree: Tree = run.settings.model_dump(mode="json")
    inputs = [asdict(bundled) for bundled in copy_inputs(run.stages, tree, directory, weights)]
    write_atomically(directory / CONFIG, dump(tree))
    index = {
        "format": FORMAT,
        "run": run.settings.name,
        "deterministic": run.settings.deterministic,
        "processor": processor(),
        "settings": run.settings.model_dump(mode="json"),
        "routing": {stage.name: _routing(run, stage) for stage in run.stages if stage.teachers},
        "inputs": inputs,
        "secrets": [*_secrets(tree)],
        "stages": [_stage(run, stage) for stage in run.stages],
        "decisions": [*_decisions(run)],
        "commands": [*_commands(run)],
    }
    write_atomically(directory / INDEX, json.dumps(index, indent=2) + "\n")


def _routing(run: Run, stage: Stage) -> Tree:
    """Return the teacher of each domain, or the weights of several by their names."""
    block = run.settings.stages[stage.block or ""]
    assert isinstance(block, DistillSettings)
    routing: Tree = {}
    for domain in stage.domains:
        weights = block.teacher_weights(domain)
        by_teacher = {stage.teachers.get(label, SELF): weight for label, weight in weights.items()}
        routing[domain] = by_teacher if len(weights) > 1 else next(iter(by_teacher))
    return routing


def _secrets(tree: Tree) -> Iterator[Tree]:
    """Yield the files of keys, which are named and never copied."""
    for domain, settings in tree["domains"].items():
        for name, reward in settings["rewards"].items():
            if reward.get("api_key_file"):
                key = f"domains.{domain}.rewards.{name}.api_key_file"
                yield {"key": key, "path": reward["api_key_file"]}


def _stage(run: Run, stage: Stage) -> Tree:
    directory = run.stage(stage.name)
    manifest = read_manifest(directory)
    return {
        "name": stage.name,
        "kind": stage.kind,
        "state": run.states[stage.name].state,
        "output": finished_output(run, stage),
        "lineage": asdict(manifest) if manifest else None,
    }


def has_finished(state: StageState) -> bool:
    """Return whether a stage is done, or is a gate that has stopped."""
    return state.state == "done" or has_stopped(state)


def finished_output(run: Run, stage: Stage) -> str | None:
    """Return the digest of what a stage left; None where it is not finished, or stale.

    It is of weights, samples, results or an export. A gate that has stopped is finished too. Models
    from outside the run count by their content, since their paths differ from machine to machine.

    Raises:
        UserError: collected responses that are damaged.
    """
    state, directory = run.states[stage.name], run.stage(stage.name)
    if not has_finished(state):
        return None
    if stage.measures:
        return _results_digest(stage, directory)
    if stage.declared.exports:
        return files_digest(directory.exported.rglob("*"), whole=True)
    if stage.declared.collects:
        directory.check_collected()
    output = directory.output()
    return output.digest if output else None


def _results_digest(stage: Stage, directory: StageDirectory) -> str | None:
    manifest = read_manifest(directory)
    parents = manifest.parents if manifest else {}
    outside = {name: str(parent) for name, parent in parents.items() if is_path(name)}

    def portable(text: str) -> str:
        for path, parent in outside.items():
            text = text.replace(path, parent)
        return text

    verdict = read_verdict(directory) if stage.declared.judges else None
    try:
        models = json.loads(read_text(directory.results))["models"]
        # A model from outside the run is named by its path, which another machine does not have.
        scores = sorted([portable(name), domains] for name, domains in models.items())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    reasons = [verdict.outcome, *map(portable, verdict.reasons)] if verdict else None
    return digest([scores, reasons])


def _decisions(run: Run) -> Iterator[Tree]:
    """Yield the lines of the ledger that say why a stage ended early, or what a gate decided."""
    gates = {stage.name for stage in run.stages if stage.declared.judges}
    for line, event in run.ledger.numbered():
        if _decides(event, event.stage in gates):
            yield {"line": line, **asdict(event)}


def _decides(event: Event, gate: bool) -> bool:
    judged = gate and event.state in ("done", "failed")
    return judged or (event.state == "done" and event.cause not in ("", "finished"))


def _commands(run: Run) -> Iterator[str]:
    yield "braid run BUNDLE"
    for event in run.events:
        if event.state == "done" and event.cause.startswith("overridden: "):
            yield f"braid gate override {run.settings.name} {event.stage} --reason ..."
            yield f"braid resume {run.settings.name}"
    yield f"braid bundle --check {run.settings.name} BUNDLE"


def processor() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _pack(directory: Path, archive: Path) -> None:
    """Write a directory's files as an archive, without their owners, modes and times."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o700 if info.isdir() else 0o600
        return info

    with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                packed.add(path, str(path.relative_to(directory)), recursive=False, filter=plain)
