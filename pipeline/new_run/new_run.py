"""A new run of a model, domains and GPUs: its settings, its cost, and the notes on them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from parallel.engine.platform import check_cpu_engine
from parallel.errors import UserError
from parallel.files import write_atomically
from parallel.settings import LayoutSettings
from pipeline.config.read import ConfigError
from pipeline.config.tokenizers import missing_files
from pipeline.config.validate import load
from pipeline.estimate.budget import steps_within, walltimes
from pipeline.estimate.fit import FittedRun, fitted, gpus_that_fit
from pipeline.estimate.simulation import SimulatedStage, simulated
from pipeline.new_run.run_blocks import (
    THINKING,
    Blocks,
    RunRequest,
    check_size,
    first_blocks,
    make_room,
    put,
)
from pipeline.new_run.run_file import NewDomain, NewRun
from pipeline.new_run.starting_data import StartingData, estimated_data, read_rows, scored_data
from pipeline.run.graph import compile_graph
from pipeline.text import clock, shown
from stages.data.settings import FilePromptSettings
from stages.settings import RunSettings

HELD_OUT = 200, 500  # problems of an evaluation: wanted, and the most
FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.25)  # of the prompts that may be held out
OF_EVALUATION = 0.8  # of the held-out prompts; the others are for gates
CPU_PROBLEMS = 20
MOST_PASSES = 20  # over the training rows, without a note


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be written, with its simulation and the walltimes of its kinds.

    `full_hours` are the GPU hours of all steps, without a budget.
    """

    run: NewRun
    settings: RunSettings
    data: Mapping[str, StartingData]
    times: Sequence[SimulatedStage] = ()
    walltimes: Mapping[str, str] = field(default_factory=dict)
    full_hours: float = 0.0
    notes: Sequence[str] = ()

    @property
    def gpu_hours(self) -> float:
        """The GPU hours of the stages that train."""
        return sum(timed.gpu_hours for timed in self.times)


def prepare(request: RunRequest, announce: Callable[[str], None]) -> Prepared:
    """Return the run, after its tokenizer, data, layout and cost have been checked.

    `announce` gets a line before each part that takes long.

    Raises:
        UserError: one of them is wrong, in one message.
    """
    check_size(request)
    blocks = first_blocks(request)
    draft = _load(_new_run(request, blocks), request.output, to_start=False)
    if request.gpus is None:
        check_cpu_engine(draft.model)
    announce(f"reading the rows of {', '.join(request.domains)} ...")
    counts, chats = _read_all(request, draft)
    on_gpus = request.gpus is not None
    least, most = HELD_OUT if on_gpus else (CPU_PROBLEMS, CPU_PROBLEMS)
    fraction, notes = _fraction(counts, least), []
    if not request.has_weights:
        notes.append(f"weights are not checked: {shown(request.weights)} has no *.safetensors yet")
    if (problem := missing_files(request.weights, chats=chats)) is None:
        announce("scoring the answers of some of them with the domains' rewards ...")
        data = _scored(request, blocks, fraction)
        if len(counts) < len(data):  # rows of Parquet are counted only now
            chats = True  # perhaps
            better = _fraction([domain_data.rows for domain_data in data.values()], least)
            # The counts hold only for the share that they were made with.
            data = data if better == fraction else _scored(request, blocks, better)
    elif request.has_weights or len(counts) < len(request.domains):  # the rest is Parquet
        raise UserError(problem)
    else:
        notes.append(f"answers are not scored, and uses of rows are estimates: {problem}")
        data = _estimated(request, blocks, dict(zip(draft.domains, counts, strict=True)), fraction)
    make_room(request, blocks, {name: rows.right[1] for name, rows in data.items() if rows.right})
    draft = _load(_new_run(request, blocks), request.output, to_start=False)
    notes += _notes_on_data(draft, data, chats, request)
    blocks["evaluation"] = {"problems": _problems(data, most)}
    if on_gpus:
        announce(f"searching the layouts of {request.ranks} GPUs ...")
    prepared = _on_gpus(request, blocks, data) if on_gpus else _on_cores(request, blocks, data)
    return replace(prepared, notes=[*notes, *prepared.notes])


def _read_all(request: RunRequest, draft: RunSettings) -> tuple[list[int], bool]:
    """Return the counts of rows of the domains that could be read, and whether any has chats."""
    counts, chats = [], False
    errors: list[str] = []
    for name, domain in draft.domains.items():
        if not isinstance(domain.prompts, FilePromptSettings):
            raise UserError(
                f"domains.{name}: {shown(request.domains[name][0])} generates its prompts; name "
                "one that reads rows (prompts.source: jsonl, parquet or arrow)"
            )
        try:
            read = read_rows(name, domain.prompts)
        except UserError as error:
            errors.append(str(error))
            continue
        if read is not None:
            counts.append(read[0])
            chats |= read[1]
    if errors:
        raise UserError("\n".join(errors))
    return counts, chats


def _fraction(counts: Sequence[int], least: int) -> float:
    """Return the smallest share that holds out `least` problems of these rows, or the largest."""
    smallest = min(counts, default=0)
    fits = (fraction for fraction in FRACTIONS if OF_EVALUATION * fraction * smallest >= least)
    return next(fits, FRACTIONS[-1])


def _scored(request: RunRequest, blocks: Blocks, fraction: float) -> dict[str, StartingData]:
    """Return the counts of every domain's rows with this share held out, which `blocks` get."""
    for name in request.domains:
        put(blocks, f"domains.{name}.prompts.held_out_fraction", fraction)
    draft = _load(_new_run(request, blocks), request.output, to_start=request.has_weights)
    return {
        name: scored_data(name, domain, str(request.weights), draft.rewards)
        for name, domain in draft.domains.items()
    }


def _estimated(
    request: RunRequest, blocks: Blocks, counts: Mapping[str, int], fraction: float
) -> dict[str, StartingData]:
    """Return what `_scored` does where the model's tokenizer is not there yet."""
    for name in request.domains:
        put(blocks, f"domains.{name}.prompts.held_out_fraction", fraction)
    return {name: estimated_data(rows, fraction, OF_EVALUATION) for name, rows in counts.items()}


def _problems(data: Mapping[str, StartingData], most: int) -> int:
    name, fewest = min(data.items(), key=lambda pair: pair[1].held_out)
    if fewest.held_out == 0 or fewest.trained == 0:
        raise UserError(
            f"domains.{name}: {fewest.rows} rows leave {fewest.trained} prompts to train on and "
            f"{fewest.held_out} to evaluate with; give it more rows"
        )
    return min(most, fewest.held_out)


def _notes_on_data(
    draft: RunSettings, data: Mapping[str, StartingData], chats: bool, request: RunRequest
) -> list[str]:
    notes = []
    for name, domain_data in data.items():
        room = draft.longest_prompt(draft.domains[name].sampling)
        if domain_data.longest > room:
            notes.append(
                f"domains.{name}: its longest prompt has {domain_data.longest} tokens; those "
                f"above {room} are skipped (engine.max_model_tokens)"
            )
        limit = draft.domains[name].sampling.max_response_tokens
        if domain_data.right is not None and domain_data.right[0] > limit:
            notes.append(
                f"domains.{name}.sampling.max_response_tokens = {limit}: more than 5 % of the right"
                f" answers are longer, up to {domain_data.right[1]} tokens; such responses are"
                " truncated and earn nothing"
            )
    if request.thinks and request.gpus is not None:
        longest = max(domain.sampling.max_response_tokens for domain in draft.domains.values())
        notes.append(
            f"the chat template has thoughts: responses have up to {longest:,} tokens, as in "
            f"{shown(THINKING)}, and truncated ones are masked from the loss"
        )
    if not chats and missing_files(request.weights, chats=True) is None:
        notes.append(
            "prompts are text, which the model reads without its chat template; with "
            "domains.NAME.prompts.template: {} each is a message of the user, and its keys system "
            "and user add text"
        )
    return notes


def _on_gpus(request: RunRequest, blocks: Blocks, data: Mapping[str, StartingData]) -> Prepared:
    """Return the run with a layout, and steps within the budget."""
    assert request.gpus is not None
    assumed, gpus = request.gpus, request.ranks
    draft = _load(_new_run(request, blocks), request.output, to_start=False)
    if (fitted_run := fitted(draft, gpus, assumed)) is None:
        more = gpus_that_fit(draft, gpus, assumed)
        use = f"{more} would; use --gpus {more}" if more else "no number of them would"
        raise UserError(
            f"no layout of {gpus} {request.gpu} fits the model into their memory; {use}"
        )
    for key, value in fitted_run.changes.items():
        put(blocks, key, value)
    blocks["layout"], engine = fitted_run.settings.layout, fitted_run.settings.engine
    blocks["engine"] = {"count": engine.count, "tensor": engine.tensor, **blocks["engine"]}
    stages = compile_graph(fitted_run.settings)
    times = simulated(stages, fitted_run.settings, assumed)
    hours = sum(timed.gpu_hours for timed in times)
    notes = [*_notes_on_layout(fitted_run)]
    if request.budget is not None and hours > request.budget:
        steps = steps_within(times, request.budget)
        for timed in times:
            domain, block = timed.stage.domain, timed.stage.block
            where = f"domains.{domain}" if domain else f"stages.{block}"
            put(blocks, f"{where}.loop.steps", steps[timed.stage.name])
        share = request.budget / hours
        notes.append(
            f"all {max(timed.steps for timed in times)} steps of an expert would cost {hours:,.0f} "
            f"GPU hours; the budget of {request.budget:,.0f} pays for {share:.0%} of them"
        )
    settings = _load(_new_run(request, blocks), request.output, to_start=request.has_weights)
    data, repeats = _used(settings, data)
    notes += repeats
    times = simulated(compile_graph(settings), settings, assumed)
    cut = walltimes(times, request.longest_walltime)
    # The head quotes the cost of the final settings, so it is written after the cut.
    spent = sum(timed.gpu_hours for timed in times)
    notes += [
        f"{timed.stage.name} is simulated with {clock(timed.duration)}: its job is requeued at its "
        f"walltime of {cut[timed.stage.kind]} and continues"
        for timed in times
        if timed.duration > request.longest_walltime
    ]
    head = (
        f"Written by `braid init` for {gpus} {request.gpu}, {assumed.per_node} a node: "
        f"{spent:,.0f} GPU hours",
        "of training by `braid simulate`. Every key: docs/reference/run.md.",
        *(f"{note[0].upper()}{note[1:]}." for note in notes if "budget" in note),
    )
    run = replace(
        _new_run(request, blocks, data), head=head, about_layout=_about_layout(fitted_run)
    )
    return Prepared(run, settings, data, times, cut, hours, notes)


def _notes_on_layout(fitted_run: FittedRun) -> list[str]:
    changed = {key.rpartition(".")[2]: value for key, value in fitted_run.changes.items()}
    if not changed:
        return []
    keys = ", ".join(f"{key}: {value}" for key, value in changed.items())
    return [f"no layout fits as it is: {keys} in every stage makes one fit"]


def _about_layout(fitted_run: FittedRun) -> list[str]:
    return [
        "A fast one of the layouts that `braid simulate FILE --search GPUS` finds, whose trainer",
        f"needs {fitted_run.trained_share:.0%} of a GPU's memory at most.",
    ]


def _on_cores(request: RunRequest, blocks: Blocks, data: Mapping[str, StartingData]) -> Prepared:
    """Return the run on CPU cores: ranks that share the experts, and one engine."""
    experts = request.ranks if request.model.experts % request.ranks == 0 else 1
    blocks["layout"] = LayoutSettings(ranks=request.ranks, expert=experts)
    settings = _load(_new_run(request, blocks), request.output, to_start=request.has_weights)
    data, notes = _used(settings, data)
    head = (
        f"Written by `braid init` for {request.ranks} ranks on CPU cores: a few small steps, which",
        "show that everything fits together and teach nothing. Every key: docs/reference/run.md.",
    )
    run = replace(_new_run(request, blocks, data), head=head)
    return Prepared(run, settings, data, notes=notes)


def _used(
    settings: RunSettings, data: Mapping[str, StartingData]
) -> tuple[dict[str, StartingData], list[str]]:
    """Return the data with how often the experts use each row, and a note where that is often."""
    used, notes = dict(data), []
    for stage in compile_graph(settings):
        if stage.domain is None or not stage.steps:
            continue
        domain_data = data[stage.domain]
        prompts = settings.domains[stage.domain].sampling.prompts_per_step
        used[stage.domain] = replace(
            domain_data, passes=round(stage.steps * prompts / domain_data.trained, 2)
        )
        passes, where = used[stage.domain].passes or 0.0, f"domains.{stage.domain}"
        if passes > MOST_PASSES or prompts > domain_data.trained:
            notes.append(
                f"{where}: {stage.steps} steps of {prompts} prompts use each of its "
                f"{domain_data.trained:,} training rows {passes:,.1f} times; give it more rows, or "
                f"lower {where}.loop.steps or {where}.sampling.prompts_per_step"
            )
    return used, notes


def _new_run(
    request: RunRequest,
    blocks: Blocks,
    data: Mapping[str, StartingData] | None = None,
) -> NewRun:
    """Return what the file says, from the run's own keys and, once chosen, its layout."""
    model = request.model
    if request.gpus is None:
        model = model.model_copy(update={"precision": "fp32"})
    about = {name: domain_data.described() for name, domain_data in (data or {}).items()}
    return NewRun(
        name=request.name,
        model=model,
        described=request.described,
        weights=request.weights.absolute(),
        domains={
            name: NewDomain(base, blocks["domains"][name], about.get(name, ""))
            for name, (base, _) in request.domains.items()
        },
        layout=blocks.get("layout"),
        engine=blocks["engine"],
        cold_start=blocks["stages"].get("cold_start"),
        merge=blocks["stages"].get("merge"),
        problems=blocks.get("evaluation", {}).get("problems"),
    )


def _load(run: NewRun, output: Path, *, to_start: bool) -> RunSettings:
    """Return the settings of a run that is not written yet.

    Raises:
        UserError: it is not valid; the message has its keys and no lines, which nobody has seen.
    """
    with tempfile.TemporaryDirectory(prefix="braid-") as temporary:
        path = Path(temporary) / output.name
        write_atomically(path, run.text(path.parent))
        try:
            return load(path, to_start=to_start)
        except ConfigError as error:
            place = rf"{re.escape(shown(path))}(:\d+)?"
            message = re.sub(f"^{place}: ", "", str(error), flags=re.MULTILINE)
            raise UserError(re.sub(place, lambda _: shown(output), message)) from error
