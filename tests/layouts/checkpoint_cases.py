"""The cases that ranks run with checkpoints."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.errors import STATUS_DESCRIPTOR
from parallel.files import CheckpointError, whole_checkpoints
from parallel.settings import LayoutSettings, OptimizerSettings
from tests.layouts.cases import SGD, SPREAD, build, train
from tests.layouts.loop_cases import loop

STEPS = 3  # before a checkpoint, and again after it
# A smaller rate than elsewhere: Adam's first steps have the size of the learning rate, whatever the
# gradient's size, and would amplify the rounding of small gradients.
ADAM = OptimizerSettings(learning_rate=1e-3, warmup_steps=2, decay="cosine")


@dataclass(frozen=True)
class Kind:
    """A kind of optimizer."""

    settings: OptimizerSettings
    distributed: bool = False

    def build(self, layout: LayoutSettings, seed: int = 0) -> Any:
        layout = layout.model_copy(update={"distributed_optimizer": self.distributed})
        return build(layout, self.settings, seed)


KINDS = {
    "adam_distributed": Kind(ADAM, distributed=True),
    "adam_on_host": Kind(ADAM.model_copy(update={"cpu_offload": 0.5}), distributed=True),
    "adam": Kind(ADAM),
    "sgd": Kind(SGD),
}


def begin(layout: LayoutSettings, kind: str, directory: str) -> None:
    """Train a few steps and save."""
    policy = KINDS[kind].build(layout)
    list(train(policy, range(STEPS)))
    save(policy, Path(directory), STEPS, {"cursor": 7})


def continue_training(
    layout: LayoutSettings, kind: str, directory: str, again: str, expected: dict[str, Any]
) -> dict[str, float]:
    """Save a loaded checkpoint again and train on; return differences from `expected`."""
    from parallel.checkpoint import load

    policy = KINDS[kind].build(layout, seed=1)
    found, errors = load.newest_intact(Path(directory))
    state = load.training_state(policy, found)
    assert (errors, state) == ([], {"cursor": 7, "step": STEPS, "score": None})
    save(policy, Path(again), STEPS, {})
    rate = policy.learning_rate
    losses = list(losses_of(policy, range(STEPS, 2 * STEPS)))
    return {
        "rate": abs(rate - expected["rate"]),
        "losses": float(np.abs(np.subtract(losses, expected["losses"])).max()),
        "weights": farthest_weight(policy, expected["weights"]),
    }


def equal_contents(directories: list[str]) -> bool:
    """Return true if two checkpoints hold equal tensors under equal names, bit for bit."""
    from megatron.core import dist_checkpointing

    found = []
    for directory in directories:
        values = dist_checkpointing.load_plain_tensors(f"{directory}/step_{STEPS}")
        found.append({name: value for name, value in values.items() if torch.is_tensor(value)})
    one, other = found
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def never_stop(kind: str) -> dict[str, Any]:
    """Return the results of one rank that trains without interruption."""
    policy = KINDS[kind].build(LayoutSettings())
    list(train(policy, range(STEPS)))
    rate = policy.learning_rate
    losses = list(losses_of(policy, range(STEPS, 2 * STEPS)))
    weights = {
        name: tensor.detach().numpy() for name, tensor in policy.chunks[0].named_parameters()
    }
    return {"rate": rate, "losses": losses, "weights": weights}


def losses_of(policy: Any, steps: range) -> Iterator[float]:
    from parallel.distributed import sum_over_data

    for loss, _ in train(policy, steps):
        yield sum_over_data({"loss": loss})["loss"]


def own_part(name: str, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor; all of a critic's head, whatever its name says."""
    from parallel.model.parameters import shard, tensor_split

    return whole if whole.shape == parameter.shape else shard(name, whole, *tensor_split(name))


def farthest_weight(policy: Any, expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference of this rank's shards from whole tensors under global names."""
    from parallel.model.parameters import global_name

    largest = 0.0
    for chunk in policy.chunks:
        for name, parameter in chunk.named_parameters():
            whole = torch.from_numpy(expected[global_name(chunk, name)])
            difference = parameter.detach() - own_part(name, parameter, whole)
            largest = max(largest, difference.abs().max().item())
    return largest


def save(policy: Any, directory: Path, step: int, state: dict[str, Any], **saver: Any) -> None:
    from parallel.checkpoint.save import Saver

    saver = Saver(directory, asynchronous=False, **saver)
    saver.begin(policy, step, state)


def resumes_bit_for_bit(layout: LayoutSettings, kind: str, directory: str) -> bool:
    """Return true if training resumes bit for bit, including random numbers and another save."""
    from parallel.checkpoint import load
    from parallel.files import newest_whole

    torch.use_deterministic_algorithms(True)
    policy = KINDS[kind].build(layout)
    list(train(policy, range(STEPS)))
    save(policy, Path(directory), STEPS, {})
    expected = [*train(policy, range(STEPS, 2 * STEPS)), torch.rand(1).item()]
    resumed = KINDS[kind].build(layout, seed=1)
    load.training_state(resumed, Path(directory) / f"step_{STEPS}")
    save(resumed, Path(directory) / "again", STEPS, {})
    first, again = newest_whole(Path(directory)), newest_whole(Path(directory) / "again")
    assert first and again and first.files == again.files  # `braid diff` compares their digests
    found = [*train(resumed, range(STEPS, 2 * STEPS)), torch.rand(1).item()]
    torch.use_deterministic_algorithms(False)
    return found == expected and same(snapshot(policy), snapshot(resumed))


def snapshot(policy: Any) -> list[torch.Tensor]:
    """Return copies of all tensors of this rank's policy that training changes."""
    found = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            found.append(torch.tensor([group["lr"], group.get("step", 0)]))
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter, *(state[name] for name in sorted(state))]
    return [tensor.detach().clone() for tensor in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def training_does_not_leak(layout: LayoutSettings, kind: str, directory: str) -> dict[str, bool]:
    """Save synchronously, then asynchronously with training before the files are written."""
    from parallel.checkpoint import load
    from parallel.checkpoint import save as checkpoint_saver

    policy = KINDS[kind].build(layout)
    list(train(policy, range(STEPS)))
    before = snapshot(policy)
    save(policy, Path(directory) / "at_once", STEPS, {})
    saver = checkpoint_saver.Saver(Path(directory) / "beside")
    with held_back(checkpoint_saver._Writing) as go:
        saver.begin(policy, STEPS, {})
        list(train(policy, range(STEPS, STEPS + 2)))
        writing = saver.writing
        go.set()
        saver.finish()
    loaded = {}
    for name in ("at_once", "beside"):
        other = KINDS[kind].build(layout, seed=1)
        load.training_state(other, Path(directory) / name / f"step_{STEPS}")
        loaded[name] = same(snapshot(other), before)
    trained_on = not same(snapshot(policy), before)
    return {**loaded, "trained_on": trained_on, "writing": writing, "done": not saver.writing}


@contextlib.contextmanager
def held_back(writing: Any) -> Iterator[threading.Event]:
    """Delay the writing of a started checkpoint until the event is set."""
    go, run = threading.Event(), writing.run

    def wait_and_run(self: Any) -> None:
        go.wait()
        run(self)

    writing.run = wait_and_run
    try:
        yield go
    finally:
        writing.run = run


def retain(directory: str, scores: dict[int, float], keep_last: int, keep_best: int) -> list[str]:
    """Save a checkpoint for each of `scores`; return the names of those kept."""
    from parallel.checkpoint.save import Saver
    from parallel.distributed import any_rank

    policy = build(SPREAD)
    saver = Saver(Path(directory), keep_last=keep_last, keep_best=keep_best)
    for step, score in scores.items():
        saver.begin(policy, step, {}, score)
    saver.finish()
    while any_rank(saver.writing)[0]:
        pass
    return [checkpoint.path.name for checkpoint in whole_checkpoints(Path(directory))]


def save_on_a_full_disk(directory: str, full: int) -> tuple[str, bool]:
    """Save while one rank's files cannot grow; return the error and whether all ranks ended."""
    from parallel.checkpoint.save import Saver
    from parallel.distributed import any_rank

    policy = build(SPREAD)
    saver = Saver(Path(directory))
    saver.begin(policy, 1, {})
    saver.finish()
    message = ""
    with files_of_at_most(4096 if int(os.environ["RANK"]) == full else None):
        saver.begin(policy, 2, {})
        while any_rank(saver.writing)[0]:
            pass
        try:
            saver.finish()
        except CheckpointError as error:
            message = str(error)
    save(policy, Path(directory), 3, {})  # the disk has room again
    return message, (Path(directory) / "tmp_step_2").exists()


def load_what_one_rank_does_not_see(directory: str, blind: int) -> str:
    """Load where one rank's file system lacks the metadata; return the error, or ""."""
    from parallel.checkpoint import load
    from parallel.distributed import on_main

    policy, checkpoint = build(SPREAD), Path(directory) / "step_1"
    save(policy, Path(directory), 1, {})
    stale = Path(directory) / "stale"
    on_main(lambda: shutil.copytree(checkpoint, stale))
    on_main((stale / ".metadata").unlink)
    try:
        load.training_state(policy, stale if int(os.environ["RANK"]) == blind else checkpoint)
    except CheckpointError as error:
        return str(error).replace(str(stale), str(checkpoint))
    return ""


@contextlib.contextmanager
def files_of_at_most(size: int | None) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def die_while_writing(directory: str, victim: int) -> None:
    """Kill one rank when all have begun to write and none is done."""
    from parallel.checkpoint.save import Saver, _Writing

    saver = Saver(Path(directory), keep_last=2)
    policy = build(SPREAD)
    saver.begin(policy, 1, {})
    saver.finish()
    with held_back(_Writing) as go:
        saver.begin(policy, 2, {})
        if int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        go.set()
        saver.finish()


def load_weights(checkpoint: str) -> str:
    """Return the error of loading another stage's result, or ""."""
    from parallel.checkpoint import load

    try:
        load.weights(build(SPREAD), Path(checkpoint))
    except CheckpointError as error:
        return str(error)
    return ""


def find_newest(directory: str) -> str:
    """Return the newest whole checkpoint and the damage of newer ones, or the error."""
    from parallel.checkpoint import load

    try:
        found, errors = load.newest_intact(Path(directory))
    except OSError as error:
        return str(error)
    return f"{found}; {errors}"


def loop_and_listen(directory: str) -> tuple[str, list[str], str]:
    """Run the loop; return its ending, its checkpoints and this rank's status lines."""
    with tempfile.TemporaryFile() as heard:
        os.environ[STATUS_DESCRIPTOR] = str(heard.fileno())
        try:
            ending, left = loop(directory, None, None)
        finally:
            del os.environ[STATUS_DESCRIPTOR]
        heard.seek(0)
        return ending, left, heard.read().decode()


def modules_with_the_real_torch(directory: str) -> list[str]:
    """Return Megatron's modules that would call CUDA, after a save and a load."""
    import sys

    from parallel.cpu.megatron import SCOPED_PACKAGES

    policy = KINDS["adam_distributed"].build(SPREAD)
    save(policy, Path(directory), 1, {})
    assert load_weights(str(Path(directory) / "step_1")) == ""
    modules = [name for name in sys.modules if name.split(".")[0] in SCOPED_PACKAGES]
    return [name for name in modules if getattr(sys.modules[name], "torch", None) is torch]
