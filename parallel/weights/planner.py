"""The plan of a refit: which trainer rank sends which slice to which engine rank.

Every rank computes only its own part, by the same arithmetic as its peers, so no metadata is
exchanged: the receiver expects the sender's messages in their order. An engine rank receives each
needed element exactly once, in buckets of one layer. Never imports torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box, intersect
from parallel.weights.holdings import Layout, Shard
from parallel.weights.names import ModelWeights, tensor_prefix
from parallel.weights.needs import needed_of

GRAIN = 1 << 19  # elements; below about 1 MiB two messages cost more than an idle replica


class Hosts(NamedTuple):
    """The number of each trainer rank's host, and of the host whose memory each engine rank maps.

    An engine rank that can map nothing has the number -1.
    """

    trainers: tuple[int, ...]
    engines: tuple[int, ...]

    def map(self, trainer: int, engine_rank: int) -> bool:
        """Return whether an engine rank maps the memory of a trainer rank."""
        return self.trainers[trainer] == self.engines[engine_rank]


@dataclass(frozen=True)
class EngineSizes:
    """The ranks of each engine, numbered across engines.

    An engine's ranks are those of its `data` members, one member after another. With
    `expert_parallel` they share the experts, each whole. With `forwarding`, trainers feed no more
    engine ranks than there are trainers, and every other engine is fed by an earlier one of its
    size. With `hosts`, engine ranks map what ranks of their host hold; these are fed by the
    trainers, and do not count.
    """

    engines: tuple[int, ...]
    forwarding: bool = True
    expert_parallel: bool = False
    data: int = 1
    hosts: Hosts | None = None

    def mapped(self, trainer: int, engine_rank: int) -> bool:
        """Return whether an engine rank maps the memory of a trainer rank."""
        return self.hosts is not None and self.hosts.map(trainer, engine_rank)


@dataclass(frozen=True, slots=True)
class Message:
    """The boxes of a bucket that one trainer rank sends to one engine rank, in order.

    Messages to a rank come round by round: in a round, each trainer sends to one engine rank.
    """

    trainer_rank: int
    boxes: list[tuple[str, Box]]
    round: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A unit of loading on an engine rank: a layer, the embedding, or the last norm and the head.

    `tensors` names all that vLLM's loaders take of the bucket; `needs` are the boxes that this rank
    copies. Either the boxes of `messages` cover the needs exactly once, or the engine rank
    `forwarded_from` sends them all in order. This rank sends them on to the ranks in `forward_to`.
    """

    key: int
    tensors: list[str]
    needs: list[tuple[str, Box]]
    messages: list[Message]
    forwarded_from: int | None
    forward_to: tuple[int, ...]


class Slice(NamedTuple):
    """A slice to send: tensor[box] is parameter[parameter_box] of a virtual chunk."""

    chunk: int
    parameter: str
    parameter_box: Box
    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """The trainer rank's view of a `Message` to `engine_rank`."""

    bucket: int
    engine_rank: int
    slices: list[Slice]


class _Item(NamedTuple):
    """The part of a piece of a shard that an engine rank needs, named within its bucket."""

    tensor: str
    box: Box
    parameter: str
    parameter_offset: tuple[int, ...]


class _Items(NamedTuple):
    """The items of an engine rank and a shard, in order, and the first element of each."""

    items: list[_Item]
    starts: list[int]
    elements: int


class Plan:
    """The plan of one trainer and its engines; `receive` and `send` give each rank its own part.

    Replicas share the load: the items that an engine's ranks need of a bucket's shard are
    concatenated and cut at whole rows into equal lengths, one per rank that holds the shard. Every
    rank processes its list in the order of steps; in each step the engines take buckets of
    different pipeline stages, so that all stages send at the same time.

    Example: 2 tensor-parallel trainer ranks feed 1 engine of 1 rank. Each sends half of the
    embedding. Of layer 0 rank 0 sends its 4 slices (of q, k, v and o), and rank 1 its 4 and the 17
    tensors that both hold whole; of layer 1 it is the other way round.

        >>> model = ModelSettings(
        ...     vocabulary_size=64, hidden_size=32, layers=2, attention_heads=4, key_value_heads=2,
        ...     head_dim=8, experts=4, experts_per_token=2, expert_hidden_size=16,
        ... )
        >>> plan = Plan(model, LayoutSettings(ranks=2, tensor=2), EngineSizes((1,)))
        >>> for message in plan.receive(0)[0].messages:
        ...     print(message.trainer_rank, *message.boxes)
        0 ('model.embed_tokens.weight', ((0, 0), (32, 32)))
        1 ('model.embed_tokens.weight', ((32, 0), (32, 32)))
        >>> [(sent.bucket, len(sent.slices)) for sent in plan.send(0)][:3]
        [(-1, 1), (0, 4), (1, 21)]
        >>> [(sent.bucket, len(sent.slices)) for sent in plan.send(1)][:3]
        [(-1, 1), (0, 21), (1, 4)]
    """

    def __init__(self, model: ModelSettings, layout: LayoutSettings, fleet: EngineSizes) -> None:
        self.description = ModelWeights(model)
        self.layout = Layout(model, layout)
        self.fleet = fleet
        # Each engine rank's engine, the engine's size, and the rank's place in it.
        self._ranks = [(e, size, at) for e, size in enumerate(fleet.engines) for at in range(size)]
        self._first = [0, *accumulate(fleet.engines)]
        self._near = cache(self._find_near)
        near = [
            any(self._near(range(layout.ranks), first_rank + at) for at in range(size))
            for first_rank, size in zip(self._first[:-1], fleet.engines, strict=True)
        ]
        self._sources = _sources(fleet, layout.ranks, near)
        self.forwards = any(source is not None for source in self._sources)
        self.fed = [engine for engine, source in enumerate(self._sources) if source is None]
        self._position = {key: at for at, key in enumerate(self.description.buckets)}
        # Each bucket's stage, and its index among the buckets of that stage.
        self._turns: dict[int, tuple[int, int]] = {}
        seen = [0] * layout.pipeline
        for key in self.description.buckets:
            stage = self.layout.place(key).stage
            self._turns[key] = stage, seen[stage]
            seen[stage] += 1
        # The stage that each engine starts with; forwarded engines follow their source.
        self._first_stages: list[int] = []
        for engine, source in enumerate(self._sources):
            self._first_stages.append(
                self.fed.index(engine) * layout.pipeline // len(self.fed)
                if source is None
                else self._first_stages[source]
            )
        weights, how = self.description.weights, (fleet.expert_parallel, fleet.data)
        self._needed = cache(lambda kind, size, at: [*needed_of(weights[kind], size, at, *how)])
        self._shared = cache(self._find_shared)
        self._line = cache(self._find_line)

    def receive(self, rank: int) -> list[Bucket]:
        """Return the buckets of an engine rank, in the order of loading."""
        engine, ranks, place = self._ranks[rank]
        source = self._sources[engine]
        # Engines of one size need equal boxes at equal places, so a rank forwards all it has.
        from_rank = None if source is None else self._first[source] + place
        to = [later for later, fed_by in enumerate(self._sources) if fed_by == engine]
        to_ranks = tuple(self._first[later] + place for later in to)
        buckets = []
        for key in sorted(self.description.buckets, key=lambda key: self.step(engine, key)):
            prefix, kind = tensor_prefix(key), self.description.kind(key)
            names = [name for name, _, _ in self.description.loaded(key)]
            needs = [(prefix + name, box) for name, box in self._needed(kind, ranks, place)]
            messages = [] if from_rank is not None else self._messages(key, rank)
            buckets.append(Bucket(key, names, needs, messages, from_rank, to_ranks))
        return buckets

    def source(self, rank: int) -> int:
        """Return the engine rank (maybe `rank`) that receives this rank's bytes from trainers."""
        engine, _, place = self._ranks[rank]
        while (earlier := self._sources[engine]) is not None:
            engine = earlier
        return self._first[engine] + place

    def send(self, rank: int) -> list[OutgoingMessage]:
        """Return the messages of a trainer rank, in an order in which no ranks deadlock.

        Ranks go through steps, and in each through rounds, of which both ends of a message know the
        number. An engine's forwarding of step s is between its own steps s and s + 1, and in those
        of the rank that it feeds likewise: with d engines between trainer and receiver, 2s + d is a
        time as `Messages.start` asks for.
        """
        messages = []
        for key in self.description.buckets:
            stage, chunk, ours = self.layout.place(key)
            if stage != self.layout.stage(rank):
                continue
            theirs = tensor_prefix(key)
            for receiver, items in self._sent(key, rank).items():
                slices = [
                    Slice(chunk, ours + name, (offset, box[1]), theirs + tensor, box)
                    for tensor, box, name, offset in items
                ]
                messages.append(OutgoingMessage(key, receiver, slices))
        return sorted(
            messages,
            key=lambda message: (
                self.step(self._ranks[message.engine_rank][0], message.bucket),
                self._round(rank, message.engine_rank),
            ),
        )

    def step(self, engine: int, key: int) -> int:
        """Return the step in which an engine loads a bucket; stages take turns."""
        stage, turn = self._turns[key]
        pipeline = self.layout.sizes.pipeline
        return turn * pipeline + (stage - self._first_stages[engine]) % pipeline

    def _round(self, trainer: int, engine_rank: int) -> int:
        """Return the round of a step in which two ranks meet; each pairs all ranks differently."""
        return (trainer + engine_rank) % len(self._ranks)

    def _mapped_by(
        self, key: int, rank: int, holders: range, first_rank: int, ranks: int
    ) -> list[int]:
        """Return the places in an engine whose ranks map a shard from this trainer rank."""
        if self.fleet.hosts is None:
            return []
        places = range(ranks)
        return [at for at in places if self._mapped_from(key, holders, first_rank + at) == rank]

    def _find_near(self, holders: range, engine_rank: int) -> list[int]:
        """Return the holders whose memory an engine rank maps."""
        return [rank for rank in holders if self.fleet.mapped(rank, engine_rank)]

    def _mapped_from(self, key: int, holders: range, engine_rank: int) -> int | None:
        """Return the one holder whose memory an engine rank maps, so that nothing is assembled."""
        if self.fleet.hosts is not None and (near := self._near(holders, engine_rank)):
            return near[(self._position[key] + engine_rank) % len(near)]
        return None

    def _messages(self, key: int, rank: int) -> list[Message]:
        kind, prefix = self.description.kind(key), tensor_prefix(key)
        stage = self.layout.place(key).stage
        engine, ranks, place = self._ranks[rank]
        boxes: dict[int, list[tuple[str, Box]]] = {}
        for shard in self.layout.shards():
            needed_items = self._shared(kind, shard, ranks, place)
            if not needed_items.items:
                continue
            holders = self.layout.holders(shard, stage)
            if (near := self._mapped_from(key, holders, rank)) is not None:
                items = ((prefix + item.tensor, item.box) for item in needed_items.items)
                boxes.setdefault(near, []).extend(items)
                continue
            line = self._line(kind, shard, ranks)
            start, total, share_count = line[place], line[-1], _share_count(line, holders)
            first_share, last_share = (
                _share(start + at, total, share_count) for at in (0, needed_items.elements - 1)
            )
            # Where fewer ranks send than hold a shard, they take turns.
            turn = (self._position[key] + engine) * share_count
            for share in range(first_share, last_share + 1):
                low, high = (
                    total * share // share_count - start,
                    total * (share + 1) // share_count - start,
                )
                taken = [
                    (prefix + item.tensor, item.box) for item in _within(needed_items, low, high)
                ]
                if taken:
                    boxes.setdefault(holders[(turn + share) % len(holders)], []).extend(taken)
        messages = [Message(sender, boxes[sender], self._round(sender, rank)) for sender in boxes]
        return sorted(messages, key=lambda message: (message.round, message.trainer_rank))

    def _sent(self, key: int, rank: int) -> dict[int, list[_Item]]:
        """Return the items of a bucket that a trainer rank sends to each engine rank."""
        kind, stage = self.description.kind(key), self.layout.stage(rank)
        sent: dict[int, list[_Item]] = {}
        for shard in self.layout.shards_of(rank):
            holders = self.layout.holders(shard, stage)
            for engine in self.fed:
                ranks, first_rank = self.fleet.engines[engine], self._first[engine]
                whole = self._mapped_by(key, rank, holders, first_rank, ranks)
                for place in whole:
                    if items := self._shared(kind, shard, ranks, place).items:
                        sent.setdefault(first_rank + place, []).extend(items)
                line = self._line(kind, shard, ranks)
                total, share_count = line[-1], _share_count(line, holders)
                turn = (self._position[key] + engine) * share_count
                share = (holders.index(rank) - turn) % len(holders)
                if not total or share >= share_count:
                    continue
                low, high = total * share // share_count, total * (share + 1) // share_count
                for place in range(bisect_right(line, low) - 1, bisect_left(line, high)):
                    if self._mapped_from(key, holders, first_rank + place) is not None:
                        continue
                    needed_items = self._shared(kind, shard, ranks, place)
                    if taken := _within(needed_items, low - line[place], high - line[place]):
                        sent.setdefault(first_rank + place, []).extend(taken)
        return sent

    def _find_line(self, kind: str, shard: Shard, ranks: int) -> list[int]:
        """Return the start of each engine rank's items, concatenated over the ranks."""
        counts = (self._shared(kind, shard, ranks, rank).elements for rank in range(ranks))
        return [0, *accumulate(counts)]

    def _find_shared(self, kind: str, shard: Shard, ranks: int, rank: int) -> _Items:
        """Return the items that a tensor-parallel rank of an engine needs of a shard."""
        needs, items = by_tensor(self._needed(kind, ranks, rank)), []
        for piece in self.layout.pieces(self.description.weights[kind], shard):
            for need in needs.get(piece.tensor, ()):
                if common := intersect(piece.box, need):
                    offset = _shifted(piece.parameter_offset, piece.box[0], common[0])
                    items.append(_Item(piece.tensor, common, piece.parameter, offset))
        starts = [0, *accumulate(prod(item.box[1]) for item in items)]
        return _Items(items, starts[:-1], starts[-1])


def by_tensor(needs: Iterable[tuple[str, Box]]) -> dict[str, list[Box]]:
    """Return the boxes of each tensor, in order; several of one that joins several matrices."""
    boxes: dict[str, list[Box]] = {}
    for tensor, box in needs:
        boxes.setdefault(tensor, []).append(box)
    return boxes


def _sources(fleet: EngineSizes, trainers: int, near: list[bool]) -> list[int | None]:
    """Return the engine that forwards to each engine; None where the trainers feed it."""
    sources: list[int | None] = []
    same: dict[int, list[int]] = {}  # engines so far, by size
    direct: dict[int, int] = {}  # and how many of them are fed, once that is settled
    fed = 0
    for engine, size in enumerate(fleet.engines):
        if near[engine]:
            sources.append(None)
            continue
        earlier = same.setdefault(size, [])
        # Fed by the trainers, some of them would send twice. From the first such engine on, each of
        # this size follows the one `direct` places before, so that chains have equal lengths.
        if fleet.forwarding and earlier and fed + size > trainers:
            direct.setdefault(size, len(earlier))
        if size in direct:
            sources.append(earlier[-direct[size]])
        else:
            sources.append(None)
            fed += size
        earlier.append(engine)
    return sources


def _share(position: int, total: int, share_count: int) -> int:
    """Return the part of range(total) that has a position; part n starts at total * n // parts."""
    return ((position + 1) * share_count - 1) // total


def _share_count(line: list[int], holders: range) -> int:
    """Return the number of ranks that share the sending of a shard."""
    return min(len(holders), max(1, line[-1] // GRAIN))


def _within(needed_items: _Items, low: int, high: int) -> list[_Item]:
    """Return the whole rows that start in elements [low, high) of an engine rank's items."""
    if low <= 0 and high >= needed_items.elements:
        return needed_items.items
    taken = []
    for item, start in zip(needed_items.items, needed_items.starts, strict=True):
        offsets, sizes = item.box
        row = prod(sizes[1:])
        first_row = min(max(0, -(-(low - start) // row)), sizes[0])
        last_row = min(max(0, -(-(high - start) // row)), sizes[0])
        if first_row < last_row:
            box = (offsets[0] + first_row, *offsets[1:]), (last_row - first_row, *sizes[1:])
            place = _shifted(item.parameter_offset, offsets, box[0])
            taken.append(item._replace(box=box, parameter_offset=place))
    return taken


def _shifted(
    offset: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(a - b + c for a, b, c in zip(offset, old, new, strict=True))
