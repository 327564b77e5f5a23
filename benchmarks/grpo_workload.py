"""What both sides of the comparison with TRL train: models, prompts, batches, lengths and reward.

The models start with transformers' own small weights. Their next token is close to uniform over
the vocabulary, so a response ends at every token with a chance of about 1/80 and lengths vary
geometrically: alike on both sides whatever draws the tokens, as long as the learning rate is tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from parallel.hugging_face.config import hugging_face_config
from parallel.settings import ModelSettings
from stages.data.prompts import PromptStream
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import CharacterTokenizer

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = ModelSettings(**yaml.safe_load((CONFIGS / "models" / "tiny-moe.yaml").read_text()))
SMALL = TINY.model_copy(
    update={
        "hidden_size": 256,
        "layers": 8,
        "attention_heads": 8,
        "expert_hidden_size": 256,
        "max_positions": 512,
    }
)


@dataclass(frozen=True)
class Workload:
    """One step's rollouts: `group_size` responses to each of `prompts_per_step` prompts."""

    model: ModelSettings
    prompts_per_step: int
    max_response_tokens: int
    group_size: int = 8

    @property
    def rollouts(self) -> int:
        """Responses a step."""
        return self.prompts_per_step * self.group_size


WORKLOADS = {
    "a": Workload(TINY, prompts_per_step=32, max_response_tokens=24),
    "b": Workload(SMALL, prompts_per_step=16, max_response_tokens=256),
}


def starting_model(workload: Workload) -> PreTrainedModel:
    """The same weights at every call, in fp32."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(hugging_face_config(workload.model))


def prompts(count: int) -> list[str]:
    """What the expert of `chain_sum` of a run of seed 0 is asked first, in that order."""
    domain = yaml.safe_load((CONFIGS / "domains" / "chain_sum.yaml").read_text())
    settings = ReasoningGymPromptSettings(**domain["prompts"])
    stream = PromptStream(
        settings, CharacterTokenizer(), "chain_sum", seed=0, purpose="experts.chain_sum"
    )
    return [problem.prompt for problem in stream.take(count)]


def reward(response: str) -> float:
    """The share of digits: costs nothing, and differs within almost every group."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)
