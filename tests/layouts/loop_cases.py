"""The training loop of `stages.loop` on the smallest stage, with stops and failures on request."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from parallel.files import whole_checkpoints
from tests.layouts.cases import SPREAD, build, train


class Toy:
    """The smallest stage: cross-entropy on random samples, with failures on request."""

    def __init__(self, poison_at: int | None = None, stop_at: int | None = None) -> None:
        self.policy = build(SPREAD)
        self.poison_at = poison_at
        self.stop_at = stop_at

    def step(self, step: int) -> dict[str, float]:
        from parallel.distributed import is_main, sum_over_data

        if step == self.stop_at and is_main():
            os.kill(os.getpid(), signal.SIGTERM)
        [(loss, norm)] = train(self.policy, range(step, step + 1))
        loss = float("nan") if step == self.poison_at else loss
        return {**sum_over_data({"loss": loss}), "gradient_norm": norm}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert state["step"] > 0


class ToyWatch:
    """A watch whose verdict on the third step is `stop` or `end`."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict

    def observe(self, step: int, metrics: dict[str, float]) -> Any:
        from stages.guards.watch import StepVerdict

        return StepVerdict(**({self.verdict: "enough"} if step == 3 else {}))


def loop(
    directory: str,
    poison_at: int | None,
    stop_at: int | None,
    asynchronous: bool = True,
    verdict: str | None = None,
) -> tuple[str, list[str]]:
    """Run the loop; return its ending and the whole checkpoints it leaves."""
    from stages.domains import LoopSettings
    from stages.loop import train as run_loop
    from stages.settings import LoggingSettings, RunSettings, StageJob

    settings = RunSettings.model_construct(name="toy", seed=0, logging=LoggingSettings(trackers=()))
    job = StageJob.model_construct(
        stage="toy", directory=Path(directory), attempt=1, parent=None, settings=settings
    )
    ending = "done"
    steps = LoopSettings(steps=5, checkpoint_every=2, async_checkpoints=asynchronous)
    try:
        watch: Any = ToyWatch(verdict) if verdict else None
        run_loop(Toy(poison_at, stop_at), job, steps, watch)
    except Exception as error:
        ending = f"{type(error).__name__}: {error}"
    left = whole_checkpoints(Path(directory) / "checkpoints")
    return ending, [checkpoint.path.name for checkpoint in left]
