"""The command that compares the models of runs: `braid compare`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import JSON, RUN, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_run, measured
from pipeline.report.compare.comparison import compare, comparison_json
from pipeline.report.compare.comparison_text import comparison_text
from pipeline.run.answers import measured_models


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
    place=100,
)
def compare_models(arguments: Namespace) -> None:
    """Compare the models of a run, and some of other runs."""
    run = load_run(arguments)
    models = measured_models(run)
    for name in (*arguments.models, *([arguments.start] if arguments.start else [])):
        models[name] = models.get(name) or measured(arguments, run, name)
    comparison = compare(run, models, arguments.models, arguments.start)
    if arguments.json:
        print_json(arguments, comparison_json(comparison))
    else:
        print(comparison_text(comparison, arguments.markdown))
