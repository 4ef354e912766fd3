"""Generation at stage 3: how often a model is gathered for it.

Every token is a forward, and every forward gathers each unit once. Where the whole model fits next
to what is there already, ``generate`` gathers it once for all tokens; ranks then end when their own
sequences do. Else they keep together (``synced_gpus``), whatever configuration is alive in
transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from hf_zero.core.gathered import summon_full_params
from hf_zero.engine import Engine
from hf_zero.memory import free_bytes
from hf_zero.parameters.parameter import owner_of

# of the free memory that the gathered model may take: caches and activations need the rest
FREE_SHARE = 0.5


def gather_for_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``GenerationMixin.generate``: gathers the model once where memory allows, else keeps
    the ranks in step until the last has ended.
    """
    signature = inspect.signature(original)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _sharding_engine(self)
        if engine is None:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        assistant = given.arguments.get("assistant_model")
        models = nn.ModuleList([self, assistant] if isinstance(assistant, nn.Module) else [self])
        whole = _fits(models, engine)
        if given.arguments.get("synced_gpus") is None:
            given.arguments["synced_gpus"] = not whole and engine.world_size > 1
        with summon_full_params(models) if whole else nullcontext():
            return original(*given.args, **given.kwargs)

    return generate


def _sharding_engine(model: nn.Module) -> Engine | None:
    """The engine at a stage that shards parameters that has those of ``model``, between two passes
    of it.
    """
    for parameter in model.parameters():
        flat = owner_of(parameter)
        engine = flat.engine() if flat is not None else None
        if engine is not None and engine.sharded_model.policy.shards_parameters:
            return engine if engine.schedule.between_passes else None
    return None


def _fits(model: nn.Module, engine: Engine) -> bool:
    """Whether every rank has room for the whole of ``model``, or has it already.

    All ranks ask together and get one answer.
    """
    units = {
        flat.unit for flat in map(owner_of, model.parameters()) if flat is not None and flat.sharded
    }
    missing = [unit for unit in units if not unit.pins]
    if not missing:
        return True
    limit = engine.config.zero.max_live_parameters
    fits = sum(unit.nbytes for unit in missing) <= FREE_SHARE * free_bytes(engine.device)
    if limit is not None and sum(parameter.numel() for parameter in model.parameters()) > limit:
        fits = False
    return engine.schedule.agree("generate", int(not fits)) == 0
