"""Steps of NeMo-RL 0.6 on H100, as its docs/about/performance-summary.md has them.

The layouts are those of the recipes that its table names, in examples/configs/recipes/llm.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.memory import BYTES, parameter_count
from parallel.roofline.hardware import GPUS, Efficiencies
from parallel.roofline.step import StepSeconds, step_seconds
from parallel.roofline.work import StepWorkload
from parallel.settings import EngineSettings, LayoutSettings
from tests.layouts.real_models import real_model

# NeMo-RL gathers the whole model in a weight sync, which Braid does not: bytes of it a second.
GATHERED = 23.8e9


@dataclass(frozen=True)
class PublishedStep:
    """A step: tokens of the longest sequence and on average, its layout, what was measured.

    `engine` are the tensor-parallel ranks of each engine, `trainers` the ranks of the policy, which
    are all GPUs where engines share them.
    """

    model: str
    gpus: int
    trainers: int
    longest: int
    mean: float
    sequences: int
    of_an_update: int
    engine: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    recompute: str
    tokens_per_second: float  # of a GPU, published for three of them before the others
    seconds: float
    steps_in_flight: int = 1

    def simulated(self, reached: Efficiencies, gathered: float = GATHERED) -> StepSeconds:
        """Return the step's seconds by the roofline."""
        model = real_model(self.model)
        own = self.trainers < self.gpus
        layout = LayoutSettings(
            ranks=self.trainers,
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            pipeline=self.pipeline,
            recompute=self.recompute,
        )
        engine = EngineSettings(
            count=(self.gpus - own * self.trainers) // self.engine,
            tensor=self.engine,
            max_sequences=256,
            max_model_tokens=self.longest,
            placement="own" if own else "shared",
        )
        work = StepWorkload(
            self.sequences,
            self.mean,
            self.longest,
            micro_batch_tokens=self.longest,
            passes=2,
            updates=self.sequences // self.of_an_update,
            steps_in_flight=self.steps_in_flight,
        )
        sync = parameter_count(model)[0] * BYTES[model.precision] / gathered
        return step_seconds(model, layout, engine, work, GPUS["h100"], reached, sync)


_30B, _235B, _671B = "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"
H100 = {
    "30B on 32": PublishedStep(
        *(_30B, 32, 32, 4096, 3203, 2048, 2048), *(2, 1, 1, 8, 1, "none"), *(1102, 192)
    ),
    "235B on 128": PublishedStep(
        *(_235B, 128, 128, 8192, 5698, 512, 512), *(16, 2, 2, 16, 8, "full"), *(58.9, 395)
    ),
    "671B on 256": PublishedStep(
        *(_671B, 256, 256, 1536, 701, 512, 512), *(32, 1, 1, 16, 16, "full"), *(12.1, 134)
    ),
    "30B on 32, asynchronous": PublishedStep(
        *(_30B, 32, 16, 4096, 3201, 2048, 2048), *(2, 1, 1, 8, 2, "none"), *(1414, 152, 2)
    ),
    "30B on 192, asynchronous": PublishedStep(
        *(_30B, 192, 128, 4096, 3206, 2048, 512), *(2, 1, 1, 8, 1, "none"), *(1025, 34.5, 9)
    ),
    "235B on 256": PublishedStep(
        *(_235B, 256, 256, 8192, 5713, 512, 512), *(16, 2, 2, 16, 8, "full"), *(37.4, 312)
    ),
    "235B on 256, asynchronous": PublishedStep(
        *(_235B, 256, 128, 8192, 5721, 512, 512), *(8, 4, 1, 16, 8, "full"), *(58.7, 231, 2)
    ),
    "671B on 512": PublishedStep(
        *(_671B, 512, 512, 1536, 697, 512, 512), *(32, 1, 1, 16, 16, "full"), *(7.24, 111)
    ),
    "671B on 512, asynchronous": PublishedStep(
        *(_671B, 512, 256, 1536, 710, 512, 512), *(32, 1, 1, 16, 16, "full"), *(12.8, 64.1, 2)
    ),
}
