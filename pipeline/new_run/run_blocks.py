"""The request for a new run, and the keys that follow from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.estimates.tensor_sizes import parameter_count
from parallel.settings import ModelSettings
from pipeline.config.read import CONFIGS, Leaf, Reader, find
from pipeline.estimate.simulation import HOUR, Assumptions
from pipeline.new_run.data_sets import source_of
from pipeline.new_run.run_file import PARENT
from pipeline.text import shown

THINKING = CONFIGS / "runs" / "_thinking.yaml"
LEAST_OF_THINKING = 8192  # tokens of a response, and twice what other models get
RESPONSE_SHARE = 0.8  # of the longest sequence of a model with few positions
# Without GPUs: a run that shows that everything fits together, in minutes.
CPU_TOKENS, CPU_RESPONSE, CPU_PARAMETERS = 256, 32, 100_000_000
CPU_KEYS: Mapping[str, Mapping[str, Any]] = {
    "sampling": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": CPU_RESPONSE},
    "optimizer": {"warmup_steps": 1},
    "loop": {"steps": 4, "micro_batch_tokens": 2048, "checkpoint_every": 2},
}

DEMONSTRATIONS = "demonstrations"  # the name of the cold start's source

Blocks = dict[str, Any]


@dataclass(frozen=True)
class RunRequest:
    """The request for a new run; `gpus` is None where ranks run on CPU cores.

    `columns` are columns of each domain's rows, by the keys of its block that name them; those of
    `demonstrations`, which a run with SFT trains on first, are under DEMONSTRATIONS.
    `thinks` says that the model's chat template has thoughts. Without `has_weights` a dry run plans
    what is not downloaded yet.
    """

    name: str
    output: Path
    model: ModelSettings
    described: Path | None
    weights: Path
    domains: Mapping[str, tuple[Path, Path | None]]
    ranks: int
    gpus: Assumptions | None
    gpu: str = ""
    budget: float | None = None
    longest_walltime: float = 24 * HOUR
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    thinks: bool = False
    has_weights: bool = True
    demonstrations: Path | None = None


def check_size(request: RunRequest) -> None:
    """Raise UserError where CPU cores could not train the model."""
    if request.gpus is None and (count := parameter_count(request.model)[0]) > CPU_PARAMETERS:
        raise UserError(
            f"{shown(request.weights)} has {count / 1e9:.1f} billion parameters, too many to train "
            "on CPU cores; name the GPUs: --gpus 32 --gpu h100"
        )


def first_blocks(request: RunRequest) -> Blocks:
    """Return the run's own keys as far as they follow from the model alone."""
    blocks: Blocks = {"domains": {}, "stages": {}, "engine": {}}
    for name, (_, rows) in request.domains.items():
        block: Blocks = {"prompts": {}}
        blocks["domains"][name] = block
        if rows is not None:
            block["prompts"] |= {"path": str(rows.absolute())}
            if (source := source_of(rows)) != "jsonl":
                block["prompts"]["source"] = source
        for key, column in request.columns.get(name, {}).items():
            put(block, key, column)
        if request.gpus is None:
            block.update({key: dict(values) for key, values in CPU_KEYS.items()})
    if request.demonstrations is not None:
        blocks["stages"]["cold_start"] = _cold_start(request, request.demonstrations)
    several = len(request.domains) > 1
    if several:
        blocks["stages"]["merge"] = {}
    if request.gpus is None:
        if several:
            blocks["stages"]["merge"] = {key: dict(values) for key, values in CPU_KEYS.items()}
            blocks["stages"]["merge"]["sampling"]["group_size"] = 1
        longest = min(CPU_TOKENS, request.model.max_positions)
        blocks["engine"] = {"max_model_tokens": longest, "max_sequences": 32}
        _shorten(request, blocks, floor(RESPONSE_SHARE * longest))
        return blocks
    usual = _stated(THINKING if request.thinks else PARENT, "engine", "max_model_tokens")
    longest = min(usual, request.model.max_positions)
    if request.thinks:
        _lengthen(request, blocks, longest)
    if request.thinks or longest < usual:
        blocks["engine"] = {"max_model_tokens": longest}
    if longest < usual:
        _shorten(request, blocks, floor(RESPONSE_SHARE * longest))
    return blocks


def _cold_start(request: RunRequest, rows: Path) -> Blocks:
    """Return the keys of the SFT on these rows."""
    columns = request.columns.get(DEMONSTRATIONS, {})
    source = {"source": source_of(rows), "path": str(rows.absolute()), **columns}
    block: Blocks = {"data": {DEMONSTRATIONS: source}}
    if request.gpus is None:
        small = {key: dict(CPU_KEYS[key]) for key in ("optimizer", "loop")}
        block |= {"sequences_per_step": CPU_KEYS["sampling"]["prompts_per_step"], **small}
    return block


def _bases(request: RunRequest, blocks: Blocks) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Return the file that each block which samples extends, and the block's key in it."""
    bases: dict[str, tuple[Path, tuple[str, ...]]] = {
        f"domains.{name}": (base, ()) for name, (base, _) in request.domains.items()
    }
    if "merge" in blocks["stages"]:
        bases["stages.merge"] = (PARENT, ("stages", "merge"))
    return bases


def _lengthen(request: RunRequest, blocks: Blocks, longest: int) -> None:
    """Let a model that thinks respond as long as in THINKING, and mask what is cut off.

    A length that a domain's own file states stays: only those of configs/ leave thoughts no room.
    """
    for key, (file, above) in _bases(request, blocks).items():
        length = find(Reader().file(file), (*above, "sampling", "max_response_tokens"))
        if not isinstance(length, Leaf) or not _is_shipped(length.place.file):
            continue
        tokens = max(2 * length.value, LEAST_OF_THINKING)
        put(blocks, f"{key}.sampling.max_response_tokens", tokens)
        # As long as the longest sample: a row is never shorter, whatever the key says.
        if (_stated(file, *above, "loop", "micro_batch_tokens") or longest) < longest:
            put(blocks, f"{key}.loop.micro_batch_tokens", longest)
        if not above and _stated(file, "objective", "mask_truncated") is None:
            put(blocks, f"{key}.objective.mask_truncated", True)


def _is_shipped(file: Path | None) -> bool:
    return file is not None and file.resolve().is_relative_to(CONFIGS.resolve())


def _shorten(request: RunRequest, blocks: Blocks, most: int) -> None:
    """Let responses have at most this number of tokens where shipped files say more."""
    for key, (file, above) in _bases(request, blocks).items():
        stated = _stated(file, *above, "sampling", "max_response_tokens") or most + 1
        tokens = _at(blocks, key).get("sampling", {}).get("max_response_tokens", stated)
        if tokens > most:
            put(blocks, f"{key}.sampling.max_response_tokens", most)


def make_room(request: RunRequest, blocks: Blocks, longest: Mapping[str, int]) -> None:
    """Let responses on CPU cores be twice as long as right answers, as far as positions allow.

    `longest` has the tokens of each domain's longest right answer, where it has one.
    """
    if request.gpus is not None:
        return
    most = floor(RESPONSE_SHARE * blocks["engine"]["max_model_tokens"])
    rooms = {name: min(most, max(CPU_RESPONSE, 2 * tokens)) for name, tokens in longest.items()}
    for name, tokens in rooms.items():
        put(blocks, f"domains.{name}.sampling.max_response_tokens", tokens)
    if "merge" in blocks["stages"]:
        room = max(rooms.values(), default=CPU_RESPONSE)
        put(blocks, "stages.merge.sampling.max_response_tokens", room)


def _stated(file: Path, *key: str) -> Any:
    """Return the value of a key in a file and those that it extends, None where none states it."""
    node = find(Reader().file(file), key)
    return node.value if isinstance(node, Leaf) else None


def _at(blocks: Blocks, key: str) -> Blocks:
    for name in key.split("."):
        blocks = blocks[name]
    return blocks


def put(blocks: Blocks, key: str, value: Any) -> None:
    """Set a value at a dotted key, in blocks that may not be there yet."""
    *parents, last = key.split(".")
    for parent in parents:
        blocks = blocks.setdefault(parent, {})
    blocks[last] = value
