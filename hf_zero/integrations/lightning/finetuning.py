"""Wrappers of Lightning's callbacks for finetuning, which add groups of parameters to the optimizer
of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_zero.integrations.engine_protocol import holder_of
from hf_zero.integrations.lightning.fits import engine_of
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning


def leave_out_by_identity(
    original: Original, optimizer: torch.optim.Optimizer, params: Iterable[torch.nn.Parameter]
) -> object:
    """Wraps ``BaseFinetuning.filter_on_optimizer``: returns those parameters that the optimizer of
    an engine does not have.
    """
    params = list(params)
    engine = holder_of(params)
    if engine is None or engine.optimizer is not optimizer:
        return original(optimizer, params)
    given_ids = {id(parameter) for group in engine.group_parameters for parameter in group}
    return [parameter for parameter in params if id(parameter) not in given_ids]


def store_names_of_groups(
    original: Original,
    self: BaseFinetuning,
    pl_module: LightningModule,
    opt_idx: int,
    num_param_groups: int,
    current_param_groups: list[dict[str, object]],
) -> None:
    """Wraps ``BaseFinetuning._store``: stores the groups of an engine's optimizer with the model's
    parameters, not with shards.
    """
    engine = engine_of(pl_module)
    if engine is not None:
        current_param_groups = [
            {**group, "params": parameters}
            for group, parameters in zip(current_param_groups, engine.group_parameters)
        ]
    original(self, pl_module, opt_idx, num_param_groups, current_param_groups)


def add_groups_again(
    original: Original, self: BaseFinetuning, trainer: Trainer, pl_module: LightningModule
) -> None:
    """Wraps ``BaseFinetuning.on_fit_start``: gives the optimizer of an engine the groups that the
    run had when it was saved.
    """
    engine = engine_of(pl_module)
    if engine is None or engine.optimizer is None or not self._restarting:
        original(self, trainer, pl_module)
        return
    self._restarting = False
    names, groups = dict(pl_module.named_parameters()), engine.optimizer.param_groups
    saved = self._internal_optimizer_metadata.get(0, [])
    for group, values in zip(groups, saved):
        group.update({name: value for name, value in values.items() if name != "params"})
    for values in saved[len(groups) :]:
        params = [names[name] for name in values["params"]]
        engine.add_param_group({**values, "params": params})
