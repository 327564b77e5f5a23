"""The execution of a refit plan, bucket by bucket, on the trainer's and the engines' ranks.

The planner decides which bytes go where; the transport moves them; fingerprints that can be summed
over the parts of a tensor, on any ranks, compare both ends.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from math import prod

import torch
import torch.distributed as dist

from parallel.boxes import Box, intersect, within
from parallel.device import DTYPES
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.holdings import held
from parallel.weights.names import is_precise
from parallel.weights.planner import Bucket, Plan, Slice
from parallel.weights.transport import Meeting, Messages, SharedMemory, mapped

IN_FLIGHT = 4  # messages that a trainer rank has packed and not yet sent
# Of fingerprints: odd factors with their bits well mixed, and the number of elements per pass.
ROWS, COLUMNS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
CHUNK = 1 << 20
BITS = {2: torch.int16, 4: torch.int32}


def wire_dtype(tensor: str, model: ModelSettings) -> torch.dtype:
    """Return the dtype in which a Hugging Face tensor is sent: the trainer's."""
    return torch.float32 if is_precise(tensor) else DTYPES[model.precision]


class Outbox:
    """The trainer rank's end, which sends `parameters` to the engines.

    They are named "chunk/parameter" and must stay the same tensors. With a meeting it waits until
    all ranks have connected; without one the engines map the memory (`transport.share`).
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: dict[str, torch.Tensor],
        meeting: Meeting | None,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.outgoing = plan.send(rank)
        self._trainers = plan.layout.sizes.ranks
        self._messages = Messages(meeting, rank, device) if meeting else None

    def send(self) -> None:
        """Send every slice once, IN_FLIGHT messages at a time; do nothing where memory is mapped.

        Raises RuntimeError where an engine has ended.
        """
        if self._messages is None:  # the engines read while the trainer waits for their answers
            return
        in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for message in self.outgoing:
            receiver = self._trainers + message.engine_rank
            slices = [self._values(each) for each in message.slices]
            for packed in _packed(slices):
                if len(in_flight) == IN_FLIGHT:
                    in_flight.popleft()[0].wait()
                in_flight.append((self._messages.send(packed, receiver), packed))
        for work, _ in in_flight:
            work.wait()

    def fingerprints(self) -> dict[str, int]:
        """Return the fingerprint of what this rank sends, by "engine rank/bucket".

        Summed over the trainer ranks, they must equal what the engine ranks report after loading.
        """
        found: dict[str, int] = {}
        for message in self.outgoing:
            key = f"{message.engine_rank}/{message.bucket}"
            for each in message.slices:
                value = fingerprint(each.tensor, each.box, self._values(each))
                found[key] = add_fingerprints(found.get(key, 0), value)
        return found

    def _values(self, each: Slice) -> torch.Tensor:
        return self.parameters[f"{each.chunk}/{each.parameter}"][within(each.parameter_box)]


class Inbox:
    """The engine rank's end, which counts received bytes and the largest staging buffers.

    With a meeting it waits until all ranks have connected, receives messages and forwards them to
    later engines; without one it maps the memory `shared` by the trainer ranks.
    """

    def __init__(
        self,
        model: ModelSettings,
        layout: LayoutSettings,
        plan: Plan,
        rank: int,
        meeting: Meeting | None,
        shared: list[SharedMemory],
        device: torch.device,
    ) -> None:
        self.buckets = plan.receive(rank)
        self._model, self._device = model, device
        self._trainers = layout.ranks
        self._messages: Messages | None = None
        self._forwarding: list[tuple[dist.Work, torch.Tensor]] = []
        self._memory: dict[int, dict[str, torch.Tensor]] = {}
        # By trainer rank and tensor: a box that the rank holds, its parameter, its offset in that.
        self._pieces: dict[int, dict[str, list[tuple[Box, str, tuple[int, ...]]]]] = {}
        self.start()
        if meeting is not None:
            self._messages = Messages(meeting, self._trainers + rank, device)
            return
        for sender in {
            message.trainer_rank for bucket in self.buckets for message in bucket.messages
        }:
            self._memory[sender] = mapped(shared[sender])
            pieces = self._pieces[sender] = {}
            for piece in held(model, layout, sender):
                where = piece.box, f"{piece.chunk}/{piece.parameter}", piece.parameter_offset
                pieces.setdefault(piece.tensor, []).append(where)

    def start(self) -> None:
        """Reset the counts."""
        self.received_bytes = self.staging_bytes = 0

    def take(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return the contents of a bucket's needed boxes by tensor, valid until the next call.

        A box that one rank holds whole is a view of its memory or message; others are assembled.
        """
        self._finish_forwarding()
        needs, found = dict(bucket.needs), dict[str, torch.Tensor]()
        self._staged = 0
        for tensor, box, part in self._received(bucket) if self._messages else self._mapped(bucket):
            need = needs[tensor]
            if box == need:
                found[tensor] = part
                continue
            if tensor not in found:
                found[tensor] = part.new_empty(need[1])
                self._staged += found[tensor].nbytes
            found[tensor][within(_inside(box, need))].copy_(part)
        self.staging_bytes = max(self.staging_bytes, self._staged)
        if self._messages and bucket.forward_to:
            packed = _packed(found[tensor] for tensor, _ in bucket.needs)
            self._forwarding = [
                (self._messages.send(buffer, self._trainers + receiver), buffer)
                for receiver in bucket.forward_to
                for buffer in packed
            ]
        return found

    def close(self) -> None:
        """Leave the group, or unmap the trainer's memory."""
        self._finish_forwarding()
        self._memory.clear()
        self._messages = None

    def _finish_forwarding(self) -> None:
        for work, _ in self._forwarding:
            work.wait()
        self._forwarding = []

    def _mapped(self, bucket: Bucket) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield a bucket's boxes with their contents in the trainer's memory."""
        for message in bucket.messages:
            for tensor, box in message.boxes:
                for outer, parameter, place in self._pieces[message.trainer_rank][tensor]:
                    if intersect(box, outer) != box:
                        continue
                    start = tuple(map(sum, zip(_inside(box, outer)[0], place, strict=True)))
                    part = self._memory[message.trainer_rank][parameter][within((start, box[1]))]
                    self.received_bytes += part.nbytes
                    yield tensor, box, part
                    break
                else:
                    raise KeyError(f"rank {message.trainer_rank} holds no {box} of {tensor}")

    def _received(self, bucket: Bucket) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield a bucket's boxes with their contents, views of one buffer per sender and dtype."""
        sources = [(message.trainer_rank, message.boxes) for message in bucket.messages]
        if bucket.forwarded_from is not None:
            sources = [(self._trainers + bucket.forwarded_from, bucket.needs)]
        assert self._messages is not None
        expected = []
        for sender, boxes in sources:  # all receives are started before the first is waited for
            elements: dict[torch.dtype, int] = {}
            for tensor, (_, sizes) in boxes:
                dtype = wire_dtype(tensor, self._model)
                elements[dtype] = elements.get(dtype, 0) + prod(sizes)
            works = {}
            for dtype, count in elements.items():
                buffer = torch.empty(count, dtype=dtype, device=self._device)
                works[dtype] = self._messages.receive(buffer, sender), buffer
                self.received_bytes += buffer.nbytes
            expected.append((boxes, works))
        for boxes, works in expected:
            for work, buffer in works.values():
                work.wait()
                self._staged += buffer.nbytes
            positions = dict.fromkeys(works, 0)
            for tensor, box in boxes:
                dtype = wire_dtype(tensor, self._model)
                start, stop = positions[dtype], positions[dtype] + prod(box[1])
                positions[dtype] = stop
                yield tensor, box, works[dtype][1][start:stop].view(box[1])


def _inside(box: Box, outer: Box) -> Box:
    """Return a box relative to an outer one that contains it."""
    return tuple(a - b for a, b in zip(box[0], outer[0], strict=True)), box[1]


def _packed(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate the parts, one buffer per dtype, in the order of first appearance."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        flat.setdefault(part.dtype, []).append(part.reshape(-1))
    return [torch.cat(slices) for slices in flat.values()]


def fingerprint(tensor: str, box: Box, values: torch.Tensor) -> int:
    """Return the int64 fingerprint of the values in a box of the tensor with this name.

    It is the sum over the elements of their bits, each times a number derived from the position in
    the whole tensor, modulo 2^64. So the fingerprints of parts add up, in any order, to that of the
    whole, and changed, moved or swapped values practically always change it.
    """
    (first, *across), sizes = box
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
        lines = torch.arange(first + start, first + start + len(some), device=device) + 1
        total += (((lines * _signed(ROWS)).unsqueeze(1) ^ places) * some).sum()
    return int(total)


def add_fingerprints(first: int, second: int) -> int:
    """Return the fingerprint of two disjoint parts together."""
    return _signed((first + second) % (1 << 64))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
