"""The members of an engine with data-parallel attention, which take every step together.

Each member is a process of `parallel.engine.server` with its own requests, scheduler and cache. In
every layer the members exchange tokens for their common experts, so a step that one takes alone
waits for the others for ever. Before each step they agree whether to take one: a member without
requests then computes a dummy batch, as vLLM's own data-parallel processes do.
"""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from enum import IntEnum
from typing import Any, NamedTuple

from parallel.engine.nodes import MeetingPoint, published
from parallel.errors import UserError
from parallel.files import write_atomically
from parallel.machine.network import address_of
from parallel.settings import EngineJob

# vLLM's groups of data parallelism each take the next port: the members' own and that of all ranks,
# and further ones where an address is in use.
PORTS = 8
TRIES = 200


class Call(IntEnum):
    """A call that begins once all members wait with it, so that no step comes between."""

    NONE = 0
    START = 1
    JOIN = 2
    REFIT = 3
    SLEEP = 4
    WAKE = 5


class OutOfStep(RuntimeError):
    """The members were asked for different things, such as by a trainer that died in between.

    They stay out of step: all of them must be restarted.
    """


class Agreement(NamedTuple):
    """An agreement of all members: whether any has work, and whether all wait with one call."""

    working: bool
    waiting: bool


class Lockstep:
    """The agreements of an engine's members, each on all of them."""

    def __init__(self, group: Any) -> None:
        self._group, self._members = group, group.size()

    def agree(self, working: bool, waiting: Call = Call.NONE) -> Agreement:
        """Tell the other members whether this one has work, and waits; return what holds for all.

        Raises:
            OutOfStep: all wait, with different calls.
            RuntimeError: a member is gone.
        """
        some, several, calls, squares = self._sums(working, waiting > 0, waiting, waiting**2)
        if several < self._members:
            return Agreement(some > 0, False)
        # By Cauchy-Schwarz (sum x)^2 = n sum x^2 only where all x are equal, so one reduction also
        # shows that members wait with different calls.
        if calls**2 != self._members * squares:
            raise OutOfStep(f"the members of this engine do not all wait to {waiting.name.lower()}")
        return Agreement(some > 0, True)

    def all_succeeded(self, success: bool) -> bool:
        """Return whether every member succeeded in the refit that all of them took."""
        return self._sums(success)[0] == self._members

    def _sums(self, *values: int) -> list[int]:
        """Return the sums of what all members tell."""
        import torch

        sums = torch.tensor(values, dtype=torch.int32)
        try:
            # torch's all_reduce cannot report an error of a group that it does not list.
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise RuntimeError(f"another member of this engine is gone: {error}") from error
        return [int(total) for total in sums]


def step_or_join(vllm: Any) -> list[Any]:
    """Take one step of an LLMEngine, or a dummy one where its scheduler has nothing to compute.

    vLLM's `LLMEngine.step` does not tell whether it computed: a request may wait for room in the
    cache, or its last token be in flight.
    """
    from vllm.v1.engine import EngineCoreOutputs

    core = vllm.engine_core.engine_core
    outputs_by_client, computed = core.step_fn()
    core.post_step(model_executed=computed)
    if not computed:
        core.execute_dummy_batch()
    outputs = (outputs_by_client or {}).get(0) or EngineCoreOutputs()
    processed = vllm.output_processor.process_outputs(
        outputs.outputs,
        engine_core_timestamp=outputs.timestamp,
        iteration_stats=None,
        weight_version=outputs.weight_version,
    )
    vllm.output_processor.update_scheduler_stats(outputs.scheduler_stats)
    vllm.engine_core.abort_requests(processed.reqs_to_abort)
    return list(processed.request_outputs)


def member_environment(job: EngineJob) -> dict[str, str]:
    """Return vLLM's variables for a member of an engine; none where it is the only one.

    vLLM's arguments would have every process choose other ports.
    """
    if job.engine.data == 1:
        return {}
    address, port = _meeting_point(job)
    return {
        "VLLM_DP_SIZE": str(job.engine.data),
        "VLLM_DP_RANK": str(job.member),
        "VLLM_DP_RANK_LOCAL": "0",  # a member sees its own GPUs first
        "VLLM_DP_MASTER_IP": address,
        "VLLM_DP_MASTER_PORT": str(port),
    }


def _meeting_point(job: EngineJob) -> MeetingPoint:
    """Return where the members meet: published by the first in a file, awaited by the others.

    The launcher removes the file before it starts the members.
    """
    assert job.meeting is not None, "the launcher names the file"
    if job.member == 0:
        address = address_of(job.interface)
        point = MeetingPoint(address, _free_ports(address))
        write_atomically(job.meeting, json.dumps(point))
        return point
    return published(job, job.meeting, "member", job.member)


def _free_ports(address: str) -> int:
    """Return the first of PORTS consecutive TCP ports that are free now."""
    for _ in range(TRIES):
        with ExitStack() as probes:
            first_port = 0
            try:
                for offset in range(PORTS):
                    probe = probes.enter_context(socket.socket())
                    probe.bind((address, first_port and first_port + offset))
                    first_port = first_port or int(probe.getsockname()[1])
            except (OSError, OverflowError):
                continue
            return first_port
    raise UserError(
        f"no {PORTS} consecutive TCP ports are free on {address}; a restart may find some"
    )
