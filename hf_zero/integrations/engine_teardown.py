"""Teardown of an engine, after which its model can be trained, or sharded, again."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.engine import Engine
from hf_zero.zero.access.full import GatheredParameters, safe_get_full_fp32_param
from hf_zero.zero.layout.parameter import owner_of
from hf_zero.zero.layout.parameter_views import forget


@torch.no_grad()
def destroy_and_restore(engine: Engine) -> None:
    """Destroy ``engine`` and leave its model whole on every rank, in its original dtypes.
    Collective.

    Trained values are taken from the fp32 master weights: a model trained further from them loses
    no precision.
    """
    whole: list[tuple[nn.Parameter, torch.Tensor]] = []
    for name, parameter in engine.module.named_parameters():
        flat = owner_of(parameter)
        dtype = getattr(torch, engine.sharded_model.param_dtypes[name])
        if flat.optimizer_shard.has_master:
            values = safe_get_full_fp32_param(parameter)
            assert values is not None  # master weights exist for every trainable parameter
        elif flat.sharded:
            with GatheredParameters([parameter]):
                values = parameter.detach().clone()
        else:
            values = parameter.detach()
        whole.append((parameter, values.to(dtype)))
    engine.destroy()
    for parameter, values in whole:
        forget(parameter)  # its sharding stays: the module still holds a part
        parameter.data = values
