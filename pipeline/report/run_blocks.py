"""The request for a new run, and the keys that follow from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.settings import ModelSettings
from parallel.tensor_sizes import parameter_count
from pipeline.config.read import Leaf, Reader, find
from pipeline.report.run_file import PARENT
from pipeline.report.simulation import HOUR, Assumptions
from pipeline.text import shown

RESPONSE_SHARE = 0.8  # of the longest sequence of a model with few positions
# Without GPUs: a run that shows that everything fits together, in minutes.
CPU_TOKENS, CPU_RESPONSE, CPU_PARAMETERS = 256, 32, 100_000_000
CPU_KEYS: Mapping[str, Mapping[str, Any]] = {
    "sampling": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": CPU_RESPONSE},
    "optimizer": {"warmup_steps": 1},
    "loop": {"steps": 4, "micro_batch_tokens": 2048, "checkpoint_every": 2},
}

Blocks = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """The request for a new run; `gpus` is None where ranks run on CPU cores.

    `columns` are those of the prompt and the answer of rows that are given without a domain's file.
    Without `has_weights` a dry run plans what is not downloaded yet.
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
    columns: Mapping[str, str] = field(default_factory=dict)
    has_weights: bool = True


def check_size(wanted: Wanted) -> None:
    """Raise UserError where CPU cores could not train the model."""
    if wanted.gpus is None and (count := parameter_count(wanted.model)[0]) > CPU_PARAMETERS:
        raise UserError(
            f"{shown(wanted.weights)} has {count / 1e9:.1f} billion parameters, too many to train "
            "on CPU cores; name the GPUs: --gpus 32 --gpu h100"
        )


def first_blocks(wanted: Wanted) -> Blocks:
    """Return the run's own keys as far as they follow from the model alone."""
    blocks: Blocks = {"domains": {}, "stages": {}, "engine": {}}
    for name, (_, rows) in wanted.domains.items():
        own: Blocks = {"prompts": {}}
        blocks["domains"][name] = own
        if rows is not None:
            own["prompts"] |= {"path": str(rows.absolute()), **wanted.columns}
            if rows.suffix == ".parquet":
                own["prompts"]["source"] = "parquet"
        if wanted.gpus is None:
            own.update({key: dict(each) for key, each in CPU_KEYS.items()})
    several = len(wanted.domains) > 1
    if several:
        blocks["stages"]["merge"] = {}
    if wanted.gpus is None:
        if several:
            blocks["stages"]["merge"] = {key: dict(each) for key, each in CPU_KEYS.items()}
            blocks["stages"]["merge"]["sampling"]["group_size"] = 1
        longest = min(CPU_TOKENS, wanted.model.max_positions)
        blocks["engine"] = {"max_model_tokens": longest, "max_sequences": 32}
    elif (longest := wanted.model.max_positions) < _stated(PARENT, "engine", "max_model_tokens"):
        blocks["engine"] = {"max_model_tokens": longest}
    if blocks["engine"]:
        _shorten(wanted, blocks, floor(RESPONSE_SHARE * longest))
    return blocks


def _shorten(wanted: Wanted, blocks: Blocks, most: int) -> None:
    """Let responses have at most this number of tokens where shipped files say more."""
    bases: dict[str, tuple[Path, tuple[str, ...]]] = {
        f"domains.{name}": (base, ()) for name, (base, _) in wanted.domains.items()
    }
    if "merge" in blocks["stages"]:
        bases["stages.merge"] = (PARENT, ("stages", "merge"))
    for key, (file, above) in bases.items():
        stated = _stated(file, *above, "sampling", "max_response_tokens") or most + 1
        own = _at(blocks, key).get("sampling", {}).get("max_response_tokens", stated)
        if own > most:
            put(blocks, f"{key}.sampling.max_response_tokens", most)


def _stated(file: Path, *key: str) -> Any:
    """Return the value of a key in a file and those that it extends, None where none states it."""
    found = find(Reader().file(file), key)
    return found.value if isinstance(found, Leaf) else None


def _at(blocks: Blocks, key: str) -> Blocks:
    for part in key.split("."):
        blocks = blocks[part]
    return blocks


def put(blocks: Blocks, key: str, value: Any) -> None:
    """Set a value at a dotted key, in blocks that may not be there yet."""
    *parents, last = key.split(".")
    for parent in parents:
        blocks = blocks.setdefault(parent, {})
    blocks[last] = value
