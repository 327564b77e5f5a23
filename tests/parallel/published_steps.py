"""Steps of NeMo-RL 0.6 on H100, as its docs/about/performance-summary.md has them.

The layouts are those of the recipes that its table names, in examples/configs/recipes/llm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel.estimates.roofline.hardware import GPUS, Efficiencies
from parallel.estimates.roofline.step import StepSeconds, step_seconds
from parallel.estimates.roofline.work import StepWorkload
from parallel.estimates.tensor_sizes import BYTES, parameter_count
from parallel.settings import EngineSettings, LayoutSettings
from tests.layouts.real_models import real_model

# NeMo-RL gathers the whole model in a weight sync, which Braid does not: bytes of it a second.
GATHERED = 23.8e9


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A step: its sequences, the layout of the policy and of each engine, what was measured.

    The policy's ranks and the engines share all GPUs where the layout has a rank on each. The
    sequences' tokens are those of prompt and response, their mean and the longest.
    """

    model: str
    sequences: int
    most_tokens: int
    mean_tokens: float
    updates: int = 1
    steps_in_flight: int = 1
    gpus: int
    layout: LayoutSettings
    engine_tensor: int
    tokens_per_second: float  # of a GPU
    seconds: float

    def simulated(self, reached: Efficiencies, gathered: float = GATHERED) -> StepSeconds:
        """Return the step's seconds by the roofline."""
        model = real_model(self.model)
        ranks = self.layout.ranks
        own = ranks < self.gpus
        engine = EngineSettings(
            count=(self.gpus - own * ranks) // self.engine_tensor,
            tensor=self.engine_tensor,
            max_sequences=256,
            max_model_tokens=self.most_tokens,
            placement="own" if own else "shared",
        )
        work = StepWorkload(
            self.sequences,
            self.mean_tokens,
            self.most_tokens,
            row_tokens=self.most_tokens,
            passes=2,
            updates=self.updates,
            steps_in_flight=self.steps_in_flight,
        )
        sync = parameter_count(model)[0] * BYTES[model.precision] / gathered
        return step_seconds(model, self.layout, engine, work, GPUS["h100"], reached, sync)


_30B: dict[str, Any] = {"model": "qwen3-30b-a3b", "sequences": 2048, "most_tokens": 4096}
_235B: dict[str, Any] = {"model": "qwen3-235b-a22b", "sequences": 512, "most_tokens": 8192}
_671B: dict[str, Any] = {"model": "deepseek-v3", "sequences": 512, "most_tokens": 1536}
# fmt: off
H100 = {
    "30B on 32": PublishedStep(
        **_30B, gpus=32, engine_tensor=2, mean_tokens=3203,
        layout=LayoutSettings(ranks=32, expert=8),
        tokens_per_second=1102, seconds=192,
    ),
    "235B on 128": PublishedStep(
        **_235B, gpus=128, engine_tensor=16, mean_tokens=5698,
        layout=LayoutSettings(
            ranks=128, tensor=2, context=2, pipeline=8, expert=16, recompute="full"
        ),
        tokens_per_second=58.9, seconds=395,
    ),
    "671B on 256": PublishedStep(
        **_671B, gpus=256, engine_tensor=32, mean_tokens=701,
        layout=LayoutSettings(ranks=256, pipeline=16, expert=16, recompute="full"),
        tokens_per_second=12.1, seconds=134,
    ),
    "30B on 32, asynchronous": PublishedStep(
        **_30B, gpus=32, engine_tensor=2, mean_tokens=3201, steps_in_flight=2,
        layout=LayoutSettings(ranks=16, pipeline=2, expert=8),
        tokens_per_second=1414, seconds=152,
    ),
    "30B on 192, asynchronous": PublishedStep(
        **_30B, gpus=192, engine_tensor=2, mean_tokens=3206, updates=4, steps_in_flight=9,
        layout=LayoutSettings(ranks=128, expert=8),
        tokens_per_second=1025, seconds=34.5,
    ),
    "235B on 256": PublishedStep(
        **_235B, gpus=256, engine_tensor=16, mean_tokens=5713,
        layout=LayoutSettings(
            ranks=256, tensor=2, context=2, pipeline=8, expert=16, recompute="full"
        ),
        tokens_per_second=37.4, seconds=312,
    ),
    "235B on 256, asynchronous": PublishedStep(
        **_235B, gpus=256, engine_tensor=8, mean_tokens=5721, steps_in_flight=2,
        layout=LayoutSettings(ranks=128, tensor=4, pipeline=8, expert=16, recompute="full"),
        tokens_per_second=58.7, seconds=231,
    ),
    "671B on 512": PublishedStep(
        **_671B, gpus=512, engine_tensor=32, mean_tokens=697,
        layout=LayoutSettings(ranks=512, pipeline=16, expert=16, recompute="full"),
        tokens_per_second=7.24, seconds=111,
    ),
    "671B on 512, asynchronous": PublishedStep(
        **_671B, gpus=512, engine_tensor=32, mean_tokens=710, steps_in_flight=2,
        layout=LayoutSettings(ranks=256, pipeline=16, expert=16, recompute="full"),
        tokens_per_second=12.8, seconds=64.1,
    ),
}
# fmt: on
