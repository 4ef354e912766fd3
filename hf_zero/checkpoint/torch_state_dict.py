"""``torch.distributed.checkpoint.state_dict`` on the model of an engine: its functions are
replaced by those that give and take the elements which each rank owns (``engine_tensors.py``).

Weights of ``full_state_dict`` are as ``state_dict()`` of the model has them, and submodules take
torch's own way over whole tensors.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.checkpoint.engine_tensors import EngineTensors, nested_optimizer_state
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, logger
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.flat_buffer import engine_of
from hf_zero.zero.training_engine import TrainingEngine

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TARGET = "torch.distributed.checkpoint.state_dict"


def _states_of(
    model: nn.Module, info: Any, optimizers: Sequence[Any] | None = None, loads: bool = False
) -> EngineTensors | None:
    """Return the state of the engine of ``model``; None if torch's own way is to be taken: without
    an engine, for submodules, and for a model that is a part of an engine's or has one as a part.
    """
    engine = engine_of(model.parameters(), TrainingEngine)
    if engine is None or info.submodule_prefixes:
        return None
    whole = {*map(id, model.parameters())} == {*map(id, engine.module.parameters())}
    if optimizers is None:
        return EngineTensors(engine, info.cpu_offload, loads) if whole else None
    if not whole:
        raise CheckpointError(
            "the state of an optimizer was asked for with a model that is a part of the engine's, "
            "or has it as a part; pass engine.module"
        )
    groups = engine.optimizer.param_groups
    if any(optimizer.param_groups is not groups for optimizer in optimizers):
        raise CheckpointError(
            "the optimizer is not that of the engine that has the model; pass engine.optimizer"
        )
    return EngineTensors(engine, info.cpu_offload, loads)


def _replacements(torch_module: ModuleType) -> dict[str, Callable[..., object]]:
    """Return replacements for functions of ``torch_module``, which they call for other models."""
    get, put = torch_module._get_model_state_dict, torch_module._load_model_state_dict
    get_optim, put_optim = torch_module._get_optim_state_dict, torch_module._load_optim_state_dict

    @wraps(get)
    def _get_model_state_dict(model: torch.nn.Module, info: Any) -> Any:
        states = _states_of(model, info) if info.handle_model and not info.full_state_dict else None
        if states is None:
            return get(model, info)
        return states.weights(info.ignore_frozen_params)

    @wraps(put)
    def _load_model_state_dict(model: torch.nn.Module, state_dict: Any, info: Any) -> Any:
        # with set_state_dict only rank 0 knows whether there are weights
        takes_part = info.broadcast_from_rank0 or (info.handle_model and state_dict)
        states = _states_of(model, info, loads=True) if takes_part else None
        if states is None:
            return put(model, state_dict, info)
        if info.broadcast_from_rank0 and not (state_dict := states.from_rank0(state_dict)):
            return nn.modules.module._IncompatibleKeys([], [])
        return states.load_weights(state_dict, info.strict)

    @wraps(get_optim)
    def _get_optim_state_dict(model: torch.nn.Module, optimizers: Any, info: Any) -> object:
        states = _states_of(model, info, optimizers) if info.handle_optim else None
        if states is None:
            return get_optim(model, optimizers, info)
        state = states.optimizer(info.full_state_dict)
        if info.flatten_optimizer_state_dict:
            state = torch_module._flatten_optim_state_dict(state)
        return torch_module._maybe_full_or_cpu_state_dict(state, info)

    @wraps(put_optim)
    def _load_optim_state_dict(
        model: torch.nn.Module, optimizers: Any, state_dict: Any, info: Any
    ) -> None:
        takes_part = info.broadcast_from_rank0 or info.handle_optim
        states = _states_of(model, info, optimizers, True) if takes_part else None
        if states is None:
            put_optim(model, optimizers, state_dict, info)
            return
        if info.broadcast_from_rank0:
            state_dict = states.from_rank0(state_dict)
        if state_dict:
            nested = "state" in state_dict or "param_groups" in state_dict
            state_dict = state_dict if nested else nested_optimizer_state(state_dict, states)
            states.load_optimizer(state_dict, info.strict)
        return None

    of_model = _get_model_state_dict, _load_model_state_dict
    of_optimizer = _get_optim_state_dict, _load_optim_state_dict
    return {function.__name__: function for function in (*of_model, *of_optimizer)}


def _one_box_a_file(write: Callable[..., object]) -> Callable[..., object]:
    """Wraps ``HuggingFaceStorageWriter.write_data``, which keeps the last of several boxes of a
    tensor in one file.
    """

    @wraps(write)
    def write_data(self: Any, plan: Any, planner: object) -> object:
        boxes = Counter(item.index.fqn for item in plan.items)
        if several := [name for name, count in boxes.items() if count > 1]:
            raise CheckpointError(
                f"this rank has several boxes of {listed(several, 3)}, and a file of "
                "HuggingFaceStorageWriter has room for one of each tensor; call "
                "engine.save_16bit_model, or convert a checkpoint with hf-zero convert-checkpoint"
            )
        return write(self, plan, planner)

    return write_data


def _patch(torch_module: Any) -> None:
    try:
        replacements = _replacements(torch_module)
        writer = sys.modules[torch_module.__package__].HuggingFaceStorageWriter
        write = _one_box_a_file(writer.write_data)
    except AttributeError as error:  # the import is the script's, which may use no engine
        logger.warning(
            "%s of torch %s is not as hf-zero knows it (%s): its functions do not know the shards "
            "of an engine; save and load with engine.save_checkpoint and load_checkpoint",
            TARGET,
            torch.__version__,
            error,
        )
        return
    vars(torch_module).update(replacements)
    writer.write_data = write


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces the functions when torch's module is imported: it takes long, and few need it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        # importlib passes over a finder without the method, too
        finds = filter(None, (getattr(finder, "find_spec", None) for finder in others))
        specs = (find(fullname, path, target) for find in finds)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:  # a spec may be found without an import
                    sys.meta_path.remove(self)
                _patch(module)

            spec.loader.exec_module = exec_module
        return spec


_installed: list[bool] = []


def install() -> None:
    """Have torch's functions give and take parts for models of engines, once in a process."""
    if _installed:
        return
    _installed.append(True)
    module = sys.modules.get(TARGET)
    if module is not None:
        _patch(module)
    else:
        sys.meta_path.insert(0, _AfterImport())


class TorchStateDicts(Feature):
    """The functions of ``torch.distributed.checkpoint.state_dict``, for engines' models, too."""

    def __init__(self, settings: ZeroConfig):
        pass

    def apply(self, engine: TrainingEngine) -> None:
        install()
