"""The gates between stages: measurements that decide whether the next stage starts.

The stage itself only measures, as `stages.kinds.evaluate.work` does. The verdict is a pure function
of the answers to each problem, the expert's metrics and the settings.

- A trained stage passes if the lower bound of the 95 % interval of its gain over its parent is at
  least `min_gain`: a gain within chance does not count, and an expert without one has nothing to
  teach.
- No number of problems proves that a merge equals its teachers. Below `min_kept` of a teacher's
  accuracy the gate warns; it stops if the upper bound of the 95 % interval is below that too.
- A quantized model passes if the upper bound of the 95 % interval of the accuracy that it loses is
  at most `max_loss`.

Every interval is paired: both models have answered the same problems, so what is hard for both says
nothing about their difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from parallel.errors import UserError
from parallel.files import write_atomically
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, gate_of
from pipeline.run.metrics import all_lines
from pipeline.run.run import (
    OVERRIDDEN,
    DamagedVerdict,
    GateVerdict,
    Outcome,
    Run,
    StageState,
    read_verdict,
)
from pipeline.run.solved import Solved, solved_problems
from pipeline.text import shown
from stages.directory import ended_early
from stages.guards.settings import (
    GainGateSettings,
    GateSettings,
    LossGateSettings,
    MergeGateSettings,
)
from stages.statistics import Answers, Difference, paired_difference

Steps = Sequence[Mapping[str, Any]]


class GateStopped(UserError):
    """A gate stopped the stages that wait for it; the message is its verdict."""

    def __init__(self, run: Run, stage: Stage, verdict: GateVerdict) -> None:
        super().__init__(verdict.text)
        where = shown(run.path)
        waits = any(stage.name in other.waits_for for other in run.stages)
        held = f"stages that wait for {stage.name} do not start. " if waits else ""
        self.add_note(
            f"{held}Edit the settings of {stage.gated} and rerun it with\n"
            f"--from {stage.gated}, or edit the gate and rerun it with --from "
            f"{stage.name}, or override the gate:\n"
            f'  braid gate override {where} {stage.name} --reason "..."\n'
            f"  {run.resume_command()}"
        )


def judge_gain(
    stage: Stage, gate: GainGateSettings, solved: Solved, steps: Steps = ()
) -> GateVerdict:
    """Judge whether a stage beats its parent on its domains and has trained within bounds.

    `steps` are the metrics of its steps, the newest last.
    """
    key = f"stages.{stage.block}.gate"
    gains = [_gain(stage, gate, solved, domain, key) for domain in stage.against]
    findings = [*gains, *_bounds(stage, gate, steps[-gate.window :], key)]
    return _verdict(findings, gate)


def judge_merge(stage: Stage, gate: MergeGateSettings, solved: Solved) -> GateVerdict:
    """Judge whether a merge keeps each teacher's accuracy on the teacher's domain."""
    return _verdict([_kept(stage, gate, solved, domain) for domain in stage.against], gate)


def judge_loss(stage: Stage, gate: LossGateSettings, solved: Solved) -> GateVerdict:
    """Judge the accuracy that a quantized model loses to its parent on each domain."""
    return _verdict([_lost(stage, gate, solved, domain) for domain in stage.against], gate)


def ending(run: Run, stage: Stage) -> str:
    """Return why a stage whose attempt succeeded is done; this judges and writes a gate's verdict.

    Raises:
        GateStopped: the stage is a gate and its verdict is to stop.
        UserError: a file of a gate's answers is damaged or missing.
    """
    directory = run.stage(stage.name)
    if not stage.declared.judges:
        return ended_early(directory.newest_checkpoint()) or "finished"
    gate = gate_of(stage, run.settings)
    solved = solved_problems(directory, stage, gate.samples_per_problem)
    if isinstance(gate, MergeGateSettings):
        verdict = judge_merge(stage, gate, solved)
    elif isinstance(gate, LossGateSettings):
        verdict = judge_loss(stage, gate, solved)
    else:
        assert isinstance(gate, GainGateSettings) and stage.gated is not None
        verdict = judge_gain(stage, gate, solved, all_lines(run.stage(stage.gated).metrics))
    write_atomically(directory.verdict, json.dumps(asdict(verdict), indent=2) + "\n")
    if verdict.outcome == "stopped":
        raise GateStopped(run, stage, verdict)
    return verdict.text


def report_verdict(run: RunDirectory, stage: Stage, say: Callable[[str], None]) -> None:
    """Report the verdict of a gate that is done; `say` takes one line."""
    if verdict := read_verdict(run.stage(stage.name)):
        say(verdict.text)


def check_stopped(run: Run, stages: Sequence[Stage], states: Mapping[str, StageState]) -> None:
    """Raise GateStopped where a wanted stage is a gate that has stopped.

    The same models on the same problems would stop it again.
    """
    for stage in stages:
        if verdict := _stopped(run, stage, states[stage.name]):
            raise GateStopped(run, stage, verdict)


def override(run: Run, name: str, reason: str) -> None:
    """Let the stages that wait for a stopped gate start, and record the reason.

    Raises:
        UserError: the reason is empty, or the stage is not a gate that has stopped.
    """
    # Bytes of a command line that are not UTF-8 arrive as surrogates, which no output can encode.
    reason = " ".join(reason.encode(errors="replace").decode().split())
    if not reason:
        raise UserError("--reason must not be empty; it is recorded in the ledger")
    [stage] = run.chosen([name])
    if not stage.declared.judges:
        gates = ", ".join(stage.name for stage in run.stages if stage.declared.judges)
        available = f"its gates are {gates}" if gates else "it has no gates"
        raise UserError(f"{name} is not a gate of {shown(run.path)}; {available}")
    state = run.states[name]
    verdict = _stopped(run, stage, state)
    if verdict is None:
        cause = f": {state.cause}" if state.cause else ""
        raise UserError(
            f"{name} of {shown(run.path)} is {state.state}{cause}\n"
            "only a gate that has stopped can be overridden"
        )
    cause = f"{OVERRIDDEN}{reason}; its verdict was: {verdict.text}"
    run.ledger.append(name, "done", cause, state.attempts)


@dataclass(frozen=True)
class _Finding:
    """One measurement of a gate, judged."""

    outcome: Outcome
    text: str


def _verdict(findings: Sequence[_Finding], gate: GateSettings) -> GateVerdict:
    failed = [finding for finding in findings if finding.outcome != "passed"]
    if not failed:
        return GateVerdict("passed", tuple(finding.text for finding in findings))
    stops = gate.on_failure == "stop" and any(finding.outcome == "stopped" for finding in failed)
    return GateVerdict("stopped" if stops else "warned", tuple(finding.text for finding in failed))


def _gain(stage: Stage, gate: GainGateSettings, solved: Solved, domain: str, key: str) -> _Finding:
    gain = paired_difference(*_answers(stage, gate, solved, domain))
    measured = f"{stage.gated} gains {points(gain)} over {stage.against[domain]} on {domain}"
    # The lower bound, not the mean: a gain that chance explains must not pass.
    if gain.low >= gate.min_gain:
        return _Finding("passed", measured)
    least = f"{100 * gate.min_gain:+.1f}"
    return _Finding(
        "stopped", f"{measured}; the lower 95 % bound must be at least {key}.min_gain = {least}"
    )


def _kept(stage: Stage, gate: MergeGateSettings, solved: Solved, domain: str) -> _Finding:
    merge, teacher = _answers(stage, gate, solved, domain)
    beyond = paired_difference(merge, teacher, gate.min_kept)
    measured = (
        f"{stage.gated} solves {100 * merge.accuracy.accuracy:.1f} % of {domain},"
        f" {stage.against[domain]} {100 * teacher.accuracy.accuracy:.1f} %"
    )
    if beyond.difference >= 0:
        return _Finding("passed", measured)
    # Below the bound by the mean alone the problems are too few to decide, so the run goes further.
    least = f"stages.{stage.block}.gate.min_kept = {gate.min_kept:g} of that"
    return _Finding(
        "warned" if beyond.high >= 0 else "stopped", f"{measured}: {points(beyond)} from {least}"
    )


def _lost(stage: Stage, gate: LossGateSettings, solved: Solved, domain: str) -> _Finding:
    other = stage.against[domain]
    # Named for the order in time: the gated model is the quantized one.
    after, before = _answers(stage, gate, solved, domain)
    lost = paired_difference(before, after)
    measured = f"{stage.gated} loses {points(lost)} of {other} on {domain}"
    if lost.difference < 0:
        low, high = (f"{100 * value:+.1f}" for value in (lost.low, lost.high))
        gained = f"gains {-100 * lost.difference:.1f} points over {other} on {domain}"
        measured = f"{stage.gated} {gained} (paired 95 % of the loss: {low} to {high})"
    # The upper bound, not the mean: a loss that was not measured closely enough must not pass.
    if lost.high <= gate.max_loss:
        return _Finding("passed", measured)
    bound = f"stages.{stage.block}.gate.max_loss = {100 * gate.max_loss:+.1f}"
    return _Finding("stopped", f"{measured}; the upper 95 % bound must be at most {bound}")


def _bounds(stage: Stage, gate: GainGateSettings, steps: Steps, key: str) -> Iterator[_Finding]:
    """Yield the findings on the metrics of the last `steps`."""
    last = f"in the last {len(steps)} steps of {stage.gated}"
    for name, metric, over, how in (
        ("max_mismatch", "mismatch_max", _highest, "reaches"),
        ("min_router_agreement", "router_agreement", _lowest, "falls to"),
        ("max_drift", "drift_high_ratio", fmean, "is on average"),
        ("max_router_movement", "router_movement", fmean, "is on average"),
        ("max_kl", "kl", fmean, "is on average"),
    ):
        if (bound := getattr(gate, name)) is None:
            continue
        values = [step[metric] for step in steps if metric in step]
        if not values:
            yield _Finding("stopped", f"{metric} is not logged {last}, and {key}.{name} bounds it")
            continue
        measured, least = over(values), name.startswith("min_")
        text = f"{metric} {how} {measured:.3g} {last}"
        # A NaN is within no bound.
        within = measured >= bound if least else measured <= bound
        beyond = f"{text}, {'below' if least else 'above'} {key}.{name} = {bound:g}"
        yield _Finding("passed", text) if within else _Finding("stopped", beyond)


def _answers(
    stage: Stage, gate: GateSettings, solved: Solved, domain: str
) -> tuple[Answers, Answers]:
    """Return the answers of the gated model in a domain and of the model it is compared with."""
    assert stage.gated is not None
    one, other = (solved[name][domain] for name in (stage.gated, stage.against[domain]))
    return Answers(one, gate.samples_per_problem), Answers(other, gate.samples_per_problem)


def points(change: Difference) -> str:
    """Return a paired difference with its 95 % interval, in percentage points."""
    low, high = (f"{100 * value:+.1f}" for value in (change.low, change.high))
    return f"{100 * change.difference:+.1f} points (paired 95 %: {low} to {high})"


def _highest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _lowest(values: Sequence[float]) -> float:
    return -_highest([-value for value in values])


def _stopped(run: RunDirectory, stage: Stage, state: StageState) -> GateVerdict | None:
    """Return the verdict of a gate that stopped and was not overridden; None for others."""
    if state.state in ("done", "stale"):
        return None
    try:
        verdict = read_verdict(run.stage(stage.name))
    except DamagedVerdict:  # the stage's state reports it, and the gate runs again
        return None
    return verdict if verdict and verdict.outcome == "stopped" else None
