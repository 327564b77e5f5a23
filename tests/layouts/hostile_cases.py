"""Checkpoints that run a command when unpickled, and the ranks' attempts to load them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from parallel.files import CheckpointError, digest_of, sha256
from parallel.settings import LayoutSettings
from tests.layouts.cases import build
from tests.layouts.checkpoint_cases import KINDS

OLD_COMMON_FILE = "common.pt"
HIDDEN = "evil.distcp"  # the file of a payload among the tensors


class Evil:
    """An object that pickles as a call of os.system, which creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def in_metadata(checkpoint: Path, marker: Path) -> str:
    """Replace `.metadata` by the call; return the file's name."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    return ".metadata"


def in_planner_data(checkpoint: Path, marker: Path) -> str:
    """Hide the call inside metadata that are otherwise valid."""
    return change_metadata(checkpoint, lambda found: setattr(found, "planner_data", [Evil(marker)]))


def through_an_allowed_module(checkpoint: Path, marker: Path) -> str:
    """Call `torch.distributed.checkpoint.metadata.os.system`: protocol 4 resolves the dots."""
    command = f"touch '{marker}'".encode()
    module, name = b"torch.distributed.checkpoint.metadata", b"os.system"
    parts = [b"\x80\x04"]
    parts += [b"\x8c" + bytes([len(text)]) + text for text in (module, name)]
    parts += [b"\x93\x8c", bytes([len(command)]), command, b"\x85R."]
    (checkpoint / ".metadata").write_bytes(b"".join(parts))
    return ".metadata"


def in_random_numbers(checkpoint: Path, marker: Path) -> str:
    """Hide the call in an object among the tensors, which torch would unpickle."""
    return replace_object(checkpoint, "random_numbers", pickled(Evil(marker)))


def in_a_weight(checkpoint: Path, marker: Path) -> str:
    """Hide the call in a weight that the metadata declare an object."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    def point_there(found: Any) -> None:
        name = "decoder.final_layernorm.weight"
        disguised: Any = BytesStorageMetadata()
        disguised.size = found.state_dict_metadata[name].size  # which megatron-core compares
        found.state_dict_metadata[name] = disguised
        found.storage_data[MetadataIndex(name)] = hidden(checkpoint, pickled(Evil(marker)))

    change_metadata(checkpoint, point_there)
    return HIDDEN


def in_common(checkpoint: Path, marker: Path) -> str:
    """Hide the call in the common part: the layout and the number of updates."""
    return replace_object(checkpoint, "common_state", pickled([{"updates": Evil(marker)}]))


def in_old_common(checkpoint: Path, marker: Path) -> str:
    """Add the call as the common part that megatron-core wrote before 0.19, and still reads."""
    (checkpoint / OLD_COMMON_FILE).write_bytes(pickled({"updates": Evil(marker)}))
    return OLD_COMMON_FILE


def in_the_form_before_019(layout: LayoutSettings, checkpoint: str) -> None:
    """Move the common part to a file, as megatron-core before 0.19 wrote it."""
    import torch

    directory = Path(checkpoint)

    def take_out(metadata: Any) -> None:
        [index] = [index for index in metadata.storage_data if index.fqn.startswith("common_state")]
        place = metadata.storage_data.pop(index)
        del metadata.state_dict_metadata[index.fqn]
        with (directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            [common] = torch.load(BytesIO(file.read(place.length)), weights_only=True)
        torch.save(common, directory / OLD_COMMON_FILE)

    change_metadata(directory, take_out)
    seal(directory)


def replace_object(checkpoint: Path, key: str, content: bytes) -> str:
    """Replace the object of that key among the tensors; return the name of the new file."""

    def point_there(metadata: Any) -> None:
        [index] = [index for index in metadata.storage_data if index.fqn.startswith(key)]
        metadata.storage_data[index] = hidden(checkpoint, content)

    change_metadata(checkpoint, point_there)
    return HIDDEN


def pickled(content: object) -> bytes:
    import torch

    buffer = BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def hidden(checkpoint: Path, content: bytes) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    (checkpoint / HIDDEN).write_bytes(content)
    return _StorageInfo(HIDDEN, 0, len(content))


def change_metadata(checkpoint: Path, change: Callable[[Any], None]) -> str:
    path = checkpoint / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))
    return path.name


def seal(checkpoint: Path) -> None:
    """Update the checksums, as an attacker would."""
    names = [path.name for path in checkpoint.iterdir() if path.name != "checksums.json"]
    files = {name: sha256(checkpoint / name) for name in names}
    content = {"digest": digest_of(files), "files": files}
    (checkpoint / "checksums.json").write_text(json.dumps(content))


def resume(layout: LayoutSettings, directory: str) -> str:
    """Return the error of resuming from the newest checkpoint, or ""."""
    from parallel.checkpoint import load

    policy = KINDS["sgd"].build(layout)
    found, errors = load.newest_intact(Path(directory))
    assert found is not None and not errors
    return error_of(lambda: load.training_state(policy, found))


def take_weights(layout: LayoutSettings, directory: str) -> str:
    """Return the error of loading another stage's weights, or ""."""
    from parallel.checkpoint import load

    [checkpoint] = Path(directory).iterdir()
    return error_of(lambda: load.weights(build(layout), checkpoint))


def resume_with_unsafe_torch_load(layout: LayoutSettings, directory: str) -> str:
    """Resume where the environment makes torch.load unpickle everything."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        return resume(layout, directory)
    finally:
        del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]


def error_of(load: Callable[[], object]) -> str:

    try:
        load()
    except CheckpointError as error:
        return str(error)
    return ""


def objects_of_weights(layout: LayoutSettings) -> list[str]:
    """Return the names of the objects to unpickle in a checkpoint of the weights alone."""
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from parallel.checkpoint import state as checkpoint_state

    found = nested_values(checkpoint_state.weights(build(layout)))
    return [each.key for each in found if isinstance(each, ShardedObject)]
