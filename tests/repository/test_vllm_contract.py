"""Every name of vLLM that the engine uses exists, also on the paths that only a GPU takes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.engine.vllm_contract import ENGINE_CLASSES, RUNNER, WRITTEN, Source, missing
from tests.runs import REPOSITORY

INSTALLED = Source(Path(sysconfig.get_path("purelib")))
CORE = """
from vllm import EngineArgs, SamplingParams
class Core:
    def __init__(self):
        EngineArgs(model="m"{argument})
        SamplingParams(seed=0{sampled})
    def refit(self):
        self._vllm.reset_prefix_cache(reset_running_requests=True{keyword})
        core = self._vllm.engine_core.engine_core
        core.scheduler.requests{further}
    def progress(self):
        self.model_runner.{runner}
"""
USED = {
    "argument": "",
    "sampled": "",
    "keyword": "",
    "further": "",
    "runner": "model",
}


def write(directory: Path, text: str, name: str = "core.py") -> Path:
    """Write a Braid whose engine is this text."""
    engine = directory / "parallel" / "engine"
    engine.mkdir(parents=True, exist_ok=True)
    (engine / name).write_text(text)
    kernels = directory / "parallel" / "cpu" / "vllm_kernels.py"
    kernels.parent.mkdir(exist_ok=True)
    kernels.write_text("")
    return directory


def test_the_installed_vllm_has_every_name_on_both_devices() -> None:
    assert missing(INSTALLED, REPOSITORY) == []


def test_the_classes_that_names_are_looked_up_in_exist() -> None:
    for module, name in (*ENGINE_CLASSES.values(), RUNNER):
        assert INSTALLED.attributes(module, name), (module, name)


def test_an_engine_of_known_names_lacks_nothing(tmp_path: Path) -> None:
    assert missing(INSTALLED, write(tmp_path, CORE.format(**USED))) == []


@pytest.mark.parametrize(
    ("changed", "lacks"),
    [
        ({"argument": ", nodes=1"}, "EngineArgs.nodes"),
        ({"sampled": ", grammar=1"}, "SamplingParams.grammar"),
        ({"keyword": ", soon=1"}, "vllm.v1.engine.llm_engine.LLMEngine.reset_prefix_cache(soon=)"),
        ({"further": "; core.tickets"}, "vllm.v1.engine.core.EngineCore.tickets"),
        (
            {"further": "; core.scheduler.queue"},
            "vllm.v1.core.sched.scheduler.Scheduler.queue",
        ),
        (
            {"further": "\n        from vllm.inputs import token_prompts"},
            "vllm.inputs.token_prompts",
        ),
        ({"further": "; layerwise.reload_all()"}, "layerwise.reload_all"),
        # The first runner had a table of requests.
        ({"runner": "requests"}, "vllm.v1.worker.gpu.model_runner.GPUModelRunner.requests"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_name_that_vllm_lacks_is_found(
    changed: dict[str, str], lacks: str, tmp_path: Path
) -> None:
    assert missing(INSTALLED, write(tmp_path, CORE.format(**USED | changed))) == [lacks]


def test_arguments_in_a_dictionary_count_too(tmp_path: Path) -> None:
    text = 'def engine_arguments():\n    return {"model": 1, "nodes": 2}\n'
    assert missing(INSTALLED, write(tmp_path, text, "arguments.py")) == ["EngineArgs.nodes"]


def test_what_only_a_text_shows_is_compared_with_the_source(tmp_path: Path) -> None:
    empty = tmp_path / "vllm" / "__init__.py"
    empty.parent.mkdir()
    empty.touch()
    braid = write(tmp_path, "\n".join(f"# {text}" for text in WRITTEN))
    found = missing(Source(tmp_path), braid)
    for where in WRITTEN.values():
        assert {f"{module}: {text}" for module, text in where} <= set(found)
