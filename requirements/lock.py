"""Write the pins of requirements/*.txt and benchmarks/trl-requirements.txt with their hashes.

    .venv/bin/python requirements/lock.py [FILE ...]

`make lock` resolves setup.py's ranges, and then runs this. Of a FILE, every `name==version` that
stands in it gets the SHA-256 of all its wheels and its source, as the package index lists them.
torch's CPU builds stand on an index of their own: torch-cpu.txt keeps the hashes that it has of the
same version, and gains that of the build that pip finds here, if it finds one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent
CPU_TORCH = FOLDER / "torch-cpu.txt"
NAMES = ("bootstrap", "torch-cuda", "cpu", "te-python", "gpu", "gpu-built")
FILES = (
    CPU_TORCH,
    *(FOLDER / f"{name}.txt" for name in NAMES),
    FOLDER.parent / "benchmarks" / "trl-requirements.txt",
)
PIN = re.compile(r"^([\w.-]+==[\w.+!-]+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def main() -> None:
    """Lock the files that are named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or FILES:
        before = path.read_text()
        comments = [line for line in before.splitlines() if line.startswith("#")]
        if path.resolve() == CPU_TORCH.resolve():
            pins = _with_cpu_builds(before)
        else:
            pins = _with_hashes(PIN.findall(before))
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


def _with_cpu_builds(before: str) -> str:
    """Return torch's pin with the hashes that it has, and that of the CPU build that pip finds.

    Exits where there is none: resolve.py drops the hashes of a pin that it moves.
    """
    [pin] = PIN.findall(before)
    hashes = set(HASH.findall(before))
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", folder, pin]
        subprocess.run([sys.executable, "-m", *command], check=False, stderr=subprocess.DEVNULL)
        hashes |= {sha256(wheel.read_bytes()).hexdigest() for wheel in Path(folder).iterdir()}
    if not hashes:
        sys.exit(f"pip finds no {pin}, whose hash is unknown; name its index, see README.md")
    return pin + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(hashes)) + "\n"


if __name__ == "__main__":
    main()
