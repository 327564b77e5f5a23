"""A run's stages as compiled, beside run.yaml: building the settings classes and compiling the
graph of a thousand stages take longer than all else that `braid status` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from parallel.files import read_file, read_text, write_atomically
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage

FLOORS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Compiled:
    """The stages in the order they run, and the layout that they run on."""

    layout: dict[str, Any]
    stages: tuple[Stage, ...]


def write(run: RunDirectory, layout: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Write them for `read`, for as long as run.yaml stays as it is now."""
    names = [field.name for field in fields(Stage)]
    rows = [[getattr(stage, name) for name in names] for stage in stages]
    body = json.dumps({"layout": layout, "names": names, "stages": rows})
    write_atomically(run.stages_for_programs, f"{_seal(run, body)}\n{body}\n")


def read(run: RunDirectory) -> Compiled | None:
    """What was written; None where there is none, or it is damaged, or run.yaml or what compiles
    the graph has changed since."""
    try:
        text = read_text(run.stages_for_programs)
        seal, _, body = text.rstrip("\n").partition("\n")
        if seal != _seal(run, body):
            return None
    except (OSError, UnicodeDecodeError):
        return None
    found = json.loads(body)
    rows = (dict(zip(found["names"], row, strict=True)) for row in found["stages"])
    stages = (Stage(**row | {"after": tuple(row["after"])}) for row in rows)
    return Compiled(found["layout"], tuple(stages))


def sources() -> list[Path]:
    """The files whose change may change how a run.yaml is compiled."""
    own = [
        FLOORS / "pipeline" / name
        for name in ("run/graph.py", "config/trees.py", "run/compiled.py")
    ]
    settings = [FLOORS.glob(f"{floor}/**/*settings.py") for floor in ("parallel", "stages")]
    constants = [
        FLOORS / name for name in ("parallel/files.py", "parallel/network.py", "stages/kinds.py")
    ]
    return sorted([*own, *constants, *(path for each in settings for path in each)])


def _seal(run: RunDirectory, body: str) -> str:
    return digest_of([read_file(run.settings), _code(), body.encode()])


@cache
def _code() -> bytes:
    return digest_of(path.read_bytes() for path in sources()).encode()


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 of the parts, which also tells where each ends."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
