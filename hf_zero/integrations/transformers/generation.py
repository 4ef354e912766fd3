"""Generation on several ranks: the number of gathers of a sharded model, and the ranks that stay in
step.

Every token is a forward, and at stage 3 every forward gathers each unit once. If the whole model
fits in free memory, ``generate`` gathers it once for all tokens, and each rank ends with its own
sequences. Otherwise the ranks stay in step (``synced_gpus``), whichever configuration is active in
transformers. At every stage, tensor-parallel and expert-parallel ranks stay in step: each forward
of one needs the others. Tensor-parallel ranks must generate the same tokens, too, so they draw from
one random stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.device.free_memory import free_bytes
from hf_zero.distributed.collectives import MeshDim
from hf_zero.engine import Engine
from hf_zero.integrations.seams import Original, replaced
from hf_zero.parallel.tensor.model import model_record
from hf_zero.zero.access.gathered_parameters import summon_full_params
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import engine_of, owner_of
from hf_zero.zero.layout.sharding import dims_of_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# share of the free memory for the gathered model: caches and activations need the rest
FREE_SHARE = 0.5


def gather_for_generate(
    original: Original, self: PreTrainedModel, *args: object, **kwargs: object
) -> object:
    """Wraps ``GenerationMixin.generate``: gathers the model once if memory allows, else keeps the
    ranks in step until the last has ended; also keeps ranks in step that take part in each other's
    forwards. Tensor-parallel ranks draw the same tokens.
    """
    split = model_record(self)
    if split is not None:
        split.agreement.begin_generation()
    engine, dims = _sharding_engine(self), dims_of_parts(self.parameters())
    if engine is None and not dims:
        return original(self, *args, **kwargs)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    assistant = bound.arguments.get("assistant_model")
    models = nn.ModuleList([self, assistant] if isinstance(assistant, nn.Module) else [self])
    whole = engine is not None and _fits(models, engine)
    if engine is not None and bound.arguments.get("synced_gpus") is None:
        bound.arguments["synced_gpus"] = not whole and engine.mesh.pp_stage_ranks > 1
    with ExitStack() as stack:
        if whole:
            stack.enter_context(summon_full_params(models))
        if dims and not bound.arguments.get("synced_gpus"):
            bound.arguments["synced_gpus"] = True
            stack.enter_context(_kept_together(self, dims))
        return original(*bound.args, **bound.kwargs)


def _kept_together(model: object, dims: Sequence[MeshDim]) -> AbstractContextManager[None]:
    """Restrict ``synced_gpus`` in ``model.generate`` to the ranks along ``dims``."""

    def has_unfinished_sequences(
        this_peer_finished: bool, synced_gpus: bool, device: torch.device
    ) -> bool:
        unfinished = torch.tensor([float(not this_peer_finished)], device=device)
        for dim in dims:
            dim.all_reduce(unfinished, "ranks that still generate").wait()
        return bool(unfinished.item())

    return replaced(model, _has_unfinished_sequences=has_unfinished_sequences)


def _sharding_engine(model: nn.Module) -> Engine | None:
    """Return the engine that shards the parameters of ``model`` if it is between two passes, else
    None.
    """
    for parameter in model.parameters():
        engine = engine_of([parameter], Engine)
        if engine is not None and engine.sharded_model.policy.shards_parameters:
            return engine if engine.schedule.between_passes else None
    return None


def _fits(model: nn.Module, engine: Engine) -> bool:
    """Return whether every rank has room for the whole of ``model``, or has it already.

    Collective: all ranks get the same answer.
    """
    units = {
        unit_of(flat)
        for flat in map(owner_of, model.parameters())
        if flat is not None and flat.sharded
    }
    missing = [unit for unit in units if not unit.guard.pins]
    if not missing:
        return True
    limit = engine.config.zero.max_live_parameters
    fits = sum(unit.nbytes for unit in missing) <= FREE_SHARE * free_bytes(engine.device)
    if limit is not None and sum(parameter.numel() for parameter in model.parameters()) > limit:
        fits = False
    return engine.mesh.largest("generate", int(not fits)) == 0
