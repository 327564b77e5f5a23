"""The execution of a refit plan, bucket by bucket, on the trainer's and the engines' ranks.

The planner decides which bytes go where; the transport moves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from math import prod

import torch
import torch.distributed as dist

from parallel.boxes import Box, within
from parallel.device import DTYPES
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights import checksums
from parallel.weights.holdings import held
from parallel.weights.names import is_precise
from parallel.weights.planner import Bucket, Plan, Sending
from parallel.weights.transport import Mapped, Meeting, Messages, SharedMemory

IN_FLIGHT = 4  # messages that a trainer rank has packed and not yet sent


def wire_dtype(tensor: str, model: ModelSettings) -> torch.dtype:
    """Return the dtype in which a Hugging Face tensor is sent: the trainer's."""
    return torch.float32 if is_precise(tensor) else DTYPES[model.precision]


class Outbox(ABC):
    """The trainer rank's end, which sends `parameters` to the engines.

    They are named "chunk/parameter" and must stay the same tensors.
    """

    def __init__(self, plan: Plan, rank: int, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.sendings: list[Sending] = plan.send(rank)

    @abstractmethod
    def send(self) -> None:
        """Send every slice once.

        Raises:
            RuntimeError: an engine has ended.
        """

    def fingerprints(self) -> dict[str, int]:
        """Return the expected fingerprints of what this rank sends, by "engine rank/bucket"."""
        found: dict[str, int] = {}
        for sending in self.sendings:
            key = f"{sending.peer}/{sending.bucket}"
            for each in sending.slices:
                values = self._slice(each.chunk, each.parameter, each.parameter_box)
                value = checksums.fingerprint(each.tensor, each.box, values)
                found[key] = checksums.add(found.get(key, 0), value)
        return found

    def _slice(self, chunk: int, parameter: str, box: Box) -> torch.Tensor:
        return self.parameters[f"{chunk}/{parameter}"][within(box)]


class MessageOutbox(Outbox):
    """An outbox that packs and sends messages, IN_FLIGHT at a time."""

    def __init__(
        self, plan: Plan, rank: int, parameters: dict[str, torch.Tensor], messages: Messages
    ) -> None:
        super().__init__(plan, rank, parameters)
        self.messages = messages
        self.trainers = plan.layout.sizes.ranks

    def send(self) -> None:
        """Send every slice once."""
        in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for sending in self.sendings:
            slices = [self._slice(s.chunk, s.parameter, s.parameter_box) for s in sending.slices]
            for packed in _packed(slices):
                if len(in_flight) == IN_FLIGHT:
                    in_flight.popleft()[0].wait()
                in_flight.append((self.messages.send(packed, self.trainers + sending.peer), packed))
        for work, _ in in_flight:
            work.wait()


class SharedOutbox(Outbox):
    """An outbox whose memory the engines map (`transport.share`)."""

    def send(self) -> None:
        """Do nothing: the engines read the memory while the trainer waits."""


class Inbox(ABC):
    """The engine rank's end, which counts received bytes and the largest staging buffers."""

    def __init__(self, model: ModelSettings, plan: Plan, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.buckets: list[Bucket] = plan.receive(rank)
        self.start()

    def start(self) -> None:
        """Reset the counts."""
        self.received_bytes = self.messages_received = self.staging_bytes = 0

    @abstractmethod
    def take(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return the contents of a bucket's needed boxes by tensor, valid until the next call."""

    @abstractmethod
    def close(self) -> None:
        """Release the trainer's memory and connections."""

    def _dtype(self, tensor: str) -> torch.dtype:
        return wire_dtype(tensor, self.model)


class MessageInbox(Inbox):
    """An inbox that receives the messages of a bucket and forwards them to later engines."""

    def __init__(
        self, model: ModelSettings, plan: Plan, rank: int, messages: Messages, device: torch.device
    ) -> None:
        super().__init__(model, plan, rank)
        self.messages = messages
        self.device = device
        self.trainers = plan.layout.sizes.ranks
        self._forwarding: list[tuple[dist.Work, torch.Tensor]] = []

    def take(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Receive the contents, in buffers of this bucket's size."""
        self._finish_forwarding()
        needs = dict(bucket.needs)
        if bucket.forwarded_from is not None:
            sources = [(self.trainers + bucket.forwarded_from, bucket.needs)]
        else:
            sources = [(message.peer, message.boxes) for message in bucket.messages]
        expected = [(peer, boxes, self._receive(peer, boxes)) for peer, boxes in sources]
        found: dict[str, torch.Tensor] = {}
        staging = 0
        for _, boxes, buffers in expected:
            for work, buffer in buffers:
                work.wait()
                staging += buffer.nbytes
            flats = [buffer for _, buffer in buffers]
            for (tensor, box), part in zip(boxes, self._unpacked(boxes, flats), strict=True):
                if box == needs[tensor]:
                    found[tensor] = part
                    continue
                if tensor not in found:
                    sizes = needs[tensor][1]
                    found[tensor] = torch.empty(
                        sizes, dtype=self._dtype(tensor), device=self.device
                    )
                    staging += found[tensor].nbytes
                found[tensor][within(_inside(box, needs[tensor]))].copy_(part)
        self.staging_bytes = max(self.staging_bytes, staging)
        self._forward(bucket, found)
        return found

    def close(self) -> None:
        """Leave the group."""
        self._finish_forwarding()
        del self.messages

    def _receive(
        self, peer: int, boxes: list[tuple[str, Box]]
    ) -> list[tuple[dist.Work, torch.Tensor]]:
        works = []
        for dtype, elements in _by_dtype((self._dtype(tensor), box) for tensor, box in boxes):
            buffer = torch.empty(elements, dtype=dtype, device=self.device)
            works.append((self.messages.receive(buffer, peer), buffer))
            self.received_bytes += buffer.nbytes
            self.messages_received += 1
        return works

    def _unpacked(
        self, boxes: list[tuple[str, Box]], buffers: list[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield the view of each box in the buffers, of which there is one per dtype."""
        read = {buffer.dtype: (buffer, 0) for buffer in buffers}
        for tensor, (_, sizes) in boxes:
            buffer, start = read[self._dtype(tensor)]
            stop = start + prod(sizes)
            read[buffer.dtype] = buffer, stop
            yield buffer[start:stop].view(sizes)

    def _forward(self, bucket: Bucket, found: dict[str, torch.Tensor]) -> None:
        if not bucket.forward_to:
            return
        packed = list(_packed([found[tensor] for tensor, _ in bucket.needs]))
        self._forwarding = [
            (self.messages.send(buffer, self.trainers + peer), buffer)
            for peer in bucket.forward_to
            for buffer in packed
        ]

    def _finish_forwarding(self) -> None:
        for work, _ in self._forwarding:
            work.wait()
        self._forwarding = []


class SharedInbox(Inbox):
    """An inbox of mapped trainer memory; stages only boxes that no single rank holds."""

    def __init__(
        self,
        model: ModelSettings,
        layout: LayoutSettings,
        plan: Plan,
        rank: int,
        shared: list[SharedMemory],
    ) -> None:
        super().__init__(model, plan, rank)
        peers = {message.peer for bucket in self.buckets for message in bucket.messages}
        self._pieces: dict[int, dict[str, list[tuple[Box, str, tuple[int, ...]]]]] = {}
        self._memory = {}
        for peer in peers:
            self._memory[peer] = Mapped(shared[peer])
            pieces = self._pieces[peer] = {}
            for piece in held(model, layout, peer):
                where = piece.box, f"{piece.chunk}/{piece.parameter}", piece.parameter_offset
                pieces.setdefault(piece.tensor, []).append(where)

    def take(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return views of the trainer's memory, or copies assembled from several ranks."""
        needs = dict(bucket.needs)
        found: dict[str, torch.Tensor] = {}
        staging = 0
        for message in bucket.messages:
            self.messages_received += 1
            for tensor, box in message.boxes:
                part = self._part(message.peer, tensor, box)
                self.received_bytes += part.nbytes
                if box == needs[tensor]:
                    found[tensor] = part
                    continue
                if tensor not in found:
                    found[tensor] = part.new_empty(needs[tensor][1])
                    staging += found[tensor].nbytes
                found[tensor][within(_inside(box, needs[tensor]))].copy_(part)
        self.staging_bytes = max(self.staging_bytes, staging)
        return found

    def close(self) -> None:
        """Unmap the trainer's memory."""
        self._memory.clear()

    def _part(self, peer: int, tensor: str, box: Box) -> torch.Tensor:
        for (offsets, sizes), parameter, place in self._pieces[peer][tensor]:
            inside, _ = _inside(box, (offsets, sizes))
            if all(
                low >= 0 and low + size <= whole
                for low, size, whole in zip(inside, box[1], sizes, strict=True)
            ):
                start = tuple(a + b for a, b in zip(inside, place, strict=True))
                return self._memory[peer][parameter][within((start, box[1]))]
        raise KeyError(f"rank {peer} holds no {box} of {tensor}")


def outbox(
    plan: Plan,
    rank: int,
    parameters: dict[str, torch.Tensor],
    meeting: Meeting | None,
    device: torch.device,
) -> Outbox:
    """Return a trainer rank's end; without a meeting, of shared memory.

    With a meeting it waits until all ranks have connected.
    """
    if meeting is None:
        return SharedOutbox(plan, rank, parameters)
    return MessageOutbox(plan, rank, parameters, Messages(meeting, rank, device))


def inbox(
    model: ModelSettings,
    layout: LayoutSettings,
    plan: Plan,
    rank: int,
    meeting: Meeting | None,
    shared: list[SharedMemory],
    device: torch.device,
) -> Inbox:
    """Return an engine rank's end; without a meeting, of the memory `shared` by trainer ranks.

    With a meeting it waits until all ranks have connected.
    """
    if meeting is None:
        return SharedInbox(model, layout, plan, rank, shared)
    messages = Messages(meeting, meeting.trainers + rank, device)
    return MessageInbox(model, plan, rank, messages, device)


def _inside(box: Box, outer: Box) -> Box:
    """Return a box relative to an outer one that contains it."""
    return tuple(a - b for a, b in zip(box[0], outer[0], strict=True)), box[1]


def _packed(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the parts, one buffer per dtype, in the order of first appearance."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        flat.setdefault(part.dtype, []).append(part.reshape(-1))
    return [torch.cat(slices) for slices in flat.values()]


def _by_dtype(parts: Iterable[tuple[torch.dtype, Box]]) -> Iterable[tuple[torch.dtype, int]]:
    """Return the number of elements in each dtype's buffer of `_packed`."""
    counts: dict[torch.dtype, int] = {}
    for dtype, (_, sizes) in parts:
        counts[dtype] = counts.get(dtype, 0) + prod(sizes)
    return counts.items()
