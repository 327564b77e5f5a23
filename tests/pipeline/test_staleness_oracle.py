"""The stale stages of generated graphs, compared with reachability computed on their own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from parallel.files import Checkpoint
from pipeline.config.unroll import graph_rules
from pipeline.run.graph import compile_graph
from pipeline.run.lineage import Lineage, changes, lineage_from
from stages.kinds import KINDS
from stages.settings import RunSettings

GRAPHS, MOST_STAGES, SEED = 1000, 60, 20
DOMAINS = ("sums", "words", "sorts")
RATE = {"optimizer": {"learning_rate": 1e-3}}
Spec = dict[str, Any]  # {"seed", "problems", "domains": {name: facts}, "blocks": {name: block}}


def stages_of(spec: Spec) -> dict[str, tuple[Spec, tuple[str, ...]]]:
    """Return the block and the domains of every stage of a spec."""
    found = {}
    for name, block in spec["blocks"].items():
        for domain in block["domains"] if block["each"] else ():
            found[f"{name}.{domain}"] = block, (domain,)
        if not block["each"]:
            found[name] = block, tuple(block["domains"])
    return found


def roles_of(spec: Spec, block: Spec, domains: tuple[str, ...]) -> dict[str, str]:
    """Return what a stage loads, by what it loads it as."""
    if block["kind"] == "evaluate":
        trained = {n for n, (b, _) in stages_of(spec).items() if b["kind"] in TRAINS}
        return {name: name for name in trained}
    of_domain = spec["blocks"].get(block["parent"], {}).get("each")
    parent = f"{block['parent']}.{domains[0]}" if of_domain else block["parent"]
    roles = {"from": parent} if parent else {}
    return roles | {f"of {d}": each for d, each in block["teachers"].items()}


def facts_of(spec: Spec, block: Spec, domains: tuple[str, ...]) -> list[Any]:
    """Return the settings that decide the result of a stage by itself."""
    kind, own = block["kind"], [spec["domains"][name] for name in domains]
    if kind == "export":
        return [kind]
    if kind == "merge_weights" and not block["recalibrated"]:
        return [kind]
    facts = [kind, spec["seed"], domains, [each["level"] for each in own], block["steps"]]
    if kind == "grpo":
        kl = [each["kl"] for each in own] if block["kl"] is None else block["kl"]
        steps = block["steps"] or own[0]["steps"]
        return [*facts[:4], steps, kl, [each["weight"] for each in own]]
    if kind == "evaluate":
        return [*facts, spec["problems"], [each["weight"] for each in own]]
    return [*facts, [each["shown"] for each in own] if kind == "sft" else None]


def reachable(before: Spec, after: Spec) -> set[str]:
    """Return the stages of both specs that an edit reaches: changed themselves, or by an input."""
    old, new = stages_of(before), stages_of(after)
    reached: set[str] = set(new) - set(old)
    roles = {name: roles_of(after, *stage) for name, stage in new.items()}
    reached |= {
        name
        for name in set(new) & set(old)
        if facts_of(before, *old[name]) != facts_of(after, *new[name])
        or roles_of(before, *old[name]) != roles[name]
    }
    while more := {
        name for name in new if name not in reached and reached & {*roles[name].values()}
    }:
        reached |= more
    return reached & set(old)


TRAINS = ("sft", "grpo", "distill", "merge_weights")


def generated(dice: random.Random) -> Spec:
    """Return a spec of up to MOST_STAGES stages."""
    spec: Spec = {
        "seed": 0,
        "problems": 50,
        "domains": {
            n: {"level": 3, "kl": 0.1, "steps": 2, "weight": 1, "shown": 9} for n in DOMAINS
        },
        "blocks": {"b0": block("sft", steps=2)},
    }
    most = dice.choice((4, 4, 5, 6, 8, 8, 10, 12, 16, MOST_STAGES))
    while len(stages_of(spec)) < most - 3:
        add(spec, dice)
    return spec


def block(kind: str, parent: str | None = None, **changes: Any) -> Spec:
    plain = {"each": False, "domains": [*DOMAINS], "steps": None, "kl": None, "teachers": {}}
    more = {"noise": 20, "recalibrated": False}
    return {"kind": kind, "parent": parent, **more, **plain, **changes}


def add(spec: Spec, dice: random.Random) -> None:
    """Add a block that grows from earlier stages."""
    name = f"b{max(int(each[1:]) for each in spec['blocks']) + 1}"
    known = [n for n, (b, _) in stages_of(spec).items() if b["kind"] in TRAINS]
    kinds = ["grpo", "grpo", "grpo", "distill", "sft", "evaluate", "export"]
    kind = dice.choice(kinds + ["merge_weights"] * (len(known) > 1))
    parent = None if kind == "evaluate" else dice.choice(known)
    untrained = ("evaluate", "export", "merge_weights")
    made = block(kind, parent, steps=None if kind in untrained else 2)
    if kind == "grpo" and dice.random() < 0.5:
        blocks = [n for n, b in spec["blocks"].items() if b["each"]]
        made |= {"each": True, "steps": dice.choice((None, 2))}
        if blocks and dice.random() < 0.5:
            made["parent"] = dice.choice(blocks)
            made["domains"] = [*spec["blocks"][made["parent"]]["domains"]]
    elif kind == "distill":
        made["domains"] = sorted(dice.sample(DOMAINS, dice.randint(1, 3)), key=DOMAINS.index)
        made["teachers"] = {each: dice.choice(known) for each in made["domains"]}
    elif kind == "merge_weights":
        made["domains"] = sorted(dice.sample(DOMAINS, 2), key=DOMAINS.index)
        made["teachers"] = dict(zip(made["domains"], dice.sample(known, 2), strict=True))
    spec["blocks"][name] = made


def edit(spec: Spec, dice: random.Random) -> None:
    """Change one thing at random, so that the graph stays one."""
    blocks, number = spec["blocks"], dice.randint(3, 9)
    name = dice.choice([*blocks])
    chosen = blocks[name]
    earlier: list[str] = []
    for each, (of, _) in stages_of(spec).items():
        if of is chosen:
            break
        earlier += [each] * (of["kind"] in TRAINS)
    match dice.choice(
        ("steps", "noise", "kl", "parent", "teachers", "routers", "domain", "run", "add", "drop")
    ):
        case "steps" if chosen["steps"]:
            chosen["steps"] = number
        case "noise":
            chosen["noise"] = number
        case "kl" if chosen["kind"] == "grpo":
            chosen["kl"] = number / 10
        case "parent" if chosen["parent"] and earlier:
            chosen["parent"] = dice.choice(earlier)
        case "teachers" if len(chosen["teachers"]) > 1:
            values = [*chosen["teachers"].values()]  # change places
            chosen["teachers"] = dict(zip(chosen["teachers"], values[1:] + values[:1], strict=True))
        case "routers" if chosen["kind"] == "merge_weights":
            chosen["recalibrated"] = not chosen["recalibrated"]
        case "domain":
            of = spec["domains"][dice.choice(DOMAINS)]
            of[dice.choice([*of])] = number
        case "run":
            spec[dice.choice(("seed", "problems"))] = number * 10
        case "add":
            add(spec, dice)
        case "drop" if chosen["kind"] not in TRAINS:
            del blocks[name]


def settings_of(spec: Spec, base: RunSettings) -> RunSettings:
    """Return the run's settings that a spec stands for."""
    tree = base.model_dump(mode="json", exclude={"stages", "domains"})
    tree |= {"seed": spec["seed"], "evaluation": {"problems": spec["problems"]}}
    tree["domains"] = {
        name: {
            **RATE,
            "prompts": {
                "source": "reasoning_gym",
                "dataset": "chain_sum",
                "config": {"max_terms": of["level"]},
            },
            "demonstrations": {"source": "generated", "count": of["shown"]},
            "rewards": {"exact": {"kind": "reasoning_gym", "weight": of["weight"]}},
            "objective": {"kl": {"coefficient": of["kl"] / 10}},
            "loop": {"steps": of["steps"]},
        }
        for name, of in spec["domains"].items()
    }
    tree["stages"] = {name: written(of) for name, of in spec["blocks"].items()}
    return RunSettings.model_validate(tree)


def written(of: Spec) -> dict[str, Any]:
    """Return a block as a configuration has it."""
    found: dict[str, Any] = {"kind": of["kind"], "from": of["parent"]}
    if of["kind"] in TRAINS:
        found["domains"] = tuple(of["domains"])
    if of["each"]:
        found["for_each"] = "domain"
    if of["steps"]:
        found |= {"loop": {"steps": of["steps"], "checkpoint_every": of["noise"]}, **RATE}
    if of["kl"] is not None:
        found["objective"] = {"kl": {"coefficient": of["kl"]}}
    if of["kind"] == "merge_weights":
        found["routers"] = "recalibrated" if of["recalibrated"] else "merged"
        found["models"] = of["teachers"]
    elif of["teachers"]:
        found["teachers"] = of["teachers"]
    return found


def lineages(settings: RunSettings, done: Mapping[str, Lineage] | None = None) -> dict[str, Any]:
    """Return the lineage of every stage when all `done` stages have left their checkpoints."""
    found: dict[str, Any] = {}
    for stage in compile_graph(settings):
        has = {
            name: Checkpoint(Path(name), 2, name, {}) if done is None or name in done else None
            for name in stage.inputs
        }
        found[stage.name] = stage, lineage_from(stage, has, {})
    return found


def stale(before: RunSettings, after: RunSettings) -> set[str]:
    """Return the stages that are stale after an edit of a run whose stages were all done."""
    done = {name: lineage for name, (_, lineage) in lineages(before).items()}
    states: dict[str, str] = {}
    for name, (stage, now) in lineages(after, done).items():
        if name not in done:
            states[name] = "pending"
        elif any(changes(done[name], now)) or any(states[each] != "done" for each in stage.inputs):
            states[name] = "stale"
        else:
            states[name] = "done"
    return {name for name, state in states.items() if state == "stale"}


@pytest.mark.parametrize("part", range(4))
def test_stale_stages_are_those_that_an_edit_reaches(settings: RunSettings, part: int) -> None:
    dice = random.Random(SEED + part)
    sizes, reached = [], []
    for _ in range(GRAPHS // 4):
        before = generated(dice)
        after = deepcopy(before)
        for _ in range(dice.randint(1, 3)):
            edit(after, dice)
        old, new = settings_of(before, settings), settings_of(after, settings)
        assert not [*graph_rules(new)], after
        expected = reachable(before, after)
        assert stale(old, new) == expected, (before, after)
        sizes.append(len(stages_of(before)))
        reached.append(len(expected) / sizes[-1])
    assert max(sizes) > MOST_STAGES - 6 and min(sizes) < 6
    assert min(reached) == 0 and max(reached) > 0.9  # edits that reach nothing, and nearly all
    assert set(TRAINS) < set(KINDS)
