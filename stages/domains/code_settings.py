"""What a person may set about the reward for programs. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import Positive, Settings

Seconds = Annotated[float, Field(gt=0, le=600)]


class CodeRewardSettings(Settings):
    """What a program may use, and how the tests it passes become a reward.

    Each pair of input and output is a run of its own under these limits; asserts share one run.
    """

    wall_seconds: Seconds = Field(default=10.0, description="of one run; what goes on is killed")
    cpu_seconds: Seconds = Field(default=10.0, description="of all processes of one run together")
    memory_mebibytes: Annotated[int, Field(ge=64)] = Field(
        default=512, description="of the address space of a process, and in use by all of a run"
    )
    processes: Positive = Field(default=16, description="and threads, of one run at a time")
    output_bytes: Positive = Field(
        default=1 << 20, description="of one run's output, and as many of its error output"
    )
    credit: Literal["fraction", "all"] = Field(
        default="fraction", description="fraction: of the tests passed; all: 1 for all, else 0"
    )
