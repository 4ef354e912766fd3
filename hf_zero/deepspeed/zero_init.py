"""Models under construction: ``deepspeed.zero.Init``; and ``unwrap_model_for_generation``.

Under ``zero.Init`` a large parameter is only a record of how to compute its values; an engine that
only holds the model then makes them one by one. Any model can be built so, not only those of
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.construction import active_config, current_loading, forced_config
from hf_zero.distributed import init, process_group
from hf_zero.engine import engines_of, release_holders
from hf_zero.loading import Building, make_pending, make_real
from hf_zero.loading.shard_only import hold
from hf_zero.parallel.cutting import check_module
from hf_zero.zero.access.gathered_parameters import summon_full_params
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import ZeroParamStatus

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

# Bytes of a model that are built in memory before it is sharded: that costs little, and a small
# model has exactly the numbers that a single process draws. The numbers of each postponed parameter
# come from its own generator, equal for any number of ranks.
WHOLE_BYTES = 256 << 20


_numbers = count()


def give_facts(parameters: Iterable[object]) -> None:
    """Give parameters that are whole on their one rank the attributes of sharded ones: ``ds_id``,
    ``ds_status``, ``ds_shape``, ``ds_numel`` and ``ds_persist``.
    """
    for parameter in parameters:
        if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "ds_id"):
            parameter.__dict__.update(
                ds_id=next(_numbers), ds_status=ZeroParamStatus.AVAILABLE, ds_shape=parameter.shape,
                ds_numel=parameter.numel(), ds_persist=True,
            )  # fmt: skip


def hold_roots(roots: Iterable[nn.Module], config: ZeroConfig) -> None:
    """Shard modules that were made inside a :class:`Building` (collective)."""
    for root in roots:
        make_real(root)
        make_pending(root)
        release_holders(root)  # it may have been held before parameters were replaced
        hold(root, config)


def _is_new(parameter: object) -> bool:
    """Return whether no engine has shards of ``parameter``."""
    return isinstance(parameter, nn.Parameter) and owner_of(parameter) is None


def _trains(module: nn.Module) -> bool:
    """Return whether an engine trains a part of ``module``: what is added to it stays as it is."""
    return any(engine.bound is not None for engine in engines_of(module))


class Init:
    """``deepspeed.zero.Init``: a context around the construction of models, with all of DeepSpeed's
    arguments. Collective.

    At stage 3 on several ranks, the context shards all models that are created inside.
    ``from_pretrained`` reads only shards. Any other model needs memory for at most its first 256 MB
    of whole parameters; every rank takes the values of rank 0, and keeps its shards. You can read
    and write parameters (see GatheredParameters) and call the model before ``initialize``. An
    existing model that is passed as ``module`` is sharded at once. Parameters keep the dtype that
    the code requests. Without ``config_dict_or_path`` or ``config``, the context uses the current
    configuration of transformers, or else plain stage 3. On one rank parameters stay whole, and
    have the attributes of :func:`give_facts`. Raises ConfigError for a ``module`` that is none.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object = None,
        param_swapper: object = None,
        tensor_overrides: object = None,
    ) -> None:
        if module is not None:
            check_module(module, "zero.Init")
        self.enabled = enabled
        self._stack = ExitStack()
        self._building: Building | None = None
        if enabled:
            source = config_dict_or_path if config_dict_or_path is not None else config
            alive = active_config() if "transformers" in sys.modules else None
            self._config = (
                ZeroConfig.coerce(source, allow_auto=True, foreign=True)
                if source is not None
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
    function: Callable[..., T], *args: object, **kwargs: object
) -> Callable[..., T]:
    """Return ``function`` itself: DeepSpeed wraps tensor constructors, hf-zero does not."""
    return function


@contextmanager
def unwrap_model_for_generation(model: M) -> Iterator[M]:
    """Yield ``model`` with all parameters whole: generating gathers nothing (collective)."""
    with summon_full_params(model):
        yield model
