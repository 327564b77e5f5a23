"""A stage's side of the rollout engine: refit it, and draw samples from it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from safetensors.torch import save

from parallel.rollout.wire import Address, Failure, Generate, Generated, Prompt
from parallel.sample import Sample
from parallel.settings import EngineSettings

Answer = TypeVar("Answer")


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a call."""


class EngineClient:
    """Talks to one engine; the launcher owns the engine's process."""

    def __init__(self, address_file: Path, settings: EngineSettings) -> None:
        """Wait for the engine to be ready.

        Raises EngineError after `start_timeout_seconds`.
        """
        deadline = time.monotonic() + settings.start_timeout_seconds
        while not address_file.exists():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine was not ready after {settings.start_timeout_seconds} s "
                    f"(engine.start_timeout_seconds); it would have written {address_file}"
                )
            time.sleep(0.1)
        self.address = msgspec.json.decode(address_file.read_bytes(), type=Address)
        self.timeout = settings.request_timeout_seconds

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights; `weights` streams Hugging Face tensors, layer by layer."""
        self._call("begin_refit", b"", None)
        for chunk in _by_layer(weights):
            self._call("load_chunk", save(chunk), None)
        self._call("finish_refit", msgspec.msgpack.encode(version), None)

    def generate(self, domain: str, request: Generate) -> list[Sample]:
        """Samples of every prompt, grouped by prompt in the order asked."""
        answer = self._call("generate", msgspec.msgpack.encode(request), Generated)
        prompts = [np.asarray(prompt.tokens, np.int32) for prompt in request.prompts]
        return [
            Sample(
                domain=domain,
                prompt=prompts[generation.prompt],
                response=np.frombuffer(generation.tokens, np.int32),
                logprobs=np.frombuffer(generation.logprobs, np.float32),
                routes=np.frombuffer(generation.routes, np.uint16).reshape(generation.routes_shape),
                finished=generation.finished,
                weight_version=answer.weight_version,
            )
            for generation in answer.generations
        ]

    def _call(self, name: str, body: bytes, answer_type: type[Answer] | None) -> Answer | Any:
        connection = http.client.HTTPConnection(
            self.address.host, self.address.port, timeout=self.timeout
        )
        try:
            headers = {"Authorization": f"Bearer {self.address.token}"}
            connection.request("POST", f"/{name}", body, headers)
            response = connection.getresponse()
            data = response.read()
        except TimeoutError as error:
            raise EngineError(
                f"the engine did not answer {name} within {self.timeout} s"
                " (engine.request_timeout_seconds)"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the engine did not answer {name}: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            failure = msgspec.msgpack.decode(data, type=Failure)
            raise EngineError(f"the engine refused {name}: {failure.error}")
        return msgspec.msgpack.decode(data, type=answer_type or Any)


def prompts_of(tokens: list[list[int]], samples: int, seed: int) -> list[Prompt]:
    """Prompts whose seeds are spaced so that no two samples of one call share one."""
    return [Prompt(ids, samples, seed + index * samples) for index, ids in enumerate(tokens)]


def _by_layer(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Chunks that hold whole layers, since vLLM fuses modules within one."""

    def layer(item: tuple[str, torch.Tensor]) -> str:
        parts = item[0].split(".")
        return parts[2] if "layers" in parts else item[0]

    for _, group in groupby(weights, key=layer):
        yield {name: tensor.cpu() for name, tensor in group}
