"""A model of two domains is quantized, gated and evaluated, in a run of real processes.

The same run shows the addresses that such processes listen on.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest

from parallel.files import read_checkpoint
from stages.directory import StageDirectory
from stages.statistics import Answers, paired_difference
from tests.end_to_end.process_tree import KILLED, tree
from tests.sockets import listening
from tests.warm_runs import WarmBraid

CONFIG = Path(__file__).with_name("quantized.yaml")
DOMAINS = ["chain_sum", "spell_backward"]
# Messages, since shared memory needs no store; two engine ranks, which have a group of vLLM's.
ARGUMENTS = ("engine.tensor=2", "engine.transport=messages")
ROLES = ("rank 0", "rank 1", "engine", "engine's child")
LOOK_SECONDS = 0.5  # a look at /proc takes 0.1 s of CPU time

Addresses = dict[str, set[str]]  # by the process's role, or "other"


@dataclass(frozen=True)
class QuantizedRun:
    """A finished run, what it printed, and the addresses that its processes listened on."""

    path: Path
    output: str
    addresses: Addresses


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warm_braid: WarmBraid) -> QuantizedRun:
    directory = tmp_path_factory.mktemp("quantized")
    with watched_addresses() as addresses:
        output = warm_braid(directory, "run", str(CONFIG), *ARGUMENTS)
    return QuantizedRun(directory / "quantized", output, addresses)


@contextmanager
def watched_addresses() -> Iterator[Addresses]:
    """Collect the addresses that the processes below this one listen on."""
    addresses: Addresses = {}
    ended = Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            processes = tree([os.getpid()])
            roles = {each.number: role for role in ROLES for each in KILLED[role](processes)}
            for number in processes:
                addresses.setdefault(roles.get(number, "other"), set()).update(listening(number))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield addresses
    finally:
        ended.set()
        thread.join()


def test_nothing_of_a_run_on_one_machine_is_reached_from_another(run: QuantizedRun) -> None:
    assert all(run.addresses.get(role) for role in ROLES), run.addresses
    addresses = set.union(*run.addresses.values())
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), run.addresses


def test_accuracy_is_measured_before_and_after_on_every_domain(run: QuantizedRun) -> None:
    path, said = run.path, run.output
    gate = StageDirectory(path / "stages" / "gates.quantized")
    models = ("cold_start", "quantized")
    before, after = (json.loads((gate.solved / f"{name}.json").read_text()) for name in models)
    assert list(before) == list(after) == DOMAINS
    verdict = json.loads(gate.verdict.read_text())
    assert verdict["outcome"] == "passed"
    for domain, reason in zip(DOMAINS, verdict["reasons"], strict=True):
        answers = Answers(before[domain]), Answers(after[domain])
        lost = 100 * paired_difference(*answers).difference
        change = f"loses {lost:+.1f}" if lost >= 0 else f"gains {-lost:.1f}"
        assert reason.startswith(f"quantized {change} points ")
        assert f" cold_start on {domain}" in reason and reason in " ".join(said.split())
    results = json.loads(StageDirectory(path / "stages" / "evaluate").results.read_text())
    assert list(results["models"]) == ["cold_start", "quantized"]
    assert list(results["models"]["quantized"]) == DOMAINS


def test_it_leaves_a_checkpoint_of_the_run_and_one_for_vllm(run: QuantizedRun) -> None:
    stage = StageDirectory(run.path / "stages" / "quantized")
    assert read_checkpoint(stage.checkpoints / "step_0") is not None
    config = json.loads((stage.exported / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert (stage.exported / "tokenizer.json").is_file()
    assert not list(stage.path.glob(".huggingface.*"))
