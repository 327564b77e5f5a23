"""The command that compares the models of runs: `braid compare`."""

from __future__ import annotations

from argparse import Namespace

from parallel.errors import UserError, hint
from pipeline.commands.common import (
    JSON,
    RUN,
    Argument,
    command,
    find,
    load_run,
    print_json,
    read_run,
)
from pipeline.report.comparison import compare
from pipeline.report.comparison_text import comparison_json, comparison_text
from pipeline.run.answers import MeasuredModel, measured_models
from pipeline.text import shown


@command(
    "compare",
    "compare a run's models: gains, recovered headroom, forgetting, and cost",
    "  braid compare quickstart\n"
    "  braid compare quickstart merge mixed --start cold_start\n"
    "  braid compare quickstart merge other-run/merge\n\n"
    "Of the models that the run's evaluation has measured: accuracy, and the change against the\n"
    "start with paired 95 % intervals on the same held-out problems; headroom, the share of the\n"
    "expert's gain that a model has; changes on domains that it was not trained on; tokens, time\n"
    "and memory of every stage. Models of other runs are compared on the problems that all have\n"
    "answered.\n\n"
    'JSON: {"run", "start", "problems": {DOMAIN: COUNT}, "experts": {DOMAIN: MODEL}, "models":\n'
    '{MODEL: {"role", "expert_of", "trained_on", "scores": {DOMAIN: {"accuracy", "change",\n'
    '"headroom"}}, "mean_headroom", "forgetting"}}, "undefined": {DOMAIN: WHY}, "stages":\n'
    '[{"stage", "kind", "sampled_tokens", "trained_tokens", "minutes", "peak_bytes",\n'
    '"peak_gpu_bytes"}], "notes"}; what is not known is null.',
    RUN,
    Argument(
        "models",
        metavar="MODEL",
        nargs="*",
        default=[],
        help="only these models, each as `braid status RUN` names it, or OTHER_RUN/MODEL (default:"
        " every model of the run)",
    ),
    Argument(
        "--start",
        metavar="MODEL",
        help="the model that gains are measured from (default: the one that the first"
        " merge starts from)",
    ),
    (JSON, Argument("--markdown", action="store_true", help="print tables in Markdown")),
)
def compare_models(arguments: Namespace) -> None:
    """Compare the models of a run, and some of other runs."""
    run = load_run(arguments)
    models = measured_models(run)
    for name in (*arguments.models, *([arguments.start] if arguments.start else [])):
        if name not in models:
            models[name] = _of_another_run(arguments, name, models)
    found = compare(run, models, arguments.models, arguments.start)
    if arguments.json:
        print_json(arguments, comparison_json(found))
    else:
        print(comparison_text(found, arguments.markdown))


def _of_another_run(
    arguments: Namespace, name: str, known: dict[str, MeasuredModel]
) -> MeasuredModel:
    """Return the model OTHER_RUN/MODEL; raise UserError where there is none."""
    other, slash, model = name.rpartition("/")
    if not slash:
        raise UserError(
            f"no model {name} in {arguments.run} has been measured; {hint(name, known)}"
        )
    run = read_run(find(arguments.runs_dir, other))
    measured = measured_models(run)
    if model not in measured:
        where = shown(run.path)
        raise UserError(f"no model {model} in {where} has been measured; {hint(model, measured)}")
    return measured[model]
