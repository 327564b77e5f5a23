"""Print the losses of preference pairs by TRL's DPOTrainer, and their gradients, in float64.

tests/stages/objectives/test_preference.py compares with what this printed. It needs the environment
of `make bench-trl`:

    .venv-trl/bin/python -W ignore benchmarks/trl_preference.py

DPOTrainer's own method computes the losses, on a stand-in for the model that gives fixed
log-probabilities. Its loss `sigmoid` reads no label smoothing; on one pair, where nothing is
sorted, `aot` is DPO with label smoothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace

import torch
import trl
from trl import DPOTrainer

# In nats: the policy's chosen and rejected, the reference's chosen and rejected; tokens of each.
PAIRS = [
    (-12.5, -17.25, -13.0, -16.0, 5, 7),
    (-40.0, -31.0, -36.5, -33.25, 11, 9),
    (-3.125, -3.5, -3.125, -3.5, 2, 2),
    (-250.0, -700.0, -260.0, -500.0, 100, 180),
]
CASES = [  # TRL's name, beta, label smoothing
    *(("sigmoid", beta, 0.0) for beta in (0.1, 0.5)),
    *(("aot", beta, smoothing) for beta in (0.1, 0.5) for smoothing in (0.1, 0.3)),
    *(("sigmoid_norm", 2.0, 0.0), ("ipo", 0.1, 0.0), ("ipo", 0.5, 0.0)),
]


def loss_and_gradient(pair: tuple, name: str, beta: float, smoothing: float) -> list[float]:
    """Return TRL's loss of a pair, and its gradient by the policy's chosen and rejected."""
    *sums, chosen_tokens, rejected_tokens = pair
    chosen, rejected, reference_chosen, reference_rejected = (
        torch.tensor([value], dtype=torch.float64) for value in sums
    )
    chosen.requires_grad_(), rejected.requires_grad_()
    longest = max(chosen_tokens, rejected_tokens)
    completion = torch.zeros(2, longest + 1, dtype=torch.long)  # after one token of a prompt
    for row, count in enumerate((chosen_tokens, rejected_tokens)):
        completion[row, 1 : count + 1] = 1
    # The sum of a row is what counts; its last token has all of it.
    logps = torch.zeros(2, longest, dtype=torch.float64)
    at = (torch.arange(2), torch.tensor([chosen_tokens, rejected_tokens]) - 1)
    logps = logps.index_put(at, torch.cat([chosen, rejected]))
    nothing = torch.zeros(2, longest, dtype=torch.float64)
    outputs = SimpleNamespace(
        log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    trainer = object.__new__(DPOTrainer)
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda each: each, gather_for_metrics=lambda each: each
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "input_ids": torch.zeros(2, longest + 1, dtype=torch.long),
        "attention_mask": torch.ones(2, longest + 1, dtype=torch.long),
        "completion_mask": completion,
        "ref_chosen_logps": reference_chosen,
        "ref_rejected_logps": reference_rejected,
    }
    loss = trainer._compute_loss(lambda **_: outputs, inputs, False)
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    return [loss.item(), *(each.item() for each in gradients)]


def main() -> None:
    print(f"# trl {trl.__version__}, torch {torch.__version__}")
    for case in CASES:
        for pair in PAIRS:
            row = [*case, *pair, *loss_and_gradient(pair, *case)]
            print(json.JSONEncoder().encode(row))


if __name__ == "__main__":
    main()
