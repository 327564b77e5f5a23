"""torch's stores and gloo's devices listen on the configured interface only."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from parallel.cpu import gloo
from parallel.distributed import host_store
from tests.awaiting import PATIENCE_SECONDS
from tests.sockets import listening


def test_gloo_takes_every_interface_that_is_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(gloo._devices()) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError):
        gloo._devices()


def test_a_store_listens_on_its_host_alone() -> None:
    before = listening(os.getpid())
    store = host_store("127.0.0.3", 0, timedelta(seconds=PATIENCE_SECONDS))
    assert store.port
    assert listening(os.getpid()) - before == {"127.0.0.3"}
