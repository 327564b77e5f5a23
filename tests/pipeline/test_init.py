"""`braid init`: runs that the other commands accept, and inputs that leave nothing written."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parallel.families import architecture
from pipeline.config.cluster import seconds_of
from pipeline.config.tokenizers import has_thoughts
from pipeline.config.validate import load, load_cluster
from pipeline.estimate.budget import LEAST_STEPS, steps_within, walltimes
from pipeline.estimate.fit import fitted
from pipeline.estimate.layout_search import best_layouts
from pipeline.estimate.simulation import Assumptions, simulated
from pipeline.new_run.described import model_of
from pipeline.new_run.run_blocks import RunRequest, first_blocks
from pipeline.new_run.run_file import TO_FILL_IN
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.layouts.real_models import real_model
from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import TEMPLATE, TINY, published, rows
from tests.pipeline.test_simulate import ASSUMED, config, total
from tests.repository.test_architecture import HEAVY
from tests.runs import REPOSITORY
from tests.tiers import tiered

MODELS = sorted(path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yaml"))
PROFILE = "gpus_per_node: 4\nranks_per_node: 4\ngpu_type: h200\ngpu_memory_gib: 140\n"
# Model, domains, GPUs, further options, and the own keys of a cluster's profile.
COMBINATIONS: dict[str, tuple[str, tuple[str, ...], int | None, tuple[str, ...], str | None]] = {
    "Qwen3-30B-A3B on a node": ("qwen3-30b-a3b", ("math",), 8, ("--gpu", "h100"), None),
    "Mixtral on nodes of 4": ("mixtral-8x7b", ("math", "json"), 16, (), PROFILE),
    "GLM-4.5-Air within a budget": (
        *("glm-4.5-air", ("instructions",), 64),
        ("--gpu", "h100", "--budget", "300"),
        None,
    ),
    "DeepSeek-V3 on 512": ("deepseek-v3", ("math",), 512, ("--gpu", "h100"), None),
    "tiny on a cluster without GPUs": ("tiny", ("math", "json"), None, (), "ranks_per_node: 1\n"),
}


KEPT = ("Qwen3-30B-A3B on a node", "DeepSeek-V3 on 512", "tiny on a cluster without GPUs")


def given(directory: Path, model: str, domains: tuple[str, ...]) -> list[str]:
    """Return the options of a model's directory and of domains with rows."""
    name = TINY if model == "tiny" else model
    weights = published(directory / "model", name)
    files = [f"{each}={rows(directory / f'{each}.jsonl', each)}" for each in domains]
    return ["--model", str(weights), "--domains", *files, "--output", str(directory / "mine.yaml")]


def said(braid: Braid, *options: object) -> dict[str, Any]:
    code, out, err = braid("init", *options, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", tiered(COMBINATIONS, KEPT))
def test_what_it_writes_is_accepted(name: str, braid: Braid, tmp_path: Path) -> None:
    model, domains, gpus, more, keys = COMBINATIONS[name]
    options = [*given(tmp_path, model, domains), *more, *(["--gpus", gpus] if gpus else [])]
    if keys is not None:
        (tmp_path / "cluster.yaml").write_text(keys)
        options += ["--cluster", tmp_path / "cluster.yaml"]
    found = said(braid, *options)
    run, profile = tmp_path / "mine.yaml", tmp_path / "mine.cluster.yaml"
    assert found["written"] == [str(run), *([str(profile)] if gpus else [])]
    if not gpus:
        profile = tmp_path / "cluster.yaml"
    code, out, err = braid("validate", run, "--cluster", profile)
    assert code == 0, err
    code, out, err = braid("submit", run, "--cluster", profile, "--dry-run")
    assert code == 0, err
    for time in found["walltimes"].values():
        assert f"--time={time}" in out
    settings = load(run)
    assert settings.layout.ranks == (gpus or 2)
    assert [*settings.domains] == [*domains]
    if model != "tiny":
        assert f"models/{model}.yaml" in run.read_text()
    assert settings.evaluation.problems <= min(e["held_out"] for e in found["rows"].values())


@pytest.mark.parametrize("opening", ["<think>\\n", "[THINK]", "<|channel|>analysis<|message|>", ""])
def test_thoughts_are_seen_in_the_chat_template(opening: str, tmp_path: Path) -> None:
    directory = published(tmp_path, TINY)
    assert not has_thoughts(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE + opening)
    assert has_thoughts(directory) == bool(opening)


def test_a_model_that_thinks_has_the_room_of_the_shipped_runs_of_such_models(
    tmp_path: Path,
) -> None:
    shipped = load(REPOSITORY / "configs/runs/qwen3-30b-a3b.yaml", to_start=False)
    own = tmp_path / "own.yaml"
    own.write_text("sampling: {max_response_tokens: 4096}\n")
    bases = {name: REPOSITORY / f"configs/domains/{name}.yaml" for name in ("math", "instructions")}
    wanted = RunRequest(
        *("mine", tmp_path / "mine.yaml", shipped.model, None, tmp_path),
        domains={name: (base, None) for name, base in {**bases, "own": own}.items()},
        ranks=32,
        gpus=ASSUMED,
        thinks=True,
    )
    blocks = first_blocks(wanted)
    assert blocks["engine"] == {"max_model_tokens": shipped.engine.max_model_tokens}
    assert blocks["domains"].pop("own") == {"prompts": {}}
    for keys, block in [
        *((blocks["domains"][name], shipped.domains[name]) for name in bases),
        (blocks["stages"]["merge"], shipped.stages["merge"]),
    ]:
        found = block.model_dump()
        for name in keys.keys() - {"prompts"}:
            assert keys[name] == {key: found[name][key] for key in keys[name]}
        assert keys["sampling"] and keys["loop"]
    short = shipped.model.model_copy(update={"max_positions": 16384})
    blocks = first_blocks(replace(wanted, model=short))
    assert blocks["engine"] == {"max_model_tokens": 16384}
    assert blocks["domains"]["math"]["sampling"] == {"max_response_tokens": int(0.8 * 16384)}
    assert first_blocks(replace(wanted, thinks=False))["engine"] == {}


def test_a_model_by_name_needs_the_directory_of_its_weights(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    weights, options[1] = options[1], "qwen3-30b-a3b"
    on = ("--gpus", 8, "--gpu", "h100")
    code, _, err = braid("init", *options, *on)
    assert (code, err) == (
        1,
        "braid: --model qwen3-30b-a3b: name the directory of its weights too: --weights PATH\n",
    )
    planned = said(braid, *options, *on, "--dry-run")
    assert planned["written"] == []
    assert planned["notes"][0] == (
        "weights are not checked: /path/to/qwen3-30b-a3b has no *.safetensors yet"
    )
    assert "answers are not scored, and uses of rows are estimates: " in planned["notes"][1]
    known = said(braid, *options, "--weights", weights, *on, "--dry-run")
    assert known["written"] == []
    assert known["layout"] == planned["layout"]
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("model", [each for each in MODELS if each != "tiny-moe"])
def test_a_config_json_is_read_as_its_model(model: str, tmp_path: Path) -> None:
    expected = real_model(model)
    found = model_of(published(tmp_path, model))
    ours, theirs = (each.model_dump(exclude={"architecture"}) for each in (found, expected))
    assert ours == theirs
    assert architecture(found) == architecture(expected)


def test_a_vision_language_model_is_read_as_its_text_model(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the text model's keys are a block, its layers a list of kinds."""
    published(tmp_path, "qwen3.5-35b-a3b")
    text = json.loads((tmp_path / "config.json").read_text())
    given = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 27}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert architecture(model_of(tmp_path)) == architecture(real_model("qwen3.5-35b-a3b"))


def test_a_config_json_of_transformers_5_is_read_too(tmp_path: Path) -> None:
    """The rotary parameters are a block, and the experts have another family's name."""
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    changes = {"num_experts": None, "rope_theta": None, "dtype": "bfloat16"}
    published(tmp_path, TINY, num_local_experts=8, rope_parameters=rope, **changes)
    assert model_of(tmp_path) == TINY.model_copy(update={"rope_base": 5000.0, "precision": "bf16"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen2_moe"},
            'config.json: model_type: unknown family "qwen2_moe"; known: qwen3_moe, mixtral, ',
        ),
        ({"num_experts": None}, "config.json: no num_experts, which a qwen3_moe has"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            'rope_scaling: {"factor": 4.0, "type": "yarn"} is not implemented for qwen3_moe',
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: true is not implemented"),
        ({"hidden_size": "big"}, "config.json: hidden_size: Input should be a valid integer"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
    ],
)
def test_a_model_that_is_not_described(
    changes: dict[str, Any], message: str, braid: Braid, tmp_path: Path
) -> None:
    options = given(tmp_path, "tiny", ("math",))
    published(tmp_path / "model", TINY, **changes)
    refused(braid, tmp_path, options, message)


def refused(braid: Braid, directory: Path, options: list[Any], *messages: str) -> None:
    before = sorted(directory.iterdir())
    code, out, err = braid("init", *options)
    assert (code, out) == (1, "")
    progress, found, _ = err.partition("braid: ")
    assert found and "Traceback" not in err
    assert all(line.endswith(" ...") for line in progress.splitlines())
    for message in messages:
        assert message in err
    assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json; name the directory of a Hugging Face checkpoint"),
        ("tokenizer.json", "has no tokenizer (tokenizer.json, "),
        ("model.safetensors", "has neither a *.safetensors file nor "),
        ("../math.jsonl", "math.jsonl: no such file: "),
    ],
)
def test_a_file_that_is_missing(missing: str, message: str, braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    (tmp_path / "model" / missing).unlink()
    refused(braid, tmp_path, options, message)


def test_chat_messages_need_a_template(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    chat = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}
    (tmp_path / "math.jsonl").write_text(json.dumps(chat) + "\n")
    refused(braid, tmp_path, options, "model has no chat template, which prompts of chat messages")


def test_rows_without_a_prompt_are_counted(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    with (tmp_path / "math.jsonl").open("a") as file:
        file.write('{"answer": "1"}\n' * 4 + "no JSON\n")
    path = tmp_path / "math.jsonl"
    lines = [f"{path}:{n}: no column 'prompt'; columns: 'answer'; " for n in (61, 62, 63)]
    refused(braid, tmp_path, options, "math: 5 of the first 65 rows: ", "".join(lines))


def test_answers_that_the_reward_cannot_read_are_counted(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    asked = [{"prompt": f"question {n}", "answer": "$" if n % 10 == 0 else "1"} for n in range(100)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    refused(
        *(braid, tmp_path, options, "domains.math: the rewards cannot use ", "The first:\n"),
        ", answer '$': ",
        "cannot read the problem's answer '$' as mathematics",
    )


def test_responses_on_cpu_cores_have_room_for_the_right_answers(
    braid: Braid, tmp_path: Path
) -> None:
    options = given(tmp_path, "tiny", ("math", "json"))
    path = tmp_path / "math.jsonl"

    def limits(digits: int) -> tuple[int, int, list[str], int]:
        asked = ({"prompt": f"say {n}", "answer": f"{n + 10**digits}"} for n in range(60))
        path.write_text("".join(json.dumps(each) + "\n" for each in asked))
        found = said(braid, *options, "--force")
        run = load(tmp_path / "mine.yaml", to_start=False)
        merge = run.stages["merge"].sampling  # type: ignore[attr-defined]
        notes = [note for note in found["notes"] if "max_response_tokens" in note]
        expert = run.domains["math"].sampling.max_response_tokens
        return expert, merge.max_response_tokens, notes, found["rows"]["math"]["right"][1]

    expert, merge, notes, right = limits(40)
    assert right > 40 and expert == merge == 2 * right and not notes
    expert, _, [note], right = limits(300)
    assert expert < right
    assert f"more than 5 % of the right answers are longer, up to {right} tokens" in note


def test_a_model_too_large_for_cpu_cores(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    refused(braid, tmp_path, options, "30.5 billion parameters, too many to train on CPU cores")


@pytest.mark.parametrize(
    ("model", "gpus", "per_node", "enough"),
    [("glm-4.5-air", 8, 8, 16), ("qwen3-30b-a3b", 1, 3, 6)],
)
def test_too_few_gpus_for_the_model(
    model: str, gpus: int, per_node: int, enough: int, braid: Braid, tmp_path: Path
) -> None:
    options = given(tmp_path, model, ("math",))
    on = ("--gpus", gpus, "--gpu", "h100", "--gpus-per-node", per_node)
    refused(
        *(braid, tmp_path, [*options, *on]),
        f"no layout of {gpus} h100 fits the model into their memory; {enough} would; use --gpus "
        f"{enough}",
    )


def test_nothing_is_overwritten_without_force(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    run = tmp_path / "mine.yaml"
    run.write_text("mine")
    refused(braid, tmp_path, options, f"{run} exists already; choose another --output, or --force")
    assert run.read_text() == "mine"
    said(braid, *options, "--force")
    assert load(run).name == "mine"


def test_a_run_is_written_without_torch(tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    program = (
        "import json, sys\n"
        "from pipeline.cli import main\n"
        f"code = main(['init', *{options!r}])\n"
        "print(json.dumps([code, *sys.modules]))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    *shown, last = found.stdout.splitlines()
    code, *loaded = json.loads(last)
    assert code == 0
    assert [line.partition(" ")[0] for line in found.stderr.splitlines()] == ["reading", "scoring"]
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert shown[-1] == f"  braid run {tmp_path / 'mine.yaml'}"


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    answers = [options[1], options[3], "", "", options[5], "y"]
    answers = [each.replace(str(tmp_path), "~") for each in answers]
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipeline.cli", "init"]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "HOME": str(tmp_path)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        os.write(mine, "".join(f"{each}\n" for each in answers).encode())
        out, _ = child.communicate(timeout=PATIENCE_SECONDS)
    os.close(mine)
    os.close(theirs)
    assert child.returncode == 0
    assert "number of GPUs; empty for CPU cores: " in out
    assert load(tmp_path / "mine.yaml").model.initial_weights == tmp_path / "model"


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    return load(config(tmp_path_factory.mktemp("init")), to_start=False)


@pytest.mark.parametrize("share", [1.5, 0.9, 0.6])
def test_steps_are_cut_to_the_budget(share: float, priced: RunSettings) -> None:
    times = simulated(compile_graph(priced), priced, ASSUMED)
    hours = share * sum(each.gpu_hours for each in times)
    steps = steps_within(times, hours)
    cost = sum(each.gpu_hours / each.steps * steps[each.stage.name] for each in times)
    assert cost <= hours
    assert cost > 0.9 * hours or share > 1
    for each in times:
        assert min(LEAST_STEPS, each.steps) <= steps[each.stage.name] <= each.steps


def test_a_layout_is_nearly_the_fastest_and_leaves_memory(priced: RunSettings) -> None:
    stages = compile_graph(priced)
    [fastest, *_] = best_layouts(stages, priced, 32, ASSUMED, 1)
    found = fitted(priced, 32, ASSUMED)
    assert found is not None and not found.changes
    assert fastest.seconds <= found.seconds <= 1.1 * fastest.seconds
    assert total(found.settings) == pytest.approx(found.seconds)
    assert found.trained_share <= 0.75


def test_a_layout_has_problems_for_all_its_data_parallel_ranks(priced: RunSettings) -> None:
    small = priced.model.model_copy(update={"layers": 2, "experts": 8})
    few = priced.evaluation.model_copy(update={"problems": 4})
    usual = priced.model_copy(update={"model": small})
    fewer = usual.model_copy(update={"evaluation": few})
    found = [fitted(each, 32, ASSUMED) for each in (usual, fewer)]
    assert [each and each.settings.layout.data for each in found] == [32, 4]


def test_domains_may_have_other_names_and_files(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    own = tmp_path / "own.yaml"
    own.write_text(
        f"extends: {REPOSITORY}/configs/domains/json.yaml\n"
        f"prompts: {{path: {rows(tmp_path / 'own.jsonl', 'json')}}}\n"
    )
    said(braid, *options, "--domains", f"sums:math={tmp_path / 'math.jsonl'}", f"forms={own}")
    domains = load(tmp_path / "mine.yaml").domains
    assert {name: [*each.rewards] for name, each in domains.items()} == {
        "sums": ["right"],
        "forms": ["valid"],
    }


def test_rows_may_be_parquet(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    with (tmp_path / "math.jsonl").open() as file:
        table = pa.Table.from_pylist([json.loads(line) for line in file] * 5)
    asked = pa.array([f"question {n}" for n in range(table.num_rows)])
    pq.write_table(table.set_column(0, "prompt", asked), tmp_path / "math.parquet")
    found = said(braid, *options, "--domains", f"math={tmp_path / 'math.parquet'}")
    settings = load(tmp_path / "mine.yaml")
    prompts = settings.domains["math"].prompts
    assert (prompts.source, prompts.held_out_fraction) == ("parquet", 0.1)
    assert found["rows"]["math"]["rows"] == 300
    assert settings.evaluation.problems == 20 <= found["rows"]["math"]["held_out"]


def test_a_budget_for_less_than_the_least_steps_is_refused(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    on = ("--gpus", "32", "--gpu", "h100", "--budget")
    message = f"--budget 10: {LEAST_STEPS} steps of each stage already cost "
    refused(braid, tmp_path, [*options, *on, "10"], message)


def test_walltimes_have_a_margin_and_a_limit(priced: RunSettings) -> None:
    assumed = Assumptions(ASSUMED.gpu, 8, ASSUMED.filled, 1.0)
    [expert, merge] = simulated(compile_graph(priced), priced, assumed)
    assert expert.duration > merge.duration
    # Of four hours: of a shorter one the whole hours would hide the margin.
    expert = replace(expert, steps=int(expert.steps * 4 * 3600 / expert.duration))
    hours = -(-(1.5 * expert.duration + 1800) // 3600)
    assert hours > -(-(expert.duration + 1800) // 3600)
    assert walltimes([expert, merge], longest=1e9)["grpo"] == f"{hours:02.0f}:00:00"
    endless = replace(expert, steps=10**6)
    for longest in ("01:00:00", "01:30:00", "00:00:59", "1-12:30:00"):  # sbatch refuses more
        assert walltimes([endless], seconds_of(longest))["grpo"] == longest
    assert walltimes([expert], longest=1e9).keys() == {"grpo"}


def test_a_profile_adds_walltimes_to_the_one_that_is_given(braid: Braid, tmp_path: Path) -> None:
    own = tmp_path / "cluster.yaml"
    own.write_text("account: mine\ngpus_per_node: 8\nkinds: {export: {walltime: '10'}}\n")
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    on = ("--gpus", 32, "--gpu", "h100", "--cluster", own, "--longest-walltime", "08:00:00")
    said(braid, *options, *on)
    found = load_cluster(tmp_path / "mine.cluster.yaml")
    assert (found.account, found.gpu_memory_gib, found.of_kind("export").walltime) == (
        *("mine", 79.2),
        "10",
    )
    assert found.of_kind("grpo").walltime == "08:00:00"


def test_the_keys_to_fill_in_are_examples_that_are_valid(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    code, out, err = braid("init", *options, "--gpus", 8, "--gpu", "h100")
    assert code == 0, err
    run, profile = tmp_path / "mine.yaml", tmp_path / "mine.cluster.yaml"
    assert f"fill in your cluster's keys, commented out in {profile}\n" in out
    text = profile.read_text()
    assert load_cluster(profile).memory_per_node is None
    profile.write_text(re.sub(r"^# (\w+:)", r"\1", text, flags=re.MULTILINE))
    found = load_cluster(profile)
    assert {key: getattr(found, key) for key in TO_FILL_IN} == {
        "account": "my_project",
        "partition": "gpu",
        "memory_per_node": "900G",
        "network_interface": "ib0",
        "setup": ("module load cuda",),
    }
    assert all(f"{key}: " in text and what in text for key, (_, what) in TO_FILL_IN.items())
    code, out, err = braid("submit", run, "--cluster", profile, "--dry-run")
    assert code == 0, err
    assert "--account=my_project --partition=gpu --mem=900G" in out
