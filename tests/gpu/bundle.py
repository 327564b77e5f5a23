"""Pack what the GPU lane needs beside torch and transformers: `make gpu-bundle`.

    python -m tests.gpu.bundle DIRECTORY

For a machine with a GPU, torch and Python 3.12 but no registry. The packages have the versions and
the hashes of requirements/cpu.txt, and their wheels are for 64-bit x86 Linux.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "cpu.txt"
PACKAGES = (
    *("megatron-core", "mbridge"),  # the model
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),  # settings
    *("msgspec", "setproctitle"),  # the engine's wire format; the names of processes
)
PYTHON = "3.12"
VERSION_FILE = "python-version.txt"  # in the bundle: pip leaves no note of the Python it packed for
GLIBC = (28, 27, 24, 17, 12, 5)  # of the wheels' platforms: pip matches each number exactly
MOST_MEBIBYTES = 64  # what a machine may be lent with


def requirements() -> Iterator[str]:
    """Yield the pinned and hashed lines of PACKAGES.

    Raises:
        KeyError: requirements/cpu.txt has none for a package.
    """
    blocks = re.split(r"\n(?=[A-Za-z0-9])", REQUIREMENTS.read_text())
    pinned = {block.partition("==")[0].lower().replace("_", "-"): block for block in blocks}
    for package in PACKAGES:
        yield pinned[package].strip()


def unusable(directory: Path) -> str:
    """Return why this Python cannot import the bundle and the fix; empty if it can.

    Its extensions are compiled for one version: another finds `msgspec` and no `msgspec._core`.
    """
    if not directory.is_dir():
        return f"there is no bundle {directory}; `make gpu-bundle` packs it"
    try:
        packed = (directory / VERSION_FILE).read_text().strip()
    except OSError:
        return f"the bundle {directory} has no {VERSION_FILE}; pack it again with `make gpu-bundle`"
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if packed == here:
        return ""
    return (
        f"the bundle {directory} is for Python {packed}, this is {here}; use that Python, as with "
        f"`make gpu-check GPU_PYTHON=python{packed}`"
    )


def main() -> None:
    """Install the packages into the directory named by argv[1], which is replaced."""
    directory = Path(sys.argv[1])
    shutil.rmtree(directory, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements()) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes"]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
        command += ["--platform=manylinux2014_x86_64", "--target", str(directory)]
        if status := subprocess.run([*command, "-r", file.name], check=False).returncode:
            sys.exit(status)
    (directory / VERSION_FILE).write_text(f"{PYTHON}\n")
    mebibytes = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file()) / 2**20
    if mebibytes > MOST_MEBIBYTES:
        sys.exit(f"{directory}: {mebibytes:.0f} MiB is more than {MOST_MEBIBYTES}; pack fewer")
    print(f"{directory}: {mebibytes:.1f} MiB for Python {PYTHON}")


if __name__ == "__main__":
    main()
