"""The plan of one call of ``hf_zero.initialize``: the resolved configuration, the optimizer, and
the plan of the engine, checked. Nothing of the model is changed, except what a callable optimizer
changes; what the plan can know refuses a call here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Generic

import torch

from hf_zero.checkpoint.match import LoadTarget
from hf_zero.checkpoint.resume import Resumed
from hf_zero.config import ZeroConfig
from hf_zero.config.features import computed_values
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_dims import ParallelDims, check_mpu
from hf_zero.distributed.parallel_groups import dims_in_effect
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.engine import Engine, engines_of
from hf_zero.logging import log_rank0
from hf_zero.ops.dispatch import kind_for_auto
from hf_zero.optim.adoption import adopt
from hf_zero.optim.build import twin_of
from hf_zero.optim.elementwise import check
from hf_zero.setup.plan_inputs import PlanInputs
from hf_zero.setup.request import E, SetupRequest
from hf_zero.setup.training_loader import check_data
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.feature import EngineInputs, FeatureSet, early
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.leaf_modules import mark_configured
from hf_zero.zero.layout.parameter_classes import parameter_classes
from hf_zero.zero.layout.shared_memory import tie_shared_memory, without_tied
from hf_zero.zero.layout.walk import StagedModel, parameters_of
from hf_zero.zero.materialize import check_alike, check_parameters, check_statistics
from hf_zero.zero.sharded_model import check_optimizer
from hf_zero.zero.state_bytes import held_bytes
from hf_zero.zero.transaction import on_rollback, snapshot_of, snapshot_of_parameters, trial


@dataclass(frozen=True, eq=False)
class Resolved(Generic[E]):
    """One call of ``initialize`` on this job: the configuration with each value settled, the sizes
    of the parallel axes, the optimizer, the checkpoint to resume from, and what an engine installs.
    """

    request: SetupRequest[E]
    settings: ZeroConfig
    dims: ParallelDims
    optimizer: torch.optim.Optimizer | None
    checkpoint: Resumed | None
    features: FeatureSet

    @property
    def engine_class(self) -> type[E]:
        """The class of the engine, with stages for a model in stages."""
        engine_class = self.request.engine_class
        for feature_class in early().values():
            engine_class = feature_class.engine_class(self.request.model, engine_class)
        return engine_class


@dataclass(frozen=True, eq=False)
class Planned(Generic[E]):
    """A resolved call whose checks have passed, with the plan that was checked. ``spare``: whether
    the values of the model have room beside the engine, on all ranks. ``is_final``: whether the
    parameters have their shapes and values, so that the optimizer's state fits them. ``inputs``:
    those of the plan.
    """

    resolved: Resolved[E]
    plan: EnginePlan
    spare: bool
    is_final: bool
    inputs: PlanInputs


def plan(request: SetupRequest[E], checkpoint: Resumed | None) -> Planned[E]:
    """Resolve ``request``, plan its engine and check everything; change nothing. If the transaction
    under way is undone, model and optimizer are restored, and their tensors if there is memory for
    that. Collective: an error on one rank is raised on all.
    """
    planned, fitting = _plan_once(request, checkpoint)
    while planned is None:
        planned, fitting = _plan_once(request, fitting)
    return planned


def _plan_once(
    request: SetupRequest[E], checkpoint: Resumed | None
) -> tuple[Planned[E] | None, Resumed | None]:
    """Return the plan to resume from ``checkpoint``, and ``checkpoint``. If that does not fit the
    plan, return None and the checkpoint with which to plan again.
    """
    model = request.model
    # the plan is of the model as it will be: its ties and marks are made for the plan alone
    with trial():
        with raise_on_all_ranks("plan its engine"):
            for feature_class in early().values():
                feature_class.begin(model, request.config)
            # before the snapshots: changes that the script's callable makes to its model stay
            optimizer = _make_optimizer(request)
            before = snapshot_of(model, request.user_optimizer)
            values = snapshot_of_parameters(model, optimizer)
            on_rollback(before)
            on_rollback(values)
            resolved = resolve(request, optimizer, checkpoint)
            check_inputs(resolved)
            scheduler = _trial_scheduler(resolved)
        # apart: the plan of a model in stages is collective, which a refusal before must not meet
        with raise_on_all_ranks("plan its engine"):
            engine_plan, is_final, ending = _checked_plan(resolved)
            inputs = PlanInputs(model, resolved.optimizer)
        check_alike(engine_plan)
        if checkpoint is not None:
            # a checkpoint has whole parameters: cuts are still to be made
            uncut = _fresh_plan(resolved, optimizer) if engine_plan.cuts else engine_plan
            fitting = checkpoint.fitting(LoadTarget.planned(uncut, scheduler))
            if fitting is not checkpoint:
                return None, fitting
        spare = resolved.features.admit(engine_plan, _freed(ending))
    # the trial has undone its own: what follows is undone by the transaction around it
    on_rollback(before)
    if spare:
        on_rollback(values)
    return Planned(resolved, engine_plan, spare, is_final, inputs), checkpoint


def _make_optimizer(request: SetupRequest[E]) -> torch.optim.Optimizer | None:
    """Return the optimizer of ``request``, made while parameters that are one memory are one."""
    with trial():
        if request.user_optimizer is None:
            tie_shared_memory(request.model, logs=False, on_rollback=on_rollback)
        return request.make_optimizer()


def resolve(
    request: SetupRequest[E], optimizer: torch.optim.Optimizer | None, checkpoint: Resumed | None
) -> Resolved[E]:
    """Return ``request`` with the sizes and values in effect, for ``optimizer``."""
    model, mpu = request.model, request.mpu
    tied = tie_shared_memory(model, logs=False)
    settings, dims = request.config, dims_in_effect()
    for feature_class in early().values():
        settings, dims = feature_class.resolve(model, settings, dims, mpu)
    unsplit = settings.ranks_of_a_sequence == 1
    if mpu is not None and unsplit and not isinstance(model, StagedModel):
        check_mpu(mpu, process_group.get_world_size())
    if settings.kernels == "auto":
        settings = settings.on_device(kind_for_auto(process_group.default_device()))
    if optimizer is not None:
        without_tied(optimizer, tied)
        parameter_classes().drop(optimizer)
        adopt(optimizer)
        untested = settings.allow_untested_optimizer
        warning = check(optimizer, settings.elementwise_optimizers, untested)
        if warning:
            log_rank0(warning, logging.WARNING)
    for feature_class in early().values():
        settings = feature_class.adapt(settings, optimizer)
    # in a pipeline batch sizes are those of one stage, whose tensor-parallel ranks share batches
    ranks = dims.world if dims.pipeline == 1 else dims.world // dims.pipeline // dims.tensor
    if checkpoint is not None:
        checkpoint.check_sizes(settings, dims)
        shared = settings.tensor_parallel.size * settings.ranks_of_a_sequence
        settings = settings.with_counted_total(ranks)
        settings = checkpoint.keep_batch(settings, max(1, ranks // shared))
    settings = settings.resolve(
        ranks, require_batch_size=request.training_data is not None, training=optimizer is not None
    )
    for name, values in computed_values(settings.written).items():
        settings = settings.override(values, f"computed: {name}")
    features = FeatureSet.of(settings, model, optimizer)
    return Resolved(request, settings, dims, optimizer, checkpoint, features)


def check_inputs(resolved: Resolved[E]) -> None:
    """Raise for data, and for a model or an optimizer, that features do not support."""
    request, settings, dims = resolved.request, resolved.settings, resolved.dims
    model, data = request.model, request.training_data
    check_data(data, settings)
    resolved.features.check_inputs(
        EngineInputs(model, settings, dims, resolved.optimizer, data, request.mpu)
    )


def _checked_plan(resolved: Resolved[E]) -> tuple[EnginePlan, bool, list[Engine]]:
    """Return the plan of the engine, checked against model and optimizer; whether the parameters
    have their final shapes and values; and the engines of the model that end when this one begins.
    Collective for a model in stages.
    """
    request, settings, dims = resolved.request, resolved.settings, resolved.dims
    model, features = request.model, resolved.features
    mark_configured(model, settings.zero.leaf_module, warns=False)
    parameter_classes().register(model, on_rollback)
    features.mark(model)
    cuts = features.cuts(model, dims, process_group.get_rank())
    engine_plan = resolved.engine_class.plan(
        model, settings, resolved.optimizer, extensions_of, dims=dims, cuts=cuts
    )
    without_values = {parameter.is_meta for parameter in parameters_of(model)} == {True}
    # these still own the parameters
    ending = [
        engine
        for engine in engines_of(model, resolved.optimizer)
        if engine.bound is None or (request.takes_over and engine.module is model)
    ]
    if not without_values and not ending:
        check_parameters(engine_plan.units, engine_plan.device)
    check_statistics(engine_plan, engine_plan.device)
    check_optimizer(engine_plan)
    features.check(engine_plan)
    return engine_plan, not cuts and not without_values, ending


def _trial_scheduler(resolved: Resolved[E]) -> Any:
    """Return the scheduler as :meth:`SetupRequest.make_scheduler` makes it, of a twin of the
    optimizer. The script's callable is called only for a checkpoint, which may be of another class.
    """
    request, optimizer = resolved.request, resolved.optimizer
    if optimizer is None or (request.lr_scheduler is not None and resolved.checkpoint is None):
        return None
    return request.make_scheduler(resolved.settings, twin_of(optimizer))


def _freed(ending: list[Engine]) -> tuple[int, int]:
    """Return the bytes on the device and in RAM of gradients and optimizer state of ``ending``."""
    nbytes = [held_bytes(engine) for engine in ending]
    device, ram = (
        sum(of_engine[kind, tier] for of_engine in nbytes for kind in ("gradients", "optimizer"))
        for tier in ("device", "ram")
    )
    return device, ram


def plan_to_build(planned: Planned[E], optimizer: torch.optim.Optimizer | None) -> EnginePlan:
    """Return the plan of the engine of the model as it is now: the one that was checked, if no step
    has changed its inputs.
    """
    resolved, checked = planned.resolved, planned.plan
    # the plan of a model in stages is collective, so all ranks have to make it
    reusable = planned.is_final and not isinstance(resolved.request.model, StagedModel)
    if (
        reusable
        and checked.dims == dims_in_effect()
        and planned.inputs.same(PlanInputs(resolved.request.model, optimizer))
    ):
        return checked
    return _fresh_plan(resolved, optimizer)


def _fresh_plan(resolved: Resolved[E], optimizer: torch.optim.Optimizer | None) -> EnginePlan:
    settings, model = resolved.settings, resolved.request.model
    return resolved.engine_class.plan(model, settings, optimizer, extensions_of)
