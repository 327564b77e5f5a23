"""What comes from outside a run: the digests of its files, and the models at a path.

A path may be a stage's directory of another run, a checkpoint, or a Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from parallel.files import Checkpoint, read_checkpoint
from stages.directory import StageDirectory

# `braid status` digests every data file of a run: size, head and tail of files over WHOLE_BYTES.
WHOLE_BYTES, END_BYTES = 1 << 20, 1 << 16
HUGGING_FACE = "config.json"  # of a Hugging Face checkpoint
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", HUGGING_FACE)


def outside_model(path: Path) -> Checkpoint | None:
    """Return the model at a path, with a digest that changes when it does; None without one."""
    if (path / "checkpoints").is_dir():
        return StageDirectory(path).newest_checkpoint()
    if (path / HUGGING_FACE).is_file():
        digest = files_digest(file for pattern in WEIGHTS for file in path.glob(pattern))
        return Checkpoint(path, 0, digest or "", {})
    return read_checkpoint(path)


def files_digest(files: Iterable[Path], whole: bool = False) -> str | None:
    """Return the SHA-256 of the files' names and contents, independent of their directory."""
    digests = []
    for file in sorted(files):
        if file.is_file():
            stat = file.stat()
            digest = _file_digest(file, stat.st_size, stat.st_mtime_ns, whole)
            digests.append([file.name, digest])
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else None


@lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, changed: int, whole: bool) -> str:
    """Return a file's digest; `size` in bytes and the time it `changed` key the cache."""
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        if whole or size <= WHOLE_BYTES:
            found.update(content.read())
        else:
            found.update(content.read(END_BYTES))
            content.seek(size - END_BYTES)
            found.update(content.read())
    return found.hexdigest()
