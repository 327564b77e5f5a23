"""Imported by the process that the ranks are forked from, before any of them exists."""

from importlib import import_module

import torch

from parallel.cpu import megatron
from stages.kinds import MODULES

megatron.activate()
# What tests have ranks import later: 1.4 CPU seconds, here once for all of them.
for name in (*sorted(set(MODULES.values())), "parallel.checkpoint.planned", "reasoning_gym"):
    import_module(name)
if not torch.cuda.is_available():
    # megatron-core compiles gpt-oss's activation, once a shape: 3 to 20 CPU seconds a test.
    # `compiled_activation` in layouts/hugging_face_cases.py compares it with the plain one.
    torch._dynamo.config.disable = True
