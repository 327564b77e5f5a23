"""With CUDA, objects and flags go over a gloo group of all ranks and never over NCCL.

The default group here is torch's "fake" one, which Megatron's groups inherit: it delivers nothing,
as NCCL would have to deliver to a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from parallel.settings import LayoutSettings
from tests.ranks import Ranks, serve_rank

LAYOUT = LayoutSettings(ranks=4, pipeline=2)


def serve(*arguments: Any) -> None:
    """Serve as a rank whose default group delivers nothing."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    assert torch.testing
    with mock.patch("parallel.distributed.backend", lambda: "fake"):
        serve_rank(*arguments)


def exchange() -> dict[str, Any]:
    """Return what every exchange of objects and flags gives on this rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from parallel import distributed

    rank = dist.get_rank()
    distributed.barrier()
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    )
    return {
        "default": dist.get_backend(),
        "megatron": {dist.get_backend(group) for group in groups},
        "broadcast": distributed.broadcast(f"of {rank}", 2),
        "gather": distributed.gather(rank),
        "on_main": distributed.on_main(lambda: f"by {rank}"),
        "scatter": distributed.scatter(lambda key: f"for {key}", rank % 2),
        "max_over_ranks": distributed.max_over_ranks(float(rank)),
        "any_rank": distributed.any_rank(rank == 3, False),
        "sum_over_data": distributed.sum_over_data({"loss": float(rank)}),
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(LAYOUT, serve)
    yield ranks
    ranks.close()


def test_objects_and_flags_avoid_the_default_group(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(exchange)):
        assert found == {
            "default": "fake",
            "megatron": {"fake"},
            "broadcast": "of 2",
            "gather": [0, 1, 2, 3],
            "on_main": "by 0",
            "scatter": f"for {rank % 2}",
            "max_over_ranks": 3.0,
            "any_rank": [True, False],
            "sum_over_data": {"loss": 5.0},  # of ranks 2 and 3, the last stage
        }
