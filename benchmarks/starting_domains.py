"""The curves of two domains to start from, `reasoning` and `tool_calls`, small and real.

    python benchmarks/starting_domains.py [--runs-dir runs]

The quickstart's model with a tokenizer of single characters learns both formats from demonstrations
of which half are wrong, and then trains an expert on each of `reasoning` and `tool_calls` in
configs/domains, with their rewards, KL and clip; optimizer, group and lengths are the quickstart's,
since a model of this size needs them. Rows and demonstrations are drawn from one seed. A finished
run under --runs-dir is only read.

Writes benchmarks/starting_domains.json and prints the Markdown table of
docs/how-to/shipped-domains.md: means over the first and the last FIVE steps of one run, and
percentages of held-out problems that are solved before and after. They show the shape of healthy
curves; one seed proves no gain.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from grpo_steps import logged
from intervals import row
from machine import measured
from quickstart import braid

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
RUN = "starting-domains"
FIVE = 5
ROWS, DEMONSTRATIONS = 2000, 4000
WRONG = 0.5  # share of the demonstrations
WORDS: dict[str, Any] = {
    "dataset": "spell_backward",
    "config": {"min_word_len": 3, "max_word_len": 6},
}
TOOLS = {"sum": "plus", "difference": "minus", "product": "times", "ratio": "over"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ACCURACY = "held_out_accuracy"
METRICS = (
    "reward",
    "reward/right",
    "reward/valid",
    "zero_variance",
    "entropy",
    "clip_fraction",
    "unfinished",
    "response_tokens",
    ACCURACY,
)


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    runs_dir = parser.parse_args().runs_dir
    run = runs_dir / RUN
    if not (run / "results.json").exists():
        braid("run", write_run(runs_dir / f"{RUN}-data"), runs_dir=runs_dir)
    models = json.loads((run / "results.json").read_text())["models"]
    curves = {}
    for stage in sorted(run.glob("stages/experts.*")):
        domain = stage.name.removeprefix("experts.")
        own = [100 * models[name][domain]["accuracy"] for name in ("cold_start", stage.name)]
        curves[domain] = curve(stage / "metrics.jsonl") | {ACCURACY: (own[0], own[1])}
    found = {**measured([run]), "curves": curves}
    (HERE / "starting_domains.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(curves))


def write_run(directory: Path) -> Path:
    """Write tokenizer, rows, demonstrations and the configuration; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer")
    draw = random.Random(0)
    calls = [call(draw) for _ in range(ROWS)]
    write_lines(directory / "calls.jsonl", calls)
    write_lines(directory / "call_demonstrations.jsonl", call_demonstrations(calls, draw))
    write_lines(directory / "word_demonstrations.jsonl", word_demonstrations(draw))
    path = directory / "run.yaml"
    path.write_text(json.dumps(configuration(directory.resolve()), indent=1))  # YAML too
    return path


def configuration(data: Path) -> dict[str, Any]:
    """Return the run: the quickstart's model and machine, and the two domains."""
    base = yaml.safe_load((CONFIGS / "domains/_base.yaml").read_text())
    shared = {
        "sampling": base["sampling"] | {"max_response_tokens": 96},
        "optimizer": base["optimizer"] | {"weight_decay": 0.0},
        "loop": {"steps": 40, "checkpoint_every": 20, "micro_batch_tokens": 8192},
    }
    model = {"extends": str(CONFIGS / "models/tiny-moe.yaml"), "vocabulary_size": 128}
    words = {
        "extends": str(CONFIGS / "domains/reasoning.yaml"),
        "prompts": {**WORDS, "instruction": "", "held_out_fraction": 0.25},
        "demonstrations": demonstrations(data / "word_demonstrations.jsonl"),
    }
    calls = {
        "extends": str(CONFIGS / "domains/tool_calls.yaml"),
        "prompts": {"path": str(data / "calls.jsonl"), "held_out_fraction": 0.25},
        "demonstrations": demonstrations(data / "call_demonstrations.jsonl"),
    }
    return {
        "name": RUN,
        "seed": 0,
        "model": model | {"tokenizer": str(data / "tokenizer")},
        "layout": {"ranks": 2, "expert": 2},
        "engine": {"count": 2, "max_model_tokens": 192, "max_sequences": 256},
        "domains": {"reasoning": words | shared, "tool_calls": calls | shared},
        "stages": {
            "cold_start": {
                "kind": "sft",
                "optimizer": {
                    "algorithm": "adam",
                    "learning_rate": 4.0e-3,
                    "betas": [0.9, 0.98],
                    "warmup_steps": 50,
                    "decay": "cosine",
                },
                "loop": {"steps": 300, "checkpoint_every": 100},
            },
            "experts": {"kind": "grpo", "from": "cold_start", "for_each": "domain"},
            "evaluate": {"kind": "evaluate"},
        },
        "evaluation": {"problems": 300},
        "logging": {"trackers": []},
    }


def demonstrations(path: Path) -> dict[str, Any]:
    """Return the block of a file of demonstrations."""
    return {"source": "jsonl", "path": str(path), "response": "response", "sequences_per_step": 48}


def call(draw: random.Random) -> dict[str, Any]:
    """Draw a row of `tool_calls`: a question of two numbers, the tools, and the expected call."""
    name, a, b = draw.choice([*TOOLS]), draw.randrange(100), draw.randrange(100)
    tools = [{"name": each, "parameters": PARAMETERS} for each in TOOLS]
    expected = {"name": name, "arguments": {"a": a, "b": b}}
    return {"prompt": f"{a} {TOOLS[name]} {b}? ", "tools": tools, "calls": [expected]}


def call_demonstrations(rows: list[dict[str, Any]], draw: random.Random) -> list[dict[str, str]]:
    """Return responses to rows; the wrong ones call another tool, or break the JSON."""
    found = []
    for _ in range(DEMONSTRATIONS):
        asked = draw.choice(rows)
        expected = asked["calls"][0]
        if draw.random() < WRONG:
            expected = expected | {"name": draw.choice([*TOOLS])}
        text = json.dumps(expected)
        if draw.random() < WRONG / 2:
            text = text.replace("}}", "}")
        response = f"<tool_call>{text}</tool_call>"
        found.append({"prompt": asked["prompt"], "response": response})
    return found


def word_demonstrations(draw: random.Random) -> list[dict[str, Any]]:
    """Return responses to reasoning-gym's questions; the wrong ones swap two letters."""
    import reasoning_gym

    found = []
    drawn = reasoning_gym.create_dataset(
        WORDS["dataset"], seed=10**6, size=DEMONSTRATIONS, **WORDS["config"]
    )
    for entry in drawn:
        letters = list(entry["answer"])
        if draw.random() < WRONG:
            first = draw.randrange(len(letters) - 1)
            letters[first : first + 2] = reversed(letters[first : first + 2])
        prompt = [{"role": "user", "content": entry["question"]}]
        response = f"<answer>{''.join(letters)}</answer>"
        found.append({"prompt": prompt, "response": response})
    return found


def write_tokenizer(directory: Path) -> None:
    """Write a Hugging Face tokenizer of the printable characters, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[END]", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{{ '[END]' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        eos_token="[END]",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    ).save_pretrained(directory)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def curve(log: Path) -> dict[str, tuple[float, float]]:
    """Return each metric's mean over the first and over the last `FIVE` steps."""
    lines = logged(log)
    known = [name for name in METRICS if name in lines[0]]  # not all domains have all
    ends = lines[:FIVE], lines[-FIVE:]
    first, last = ({name: mean(line[name] for line in end) for name in known} for end in ends)
    return {name: (first[name], last[name]) for name in known}


def table(curves: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Return the Markdown table of the curves' two ends."""
    lines = [["", *(f"`{domain}`" for domain in curves)], ["---"] * (len(curves) + 1)]
    for name in METRICS:
        ends = [found.get(name) for found in curves.values()]
        cells = ["" if end is None else f"{end[0]:.2f} to {end[1]:.2f}" for end in ends]
        lines.append([f"`{name}`", *cells])
    return "\n".join(map(row, lines))


if __name__ == "__main__":
    main()
