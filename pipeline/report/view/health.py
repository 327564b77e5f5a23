"""The health of a run: a verdict on each stage that trains, and what is out of its range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from pipeline.report.view.findings import Health, StageVerdict, Symptom, Word
from pipeline.report.view.learning import HeldOutGain, LearningTrend, learning_trend
from pipeline.report.view.next_commands import command_for, problems_lost, run_argument
from pipeline.report.view.symptoms import SIGNAL, Values, stage_symptoms
from pipeline.run.graph import Stage
from pipeline.run.metrics import Line, series
from pipeline.run.run import Run, StageState
from stages.metric_ranges import LAST_STEPS, RANGES


def judged(
    run: Run,
    states: Mapping[str, StageState],
    lines: Mapping[str, Sequence[Line]],
    gains: Mapping[str, HeldOutGain],
) -> Health:
    """Return what is wrong with a run's stages and what each learned, in the order of the graph.

    `lines` are each stage's metrics, `gains` those of `pipeline.report.compare.comparison`.
    """
    symptoms: list[Symptom] = []
    verdicts: list[StageVerdict] = []
    for stage in run.stages:
        state, stage_lines = states[stage.name], lines.get(stage.name, ())
        findings = [*stage_symptoms(run, stage, state, stage_lines)]
        if stage.trains:
            gain = gains.get(stage.name)
            findings += _harms(run, stage, gain)
            verdict, learning = _learning(run, stage, state, stage_lines, gain)
            cause = next((one for one in findings if one.alarm and one.word), None)
            if cause is not None and cause.word is not None:
                verdict = StageVerdict(stage.name, cause.word, cause.what, alarm=True)
            elif learning is not None:
                findings.insert(0, learning)
            verdicts += [] if verdict is None else [verdict]
        symptoms += findings
    return Health(sorted(symptoms, key=lambda symptom: not symptom.alarm), verdicts)


def _learning(
    run: Run, stage: Stage, state: StageState, lines: Sequence[Line], gain: HeldOutGain | None
) -> tuple[StageVerdict | None, Symptom | None]:
    """Return the verdict on a stage without an alarm, and the symptom where it is not good.

    A gain on the problems held out decides where it was measured, else the trend over the steps.
    """
    if (trend := learning_trend(lines)) is None:
        return None, None
    word, what = _judge(trend, gain, series(lines, "all_right")[-LAST_STEPS:])
    if word in ("learns", "is solved"):
        return StageVerdict(stage.name, word, what), None
    unhealthy = [
        f"{text.format(mean)} (healthy: {RANGES[metric]})"
        for metric, (text, _) in SIGNAL.items()
        if (values := series(lines, metric)[-LAST_STEPS:])
        and not RANGES[metric].is_healthy(mean := fmean(values))
    ]
    what = "; ".join([what, *unhealthy])
    # A stage that runs may learn yet, and of a few steps nothing is certain.
    alarm = word != "too short to say" and state.state != "running"
    verdict = StageVerdict(stage.name, word, what, alarm)
    if word == "too short to say" and not unhealthy:
        return verdict, None
    command = command_for(run, stage, trend.metric)
    if gain is not None:
        command = f"braid compare {run_argument(run)}"
    remedy = "see docs/how-to/read-a-run.md#a-stage-that-does-not-learn"
    return verdict, Symptom(stage.name, what, remedy, command, alarm, word)


def _judge(trend: LearningTrend, gain: HeldOutGain | None, right: Values) -> tuple[Word, str]:
    if gain is not None and gain.gained:
        rest = f", not significantly {', '.join(gain.not_gained)}" if gain.not_gained else ""
        return "learns", f"{', '.join(gain.gained)} held out{rest}; {trend}"
    if gain is not None:
        changes = ", ".join(gain.not_gained)
        return "does not learn", f"{changes} held out, not significant; {trend}"
    if trend.rise is None:
        return "too short to say", str(trend)
    if trend.is_better:
        return "learns", str(trend)
    if trend.is_worse:
        return "does harm", str(trend)
    if right and not RANGES["all_right"].is_healthy(fmean(right)):
        solved = f"every response to {fmean(right):.0%} of the prompts is right"
        return "is solved", f"{solved}, little is left to learn; {trend}"
    return "does not learn", str(trend)


def _harms(run: Run, stage: Stage, gain: HeldOutGain | None) -> Iterator[Symptom]:
    """Yield an alarm where a stage's model solves less than the start on a domain."""
    if gain is not None and gain.lost:
        what = f"{', '.join(gain.lost)}, against {gain.start} held out"
        remedy = "lower the learning rate, or raise objective.kl.coefficient"
        command = problems_lost(run, stage, gain.start, gain.lost_domains[0])
        yield Symptom(stage.name, what, remedy, command, word="does harm")
