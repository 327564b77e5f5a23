"""Responses of engines as samples, and transformers' log-probabilities of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from parallel.engine.client import EngineClient
from parallel.engine.wire import (
    Generate,
    Generation,
    GenerationRequest,
    Prompt,
    Sampling,
    sample_of,
)
from parallel.hugging_face.config import hugging_face_config
from parallel.sample import Sample
from parallel.settings import ModelSettings
from tests.engine.engine_settings import MODEL

LONG = list(range(2, 40))  # longer than a cache block, so that its prefix is cached
PROMPTS = [LONG, [*LONG, 50], [5, 6, 7]]
SAMPLES = 4  # of each
SAMPLING = Sampling(temperature=1.0, max_tokens=12, end_tokens=(1,))
TIE = 1e-4  # of routers' logits; without one log-probabilities differ by 1e-5 at most


def request(sampling: Sampling = SAMPLING, seed: int = 0) -> Generate:
    """Return a request for SAMPLES responses to each prompt, each with another seed."""
    each = [tokens for tokens in PROMPTS for _ in range(SAMPLES)]
    return Generate([Prompt(i, tokens, seed + i) for i, tokens in enumerate(each)], sampling)


def long_request() -> Generate:
    """Return a request that an engine samples for half a minute, 64 responses at a time.

    However long a busy machine stops the client after the first response, others are left.
    """
    long = request(replace(SAMPLING, max_tokens=200))
    repeated = [prompt for _ in range(100) for prompt in long.prompts]
    prompts = [Prompt(i, prompt.tokens, i) for i, prompt in enumerate(repeated)]
    return Generate(prompts, long.sampling)


def draw(
    client: EngineClient,
    sampling: Sampling = SAMPLING,
    seed: int = 0,
    model: ModelSettings = MODEL,
) -> list[Sample]:
    """Return samples in the order of their prompts."""
    asked = request(sampling, seed)
    return as_samples(client.generate(asked), asked, model)


def as_samples(drawn: Iterable[Generation], asked: Generate, model: ModelSettings) -> list[Sample]:
    """Return samples in the order of their prompts; raise if one is missing or invalid."""
    answers = {each.number: each for each in drawn}
    return [
        sample_of(
            GenerationRequest("a", prompt.tokens, prompt.seed, asked.sampling),
            answers.pop(prompt.number),
            model,
        )
        for prompt in asked.prompts
    ]


class DrawingReference:
    """transformers' model with a policy's weights."""

    def __init__(self, settings: ModelSettings, weights: dict[str, np.ndarray]) -> None:
        config = hugging_face_config(settings)
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        state = {name: torch.tensor(values) for name, values in weights.items()}
        self.model = kind.from_pretrained(None, config=config, state_dict=state).eval()
        self._chosen: list[torch.Tensor] = []
        self._margins: list[torch.Tensor] = []
        for name, module in self.model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                module.register_forward_hook(self._note)

    def _note(self, _module: Any, _given: Any, found: Any) -> None:
        logits, _, chosen = found
        self._chosen.append(chosen.sort(-1).values)
        ranked = logits.sort(-1, descending=True).values
        self._margins.append(ranked[:, chosen.shape[-1] - 1] - ranked[:, chosen.shape[-1]])

    @torch.no_grad()
    def read(self, sample: Sample) -> tuple[torch.Tensor, np.ndarray]:
        """Return the response's logits and the sorted experts of every token but the last.

        [response, vocabulary] and [length, layers, experts_per_token].
        """
        self._chosen.clear()
        self._margins.clear()
        tokens = torch.tensor(np.concatenate([sample.prompt, sample.response]))[None, :-1]
        logits = self.model(tokens).logits[0, len(sample.prompt) - 1 :]
        return logits, torch.stack(self._chosen, 1).numpy()

    def differences(self, sample: Sample, temperature: float = 1.0) -> np.ndarray:
        """Return |log mu - log pi| of every token, in nats."""
        expected = (self.read(sample)[0] / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(sample.response, dtype=torch.int64)[:, None])
        assert sample.logprobs is not None
        return (chosen[:, 0] - torch.tensor(sample.logprobs)).abs().numpy()

    def certain(self, sample: Sample) -> np.ndarray:
        """Return true for response tokens before any tie between routed experts, bool [response].

        Rounding decides a tie, and with it everything that follows.
        """
        self.read(sample)
        clear = torch.stack(self._margins, 1).amin(1).numpy() > TIE
        return np.logical_and.accumulate(clear)[len(sample.prompt) - 1 :]

    def largest_difference(self, drawn: list[Sample], temperature: float = 1.0) -> float:
        return max(self.differences(each, temperature).max() for each in drawn)
