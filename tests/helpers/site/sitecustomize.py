"""With this folder on PYTHONPATH a process shards all parameters at stage 3, unless its
configuration asks for others: the models that tests train are small, and would stay whole.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _Sharded(MetaPathFinder):
    """Sets the default of ``hf_zero.zero.layout.wrap`` once that module is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "hf_zero.zero.layout.wrap":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.PERSISTENCE = 0

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Sharded())
