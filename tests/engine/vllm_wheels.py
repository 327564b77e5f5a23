"""Compare Braid's use of vLLM with the GPU wheels that a registry has: `make lock` runs this.

    python -m tests.engine.vllm_wheels

The wheel of requirements/gpu.txt must have every name: exits with the missing ones. The newest is
only reported: it says what an update will cost. Downloads 0.7 GB; imports neither.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tests.engine.vllm_contract import Source, missing
from tests.runs import REPOSITORY

PLATFORM = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12")


def main() -> None:
    """Compare the pinned wheel and the newest one."""
    text = (REPOSITORY / "requirements" / "gpu.txt").read_text()
    [pinned] = re.findall(r"^vllm==(\S+)", text, re.MULTILINE)
    failed = _report(f"vllm=={pinned}", "pinned")
    _report("vllm", "newest")
    if failed:
        sys.exit(1)


def _report(requirement: str, which: str) -> bool:
    """Print what a wheel lacks; return whether it lacks something."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", *PLATFORM, "--dest", directory, requirement]
        subprocess.run(command, check=True)
        [wheel] = Path(directory).glob("*.whl")
        sources = Path(directory) / "sources"
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(sources, names)
        lacks = missing(Source(sources), REPOSITORY)
    print(f"{which} {wheel.name}: {', '.join(lacks) or 'nothing'} missing")
    return bool(lacks)


if __name__ == "__main__":
    main()
