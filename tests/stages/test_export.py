"""The directory of an export: nothing in it is removed but what the stage itself has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers import __version__ as version

from parallel.errors import UserError
from parallel.families import FAMILIES, configuration
from parallel.hugging_face.config import contradictions, hugging_face_config
from parallel.hugging_face.multi_token import MultiTokenTensors
from parallel.machine.determinism import RANK_ENVIRONMENT
from parallel.settings import CHARACTERS
from pipeline.new_run.described import model_of
from stages.data.tokenizer import load_tokenizer
from stages.kinds.export.work import LOCK, complete, publish, run, scratch
from tests.byte_tokenizer import CHATML, save_tokenizer
from tests.parallel.test_model_families import model as family_model
from tests.pipeline.checkpoint_headers import SMALL
from tests.runs import REPOSITORY


def test_a_model_is_built_with_the_variables_of_deterministic_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU TransformerEngine refuses to build deterministic attention without its variable."""
    for variable in RANK_ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    built: dict[str, str | None] = {}

    def build(*_: object) -> None:
        built.update({variable: os.environ.get(variable) for variable in RANK_ENVIRONMENT})
        raise UserError("far enough")

    monkeypatch.setattr("stages.kinds.export.work.Policy", build)
    monkeypatch.setattr("stages.kinds.export.work.remove_unfinished", lambda _: None)
    monkeypatch.setattr("stages.kinds.export.work.is_main", lambda: False)
    settings = SimpleNamespace(model=SMALL, layout=None)
    job: Any = SimpleNamespace(settings=settings, parent=tmp_path, output=tmp_path / "out")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(UserError, match="far enough"):
            run(job)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
    assert built == RANK_ENVIRONMENT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a finished model that has no name yet."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "config.json").write_text("{}")
    return tmp_path / "scratch"


def test_defaults_of_generation_are_those_of_the_start(tmp_path: Path) -> None:
    start, exported = tmp_path / "start", tmp_path / "exported"
    start.mkdir()
    exported.mkdir()
    none_kept = MultiTokenTensors(SMALL)
    complete(SMALL, exported, none_kept)
    assert not (exported / "generation_config.json").exists()
    begun = SMALL.model_copy(update={"initial_weights": start})
    for ends, both in ((7, [1, 7]), ([7, 1], [1, 7]), (None, [1])):
        defaults = {"eos_token_id": ends, "pad_token_id": 7, "top_k": 20}
        (start / "generation_config.json").write_text(json.dumps(defaults))
        complete(begun, exported, none_kept)
        found = json.loads((exported / "generation_config.json").read_text())
        assert found == {"eos_token_id": both, "pad_token_id": 0, "top_k": 20}
    (start / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read: .*end_tokens"):
        complete(begun, exported, none_kept)


def test_an_export_stops_where_the_policy_was_trained_to(tmp_path: Path) -> None:
    model = SMALL.model_copy(update={"end_tokens": ("[END]", 5)})
    complete(model, tmp_path, MultiTokenTensors(SMALL))
    stated = {"eos_token_id": [1, 5], "pad_token_id": 0}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == stated
    config = json.loads((tmp_path / "config.json").read_text())
    assert stated.items() <= config.items()


# The keys that the classes of transformers 4.57.6 read from config.json, besides `FORMER_OF_ALL`.
FORMER_OF_ALL = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads hidden_act max_position_embeddings initializer_range rms_norm_eps"
    " use_cache tie_word_embeddings rope_theta rope_scaling attention_dropout num_experts_per_tok"
    " torch_dtype dtype"
)
FORMER = {
    "qwen3_moe": "num_experts moe_intermediate_size decoder_sparse_step norm_topk_prob head_dim"
    " mlp_only_layers attention_bias use_sliding_window sliding_window",
    "mixtral": "num_local_experts head_dim sliding_window",
    "glm4_moe": "n_routed_experts n_shared_experts moe_intermediate_size routed_scaling_factor"
    " n_group topk_group first_k_dense_replace norm_topk_prob use_qk_norm attention_bias head_dim"
    " partial_rotary_factor",
    "deepseek_v3": "n_routed_experts n_shared_experts moe_intermediate_size routed_scaling_factor"
    " n_group topk_group first_k_dense_replace norm_topk_prob kv_lora_rank q_lora_rank"
    " qk_rope_head_dim v_head_dim qk_nope_head_dim rope_interleave attention_bias",
    "gpt_oss": "num_local_experts head_dim sliding_window layer_types",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_4_57_finds_every_key_that_it_reads(family: str, tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    scaled = {"deepseek_v3": {"rope_scaling": scaling}, "gpt_oss": {"rope_scaling": scaling}}
    settings = family_model(family)
    further = settings.architecture | scaled.get(family, {})
    settings = settings.model_copy(update={"architecture": further, "tokenizer": "characters"})
    complete(settings, tmp_path, MultiTokenTensors(settings))
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(f"{FORMER_OF_ALL} {FORMER.get(family, '')}".split()) <= config.keys()
    experts = next(key for key, name in FAMILIES[family].names.items() if name == "experts")
    assert config[experts] == settings.experts
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    if family in scaled:  # as DeepSeek-V3's and gpt-oss' published files have it
        assert (scaling | {"type": "yarn", "rope_type": "yarn"}).items() <= config[
            "rope_scaling"
        ].items()
    else:
        assert config["rope_scaling"] is None
    # What reads the current names finds what it found without the former ones.
    current, written = hugging_face_config(settings), AutoConfig.from_pretrained(tmp_path)
    assert {"type": "yarn", **current.rope_parameters} == {
        "type": "yarn",
        **written.rope_parameters,
    }
    assert contradictions(settings, config) == []
    assert configuration(model_of(tmp_path)) == configuration(settings)


def test_vllm_routes_an_exported_deepseek_by_sigmoids(tmp_path: Path) -> None:
    """vLLM takes a softmax without the key, which DeepSeek-V3's published config.json has."""
    settings = family_model("deepseek_v3")
    complete(settings, tmp_path, MultiTokenTensors(settings))
    assert AutoConfig.from_pretrained(tmp_path).scoring_func == "sigmoid"


@pytest.mark.parametrize("beside", ["qwen3_moe", "deepseek_v3"])
def test_an_exported_tokenizer_is_of_a_class_that_every_version_has(
    beside: str, tmp_path: Path
) -> None:
    """transformers 4.57 has no TokenizersBackend, and stops at a list of extra_special_tokens."""
    own = {"own": save_tokenizer(tmp_path / "own", CHATML), "characters": CHARACTERS}
    for name, tokenizer in own.items():
        update = {"tokenizer": str(tokenizer), "vocabulary_size": 300}
        settings = family_model(beside).model_copy(update=update)
        (tmp_path / f"{name}_exported").mkdir()
        complete(settings, exported := tmp_path / f"{name}_exported", MultiTokenTensors(settings))
        config = json.loads((exported / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not isinstance(config.get("extra_special_tokens"), list)
        assert not config.keys() & {"is_local", "local_files_only"}
        theirs, ours = AutoTokenizer.from_pretrained(exported), load_tokenizer(settings)
        text = "user: what is 1+1? assistant: it is 2"
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
        assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.end_token, ours.pad_token)
    assert config["additional_special_tokens"][0] == "[RESERVED_76]"


def test_the_card_names_base_stages_and_readers_without_paths(tmp_path: Path) -> None:
    run, base = tmp_path / "secret" / "run", tmp_path / "secret" / "Base-30B"
    base.mkdir(parents=True)
    for name, kind, parents in (
        ("import", "import", {}),
        ("experts.math", "grpo", {"import": "a"}),
        ("experts.code", "grpo", {"import": "a", str(tmp_path / "secret" / "Teacher"): "b"}),
        ("merge", "distill", {"experts.math": "c", "experts.code": "d"}),
    ):
        (stage := run / "stages" / name).mkdir(parents=True)
        manifest = {"parents": parents, "settings": {"kind": kind}}
        (stage / "manifest.json").write_text(json.dumps(manifest))
    settings = SMALL.model_copy(update={"initial_weights": base})
    parent = run / "stages" / "merge" / "checkpoints" / "step_40"
    complete(settings, base, MultiTokenTensors(SMALL), parent=parent)
    card = (base / "README.md").read_text()
    stages = (
        "merge (distill, step 40), experts.math (grpo), experts.code (grpo), import (import),"
        " Teacher"
    )
    assert f"| base | Base-30B |\n| family | qwen3_moe |\n| stages | {stages} |" in card
    assert f"| end tokens | `[END]` |\n| read by | transformers 4.57 to {version}" in card
    assert str(tmp_path) not in card
    complete(settings, base, MultiTokenTensors(SMALL), parent=tmp_path / "secret" / "Teacher")
    assert "| stages | Teacher |" in (base / "README.md").read_text()


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_takes_an_empty_directory(exists: bool, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    if exists:
        output.mkdir()
    publish(model, output, replaces=False)
    assert [path.name for path in output.iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_appears_during_an_export_is_kept_and_so_is_the_model(
    kind: str, model: Path, tmp_path: Path
) -> None:
    output, notes = tmp_path / "model", tmp_path / "model" / "notes.txt"
    if kind == "directory":
        output.mkdir()
        notes.write_text("mine")
    elif kind == "file":
        output.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        output.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "model-2").write_text("mine too")
    with pytest.raises(UserError, match=r"verified in .*/model-3$"):
        publish(model, output, replaces=False)
    kept = {"directory": notes, "file": output}.get(kind, tmp_path / "model-2")
    assert kept.read_text().startswith("mine")
    assert (tmp_path / "model-3" / "config.json").exists()


def test_a_stage_replaces_its_own_output(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "huggingface"
    output.mkdir()
    (output / "old.json").write_text("{}")
    publish(model, output, replaces=True)
    assert [path.name for path in output.iterdir()] == ["config.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from stages.kinds.export.work import scratch
with scratch(Path(sys.argv[1])) as unfinished:
    (unfinished / "model.safetensors").write_bytes(bytes(9))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_what_a_killed_export_to_the_same_place_left_is_removed(tmp_path: Path) -> None:
    output = tmp_path / "model[1]"
    mine = tmp_path / f".{output.name}.mine"
    mine.mkdir()
    for each in (output, tmp_path / "other"):
        subprocess.run([sys.executable, "-c", KILLED, str(each)], cwd=REPOSITORY, check=False)
    [left] = (lock.parent for lock in tmp_path.glob(f".model*/{LOCK}"))
    [other] = tmp_path.glob(".other.*")
    with scratch(output) as first, scratch(output) as second:
        assert not left.exists()
        assert first.is_dir()  # it still runs
        assert second.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])
