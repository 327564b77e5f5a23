"""The reading of megatron-core's checkpoints as data, and the patches of megatron-core 0.19.2.

torch unpickles two things of a checkpoint: `.metadata`, and the objects among the tensors
(`*.distcp`), one of which, `common_state`, holds what has no shards; megatron-core before 0.19 kept
that in `common.pt`. A pickle may call any function, and checksums.json does not help: whoever
changed a file can update its checksum. So all are read here by unpicklers that accept only what
they need: nothing in the files is called.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import queue
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from parallel.files import CheckpointRefused

METADATA_FILE = ".metadata"
OLD_COMMON_FILE = "common.pt"
MEGATRON = "megatron.core.dist_checkpointing"
# The classes in `.metadata`: torch's dataclasses and enums, which hold data and call nothing.
NEEDED = {
    "torch": ("Size",),
    # Finds one of torch's few layouts by its name.
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata", "Metadata"),
        *("MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    ),
}


class CheckpointReader(FileSystemReader):
    """A torch reader that reads a checkpoint's metadata once, as data, or refuses them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # Not in `read_metadata`: torch would log what that raises as "not found" and wrap it.
        self._metadata = _read_metadata(Path(directory))
        self._metadata.storage_meta.load_id = self.load_id

    def read_metadata(self) -> Metadata:  # never one rank's own
        """Return the metadata."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read a plan; raise CheckpointRefused if an object is not tensors, numbers and text."""
        return super().read_data(plan, _DataPlanner(planner, self._data))  # type: ignore[arg-type]

    def _data(self, item: ReadItem, content: BytesIO) -> BytesIO:
        """Return an object as a new pickle, of the data alone that the file's pickle holds."""
        path = Path(self.path) / self.storage_data[item.storage_index].relative_path
        data = BytesIO()
        torch.save(_data_in(path, content), data)
        data.seek(0)
        return data


class _DataPlanner:
    """A load planner whose objects are rewritten by `data`, since torch's unpickle anything.

    DefaultLoadPlanner.load_bytes calls torch.load(weights_only=False), and so does megatron-core's,
    which inherits it (torch 2.13, distributed/checkpoint/default_planner.py).
    """

    def __init__(self, planner: LoadPlanner, data: Callable[[ReadItem, BytesIO], BytesIO]) -> None:
        self._planner, self._data = planner, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self._planner.load_bytes(read_item, self._data(read_item, value))


class _Unpickler(pickle.Unpickler):
    """An unpickler of `.metadata`."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        # By the whole name: that of protocol 4 may have dots, as `metadata.os.system` has.
        if (allowed := _needed().get((module, name))) is None:
            raise _refusal(self._path, _holds(f"{module}.{name}"))
        return allowed


@functools.cache
def _needed() -> dict[tuple[str, str], Any]:
    modules = {module: importlib.import_module(module) for module in NEEDED}
    allowed = {
        (m, name): getattr(modules[m], name) for m, names in NEEDED.items() for name in names
    }
    types = {
        ("torch", n): dtype for n, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
    }
    return allowed | types


def _read_metadata(checkpoint: Path) -> Any:
    path = checkpoint / METADATA_FILE
    with path.open("rb") as file:
        try:
            metadata = _Unpickler(file, path).load()
            names = [storage.relative_path for storage in metadata.storage_data.values()]
            metadata.storage_meta.load_id = None
        except (CheckpointRefused, OSError):
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise _refusal(path, _damage(error)) from error
    # The checksums and the owner of the run answer for the files of the checkpoint alone.
    if elsewhere := [name for name in names if Path(name).name != name]:
        raise _refusal(path, f"names {elsewhere[0]}, which is not in the checkpoint")
    return metadata


def _data_in(path: Path, content: IO[bytes]) -> Any:
    """Return what a pickle in a file holds; raise CheckpointRefused if it is not data."""
    try:
        # weights_only is explicit: its default depends on an environment variable.
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(path, _holds(_global_in(error))) from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _refusal(path, _damage(error)) from error


def _load_common(checkpoint: str | Path) -> Any:
    path = Path(checkpoint) / OLD_COMMON_FILE
    with path.open("rb") as file:
        return _data_in(path, file)


def _global_in(error: pickle.UnpicklingError) -> str:
    """Return the name that torch's unpickler refused, from its message."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    return match[1].rstrip(".") if match else "a pickle that torch.save does not write"


def _holds(held: str) -> str:
    return f"holds {held}, which no checkpoint needs and which may run commands when it is loaded"


def _damage(error: Exception) -> str:
    return f"is not what megatron-core writes ({type(error).__name__}: {error})"


def _refusal(file: Path, what: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{file}: {what}; find out who changed it, then remove {file.parent} and resume the run: "
        "its stage continues from the checkpoint before"
    )


@functools.cache
def patch_megatron() -> None:
    """Make megatron-core write a checkpoint in the calling thread, and read it as data.

    Its writer collects answers through a manager process, which takes seconds to start and outlives
    a killed rank, and says of a failed file only the class of the error
    (megatron-core 0.19.2, strategies/filesystem_async.py: write_preloaded_data_multithread).
    """
    strategy: Any = importlib.import_module(f"{MEGATRON}.strategies.torch")
    strategy._get_filesystem_reader = lambda directory, **_: CheckpointReader(directory)
    # megatron-core reads an old common.pt by a torch.load that unpickles anything where
    # TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set (strategies/common.py: load_common).
    serialization: Any = importlib.import_module(f"{MEGATRON}.serialization")
    serialization._get_filesystem_reader = strategy._get_filesystem_reader
    serialization.load_common = _load_common
    module: Any = importlib.import_module(f"{MEGATRON}.strategies.filesystem_async")
    writer = module.FileSystemWriterAsync

    def write(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], answers: queue.Queue
    ) -> None:
        results: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            _, written = writer.write_preloaded_data(
                transforms, index, bucket, None, None, use_fsync=True
            )
            if isinstance(written, Exception):
                # The frames of its traceback refer to it, and to BytesIO.getbuffer() of an object:
                # Python 3.12.1 crashes where its collector finds both in one cycle.
                raise written.with_traceback(None)
            results[index] = written
        answers.put(results)

    writer.write_preloaded_data_multithread = staticmethod(write)
    module.get_write_results_queue = queue.Queue  # one for each checkpoint
