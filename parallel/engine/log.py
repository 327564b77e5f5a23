"""The write-ahead log of rollouts: the engines' responses since the newest whole checkpoint.

Every response is appended when it is accepted, before it is used. A killed stage repeats steps;
requests that it finds here, for the same weight version, are not sampled again. An incomplete
response is sampled again with its own seed: replacing long responses by others would bias them to
be shorter than the policy's.

There is one file per weight version, `version_N.log`, which is removed once a checkpoint covers it.
A frame is three big-endian uint32, the length of its data, their CRC-32, and the CRC-32 of those 8
bytes, and then the data, typed MessagePack. The first frame holds an `Origin`. Frames reach the
operating system before they are used: a killed process loses only the one it was writing.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec
import numpy as np

from parallel.engine.wire import Generation, GenerationRequest, InvalidResponse, sample_of
from parallel.errors import report_notice
from parallel.files import naming, open_in_place
from parallel.sample import Sample
from parallel.settings import ModelSettings

FORMAT = 1  # version of the file format
HEADER = struct.Struct(">III")

Entry = tuple[GenerationRequest, Generation] | None  # None: this version is complete


class Damaged(ValueError):
    """A file with other bytes than were written."""


class Origin(msgspec.Struct, frozen=True):
    """A digest of everything besides the request and the version that decides a response."""

    format: int
    digest: str


@dataclass
class _Version:
    """An open file: its answers when it was opened, by seed, and whether they are complete."""

    file: BinaryIO
    answers: dict[int, tuple[GenerationRequest, Generation]]
    whole: bool


class RolloutLog:
    """The log of one stage, on its main rank; raises OSError where it cannot be written."""

    def __init__(
        self,
        directory: Path,
        origin: str,
        model: ModelSettings,
        deterministic: bool,
        notify: Callable[[str], None] = report_notice,
    ) -> None:
        """With `deterministic` only complete versions are replayed.

        Bits depend on what else an engine samples, or has cached since its refit.
        """
        self._directory = directory
        self._origin = Origin(FORMAT, origin)
        self._model = model
        self._deterministic = deterministic
        self._notify = notify
        self._lock = threading.Lock()  # guards all of the log; answers arrive in other threads
        self._open: dict[int, _Version] = {}
        self._covered = 0
        self._used: set[int] = set()  # versions with replayed answers

    def begin(self, version: int, later: bool) -> None:
        """Start at a weight version; keep the answers of later versions where `later` is set."""
        self.cover(version - 1)
        if not later:
            self._remove(lambda logged: logged > version)

    def cover(self, version: int) -> None:
        """Remove this version and earlier ones: a whole checkpoint covers them."""
        self._covered = max(self._covered, version)
        self._remove(lambda logged: logged <= version)

    def forget(self, version: int) -> bool:
        """Remove this version and later ones; return whether any of its answers was replayed."""
        self._remove(lambda logged: logged >= version)
        used = version in self._used
        self._used.discard(version)
        return used

    def take(self, version: int, requests: Sequence[GenerationRequest]) -> list[Sample | None]:
        """Return the logged answers to these requests for a weight version, each answer once."""
        with self._lock:
            if not (version in self._open or self._path(version).exists()):
                return [None] * len(requests)
            logged = self._of(version)
            same = [logged.answers.get(request.seed, (None,))[0] == request for request in requests]
            if not any(same) or (self._deterministic and not (logged.whole and all(same))):
                return [None] * len(requests)
            self._used.add(version)
            return [
                sample_of(*logged.answers.pop(request.seed), self._model) if is_same else None
                for request, is_same in zip(requests, same, strict=True)
            ]

    def add(self, request: GenerationRequest, answer: Generation) -> None:
        """Append a response. Thread-safe.

        One sampled with several weight versions is not logged: a resumed stage has only the last.
        """
        versions = np.frombuffer(answer.versions, "<i4")
        version = int(versions[0])
        if version == versions[-1]:
            self._append(version, (request, answer))

    def end(self, version: int) -> None:
        """Mark a version as complete: all of its step's responses have been accepted."""
        self._append(version, None)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for opened in self._open.values():
                opened.file.close()
            self._open.clear()

    def _append(self, version: int, entry: Entry) -> None:
        with self._lock, naming(self._path(version)):
            if version > self._covered:
                self._write(self._of(version).file, entry)

    def _write(self, file: BinaryIO, entry: Entry | Origin) -> None:
        file.write(frame(entry))
        file.flush()

    def _path(self, version: int) -> Path:
        return self._directory / f"version_{version}.log"

    def _of(self, version: int) -> _Version:
        """Return the version's file, read, and open at the end of its whole frames."""
        if version not in self._open:
            path = self._path(version)
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = open_in_place(path, "r+b" if path.exists() else "w+b")
                self._open[version] = self._read(path, file, version)
        return self._open[version]

    def _read(self, path: Path, file: BinaryIO, version: int) -> _Version:
        read = _Version(file, {}, whole=False)
        good = 0
        try:
            for data in frames(file):
                if good == 0:
                    self._check_origin(data)
                elif (entry := self._entry(data, version)) is None:
                    read.whole = True
                else:
                    read.answers[entry[0].seed] = entry
                good = file.tell()
        except Damaged as error:
            self._notify(
                f"{path}: {error}; the {len(read.answers)} responses before byte {good} are used,"
                " later ones are sampled again"
            )
        # Frames after a damaged one are never read: append after the last whole one.
        file.seek(good)
        file.truncate()
        if good == 0:
            self._write(file, self._origin)
        return read

    def _check_origin(self, data: bytes) -> None:
        try:
            origin = msgspec.msgpack.decode(data, type=Origin)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise Damaged(f"its first frame is not an origin: {error}") from error
        if origin.format != FORMAT:
            raise Damaged(f"it has format {origin.format}, expected {FORMAT}")
        if origin != self._origin:
            raise Damaged("it is of another model, parent or sampling")

    def _entry(self, data: bytes, version: int) -> Entry:
        """Return the entry of a frame; raise Damaged where this class writes no such data."""
        try:
            entry: Entry = msgspec.msgpack.decode(data, type=Entry)
            if msgspec.msgpack.encode(entry) != data:  # such as unknown keys
                raise InvalidResponse("unknown keys or values")
            if entry and np.any(sample_of(*entry, self._model).versions != version):
                raise InvalidResponse("another weight version than the file's")
        # OverflowError: a token of a prompt is not an int32.
        except (ValueError, OverflowError, RecursionError) as error:
            raise Damaged(f"a frame is not a valid response: {error}") from error
        return entry

    def _remove(self, dropped: Callable[[int], bool]) -> None:
        with self._lock:
            for path in self._directory.glob("version_*.log"):
                digits = path.stem.removeprefix("version_")
                if digits.isdecimal() and dropped(int(digits)):
                    if opened := self._open.pop(int(digits), None):
                        opened.file.close()
                    path.unlink(missing_ok=True)


def frame(message: object) -> bytes:
    """Return the frame of a message."""
    data = msgspec.msgpack.encode(message)
    start = HEADER.pack(len(data), crc32(data), 0)[:8]
    return start + crc32(start).to_bytes(4, "big") + data


def frames(file: BinaryIO) -> Iterator[bytes]:
    """Yield the data of every frame; raise Damaged where a checksum does not match.

    A frame that the file ends within is dropped.
    """
    while len(header := file.read(HEADER.size)) == HEADER.size:
        length, checksum, header_checksum = HEADER.unpack(header)
        if crc32(header[:8]) != header_checksum:
            raise Damaged(f"damaged at byte {file.tell() - HEADER.size}")
        data = file.read(length)
        if len(data) < length:
            return
        if crc32(data) != checksum:
            raise Damaged(f"damaged at byte {file.tell() - length}")
        yield data
