"""The fields of a report that `--redact` keeps: an allow-list, of which nothing else is written.

Numbers stay. A text of a file stays where the configuration or Braid itself gives that name: a
stage, a domain, a metric, a phase. Of a problem, whose key is a hash of its prompt, a number stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.run.graph import Stage
from pipeline.run.ledger import State
from pipeline.run.run import Outcome, Run
from stages.guards.registry import Action
from stages.kinds.kind import KINDS
from stages.metric_definitions import METRICS

LEFT_OUT = "(left out of this report)"
# Of settings: names, paths and numbers, but no rubric of a judge.
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@+~=-]{0,200}")
_OF_FILE = re.compile(r"(.+?\.(?:parquet|jsonl|npz|json)): ")
_PROCESS = re.compile(r"(?:rank|engine) \d+")
PHASES = (
    *("load", "step", "log", "checkpoint", "finish checkpoint", "record", "wait", "sample"),
    *("weight sync", "rollout", "collect", "train"),
)
PEERS = ("engines", "engines and rewards", "rank 0", "the trainer", "memory of its GPUs")
_WORDS = (
    *("stop", "length", "above", "below", "initial"),  # of samples, guards, models
    *("parent", "teacher", "data", "model", "after"),  # of edges
    *("start", "expert", "merge", "baseline"),  # of models
    *(*get_args(Action), *PHASES, *PEERS),
    *("accuracy", "difference", "recovered", "low", "high", "n"),  # keys of intervals
)

# What a field may hold. `Own`: a text that Braid composes of names and numbers, or a constant.
# `Value`: numbers, and texts that are known names, at any depth. `Gone`: says that it is left out.
Leaf = Literal["own", "value", "gone", "setting", "problems", "damaged"]
OWN, VALUE, GONE, SETTING, PROBLEMS, DAMAGED = get_args(Leaf)
EACH = ""  # a key that stands for every known name
ANY = "*"  # a key that stands for every key: those are composed by Braid

_COST = {
    **dict.fromkeys(("stage", "kind", "sampled_tokens", "trained_tokens", "minutes"), VALUE),
    **{"peak_bytes": VALUE, "peak_gpu_bytes": VALUE},
}
_MODEL = {
    **{"role": VALUE, "expert_of": VALUE, "trained_on": VALUE},
    "scores": {EACH: {"accuracy": VALUE, "change": VALUE, "headroom": VALUE}},
    **{"mean_headroom": VALUE, "forgetting": {EACH: VALUE}},
}
_COMPARISON = {
    **{"run": OWN, "start": VALUE, "problems": {EACH: VALUE}, "experts": {EACH: VALUE}},
    **{"models": {EACH: _MODEL}, "undefined": {EACH: OWN}, "stages": [_COST], "notes": GONE},
}
_COMPARED = {"comparison": _COMPARISON, "not_compared": GONE}
_CURVES = {
    EACH: {
        **dict.fromkeys(("step", "every", "model", "domain"), VALUE),
        "metrics": {EACH: VALUE},
    }
}
_STAGE = {
    **dict.fromkeys(("name", "kind", "state", "attempts", "steps", "step"), VALUE),
    **dict.fromkeys(("minutes", "domains", "planned_bytes", "outcome"), VALUE),
    **{"branch": OWN, "from": OWN, "cause": GONE, "reasons": GONE},
}
_COLUMNS = (
    *("step", "group", "tokens", "reward", "advantage", "staleness", "update"),
    *("domain", "problem", "model", "finish_reason", "solved", "messages"),
)
_SAMPLES = {
    "columns": dict.fromkeys(_COLUMNS, VALUE),
    "names": {"domain": VALUE, "model": VALUE, "finish_reason": VALUE, "problem": PROBLEMS},
    **{"parts": {EACH: VALUE}, "tokens": {}},
    **dict.fromkeys(("with_tokens", "of", "prompts", "left_out"), VALUE),
}
_TIMELINE = {
    **{"since": VALUE, "until": VALUE, "seconds": {EACH: VALUE}, "waits": {EACH: VALUE}},
    "phases": VALUE,
}
_GUARD = {
    **dict.fromkeys(("name", "metric", "side", "threshold", "action", "fired"), VALUE),
    "remedy": OWN,
}
DOCUMENT = {
    **{"made": OWN, "redacted": VALUE, "definitions": OWN, "settings": OWN, "commands": OWN},
    "run": {"name": OWN, "seed": VALUE, "path": OWN},
    "health": [
        {
            **{"stage": VALUE, "what": OWN, "remedy": OWN, "command": OWN},
            **{"alarm": VALUE, "word": VALUE},
        }
    ],
    "verdicts": [{"stage": VALUE, "word": VALUE, "evidence": OWN, "alarm": VALUE}],
    "stages": [_STAGE],
    "edges": [{"source": VALUE, "target": VALUE, "role": VALUE}],
    **_COMPARED,
    **{"measured": VALUE, "curves": _CURVES, "costs": [_COST]},
    "history": {
        EACH: [{"time": OWN, "state": VALUE, "attempt": VALUE, "cause": GONE, "step": VALUE}]
    },
    "guards": {EACH: [_GUARD]},
    "others": {
        ANY: {
            "curves": _CURVES,
            # Not the digests of data and checkpoints: who guesses a file could recognize it.
            "differences": {"settings": {ANY: SETTING}, "stages": {EACH: {ANY: GONE}}},
            **_COMPARED,
        }
    },
    "samples": {EACH: _SAMPLES},
    "routing": {
        EACH: {
            "steps": [{"step": VALUE, "slots": {EACH: VALUE}}],
            **{"owned": {EACH: VALUE}, "churn": VALUE},
        }
    },
    **{"damaged": DAMAGED, "timelines": {EACH: {EACH: _TIMELINE}}, "vocabulary": {}},
}


def redact(document: Mapping[str, Any], runs: Iterable[Run]) -> dict[str, Any]:
    """Return the allowed fields of a report, in which problems are numbered from 0."""
    redacted: dict[str, Any] = _Redaction(runs).kept(document, DOCUMENT)
    return redacted


def plain_setting(value: Any) -> Any:
    """Return a setting; a text of it only where it is a name, a path or a number."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else LEFT_OUT
    if isinstance(value, Mapping):
        return {plain_setting(key): plain_setting(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_setting(below) for below in value]
    return value


class _Redaction:
    """The names that are known, and the numbers that problems have in this report."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._names = {*_WORDS, *KINDS, *get_args(State), *get_args(Outcome)}
        for name in METRICS:
            self._names |= {name, *name.split("/")}
        for run in runs:
            self._names |= {str(run.path), run.name}
            for stage in run.stages:
                self._names |= _names_of(stage)
            _add_names(run.settings.model_dump(mode="json"), self._names)
        self._problems: dict[str, str] = {}

    def kept(self, value: Any, allowed: Any) -> Any:
        """Return what of a value is allowed."""
        if value is None:
            return None
        if isinstance(allowed, list):
            return [self.kept(below, allowed[0]) for below in value]
        if isinstance(allowed, str):
            return self._leaf(value, allowed)
        fields = {}
        for key, below in value.items():
            if key in allowed:
                fields[key] = self.kept(below, allowed[key])
            elif EACH in allowed and self._is_known(key):
                fields[key] = self.kept(below, allowed[EACH])
            elif ANY in allowed:
                fields[key] = self.kept(below, allowed[ANY])
        return fields

    def _leaf(self, value: Any, leaf: str) -> Any:
        if leaf == OWN:
            return value
        if leaf == GONE:
            left_out = [LEFT_OUT] if isinstance(value, (list, tuple)) else LEFT_OUT
            return left_out if value else value
        if leaf == SETTING:
            return plain_setting(value)
        if leaf == PROBLEMS:
            return [self._problems.setdefault(key, str(len(self._problems))) for key in value]
        if leaf == DAMAGED:
            return [_file_alone(text) for text in value]
        return self._values(value)

    def _values(self, value: Any) -> Any:
        """Return numbers, and the texts that are known names."""
        if isinstance(value, (list, tuple)):
            return [self._values(below) for below in value]
        if isinstance(value, dict):
            return {key: self._values(below) for key, below in value.items() if self._is_known(key)}
        return LEFT_OUT if isinstance(value, str) and not self._is_known(value) else value

    def _is_known(self, name: str) -> bool:
        """Return whether a name is known, or a metric's: `reward/math`, `pass_at_4`."""
        if name in self._names or _PROCESS.fullmatch(name):
            return True
        words = name.split("/")
        return all(
            word in self._names or re.sub(r"_\d+$", "_N", word) in self._names for word in words
        )


def _names_of(stage: Stage) -> set[str]:
    """Return the names that a stage brings: its own and those of its models and data."""
    names = {stage.name, stage.kind, *stage.domains}
    for mapping in (stage.models, stage.teachers, stage.data):
        names |= {*mapping, *mapping.values()}
    return names


def _add_names(value: Any, names: set[str]) -> None:
    """Add the keys of settings, and their texts that are names or paths."""
    if isinstance(value, dict):
        for key, below in value.items():
            _add_names(key, names)
            _add_names(below, names)
    elif isinstance(value, list):
        for below in value:
            _add_names(below, names)
    elif isinstance(value, str) and _PLAIN.fullmatch(value):
        names.add(value)


def _file_alone(text: str) -> str:
    """Return the path at the beginning of a message: the rest may quote the file's content."""
    file = _OF_FILE.match(text)
    return f"{file[1]}: damaged {LEFT_OUT}" if file and Path(file[1]).exists() else LEFT_OUT
