"""TransformerEngine and apex absent, broken and present, with and without CUDA.

CUDA is forced: a process says that it has it, imports megatron-core as a rank would, and computes
on CPU tensors what does not depend on the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel.machine import device
from stages.main import warn_of_fallbacks
from tests.runs import REPOSITORY

# Prints what Braid decided and what megatron-core sees.
PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
from parallel.machine import device
from parallel.cpu import megatron
megatron.activate()
from megatron.core import optimizer
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.moe_utils import router_gating_linear
hidden = torch.ones(2, 4, requires_grad=True)
logits = router_gating_linear(hidden, torch.ones(3, 4), None, torch.float32)
logits.sum().backward()
print(json.dumps({
    "layers": device.layer_specs(),
    "seen": [extension.HAVE_TE, multi_latent_attention.HAVE_TE],
    "logits": logits.flatten().tolist(),
    "gradient": hidden.grad.flatten().tolist(),
    "optimizer": optimizer.Adam.__module__,
    "apex": [device.has_apex(), gpt_layer_specs.HAVE_APEX],
    "fallbacks": device.fallbacks(),
}))
"""
LAYERS_ONLY = """
import sys, torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
from parallel.machine import device
print(device.layer_specs(), device.has_apex(), device.fallbacks())
"""
# Runs programs in forks, which share the imports that depend neither on CUDA nor on the packages
# that a test plants: of torch and transformers, most of what megatron-core's imports cost.
END = "the end"
FORKS = f"""
import json, os, sys
import torch, torch._dynamo, torch.distributed.checkpoint, transformers, wandb
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
assert not [name for name in sys.modules if name.split(".")[0] in ("apex", "transformer_engine")]
for line in sys.stdin:
    program, kind, planted = json.loads(line)
    if (child := os.fork()) == 0:
        sys.path.insert(0, planted)
        sys.argv = ["-c", kind]
        exec(program, {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("{END}", os.waitstatus_to_exitcode(status), sep="\\n", flush=True)
"""
NO_CORE = "raise OSError('libcublas.so.12: cannot open shared object file')"
OTHER_TORCH = "raise RuntimeError('built for another torch')"
NO_EXTENSION = "raise FileNotFoundError('Could not find shared object file')"
PYRAMID = "raise RuntimeError('a toolkit for web logins was imported')"


def plant(directory: Path, modules: dict[str, str]) -> None:
    """Write packages and modules, by their paths."""
    for name, text in modules.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


Ask = Callable[[str, str, Path], str]


@pytest.fixture(scope="module")
def output() -> Iterator[Ask]:
    """`output(program, kind, planted)`: the last line of a program that finds planted packages."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin and server.stdout
        read, write = server.stdout, server.stdin

        def ask(program: str, kind: str, planted: Path) -> str:
            print(json.dumps([program, kind, str(planted)]), file=write, flush=True)
            lines = list(iter(lambda: read.readline().rstrip(), END))
            assert read.readline() == "0\n", lines  # the exit status; its error is on our stderr
            return lines[-1]

        yield ask
        write.close()


def rank(output: Ask, kind: str, planted: Path) -> dict[str, Any]:
    return json.loads(output(PROGRAM, kind, planted))


WORKING = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/fp8.py": "FP8GlobalStateManager = fp8_autocast = object",
    "transformer_engine/pytorch/optimizers.py": "FusedAdam = FusedSGD = object",
}
NVIDIA_APEX = {
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "",
    "amp_C.py": "",
    "fused_weight_gradient_mlp_cuda.py": "",
}


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ({"apex/__init__.py": PYRAMID}, "TransformerEngine: not installed;"),
        ({"transformer_engine/__init__.py": NO_CORE}, "TransformerEngine: OSError: libcublas"),
        (
            {
                "transformer_engine/__init__.py": "",
                "transformer_engine/pytorch/__init__.py": NO_EXTENSION,
            },
            "TransformerEngine: FileNotFoundError: Could not find",
        ),
        ({"transformer_engine/__init__.py": OTHER_TORCH}, "TransformerEngine: RuntimeError: built"),
    ],
    ids=["absent, and the registry's apex", "no core library", "no extension", "another torch"],
)
def test_cuda_without_transformer_engine_falls_back_by_name(
    planted: dict[str, str], reason: str, output: Ask, tmp_path: Path
) -> None:
    plant(tmp_path, planted)
    found = rank(output, "cuda", tmp_path)
    assert found["layers"] == "local" and found["seen"] == [False, False]
    assert found["logits"] == [4.0] * 6 and found["gradient"] == [3.0] * 8
    assert found["optimizer"] == "parallel.cpu.megatron"
    assert found["apex"] == [False, False]
    notice, *others = found["fallbacks"]
    assert notice.startswith(reason) and "`make install-gpu`" in notice
    namesake = "apex: not NVIDIA's package, and not used; run `pip uninstall apex`"
    assert others == ([namesake] if "apex/__init__.py" in planted else [])


def test_without_cuda_what_needs_it_is_hidden_from_megatron_core(
    output: Ask, tmp_path: Path
) -> None:
    plant(tmp_path, {**WORKING, "apex/__init__.py": PYRAMID})
    found = rank(output, "cpu", tmp_path)
    assert found["layers"] == "local" and found["seen"] == [False, False]
    assert found["logits"] == [4.0] * 6
    assert found["optimizer"] == "parallel.cpu.megatron"
    assert found["apex"] == [False, False] and found["fallbacks"] == []


@pytest.mark.parametrize(
    ("planted", "with_cuda"),
    [
        (WORKING, "transformer_engine False []"),
        ({**WORKING, **NVIDIA_APEX}, "transformer_engine True []"),
        (
            {**WORKING, "apex/multi_tensor_apply/__init__.py": "", "apex/__init__.py": PYRAMID},
            "transformer_engine False ['apex: built without its CUDA extensions and not used; "
            "rebuild it with --cuda_ext']",
        ),
    ],
    ids=["working", "with NVIDIA's apex", "with an apex of Python alone"],
)
def test_what_works_is_used_with_cuda(
    planted: dict[str, str], with_cuda: str, output: Ask, tmp_path: Path
) -> None:
    plant(tmp_path, planted)
    assert output(LAYERS_ONLY, "cuda", tmp_path) == with_cuda
    assert output(LAYERS_ONLY, "cpu", tmp_path) == "local False []"


def test_torch_finds_the_libraries_of_transformer_engine_before_it_is_imported(
    tmp_path: Path,
) -> None:
    """Version 2.20's are linked with NCCL, in a directory where torch alone looks."""
    linked = "import sys\nif 'torch' not in sys.modules: raise OSError('libnccl.so.2')"
    plant(tmp_path, {**WORKING, "transformer_engine/__init__.py": linked})
    program = "from parallel.machine import cuda_packages as p; print(p.transformer_engine_error())"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "None\n"


def test_a_stage_says_all_of_it_in_one_notice(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "fallbacks", lambda: ["TransformerEngine: not installed", "apex"])
    warn_of_fallbacks()
    notice = "braid-notice: TransformerEngine: not installed; apex\n"
    assert capfd.readouterr().err == notice
    monkeypatch.setattr(device, "fallbacks", lambda: [])
    warn_of_fallbacks()
    assert capfd.readouterr().err == ""
