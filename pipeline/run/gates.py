"""Gates between stages: what one measured, held against its bounds, decides what starts next.

The stage itself only measures, as `stages.evaluate` does. The judgement is a pure function of what
it found, of what the expert logged, and of the settings.

- An expert passes where the 95 % interval of its gain lies at `min_gain` or above as a whole: what
  could be chance is no gain, and a domain whose training gained nothing has nothing to teach.
- A merge is judged the other way round, since it has nothing to show but that it lost nothing, and
  no number of problems proves two models alike: below `min_kept` of a teacher's accuracy it is
  warned of, and it stops where the interval lies below that as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from parallel.files import write_atomically
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger
from pipeline.run.metrics import all_lines
from pipeline.run.results import Models
from pipeline.run.selection import chosen
from pipeline.run.states import StageState, derive
from pipeline.run.verdicts import OVERRIDDEN, DamagedVerdict, GateVerdict, Outcome, read_verdict
from stages.guards.settings import ExpertGateSettings, GateSettings, MergeGateSettings
from stages.settings import RunSettings
from stages.statistics import Accuracy, Difference, difference

Steps = Sequence[Mapping[str, Any]]


class GateStopped(BraidError):
    """A gate lets nothing start that waits for it; the message is its verdict."""

    def __init__(self, run: RunDirectory, stage: Stage, verdict: GateVerdict) -> None:
        super().__init__(verdict.text)
        where = shown(run.path)
        self.add_note(
            f"nothing starts that waits for {stage.name}. Make {stage.gated} anew with --from "
            f"{stage.gated}, after an edit\nof its settings, or the gate with --from {stage.name}, "
            "after an edit of the gate; or go on all the same:\n"
            f'  braid gate override {where} {stage.name} --reason "..."\n'
            f"  {run.to_go_on()}"
        )


def judge_expert(
    stage: Stage, gate: ExpertGateSettings, models: Models, steps: Steps = ()
) -> GateVerdict:
    """Whether an expert beats its parent on its own domain and has trained within bounds; `steps`
    are the metrics of its steps, the newest last."""
    key = f"domains.{stage.domain}.gate"
    findings = [_gain(stage, gate, models, key), *_bounds(stage, gate, steps[-gate.window :], key)]
    return _verdict(findings, gate)


def judge_merge(stage: Stage, gate: MergeGateSettings, models: Models) -> GateVerdict:
    """Whether a merge keeps what every teacher can do on the teacher's own domain."""
    return _verdict([_kept(stage, gate, models, domain) for domain in stage.against], gate)


def gate_of(stage: Stage, settings: RunSettings) -> ExpertGateSettings | MergeGateSettings:
    """The settings of a gate's stage."""
    gate: ExpertGateSettings | MergeGateSettings | None = None
    if stage.domain is not None:
        gate = settings.domains[stage.domain].gate
    elif settings.merge is not None:
        gate = settings.merge.gate
    assert gate is not None, "the graph has no gate where there are no settings of one"
    return gate


def ending(run: RunDirectory, settings: RunSettings, stage: Stage) -> str:
    """Why a stage whose attempt ended well is done. A gate is judged here, and nowhere else.

    Raises GateStopped where it is a gate, and what it measured falls short.
    """
    directory = run.stage(stage.name)
    if stage.kind != "gate":
        return directory.ended_early() or "finished"
    gate = gate_of(stage, settings)
    models: Models = json.loads(directory.results.read_text())["models"]
    if isinstance(gate, MergeGateSettings):
        verdict = judge_merge(stage, gate, models)
    else:
        assert stage.gated is not None
        verdict = judge_expert(stage, gate, models, all_lines(run.stage(stage.gated).metrics))
    write_atomically(directory.verdict, json.dumps(asdict(verdict), indent=2) + "\n")
    if verdict.outcome == "stopped":
        raise GateStopped(run, stage, verdict)
    return verdict.text


def tell_verdict(run: RunDirectory, stage: Stage, say: Callable[[str], None]) -> None:
    """Say what a gate that is done has said."""
    if verdict := read_verdict(run.stage(stage.name)):
        say(verdict.text)


def refuse_stopped(
    run: RunDirectory, wanted: Sequence[Stage], states: Mapping[str, StageState]
) -> None:
    """Raise GateStopped where a stage that is to run is a gate that has stopped: the same models on
    the same problems would stop it again."""
    for stage in wanted:
        if verdict := _stopped(run, stage, states[stage.name]):
            raise GateStopped(run, stage, verdict)


def override(run: RunDirectory, settings: RunSettings, name: str, reason: str) -> None:
    """Let what waits for a gate start although it stopped, and record why.

    Raises BraidError where no reason is given, or where the stage is no gate that has stopped.
    """
    # What is no UTF-8 on a command line comes as surrogates, which nothing could print later.
    reason = " ".join(reason.encode(errors="replace").decode().split())
    if not reason:
        raise BraidError("--reason is empty, and the ledger is to say why the gate was overridden")
    stages = compile_graph(settings)
    [stage] = chosen(run, stages, [name])
    if stage.kind != "gate":
        gates = ", ".join(each.name for each in stages if each.kind == "gate")
        known = f"its gates are {gates}" if gates else "it has no gates"
        raise BraidError(f"{name} is no gate of {shown(run.path)}; {known}")
    state = derive(run, settings, stages)[name]
    verdict = _stopped(run, stage, state)
    if verdict is None:
        cause = f": {state.cause}" if state.cause else ""
        raise BraidError(
            f"{name} of {shown(run.path)} is {state.state}{cause}\n"
            "only a gate that has stopped is overridden"
        )
    cause = f"{OVERRIDDEN}{reason}; it said: {verdict.text}"
    Ledger(run.ledger).append(name, "done", cause, state.attempts)


@dataclass(frozen=True)
class _Finding:
    """One thing that a gate looks at."""

    outcome: Outcome
    text: str


def _verdict(findings: Sequence[_Finding], gate: GateSettings) -> GateVerdict:
    faults = [finding for finding in findings if finding.outcome != "passed"]
    if not faults:
        return GateVerdict("passed", tuple(finding.text for finding in findings))
    stops = gate.on_failure == "stop" and any(fault.outcome == "stopped" for fault in faults)
    return GateVerdict("stopped" if stops else "warned", tuple(fault.text for fault in faults))


def _gain(stage: Stage, gate: ExpertGateSettings, models: Models, key: str) -> _Finding:
    [(domain, parent)] = stage.against.items()
    gain = difference(*_accuracies(stage, models, domain))
    said = f"{stage.gated} gains {_points(gain)} over {parent} on {domain}"
    if gain.low >= gate.min_gain:
        return _Finding("passed", said)
    least = f"{100 * gate.min_gain:+.1f}"
    return _Finding(
        "stopped", f"{said}, and {key}.min_gain wants the whole interval at {least} or above"
    )


def _kept(stage: Stage, gate: MergeGateSettings, models: Models, domain: str) -> _Finding:
    merge, teacher = _accuracies(stage, models, domain)
    beyond = difference(merge, teacher, gate.min_kept)
    said = (
        f"{stage.gated} solves {100 * merge.accuracy:.1f} % of {domain}, {stage.against[domain]}"
        f" {100 * teacher.accuracy:.1f} %"
    )
    if beyond.difference >= 0:
        return _Finding("passed", said)
    least = f"merge.gate.min_kept = {gate.min_kept:g} of that"
    return _Finding(
        "warned" if beyond.high >= 0 else "stopped", f"{said}: {_points(beyond)} from {least}"
    )


def _bounds(stage: Stage, gate: ExpertGateSettings, steps: Steps, key: str) -> Iterator[_Finding]:
    for name, metric, bound, over, how in (
        ("max_mismatch", "mismatch_max", gate.max_mismatch, _highest, "reaches"),
        (
            "min_router_agreement",
            "router_agreement",
            gate.min_router_agreement,
            _lowest,
            "falls to",
        ),
        ("max_drift", "drift_high_ratio", gate.max_drift, fmean, "is on average"),
        (
            "max_router_movement",
            "router_movement",
            gate.max_router_movement,
            fmean,
            "is on average",
        ),
        ("max_kl", "kl", gate.max_kl, fmean, "is on average"),
    ):
        if bound is None:
            continue
        values = [step[metric] for step in steps if metric in step]
        last = f"in the last {len(steps)} steps of {stage.gated}"
        if not values:
            yield _Finding("stopped", f"{metric} is not logged {last}, and {key}.{name} bounds it")
            continue
        said = f"{metric} {how} {over(values):.3g} {last}"
        # A NaN is within no bound.
        least = name.startswith("min_")
        within = over(values) >= bound if least else over(values) <= bound
        beyond = f"{said}, {'below' if least else 'above'} {key}.{name} = {bound:g}"
        yield _Finding("passed", said) if within else _Finding("stopped", beyond)


def _accuracies(stage: Stage, models: Models, domain: str) -> tuple[Accuracy, Accuracy]:
    """Of the gated model on a domain, and of the one that it is held to."""
    assert stage.gated is not None
    names = (stage.gated, stage.against[domain])
    gated, other = (Accuracy(**models[name][domain]) for name in names)
    return gated, other


def _points(change: Difference) -> str:
    """A difference with its 95 % interval, in percentage points."""
    low, high = (f"{100 * value:+.1f}" for value in (change.low, change.high))
    return f"{100 * change.difference:+.1f} points (95 %: {low} to {high})"


def _highest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _lowest(values: Sequence[float]) -> float:
    return -_highest([-value for value in values])


def _stopped(run: RunDirectory, stage: Stage, state: StageState) -> GateVerdict | None:
    """The verdict of a gate that has stopped, and was not overridden."""
    if state.state in ("done", "stale"):
        return None
    try:
        verdict = read_verdict(run.stage(stage.name))
    except DamagedVerdict:  # its state says so, and that the gate is asked again
        return None
    return verdict if verdict and verdict.outcome == "stopped" else None
