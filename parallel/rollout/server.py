"""The rollout engine: vLLM in a process of its own, kept up from stage to stage.

    python -m parallel.rollout.server ENGINE.json

ENGINE.json is the `EngineJob` that `pipeline.jobs` writes. When the engine is ready it writes its
`Address` to the file named by "address"; until its first refit it refuses to generate.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from parallel.families import routed_layers
from parallel.last_word import say_last_word
from parallel.memory import cache_bytes
from parallel.rollout.wire import Address, Failure, Generate, Generated, Generation
from parallel.settings import EngineSettings, ModelSettings

# How vLLM is run, not what it computes: one process, no compilation, no telemetry, no downloads.
PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}

IDLE_SECONDS = 30  # how long a client that says nothing may hold the only connection
ENGINE_DTYPES: dict[str, Literal["float32"]] = {"fp32": "float32"}


class Engine:
    """One vLLM engine: generate, and be refitted in place."""

    def __init__(self, model: ModelSettings, engine: EngineSettings, seed: int) -> None:
        os.environ.update(PROCESS_ENVIRONMENT)
        from vllm import LLM

        from parallel.hugging_face import hugging_face_config

        self.weight_version: int | None = None
        self.first_routed_layer = routed_layers(model).start
        with tempfile.TemporaryDirectory(prefix="braid-engine-") as directory:
            hugging_face_config(model).save_pretrained(directory)
            self.llm = LLM(
                model=directory,
                load_format="dummy",  # the first refit brings the weights
                skip_tokenizer_init=True,
                dtype=ENGINE_DTYPES[model.precision],
                enforce_eager=True,
                max_model_len=engine.max_model_tokens,
                max_num_seqs=engine.max_sequences,
                kv_cache_memory_bytes=cache_bytes(model, engine),
                logprobs_mode="processed_logprobs",
                enable_return_routed_experts=True,
                enable_prefix_caching=True,
                worker_extension_cls="parallel.rollout.refit_extension.RefitExtension",
                seed=seed,
            )

    def generate(self, body: bytes) -> Generated:
        """Sample responses; raises RuntimeError before the first refit."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if self.weight_version is None:
            raise RuntimeError("the engine has no weights yet; refit it first")
        request = msgspec.msgpack.decode(body, type=Generate)
        sampling = [
            SamplingParams(
                n=prompt.samples,
                seed=prompt.seed,
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                stop_token_ids=[request.end_token],
                logprobs=0,
                detokenize=False,
            )
            for prompt in request.prompts
        ]
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt.tokens) for prompt in request.prompts],
            sampling,
            use_tqdm=False,
        )
        return Generated(
            [
                _generation(index, completion, request.end_token, self.first_routed_layer)
                for index, output in enumerate(outputs)
                for completion in output.outputs
            ],
            self.weight_version,
        )

    def begin_refit(self, _: bytes) -> None:
        """Open the bracket; nothing can be generated until it is closed."""
        self.weight_version = None
        self.llm.collective_rpc("begin_refit")

    def load_chunk(self, body: bytes) -> None:
        """Take a chunk of weights: a safetensors file's bytes."""
        from safetensors.torch import load

        self.llm.collective_rpc("load_chunk", args=(list(load(body).items()),))

    def finish_refit(self, body: bytes) -> None:
        """Close the bracket, forget cached prefixes, and take the new version's number."""
        self.llm.collective_rpc("finish_refit")
        self.llm.reset_prefix_cache()
        self.weight_version = msgspec.msgpack.decode(body, type=int)


def _generation(index: int, completion: Any, end_token: int, first_routed_layer: int) -> Generation:
    tokens = np.asarray(completion.token_ids, np.int32)
    logprobs = np.asarray(
        [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)],
        np.float32,
    )
    # vLLM counts all layers, and has nothing to say of the dense ones before.
    routes = completion.routed_experts[:, first_routed_layer:].astype(np.uint16)
    return Generation(
        prompt=index,
        tokens=tokens.tobytes(),
        logprobs=logprobs.tobytes(),
        routes=routes.tobytes(),
        routes_shape=routes.shape,
        finished=bool(len(tokens)) and int(tokens[-1]) == end_token,
    )


def _handler(engine: Engine, token: str) -> type[BaseHTTPRequestHandler]:
    calls = {
        f"/{call.__name__}": call
        for call in (engine.generate, engine.begin_refit, engine.load_chunk, engine.finish_refit)
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_POST(self) -> None:
            shown = self.headers.get("Authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
                self._answer(403, Failure("wrong token"))
            elif self.path not in calls:
                self._answer(404, Failure(f"no such call: {self.path}"))
            else:
                try:
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                    self._answer(200, calls[self.path](body))
                except BrokenPipeError:
                    pass  # the client died while it waited
                except Exception as error:  # answered to the client, which stops its stage
                    self._answer(500, Failure(f"{type(error).__name__}: {error}"))

        def _answer(self, status: int, answer: object) -> None:
            data = msgspec.msgpack.encode(answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """One line a request would drown the engine's own log."""

    return Handler


def main() -> None:
    """Start the engine named by the file in argv[1] and serve until killed."""
    job = json.loads(Path(sys.argv[1]).read_text())
    settings = EngineSettings.model_validate(job["engine"])
    try:
        engine = Engine(ModelSettings.model_validate(job["model"]), settings, job["seed"])
    except Exception as error:
        say_last_word(f"the engine did not start with engine: {settings!r}: {error!r}")
        raise
    token = secrets.token_urlsafe(32)
    server = HTTPServer(("127.0.0.1", 0), _handler(engine, token))
    address = Address("127.0.0.1", server.server_port, token, os.getpid(), secrets.token_hex(8))
    _publish(Path(job["address"]), address)
    server.serve_forever()


def _publish(path: Path, address: Address) -> None:
    """Write the address where only this user can read it, and whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
