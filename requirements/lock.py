"""Write the pins of requirements/*.txt and benchmarks/trl-requirements.txt with their hashes.

    .venv/bin/python requirements/lock.py [FILE ...]

`make lock` resolves setup.py's ranges, and then runs this. Of a FILE, every `name==version` that
stands in it gets the SHA-256 of all its wheels and its source, as the package index lists them. Of
bootstrap.txt's torch, whose CPU builds stand on an index of their own, it is the CPU build that pip
finds here, and those that were known of the same version stay: with the hashes of the package
index's CUDA builds beside it, pip would take one of these before a wheel of a folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent
CPU_TORCH = FOLDER / "bootstrap.txt"
FILES = (
    CPU_TORCH,
    FOLDER / "cpu.txt",
    *(FOLDER / name for name in ("gpu-bootstrap.txt", "gpu.txt", "gpu-built.txt", "te-python.txt")),
    FOLDER.parent / "benchmarks" / "trl-requirements.txt",
)
PIN = re.compile(r"^([\w.-]+==[\w.+!-]+)", re.MULTILINE)
TORCH = re.compile(r"^(torch==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)


def main() -> None:
    """Lock the files that are named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or FILES:
        before = path.read_text()
        comments = [line for line in before.splitlines() if line.startswith("#")]
        pins = _with_hashes(PIN.findall(before))
        if path.resolve() == CPU_TORCH.resolve():
            pins = _with_torch_builds(pins, before)
        path.write_text("\n".join([*comments, pins]))
        print(f"{path}: {len(PIN.findall(pins))} pins, {pins.count('--hash=')} hashes")


def _with_hashes(pins: list[str]) -> str:
    """Return the pins with the hashes that the index lists."""
    # Neither a header nor annotations: they would name the index and the folder.
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--python", sys.executable, "-"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        input="\n".join(pins),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _with_torch_builds(pins: str, before: str) -> str:
    """Return the pins with the hashes of torch's CPU builds in place of the index's.

    Exits where pip finds another build.
    """
    if (torch := TORCH.search(pins)) is None:
        return pins
    known = TORCH.search(before)
    hashes: set[str] = set()
    if known is not None and known[1] == torch[1]:
        hashes |= set(re.findall("[0-9a-f]{64}", known[2]))
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", folder, torch[1]]
        subprocess.run([sys.executable, "-m", *command], check=True)
        [wheel] = Path(folder).iterdir()
        if "+cpu" not in wheel.name:
            sys.exit(f"pip finds {wheel.name}, which is no CPU build; see README.md")
        hashes.add(sha256(wheel.read_bytes()).hexdigest())
    lines = "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(hashes))
    return pins.replace(torch[0], torch[1] + lines)


if __name__ == "__main__":
    main()
