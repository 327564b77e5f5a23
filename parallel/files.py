"""Atomic file writes, safe reads, and whole checkpoints; never imports torch.

A directory may be open to other users, who can put a link where a file is to be written. Whatever
writes or locks a file therefore calls `replacing`, `write_atomically`, `open_in_place`, `open_lock`
or `touch`: none of them follows a link in the file's place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from parallel.errors import UserError

CHECKSUMS = "checksums.json"  # written last of all into a checkpoint
STATE = "state.json"  # the loop's state in a checkpoint
ENDED = "ended"  # its key for the reason why a stage ended before its last step
# Beside an engine's address file: a rank that gives up on the engine writes the reason here as one
# line, and the launcher restarts the engine.
RESTART_REQUEST = "restart"
# Maps each tensor of a Hugging Face checkpoint to its file, where there are several.
WEIGHTS_INDEX = "model.safetensors.index.json"
HUGGING_FACE = "config.json"  # of a Hugging Face checkpoint
GENERATION = "generation_config.json"  # of one too: sampling's defaults, and further end tokens
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", HUGGING_FACE)
WHOLE_MODEL = "model.safetensors"  # a checkpoint of one file
# Files beside a checkpoint that hold no tensors of it by its names: Mistral's own form of the same
# weights, and adapters.
BESIDE_WEIGHTS = ("consolidated*.safetensors", "adapter_*.safetensors")
# `braid status` digests every data file of a run: size, head and tail of files over WHOLE_BYTES.
WHOLE_BYTES, END_BYTES = 1 << 20, 1 << 16
MOST_TEXT_BYTES = 1 << 30  # of a file that is read at once


class CheckpointError(UserError):
    """A checkpoint that cannot be written, or is damaged; the message has path and cause."""


class CheckpointRefused(CheckpointError):
    """A file of a checkpoint that megatron-core does not write; the message says what to do."""


class UnreadableCheckpoint(UserError, OSError):
    """A checkpoint that exists and cannot be read; the message names the path and the fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `files` has the SHA-256 of each file, `digest` is of them all."""

    path: Path
    step: int
    digest: str
    files: dict[str, str]


def write_atomically(path: Path, text: str) -> None:
    """Replace the file atomically: a reader sees the old text or the new, even after a kill.

    Raises OSError, such as for a full disk; the old file is then unchanged.
    """
    with replacing(path) as file:
        # A path in the text may have bytes that are not UTF-8, which stay as they are.
        file.write(text.encode(errors="surrogateescape"))


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of `path` when the block ends, and else is removed.

    A link in that place is replaced and not followed. `sync` waits for the disk before that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        temporary.unlink(missing_ok=True)  # of a killed process that had the same number
        with open(temporary, "xb", opener=_open_no_link) as file:
            try:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def open_in_place(
    path: Path, mode: Literal["ab", "a+b", "r+b", "wb", "w+b"], buffering: int = -1
) -> BinaryIO:
    """Open a regular file to change it where it is; create it, unless the mode is "r+b".

    Raises:
        OSError: a link, a FIFO, a device or a directory is there; nothing has been written then.
    """
    with naming(path):
        return open(path, mode, buffering, opener=_open_no_link)


def open_lock(path: Path) -> BinaryIO:
    """Open or create the file of a lock, whose content is the name of its holder.

    Raises:
        OSError: it is no regular file, or has a second name: what is written to it, and cut from
            it, could be another file of this user.
    """
    file = open_in_place(path, "a+b", buffering=0)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise OSError(errno.EMLINK, "a lock with a second name (a hard link); remove it", str(path))
    return file


def touch(path: Path) -> None:
    """Set a file's time to now; create it if it does not exist."""
    with open_in_place(path, "ab") as file:
        os.utime(file.fileno())


def _open_no_link(path: str, flags: int) -> int:
    """Open a regular file for `open`, which cuts it to nothing only once it is known to be one."""
    # O_NONBLOCK: a FIFO without a reader is an error at once. It has no effect on regular files.
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = "a symbolic link, through which nothing is written; remove it"
            raise OSError(errno.ELOOP, why, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    os.set_blocking(descriptor, True)  # processes that inherit a log must not see EAGAIN
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def keep_steps(log: Path, last: int) -> None:
    """Drop the lines of steps after `last` from a log of JSON lines, each with its `step`.

    Damaged lines are dropped too, such as the one that a killed process was writing.
    """
    if not log.exists():
        return
    with open_file(log) as lines, replacing(log) as file:
        file.writelines(line.rstrip(b"\n") + b"\n" for line in lines if _step_of(line) <= last)


def _step_of(line: bytes) -> float:
    """Return the step of a log's line, infinity where it is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def is_file_name(name: object) -> bool:
    """Return whether a value is the bare name of a file, so that its path stays in a directory."""
    text = name if isinstance(name, str) and name.isprintable() else ""
    return Path(text).name == text and text not in ("", ".", "..")


def unreachable(path: Path) -> str | None:
    """Return why stat fails on a path that may exist, such as a name too long, or None."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # a NUL
            path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; raise OSError also for a FIFO or device, which could block for ever."""
    # O_NONBLOCK: opening a FIFO waits for its writer. It has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a regular UTF-8 file, or raise OSError or UnicodeDecodeError.

    A file of more than MOST_TEXT_BYTES, such as a hole that costs nothing, is an OSError too.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_TEXT_BYTES:
            why = f"larger than {MOST_TEXT_BYTES >> 20} MiB"
            raise OSError(errno.EFBIG, why, str(path))
        return file.read().decode(errors=errors)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that lacks it, such as of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def checkpoint_directories(directory: Path) -> list[Path]:
    """Return every `step_N`, whole or not, oldest first; UnreadableCheckpoint if unreadable."""
    try:
        return [directory / name for _, name in numbered(directory, "step_")]
    except OSError as error:
        raise UnreadableCheckpoint(_cannot_read(directory, error)) from error


def numbered(directory: Path, prefix: str) -> list[tuple[int, str]]:
    """Return (N, name) of each entry of `directory` named `prefix` + N, sorted by N.

    Empty if the directory does not exist. Other names, such as `step_20.bak`, do not match.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered_names = ((name.removeprefix(prefix), name) for name in names)
    return sorted((int(number), name) for number, name in numbered_names if number.isdecimal())


def whole_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the whole `step_N`, oldest first; raise UnreadableCheckpoint if one is unreadable."""
    return [whole for path in checkpoint_directories(directory) if (whole := read_checkpoint(path))]


def newest_whole(directory: Path) -> Checkpoint | None:
    """Return the whole checkpoint of the highest step, or raise its UnreadableCheckpoint."""
    checkpoints = map(read_checkpoint, reversed(checkpoint_directories(directory)))
    return next(filter(None, checkpoints), None)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None where there is none or it is not whole.

    Raises:
        UnreadableCheckpoint: it exists and cannot be read. Treated as absent, its stage would
            rerun, or continue from an older one, because of a permission or a busy disk.
    """
    if not (step := path.name.removeprefix("step_")).isdecimal():
        return None
    try:
        sums = json.loads(read_text(path / CHECKSUMS))
        return Checkpoint(path, int(step), str(sums["digest"]), dict(sums["files"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path / CHECKSUMS, error) from error
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def unreadable(file: Path, error: OSError) -> UnreadableCheckpoint:
    """Return the error for a file in a checkpoint that exists and cannot be read."""
    without = f"mv {file.parent} {file.parent}.unreadable"
    return UnreadableCheckpoint(
        f"{_cannot_read(file, error)}, or continue without this checkpoint: {without}"
    )


def _cannot_read(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read ({error.strerror}); make it readable"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(files: dict[str, str]) -> str:
    """Return the digest of a checkpoint whose files have these checksums."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def unindexed_weights(directory: Path) -> list[Path]:
    """Return the files of a Hugging Face checkpoint that has no index.

    As transformers does, only model.safetensors where there is one; else all but BESIDE_WEIGHTS.
    """
    whole = directory / WHOLE_MODEL
    if whole.exists() or whole.is_symlink():
        return [whole]
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if not any(map(file.match, BESIDE_WEIGHTS))]


def weights_digest(directory: Path) -> str:
    """Return a digest of a Hugging Face checkpoint that changes when its weights do."""
    return files_digest(file for pattern in WEIGHTS for file in directory.glob(pattern)) or ""


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
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        if whole or size <= WHOLE_BYTES:
            while block := content.read(WHOLE_BYTES):
                digest.update(block)
        else:
            digest.update(content.read(END_BYTES))
            content.seek(size - END_BYTES)
            digest.update(content.read())
    return digest.hexdigest()
