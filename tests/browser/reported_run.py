"""A run that has something on every page of its report, written without running a stage."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from pipeline.config.validate import load
from pipeline.run.run import Run
from stages.sampling.recording import LOADS
from stages.sampling.sample_files import samples_file, write_samples, write_table
from tests.pipeline.conftest import CONFIG
from tests.pipeline.measured_runs import Measured, write_run

DOMAINS = ("sums", "words")
EXPERT = "experts.sums"
STEPS = 40
PROMPTS, GROUP = 6, 4  # of a step
PROBLEMS = 60  # of a domain, held out
MODELS = {"cold_start": 0.3, "merge": 0.6}  # the share of problems that each solves
FIRED = 25  # the step from which the entropy is too low
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202e & 'x'"

GATE = "gates.experts.sums"
GATE_BLOCK = "{domains: [sums], problems: 20}"
REASON = "experts.sums gains -20.0 points over cold_start on sums"
OWNED = 5  # the expert of layer 0 that `words` uses most in the merge

Row = dict[str, Any]


def key(text: str) -> str:
    """Return the key of a problem."""
    return sha256(text.encode()).hexdigest()


def write_reported(path: Path, **changes: Any) -> Run:
    """Write a run, whose settings differ by `changes` from the others', and return it."""
    config = path.with_suffix(".yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        CONFIG.replace("for_each: domain}", f"for_each: domain, gate: {GATE_BLOCK}}}")
    )
    settings = load(config).model_copy(update=changes)
    draw = Random(0)
    problems = {name: [key(f"{name} {n}") for n in range(PROBLEMS)] for name in DOMAINS}
    right = {
        model: {name: [int(draw.random() < share) for _ in range(PROBLEMS)] for name in DOMAINS}
        for model, share in MODELS.items()
    }
    run = write_run(path, settings, Measured(right, problems, unfinished=(GATE,)))
    run.stage(GATE).verdict.write_text(json.dumps({"outcome": "stopped", "reasons": [REASON]}))
    run.ledger.append(GATE, "failed", f"stopped: {REASON}", 1, 1.0)
    _log(run)
    _train(run, draw)
    _merge(run, draw)
    _route(run)
    _answer(run, right, problems)
    _time(run)
    return run


def _log(run: Run) -> None:
    start = time.time() - STEPS
    for stage in (EXPERT, "merge"):
        lines = []
        for step in range(1, STEPS + 1):
            line = {"step": step, "steps": STEPS, "time": start + step, "loss": 1 / step}
            if stage == "merge":
                line |= {"teacher_kl": 2 / step, "teacher_kl/sums": 3 / step, "teacher_kl/words": 0}
            else:
                entropy = 0.5 if step < FIRED else 0.001
                line |= {"reward": step / STEPS, "entropy": entropy, "kl": 0.01 * step}
                line |= {"seconds_rollout": 3.0, "seconds_train": 1.0}
            lines.append(line)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.stage(stage).path / "metrics.jsonl").write_text(text)
    run.ledger.append(EXPERT, "running", "from step 20", 2)
    run.ledger.append(EXPERT, "done", "finished", 2, 1.0)


def _sample(step: int, domain: str, prompt: str, response: str, reward: float) -> Row:
    tokens = [5 + ord(letter) % 40 for letter in response] or [5]
    return {
        **{"step": step, "update": 0, "domain": domain, "problem": key(prompt), "prompt": prompt},
        **{
            "response": response,
            "answer": "right",
            "prompt_tokens": [5, 6],
            "response_tokens": tokens,
        },
        **{"tokens": len(tokens), "finish_reason": "stop", "reward": reward, "advantage": 0.5},
        **{"reward_parts": {"exact": reward, "brief": 0.5}, "solved": reward == 1, "staleness": 0},
        **{"reward_messages": {"exact": f"expected {prompt}"}, "weight_version": step - 1},
        "logprobs": [-0.5] * len(tokens),
    }


def _train(run: Run, draw: Random) -> None:
    """Record an expert's samples; prompt 0 becomes right, prompt 1 wrong."""
    directory = run.stage(EXPERT)
    for step in range(1, STEPS + 1):
        rows = []
        for group in range(PROMPTS):
            prompt = f"prompt {group}" if group < 2 else f"prompt {step}-{group}"
            for place in range(GROUP):
                solved = draw.random() < step / STEPS
                if group < 2:
                    solved = (step > STEPS / 2) == (group == 0)
                text = f"{'right' if solved else 'wrong'} {step} {group} {place}"
                text = HOSTILE if (step, group, place) == (3, 2, 0) else text
                row = _sample(step, "sums", prompt, text, float(solved))
                row |= {"group": group, "finish_reason": "length" if place == 3 else "stop"}
                if group == 0:
                    count = row["tokens"]
                    row["trainer_logprobs"] = [-0.5 - 0.01 * n for n in range(count)]
                    row["entropies"] = [0.1 * n for n in range(count)]
                rows.append(row)
        write_samples(samples_file(directory.rollouts, step), rows)


def _merge(run: Run, draw: Random) -> None:
    for step in (1, 2):
        rows = []
        for group, domain in enumerate(DOMAINS):
            row = _sample(step, domain, f"{domain} of merge", f"a student of {domain}", 0.0)
            most = 3.0 if domain == "sums" else 1.0
            losses = [most * draw.random() for _ in range(row["tokens"])]
            row |= {"group": group, "teacher_kl": losses, "trainer_logprobs": row["logprobs"]}
            rows.append(row)
        write_samples(samples_file(run.stage("merge").rollouts, step), rows)


def _route(run: Run) -> None:
    """Record the merge's experts: `words` takes OWNED in half of its slots, `sums` all equally."""
    for step in (1, 2):
        rows = [
            {
                **{"step": step, "domain": domain, "layer": layer},
                "slots": [7 if (domain, layer, n) == ("words", 0, OWNED) else 1 for n in range(8)],
            }
            for domain in DOMAINS
            for layer in range(4)
        ]
        write_table(run.stage("merge").routing / f"step_{step:06d}.parquet", rows, LOADS)


def _answer(
    run: Run, right: dict[str, dict[str, list[int]]], problems: dict[str, list[str]]
) -> None:
    for model, domains in right.items():
        for domain, solved in domains.items():
            rows = []
            for number, (problem, value) in enumerate(zip(problems[domain], solved, strict=True)):
                said = f"{model} says {value}"
                row = _sample(0, domain, f"{domain} {number}", said, float(value))
                rows.append({**row, "problem": problem, "group": number})
            path = run.stage("evaluate").samples / model / f"{domain}_000000.parquet"
            write_samples(path, rows)


def _time(run: Run) -> None:
    """Write the phases of two ranks and an engine: half of the ranks' time is waiting."""
    directory, start = run.stage(EXPERT), time.time() - 100
    lines = [{"process": "x", "time": start}]
    for step in range(1, 11):
        begin = start + 10 * (step - 1)
        spans = [("step", 0, 10, None), ("wait", 1, 6, "engine"), ("train", 6, 9, None)]
        for number, (name, since, until, waits_for) in enumerate(spans):
            phase = 10 * step + number
            about = {"name": name, "step": step, "waits_for": waits_for}
            lines += [
                {"phase": phase, "time": begin + since, **about},
                {"phase": phase, "time": begin + until},
            ]
    lines.sort(key=lambda line: line["time"])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for rank in (0, 1):
        directory.timeline(2, rank).parent.mkdir(parents=True, exist_ok=True)
        directory.timeline(2, rank).write_text(text)
    engine = directory.engines / "0" / "timeline.jsonl"
    engine.parent.mkdir(parents=True)
    engine.write_text(text.replace('"step", ', '"busy", '))
