"""`braid` with stages and engines that compute nothing, for jobs that tests kill."""

import sys
from pathlib import Path

from pipeline import cli
from pipeline.commands.support import starting
from pipeline.launch.placement import Programs

HERE = Path(__file__).parent
ENGINE = HERE.parent / "pipeline" / "fake_engine.py"

if __name__ == "__main__":
    starting.PROGRAMS = Programs(
        stage=lambda job: [sys.executable, "-S", str(HERE / "slow_stage.py"), str(job)],
        engine=lambda job: [sys.executable, "-S", str(ENGINE), str(job), "wait"],
    )
    sys.exit(cli.main())
