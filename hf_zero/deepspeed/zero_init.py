"""``deepspeed.zero.Init``: construction of models directly in shards under ZeRO-3, without memory
beyond a first part.

A large parameter is only a record of how to compute its values; an engine that only holds the model
then makes them one by one. For models of transformers and any others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.zero3_context import (
    active_config,
    current_loading,
    forced_config,
)
from hf_zero.distributed import init, process_group
from hf_zero.loading import Building, make_pending, make_real
from hf_zero.loading.shard_only import engines_of, hold
from hf_zero.zero.layout.parameter import ZeroParamStatus, owner_of

# Bytes of a model that are built in memory before it is sharded: that costs little, and a small
# model has exactly the numbers that a single process draws. The numbers of each postponed parameter
# come from its own generator, equal for any number of ranks.
WHOLE_BYTES = 256 << 20


_numbers = count()


def give_facts(parameters: Iterable[Any]) -> None:
    """Give parameters that are whole on their one rank the attributes of sharded ones: ``ds_id``,
    ``ds_status``, ``ds_shape``, ``ds_numel`` and ``ds_persist``.
    """
    for parameter in parameters:
        if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "ds_id"):
            parameter.__dict__.update(
                ds_id=next(_numbers),
                ds_status=ZeroParamStatus.AVAILABLE,
                ds_shape=parameter.shape,
                ds_numel=parameter.numel(),
                ds_persist=True,
            )


def hold_roots(roots: Iterable[nn.Module], config: ZeroConfig) -> None:
    """Shard modules that were made inside a :class:`Building` (collective)."""
    for root in roots:
        make_real(root)
        make_pending(root)
        hold(root, config)


def _is_new(parameter: Any) -> bool:
    """Whether no engine has shards of ``parameter``."""
    return isinstance(parameter, nn.Parameter) and owner_of(parameter) is None


def _trains(module: nn.Module) -> bool:
    """Whether an engine trains a part of ``module``: parameters added to it stay as they are."""
    return any(engine.bound is not None for engine in engines_of(module))


class Init:
    """``deepspeed.zero.Init``: a context around the construction of models, with all of DeepSpeed's
    arguments. Collective.

    At stage 3 and on several ranks, models made inside are sharded: those of ``from_pretrained``
    are read in shards, others have no memory beyond their first 256 MB; for these every rank takes
    rank 0's values, and keeps its shards. They can be read, written (see GatheredParameters) and
    called before ``initialize`` takes them over. ``module``, an existing model, is sharded at once.
    Parameters keep the dtype that the code asks for. Without ``config_dict_or_path`` or ``config``,
    the configuration alive in transformers is used, else plain stage 3. On one rank parameters stay
    whole, and have the attributes of :func:`give_facts`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        self._stack = ExitStack()
        self._building: Building | None = None
        if enabled:
            given = config_dict_or_path if config_dict_or_path is not None else config
            alive = active_config() if "transformers" in sys.modules else None
            self._config = (
                ZeroConfig.coerce(given, allow_auto=True, foreign=True)
                if given is not None
                else alive or ZeroConfig(stage=3)
            )
            if module is not None and self._shards():
                hold(module, self._config)
            elif module is not None and self._config.stage == 3:
                give_facts(module.parameters())

    def _shards(self) -> bool:
        init.init_from_config(self._config)
        return self._config.stage == 3 and process_group.get_world_size() > 1

    def __enter__(self) -> Init:
        if self.enabled and current_loading.get() is None and self._shards():
            token = forced_config.set(self._config)
            self._stack.callback(forced_config.reset, token)
            self._building = self._stack.enter_context(
                Building(WHOLE_BYTES, lambda: current_loading.get() is not None)
            )
        elif self.enabled and self._config.stage == 3 and process_group.get_world_size() == 1:
            hook = register_module_parameter_registration_hook(
                lambda module, name, parameter: give_facts([parameter])
            )
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        building, self._building = self._building, None
        if building is not None and exc[0] is None:
            whole = [root for root in building.outermost(_is_new) if not _trains(root)]
            hold_roots(dict.fromkeys([*building.roots, *whole]), self._config)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accept that ``module`` uses ``parameter``, which another module owns.

    No action is needed: a unit's parameters are gathered for every module that is called inside it,
    and parameters shared between units belong to their lowest common ancestor.
    """


def zero_wrapper_for_fp_tensor_constructor(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return ``function`` itself: DeepSpeed wraps tensor constructors, hf-zero does not."""
    return function
