"""Real engines, refitted by real trainer ranks of many layouts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.engine import refit_cases
from tests.engine.engine_process import EngineOf
from tests.engine.engine_settings import ENGINE, MODELS
from tests.ranks import On
from tests.tiers import tiered

LAYOUTS = {
    "1 rank": LayoutSettings(),
    "TP2": LayoutSettings(ranks=2, tensor=2),
    "EP2": LayoutSettings(ranks=2, expert=2),
    "PP2": LayoutSettings(ranks=2, pipeline=2),
    "TP2 EP2 PP2": LayoutSettings(ranks=4, tensor=2, expert=2, pipeline=2),
}
FAMILIES = "qwen3_moe", "mixtral", "gpt_oss"
FLEETS = {"one TP1": (0,), "one TP2": (1,), "two": (0, 1)}


TRANSPORTS = ["shared_memory", "messages"]


@pytest.fixture
def engines(family: str, engine_of: EngineOf) -> list[Path]:
    """The addresses of an engine of one rank and an engine of two ranks."""
    return [engine_of(family, tensor).address for tensor in (1, 2)]


@pytest.mark.parametrize(
    ("family", "layout"),
    tiered(
        product(FAMILIES, LAYOUTS),
        {("qwen3_moe", "1 rank"), ("qwen3_moe", "TP2 EP2 PP2"), ("gpt_oss", "TP2 EP2 PP2")},
    ),
)
def test_two_engines_have_the_policy_bit_for_bit(
    on: On, engines: list[Path], family: str, layout: str
) -> None:
    """An engine of one rank and an engine of two ranks, by both transports in turn."""
    for transport in TRANSPORTS:
        _hold(on, engines, family, layout, "two", transport, further=[2, 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("chosen", FLEETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_have_the_policy_after_twenty_refits(
    on: On, engines: list[Path], family: str, layout: str, chosen: str, transport: str
) -> None:
    _hold(on, engines, family, layout, chosen, transport, further=[*range(2, 22)])


def _hold(
    on: On,
    engines: list[Path],
    family: str,
    layout: str,
    chosen: str,
    transport: str,
    further: list[int],
) -> None:
    """Check fingerprints, log-probabilities and received bytes after one and several refits."""
    settings = ENGINE.model_copy(update={"check_refit": True, "transport": transport})
    where = LAYOUTS[layout]
    addresses = tuple(engines[number] for number in FLEETS[chosen])
    described = (MODELS[family], where, settings)
    arguments = (addresses, *(each.model_dump_json() for each in described))
    for seeds in ([1], further):
        found = on(where, refit_cases.refit, *arguments, seeds)[0]
        print(family, layout, chosen, transport, len(seeds), found)
        assert not found["wrong"]
        assert found["mismatch"] < 1e-4
        assert found["refit_bytes"] == found["bound"]
