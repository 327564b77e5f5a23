"""`braid look` names what is wrong with real runs that were made to go wrong, each in one way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.awaiting import PATIENCE_SECONDS
from tests.end_to_end.process_tree import KILLED, tree
from tests.runs import BRAID, REPOSITORY, braid, finish, metrics

pytestmark = pytest.mark.combinations  # of the rules that tests/pipeline/test_look.py tries

CONFIG = str(Path(__file__).with_name("health.yaml"))
HEALTHY, EXPERT, DOMAIN = "healthy", "experts.chain_sum", "domains.chain_sum"
SECONDS = PATIENCE_SECONDS


@dataclass(frozen=True)
class PlantedFault:
    """A cause for a run to go wrong, and the words that `braid look` must have for it."""

    said: str
    settings: tuple[str, ...] = ()
    reward: str | None = None  # source of a further reward, which fails or lures
    injure: Callable[[Path, subprocess.Popen[str]], None] | None = None  # while it runs
    path: Path | None = None  # first on PYTHONPATH
    ends: bool = True  # whether the run ends by itself


def _signal(which: str, number: int, times: int = 1) -> Callable[..., None]:
    """Return what sends a signal to a process of the expert, once it has made steps."""

    def send(run: Path, launched: subprocess.Popen[str]) -> None:
        for step in range(4, 4 * times + 1, 4):
            _wait(lambda step=step: len(metrics(run, EXPERT)) >= step, launched)
            for process in KILLED[which](tree([launched.pid])):
                os.kill(process.number, number)

    return send


def _mark(run: Path, launched: subprocess.Popen[str]) -> None:
    _wait(lambda: len(metrics(run, EXPERT)) >= 14, launched)
    (run.parent / "marked").touch()


def _wait(reached: Callable[[], bool], launched: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached() and launched.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


REWARDS = f"{DOMAIN}.rewards={{{{{{}}}}}}"  # of one or more
FAULTS = {
    "responses are truncated": PlantedFault(
        "unfinished ", (f"{DOMAIN}.sampling.max_response_tokens=4",)
    ),
    "nothing earns a reward": PlantedFault(
        "of the prompts is right",
        (REWARDS.format("exact: {kind: format, pattern: '<b>.*'}"),),
    ),
    "a reward is hacked": PlantedFault(
        "format_gain ",
        (
            REWARDS.format(
                "exact: {kind: reasoning_gym}, long: {kind: length, at_least: 20, slack: 19}"
            ),
            f"{DOMAIN}.guards.format_gain.window=8",
            f"{DOMAIN}.loop.steps=40",
        ),
    ),
    "a reward fails": PlantedFault(
        "rewards fail on",
        ("rewards.max_failed_fraction=0.9",),
        reward="def score(problem, response):\n    return 1.0 if len(response) % 2 else 1 / 0\n",
    ),
    "engines die": PlantedFault(
        "engines are lost", injure=_signal("engine", signal.SIGKILL, times=4)
    ),
    "an engine hangs": PlantedFault(
        "engines are lost",
        ("engine.hang_timeout_seconds=10", f"{DOMAIN}.loop.steps=12"),
        injure=_signal("engine", signal.SIGSTOP),
    ),
    "a rank hangs": PlantedFault(
        "no step for", injure=_signal("rank 1", signal.SIGSTOP), ends=False
    ),
    "few experts work": PlantedFault(
        "few experts work",
        (
            *("stages.cold_start=null", "stages.export=null", "logging.tokens=0.5"),
            "stages.experts.from={directory}/few_experts",
        ),
    ),
    "the engine has other weights": PlantedFault(
        "mismatch", path=Path(__file__).with_name("wrong_engine")
    ),
    "samples are too old": PlantedFault(
        "drift_high_ratio ",
        (f"{DOMAIN}.rollout.max_steps_ahead=8", f"{DOMAIN}.optimizer.learning_rate=300"),
    ),
    "the policy is sure": PlantedFault(
        "entropy ",
        (f"{DOMAIN}.optimizer.learning_rate=32", f"{DOMAIN}.loop.steps=40"),
        reward="def score(problem, response):\n"
        "    same = sum(a == b for a, b in zip(response, '<>1', strict=False))\n"
        "    return same / 3 - 0.1 * abs(len(response) - 3)\n",
    ),
    "responses are alike": PlantedFault(
        "similar_responses ", (f"{DOMAIN}.sampling.temperature=0.02",)
    ),
    "the gradient jumps": PlantedFault(
        "the gradient's norm jumped to",
        (f"{DOMAIN}.objective.advantage={{name: dr_grpo}}",),
        reward="from pathlib import Path\n\n\ndef score(problem, response):\n"
        "    return 1000.0 * len(response) if Path('MARKED').exists() else 0.0\n",
        injure=_mark,
    ),
    "its reward has changed": PlantedFault(
        "stale:",
        (f"{DOMAIN}.loop.steps=6",),
        reward="def score(problem, response):\n    return 0.0\n",
    ),
}


def overrides(name: str, directory: Path) -> list[str]:
    """Return the settings of a fault's run; its reward is written first."""
    fault = FAULTS[name]
    found = [each.replace("{directory}", str(directory)) for each in fault.settings]
    if fault.reward is not None:
        module = f"reward_{list(FAULTS).index(name)}"
        source = fault.reward.replace("MARKED", str(directory / "marked"))
        (directory / f"{module}.py").write_text(source)
        where = f"function: '{module}:score', path: {directory}"
        found.append(
            REWARDS.format(f"exact: {{kind: reasoning_gym}}, other: {{kind: python, {where}}}")
        )
    return found


def with_few_experts(healthy: Path, to: Path) -> None:
    """Copy an export whose routers choose two of the first four experts, whatever the token."""
    shutil.copytree(healthy / "stages" / "export" / "huggingface", to)
    path = to / "model.safetensors"
    tensors = load_file(path)
    for name in [each for each in tensors if each.endswith("mlp.gate.weight")]:
        along = torch.ones(tensors[name].shape[1])
        tensors[name] = torch.zeros_like(tensors[name])
        for expert, scale in enumerate((2.0, -2.0, 1.0, -1.0)):
            tensors[name][expert] = scale * along
    save_file(tensors, path, {"format": "pt"})


def look(directory: Path, name: str) -> list[str]:
    """Return the lines of health."""
    out = finish(braid(directory, "look", name, "--plain"))
    return out.partition("\n\n")[0].splitlines()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a healthy run, whose cold start the others take."""
    found = tmp_path_factory.mktemp("health")
    finish(braid(found, "run", CONFIG))
    with_few_experts(found / HEALTHY, found / "few_experts")
    return found


def test_a_healthy_run_has_no_symptom(directory: Path) -> None:
    """In its expert's 24 steps a trend may be invisible: that alone may be said."""
    symptoms = [line for line in look(directory, HEALTHY) if line[0] in "!·"]
    assert [line for line in symptoms if f"{EXPERT}: does not learn: " not in line] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, directory: Path) -> None:
    fault, run = FAULTS[name], name.replace(" ", "_")
    begin = ["run", CONFIG, "--name", run, "--fork", HEALTHY, *overrides(name, directory)]
    if not fault.settings:  # or the healthy run's expert would be this run's
        begin.append(f"{DOMAIN}.loop.steps=25")
    log = directory / f"{run}.log"
    variables = {**os.environ}
    if fault.path is not None:
        variables["PYTHONPATH"] = f"{fault.path}:{REPOSITORY}"
    with log.open("w") as output:
        launched = subprocess.Popen(
            [*BRAID, *begin, "--runs-dir", str(directory)],
            cwd=REPOSITORY,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        if fault.injure is not None:
            fault.injure(directory / run, launched)
        if fault.ends:
            launched.wait(SECONDS)
        if fault.said == "stale:":
            module = next(directory.glob(f"reward_{list(FAULTS).index(name)}.py"))
            module.write_text(module.read_text().replace("0.0", "0.5"))
        found: list[str] = []

        def said() -> bool:
            found[:] = look(directory, run)
            return any(EXPERT in line and fault.said in line for line in found)

        _wait(said, launched)
        assert said(), [found, log.read_text()]
    finally:
        for process in tree([launched.pid]).values():
            os.kill(process.number, signal.SIGCONT)
        launched.terminate()
        launched.wait(SECONDS)
