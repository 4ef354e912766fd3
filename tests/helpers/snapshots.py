"""Snapshots of everything that ``hf_zero.initialize`` may change, and their differences: a refused
call leaves none.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hf_zero.distributed import parallel_groups
from hf_zero.logging import logger
from hf_zero.ops import native

_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (str, int, float, bool, type(None), torch.dtype)


class Snapshot:
    """Facts by name of ``objects`` (modules, optimizers, schedulers, loaders, by their names), of
    the process and of the files below ``folder``. ``whole_process``: also of its threads,
    generators and registries, which ranks that are threads share.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        folder: Path | None = None,
        whole_process: bool = True,
    ):
        self._kept: list[Any] = threading.enumerate()  # whose ids are facts
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.facts: dict[str, Any] = dict(self._of_process(whole_process))
        for name, held in objects.items():
            if isinstance(held, nn.Module):
                self.facts.update(self._of_model(name, held))
            elif isinstance(held, torch.optim.Optimizer):
                self.facts.update(self._of_optimizer(name, held))
            elif held is not None:
                self.facts.update(self._of_attributes(name, held))
        files = [] if folder is None else sorted(folder.rglob("*"))
        self.facts["files"] = [
            (str(path), None if path.is_dir() else path.stat().st_mtime_ns) for path in files
        ]

    def changes_until(self, later: Snapshot) -> list[str]:
        """Return what has changed until ``later``, one line each."""
        began = self.facts.get("threads", {})
        for thread in began.keys() - later.facts.get("threads", {}).keys():
            del began[thread]  # of an engine of an earlier test, which has ended
        found = [
            f"{name}: {self.facts.get(name, 'nothing')} became {later.facts.get(name, 'nothing')}"
            for name in {**self.facts, **later.facts}
            if self.facts.get(name, found_nothing) != later.facts.get(name, found_nothing)
        ]
        for name, (_, values) in self._tensors.items():
            now = later._tensors.get(name)
            if now is not None and not torch.equal(values, now[1]):
                found.append(f"{name}: other values")
        return found

    def _id(self, value: Any) -> Any:
        """Return a fact that identifies ``value``."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [self._id(each) for each in value]
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, len(value)
        if hasattr(value, "__func__"):  # bound methods are made anew
            return self._id(value.__func__), self._id(value.__self__)
        self._kept.append(value)
        return type(value).__name__, id(value)

    def _of_attributes(self, name: str, held: Any) -> Iterator[tuple[str, Any]]:
        yield f"{name} class", self._id(type(held))
        for key, value in vars(held).items():
            if key in _TABLES:
                continue
            if isinstance(value, dict):
                entries = [(str(k), self._id(v)) for k, v in value.items()]
                yield f"{name}.{key}", entries
            else:
                yield f"{name}.{key}", self._id(value)

    def _of_model(self, name: str, model: nn.Module) -> Iterator[tuple[str, Any]]:
        configs = {}
        for path, module in model.named_modules(remove_duplicate=False):
            where = f"{name}:{path}"
            yield from self._of_attributes(where, module)
            for table in _TABLES:
                yield f"{where}.{table}", [(k, id(v)) for k, v in getattr(module, table).items()]
            if hasattr(getattr(module, "config", None), "to_dict"):
                configs[id(module.config)] = where, module.config
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield from self._of_tensor(f"{where}.{key}", tensor)
        for where, config in configs.values():
            yield f"{where}.config", config.to_dict()
            yield f"{where} attention", config._attn_implementation

    def _of_tensor(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self._kept.append(tensor)
        yield f"{name} class", (id(tensor), type(tensor).__name__)
        yield f"{name} attributes", [(k, self._id(v)) for k, v in vars(tensor).items()]
        with torch._C.DisableTorchFunctionSubclass():
            yield f"{name} memory", None if tensor.is_meta else tensor.data_ptr()
            kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
            yield f"{name} kind", (*kind, tensor.requires_grad)
            yield f"{name} gradient", self._id(tensor.grad)
            if not tensor.is_meta:
                self._tensors[name] = tensor, tensor.detach().clone()

    def _of_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, Any]]:
        for fact, value in self._of_attributes(name, optimizer):
            if not fact.endswith(("state", "param_groups")):
                yield fact, value
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                yield f"{name} group {number} {key}", self._id(value)
        yield f"{name} groups", [id(group) for group in optimizer.param_groups]
        yield f"{name} state", [(id(k), self._id(dict(v))) for k, v in optimizer.state.items()]
        yield f"{name} state class", type(optimizer.state)

    def _of_process(self, whole: bool) -> Iterator[tuple[str, Any]]:
        yield "order of attention kernels", list(torch._C._get_sdp_priority_order())
        yield "parallel groups", [each.dims for each in parallel_groups._made()]
        yield "process groups", len(dist.distributed_c10d._world.pg_map) if started() else None
        yield "level of the log", logger.level
        if not whole:
            return
        yield "attention functions", sorted(AttentionInterface._global_mapping)
        yield "mask functions", sorted(AttentionMaskInterface._global_mapping)
        yield "random numbers of torch", torch.get_rng_state().tolist()
        yield "random numbers of Python", random.getstate()
        yield "random numbers of numpy", str(numpy.random.get_state())
        yield "threads", {id(thread): thread.name for thread in threading.enumerate()}
        yield "native threads", native.threads() if native.available() else 0
        yield "environment", dict(os.environ)


class Nothing:
    """The absence of a fact."""


found_nothing = Nothing()


def started() -> bool:
    return dist.is_available() and dist.is_initialized()


def snapshot(objects: Mapping[str, Any], *args: Any, **kwargs: Any) -> Snapshot:
    """Return a :class:`Snapshot` after what is no longer referenced has ended."""
    gc.collect()
    return Snapshot(objects, *args, **kwargs)
