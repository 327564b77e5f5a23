"""`braid domain new`: a domain's file to begin with, commented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pipeline.config.violations import shown
from pipeline.errors import BraidError

FOLDER = Path("configs/domains")
Source = Literal["reasoning_gym", "jsonl", "parquet"]

HEADING = """\
# The domain {name}. Every key and its default: docs/reference/domain.md. Is it right, and do its
# rewards tell right from wrong?
#
#     braid domain check {path}
#
# A run takes it in with
#
#     domains:
#       {name}:
#         extends: domains/{name}.yaml
"""

REASONING_GYM = """\
# States only what differs from _base.yaml: sampling, optimizer, steps.
extends: _base.yaml

prompts:
  source: reasoning_gym
  dataset: chain_sum       # or spell_backward, number_sorting
  config: {min_terms: 2, max_terms: 3, min_digits: 1, max_digits: 1}  # the dataset's own options

rewards:                   # a sample earns the sum of weight x reward: docs/reference/rewards.md
  exact: {kind: reasoning_gym}

objective:                 # docs/explanation/objectives.md
  kl: {coefficient: 0.0}   # 0.001 pulls back to the cold start
"""

FILES = """\
prompts:
  source: {source}
  path: ../../data/{name}.{source}  # FILL IN: a file, a pattern or a folder, relative to this file
  prompt: prompt           # column of the prompt: text, or a list of chat messages
  answer: answer           # column of the reference answer; null where no reward wants one
  held_out_fraction: 0.25  # the same in every domain of a run

rewards:                   # a sample earns the sum of weight x reward: docs/reference/rewards.md
  right: {{kind: math}}      # or instruction, json_schema, code, judge, python
  # brief: {{kind: overlong, max_tokens: 2048, buffer_tokens: 512, weight: 0.5}}

demonstrations:            # for the cold start, if the run has one: docs/explanation/data.md
  source: {source}
  path: ../../data/{name}_demonstrations.{source}  # FILL IN
  messages: messages       # column of whole conversations
  sequences_per_step: 32

sampling:
  prompts_per_step: 32
  group_size: 8            # responses to a prompt; each is judged against the others
  temperature: 1.0
  max_response_tokens: 2048

objective:                 # docs/explanation/objectives.md
  advantage: {{name: grpo}}
  ratio: {{name: sequence}}
  kl: {{coefficient: 0.0}}

optimizer:
  algorithm: adam
  learning_rate: 1.0e-6
  warmup_steps: 5

loop:
  steps: 100
  checkpoint_every: 20
"""


def write_starter(name: str, source: Source) -> Path:
    """Write configs/domains/NAME.yaml. Raises BraidError where there is one, or NAME is no name."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise BraidError(f"{name!r} is no name of a domain: use letters, digits, _ and -")
    path = FOLDER / f"{name}.yaml"
    body = REASONING_GYM if source == "reasoning_gym" else FILES.format(name=name, source=source)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{HEADING.format(name=name, path=path)}{body}")
    except FileExistsError:
        raise BraidError(f"{shown(path)} is there already, and is left as it is") from None
    return path
