"""The names of vLLM that Braid uses, compared with the source of a vLLM, without importing either.

A GPU takes other paths through vLLM than a CPU: other kernels, other workers. So the names are read
off Braid's engine code and looked up in vLLM's source; both sides are parsed only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ENGINE = ("parallel/engine", "parallel/cpu/vllm_kernels.py")
# The model runner of GPUs, and of CPUs a subclass.
RUNNER = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
# What the attributes of an object on the way from LLMEngine are.
ENGINE_CLASSES = {
    "": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "engine_core": ("vllm.v1.engine.core_client", "InprocClient"),
    "engine_core.engine_core": ("vllm.v1.engine.core", "EngineCore"),
    "engine_core.engine_core.scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "model_executor": ("vllm.v1.executor.abstract", "Executor"),
}
# What no attribute access shows: a text of Braid's engine code, and if it is there, where vLLM's
# source has to have which text.
WRITTEN = {
    "gpu_memory_utilization": (
        ("vllm.v1.worker.utils", "def request_memory"),
        ("vllm.v1.worker.utils", "cache_config.gpu_memory_utilization"),
    ),
    "moe_kernel": (("vllm.model_executor.layers.fused_moe.fused_moe_method_base", "moe_kernel"),),
    "_do_torchao_reload": (
        ("vllm.model_executor.model_loader.reload.layerwise", "_original_do_torchao_reload"),
    ),
    "e_score_correction_bias": (
        ("vllm.model_executor.model_loader.reload.meta", "e_score_correction_bias"),
    ),
    "routed_experts": (("vllm.outputs", "routed_experts"),),
    "sampling_mask": (("vllm.outputs", "sampling_mask"),),
    "weight_versions": (
        ("vllm.outputs", "weight_versions"),
        ("vllm.v1.engine.core", "eco.weight_version = self._weight_version"),
    ),
    "is_failed": (("vllm.v1.executor.multiproc_executor", "is_failed"),),
    "worker_extension_cls": (("vllm.v1.worker.worker_base", "worker_extension_cls"),),
}
# Always: Worker's device and sleep, which refits and colocation rest on.
ALWAYS = (
    ("vllm.v1.worker.gpu_worker", "self.device ="),
    ("vllm.v1.worker.gpu_worker", "def sleep"),
    ("vllm.v1.worker.gpu_worker", "def wake_up"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_TENSORS"),
)


class Source:
    """The parsed source of one vLLM: the directory that holds the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = cache(self._tree)

    def text(self, module: str) -> str:
        """Return a module's source, empty where there is no such module."""
        path = self.root / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text()
        return ""

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def has(self, module: str, name: str) -> bool:
        """Return whether `from module import name` finds something."""
        if self.text(f"{module}.{name}"):
            return True
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if node.name == name:
                    return True
            elif isinstance(node, ast.ImportFrom | ast.Import):
                if any((alias.asname or alias.name) == name for alias in node.names):
                    return True
            elif isinstance(node, ast.Name) and node.id == name:
                if isinstance(node.ctx, ast.Store):
                    return True
            elif isinstance(node, ast.Constant) and node.value == name:
                return True  # a lazy import: vllm.MODULE_ATTRS
        return False

    def bodies(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and its bases, as far as they are vLLM's."""
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield node
                for base in node.bases:
                    if isinstance(base, ast.Name):
                        yield from self.bodies(self._origin(module, base.id), base.id)
                return

    def _origin(self, module: str, name: str) -> str:
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
                return node.module or module
        return module

    def attributes(self, module: str, name: str) -> set[str]:
        """Return the methods, fields and attributes that a class's own source gives it."""
        found: set[str] = set()
        for body in self.bodies(module, name):
            for node in ast.walk(body):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        return found

    def parameters(self, module: str, name: str, method: str) -> set[str]:
        """Return the names of a method's parameters."""
        for body in self.bodies(module, name):
            for node in body.body:
                if isinstance(node, ast.FunctionDef) and node.name == method:
                    arguments = node.args
                    return {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
        return set()


def missing(vllm: Source, braid: Path) -> list[str]:
    """Return what Braid's engine code names and this vLLM lacks, sorted."""
    found: set[str] = set()
    texts = []
    for place in ENGINE:
        path = braid / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            texts.append(file.read_text())
            found |= _missing_of(vllm, ast.parse(texts[-1]))
    whole = "\n".join(texts)
    wanted = [
        *ALWAYS,
        *(each for text, where in WRITTEN.items() if text in whole for each in where),
    ]
    found |= {f"{module}: {text}" for module, text in wanted if text not in vllm.text(module)}
    return sorted(found)


def _missing_of(vllm: Source, tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                if not vllm.has(node.module or "", alias.name):
                    found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "layerwise":
            found |= set() if vllm.has(LAYERWISE, node.attr) else {f"layerwise.{node.attr}"}
    fields = {
        "EngineArgs": vllm.attributes("vllm.engine.arg_utils", "EngineArgs"),
        "SamplingParams": vllm.attributes("vllm.sampling_params", "SamplingParams"),
    }
    for name, keyword in _keywords(tree):
        if keyword not in fields[name]:
            found.add(f"{name}.{keyword}")
    for chain, keywords in _chains(tree):
        found |= _missing_in_chain(vllm, chain, keywords)
    return found


def _keywords(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the fields that are given to EngineArgs and SamplingParams.

    A function that returns EngineArgs' keywords as a dictionary is in a module that defines
    `engine_arguments`: there the keys of all dictionaries inside functions count.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in ("EngineArgs", "SamplingParams"):
            yield from ((name, keyword.arg) for keyword in node.keywords if keyword.arg)
    if any(function.name == "engine_arguments" for function in functions):
        for function in functions:
            for node in ast.walk(function):
                for key in node.keys if isinstance(node, ast.Dict) else ():
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield "EngineArgs", key.value


def _chains(tree: ast.Module) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the attributes read from `self._vllm`, `self.model_runner` or a short name of theirs.

    With each, the keywords of the call that it is part of.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        aliases: dict[str, list[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                chain = _chain(node.value, {})
                aliases |= {node.targets[0].id: chain} if "_vllm" in chain else {}
        called: dict[int, list[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called[id(node.func)] = [k.arg for k in node.keywords if k.arg]
            elif isinstance(node, ast.Attribute) and (chain := _chain(node, aliases)):
                yield chain, called.get(id(node), [])


def _chain(node: ast.expr, aliases: dict[str, list[str]]) -> list[str]:
    """Return the names of `self._vllm.a.b` from `_vllm` on, or nothing."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    if node.id == "self":
        return names if names and names[0] in ("_vllm", "model_runner") else []
    return [*aliases[node.id], *names] if node.id in aliases else []


def _missing_in_chain(vllm: Source, chain: list[str], keywords: list[str]) -> set[str]:
    root, *names = chain
    if not names:
        return set()
    if root == "model_runner":
        module, name = RUNNER
        lacks = names[0] not in vllm.attributes(module, name)
        return {f"{module}.{name}.{names[0]}"} if lacks else set()
    path = ".".join(names[:-1])
    if path not in ENGINE_CLASSES:
        return set()
    module, name = ENGINE_CLASSES[path]
    if names[-1] not in vllm.attributes(module, name):
        return {f"{module}.{name}.{names[-1]}"}
    known = vllm.parameters(module, name, names[-1]) if keywords else set()
    return {f"{module}.{name}.{names[-1]}({k}=)" for k in keywords if k not in known}
