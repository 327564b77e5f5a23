"""The settings that decide how a stage runs and not what comes out, beyond rounding.

Imports nothing: the command's help names them.
"""

ENGINE_KEYS = (
    "count",
    "tensor",
    "placement",
    "max_sequences",
    "kv_cache_mebibytes",
    "start_timeout_seconds",
    "request_timeout_seconds",
    "hang_timeout_seconds",
    "max_restarts",
    "transport",
    "check_refit",
    "max_logprob_difference",
)
LOOP_KEYS = (
    "micro_batch_tokens",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "async_checkpoints",
)
LOOPS = ("cold_start", "domains.*", "mixed", "merge")

CHANGES_NO_RESULT = (
    "name",
    "rounds",
    "layout",
    "logging",
    "launch",
    "rewards",
    *(f"{stage}.guards" for stage in ("domains.*", "mixed")),
    *(f"engine.{key}" for key in ENGINE_KEYS),
    *(f"{stage}.loop.{key}" for stage in LOOPS for key in LOOP_KEYS),
)

MAY_CHANGE = f"""\
  logging
  launch
  layout
  rounds
  rewards: workers, timeout_seconds, memory_mebibytes, max_failed_fraction
  engine: {", ".join(ENGINE_KEYS[:6])},
          {", ".join(ENGINE_KEYS[6:10])},
          {", ".join(ENGINE_KEYS[10:])}
  every expert, mixed: guards
  every loop: {", ".join(LOOP_KEYS)}"""
