"""Attention with sinks in packed rows: TransformerEngine's rules, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from parallel.machine import capabilities
from parallel.machine.capabilities import Machine, fuses_sinks
from parallel.settings import LayoutSettings
from tests.layouts.hugging_face_cases import FAMILIES
from tests.layouts.te_sinks import CASES
from tests.te_python import te_environment

HOPPER = Machine(cuda=True, transformer_engine=True, packed_sinks=True, gpus=8)
MODEL = FAMILIES["gpt_oss"].model_copy(update={"precision": "bf16", "attention_heads": 8})


@pytest.fixture(scope="module")
def answers() -> Any:
    """Return what `tests.layouts.te_sinks` prints."""
    command = [sys.executable, "-m", "tests.layouts.te_sinks"]
    printed = subprocess.run(command, env=te_environment(), capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


def test_the_rule_is_transformer_engine_s_own(answers: Any, monkeypatch: Any) -> None:
    """Braid's attention is used exactly where TransformerEngine has no fused kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    ours = []
    for cudnn, context, exchange, deterministic, groups in CASES:
        version = cudnn[0] * 10_000 + cudnn[1] * 100 + cudnn[2]
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        machine = Machine(
            cuda=True, transformer_engine=True, packed_sinks=capabilities._has_packed_sinks()
        )
        model = MODEL.model_copy(update={"key_value_heads": groups})
        layout = LayoutSettings(ranks=context, context=context)
        flags = capabilities.transformer_flags(machine, model, layout)
        fused = fuses_sinks(machine, model, layout, deterministic)
        ours.append(fused and (context == 1 or flags["cp_comm_type"] == exchange))
    assert ours == [backend == "fused" for backend in answers["selected"]]


def test_packed_rows_equal_transformer_engine_s_separate_sequences(answers: Any) -> None:
    """Outputs and all gradients, the sinks' too; with a window and without."""
    assert len(answers["differences"]) == 10
    assert max(answers["differences"].values()) < 1e-6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"precision": "fp32"}, False),
        ({"head_dim": 12}, False),
        ({"head_dim": 256}, False),
        ({"family": "qwen3_moe", "norm_epsilon": 1e-3, "architecture": {}}, False),
    ],
)
def test_models_with_a_kernel_for_their_sinks(changes: dict[str, Any], expected: bool) -> None:
    model = MODEL.model_copy(update=changes)
    assert fuses_sinks(HOPPER, model, LayoutSettings(), deterministic=False) == expected


def test_context_parallel_ranks_exchange_whole_key_value_heads() -> None:
    """Four of them, or six, are 2 or 3 on each of two tensor-parallel ranks."""
    layout = LayoutSettings(ranks=4, tensor=2, context=2)
    for heads, expected in ((4, True), (6, False)):
        model = MODEL.model_copy(update={"key_value_heads": heads, "attention_heads": 2 * heads})
        assert fuses_sinks(HOPPER, model, layout, deterministic=False) == expected


def test_older_gpus_have_no_kernel_for_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert not capabilities._has_packed_sinks()
