"""Adam with a share of its state in host memory: the same bits, and checkpoints of any share."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from parallel.estimates.memory import training_memory
from parallel.settings import LayoutSettings
from tests.layouts import host_state_cases as cases
from tests.layouts.cases import ADAM, MODEL
from tests.layouts.held import held
from tests.ranks import On
from tests.tiers import tiered

LAYOUTS = {
    "1 rank": LayoutSettings(),
    "DP2": LayoutSettings(ranks=2),
    "DP2 TP2 EP2": LayoutSettings(ranks=4, tensor=2, expert=2),
}
SHARES = [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("name", "precision", "share"),
    tiered(
        product(LAYOUTS, ("fp32", "bf16"), SHARES[1:]),
        {("1 rank", "bf16", 0.5), ("DP2", "bf16", 1.0), ("DP2 TP2 EP2", "bf16", 0.5)},
    ),
)
def test_training_with_state_on_the_host_gives_equal_bits(
    name: str, precision: str, share: float, on: On
) -> None:
    """Also while the rest of the model leaves the device before every step."""
    for found in on(LAYOUTS[name], cases.trains_equally, LAYOUTS[name], precision, share):
        assert found["losses"]
        assert found["state"]
        assert found["away"] == [0] * cases.STEPS
        on_host, whole = found["placed"]
        assert share * whole <= on_host
        assert on_host < whole or share == 1.0
        assert found["kept"]
        assert found["parked"]


@pytest.mark.parametrize(
    ("name", "precision", "pairs"),
    tiered(
        product(LAYOUTS, ("fp32", "bf16"), ("each share once", "every pair")),
        {("DP2", "bf16", "each share once"), ("DP2 TP2 EP2", "fp32", "each share once")},
    ),
)
def test_a_checkpoint_resumes_with_any_share_bit_for_bit(
    name: str, precision: str, pairs: str, on: On, tmp_path: Path
) -> None:
    """Here and in another layout; the files are equal too."""
    layout = LAYOUTS[name]
    turned = dict(zip(SHARES, [[0.5], [1.0], [0.0]], strict=True))
    loads = turned if pairs == "each share once" else dict.fromkeys(SHARES, SHARES)
    found = on(layout, cases.resumes_anywhere, layout, precision, loads, str(tmp_path))
    assert found == [dict.fromkeys(("files", "losses", "state", "compared"), True)] * layout.ranks
    other = LAYOUTS["1 rank" if name == "DP2" else "DP2"]
    saved = str(tmp_path / "0.5" / f"step_{cases.STEPS}")
    found = on(other, cases.resumes_from, other, precision, SHARES, saved)
    assert found == [{"losses": True, "state": True}] * other.ranks


@pytest.mark.parametrize("share", SHARES)
def test_planned_bytes_on_the_host_equal_held_bytes(share: float, on: On) -> None:
    layout = LAYOUTS["DP2 TP2 EP2"]
    optimizer = ADAM.model_copy(update={"cpu_offload": share})
    model = MODEL.model_copy(update={"precision": "bf16"})
    [plan] = training_memory(model, layout, optimizer, 1024)
    [plain] = training_memory(model, layout, ADAM, 1024)
    assert plan.optimizer + plan.host_optimizer == plain.optimizer
    assert plan.host_optimizer == round(share * plain.optimizer)
    assert plan.total == plain.total - plan.host_optimizer
    for _, found in on(layout, held, layout, optimizer, model):
        both = found.optimizer + found.host_optimizer
        assert both == pytest.approx(plain.optimizer, rel=0.15)  # padding, as in test_memory
        # Tensors move whole, so that the device has at most its share; the largest is an embedding.
        largest = 12 * MODEL.vocabulary_size * MODEL.hidden_size // layout.tensor
        assert 0 <= found.host_optimizer - share * both <= largest * (0 < share < 1)
