"""The packages that `make` installs are pinned and hashed, package by package."""

from __future__ import annotations

import re
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = [
    *(f"requirements/{name}.txt" for name in ("bootstrap", "cpu", "te-python")),
    *(f"requirements/{name}.txt" for name in ("gpu-bootstrap", "gpu", "gpu-built")),
    "benchmarks/trl-requirements.txt",
]
HASHED = re.compile(r"^[\w.-]+==[\w.+!-]+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_is_pinned_with_hashes_and_no_index_is_named(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    stated = [line for line in text.splitlines() if re.match(r"[A-Za-z]", line)]
    assert stated
    assert len(HASHED.findall(text)) == len(stated)
    assert "://" not in text and "index-url" not in text


def loaded(name: str) -> Any:
    """Import a program of requirements/, which is no package."""
    specification = spec_from_file_location(name, REPOSITORY / "requirements" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def installs() -> list[str]:
    """Return the commands of the Makefile that install, with its variables filled in."""
    text = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    for name in ("BUILT_HERE", "HASHED"):
        [value] = re.findall(rf"^{name} := (.*)$", text, re.MULTILINE)
        text = text.replace(f"$({name})", value)
    return [line for line in text.splitlines() if line.startswith("\t") and "pip install" in line]


def test_make_installs_with_hashes_and_says_why_pip_stands_in_for_uv() -> None:
    unhashed = [
        line for line in installs() if "--require-hashes" not in line and "--editable" not in line
    ]
    assert installs() and not unhashed
    for line in installs():
        assert "||" not in line or ">&2" in line


def test_what_is_built_here_is_built_by_the_pinned_setuptools() -> None:
    for line in installs():
        pinned = "-r $(3)" in line or "--no-build-isolation" in line
        assert pinned or "--target" in line or "--upgrade" in line, line
    for name in ("bootstrap.txt", "gpu-bootstrap.txt"):
        assert "setuptools==" in (REPOSITORY / "requirements" / name).read_text()


@pytest.mark.parametrize(("version", "kept"), [("2.13.0", True), ("2.12.0", False)])
def test_the_hashes_of_torch_are_those_of_its_version(
    version: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = loaded("lock")

    def download(command: list[str], check: bool) -> None:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "torch-2.13.0+cpu-cp311.whl").write_bytes(b"")

    monkeypatch.setattr(lock.subprocess, "run", download)
    pin, known, listed = " \\\n    --hash=sha256:", "a" * 64, "b" * 64
    found = lock._with_torch_builds(f"torch==2.13.0{pin}{listed}", f"torch=={version}{pin}{known}")
    assert (known in found) == kept
    assert listed not in found
    assert sha256(b"").hexdigest() in found
