"""Who maps whose memory, and who meets to send messages, by the places of all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from parallel.engine.client import EngineError
from parallel.engine.topology import Topology, TrainerPlace
from parallel.engine.wire import EnginePlace
from parallel.errors import UserError, is_lost_peer
from parallel.settings import LayoutSettings
from parallel.weights import mapping
from parallel.weights.mapping import DeviceMemory, SharedMemory, mapped, share
from parallel.weights.planner import EngineSizes, Hosts, Plan
from tests.parallel.test_weight_plan import model

MIB = 1 << 20


def trainers(*places: tuple[str, str], weights: int = 10, room: int = 100) -> list[TrainerPlace]:
    return [TrainerPlace(host, gpu, weights * MIB, room * MIB) for host, gpu in places]


def topology(ranks: list[TrainerPlace], *engines: tuple[str, list[str]]) -> Topology:
    names = [f"engine {number}, rank 0" for number in range(len(engines))]
    return Topology(ranks, [EnginePlace(host, gpus) for host, gpus in engines], names)


COLOCATED = topology(
    trainers(("a", "A0"), ("a", "A1"), ("b", "B0"), ("b", "B1"), room=0),
    ("a", ["A0", "A1"]),
    ("b", ["B1", "B0"]),
)


def test_ranks_of_one_host_map_and_others_send() -> None:
    """On GPUs the room of /dev/shm does not matter: there is none here."""
    hosts = COLOCATED.hosts("auto")
    assert hosts == Hosts((0, 0, 1, 1), (0, 1))
    assert COLOCATED.hosts("messages") is None


def test_ranks_on_one_gpu_are_never_in_one_group() -> None:
    assert COLOCATED.groups(COLOCATED.hosts("auto")) == [[2, 3, 4], [0, 1, 5]]
    own = topology(trainers(("a", "A0"), ("a", "A1")), ("a", ["A2", "A0", "A1"]), ("b", ["B0"]))
    assert own.groups(own.hosts("auto")) == [[0, 1, 2, 3]]


def test_every_message_of_a_plan_is_within_a_group() -> None:
    """A trainer's host and two more, whose engines share no group: none feeds another."""
    layout, tensor = LayoutSettings(ranks=2), 2
    places = [("a", ["A0", "A1"]), ("a", ["A1", "A0"])]
    places += [(host, [f"{host}{each}"]) for host in "bc" for each in range(tensor)]
    ways = topology(trainers(("a", "A0"), ("a", "A1")), *places)
    hosts = ways.hosts("auto")
    groups = ways.groups(hosts)
    assert len(groups) == 3 and not ways.forwards(hosts)
    plan = Plan(model("qwen3_moe"), layout, EngineSizes((tensor,) * 3, False, hosts=hosts))
    for rank in range(3 * tensor):
        for bucket in plan.receive(rank):
            senders = {each.trainer_rank for each in bucket.messages}
            assert bucket.forwarded_from is None and not bucket.forward_to
            sent = {each for each in senders if not plan.fleet.mapped(each, rank)}
            assert all(any({each, 2 + rank} <= set(group) for group in groups) for each in sent)


def test_an_engine_that_shares_a_gpu_but_cannot_map_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"engine\.transport is messages; set it to auto"):
        COLOCATED.groups(None)
    hidden = topology(trainers(("a", "A0"), ("a", "A1")), ("a", ["A0"]))
    with pytest.raises(EngineError, match="GPUs A1 are not visible to it; add them to the end of"):
        hidden.groups(hidden.hosts("auto"))
    with pytest.raises(EngineError, match="engine 0, rank 0: the trainer's GPUs A1 are not visib"):
        hidden.hosts("shared_memory")


def test_a_host_without_room_sends_messages() -> None:
    """Each host by itself; a hidden GPU likewise."""
    places = trainers(("a", ""), ("a", ""), weights=60) + trainers(("b", ""), weights=60)
    mixed = topology(places, ("a", []), ("b", []), ("c", []))
    assert mixed.hosts("auto") == Hosts((0, 0, 1), (-1, 1, -1))
    assert mixed.groups(mixed.hosts("auto")) == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(EngineError, match="engines and ranks are on several hosts; set it to"):
        mixed.hosts("shared_memory")
    one = topology(places[:2], ("a", []))
    assert one.hosts("auto") is None
    with pytest.raises(EngineError, match="need 120 MiB of /dev/shm, 100 MiB available"):
        one.hosts("shared_memory")


def test_a_gpu_s_memory_is_opened_by_the_importer_s_own_number() -> None:
    """The exporter's number is of another GPU, or of none, where an engine sees others first."""
    memory = DeviceMemory("GPU-b", [0, b"handle", 64, 0, b"counter", 0, b"event", True])
    sent = msgspec.msgpack.encode(SharedMemory([memory], {}))
    shared = msgspec.msgpack.decode(sent, type=SharedMemory)
    seen = {"GPU-c": 0, "GPU-a": 1, "GPU-b": 2}
    opened: list[tuple[Any, ...]] = []
    with (
        mock.patch.object(mapping, "gpu_ordinals", lambda: seen),
        mock.patch.object(
            torch.UntypedStorage, "_new_shared_cuda", lambda *given: opened.append(given)
        ),
    ):
        mapped(shared)
        assert opened == [(2, b"handle", 64, 0, b"counter", 0, b"event", True)]
        del seen["GPU-b"]
        with pytest.raises(ValueError, match=r"GPU-b is not visible .* only GPU-c, GPU-a; add it"):
            mapped(shared)


class Exported:
    """A storage on the second GPU that its process sees."""

    device, _cdata = torch.device("cuda", 1), 7

    def _share_cuda_(self) -> tuple[Any, ...]:
        return (1, b"handle", 64, 0, b"counter", 0, b"event", True)


def test_a_gpu_s_memory_is_shared_with_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = mock.Mock(wraps=torch.ones(2, 3), dtype=torch.float32, shape=(2, 3))
    parameter.untyped_storage = Exported
    monkeypatch.setattr(mapping, "gpu_ordinals", lambda: {"GPU-a": 0, "GPU-b": 1})
    released: list[Any] = []
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_release_ipc_counter",
        lambda *counter, device: released.append((*counter, device)),
    )
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch reads both
    for name in names:
        monkeypatch.delenv(name, raising=False)
    [memory] = share({"a": parameter}).storages
    assert isinstance(memory, DeviceMemory)
    assert memory.gpu == "GPU-b"
    assert released == [(b"counter", 0, Exported.device)]  # else it would never be freed
    for name in names:
        with monkeypatch.context() as given:
            given.setenv(name, "backend:native,expandable_segments:True")
            with pytest.raises(UserError, match="cannot map memory of expandable segments; remove"):
                share({"a": parameter})


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Connection reset by peer",
        "[unbound_buffer.cc:81] Timed out waiting 1800000ms for send operation to complete",
        "[unbound_buffer.cc:83] Timed out waiting 1800000ms for recv operation to complete",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE",
        "Timed out after 1801 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 1800000ms, keys: /default_pg/0//x",
        "socketProgress: Connection closed by remote peer node7<41234>",
        "ncclRemoteError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_gloo_and_nccl_report_a_lost_peer(text: str) -> None:
    assert is_lost_peer(text)
