"""The steps that apply the plan of a call of ``hf_zero.initialize``, and their order: one
transaction, in which an exception leaves model, optimizer, loader, scheduler and process as they
were.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hf_zero.checkpoint.random_generators import restorer_of_generators
from hf_zero.checkpoint.resume import LATEST
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.engine import release_holders
from hf_zero.logging import counted, log_rank0
from hf_zero.optim.adoption import adopt
from hf_zero.setup.plan import Planned, plan_to_build
from hf_zero.setup.request import E
from hf_zero.setup.training_loader import data_loader, warn_lost_position
from hf_zero.zero.layout.leaf_modules import mark_configured
from hf_zero.zero.layout.parameter_classes import parameter_classes
from hf_zero.zero.layout.shared_memory import Tied, tie_shared_memory, without_tied
from hf_zero.zero.layout.walk import StagedModel, parameters_of
from hf_zero.zero.transaction import (
    on_rollback,
    restore_buffers_on_rollback,
    restore_on_rollback,
    transaction,
)


@dataclass(eq=False)
class Setup(Generic[E]):
    """The objects that the steps of :data:`ORDER` create from ``planned``."""

    planned: Planned[E]
    optimizer: Any
    tied: Tied = field(default_factory=dict)
    loader: Any = None
    scheduler: Any = None
    engine: E = field(init=False)

    @property
    def model(self) -> nn.Module:
        return self.planned.resolved.request.model

    @property
    def settings(self) -> ZeroConfig:
        return self.planned.resolved.settings


def materialize_meta(setup: Setup[E]) -> None:
    if {parameter.is_meta for parameter in parameters_of(setup.model)} == {True}:
        provided("meta_values")(setup.model)


def tie_parameters(setup: Setup[E]) -> None:
    setup.tied = tie_shared_memory(setup.model)


def cut_parameters(setup: Setup[E]) -> None:
    """Have the features cut parameters along axes besides ZeRO."""
    setup.planned.resolved.features.cut(setup.model)


def prepare_features(setup: Setup[E]) -> None:
    """Have the features replace modules, in their order."""
    setup.planned.resolved.features.prepare(setup.model)


def mark_units(setup: Setup[E]) -> None:
    mark_configured(setup.model, setup.settings.zero.leaf_module)


def prepare_optimizer(setup: Setup[E]) -> None:
    """Replace tied parameters in the optimizer, and its class by one that updates shards. One that
    created state of parameters before they were cut is built again.
    """
    request = setup.planned.resolved.request
    builds = request.user_optimizer is None and setup.optimizer is not None
    if builds and not setup.planned.is_final and setup.optimizer.state:
        setup.optimizer = request.make_optimizer()
    if setup.optimizer is not None:
        _warn_all_frozen(setup)
        without_tied(setup.optimizer, setup.tied)
        parameter_classes().drop(setup.optimizer)
        adopt(setup.optimizer)


def _warn_all_frozen(setup: Setup[E]) -> None:
    """Warn of an optimizer whose parameters are all frozen. A stage of a pipeline may be."""
    groups = setup.optimizer.param_groups
    frozen = not any(parameter.requires_grad for group in groups for parameter in group["params"])
    if frozen and not isinstance(setup.model, StagedModel):
        count = sum(len(group["params"]) for group in groups)
        log_rank0(
            f"none of the {counted(count, 'parameter')} of the optimizer requires grad, so nothing "
            "trains until the script calls requires_grad_(True) on some of them; to train none, "
            "leave the optimizer out",
            logging.WARNING,
        )


def load_data(setup: Setup[E]) -> None:
    request, features = setup.planned.resolved.request, setup.planned.resolved.features
    loader: Any = data_loader(request.training_data, request.collate_fn, setup.settings)
    loader = features.follow_loader(loader)
    warn_lost_position(loader)
    setup.loader = loader


def build_engine(setup: Setup[E]) -> None:
    """Build the engine: parameters, optimizer state and offloaded memory in shards, and hooks."""
    resolved, model = setup.planned.resolved, setup.model
    if resolved.request.takes_over is not None:
        resolved.request.takes_over(model)
    release_holders(model, setup.optimizer)
    parameter_classes().register(model, on_rollback if setup.planned.spare else None)
    features = resolved.features.with_further(model)
    engine_plan = plan_to_build(setup.planned, setup.optimizer)
    setup.engine = resolved.engine_class(engine_plan, features)
    on_rollback(setup.engine.destroy)
    setup.engine.training_dataloader = setup.loader


def create_scheduler(setup: Setup[E]) -> None:
    request = setup.planned.resolved.request
    scheduler = request.make_scheduler(setup.settings, setup.optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        log_rank0(
            "lr_scheduler ReduceLROnPlateau takes a metric, which the engine does not have: call "
            "its step(metric) where the script knows one; checkpoints hold its state"
        )
    setup.engine.lr_scheduler = setup.scheduler = scheduler


def resume(setup: Setup[E]) -> None:
    """Load the checkpoint, with counters, generators and the place in the data."""
    engine, checkpoint = setup.engine, setup.planned.resolved.checkpoint
    folder = setup.planned.resolved.request.resume
    if folder not in (None, LATEST):
        if checkpoint is None or checkpoint.in_memory:
            engine.measures.keep_in(os.fspath(folder))
        engine.generations.note_run(folder)
    if checkpoint is not None:
        engine.resumed_from, engine.client_state = engine.load_checkpoint(
            checkpoint.directory, checkpoint.tag, load_rng=True, load_loader=True
        )


ORDER: tuple[Callable[[Setup[Any]], None], ...] = (
    materialize_meta,  # the steps after this one read shapes, names and memory of parameters
    tie_parameters,  # before cuts, which give each parameter memory of its own
    cut_parameters,  # of whole layers, before others replace them
    prepare_features,  # last change of forwards: kernels recognize modules by what they compute
    mark_units,  # units are formed of the final modules
    prepare_optimizer,  # over the final parameters
    load_data,  # among the ranks that read different batches
    build_engine,  # ZeRO and offload: flat buffers of final parameters, hooks around final forwards
    create_scheduler,  # steps the optimizer that the engine has patched
    resume,  # fills the state of everything before
)


def apply(planned: Planned[E]) -> Setup[E]:
    """Run :data:`ORDER` in one transaction, and return its results. Collective."""
    request, spare = planned.resolved.request, planned.spare
    try:
        with transaction():
            restore_on_rollback(request.lr_scheduler, request.training_data)
            on_rollback(restorer_of_generators())
            if spare:
                restore_buffers_on_rollback(request.model)
            setup = Setup(planned, planned.resolved.optimizer)
            for step in ORDER:
                step(setup)
    except BaseException as error:
        if not spare:
            error.add_note(
                "initialize has changed the parameters of the model, as there is no memory for "
                "them beside the engine: build or load the model again before the next call"
            )
        raise
    return setup
