"""`braid run` with fake stages, as a process of its own that a test can kill.

python fake_launcher.py RUN_DIRECTORY CONFIG '{"STAGE": {"RANK": ACTION}}' ENGINE_ACTION
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from parallel.errors import ERROR_MARK, UserError
from pipeline.config.validate import load
from pipeline.launch.placement import Programs
from pipeline.launch.runner import run_stages
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run

HERE = Path(__file__).parent


def launch(
    run: RunDirectory, config: Path, actions: dict[str, dict[str, str]]
) -> subprocess.Popen[str]:
    """Start `braid run` with fake stages in a process; its errors go to a pipe."""
    command = [sys.executable, __file__, str(run.path), str(config), json.dumps(actions), "wait"]
    return subprocess.Popen(
        command,
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def fake_programs(actions: dict[str, dict[str, str]], engine: str = "wait") -> Programs:
    """Return the command lines of the fakes; actions are by stage and rank."""
    return Programs(
        stage=lambda job: [
            sys.executable,
            "-S",
            str(HERE / "fake_stage.py"),
            str(job),
            json.dumps(actions),
            ERROR_MARK,
        ],
        engine=lambda job: [sys.executable, "-S", str(HERE / "fake_engine.py"), str(job), engine],
    )


def main() -> int:
    directory, config, actions, engine = sys.argv[1:]
    run = RunDirectory(Path(directory))
    try:
        with run.lock():
            programs = fake_programs(json.loads(actions), engine)
            run_stages(Run(run.path, load(Path(config))), Console(), programs)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
