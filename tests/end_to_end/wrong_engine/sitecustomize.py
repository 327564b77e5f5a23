"""On PYTHONPATH: engines change their weights after every sync, which no setting makes them do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CHANGED = 1.5  # times the weights of norms


class _AfterImport(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "parallel.engine.refit_extension":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None and found.loader is not None
        execute = found.loader.exec_module

        def execute_and_break(module: ModuleType) -> None:
            execute(module)
            _break(module.RefitExtension)

        found.loader.exec_module = execute_and_break  # type: ignore[method-assign]
        return found


def _break(extension: Any) -> None:
    refit = extension.refit

    def wrong(self: Any, message: bytes) -> bytes:
        answer: bytes = refit(self, message)
        for name, weight in self.model_runner.model.named_parameters():
            if "norm" in name:
                weight.data.mul_(CHANGED)
        return answer

    extension.refit = wrong


sys.meta_path.insert(0, _AfterImport())
