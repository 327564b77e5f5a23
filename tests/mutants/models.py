"""Mistakes in real models: their checkpoints, families, simulation and runs."""

from __future__ import annotations

from .mutant import Mutant

HUGGING_FACE = "tests/layouts/test_hugging_face.py"
CHECKPOINTS = f"{HUGGING_FACE}::test_checkpoints_are_equal_under_every_layout"
MULTI_TOKEN = (
    f"{HUGGING_FACE}::test_layers_for_multi_token_prediction_are_exported_as_they_were_imported"
)
TEXT_MODEL = f"{HUGGING_FACE}::test_the_text_model_of_a_vision_language_model_is_imported"
ROOFLINE = "tests/parallel/test_roofline.py"
INIT = "tests/pipeline/test_init.py"

MUTANTS = [
    Mutant(
        "an export counts no MTP layer",
        "stages/kinds/export/work.py",
        "setattr(config, key, multi_token.layers)",
        "setattr(config, key, 0)",
        MULTI_TOKEN,
    ),
    Mutant(
        "MTP tensors are exported in fp32",
        "parallel/hugging_face/multi_token.py",
        "self._files.read(name).to(spec.dtype)",
        "self._files.read(name).float()",
        MULTI_TOKEN,
    ),
    Mutant(
        "MTP layers are quantized, to vLLM",
        "stages/kinds/quantize/work.py",
        "ignored(policy.settings, matrices) + drafting",
        "ignored(policy.settings, matrices)",
        "tests/stages/test_quantize.py"
        "::test_layers_for_multi_token_prediction_are_kept_as_they_are",
    ),
    Mutant(
        "a stack of experts begins with expert 0 on every rank",
        "parallel/engine/expert_stacks.py",
        "expert_id=self.first_expert",
        "expert_id=0",
        "tests/engine/test_needs.py",
    ),
    Mutant(
        "stacked experts are loaded in reverse",
        "parallel/engine/expert_stacks.py",
        "zip(self.names, target.unbind(), strict=True)",
        "zip(reversed(self.names), target.unbind(), strict=True)",
        "tests/engine/test_refit.py",
    ),
    Mutant(
        "every row of a tensor is read from its first",
        "parallel/hugging_face/files.py",
        "start += offsets[0] *",
        "start += 0 *",
        f"tests/parallel/test_block_scales.py {CHECKPOINTS}",
    ),
    Mutant(
        "a block's scales are those of the block before",
        "parallel/hugging_face/block_scales.py",
        "// size - start // size",
        "// size - start // size - 1",
        "tests/parallel/test_block_scales.py",
    ),
    Mutant(
        "the up projection of a vision-language model is its gate",
        "parallel/hugging_face/text_model.py",
        "(expert * rows + number * projection_rows) * columns",
        "(expert * rows) * columns",
        TEXT_MODEL,
    ),
    Mutant(
        "a vision-language model's tensors are read as fp32",
        "parallel/hugging_face/files.py",
        "text_tensor.offset * kind.itemsize",
        "text_tensor.offset * 4",
        "tests/parallel/test_hugging_face_files.py",
    ),
    Mutant(
        "the higher bits of a byte in MXFP4 come first",
        "parallel/hugging_face/mxfp4.py",
        "[blocks & 15, blocks >> 4]",
        "[blocks >> 4, blocks & 15]",
        "tests/parallel/test_mxfp4.py",
    ),
    Mutant(
        "gpt-oss sees a token beyond its window",
        "parallel/model/bridge.py",
        "(published.sliding_window - 1, 0)",
        "(published.sliding_window, 0)",
        CHECKPOINTS,
    ),
    Mutant(
        "every layer of gpt-oss has a window",
        "parallel/model/bridge.py",
        "[int(has_window) for has_window in windowed]",
        "[1 for _ in windowed]",
        CHECKPOINTS,
    ),
    Mutant(
        "attention with sinks is fused in a deterministic run",
        "parallel/machine/capabilities.py",
        "machine.packed_sinks and not deterministic",
        "machine.packed_sinks",
        "tests/layouts/test_sinks.py",
    ),
    Mutant(
        "context-parallel ranks exchange parts of key-value heads",
        "parallel/machine/capabilities.py",
        "math.lcm(2, layout.context)",
        "1",
        "tests/layouts/test_sinks.py",
    ),
    Mutant(
        "context-parallel ranks keep the first tokens' outputs of a delta net",
        "parallel/model/delta_net.py",
        "torch.arange(len(outputs), device=outputs.device)[:, None], grid.places",
        ":, : grid.places.shape[1]",
        CHECKPOINTS,
    ),
    Mutant(
        "a delta net's state does not decay between chunks",
        "parallel/model/delta_net.py",
        "state = state * retained[:, :, chunk] +",
        "state = state +",
        "tests/parallel/test_delta_net.py",
    ),
    Mutant(
        "a delta net's gate is a sigmoid",
        "parallel/model/delta_net.py",
        "functional.silu(gate)",
        "gate.sigmoid()",
        CHECKPOINTS,
    ),
    Mutant(
        "an engine's cache is whole on each rank",
        "parallel/estimates/roofline/rollout.py",
        "cached_elements(model, engine.tensor)",
        "cached_elements(model, 1)",
        ROOFLINE,
    ),
    Mutant(
        "a pipeline has no bubble",
        "parallel/estimates/roofline/training.py",
        "filling = (layout.pipeline - 1) / layout.virtual_pipeline",
        "filling = 0.0",
        ROOFLINE,
    ),
    Mutant(
        "experts are dispatched over linked GPUs whatever their number",
        "parallel/estimates/roofline/training.py",
        "(near if group <= gpu.linked else far)",
        "near",
        ROOFLINE,
    ),
    Mutant(
        "sampling and training overlap where no step is in flight",
        "parallel/estimates/roofline/step.py",
        "overlapped=work.steps_in_flight > 1",
        "overlapped=True",
        ROOFLINE,
    ),
    Mutant(
        "engines map the memory of other nodes",
        "parallel/estimates/roofline/weight_sync.py",
        "near = may_map and set(hosts) <= set(trainers)",
        "near = may_map",
        ROOFLINE,
    ),
    Mutant(
        "a search counts one of the domains with the same steps",
        "pipeline/estimate/layout_search.py",
        "[stage.steps * alike for",
        "[stage.steps for",
        "tests/pipeline/test_simulate.py::test_the_search_counts_every_domain",
    ),
    Mutant(
        "a walltime has no margin",
        "pipeline/estimate/budget.py",
        "MARGIN * duration + START_SECONDS",
        "duration + START_SECONDS",
        f"{INIT}::test_walltimes_have_a_margin_and_a_limit",
    ),
    Mutant(
        "a budget shortens no stage below its share",
        "pipeline/estimate/budget.py",
        "min(count, LEAST_STEPS)",
        "0 * min(count, LEAST_STEPS)",
        f"{INIT}::test_a_budget_for_less_than_the_least_steps_is_refused",
    ),
    Mutant(
        "a tensor of another shape is accepted before a run",
        "pipeline/config/tensor_headers.py",
        "elif (tensor := stored[name]).shape != shape:",
        "elif len((tensor := stored[name]).shape) != len(shape):",
        "tests/pipeline/test_weights_checks.py tests/pipeline/test_outside_models.py",
    ),
    Mutant(
        "every problem of some datasets is the first",
        "stages/data/reasoning_gym.py",
        "self._seed + index)",
        "self._seed)",
        "tests/stages/test_reasoning_gym_scorers.py"
        "::test_problems_that_are_drawn_one_by_one_differ",
    ),
    Mutant(
        "a scorer evaluates the answer itself",
        "stages/data/reasoning_gym.py",
        "{function: READERS[function]}",
        "{function: module.get(function, eval)}",
        "tests/stages/test_reasoning_gym_scorers.py::test_a_hostile_answer_is_read_and_never_run",
    ),
    Mutant(
        "a call with other arguments is the expected one",
        "stages/rewards/kinds/tool_call.py",
        "expected is None or _counted(calls) == _counted(expected)",
        "expected is None or len(calls) == len(expected)",
        "tests/stages/test_tool_calls.py",
    ),
    Mutant(
        "a frozen model is as large as all of them",
        "pipeline/estimate/stage_memory.py",
        "rank.frozen // max(1, frozen + averages)",
        "rank.frozen",
        "tests/pipeline/test_plan_memory.py"
        "::test_frozen_models_are_counted_on_the_host_and_their_heads_on_the_last_rank",
    ),
]
