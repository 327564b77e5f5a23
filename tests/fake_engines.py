"""Engines that answer at once, one by one, and fail in every way that an engine can; and toy stages
that sample from them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from parallel.engine.client import EngineError, EngineRefused
from parallel.engine.wire import (
    PROTOCOL,
    EngineDescription,
    Generate,
    Generation,
    Prompt,
    Sampling,
)
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from stages.domains import DomainSettings
from stages.kinds.grpo.settings import GrpoSettings
from stages.rewards.reward import RewardPoolSettings
from stages.settings import LoggingSettings, RunSettings, StageJob

MODEL = ModelSettings(
    vocabulary_size=80,
    hidden_size=32,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_hidden_size=16,
)
EXPERTS = GrpoSettings.model_validate({"from": "cold_start", "for_each": "domain"})
PROMPTS, GROUP = 4, 4  # of a step of a toy domain


def answer(prompt: Prompt, sampling: Sampling, first: int, last: int | None = None) -> Generation:
    """Return a response that depends on the prompt and its seed alone.

    Its first half is sampled with the weights `first`, the rest with `last`.
    """
    draw = np.random.default_rng(prompt.seed)
    length = int(draw.integers(1, sampling.max_tokens + 1))
    tokens = draw.integers(2, 70, length, dtype=np.int32)
    finished = length < sampling.max_tokens
    if finished:
        tokens[-1] = sampling.end_tokens[0]
    shape = (len(prompt.tokens) + length - 1, MODEL.layers, MODEL.experts_per_token)
    return Generation(
        number=prompt.number,
        tokens=tokens.tobytes(),
        logprobs=(-draw.random(length, np.float32)).tobytes(),
        # A router never chooses an expert twice: megatron-core counts tokens x experts_per_token.
        routes=np.broadcast_to(np.arange(shape[-1], dtype=np.uint16), shape).tobytes(),
        routes_shape=shape,
        finished=finished,
        versions=np.array(
            [first] * (length // 2) + [last or first] * (length - length // 2), np.int32
        ).tobytes(),
    )


@dataclass(eq=False)
class FakeEngine:
    """A fake engine; `trouble` may give, before every answer, what happens instead."""

    name: str = "engine 0"
    trouble: Callable[[Prompt], str | None] = lambda prompt: None
    pace: float = 0.0  # seconds between answers
    version: int = 1
    instance: int = 0
    requests: list[Generate] = field(default_factory=list)
    drawn: Counter[int] = field(default_factory=Counter)
    well: bool = True
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def generate(self, request: Generate) -> Iterator[Generation]:
        self.requests.append(request)
        begun = self.version
        for prompt in request.prompts:
            time.sleep(self.pace)
            trouble = self.trouble(prompt)
            if trouble == "dies":
                raise EngineError(f"{self.name} broke off")
            if trouble == "refuses":
                raise EngineRefused(f"{self.name} refused")
            if trouble == "ends":
                return
            self.drawn[prompt.seed] += 1
            given = answer(prompt, request.sampling, begun, self.version)
            if trouble == "garbage":
                given = msgspec.structs.replace(given, logprobs=given.logprobs[:-1])
            if trouble == "waits":
                self.gate.wait(10)
            yield given
            if trouble == "repeats":
                yield given

    def healthy(self) -> bool:
        return self.well


class FakeFleet:
    """Any number of fake engines; `restart` brings lost ones back, as a refit does."""

    def __init__(self, *engines: FakeEngine, sequences: int = 8) -> None:
        self.engines = engines
        self.sequences = sequences
        self.reasons: list[str] = []
        self.gone: set[FakeEngine] = set()

    @property
    def descriptions(self) -> dict[Any, EngineDescription]:
        return {
            engine: EngineDescription(
                PROTOCOL,
                f"{engine.name}/{engine.instance}",
                [],
                "",
                1,
                False,
                64,
                self.sequences,
                1,
            )
            for engine in self.engines
            if engine not in self.gone
        }

    def live(self) -> list[FakeEngine]:
        return [engine for engine in self.engines if engine not in self.gone]

    def lost(self, client: FakeEngine, reason: str) -> None:
        assert client not in self.gone
        self.reasons.append(reason)
        self.gone.add(client)

    def restart(self) -> None:
        for engine in self.gone:
            engine.instance += 1
        self.gone.clear()


class RefittedFleet(FakeFleet):
    """The fleet that a stage builds from its addresses; refits bring engines back."""

    sleeps = False

    def __init__(self, engines: list[FakeEngine], *_: Any) -> None:
        super().__init__(*engines)
        self.losses = 0
        self.seconds = self.start_seconds = 0.0
        self.versions: list[int] = []

    def lost(self, client: FakeEngine, reason: str) -> None:
        super().lost(client, reason)
        self.losses += 1

    def await_engines(self, make_room: Callable[[], None]) -> None:
        pass

    def refit(self, policy: Any, version: int) -> dict[str, float]:
        self.restart()
        self.versions.append(version)
        for engine in self.engines:
            engine.version = version
        return {}

    def open_caches(self) -> None:
        pass


def toy_domain(**given: Any) -> DomainSettings:
    """Return a domain of short sums, some of whose groups have zero variance.

    Blocks that are given replace the domain's.
    """
    return DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum"},
            "rewards": {
                "parity": {"kind": "python", "function": "tests.stages.small_rewards:parity"}
            },
            "sampling": {
                "prompts_per_step": PROMPTS,
                "group_size": GROUP,
                "max_response_tokens": 8,
            },
            "routing": {"replay": "none"},
            "optimizer": {"learning_rate": 1e-3},
            "loop": {"steps": 4},
            **given,
        }
    )


def toy_run(bound: float = 1e9, **domains: DomainSettings) -> RunSettings:
    """Return a run of one rank.

    Fake engines invent their log-probabilities, which by default no `bound` forbids.
    """
    return RunSettings.model_construct(
        name="toy",
        seed=0,
        deterministic=False,
        model=MODEL,
        layout=LayoutSettings(),
        engine=EngineSettings(max_logprob_difference=bound),
        rewards=RewardPoolSettings(workers=1),
        domains=domains,
        stages={"experts": EXPERTS},
        logging=LoggingSettings(trackers=()),
    )


def toy_job(directory: Path, settings: RunSettings, *engines: FakeEngine, **given: Any) -> StageJob:
    """Return the first attempt of the expert `sums`, or a job with other fields."""
    domain = given.get("domain", "sums")
    fields = {
        "stage": "experts.sums",
        "kind": "grpo",
        "block": "experts",
        "domain": domain,
        "domains": [domain] if domain else list(settings.domains),
        "parent": directory,
        "models": {},
        **given,
    }
    return StageJob.model_construct(
        directory=directory,
        attempt=1,
        engine_addresses=list(engines) or [FakeEngine()],
        settings=settings,
        **fields,
    )
