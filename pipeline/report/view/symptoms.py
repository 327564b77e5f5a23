"""Symptoms: metrics of a stage out of their range, a remedy, and the command to run next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from pipeline.report.view.findings import Symptom, Word
from pipeline.report.view.next_commands import command_for, domain_checks, run_argument
from pipeline.run.graph import Stage, rerun_options
from pipeline.run.metrics import Line, series
from pipeline.run.run import Run, StageState
from stages.guards.registry import GuardSettings
from stages.metric_ranges import LAST_STEPS, RANGES

Values = Sequence[float]  # of a metric, by step
SILENT_STEPS, SILENT_SECONDS = 20, 120.0  # without a new step, before a stage seems stuck
JUMP = 10.0  # times the median that a gradient's norm may grow to
# Metrics of too little variety, which is as it should be once most prompts are solved.
OF_VARIETY = {"entropy", "reward_spread", "zero_variance", "similar_responses"}
OF_SIGNAL = {"reward_spread", "zero_variance"}  # which follow where nothing is right
# Metrics that show whether there is anything to learn from; the first explains those after it.
SIGNAL = {
    "unfinished": ("{:.0%} of the responses are truncated", "raise sampling.max_response_tokens"),
    "all_wrong": (
        "no response to {:.0%} of the prompts is right",
        "read some and what the rewards say of them; whether the references earn a reward: {check}",
    ),
    "zero_variance": (
        "{:.0%} of the prompt groups have zero variance",
        "use prompts of another difficulty, or curriculum.name: frontier",
    ),
    "reward_spread": (
        "the rewards of a prompt spread by {:.2g}",
        "use prompts of another difficulty, or a larger sampling.group_size",
    ),
}
CANNOT = {*SIGNAL, "similar_responses"}
NEITHER = {"dropped_stale"}  # what a guard says and no verdict follows from


@dataclass(frozen=True)
class Rule:
    """An alarm on the mean of the last steps beyond the metric's bound in RANGES."""

    metric: str
    text: str
    remedy: str
    word: Word | None = None
    alarm: bool = True

    def broken(self, values: Values) -> str | None:
        """Return what is wrong with the values; None where nothing is."""
        mean = fmean(values[-LAST_STEPS:])
        return self.text.format(mean) if RANGES[self.metric].is_alarm(mean) else None


# Beside the guards, which docs/explanation/guards.md explains; in the order to look at them.
RULES = (
    Rule(
        "kl",
        "the policy is {:.3g} nats a token from its reference",
        "raise objective.kl.coefficient, or lower the learning rate",
        "does harm",
    ),
    Rule("reward_failures", "rewards fail on {:.2g} samples a step", "see the first failures"),
    Rule("engine_restarts", "engines are lost, {:.2g} a step", "see why"),
    Rule(
        "idle_experts",
        "few experts work: no recorded token chose {:.0%} of them",
        "raise routing.load_balance",
        "does harm",
    ),
    Rule(
        "load_balance",
        "few experts work: load_balance is {:.3g}",
        "raise routing.load_balance",
        "does harm",
    ),
    Rule(
        "router_agreement",
        "engine and trainer choose other experts: router_agreement is {:.3g}",
        "see docs/how-to/mismatch.md; with routing.replay: r3 the trainer takes the engine's",
        "does harm",
    ),
    Rule(
        "too_long",
        "{:.2g} prompts a step are skipped for their length",
        "raise prompts.max_prompt_tokens or the source's max_tokens",
        alarm=False,
    ),
)


def stage_symptoms(
    run: Run, stage: Stage, state: StageState, lines: Sequence[Line]
) -> Iterator[Symptom]:
    """Yield what is not as it should be in a stage, the causes before what follows from them."""
    if state.state == "failed":
        yield Symptom(stage.name, state.cause, "", run.resume_command(), word="failed")
    if state.state == "stale":
        again = f"{run.resume_command()} {rerun_options(run.stages, [stage.name])}"
        yield Symptom(
            stage.name, f"stale: {state.cause}", "rerun it, or take the change back", again
        )
    if not lines:
        return
    yield from _signals_and_guards(run, stage, lines)
    for rule in RULES:
        values = series(lines, rule.metric)
        if values and (what := rule.broken(values)):
            command = command_for(run, stage, rule.metric)
            yield Symptom(stage.name, what, rule.remedy, command, rule.alarm, rule.word)
    if what := _jump(series(lines, "gradient_norm")):
        remedy = "lower the learning rate, or optimizer.clip_norm"
        command = command_for(run, stage, "gradient_norm")
        yield Symptom(stage.name, what, remedy, command, alarm=False)
    if state.state == "running" and (what := _silent(lines)):
        waits = f"braid look {run_argument(run)} --waits"
        yield Symptom(stage.name, what, "see what it waits for", waits)


def _signals_and_guards(run: Run, stage: Stage, lines: Sequence[Line]) -> Iterator[Symptom]:
    """Yield what guards say, and alarms of SIGNAL that hold in too few steps for a guard.

    Where most prompts are solved, or nothing is right, what follows from that is left out.
    """
    right, wrong = (series(lines, name)[-LAST_STEPS:] for name in ("all_right", "all_wrong"))
    expected: set[str] = set()
    if right and not RANGES["all_right"].is_healthy(fmean(right)):
        expected |= OF_VARIETY
    if wrong and RANGES["all_wrong"].is_alarm(fmean(wrong)):
        expected |= OF_SIGNAL
    guards = _all_guards(run, stage)
    said = {
        guard.metric: symptom
        for name, guard in guards.items()
        if guard.action != "off" and (symptom := _of_guard(run, stage, name, guard, lines))
    }
    thresholds = {guard.metric: guard.threshold for guard in guards.values()}
    off = {guard.metric for guard in guards.values() if guard.action == "off"}
    for metric, (text, remedy) in SIGNAL.items():
        values = series(lines, metric)[-LAST_STEPS:]
        bounds = replace(RANGES[metric], alarm=thresholds.get(metric, RANGES[metric].alarm))
        of_guard = said.get(metric)
        if metric in off or not values or (of_guard is not None and of_guard.alarm):
            continue
        if bounds.is_alarm(mean := fmean(values)):
            remedy = remedy.format(check=domain_checks(run, stage))
            what, command = text.format(mean), command_for(run, stage, metric)
            said[metric] = Symptom(stage.name, what, remedy, command, word="cannot learn")
    in_order = [*SIGNAL, *(metric for metric in said if metric not in SIGNAL)]
    yield from (said[metric] for metric in in_order if metric in said and metric not in expected)


def _of_guard(
    run: Run, stage: Stage, name: str, guard: GuardSettings, lines: Sequence[Line]
) -> Symptom | None:
    """Return an alarm where a guard's metric is beyond its threshold, advice if it was."""
    steps = [*steps_beyond(guard, lines)]
    fired = [line for line, beyond in steps if beyond >= guard.patience]
    if not fired:
        return None
    line, beyond = steps[-1]
    bound, alarm = f"{guard.side} {guard.threshold:g}", beyond >= guard.patience
    if alarm:
        what = f"{guard.metric} is {line[guard.metric]:.3g}, {bound} for {beyond} steps"
    else:
        what = f"{guard.metric} was {bound} for {guard.patience} steps or more, last at step"
        what += f" {fired[-1]['step']}"
    word: Word | None = "cannot learn" if guard.metric in CANNOT else "does harm"
    if not alarm or guard.metric in NEITHER:
        word = None
    command = command_for(run, stage, guard.metric)
    return Symptom(stage.name, f"{what} (guard {name})", guard.remedy, command, alarm, word)


def guards_of(run: Run, stage: Stage) -> dict[str, GuardSettings]:
    """Return the guards of a stage that act, by name; of a stage without rewards none."""
    guards = _all_guards(run, stage)
    return {name: guard for name, guard in guards.items() if guard.action != "off"}


def _all_guards(run: Run, stage: Stage) -> dict[str, GuardSettings]:
    # A gate has the block of the stage that it judges, and with it that block's policy.
    if stage.block is None or not stage.trains:
        return {}
    policy = run.settings.stages[stage.block].policy(run.settings, stage.domains)
    return {} if policy is None else dict(policy.guards)


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


def _jump(values: Values) -> str | None:
    """Return what is wrong where the gradient's norm jumped in the last steps."""
    if len(values) <= LAST_STEPS:
        return None
    usual, newest = median(values), max(values[-LAST_STEPS:])
    if not usual or newest <= JUMP * usual:
        return None
    return f"the gradient's norm jumped to {newest:.3g}, {newest / usual:.0f} times its median"


def _silent(lines: Sequence[Line]) -> str | None:
    """Return what is wrong where the newest step is long ago, by the pace of those before."""
    times = [line["time"] for line in lines]
    paces = [after - before for before, after in pairwise(times)]
    since = time.time() - times[-1]
    if not paces or since <= max(SILENT_SECONDS, SILENT_STEPS * median(paces)):
        return None
    return f"no step for {since:.0f} s, and one takes {median(paces):.1f} s"
