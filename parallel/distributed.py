"""The process groups of one stage, and collectives over all of its ranks."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel.checkpoint.reader import patch_megatron
from parallel.cpu import megatron
from parallel.machine.device import backend
from parallel.machine.slots import local_device
from parallel.settings import LayoutSettings

# The variables that torch.distributed reads, and srun's names of them.
SRUN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# The gloo group of objects and flags; None where the default group is gloo already.
#
# A rank that waits in an NCCL collective spins on its GPU, which it may share with an engine, and
# an object becomes a byte tensor on every GPU. "cpu:gloo,cuda:nccl" for the default group would
# give each of Megatron's some twenty groups, which inherit it, a gloo mesh too: over a thousand
# connections a rank of 512, and a listening socket and thread a group.
_control: Any = None


@contextmanager
def process_groups(layout: LayoutSettings, seed: int, wait_seconds: float = 0) -> Iterator[None]:
    """Join this rank to the job, build Megatron's groups for `layout`, and destroy them at the end.

    A collective does not time out while one rank waits for `wait_seconds`, as for an engine.

    The launcher or torchrun sets RANK, LOCAL_RANK and WORLD_SIZE, srun the variables of `SRUN`;
    MASTER_ADDR and MASTER_PORT are where the ranks meet. Rank 0 listens on that address only,
    unless torchrun hosts the store.

    Raises:
        ValueError: the number of ranks started is not `layout.ranks`.
        OSError: rank 0's machine does not have the address, or the port is in use.
    """
    if "RANK" not in os.environ:
        os.environ.update({name: os.environ[of] for name, of in SRUN.items() if of in os.environ})
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != layout.ranks:
        raise ValueError(f"layout.ranks is {layout.ranks}, but {started} ranks were started")
    # Before the imports below: both replace names that megatron-core's modules bind when they are
    # imported.
    megatron.activate()
    patch_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(
            local_device(os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count())
        )
    else:
        torch.set_num_threads(1)  # ranks share the cores with each other and the engines
        torch.set_flush_denormal(True)
    # No `device_id`: it would create an NCCL communicator for every group of Megatron's at once,
    # of which most never carry a tensor; without it each is created at its first collective.
    timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=wait_seconds))
    dist.init_process_group(backend(), timeout=timeout, **_meeting())
    try:
        _open_control_group(timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=(
                layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
            ),
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=ceil(timeout / timedelta(minutes=1)),
        )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _close_control_group()


def _open_control_group(timeout: timedelta) -> None:
    global _control
    if backend() != "gloo":
        _control = dist.new_group(backend="gloo", timeout=timeout)


def _close_control_group() -> None:
    global _control
    _control = None


def _meeting() -> dict[str, Any]:
    """Return the arguments of `init_process_group` that name this rank and the store.

    Empty under torchrun, whose agent hosts the store, and where a variable is missing: torch then
    reads the same variables and names the missing one.
    """
    missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if missing or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        store = host_store(host, port, COLLECTIVE_TIMEOUT, ranks)
    else:
        store = dist.TCPStore(host, port, ranks, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    return {"store": store, "rank": rank, "world_size": ranks}


def host_store(host: str, port: int, timeout: timedelta, ranks: int | None = None) -> dist.TCPStore:
    """Host a store that listens on `host` only, on any free port where `port` is 0.

    A store has no password: whoever reaches it may read and change it. torch's TCPStore listens on
    every interface, whatever its `host_name`. With `ranks`, wait until all of them are connected.

    Raises:
        OSError: this machine has no such address, or the port is in use.
    """
    [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listening = socket.create_server(address[:2], family=family)
    port = listening.getsockname()[1]
    wait = ranks is not None
    descriptor = listening.detach()  # the store closes it
    return dist.TCPStore(
        host, port, ranks, True, timeout, wait_for_workers=wait, master_listen_fd=descriptor
    )


def broadcast(value: Any, source: int = 0) -> Any:
    """Return `value` of rank `source`, on every rank.

    Example: on 4 ranks, `broadcast(dist.get_rank())` is 0 on all of them.

    Waits for: rank `source`. Every rank must call it, in the same order of collectives.
    Unblocked by: the call on rank `source`.
    """
    box = [value]
    dist.broadcast_object_list(box, src=source, group=_control)
    return box[0]


def barrier() -> None:
    """Wait for every rank.

    Unblocked by: the call on the last rank to come.
    """
    dist.barrier(group=_control)


def gather(value: Any) -> list[Any]:
    """Return every rank's `value`, by rank, on every rank.

    Example: on 4 ranks, `gather(10 * dist.get_rank())` is [0, 10, 20, 30] on all of them.

    Waits for: every rank.
    Unblocked by: the call on the last rank to come.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


def gather_on_main(value: Any) -> list[Any]:
    """Return every rank's `value`, by rank, on the main rank; elsewhere nothing. Collective.

    Example: on 4 ranks, `gather_on_main(10 * dist.get_rank())` is [0, 10, 20, 30] on rank 0 and []
    on the others.

    Waits for: every rank, on the main rank; the others only send.
    Unblocked by: the call on the last rank to come.
    """
    values = [None] * dist.get_world_size() if is_main() else None
    dist.gather_object(value, values, group=_control)
    return values or []


def scatter(make: Callable[[int], Any], key: int) -> Any:
    """Return on every rank the value that the main rank makes for the rank's `key`. Collective.

    The main rank pickles each key's value once and sends it to the first rank with that key, from
    which a tree of the other ranks with it is served: no rank receives another key's value. `make`
    is called on the main rank only.

    Example: keys 0, 0, 1, 1 of ranks 0 to 3. Rank 0 makes both values, and sends the second to rank
    2, which sends it to rank 3, and the first to rank 1.

    Waits for: every rank's key, then the value, from the main rank or another with the same key.
    Unblocked by: `make` of the keys on the main rank, one after another.
    """
    keys = gather(key)
    ranks = {
        shared_key: [rank for rank, other in enumerate(keys) if other == shared_key]
        for shared_key in set(keys)
    }
    if is_main():
        main_value = payload = None
        for shared_key, (receiver, *_) in sorted(ranks.items()):
            value = make(shared_key)
            if receiver == 0:
                main_value = value
                payload = _pickled(value) if len(ranks[shared_key]) > 1 else None
            else:
                _send(_pickled(value), receiver)
        if payload is not None:
            _relay(payload, ranks[key])
        return main_value
    members = ranks[key]
    place = members.index(dist.get_rank())
    source = members[place - (1 << (place.bit_length() - 1))] if place else 0
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=_control)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, source, group=_control)
    _relay(payload, members)
    return pickle.loads(payload.numpy().data)


def _relay(payload: torch.Tensor, members: Sequence[int]) -> None:
    """Send to the members that this rank serves in the binomial tree over them."""
    place = members.index(dist.get_rank())
    step = 1 << place.bit_length()
    while place + step < len(members):
        _send(payload, members[place + step])
        step <<= 1


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _send(payload: torch.Tensor, rank: int) -> None:
    dist.send(torch.tensor([len(payload)]), rank, group=_control)
    dist.send(payload, rank, group=_control)


def on_main(function: Callable[[], Any]) -> Any:
    """Return the function's result on the main rank, or raise its error, on every rank: pickled.

    Example: `on_main(lambda: path.exists())`, so that all ranks take the same branch.

    Waits for: the main rank, for as long as the function takes.
    Unblocked by: its end; an error there is raised on every rank, so none stays behind.
    """
    answer = error = None
    if is_main():
        try:
            answer = function()
        except Exception as raised:
            error = raised
    answer, error = broadcast((answer, error))
    if error is not None:
        raise error
    return answer


def reason(error: BaseException) -> str:
    """Return the message of an error, or the ranks' messages that torch wrapped into it."""
    if not isinstance(error, CheckpointException):
        return str(error)
    reasons = sorted({str(reason) for reason, _ in error.failures.values()})
    return "; ".join(reasons) or "the reason is in the log of rank 0"


def layout_sizes(config: Any) -> dict[str, int]:
    """Return the sizes of a layout that decide which rank holds which weights.

    Args:
        config: the model's TransformerConfig, which alone knows of an uneven pipeline.
    """
    from megatron.core import parallel_state as groups

    uneven = {
        "first_stage_layers": config.num_layers_in_first_pipeline_stage,
        "last_stage_layers": config.num_layers_in_last_pipeline_stage,
    }
    return {
        "ranks": dist.get_world_size(),
        "tensor": groups.get_tensor_model_parallel_world_size(),
        "pipeline": groups.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": groups.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": groups.get_context_parallel_world_size(),
        "expert": groups.get_expert_model_parallel_world_size(),
        "expert_tensor": groups.get_expert_tensor_parallel_world_size(),
        **{key: layers for key, layers in uneven.items() if layers is not None},
    }


def sum_over_data(values: dict[str, float]) -> dict[str, float]:
    """Return on every rank each value summed over the data-parallel ranks of the last stage.

    Losses exist only on the last pipeline stage: its ranks all pass the same names, and the values
    that others pass are ignored.

    Example: 2 stages of 2 data-parallel ranks; the last stage's pass {"loss": 1.5} and {"loss":
    2.5}, the others {}. All 4 get {"loss": 4.0}.

    Waits for: the data-parallel ranks of the last stage, then every rank.
    Unblocked by: the call on each of them.
    """
    from megatron.core import parallel_state

    if parallel_state.is_pipeline_last_stage():
        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo())
        values = dict(zip(names, total.tolist(), strict=True))
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        # Its ranks have equal sums. The pipeline's own group would send objects over NCCL.
        ranks = dist.get_world_size()
        return broadcast(values, ranks - ranks // stages)
    return values


def sum_over_shards(values: torch.Tensor) -> torch.Tensor:
    """Return values summed over the ranks that share a data-parallel rank's tokens and logits.

    These are the tensor- and context-parallel ranks of one pipeline stage.

    Waits for: the ranks of that group, no others.
    Unblocked by: the call on each of them.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def max_over_ranks(value: float) -> float:
    """Return the largest of all ranks' values.

    Waits for: every rank.
    Unblocked by: the call on the last rank to come.
    """
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_control)
    return largest.item()


def any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; one reduction for all of them.

    Example: `any_rank(stop, failed)` with (False, True) on one rank and (False, False) on others is
    [False, True] on all.

    Waits for: every rank.
    Unblocked by: the call on the last rank to come.
    """
    raised = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=_control)
    return list(map(bool, raised.tolist()))


def is_main() -> bool:
    """Return whether this is the rank that talks to the engines and writes files and logs."""
    return dist.get_rank() == 0
