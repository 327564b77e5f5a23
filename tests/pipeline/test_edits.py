"""`braid plan` of an edited configuration: what is reused, stale, new, deleted and renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.violations import edited_copy

Braid = Callable[..., tuple[int, str, str]]


@pytest.fixture
def small(braid: Braid, config: Path, runs: Path) -> Path:
    assert braid("run", config)[0] == 0
    return runs / "small"


def edit(braid: Braid, config: Path) -> dict:
    code, out, err = braid("plan", config, "--json")
    assert (code, err) == (0, "")
    found: dict = json.loads(out)["edit"]
    return found


def test_an_unchanged_configuration_edits_nothing(braid: Braid, config: Path, small: Path) -> None:
    assert edit(braid, config) is None
    assert "edit:" not in braid("plan", config)[1]


def test_an_unfinished_run_is_no_edit(braid: Braid, config: Path) -> None:
    braid("run", config, actions={"experts.sums": {"0": "break_down"}})
    assert edit(braid, config) is None


def test_a_renamed_block_is_recognised(braid: Braid, config: Path, small: Path) -> None:
    wanted = edited_copy(
        config, ("experts: {kind", "rl: {kind"), ("teachers: experts", "teachers: rl")
    )
    found = edit(braid, wanted)
    assert found["renamed"] == [["experts", "rl"]]
    assert found["new"] == ["rl.sums", "rl.words"]
    assert found["deleted"].keys() == {"experts.sums", "experts.words"}
    assert found["reused"] == ["cold_start"]
    code, out, _ = braid("plan", wanted)
    assert code == 0
    hint = "  renamed? keep its work with `was: experts` in stages.rl\n"
    stays = f"  deleted: experts.sums: its output stays in {small}/stages/experts.sums\n"
    assert hint in out and stays in out
    code, _, err = braid("run", wanted)
    assert code == 1
    assert hint in err and stays in err
    stated = edited_copy(wanted, ("rl: {", "rl: {was: experts, "))
    assert edit(braid, stated) is None


def test_two_renamed_blocks_are_recognised_through_each_other(
    braid: Braid, config: Path, small: Path
) -> None:
    wanted = edited_copy(
        config,
        ("cold_start", "warm"),
        ("experts: {", "rl: {"),
        ("teachers: experts", "teachers: rl"),
    )
    assert edit(braid, wanted)["renamed"] == [["cold_start", "warm"], ["experts", "rl"]]
    stated = edited_copy(wanted, ("warm:\n", "warm:\n    was: cold_start\n"))
    assert edit(braid, stated)["renamed"] == [["experts", "rl"]]
    assert edit(braid, edited_copy(stated, ("rl: {", "rl: {was: experts, "))) is None


def test_another_seed_by_hand_is_stale(braid: Braid, config: Path, small: Path) -> None:
    """The names that random numbers derive from, of a block of each kind."""
    other = "stages.experts.was='other.{domain}'"
    cause = "the name that seeds it was experts.sums and is now other.sums"
    code, out, _ = braid("plan", config, other, "--json")
    found = json.loads(out)["edit"]
    assert (code, found["stale"]["experts.sums"]) == (0, cause)
    assert found["reused"] == ["cold_start"]
    code, _, err = braid("run", config, other)
    assert code == 1
    assert 'stages.experts.was: null there, "other.{domain}" here' in err
    for name, stale in (("evaluate", ["evaluate"]), ("export", [])):
        code, out, _ = braid("plan", config, f"stages.{name}.was=other", "--json")
        found = json.loads(out)["edit"]  # an export draws nothing
        assert [*(found or {"stale": {}})["stale"]] == stale


def test_a_manifest_of_before_has_no_seed_that_could_differ(
    braid: Braid, config: Path, small: Path
) -> None:
    path = small / "stages/merge/manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("seeded_as") == "merge"
    path.write_text(json.dumps(manifest))
    assert edit(braid, config) is None
    code, out, _ = braid("plan", config, "stages.merge.was=other", "--json")
    assert (code, json.loads(out)["edit"]) == (0, None)


def test_a_manifest_of_before_has_no_keys_of_demonstrations_and_rewards_that_could_differ(
    braid: Braid, config: Path, small: Path
) -> None:
    removed: set[str] = set()
    for path in (small / "stages").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        later = [key for key in manifest["settings"] if key.endswith((".unworked", ".working"))]
        removed |= {key.rpartition(".")[2] for key in later}
        for key in later:
            del manifest["settings"][key]
        path.write_text(json.dumps(manifest))
    assert removed == {"unworked", "working"}
    assert edit(braid, config) is None
    other = "domains.sums.rewards={exact: {kind: reasoning_gym, working: forbidden}}"
    code, out, _ = braid("plan", config, other, "--json")
    assert (code, "experts.sums" in json.loads(out)["edit"]["stale"]) == (0, True)


def test_another_as_is_recognised(braid: Braid, config: Path, runs: Path) -> None:
    first = edited_copy(config, ("experts: {", "experts: {as: 'a.{domain}', "))
    assert braid("run", first)[0] == 0
    second = edited_copy(config, ("experts: {", "experts: {as: 'b.{domain}', "))
    assert edit(braid, second)["renamed"] == [["a.{domain}", "experts"]]
    assert "`was: 'a.{domain}'` in stages.experts\n" in braid("plan", second)[1]
    third = edited_copy(second, ("experts: {", "experts: {was: 'a.{domain}', "))
    assert edit(braid, third) is None


def test_a_renamed_block_with_other_settings_is_new(
    braid: Braid, config: Path, small: Path
) -> None:
    wanted = edited_copy(
        config,
        ("experts: {kind: grpo,", "rl: {kind: grpo, updates_per_rollout: 2,"),
        ("teachers: experts", "teachers: rl"),
    )
    assert edit(braid, wanted)["renamed"] == []


def test_a_renamed_block_with_other_data_is_new(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    data = tmp_path / "shown.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n')
    shown = f"domains.words.demonstrations={{source: jsonl, path: {data}, response: response}}"
    assert braid("run", config, shown)[0] == 0
    wanted = edited_copy(config, ("cold_start", "warm"))

    def renamed() -> list:
        found: list = json.loads(braid("plan", wanted, shown, "--json")[1])["edit"]["renamed"]
        return found

    assert renamed() == [["cold_start", "warm"]]
    data.write_text('{"prompt": "a", "response": "c"}\n')
    assert renamed() == []


def test_a_deleted_leaf_stays(braid: Braid, config: Path, small: Path) -> None:
    wanted = edited_copy(config, ("  export: {kind: export, from: merge}\n", ""))
    found = edit(braid, wanted)
    assert (found["stale"], found["new"], found["reruns"]) == ({}, [], [])
    assert found["deleted"] == {"export": f"{small}/stages/export"}
    code, out, _ = braid("run", wanted)
    assert code == 0
    assert "deleted: export: its output stays in" in out
    assert (small / "stages/export").exists()


def test_an_inserted_stage_says_what_reruns(braid: Braid, config: Path, small: Path) -> None:
    inserted = "  second: {kind: sft, from: cold_start, optimizer: {learning_rate: 1e-3}, "
    wanted = edited_copy(
        config,
        ("  experts: {kind: grpo, from: cold_start", f"{inserted}loop: {{steps: 2}}}}\n"
         "  experts: {kind: grpo, from: second"),
    )  # fmt: skip
    found = edit(braid, wanted)
    assert found["new"] == ["second"]
    assert found["reused"] == ["cold_start"]
    assert "cold_start is no longer an input" in found["stale"]["experts.sums"]
    _, out, _ = braid("plan", wanted)
    assert "  runs, with --from experts.sums --from experts.words: second, experts.sums," in out
    options = ("--from", "experts.sums", "--from", "experts.words")
    assert braid("run", wanted, *options)[0] == 0
    assert edit(braid, wanted) is None


def test_an_old_run_yaml_that_is_invalid_by_now_has_no_hint(
    braid: Braid, config: Path, small: Path
) -> None:
    (small / "run.yaml").write_text("name: [")
    wanted = edited_copy(
        config, ("experts: {kind", "rl: {kind"), ("teachers: experts", "teachers: rl")
    )
    found = edit(braid, wanted)
    assert (found["renamed"], found["new"]) == ([], [])
    assert found["deleted"].keys() == {"experts.sums", "experts.words"}


def test_a_new_leaf_is_new_and_a_lost_one_is_not(braid: Braid, config: Path, small: Path) -> None:
    wanted = edited_copy(
        config, ("  export: {", "  second: {kind: export, from: cold_start}\n  export: {")
    )
    found = edit(braid, wanted)
    assert (found["new"], found["stale"], found["deleted"]) == (["second"], {}, {})
    shutil.rmtree(small / "stages/export")
    assert "edit:" not in braid("plan", config)[1]
