"""The graph as Graphviz, as Mermaid and as a tree: every edge is in each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.report.drawing import edges, origin, tree
from pipeline.run.graph import Stage, compile_graph

Braid = Callable[..., tuple[int, str, str]]
GATE = "stages.experts.gate={domains: [sums], problems: 20}"


@pytest.fixture
def teacher(braid: Braid, config: Path, runs: Path) -> Path:
    """A stage of another run."""
    assert braid("run", config, "--name", "other", "--only", "cold_start")[0] == 0
    return runs / "other/stages/cold_start"


def test_every_edge_is_in_all_three(braid: Braid, config: Path, teacher: Path) -> None:
    config.write_text(config.read_text().replace("teachers: experts",
        f"teachers: {{sums: experts.sums, words: {teacher}}}"))  # fmt: skip
    dot = braid("plan", config, GATE, "--dot")[1]
    assert f'"{teacher}" -> "merge" [style=dashed, label=teaches];' in dot
    assert f'"{teacher}" [shape=cylinder' in dot
    assert '"gates.experts.sums" -> "merge" [style=bold, label=gate];' in dot
    code, drawn, _ = braid("plan", config, GATE, "--mermaid")
    assert code == 0
    nodes = dict(re.findall(r'^  (n\d+)[^"]*"([^"<]+)', drawn, re.MULTILINE))
    arrows = re.findall(r"^  (n\d+) (.*(?:-->|\.->|==>)) (n\d+)$", drawn, re.MULTILINE)
    found = {(nodes[a], style, nodes[b]) for a, style, b in arrows}
    assert (str(teacher), "-. teaches .->", "merge") in found
    assert ("gates.experts.sums", "== gate ==>", "merge") in found
    assert ("cold_start", "-->", "experts.sums") in found
    assert len(found) == dot.count("->") == len(set(edges(compile_graph(load(config, [GATE])))))
    plan = braid("plan", config, GATE)[1]
    assert f"cold_start, taught by experts.sums, {teacher}" in plan
    assert "starts, after gates.experts.sums" in plan


def test_data_edges_are_drawn() -> None:
    stages = (
        Stage("cold_start", "sft"),
        Stage("sample", "sft", parent="cold_start"),
        Stage("second", "sft", parent="cold_start", data={"kept": "sample"}),
    )
    assert ("sample", "second", "data") in {(e.source, e.target, e.role) for e in edges(stages)}
    assert origin(stages[2]) == "cold_start, on sample"


def test_the_table_is_a_tree(braid: Braid, config: Path) -> None:
    _, out, _ = braid("plan", config, GATE)
    rows = (re.match(r"[│├└─ ]*\S+", line) for line in out.splitlines()[2:9])
    names = [row[0] for row in rows if row]
    assert names == [
        "cold_start",
        "├─ experts.sums",
        "│  └─ gates.experts.sums",
        "├─ experts.words",
        "└─ merge",
        "   └─ export",
        "evaluate",
    ]


def test_a_tree_of_many_stages_has_each_once_and_stays_narrow() -> None:
    stages = [Stage("s0", "sft")]
    stages += [Stage(f"s{n}", "sft", parent=f"s{n - 1}") for n in range(1, 2000)]
    found = tree(stages)
    assert list(found) == [stage.name for stage in stages]
    assert max(map(len, found.values())) < 50


def test_one_drawing_at_a_time(braid: Braid, config: Path) -> None:
    assert braid("plan", config, "--mermaid", "--json")[0] == 1
    assert braid("plan", config, "--mermaid", "--dot")[0] == 2


def test_odd_names_of_paths_are_drawn_as_they_are(
    braid: Braid, config: Path, teacher: Path, tmp_path: Path
) -> None:
    odd = tmp_path / 'modèle #35;"`<b>'
    odd.parent.mkdir(exist_ok=True)
    teacher.rename(odd)
    taught = f"stages.merge.teachers={{sums: {json.dumps(str(odd))}, words: experts.words}}"
    dot = braid("plan", config, taught, "--dot")[1]
    assert 'modèle #35;\\"`<b>" -> "merge"' in dot
    drawn = braid("plan", config, taught, "--mermaid")[1]
    assert "modèle #35;35;#34;#96;#60;b#62;" in drawn
