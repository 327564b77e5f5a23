"""Every small recipe run whole, on real ranks and engines, in the fewest steps of a smaller model.

The cuts follow from a recipe's settings, so that its numbers may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings
from tests.runs import REPOSITORY, braid, finish, metrics

RECIPES = sorted((REPOSITORY / "configs" / "recipes").glob("[!_]*.yaml"))
STEPS, PROBLEMS = 2, 20
SAMPLING = {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 24}


def cuts(settings: RunSettings) -> Iterator[str]:
    """Yield overrides that cut a recipe to seconds, and make it deterministic."""
    yield from ("deterministic=true", "logging.trackers=[]", f"evaluation.problems={PROBLEMS}")
    yield from (f"model.{size}=32" for size in ("hidden_size", "expert_hidden_size"))
    yield from ("model.layers=2", "engine.count=1", "engine.max_sequences=16")
    trained = ("optimizer.warmup_steps=1", f"loop.steps={STEPS}", "loop.checkpoint_every=1")
    sampled = [f"sampling.{name}={value}" for name, value in SAMPLING.items()]
    for name in settings.domains:
        shown = ("demonstrations.count=40", "demonstrations.sequences_per_step=8")
        yield from (f"domains.{name}.{each}" for each in (*trained, *sampled, *shown))
    for name, block in settings.stages.items():
        at = f"stages.{name}"
        if getattr(block, "loop", None) is not None:
            yield from (f"{at}.{each}" for each in trained)
        if getattr(block, "sequences_per_step", None) is not None:
            yield f"{at}.sequences_per_step=8"
        if getattr(block, "gate", None) is not None:
            yield f"{at}.gate.problems={PROBLEMS}"
        if block.kind == "quantize":
            yield f"{at}.calibration=8"
        if block.kind == "distill":
            yield f"{at}.sampling.prompts_per_step=4"
        if block.kind in ("grpo", "sample") and not block.for_each:
            yield from (f"{at}.{each}" for each in sampled)
        if block.kind == "sample":  # a model of two steps has no right answers
            yield from (f"{at}.prompts=8", f"{at}.keep.reward=null", f"{at}.keep.finished=false")


@pytest.mark.combinations  # of test_smoke_run's stages, and of pipeline/test_shipped_pipelines
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_whole(recipe: Path, tmp_path: Path) -> None:
    overrides = list(cuts(load(recipe)))
    settings = load(recipe, overrides)
    stages = compile_graph(settings)
    output = finish(braid(tmp_path, "run", str(recipe), *overrides))
    run = tmp_path / settings.name
    events = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    assert [each["stage"] for each in events if each["state"] == "done"] == [
        stage.name for stage in stages
    ]
    assert "Traceback" not in output
    models = [stage.name for stage in stages if stage.trains]
    results = json.loads((run / "results.json").read_text())["models"]
    assert list(results) == models
    for scores in results.values():
        assert {name: score["n"] for name, score in scores.items()} == dict.fromkeys(
            settings.domains, PROBLEMS
        )
    for name in (stage.name for stage in stages if stage.steps):
        assert [line["step"] for line in metrics(run, name)] == list(range(1, STEPS + 1))
    table = output[output.index("accuracy in %") :]
    assert all(name in table for name in models)
    assert f"model of {stages[-1].parent}: {run}/stages/export/huggingface" in output
