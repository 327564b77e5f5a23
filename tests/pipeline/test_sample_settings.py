"""Rejection sampling and mixtures in a configuration: rules, paths, and what makes them stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.rows import MOST_ROWS
from pipeline.config.validate import load
from pipeline.launch.runner import report_kept, start_of
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.lineage import changes, fingerprints, lineage_from
from pipeline.run.outside import outside_model
from pipeline.run.run import Run, missing_output
from pipeline.run.select import find_fork
from stages.directory import StageDirectory
from stages.kinds.sft.settings import SftSettings
from stages.settings import RunSettings
from tests.pipeline.test_states import record
from tests.pipeline.violations import edited, errors

BLOCKS = """\
  collect:
    kind: sample
    from: experts.sums
    prompts: 10
    keep: {reward: 1.0}
  tuned:
    kind: sft
    from: cold_start
    data:
      kept: {stage: collect, weight: 3}
      own: {source: jsonl, path: chats.jsonl}
      shown: {domain: sums}
    sequences_per_step: 8
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
  evaluate:"""
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
SAMPLED = "sampling: {prompts_per_step: 4, group_size: 4}"


@pytest.fixture
def sampled(config: Path) -> Path:
    """The smallest configuration with both kinds of blocks."""
    config.with_name("chats.jsonl").write_text(CHAT)
    return edited(config, "  evaluate:", BLOCKS)


def stages(path: Path, *overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(path, overrides))}


def test_the_graph_has_the_samples_between_model_and_training(sampled: Path) -> None:
    found = stages(sampled)
    assert found["collect"].parent == "experts.sums"
    assert found["collect"].needs_engine and not found["collect"].trains
    assert found["tuned"].parent == "cold_start"
    assert found["tuned"].data == {"kept": "collect"}
    assert found["tuned"].waits_for == ("cold_start", "collect")
    assert "tuned" in found["evaluate"].models and "collect" not in found["evaluate"].models


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.collect.from=null", "collect.from: must name what responses are sampled from"),
        ("stages.collect.from=merged", "collect.from: no such stage: merged"),
        ("stages.tuned.data.kept.stage=experts.sums", "leaves checkpoints, and data are needed"),
        ("stages.tuned.data.kept.stage=colect", "data.kept.stage: no such stage: colect"),
        ("stages.collect.prompts=1", "collect.prompts: 1 is less than the 2 data-parallel"),
        (
            "stages.collect.keep.per_prompt=9",
            "collect.keep.per_prompt: 9 is more than domains.sums.sampling.group_size = 8",
        ),
        (
            "stages.collect.keep.min_tokens=25",
            "keep.min_tokens: 25 drops every response: domains.sums.sampling.max_response_tokens",
        ),
        (
            "stages.collect.keep={reward: 1, min_tokens: 5, max_tokens: 4}",
            "collect.keep.max_tokens: 4 is less than keep.min_tokens = 5, which drops every",
        ),
        (
            "stages.collect.keep={reward: 1, script: {allowed: [Elvish]}}",
            "keep.script.allowed.0: ",
        ),
        ("stages.collect.keep={reward: 1, script: {allowed: []}}", "should have at least 1 item"),
        (
            "stages.collect.sampling={prompts_per_step: 2000, group_size: 1000}",
            "2000 prompts x 1000 samples are 2000000 at once; at most 1000000",
        ),
        (
            "stages.collect.sampling={max_response_tokens: 9999}",
            "collect.sampling.max_response_tokens: 9999 leaves no room for a prompt",
        ),
        ("stages.tuned.sequences_per_step=null", "sequences_per_step: required with data"),
        ("stages.tuned.sequences_per_step=1", "tuned.sequences_per_step: 1 is less than the 2"),
        ("stages.cold_start.sequences_per_step=8", "sequences_per_step: only read with data"),
        ("stages.tuned.data.shown.domain=sumz", "data.shown.domain: no such domain of the stage"),
        ("stages.tuned.data.shown.weight=0", "data.shown.weight: should be greater than 0"),
        ("stages.tuned.data.own.max_tokens=9999", "data.own.max_tokens: 9999 is more than model."),
        ("stages.tuned.data.own.path=gone.jsonl", "data.own.path: no such file: "),
        ("stages.tuned.data.kept.stage=/gone/collect", "it has no collection.json"),
        ("stages.tuned.data.own.sequences_per_step=3", "unknown key"),
    ],
)
def test_a_wrong_setting_is_named(sampled: Path, override: str, expected: str) -> None:
    found = errors(sampled, override)
    assert any(expected in each for each in found), found


def test_a_filter_may_leave_one_length_the_longest(sampled: Path) -> None:
    load(sampled, ["stages.collect.keep={reward: 1, min_tokens: 24, max_tokens: 24}"])


@pytest.mark.parametrize(
    "override",
    [
        "stages.collect.keep.per_prompt=8",  # the whole group
        "stages.collect.prompts=2",  # one for each data-parallel rank
        "stages.collect.sampling={top_k: 80}",  # the whole vocabulary
        "domains={sums: {demonstrations: {sequences_per_step: 1}}, words: {demonstrations:"
        " {sequences_per_step: 1}}}",  # a step of the cold start, over two ranks
    ],
)
def test_a_number_may_reach_its_limit(sampled: Path, override: str) -> None:
    load(sampled, [override])


def test_a_response_as_long_as_the_engine_s_sequences_leaves_no_prompt(sampled: Path) -> None:
    key = "stages.collect.sampling"
    load(sampled, [f"{key}={{max_response_tokens: 63}}"])
    [error] = errors(sampled, f"{key}={{max_response_tokens: 64}}")
    assert f"{key}.max_response_tokens: 64 leaves no room for a prompt" in error


def test_a_filter_is_checked_against_the_sampling_where_it_is_stated(sampled: Path) -> None:
    given = "stages.collect.sampling={group_size: 4}", "stages.collect.keep.per_prompt=9"
    [error] = errors(sampled, *given)
    assert "9 is more than stages.collect.sampling.group_size = 4 responses" in error


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"other": 1}', "no column 'messages'; columns: 'other'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "'messages' has no assistant turn"),
        ('{"messages": [}', "not valid JSON"),
    ],
)
def test_a_source_s_first_rows_are_checked(sampled: Path, row: str, why: str) -> None:
    chats, key = sampled.with_name("chats.jsonl"), "stages.tuned.data.own"
    chats.write_text(f"\n{CHAT}{row}\n")
    [error] = errors(sampled)
    assert f"{key}: chats.jsonl:3: {why}" in error
    assert error.endswith(f"fix it, or skip such rows with {key}.on_bad_row: skip")
    load(sampled, [f"{key}.on_bad_row=skip"])
    chats.write_text(CHAT * MOST_ROWS + row)
    load(sampled)  # only the first are read: the stage reads all


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("{reward: 1.0}", "{per_prompt: 2}", "stages.collect.keep.reward"),
        ("    prompts: 10\n", "", "stages.collect.prompts"),
        ("{stage: collect, weight: 3}", "{weight: 3}", "stages.tuned.data.kept.source"),
        ("{source: jsonl, path: chats.jsonl}", "{source: jsonl}", "stages.tuned.data.own.path"),
    ],
)
def test_required_keys_are_named(sampled: Path, old: str, new: str, key: str) -> None:
    [error] = errors(edited(sampled, old, new))
    assert f": {key}: required key is missing" in error


def test_paths_of_sources_are_relative_to_the_file_that_states_them(sampled: Path) -> None:
    block = load(sampled).stages["tuned"]
    assert isinstance(block, SftSettings)
    [(name, files)] = block.files()
    assert (name, files.path) == ("own", sampled.with_name("chats.jsonl"))
    assert list(block.demonstrated(["sums", "words"])) == ["sums"]
    assert block.key_of("data", "kept") == "data.kept.stage"


@pytest.mark.parametrize(
    ("override", "stale"),
    [
        ("stages.collect.keep.reward=0.5", {"collect"}),
        ("stages.collect.keep.per_prompt=2", {"collect"}),
        ("stages.collect.keep.choose=best", {"collect"}),
        ("stages.collect.prompts=11", {"collect"}),
        ("domains.sums.sampling.group_size=4", {"collect", "experts.sums"}),
        # Responses are graded by the rewards, and every other stage on the domain trains on them
        # or is graded by them too.
        ("domains.sums.rewards={right: {kind: math}}", {"collect", "experts.sums", "evaluate"}),
        ("stages.tuned.data.kept.weight=2", {"tuned"}),
        ("stages.tuned.data.own=null", {"tuned"}),
        ("stages.tuned.sequences_per_step=9", {"tuned"}),
        ("stages.tuned.after=[merge]", set()),
        # Of the domains, a mixture reads those that it names.
        ("domains.words.demonstrations.count=7", {"cold_start"}),
        ("domains.sums.demonstrations.count=7", {"cold_start", "tuned"}),
    ],
)
def test_a_change_touches_what_it_decides(sampled: Path, override: str, stale: set[str]) -> None:
    before, after = stages(sampled), stages(sampled, override)
    assert {name for name in before if before[name].reads != after[name].reads} == stale


def test_a_mixture_reads_no_domain_but_those_it_names(sampled: Path) -> None:
    shown = '{"prompt": "a", "response": "b"}\n'
    of_file = "{source: jsonl, path: words.jsonl, response: response}"
    old = "prompts: {dataset: spell_backward}\n"
    edited(sampled, old, f"{old}    demonstrations: {of_file}\n")
    words = sampled.with_name("words.jsonl")
    words.write_text(shown)
    before = {name: fingerprints(stage.reads) for name, stage in stages(sampled).items()}
    words.write_text(shown * 2)
    after = {name: fingerprints(stage.reads) for name, stage in stages(sampled).items()}
    assert {name for name in before if before[name] != after[name]} == {"cold_start"}
    # But all domains hold the same fraction out of every source.
    halves = [f"domains.{name}.prompts.held_out_fraction=0.5" for name in ("sums", "words")]
    tuned = [stages(sampled, *halves)["tuned"].reads, stages(sampled)["tuned"].reads]
    assert tuned[0]["held_out_fraction"] == 0.5 != tuned[1]["held_out_fraction"]


def test_a_stated_sampling_does_not_read_the_domain_s(sampled: Path) -> None:
    edited(sampled, "    prompts: 10\n", f"    prompts: 10\n    {SAMPLED}\n")
    before, after = stages(sampled), stages(sampled, "domains.sums.sampling.group_size=4")
    assert before["collect"].reads == after["collect"].reads


def test_without_data_the_settings_of_mixtures_are_not_read(config: Path) -> None:
    reads = stages(config)["cold_start"].reads
    assert not any(key.startswith(("data", "sequences")) for key in reads)


def test_files_and_collected_responses_are_compared_by_content(
    sampled: Path, tmp_path: Path
) -> None:
    tuned = stages(sampled)["tuned"]
    before = fingerprints(tuned.reads)
    assert before["data.own.path"] is not None
    sampled.with_name("chats.jsonl").write_text(CHAT * 2)
    assert fingerprints(tuned.reads)["data.own.path"] != before["data.own.path"]
    other = StageDirectory(tmp_path / "another" / "collect")
    other.path.mkdir(parents=True)
    found = []
    for digest in ("one", "two"):
        other.collection.write_text(f'{{"digest": "{digest}"}}')
        outside = stages(sampled, f"stages.tuned.data.kept.stage={other.path}")["tuned"]
        assert outside.data == {"kept": str(other.path)}
        model = outside_model(other.path)
        assert model is not None and model.path == other.collected
        checkpoints = dict.fromkeys(outside.inputs)
        found.append(lineage_from(outside, checkpoints, {}))
    assert list(changes(*found)) == [f"the checkpoint of {other.path} changed"]


def test_a_sample_stage_is_complete_with_its_collection(sampled: Path, tmp_path: Path) -> None:
    stage, directory = stages(sampled)["collect"], StageDirectory(tmp_path / "collect")
    directory.path.mkdir()
    assert missing_output(stage, directory, None) == "its collection.json is missing"
    directory.collection.write_text('{"digest": "abc"}')
    assert missing_output(stage, directory, None) is None


def test_what_a_finished_stage_kept_is_reported(tmp_path: Path) -> None:
    directory, said = StageDirectory(tmp_path), []
    counts = {"rows": 3, "drawn": 20, "dropped": {"empty": 2, "reward": 15}}
    for found in (counts, {"rows": 20, "drawn": 20, "dropped": {}}):
        directory.collection.write_text(json.dumps(found))
        report_kept(directory, said.append)
    assert said == [
        "kept 3 of 20 responses; dropped: 15 by reward, 2 by empty",
        "kept 20 of 20 responses",
    ]


def test_a_change_of_the_filter_makes_its_readers_stale(sampled: Path, run: RunDirectory) -> None:
    settings = load(sampled)
    finish(run, settings)
    assert Run(run.path, settings).states["tuned"].state == "done"
    found = Run(run.path, load(sampled, ["stages.collect.keep.reward=0.5"])).states
    stale = {name for name, state in found.items() if state.state == "stale"}
    assert stale == {"collect", "tuned"}
    assert "keep.reward was 1.0 and is now 0.5" in found["collect"].cause


def finish(run: RunDirectory, settings: RunSettings) -> None:
    """Leave what stages leave that train or collect."""
    for stage in compile_graph(settings):
        if stage.kind == "sample":
            run.stage(stage.name).path.mkdir(parents=True)
            run.stage(stage.name).collection.write_text('{"digest": "abc"}')
        if stage.trains or stage.kind == "sample":
            record(run, settings, stage, "done")


def test_parts_drawn_by_other_settings_are_not_continued(sampled: Path, run: RunDirectory) -> None:
    settings = load(sampled)
    for stage in compile_graph(settings):
        if stage.name in ("cold_start", "experts.sums"):
            record(run, settings, stage, "done")
        if stage.name == "collect":
            record(run, settings, stage, "running")
            run.stage(stage.name).drawn.mkdir()
            (run.stage(stage.name).drawn / "part_000000.parquet").touch()
            assert start_of(run.stage(stage.name)) == "from 1 drawn parts"
    assert Run(run.path, settings).states["collect"].state == "failed"  # and is resumed
    other = load(sampled, ["stages.collect.prompts=11"])
    assert Run(run.path, other).states["collect"].state == "stale"


def test_collected_responses_are_reused_with_what_reads_them(
    sampled: Path, run: RunDirectory
) -> None:
    settings = load(sampled)
    finish(run, settings)
    fork = find_fork(Run(run.path.with_name("other"), settings), run)
    assert {"collect", "tuned"} <= fork.reused.keys()
