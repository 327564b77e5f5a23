"""`make install` where Python, or an earlier environment, is not what it needs; nothing installs.

The Python and the programs of its environments are stand-ins, which write their arguments to a log.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[2]
PYTHON = """\
import os, pathlib, shutil, sys
version, directory = {version!r}, pathlib.Path(sys.argv[-1])
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1] == "-c":
    print(version)
elif "venv" in sys.argv:
    if "--clear" in sys.argv:
        shutil.rmtree(directory)
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "pip", "uv"):
        if not (link := directory / "bin" / name).is_symlink():
            link.symlink_to(os.environ["STAND_IN"])
elif "--target" in sys.argv:
    os.makedirs(sys.argv[sys.argv.index("--target") + 1])
elif "--require-hashes" in sys.argv:
    sys.exit(int(os.environ["FAIL"]))
"""


class InstallingMachine:
    """A copy of the Makefile and of what it reads, and the stand-ins of Pythons."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "log"
        self.environment = directory / ".venv"
        shutil.copy(REPOSITORY / "Makefile", directory)
        shutil.copytree(REPOSITORY / "requirements", directory / "requirements")
        (directory / "tools").mkdir()
        for name in ("setup.py", "tools/vendor.py"):
            (directory / name).touch()

    def install(self, version: str = "3.12", fail: bool = False) -> CompletedProcess[str]:
        """Run `make install` with a Python of this version."""
        stand_in = self.directory / f"python{version}"
        program = PYTHON.format(version=version, log=str(self.log))
        stand_in.write_text(f"#!{sys.executable} -S\n{program}")
        stand_in.chmod(0o755)
        return self.make(stand_in, {"STAND_IN": str(stand_in), "FAIL": str(int(fail))})

    def make(self, python: Path, variables: dict[str, str]) -> CompletedProcess[str]:
        self.log.write_text("")
        command = ["make", "install", f"PYTHON={python}"]
        env = {"PATH": "/usr/bin:/bin", **variables}
        return subprocess.run(
            command, cwd=self.directory, env=env, capture_output=True, text=True, check=False
        )

    def environments(self) -> list[str]:
        """Return the calls of `venv` of the last `make`."""
        return [line for line in self.log.read_text().splitlines() if "venv" in line.split()]


@pytest.fixture
def machine(tmp_path: Path) -> InstallingMachine:
    return InstallingMachine(tmp_path)


@pytest.mark.parametrize("minor", range(9, 17))
def test_a_python_that_the_package_does_not_admit_ends_in_one_message(
    minor: int, machine: InstallingMachine
) -> None:
    [requires] = [
        line.split('"')[1]
        for line in (REPOSITORY / "setup.py").read_text().splitlines()
        if "python_requires" in line
    ]
    ended = machine.install(f"3.{minor}")
    if f"3.{minor}.1" in SpecifierSet(requires):
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode == 2
    message, _ = ended.stderr.splitlines()  # the second is make's own
    assert message.startswith("make: Braid needs Python 3.12 or 3.13, and ")
    assert message.endswith(
        f"is 3.{minor}; install one and name it: make install PYTHON=python3.13"
    )
    assert ended.stdout == "" and not machine.environments()


def test_a_python_that_is_missing_ends_in_the_same_message(machine: InstallingMachine) -> None:
    ended = machine.make(Path("python3.12-of-nobody"), {})
    assert "and python3.12-of-nobody is missing; install one" in ended.stderr
    assert ended.stdout == "" and not machine.environment.exists()


def test_the_environment_of_another_python_is_not_filled(machine: InstallingMachine) -> None:
    machine.install("3.12")
    (machine.directory / "setup.py").touch()
    ended = machine.install("3.13")
    assert ended.returncode == 2 and not machine.environments()
    assert "make: .venv has Python 3.12, and " in ended.stderr
    assert "is 3.13; remove it first: rm -rf .venv\n" in ended.stderr
    (machine.directory / "python3.12").unlink()  # as an upgrade of the system does
    assert "make: .venv has Python that is gone, and " in machine.install("3.13").stderr


def test_an_environment_whose_installation_was_cut_off_is_cleared(
    machine: InstallingMachine,
) -> None:
    assert machine.install(fail=True).returncode == 2
    (half := machine.environment / "half").touch()
    ended = machine.install()
    assert ended.returncode == 0, ended.stderr
    assert "the last installation into .venv was cut off; clearing it\n" in ended.stdout
    assert machine.environments() == ["-m venv --clear .venv"] and not half.exists()
    (machine.directory / "setup.py").touch()
    assert machine.install().returncode == 0
    assert machine.environments() == ["-m venv .venv"]
