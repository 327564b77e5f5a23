"""vLLM on a CPU loads a quantized checkpoint and computes with its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel.checkpoint import load
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from stages.kinds.export.work import export
from stages.kinds.quantize import work as quantize
from stages.kinds.quantize.settings import QuantizeSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.engine.engine_settings import MODELS
from tests.fake_engines import toy_domain, toy_job, toy_run
from tests.runs import REPOSITORY

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENS = [3, 7, 9, 11, 20, 33, 41, 5, 8, 60, 61, 62]
MODEL = MODELS["bf16"]
BF16 = 0.05  # nats; the errors of int4 are ten times as large
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def logprobs(checkpoint: Path) -> torch.Tensor:
    """Return transformers' log-probabilities of the tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return found[torch.arange(len(TOKENS) - 1), TOKENS[1:]]


def test_vllm_loads_int4_but_for_experts(tmp_path: Path) -> None:
    parent, plain = tmp_path / "parent", tmp_path / "plain"
    policy = Policy(MODEL, LayoutSettings())
    policy.start_fresh(3)
    export(policy, parent)
    own = QuantizeSettings.model_validate(
        {
            "from": "merge",
            "format": "int4",
            "group_size": 32,
            "calibration": 4,
            "exclude": ["*.experts.*"],
        }
    )
    run = toy_run(sums=toy_domain()).model_copy(update={"model": MODEL, "stages": {"small": own}})
    of: dict[str, Any] = {"stage": "small", "kind": "quantize", "block": "small"}
    job = toy_job(tmp_path / "small", run, **of, domain=None, parent=parent, seeded_as="small")
    quantize.run(job)
    load.weights(policy, job.files.checkpoints / "step_0")
    export(policy, plain)
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.quantized_logprobs"]
    ended = subprocess.run(
        [*command, str(job.files.exported), *map(str, TOKENS)],
        env={**os.environ, **VLLM},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    if not torch.cpu._is_avx512_supported():
        # vLLM picks its kernel for int4 by the format alone, and builds it for AVX-512 only.
        assert "no attribute 'cpu_gemm_wna16'" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    theirs = torch.tensor(json.loads(ended.stdout.splitlines()[-1]))
    assert (theirs - logprobs(plain)).abs().max() < BF16
    assert (theirs - logprobs(parent)).abs().max() > 2 * BF16
