"""The agreement of an engine's members before every step, over real gloo groups in threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from parallel.cpu.gloo import separate_group
from parallel.engine.lockstep import Agreement, Call, Lockstep, OutOfStep
from tests.awaiting import PATIENCE_SECONDS

TIMEOUT = timedelta(seconds=PATIENCE_SECONDS)
Sent = tuple[bool, Call]  # whether a member has work, and the call that it waits with


def agreed(sent: Sequence[Sent]) -> list[Agreement | type[OutOfStep]]:
    """Return what each member learns, or that it ends, by what all of them send."""
    store = dist.HashStore()

    def member(rank: int) -> Agreement | type[OutOfStep]:
        lockstep = Lockstep(separate_group(store, rank, len(sent), TIMEOUT))
        try:
            return lockstep.agree(*sent[rank])
        except OutOfStep as error:
            assert str(error).endswith(f" do not all wait to {sent[rank][1].name.lower()}")
            return OutOfStep

    with ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(member, range(len(sent))))


@pytest.mark.parametrize(
    ("sent", "learned"),
    [
        # One member with a request has all of them take a step, but for none that waits alone.
        ([(False, Call.NONE)] * 3, Agreement(working=False, waiting=False)),
        ([(True, Call.NONE), *[(False, Call.NONE)] * 2], Agreement(working=True, waiting=False)),
        ([(True, Call.NONE), *[(False, Call.REFIT)] * 2], Agreement(working=True, waiting=False)),
        ([(False, Call.REFIT)] * 3, Agreement(working=False, waiting=True)),
        ([(True, Call.REFIT), *[(False, Call.REFIT)] * 2], Agreement(working=True, waiting=True)),
    ],
)
def test_members_learn_whether_any_works_and_whether_all_wait(
    sent: list[Sent], learned: Agreement
) -> None:
    assert agreed(sent) == [learned] * 3


@pytest.mark.parametrize(
    "calls",
    [
        [Call.SLEEP, Call.WAKE, Call.WAKE],
        [Call.JOIN, Call.REFIT, Call.SLEEP],  # on average as the second
        [Call.START, Call.REFIT, Call.WAKE],
    ],
)
def test_members_with_different_calls_all_end(calls: list[Call]) -> None:
    """None begins a collective that the others do not take."""
    assert agreed([(False, call) for call in calls]) == [OutOfStep] * 3
