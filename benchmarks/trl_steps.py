"""GRPO steps a minute of TRL's GRPOTrainer on this machine's cores, and where their time goes.

    .venv-trl/bin/python benchmarks/trl_steps.py --size b --steps 3

Needs an environment of its own: `make bench-trl` builds it and runs both sizes. TRL compiles a part
of its loss in the first steps, which are left out. Leave the machine alone meanwhile: its two
threads wait for each other, and one that is held up holds up both. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from statistics import mean, median
from typing import Any

import torch
from datasets import Dataset
from grpo_workload import WORKLOADS, Workload, prompts, reward, starting_model
from machine import measured
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stages.data.tokenizer import CharacterTokenizer

WARM_UP_STEPS = 2
# What was fastest of what TRL offers on a CPU without vLLM. Besides, continuous batching takes five
# times the processor at (a) and as much at (b); other experts than transformers' grouped products,
# and other attention than its fused one, are no faster; and so is any other number of responses
# trained on at once.
FASTEST: dict[str, dict[str, Any]] = {
    "a": {"per_device_train_batch_size": 256},
    "b": {"per_device_train_batch_size": 32, "cache_implementation": "static"},
}


class StepClock:
    """Gives every second to the innermost phase that is open; outside of all it is `rest`."""

    def __init__(self) -> None:
        self._open = ["rest"]
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside, except for phases within it."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; they sum to all that passed."""
        self._charge()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, unchanged but for the clock around its parts."""

    def __init__(self, clock: StepClock, **arguments: Any) -> None:
        self._clock = clock
        super().__init__(**arguments)

    def _prepare_inputs(self, *arguments: Any, **keywords: Any) -> Any:
        with self._clock.phase("rewards_and_batches"):
            return super()._prepare_inputs(*arguments, **keywords)

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        with self._clock.phase("generation"):
            return super()._generate_single_turn(*arguments, **keywords)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        with self._clock.phase("log_probabilities"):
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        with self._clock.phase("loss_and_backward"):
            return super().training_step(*arguments, **keywords)


class Laps(TrainerCallback):
    """Seconds by phase of every step, from the end of one to the end of the next."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """What came before belongs to no step."""
        self._clock.lap()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        self.steps.append(self._clock.lap())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, default=10, help="measured, after 2 of warm-up")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr):  # the trainer prints its logs
        report = measure(arguments.size, arguments.steps)
    print(json.dumps(report, indent=1))


def measure(size: str, steps: int) -> dict[str, Any]:
    """Medians over the measured steps, and the lengths that they generated."""
    workload, clock = WORKLOADS[size], StepClock()
    laps = Laps(clock)
    total = WARM_UP_STEPS + steps
    with tempfile.TemporaryDirectory() as directory:
        trainer = TimedTrainer(
            clock=clock,
            model=starting_model(workload),
            args=configuration(workload, FASTEST[size], total, directory),
            processing_class=CharacterTokenizer().hugging_face(),
            reward_funcs=rewards,
            train_dataset=Dataset.from_dict({"prompt": prompts(workload.prompts_per_step * total)}),
            callbacks=[laps],
        )
        trainer.train()
    timed = laps.steps[WARM_UP_STEPS:]
    logs = trainer.state.log_history[WARM_UP_STEPS:total]  # the last one is a summary
    seconds = [sum(lap.values()) for lap in timed]
    return {
        **measured(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "size": size,
        "rollouts": workload.rollouts,
        "steps": steps,
        "seconds_a_step": median(seconds),
        "slowest_step_seconds": max(seconds),
        "steps_a_minute": 60 / median(seconds),
        "response_tokens": mean(log["completions/mean_length"] for log in logs),
        "longest_response_tokens": max(log["completions/max_length"] for log in logs),
        "cut_off_fraction": mean(log["completions/clipped_ratio"] for log in logs),
        "phases": {name: median(lap[name] for lap in timed) for name in sorted(timed[0])},
    }


def configuration(
    workload: Workload, fastest: dict[str, Any], steps: int, directory: str
) -> GRPOConfig:
    """Braid's objective for `chain_sum`: GSPO without a KL term, one update for each rollout."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        gradient_accumulation_steps=workload.rollouts // fastest["per_device_train_batch_size"],
        num_generations=workload.group_size,
        max_completion_length=workload.max_response_tokens,
        shuffle_dataset=False,
        temperature=1.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=1e-9,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **fastest,
    )


def rewards(completions: list[str], **_: Any) -> list[float]:
    """The reward in the form that TRL calls."""
    return [reward(completion) for completion in completions]


if __name__ == "__main__":
    main()
