"""The state of a stage follows from its files, whatever a crash or a person did to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph, digest, problems
from pipeline.run.lineage import read_manifest, write_manifest
from pipeline.run.run import Run
from stages.settings import RunSettings

TURNS = '{{"role": "user", "content": "hi"}}, {{"role": "assistant", "content": "{}"}}'
CHAT = f'{{{{"messages": [{TURNS}]}}}}\n'


def add_checkpoint(run: RunDirectory, stage: str, step: int, checksum: str) -> Path:
    path = run.stage(stage).path / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "checksums.json").write_text(json.dumps({"digest": checksum, "files": {}}))
    return path


def record(run: RunDirectory, settings: RunSettings, stage: Stage, state: str) -> None:
    """Leave what a stage that came to `state` leaves."""
    write_manifest(run.stage(stage.name), Run(run.path, settings).lineage(stage))
    run.ledger.append(stage.name, state, "", 1)
    if state == "done" and stage.trains:
        add_checkpoint(run, stage.name, 2, stage.name)


@pytest.fixture
def trained(run: RunDirectory, settings: RunSettings) -> dict[str, Stage]:
    """A run whose training stages are done."""
    stages = compile_graph(settings)
    for stage in stages:
        if stage.trains:
            record(run, settings, stage, "done")
    return {stage.name: stage for stage in stages}


def states(run: RunDirectory, settings: RunSettings) -> dict[str, str]:
    found = Run(run.path, settings).states
    return {name: state.state for name, state in found.items() if state.state != "pending"}


def test_work_that_the_ledger_has_lost_is_not_taken_for_that_of_other_settings(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    run.ledger.path.unlink()
    found = Run(run.path, settings).states
    assert found["merge"].state == "pending"
    assert (found["merge"].step, found["merge"].cause) == (
        2,
        "it has output but no line in the ledger",
    )
    other = settings.model_copy(update={"seed": 7})
    found = Run(run.path, other).states
    assert {found[name].state for name, stage in trained.items() if stage.trains} == {"stale"}


def test_nothing_is_done_before_a_run(run: RunDirectory, settings: RunSettings) -> None:
    assert states(run, settings) == {}


def test_only_whole_checkpoints_count(run: RunDirectory) -> None:
    add_checkpoint(run, "merge", 20, "a")
    add_checkpoint(run, "merge", 9, "b")
    torn = add_checkpoint(run, "merge", 40, "c")
    (torn / "checksums.json").write_text('{"dig')
    whole = add_checkpoint(run, "merge", 60, "d")
    whole.rename(whole.with_name("tmp_step_60"))
    newest = run.stage("merge").newest_checkpoint()
    assert newest is not None
    assert (newest.step, newest.digest) == (20, "a")


def test_the_manifest_lists_the_inputs_of_a_stage(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    manifest = read_manifest(run.stage("merge"))
    assert manifest is not None
    assert manifest.parents == {
        name: name for name in ("cold_start", "experts.sums", "experts.words")
    }
    assert manifest.config == digest(trained["merge"].reads)
    assert manifest.data == digest(problems(trained["merge"].reads))
    assert manifest.layout == settings.layout.model_dump(mode="json")
    assert manifest.routing == "r3"
    assert manifest.versions["numpy"]


def test_a_stage_left_running_by_a_killed_launcher_has_failed(
    run: RunDirectory, settings: RunSettings
) -> None:
    record(run, settings, compile_graph(settings)[0], "running")
    with run.lock(shared=True), run.lock_stage("cold_start"):
        assert states(run, settings) == {"cold_start": "running"}
    assert states(run, settings) == {"cold_start": "failed"}


RENAMED = {"as": "experts.{domain}", "kind": "grpo", "from": "cold_start", "for_each": "domain"}


def with_renamed_block(settings: RunSettings, **changes: Any) -> RunSettings:
    """Return settings whose block of experts has another name, and its stages theirs."""
    found = settings.model_dump(mode="json")
    found["stages"]["specialists"] = {**RENAMED, **changes}
    del found["stages"]["experts"]
    found["stages"]["merge"]["teachers"] = "specialists"
    return RunSettings.model_validate(found)


def test_another_name_of_a_block_makes_nothing_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    before = states(run, settings)
    assert before["merge"] == "done"
    renamed = with_renamed_block(settings)
    assert {stage.block for stage in compile_graph(renamed)} >= {"specialists"}
    assert states(run, renamed) == before
    changed = with_renamed_block(settings, updates_per_rollout=2)
    assert states(run, changed) == before | dict.fromkeys(
        ("experts.sums", "experts.words", "merge"), "stale"
    )


def test_training_that_moves_from_a_domain_to_its_stage_makes_nothing_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    loop = settings.domains["sums"].loop.model_dump(mode="json")
    moved = with_renamed_block(settings, loop=loop)
    assert states(run, moved) == states(run, settings)


def test_a_manifest_with_keys_of_an_earlier_form_is_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    """No configuration of that form loads any more, and a wrong guess would reuse wrong work."""
    manifest = run.stage("experts.sums").manifest
    manifest.write_text(manifest.read_text().replace('"domains.', '"experts.'))
    found = Run(run.path, settings).states
    assert found["experts.sums"].state == "stale"
    assert 'domains.sums.prompts.dataset was null and is now "chain_sum"' in (
        found["experts.sums"].cause
    )
    assert found["experts.words"].state == "done"


@pytest.mark.parametrize(
    "added",
    [
        *("optimizer.precision_aware", "optimizer.cpu_offload", "engine.weights"),
        *("evaluation.top_p", "evaluation.top_k", "sums.evaluation.temperature"),
        *("model.end_tokens", "model.head_precision"),
    ],
)
def test_a_manifest_from_before_a_key_makes_nothing_stale(
    added: str, run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    before = states(run, settings)
    for name in before:
        manifest = run.stage(name).manifest
        found = json.loads(manifest.read_text())
        keys = [key for key in found["settings"] if key.endswith(added)]
        assert keys or name not in trained or not added.startswith("optimizer")
        for key in keys:
            del found["settings"][key]
        manifest.write_text(json.dumps(found))
    assert states(run, settings) == before


@pytest.mark.parametrize(
    ("rollout", "mode", "staleness"),
    [
        ("{}", "sync", 1),
        ("{max_steps_ahead: 1}", "overlap", 1),
        ("{max_steps_ahead: 1, sync_in_flight: true}", "async", 1),
        ("{max_steps_ahead: 4}", "async", 4),
        ("{max_staleness: 3, oversampling: 2}", "sync", 3),
    ],
)
def test_a_manifest_with_a_mode_of_rollouts_makes_nothing_stale(
    rollout: str, mode: str, staleness: int, run: RunDirectory, config: Path
) -> None:
    settings = load(config, [f"domains.sums.rollout={rollout}"])
    stage = next(each for each in compile_graph(settings) if each.name == "experts.sums")
    record(run, settings, stage, "done")
    manifest = run.stage(stage.name).manifest
    found = json.loads(manifest.read_text())
    for key in ("max_steps_ahead", "sync_in_flight", "max_staleness"):
        del found["settings"][f"rollout.{key}"]
    found["settings"] |= {"rollout.mode": mode, "rollout.max_staleness": staleness}
    manifest.write_text(json.dumps(found))
    recorded = read_manifest(run.stage(stage.name))
    assert recorded is not None and recorded.settings == stage.reads


def test_a_manifest_from_before_a_key_of_some_kinds_has_what_was_done_before(
    run: RunDirectory, config: Path
) -> None:
    """Rewards scored thoughts with the answer, which is still how a `format` is scored."""
    advantage = "domains.sums.objective.advantage={name: reinforce_pp_baseline}"
    rewards = "{exact: {kind: reasoning_gym}, form: {kind: format, pattern: x}}"
    settings = load(config, [advantage, f"domains.sums.rewards={rewards}"])
    stage = next(each for each in compile_graph(settings) if each.name == "experts.sums")
    record(run, settings, stage, "done")
    manifest = run.stage(stage.name).manifest
    found = json.loads(manifest.read_text())
    later = [key for key in found["settings"] if key.endswith((".thought_markers", "tage.over"))]
    assert len(later) == 2
    for key in later:
        del found["settings"][key]
    right = "domains.sums.rewards.right"
    found["settings"][f"{right}.kind"] = "code"  # of a domain whose problems have tests
    manifest.write_text(json.dumps(found))
    recorded = read_manifest(run.stage(stage.name))
    assert recorded is not None
    assert all(recorded.settings[key] == stage.reads[key] for key in later)
    assert recorded.settings[f"{right}.thought_markers"] == []
    assert recorded.settings[f"{right}.float_tolerance"] == 0


def test_a_manifest_keeps_its_values_of_later_keys(run: RunDirectory, config: Path) -> None:
    settings = load(config, ["domains.sums.optimizer.cpu_offload=0.5"])
    for stage in compile_graph(settings):
        if stage.trains:
            record(run, settings, stage, "done")
    assert set(states(run, settings).values()) == {"done"}


def test_a_manifest_from_before_roles_makes_nothing_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    before = states(run, settings)
    for name in before:
        manifest = run.stage(name).manifest
        found = json.loads(manifest.read_text())
        del found["roles"]
        manifest.write_text(json.dumps(found))
    assert states(run, settings) == before


def test_teachers_that_change_places_make_their_merge_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    crossed = settings.model_dump(mode="json")
    crossed["stages"]["merge"]["teachers"] = {"sums": "experts.words", "words": "experts.sums"}
    found = Run(run.path, RunSettings.model_validate(crossed)).states
    assert (found["merge"].state, found["merge"].cause) == (
        "stale",
        "teachers.sums is another of its inputs; teachers.words is another of its inputs",
    )


def test_a_renamed_block_still_notices_other_data(
    run: RunDirectory, config: Path, tmp_path: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(CHAT.format("one"))
    settings = load(config, [f"domains.words.demonstrations={{source: jsonl, path: {data}}}"])
    record(run, settings, compile_graph(settings)[0], "done")
    renamed = settings.model_dump(mode="json")
    renamed["stages"]["begin"] = {**renamed["stages"].pop("cold_start"), "as": "cold_start"}
    settings = RunSettings.model_validate(renamed)
    assert states(run, settings) == {"cold_start": "done"}
    data.write_text(CHAT.format("two"))
    [cause] = [each.cause for each in Run(run.path, settings).states.values() if each.cause]
    assert cause == "the files of domains.words.demonstrations.path changed"


def test_another_checkpoint_of_a_parent_makes_its_children_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    add_checkpoint(run, "experts.sums", 2, "another")
    found = Run(run.path, settings).states
    assert found["experts.sums"].state == "done"
    assert found["merge"].state == "stale"
    assert found["merge"].cause == "the checkpoint of experts.sums changed"


def test_a_removed_checkpoint_makes_a_finished_stage_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    whole = run.stage("experts.words").path / "checkpoints" / "step_2" / "checksums.json"
    whole.unlink()
    found = Run(run.path, settings).states
    assert found["experts.words"].cause == "it has no checkpoint"
    assert found["merge"].cause == "its input experts.words is stale"


def test_a_finished_stage_whose_last_checkpoint_is_gone_trains_on(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    checkpoints = run.stage("experts.words").path / "checkpoints"
    (checkpoints / "step_2").rename(checkpoints / "step_1")
    found = Run(run.path, settings).states
    assert found["experts.words"].state == "pending"
    assert found["experts.words"].cause == "its newest checkpoint is at step 1 of 2"
    assert found["merge"].state == "stale"


def test_other_data_under_the_same_name_makes_its_readers_stale(
    run: RunDirectory, config: Path, tmp_path: Path
) -> None:
    data, folder = tmp_path / "chats.jsonl", tmp_path / "tokenizer"
    data.write_text(CHAT.format("one"))
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    shown = f"domains.words.demonstrations={{source: jsonl, path: {data}}}"
    settings = load(config, [shown, f"model.tokenizer={folder}"])
    for stage in compile_graph(settings):
        if stage.trains:
            record(run, settings, stage, "done")

    def causes() -> dict[str, str]:
        found = Run(run.path, settings).states
        return {name: found[name].cause for name in found if found[name].state == "stale"}

    assert causes() == {}
    (folder / "model.safetensors").write_text("weights beside it")
    assert causes() == {}
    data.write_text(CHAT.format("two"))
    changed = "the files of domains.words.demonstrations.path changed"
    assert causes()["cold_start"] == changed
    data.write_text(CHAT.format("one"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    assert "the files of model.tokenizer changed" in causes()["experts.sums"]
    (folder / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    assert causes() == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7], "top_k": 20}')
    ends = "the files of model.end_tokens (of generation_config.json) changed"
    assert all(cause.startswith(ends) for cause in causes().values())
    assert causes().keys() >= {"cold_start", "merge"}
    (folder / "generation_config.json").write_text('{"top_k": 20}')
    assert causes() == {}
    folder.rename(tmp_path / "elsewhere")  # as on a machine that has none of it
    assert causes() == {}
    stated = settings.model_copy(
        update={"model": settings.model.model_copy(update={"end_tokens": ("a", 7)})}
    )
    found = Run(run.path, stated).states
    assert found["cold_start"].cause == 'model.end_tokens was null and is now ["a", 7]'


def test_another_layout_makes_nothing_stale(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    layout = settings.layout.model_copy(update={"ranks": 4, "tensor": 2})
    elsewhere = settings.model_copy(update={"layout": layout})
    assert states(run, elsewhere) == dict.fromkeys(
        ["cold_start", "experts.sums", "experts.words", "merge"], "done"
    )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"digest": 1}', '"text"'])
def test_a_checkpoint_with_unreadable_checksums_is_not_whole(
    content: str, run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    path = run.stage("experts.words").path / "checkpoints" / "step_2" / "checksums.json"
    path.write_text(content)
    assert run.stage("experts.words").newest_checkpoint() is None


def test_a_partial_evaluation_is_not_mixed_with_other_models(
    run: RunDirectory, settings: RunSettings, trained: dict[str, Stage]
) -> None:
    record(run, settings, trained["evaluate"], "failed")
    run.stage("evaluate").measured.mkdir()
    assert states(run, settings)["evaluate"] == "failed"
    add_checkpoint(run, "merge", 2, "another")
    assert states(run, settings)["evaluate"] == "stale"


def test_a_stage_that_left_no_checkpoint_may_start_with_other_settings(
    run: RunDirectory, settings: RunSettings
) -> None:
    record(run, settings, compile_graph(settings)[0], "failed")
    changed = settings.model_copy(update={"seed": 7})
    assert states(run, changed) == {"cold_start": "failed"}
    add_checkpoint(run, "cold_start", 1, "half")
    assert states(run, changed) == {"cold_start": "stale"}


def test_a_stale_evaluation_is_not_in_the_results(
    braid: Callable[..., tuple[int, str, str]], config: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "{n}+1="}}' for n in range(40)))
    text = config.read_text().replace(
        "{dataset: spell_backward}", f"{{source: jsonl, path: {rows}}}"
    )
    text = text.replace("kind: sft\n", "kind: sft\n    domains: [sums]\n")
    text = text.replace(
        "  evaluate: {kind: evaluate}",
        "  of_all: {kind: evaluate}\n"
        "  of_start: {kind: evaluate, models: [cold_start], domains: [sums]}",
    )
    config.write_text(f"{text}evaluation: {{problems: 4}}\n")
    reward = "domains.words.rewards={right: {kind: length, at_most: 3}}"
    assert braid("run", config, reward)[::2] == (0, "")
    rows.write_text(rows.read_text().replace("7+1=", "9+9="))  # makes of_all stale
    table = braid("status", "small")[1]
    assert "accuracy" in table and "experts.words  " not in table.partition("accuracy")[2]
    assert braid("run", config, reward, "--only", "of_start", "--from", "of_start")[0] == 0
    found = json.loads((tmp_path / "runs/small/results.json").read_text())["models"]
    assert list(found) == ["cold_start"]
