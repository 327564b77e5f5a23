"""The rollouts' write-ahead log: what the engines have answered since the newest whole checkpoint.

Every response is appended as soon as it counts, before anything is made of it. A stage that was
killed does steps again; what it asks for and finds here, by the same weights, is not drawn a second
time. What was not whole is drawn with its own seed: a long response is never given up for another,
which would make responses shorter than the policy's.

One file for every version of the weights, `version_N.log`, so that what a checkpoint covers goes
by file. A frame is three uint32, big-endian: the length of its data, their CRC-32, and the CRC-32
of those 8 bytes; then the data, typed MessagePack. The first holds an `Origin`. Frames reach the
operating system before they are used: a killed process loses none but the one it was writing.
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

from parallel.engine.answers import InvalidResponse, Question, sample_of
from parallel.engine.wire import Generation
from parallel.files import naming
from parallel.sample import Sample
from parallel.settings import ModelSettings
from parallel.status_pipe import report_notice

FORMAT = 1  # of this file
HEADER = struct.Struct(">III")

Entry = tuple[Question, Generation] | None  # None: nothing more was asked of these weights
ENTRIES: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Damaged(ValueError):
    """Bytes that are not as they were written."""


class Origin(msgspec.Struct, frozen=True):
    """What decides, beside question and version, what is drawn: as a digest."""

    format: int
    digest: str


@dataclass
class _Version:
    """One file: the answers that were in it when it was opened, by seed, and whether all were that
    its step had asked for."""

    file: BinaryIO
    answers: dict[int, tuple[Question, Generation]]
    whole: bool


class RolloutLog:
    """The log of one stage, on its main rank.

    Raises OSError, with the file's path, where it cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        origin: str,
        model: ModelSettings,
        deterministic: bool,
        notify: Callable[[str], None] = report_notice,
    ) -> None:
        """`deterministic`: the answers of a version are of use when they are whole, since bits
        depend on what else an engine draws, or has cached since its refit."""
        self._directory = directory
        self._origin = Origin(FORMAT, origin)
        self._model = model
        self._deterministic = deterministic
        self._notify = notify
        self._lock = threading.Lock()  # guards all of the log; answers come in engines' threads
        self._open: dict[int, _Version] = {}
        self._covered = 0
        self._used: set[int] = set()  # versions of which something was taken

    def begin(self, version: int, later: bool) -> None:
        """A stage goes on with the weights `version`; answers of `later` ones are kept where they
        may come again."""
        self.cover(version - 1)
        if not later:
            self._remove(lambda each: each > version)

    def cover(self, version: int) -> None:
        """Forget this version and those before it: a whole checkpoint has what they led to."""
        self._covered = max(self._covered, version)
        self._remove(lambda each: each <= version)

    def forget(self, version: int) -> bool:
        """Forget this version, and those after it, whose weights came of it; whether anything of it
        was taken."""
        self._remove(lambda each: each >= version)
        used = version in self._used
        self._used.discard(version)
        return used

    def take(self, version: int, questions: Sequence[Question]) -> list[Sample | None]:
        """What is known of the answers to these questions by the weights `version`, each once."""
        with self._lock:
            if not (version in self._open or self._path(version).exists()):
                return [None] * len(questions)
            known = self._of(version)
            found = [known.answers.get(question.seed) for question in questions]
            same = [
                entry is not None and entry[0] == question
                for entry, question in zip(found, questions, strict=True)
            ]
            if not any(same) or (self._deterministic and not (known.whole and all(same))):
                return [None] * len(questions)
            self._used.add(version)
            return [
                sample_of(*known.answers.pop(question.seed), self._model) if is_same else None
                for question, is_same in zip(questions, same, strict=True)
            ]

    def add(self, question: Question, answer: Generation) -> None:
        """Append a response. Any thread may do so.

        One that several weights have drawn is left out: a stage that resumes has only the last.
        """
        versions = np.frombuffer(answer.versions, "<i4")
        version = int(versions[0])
        if version == versions[-1]:
            self._append(version, (question, answer))

    def end(self, version: int) -> None:
        """Note that all that a step asks of these weights has been answered."""
        self._append(version, None)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for each in self._open.values():
                each.file.close()
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
        """The version's file, read, and open at the end of what is whole in it."""
        if version not in self._open:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._path(version)
            with naming(path):
                file = path.open("r+b" if path.exists() else "w+b")
                self._open[version] = self._read(path, file, version)
        return self._open[version]

    def _read(self, path: Path, file: BinaryIO, version: int) -> _Version:
        read = _Version(file, {}, whole=False)
        good = 0
        try:
            for number, data in enumerate(frames(file)):
                if number == 0:
                    self._hold_to_origin(data)
                elif (entry := self._entry(data, version)) is None:
                    read.whole = True
                else:
                    read.answers[entry[0].seed] = entry
                good = file.tell()
        except Damaged as error:
            self._notify(
                f"{path}: {error}; the {len(read.answers)} responses before byte {good} are used,"
                " and what follows is drawn again"
            )
        file.seek(good)
        file.truncate()
        if good == 0:
            self._write(file, self._origin)
        return read

    def _hold_to_origin(self, data: bytes) -> None:
        """Raise Damaged where a file's first frame does not say that it is of this very log."""
        try:
            origin = msgspec.msgpack.decode(data, type=Origin)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise Damaged(f"its first frame tells no origin: {error}") from error
        if origin.format != FORMAT:
            raise Damaged(f"it is of format {origin.format}, and not of {FORMAT}")
        if origin != self._origin:
            raise Damaged("it is of another model, parent or sampling")

    def _entry(self, data: bytes, version: int) -> Entry:
        """A frame whose checksum is right may still hold what nobody who writes here would write.

        Raises Damaged.
        """
        try:
            entry = ENTRIES.decode(data)
            if msgspec.msgpack.encode(entry) != data:  # such as a key that is none
                raise InvalidResponse("it says more than one")
            if entry is not None:
                sample = sample_of(*entry, self._model)
                if np.any(sample.versions != version):
                    raise InvalidResponse("it is of other weights than its file")
        # OverflowError: a token of a prompt that is no int32.
        except (ValueError, OverflowError, RecursionError) as error:
            raise Damaged(f"a frame that is no response: {error}") from error
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
    """One message as it stands in a file."""
    data = msgspec.msgpack.encode(message)
    start = HEADER.pack(len(data), crc32(data), 0)[:8]
    return start + crc32(start).to_bytes(4, "big") + data


def frames(file: BinaryIO) -> Iterator[bytes]:
    """The data of every frame; one that the file ends within is left out.

    Raises Damaged.
    """
    while len(header := file.read(HEADER.size)) == HEADER.size:
        length, checksum, own = HEADER.unpack(header)
        if crc32(header[:8]) != own:
            raise Damaged(f"damaged at byte {file.tell() - HEADER.size}")
        data = file.read(length)
        if len(data) < length:
            return
        if crc32(data) != checksum:
            raise Damaged(f"damaged at byte {file.tell() - length}")
        yield data
