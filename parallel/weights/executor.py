"""The execution of a refit plan, bucket by bucket, on the trainer's and the engines' ranks.

The planner decides which bytes go where; the transport moves them; fingerprints that can be summed
over the parts of a tensor, on any ranks, compare both ends.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from parallel.machine.device import DTYPES
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box, intersect, within
from parallel.weights.holdings import held
from parallel.weights.mapping import SharedMemory, mapped
from parallel.weights.names import is_precise
from parallel.weights.planner import Bucket, Plan, Slice, by_tensor
from parallel.weights.transport import Addressed, Meeting, MessageBatch, Messages

IN_FLIGHT = 4  # messages that a trainer rank has packed and that are not yet sent
# Of fingerprints: odd factors with their bits well mixed, and the number of elements per pass.
ROWS, COLUMNS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
CHUNK = 1 << 20
BITS = {2: torch.int16, 4: torch.int32}

Boxes = list[tuple[str, Box]]
Expected = tuple[Boxes, dict[torch.dtype, torch.Tensor]]  # a message's boxes, and its buffers


def wire_dtype(tensor: str, model: ModelSettings) -> torch.dtype:
    """Return the dtype in which a Hugging Face tensor is sent: the trainer's."""
    return torch.float32 if is_precise(tensor) else DTYPES[model.precision]


class _Groups:
    """The groups over which a rank's messages go: one, but for ranks that share GPUs."""

    def __init__(self, meetings: Sequence[Meeting], rank: int, device: torch.device) -> None:
        self._all = [
            Messages(meeting, rank, device) for meeting in meetings if rank in meeting.members
        ]

    def of(self, rank: int) -> Messages:
        """Return the group with another rank."""
        for messages in self._all:
            if messages.reaches(rank):
                return messages
        raise RuntimeError(f"refit: no process group with rank {rank}")

    def close(self) -> None:
        """Leave all groups."""
        while self._all:
            self._all.pop().close()


class Outbox:
    """The trainer rank's end, which sends `parameters`, named "chunk/parameter", to the engines.

    Engine ranks that map this rank's memory (`mapping.share`) are sent nothing.

    Waits for: all ranks of the meetings, in `__init__`; in `send`, the engine ranks that receive.
    Unblocked by: `Fleet._join`, which has every engine make its `Inbox`; then each `Inbox.take`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: dict[str, torch.Tensor],
        meetings: Sequence[Meeting],
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.outgoing = plan.send(rank)
        self._trainers = plan.layout.sizes.ranks
        self._sent = [
            message for message in self.outgoing if not plan.fleet.mapped(rank, message.engine_rank)
        ]
        self._groups = _Groups(meetings, rank, device)

    def send(self) -> None:
        """Send every slice once, IN_FLIGHT messages at a time.

        Waits for: the receiver of the oldest message, while IN_FLIGHT are packed and not sent.
        Unblocked by: `Inbox.take` of its bucket; an engine that has ended raises RuntimeError.
        """
        in_flight: deque[MessageBatch] = deque()
        for message in self._sent:
            receiver = self._trainers + message.engine_rank
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().wait()
            packed = _packed(self._values(slice_) for slice_ in message.slices)
            sends = [(buffer, receiver) for buffer in packed]
            in_flight.append(self._groups.of(receiver).start(sends=sends))
            del packed, sends  # the batch holds them until they are sent
        for batch in in_flight:
            batch.wait()

    def close(self) -> None:
        """Leave the groups."""
        self._groups.close()

    def fingerprints(self) -> dict[str, int]:
        """Return the fingerprint of what this rank sends, by "engine rank/bucket".

        Summed over the trainer ranks, they must equal what the engine ranks report after loading.
        """
        fingerprints: dict[str, int] = {}
        for message in self.outgoing:
            key = f"{message.engine_rank}/{message.bucket}"
            for slice_ in message.slices:
                value = fingerprint(slice_.tensor, slice_.box, self._values(slice_))
                fingerprints[key] = add_fingerprints(fingerprints.get(key, 0), value)
        return fingerprints

    def _values(self, slice_: Slice) -> torch.Tensor:
        return self.parameters[f"{slice_.chunk}/{slice_.parameter}"][within(slice_.parameter_box)]


class Inbox:
    """The engine rank's end, which counts received bytes and the largest staging buffers.

    It maps the memory of trainer ranks on its host, receives messages of others, and forwards what
    later engines need.

    Waits for: all ranks of the meetings, in `__init__`; in `take`, the senders of the bucket.
    Unblocked by: each trainer rank's `Outbox`, and its `send`; of a forwarded bucket, the `take` of
        the engine rank that is fed before this one.
    """

    def __init__(
        self,
        model: ModelSettings,
        layout: LayoutSettings,
        plan: Plan,
        rank: int,
        meetings: Sequence[Meeting],
        device: torch.device,
    ) -> None:
        self.buckets = plan.receive(rank)
        self._model, self._layout, self._device = model, layout, device
        self._trainers = layout.ranks
        senders = {message.trainer_rank for bucket in self.buckets for message in bucket.messages}
        self._mapped = {sender for sender in senders if plan.fleet.mapped(sender, rank)}
        self._forwarding: list[MessageBatch] = []
        self._memory: dict[int, dict[str, torch.Tensor]] = {}
        # By trainer rank and tensor: a box that the rank holds, its parameter, its offset in that.
        self._pieces: dict[int, dict[str, list[tuple[Box, str, tuple[int, ...]]]]] = {}
        self.start()
        self._groups = _Groups(meetings, self._trainers + rank, device)

    def map(self, shared: dict[int, SharedMemory]) -> None:
        """Map the memory of the trainer ranks of this host, instead of what was mapped before."""
        self.unmap()
        for sender in sorted(self._mapped):
            self._memory[sender] = mapped(shared[sender])
            if sender in self._pieces:
                continue
            pieces = self._pieces[sender] = {}
            for piece in held(self._model, self._layout, sender):
                where = piece.box, f"{piece.chunk}/{piece.parameter}", piece.parameter_offset
                pieces.setdefault(piece.tensor, []).append(where)

    def unmap(self) -> None:
        """Unmap the trainer's memory, which is not freed before."""
        self._memory.clear()

    def start(self) -> None:
        """Reset the counts."""
        self.received_bytes = self.staging_bytes = 0

    def take(self, bucket: Bucket) -> dict[tuple[str, Box], torch.Tensor]:
        """Return the contents of a bucket's needed boxes, valid until the next call.

        A box that one rank holds whole is a view of its memory or message; others are assembled.

        Example: of a box of 32 rows, ranks 0 and 1 hold 16 each: both halves are received, and
        copied into one buffer, which `staging_bytes` counts. Where one rank holds all, nothing is.
        """
        # The plan's order: a bucket is forwarded before the next one is received (`Plan.send`).
        self._finish_forwarding()
        needs, contents = by_tensor(bucket.needs), dict[tuple[str, Box], torch.Tensor]()
        self._staged = 0
        for tensor, box, values in self._contents(bucket):
            need = next(
                candidate for candidate in needs[tensor] if intersect(box, candidate) == box
            )
            key = tensor, need
            if box == need:
                contents[key] = values
                continue
            if key not in contents:
                # `part` may be in a trainer's memory, on its GPU.
                contents[key] = torch.empty(need[1], dtype=values.dtype, device=self._device)
                self._staged += contents[key].nbytes
            contents[key][within(_inside(box, need))].copy_(values)
        self.staging_bytes = max(self.staging_bytes, self._staged)
        if bucket.forward_to:
            packed = _packed(contents[need] for need in bucket.needs)
            receivers = [self._trainers + rank for rank in bucket.forward_to]
            self._forwarding = [
                self._groups.of(receiver).start(sends=[(buffer, receiver) for buffer in packed])
                for receiver in receivers
            ]
        return contents

    def close(self) -> None:
        """Leave the groups, and unmap the trainer's memory."""
        try:
            self._finish_forwarding()
        finally:
            self.unmap()
            self._groups.close()

    def _finish_forwarding(self) -> None:
        while self._forwarding:
            self._forwarding.pop(0).wait()

    def _contents(self, bucket: Bucket) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield a bucket's boxes with their contents, mapped ones while others are received."""
        started = list(self._start_receiving(bucket))
        yield from self._mapped_contents(bucket)
        for batch, expected in started:
            batch.wait()
            for boxes, buffers in expected:
                self._staged += sum(buffer.nbytes for buffer in buffers.values())
                yield from self._views(boxes, buffers)

    def _mapped_contents(self, bucket: Bucket) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield a bucket's boxes with their contents in the trainer's memory."""
        for message in bucket.messages:
            if message.trainer_rank not in self._mapped:
                continue
            for tensor, box in message.boxes:
                for outer, parameter, place in self._pieces[message.trainer_rank][tensor]:
                    if intersect(box, outer) != box:
                        continue
                    start = tuple(map(sum, zip(_inside(box, outer)[0], place, strict=True)))
                    values = self._memory[message.trainer_rank][parameter][within((start, box[1]))]
                    self.received_bytes += values.nbytes
                    yield tensor, box, values
                    break
                else:
                    raise KeyError(f"rank {message.trainer_rank} holds no {box} of {tensor}")

    def _start_receiving(self, bucket: Bucket) -> Iterator[tuple[MessageBatch, list[Expected]]]:
        """Start all receives of a bucket, a round at a time; yield batches with their contents."""
        rounds: dict[int, list[tuple[int, Boxes]]] = {}
        for message in bucket.messages:
            if message.trainer_rank not in self._mapped:
                rounds.setdefault(message.round, []).append((message.trainer_rank, message.boxes))
        if bucket.forwarded_from is not None:
            rounds[0] = [(self._trainers + bucket.forwarded_from, bucket.needs)]
        for sources in rounds.values():
            receives: list[Addressed] = []
            expected: list[Expected] = []
            for sender, boxes in sources:
                buffers = self._buffers(boxes)
                receives += [(buffer, sender) for buffer in buffers.values()]
                expected.append((boxes, buffers))
            yield self._groups.of(sources[0][0]).start(receives=receives), expected

    def _buffers(self, boxes: Boxes) -> dict[torch.dtype, torch.Tensor]:
        """Return room for a message, by dtype, as the sender packs it."""
        elements: dict[torch.dtype, int] = {}
        for tensor, (_, sizes) in boxes:
            dtype = wire_dtype(tensor, self._model)
            elements[dtype] = elements.get(dtype, 0) + prod(sizes)
        buffers = {}
        for dtype, count in elements.items():
            buffers[dtype] = torch.empty(count, dtype=dtype, device=self._device)
            self.received_bytes += buffers[dtype].nbytes
        return buffers

    def _views(
        self, boxes: Boxes, buffers: dict[torch.dtype, torch.Tensor]
    ) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield a message's boxes with their contents, views of its buffers."""
        positions = dict.fromkeys(buffers, 0)
        for tensor, box in boxes:
            dtype = wire_dtype(tensor, self._model)
            start, stop = positions[dtype], positions[dtype] + prod(box[1])
            positions[dtype] = stop
            yield tensor, box, buffers[dtype][start:stop].view(box[1])


def _inside(box: Box, outer: Box) -> Box:
    """Return a box relative to an outer one that contains it."""
    return tuple(a - b for a, b in zip(box[0], outer[0], strict=True)), box[1]


def _packed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the parts, one buffer per dtype, in the order of first appearance."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return [torch.cat(slices) for slices in flat.values()]


def fingerprint(tensor: str, box: Box, values: torch.Tensor) -> int:
    """Return the int64 fingerprint of the values in a box of the tensor with this name.

    It is the sum over the elements of their bits, each times a number derived from the position in
    the whole tensor, modulo 2^64. So the fingerprints of parts add up, in any order, to that of the
    whole, and changed, moved or swapped values practically always change it.

    Example: the first row and the other two of a [3, 2] tensor, which different ranks may hold.

        >>> values = torch.arange(6.0).view(3, 2)
        >>> first = fingerprint("w", ((0, 0), (1, 2)), values[:1])
        >>> others = fingerprint("w", ((1, 0), (2, 2)), values[1:])
        >>> add_fingerprints(first, others) == fingerprint("w", ((0, 0), (3, 2)), values)
        True
        >>> first == fingerprint("w", ((1, 0), (1, 2)), values[:1])  # the same values elsewhere
        False
    """
    (first_row, *across), sizes = box
    width = values.numel() // sizes[0]
    rows = values.contiguous().view(BITS[values.element_size()]).view(sizes[0], width)
    device = values.device
    salt = _signed(int.from_bytes(hashlib.sha256(tensor.encode()).digest()[:8], "big"))
    places = salt + torch.zeros(1, dtype=torch.int64, device=device)
    if across:
        columns = torch.arange(across[0], across[0] + width, device=device) + 1
        places = places ^ columns * _signed(COLUMNS)
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = max(1, CHUNK // width)
    for start in range(0, sizes[0], step):
        some = rows[start : start + step]
        lines = torch.arange(first_row + start, first_row + start + len(some), device=device) + 1
        total += (((lines * _signed(ROWS)).unsqueeze(1) ^ places) * some).sum()
    return int(total)


def add_fingerprints(one: int, other: int) -> int:
    """Return the fingerprint of two disjoint parts together."""
    return _signed((one + other) % (1 << 64))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
