"""The health of a run: what is out of its range, and what to try first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from operator import gt, lt
from statistics import fmean, median

from pipeline.run.graph import Stage, rerun_options
from pipeline.run.metrics import Line
from pipeline.run.run import Run, StageState
from stages.guards.registry import GuardSettings

Values = Sequence[float]  # of a metric, by step
Broken = Callable[[Values], str | None]

SILENT_STEPS, SILENT_SECONDS = 20, 120.0  # without a new step, before a stage seems stuck
JUMP = 10.0  # times the median that a gradient's norm may grow to
LAST = 10  # steps that a mean is taken over
# Guards of too little variety, which is as it should be once most prompts are solved.
OF_VARIETY = {"entropy_collapse", "reward_spread", "zero_variance", "similar_responses"}
OF_SIGNAL = {"reward_spread", "zero_variance"}  # which follows where nothing is right
SOLVED = 0.5  # mean `all_right` from which most prompts are solved


@dataclass(frozen=True)
class Symptom:
    """A stage's metric or state that is not as it should be: an alarm, or advice."""

    stage: str
    what: str
    remedy: str
    alarm: bool = True

    def __str__(self) -> str:
        return f"{self.stage}: {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """A metric that is out of its range where `broken` says what is wrong with its values."""

    metric: str
    broken: Broken
    remedy: str
    alarm: bool = True


def _mean(beyond: Callable[[float, float], bool], bound: float, text: str) -> Broken:
    """Return the rule that the mean of the last steps is beyond a bound."""

    def broken(values: Values) -> str | None:
        mean = fmean(values[-LAST:])
        return text.format(mean) if beyond(mean, bound) else None

    return broken


def _jump(values: Values) -> str | None:
    usual, newest = median(values), max(values[-LAST:])
    if len(values) <= LAST or not usual or newest <= JUMP * usual:
        return None
    return f"the gradient's norm jumped to {newest:.3g}, {newest / usual:.0f} times its median"


# Beside the guards, which docs/explanation/guards.md explains; in the order to look at them. The
# first comes before the guards, whose remedies are for rewards that are right.
NOTHING_RIGHT = Rule(
    "all_wrong",
    _mean(gt, 0.99, "no response to any prompt is right"),
    "read some, and what the rewards say of them: braid look RUN STAGE; whether the reference earns"
    " a reward: braid domain check FILE",
)
RULES = (
    Rule(
        "reward_failures",
        _mean(gt, 0.0, "rewards fail on {:.2g} samples a step"),
        "see the first failures with: braid logs RUN STAGE",
    ),
    Rule(
        "engine_restarts",
        _mean(gt, 0.0, "engines are lost, {:.2g} a step"),
        "see why with: braid logs RUN STAGE --engine 0",
    ),
    Rule(
        "idle_experts",
        _mean(gt, 0.4, "few experts work: no recorded token chose {:.0%} of them"),
        "see which do with: braid look RUN STAGE --experts; raise routing.load_balance",
    ),
    Rule(
        "load_balance",
        _mean(gt, 2.0, "few experts work: load_balance is {:.3g}"),
        "see which with: braid look RUN STAGE --experts; raise routing.load_balance",
    ),
    Rule(
        "router_agreement",
        _mean(lt, 0.9, "engine and trainer choose other experts: router_agreement is {:.3g}"),
        "see docs/how-to/mismatch.md; with routing.replay: r3 the trainer takes the engine's",
    ),
    Rule("gradient_norm", _jump, "lower the learning rate, or optimizer.clip_norm", alarm=False),
    Rule(
        "too_long",
        _mean(gt, 0.0, "{:.2g} prompts a step are skipped for their length"),
        "raise prompts.max_prompt_tokens or the source's max_tokens",
        alarm=False,
    ),
)


def symptoms(
    run: Run, states: Mapping[str, StageState], lines: Mapping[str, Sequence[Line]]
) -> list[Symptom]:
    """Return what is wrong with a run's stages, alarms first, each in the order of the graph.

    `lines` are each stage's metrics.
    """
    findings = [
        finding
        for stage in run.stages
        for finding in _of_stage(run, stage, states[stage.name], lines.get(stage.name, ()))
    ]
    return sorted(findings, key=lambda finding: not finding.alarm)


def _of_stage(
    run: Run, stage: Stage, state: StageState, lines: Sequence[Line]
) -> Iterator[Symptom]:
    if state.state in ("failed", "stale"):
        again = run.resume_command()
        if state.state == "stale":
            again += f" {rerun_options(run.stages, [stage.name])}, or take the change back"
        yield Symptom(stage.name, f"{state.state}: {state.cause}", f"continue with: {again}")
    if not lines:
        return
    yield from _by_rules(stage, lines, [NOTHING_RIGHT])
    yield from _guards(run, stage, lines)
    yield from _by_rules(stage, lines, RULES)
    if state.state == "running" and (what := _silent(lines)):
        yield Symptom(stage.name, what, f"see what it waits for: braid look {run.name} --waits")


def _by_rules(stage: Stage, lines: Sequence[Line], rules: Sequence[Rule]) -> Iterator[Symptom]:
    for rule in rules:
        values = _series(lines, rule.metric)
        if values and (what := rule.broken(values)):
            yield Symptom(stage.name, what, rule.remedy, rule.alarm)


def _guards(run: Run, stage: Stage, lines: Sequence[Line]) -> Iterator[Symptom]:
    """Yield an alarm for each guard whose metric is beyond its threshold, advice if it was."""
    right = _series(lines, "all_right")[-LAST:]
    expected = OF_VARIETY if right and fmean(right) >= SOLVED else set()
    if wrong := _series(lines, NOTHING_RIGHT.metric):
        expected = expected | (OF_SIGNAL if NOTHING_RIGHT.broken(wrong) else set())
    for name, guard in guards_of(run, stage).items():
        steps = [*steps_beyond(guard, lines)]
        fired = [line for line, beyond in steps if beyond >= guard.patience]
        if not fired or name in expected:
            continue
        line, beyond = steps[-1]
        bound = f"{guard.side} {guard.threshold:g}"
        if beyond >= guard.patience:
            what = f"{guard.metric} is {line[guard.metric]:.3g}, {bound} for {beyond} steps"
        else:
            what = f"{guard.metric} was {bound} for {guard.patience} steps or more, last at step"
            what += f" {fired[-1]['step']}"
        alarm = beyond >= guard.patience
        yield Symptom(stage.name, f"{what} (guard {name})", guard.remedy, alarm)


def guards_of(run: Run, stage: Stage) -> dict[str, GuardSettings]:
    """Return the guards of a stage that act, by name; of a stage without rewards none."""
    # A gate has the block of the stage that it judges, and with it that block's policy.
    if stage.block is None or not stage.trains:
        return {}
    policy = run.settings.stages[stage.block].policy(run.settings, stage.domains)
    guards = {} if policy is None else dict(policy.guards)
    return {name: guard for name, guard in guards.items() if guard.action != "off"}


def steps_beyond(guard: GuardSettings, lines: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Yield each step that has a guard's metric, and for how many steps it has been beyond now.

    As the guard itself counts: a step without the metric counts neither way.
    """
    times = 0
    for line in lines:
        if (value := line.get(guard.metric)) is not None:
            above = guard.side == "above"
            beyond = value > guard.threshold if above else value < guard.threshold
            times = times + 1 if beyond else 0
            yield line, times


def _silent(lines: Sequence[Line]) -> str | None:
    """Return what is wrong where the newest step is long ago, by the pace of those before."""
    times = [line["time"] for line in lines]
    paces = [after - before for before, after in pairwise(times)]
    since = time.time() - times[-1]
    if not paces or since <= max(SILENT_SECONDS, SILENT_STEPS * median(paces)):
        return None
    return f"no step for {since:.0f} s, and one takes {median(paces):.1f} s"


def _series(lines: Sequence[Line], metric: str) -> list[float]:
    return [line[metric] for line in lines if metric in line and isfinite(line[metric])]
