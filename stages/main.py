"""One rank of a stage: `python -m stages.main JOB.json`, started by a launcher, torchrun or srun.

Exits 0 when the stage is done, 143 when a signal stopped it and it saved a checkpoint, and 1 after
an error: one last line `braid-error: ...` for errors that the user can fix, else a traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

from parallel.errors import UserError, report_error, report_notice
from parallel.files import write_atomically
from parallel.machine.capabilities import rank_environment
from parallel.machine.determinism import set_up_rank
from parallel.settings import ModelSettings
from parallel.timeline import heartbeat, open_timeline, phase
from stages.kinds import MODULES
from stages.kinds.kind import KINDS
from stages.settings import StageJob, check_turns


def main() -> None:
    """Run the job named by argv[1] on this rank."""
    job = StageJob.model_validate_json(Path(sys.argv[1]).read_text())
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    with heartbeat(job.files.heartbeat(job.attempt, int(rank))):
        run_rank(job)


def run_rank(job: StageJob) -> None:
    """Join the other ranks and run the job; an error of the job ends this process."""
    warnings.filterwarnings("ignore", module=r"megatron|mbridge|torch")
    set_up_rank(job.settings.deterministic)
    for name, value in rank_environment(job.settings.layout).items():
        os.environ.setdefault(name, value)
    import torch

    from parallel.distributed import process_groups
    from parallel.engine.client import longest_wait

    torch.use_deterministic_algorithms(job.settings.deterministic)
    settings = job.settings
    with process_groups(settings.layout, settings.seed, longest_wait(settings.engine)):
        open_timeline(job.files.timeline(job.attempt, torch.distributed.get_rank()))
        kind = None if job.kind == "preview" else KINDS[job.kind]
        if kind and kind.trains and torch.distributed.get_rank() == 0:
            warn_of_fallbacks()
            if not kind.samples:
                warn_of_engines(job.settings.model)
        try:
            empty_devices(job)
            with phase(job.kind):
                importlib.import_module(MODULES[job.kind]).run(job)
            record_memory(job)
        except (Exception, SystemExit) as error:
            _leave(error)


def warn_of_fallbacks() -> None:
    """Print one notice if CUDA packages are missing or do not work here."""
    from parallel.machine.device import fallbacks

    if reasons := fallbacks():
        report_notice("; ".join(reasons))


def warn_of_engines(model: ModelSettings) -> None:
    """Print a notice if stages that sample cannot run this model on this device.

    Only a notice: the user may want no later stage.
    """
    from parallel.engine.platform import unsupported
    from parallel.machine.device import device

    if device().type == "cpu" and (why := unsupported(model)):
        report_notice(f"stages that sample will fail on a CPU: {why}")


def empty_devices(job: StageJob) -> None:
    """Have engines that share the devices leave them, before the stage builds its models.

    Collective. Raises UserError for settings with which engines could not leave later.
    """
    from parallel.distributed import on_main
    from parallel.engine.fleet import put_to_sleep
    from parallel.machine.device import device

    engine = job.settings.engine
    if not engine.sleeps_on(device().type):
        return
    if job.kind != "preview" and KINDS[job.kind].samples and KINDS[job.kind].trains:
        check_turns(job.settings)
    addresses = job.engine_addresses or job.idle_engines
    on_main(lambda: put_to_sleep(addresses, engine, needed=bool(job.engine_addresses)))


def record_memory(job: StageJob) -> None:
    """Write the peak memory of the attempt's largest rank beside the attempt's logs. Collective."""
    from parallel.distributed import is_main, max_over_ranks
    from parallel.machine.device import peak_memory

    peaks = {name: int(max_over_ranks(value)) for name, value in peak_memory().items()}
    if is_main():
        write_atomically(job.files.memory(job.attempt), json.dumps(peaks) + "\n")


def _leave(error: BaseException) -> None:
    """Report an error and exit at once, without Python's and torch's shutdown.

    Another rank may hang in a collective that this one never joins.
    """
    from stages.loop import StageStopped

    status = 143 if isinstance(error, StageStopped) else 1
    try:
        if isinstance(error, StageStopped):
            print(error, flush=True)
        elif isinstance(error, UserError | OSError):
            report_error(str(error))
        else:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
    finally:  # the log's disk may be full
        os._exit(status)


if __name__ == "__main__":
    main()
