"""Models sharded before their training is configured, by an engine that gathers and releases."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ZeroConfig, ZeroSection
from hf_zero.distributed import process_group
from hf_zero.engine import Engine
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.feature import FeatureSet
from hf_zero.zero.layout.parameter_classes import parameter_classes
from hf_zero.zero.layout.shared_memory import tie_shared_memory
from hf_zero.zero.materialize import check_alike
from hf_zero.zero.transaction import restore_on_rollback, transaction


def hold(model: nn.Module, config: ZeroConfig, stage: int = 3) -> Engine:
    """Shard ``model``, at stage 3 by default, and return its engine. Parameters keep their dtype,
    and may be frozen and unfrozen. Collective.

    Each rank reads its own elements of parameters made by
    :func:`hf_zero.zero.layout.initial_values.pending`; of others it takes rank 0's values. The
    model can be called, gathered and saved; :func:`hf_zero.initialize` takes it over. Shards are
    placed where ``config`` places those of the training. Small parameters are sharded as well.
    """
    tie_shared_memory(model)
    FeatureSet.of(config, group="cuts").cut(model, verify=False)
    parameter_classes().register(model)
    away = config.offload_param if stage == 3 else None
    settings = ZeroConfig(
        stage=stage,
        replicate_size=config.replicate_size,
        timeout=config.timeout,
        host_timeout=config.host_timeout,
        offload_param=away,
        aio=config.aio,
        zero=ZeroSection(param_persistence_threshold=0),
    )
    resolved = settings.resolve(
        process_group.get_world_size(), require_batch_size=False, training=False
    )
    plan = Engine.plan(model, resolved, None, extensions_of, shard_only=True)
    check_alike(plan)
    with transaction():
        restore_on_rollback(model)
        return Engine(plan, FeatureSet.of(resolved))
