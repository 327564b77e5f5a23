"""Archives that claim more than they have, and directories that others put beside a bundle."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import UserError
from pipeline.config.validate import load
from pipeline.run import archive as archives
from pipeline.run.bundle.reproduce import bundle_at
from pipeline.run.bundle.writer import write_bundle
from pipeline.run.run import Run
from stages.settings import RunSettings
from tests.pipeline.conftest import Braid
from tests.pipeline.test_trust import of_a_stranger  # noqa: F401 - a fixture

GiveAway = Callable[[Path], None]
INDEX = "bundle.json"


@pytest.fixture
def run(settings: RunSettings, runs: Path) -> Run:
    found = Run(runs / "small", settings)
    found.create()
    found.write_settings()
    return Run(found.path, load(found.settings_file))


@pytest.fixture
def archive(run: Run, tmp_path: Path) -> Path:
    return write_bundle(run, tmp_path / "shared/small.tar.gz", "reference")


def sparse(claimed: int) -> bytes:
    """Return an old GNU sparse member without data: GNU tar's manual, "Old GNU format"."""
    header = bytearray(tarfile.TarInfo("sparse").tobuf(tarfile.GNU_FORMAT))
    size = b"\x80" + claimed.to_bytes(11, "big")  # base-256, for what 11 octal digits cannot say
    header[156:157] = b"S"
    header[386:398], header[398:410], header[483:495] = size, b"%011o\0" % 0, size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header alone of a member that claims `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax_sparse() -> bytes:
    """Return a sparse member of GNU's format 1.0 whose map announces more than there is."""
    pairs = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x"}
    info = tarfile.TarInfo("x")
    info.size, info.pax_headers = 512, {**pairs, "GNU.sparse.realsize": "1"}
    return info.tobuf(tarfile.PAX_FORMAT) + b"9999999999\n".ljust(512, b"\0")


BOMBS = {
    "sparse": (sparse(8 << 40), "a sparse file; it is refused"),
    "pax sparse": (pax_sparse(), "a sparse file; it is refused"),
    "size": (member("zeros", 8 << 40), "unpacks to more than 67,108,864 bytes"),
    "zeros": (member("zeros", 80 << 20) + bytes(80 << 20), "unpacks to more than 67,108,864 bytes"),
    "end": (bytes(80 << 20), "unpacks to more than 67,108,864 bytes"),
    "long name": (member("x", 2 << 30, tarfile.GNUTYPE_LONGNAME), "a header of 2,147,483,648"),
    "long link": (member("x", 2 << 30, tarfile.GNUTYPE_LONGLINK), "a header of 2,147,483,648"),
    "attributes": (member("x", 2 << 30, tarfile.XHDTYPE), "a header of 2,147,483,648"),
    "global": (member("x", 2 << 30, tarfile.XGLTYPE), "a header of 2,147,483,648"),
    "deep": (member("d/" * 70 + "x", 0)[:512], "more than 64 directories deep"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_archive_that_claims_too_much_is_refused(bomb: str, tmp_path: Path) -> None:
    content, message = BOMBS[bomb]
    path = tmp_path / "bomb.tar.gz"
    if bomb == "deep":
        with tarfile.open(path, "w:gz") as packed:
            packed.addfile(tarfile.TarInfo("d/" * 70 + "x"), io.BytesIO())
    else:
        path.write_bytes(gzip.compress(content + bytes(1024)))
    with pytest.raises(UserError, match=rf"^{path}: .*{message}"):
        bundle_at(path)
    assert [*tmp_path.iterdir()] == [path]


def test_what_does_not_fit_into_memory_is_an_error(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(archives, "_unpack", no_memory)
    with pytest.raises(UserError, match="cannot be unpacked: not enough memory"):
        bundle_at(archive)


@pytest.mark.parametrize(
    ("free", "files"), [(50 << 20, 10**6), (10 << 30, 10)], ids=["bytes", "files"]
)
def test_an_archive_leaves_room_for_the_runs_on_its_disk(
    free: int, files: int, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of a disk of 10 GiB stay free, and some files."""
    disk = namedtuple("disk", "f_frsize f_blocks f_bavail f_files f_favail")
    found = disk(1, 10 << 30, free, 10**6, files)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    with pytest.raises(UserError, match=r"are free in .*shared; make room, or move the archive"):
        bundle_at(archive)
    assert [*archive.parent.iterdir()] == [archive]


def test_a_directory_that_another_user_put_beside_an_archive_is_refused(
    archive: Path,
    of_a_stranger: GiveAway,  # noqa: F811
) -> None:
    found = bundle_at(archive)
    assert found is not None
    of_a_stranger(found.path / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml belongs to .*, and a bundle is code; copy"):
        bundle_at(archive)
    of_a_stranger(found.path)
    with pytest.raises(UserError, match=r"small: belongs to .*, and a bundle is code; copy"):
        bundle_at(archive)


def test_a_directory_that_others_may_write_to_is_refused(archive: Path) -> None:
    found = bundle_at(archive)
    assert found is not None
    (found.path / "config.yaml").chmod(0o666)
    assert bundle_at(archive) == found  # nobody else gets there
    found.path.chmod(0o755)
    with pytest.raises(UserError, match=r"config\.yaml can be written by others \(mode 666\)"):
        bundle_at(archive)


@pytest.mark.parametrize("name", ["config.yaml", INDEX])
def test_a_directory_that_differs_from_its_archive_is_refused(name: str, archive: Path) -> None:
    found = bundle_at(archive)
    assert found is not None
    file = found.path / name
    before = file.read_text()
    file.write_text(before.replace("seed", "sead"))
    with pytest.raises(UserError, match=rf"{file} is not the one in {archive}; restore it, or run"):
        bundle_at(archive)
    file.unlink()
    (found.path / "elsewhere").write_text(before)
    file.symlink_to("elsewhere")
    with pytest.raises(UserError, match="is not the one in"):
        bundle_at(archive)


@pytest.mark.parametrize("name", ["small.tar.gz", "bundle"])
def test_a_planted_unfinished_directory_is_refused(
    name: str,
    run: Run,
    tmp_path: Path,
    of_a_stranger: GiveAway,  # noqa: F811
) -> None:
    victim, place = tmp_path / "victim", tmp_path / f".{name}.unfinished"
    victim.write_text("precious")
    place.mkdir()
    (place / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="a symbolic link, through which nothing is written"):
        write_bundle(run, tmp_path / name, "reference")
    place.chmod(0o777)
    with pytest.raises(UserError, match=r"other users may write to it \(mode 777\); remove it"):
        write_bundle(run, tmp_path / name, "reference")
    place.chmod(0o700)
    of_a_stranger(place)
    with pytest.raises(UserError, match=r"unfinished: belongs to .*; remove it, or choose"):
        write_bundle(run, tmp_path / name, "reference")
    place.rename(tmp_path / "theirs")
    place.symlink_to(tmp_path)
    with pytest.raises(UserError, match="unfinished: not a directory; remove it"):
        write_bundle(run, tmp_path / name, "reference")
    assert victim.read_text() == "precious"


def test_validate_says_so_in_one_error(braid: Braid, archive: Path) -> None:
    assert braid("validate", archive)[0] == 0
    archive.with_name("small").chmod(0o777)
    code, out, err = braid("validate", archive)
    assert (code, out) == (1, "")
    assert err.startswith(
        f"braid: {archive.with_name('small')}: can be written by others (mode 777"
    )
