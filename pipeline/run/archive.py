"""The archive of a bundle: it is unpacked beside itself once, and what it may write is bounded."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from parallel.errors import UserError
from parallel.files import open_file, read_text, sha256, write_atomically
from pipeline.run.bundle.unfinished import ARCHIVES, CONFIG, INDEX, unfinished
from pipeline.run.directory import OTHERS_ENTER, OTHERS_WRITE, PRIVATE, ROOT, user_name
from pipeline.text import shown

UNPACKING_SECONDS = 600  # that a command waits for another one which unpacks the same archive
UNPACKED = ".archive"  # the SHA-256 of the archive that a directory was unpacked from
MOST_MEMBERS, PIECE = 1_000_000, 1 << 20
DEEPEST = 64  # directories of a member's path
LONGEST_HEADER = 1 << 16  # bytes of a name or of extended attributes; tarfile reads them whole
# gzip makes zeros a thousand times smaller, rows of JSON that repeat a long prompt fifty times.
MOST_EXPANSION, SMALL_BYTES = 200, 64 << 20
# Of the disk, for the runs on it: the smaller of a part of it and this many bytes; and some files.
LEFT_FREE, LEFT_FREE_BYTES, LEFT_FREE_FILES = 0.05, 1 << 30, 1000
HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
DAMAGE = (tarfile.TarError, EOFError, OSError, ValueError, MemoryError, zlib.error)


class _Member(tarfile.TarInfo):
    """A member whose header is refused before tarfile reads what it announces."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type == tarfile.GNUTYPE_SPARSE:
            member._refuse_sparse()
        if member.type in HEADERS and member.size > LONGEST_HEADER:
            raise UserError(
                f"a header of {member.size:,} bytes, more than {LONGEST_HEADER:,}; it is refused"
            )
        return member

    def _refuse_sparse(self, *_: object) -> None:
        """Raise UserError: a sparse file's size is what it claims, and its bytes are not there."""
        raise UserError(f"{self.name!r}: a sparse file; it is refused")

    # tarfile reads the map of a sparse file of these formats without a bound (CPython 3.12).
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Bounded:
    """A stream that ends with UserError after `most` bytes."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, most: int) -> None:
        self._file, self._most, self._left = file, most, most

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        self.check(0)
        return data

    def check(self, size: int) -> None:
        """Raise UserError where `size` bytes more exceed the bound."""
        if size > self._left:
            raise UserError(
                f"unpacks to more than {self._most:,} bytes, {MOST_EXPANSION} times its size; if "
                "you trust it, unpack it with tar, and run the directory"
            )


def unpacked(archive: Path) -> Path:
    """Unpack an archive into the directory of its name beside it, unless it was before.

    Raises:
        UserError: it is no bundle's, or too large; or what is in the directory's place is not
            unpacked from it, was changed since, or could have been changed by others.
    """
    name = next(archive.name.removesuffix(end) for end in ARCHIVES if archive.name.endswith(end))
    if not name:
        raise UserError(f"{shown(archive)}: unpacked to its name without {archive.name}; rename it")
    to, digest = archive.with_name(name), sha256(archive)
    if not os.path.lexists(to):
        with unfinished(to, UNPACKING_SECONDS) as place:
            if not os.path.lexists(to):  # else another command unpacked it while this one waited
                _unpack_all(archive, digest, place / "bundle")
                (place / "bundle").rename(to)
    if why := _open_to_others(to):
        raise UserError(
            f"{shown(to)}: {why}, and a bundle is code; copy {shown(archive)} to a directory of "
            f"your own, or, if you trust them: braid run {shown(to)}"
        )
    mark = to / UNPACKED
    if not mark.is_file() or read_text(mark).strip() != digest:
        raise UserError(
            f"{shown(to)} exists and is not unpacked from {shown(archive)}; move it away, or run it"
        )
    _check_unchanged(archive, to)
    return to


def _open_to_others(to: Path) -> str | None:
    """Return how others than this user and root could have written what was unpacked, or None."""
    closed = not to.lstat().st_mode & OTHERS_ENTER
    for path in (to, *to.rglob("*")):
        status = path.lstat()
        inside = "" if path == to else f"{shown(path.relative_to(to))} "
        if status.st_uid not in (os.geteuid(), ROOT):
            return f"{inside}belongs to {user_name(status.st_uid)}"
        writable = status.st_mode & OTHERS_WRITE and not stat.S_ISLNK(status.st_mode)
        if writable and not (closed and path != to):
            return f"{inside}can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _check_unchanged(archive: Path, to: Path) -> None:
    """Raise UserError where the unpacked index or configuration differs from the archive's.

    The index has the digests of all inputs, which `Bundle.check_inputs` compares.
    """
    left = {INDEX, CONFIG}
    with _opened(archive) as (packed, _):
        for member in packed:
            if member.name not in left:
                continue
            left.remove(member.name)
            file, source = to / member.name, packed.extractfile(member)
            assert source is not None
            if not file.is_file() or file.is_symlink() or _bytes(file) != source.read():
                raise UserError(
                    f"{shown(file)} is not the one in {shown(archive)}; restore it, or run what is "
                    f"there: braid run {shown(to)}"
                )
            if not left:
                return


def _bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[tarfile.TarFile, _Bounded]]:
    """Open an archive as a bounded stream.

    Raises:
        UserError: it is damaged, or larger than an archive of its size may be.
    """
    # Decompression is bounded as a stream: a small archive could otherwise fill the disk before its
    # members are looked at.
    most = max(SMALL_BYTES, MOST_EXPANSION * archive.stat().st_size)
    try:
        with gzip.open(archive, "rb") as content:
            stream = _Bounded(content, most)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as packed:  # type: ignore[call-overload]
                yield packed, stream
    except UserError as error:
        raise UserError(f"{shown(archive)}: {error}") from error
    except DAMAGE as error:
        why = str(error) or "not enough memory"
        raise UserError(f"{shown(archive)}: cannot be unpacked: {why}") from error


def _unpack_all(archive: Path, digest: str, to: Path) -> None:
    """Write an archive's files and its digest into a new directory."""
    shutil.rmtree(to, ignore_errors=True)  # of a killed process
    to.mkdir(mode=PRIVATE)
    with _opened(archive) as (packed, stream):
        for count, member in enumerate(packed):
            if count >= MOST_MEMBERS:
                raise UserError(f"{member.name!r}: more than {MOST_MEMBERS} files; it is refused")
            stream.check(member.size)
            _unpack(packed, member, to)
        # To the end, where gzip's checksum is: tarfile takes a damaged header for the end.
        while stream.read(PIECE):
            pass
        if not (to / INDEX).is_file():
            raise UserError(f"not a bundle: no {INDEX} in it")
        write_atomically(to / UNPACKED, f"{digest}\n")


def _unpack(packed: tarfile.TarFile, member: tarfile.TarInfo, to: Path) -> None:
    """Write one member; raise UserError for all that `braid bundle` never writes."""
    where = f"{member.name!r}"
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in member.name:
        raise UserError(f"{where}: a path outside the bundle; it is refused")
    if not member.isreg():
        raise UserError(f"{where}: not a regular file; links and devices are refused")
    if member.issparse():
        raise UserError(f"{where}: a sparse file; it is refused")
    if len(path.parts) > DEEPEST:
        raise UserError(f"{where}: more than {DEEPEST} directories deep; it is refused")
    _check_room(to, where, member.size)
    target = to / path
    target.parent.mkdir(parents=True, exist_ok=True)
    source = packed.extractfile(member)
    assert source is not None
    with source, target.open("xb") as file:  # a second member of the name fails
        shutil.copyfileobj(source, file)


def _check_room(to: Path, where: str, size: int) -> None:
    """Raise UserError where a file of `size` bytes would leave the disk's other users too little.

    A run on the same disk fails, or cannot save, while the disk is full.
    """
    disk = os.statvfs(to)
    free, total = (blocks * disk.f_frsize for blocks in (disk.f_bavail, disk.f_blocks))
    reserve = min(LEFT_FREE_BYTES, int(LEFT_FREE * total))
    few_files = disk.f_files and disk.f_favail < LEFT_FREE_FILES
    if size + reserve > free or few_files:
        raise UserError(
            f"{where}: {size:,} bytes, and {free:,} bytes and {disk.f_favail:,} files are free in "
            f"{shown(to.parents[1])}; make room, or move the archive to another disk"
        )
