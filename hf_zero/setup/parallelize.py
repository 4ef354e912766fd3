"""The order in which a planned call of ``hf_zero.initialize`` is applied: one transaction, in which
an exception leaves model, optimizer, loader, scheduler and process as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.checkpoint.save_plan import restorer_of_generators
from hf_zero.setup.plan import Planned
from hf_zero.setup.steps import (
    Setup,
    build_engine,
    create_scheduler,
    cut_layers,
    fuse_modules,
    load_data,
    mark_units,
    materialize_meta,
    place_experts,
    prepare_optimizer,
    quantize_modules,
    resume,
    split_sequences,
    tie_parameters,
)
from hf_zero.zero.transaction import (
    on_rollback,
    restore_buffers_on_rollback,
    restore_on_rollback,
    transaction,
)

ORDER: tuple[Callable[[Setup], None], ...] = (
    materialize_meta,  # the steps after this one read shapes, names and memory of parameters
    tie_parameters,  # before cuts, which give each parameter memory of its own
    cut_layers,  # first of the axes: the others count the ranks that it leaves
    place_experts,  # experts that tensor parallelism has cut are cut again, among the rest
    split_sequences,  # after both, which regroup the ranks that share a sequence
    quantize_modules,  # torchao's layers replace linear layers: kernels must find them
    fuse_modules,  # last change of forwards: kernels recognize modules by what they compute
    mark_units,  # units are formed of the final modules
    prepare_optimizer,  # over the final parameters
    load_data,  # among the ranks that read different batches
    build_engine,  # ZeRO and offload: flat buffers of final parameters, hooks around final forwards
    create_scheduler,  # steps the optimizer that the engine has patched
    resume,  # fills the state of everything before
)


def apply(planned: Planned[Any]) -> Setup:
    """Run :data:`ORDER` in one transaction, and return its results. Collective."""
    request, spare = planned.resolved.request, planned.report.spare
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
