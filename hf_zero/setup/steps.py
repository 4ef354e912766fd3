"""The steps that apply the plan of a call of ``hf_zero.initialize``; ``parallelize.py`` has their
order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hf_zero.activations.compile import to_be_compiled
from hf_zero.checkpoint.resume import LATEST
from hf_zero.config import ZeroConfig
from hf_zero.loading import give_values
from hf_zero.loading.shard_only import release_holders
from hf_zero.logging import log_rank0
from hf_zero.optim.build import build_scheduler
from hf_zero.optim.elementwise import adopt
from hf_zero.parallel.expert.model import on_model, spread_experts
from hf_zero.parallel.sequence import sequence_parallel
from hf_zero.parallel.tensor.model import tensor_parallel
from hf_zero.planning.start_summary import describe
from hf_zero.setup.plan import Planned, plan_of_engine, sparse_section
from hf_zero.techniques.quantized_linears import quantize_linears
from hf_zero.techniques.registry import follow
from hf_zero.techniques.training_loader import data_loader, tell_of_lost_place
from hf_zero.zero.layout.shared_memory import Tied, tie_shared_memory, without_tied
from hf_zero.zero.layout.wrap import mark_configured
from hf_zero.zero.transaction import on_rollback


@dataclass(eq=False)
class Application:
    """The objects that the steps of :data:`ORDER` create from ``planned``."""

    planned: Planned[Any]
    optimizer: Any
    tied: Tied = field(default_factory=dict)
    sequence: sequence_parallel.SequenceParallel | None = None
    loader: Any = None
    scheduler: Any = None
    engine: Any = None

    @property
    def model(self) -> nn.Module:
        return self.planned.resolved.request.model

    @property
    def settings(self) -> ZeroConfig:
        return self.planned.resolved.settings


def materialize_meta(now: Application) -> None:
    if {parameter.is_meta for parameter in now.model.parameters()} == {True}:
        give_values(now.model)


def tie(now: Application) -> None:
    now.tied = tie_shared_memory(now.model)


def cut_layers(now: Application) -> None:
    section = now.settings.tensor_parallel
    if section.size > 1:
        tensor_parallel(now.model, section.size, verify=section.verify)


def spread_out(now: Application) -> None:
    spread_experts(now.model, now.settings)


def split_sequences(now: Application) -> None:
    now.sequence = sequence_parallel.sequence_of(now.settings, now.planned.resolved.request.mpu)


def quantize(now: Application) -> None:
    quantize_linears(now.model, now.settings)


def fuse(now: Application) -> None:
    settings, chooses = now.settings, now.planned.resolved.request.config.kernels == "auto"
    sparse = sparse_section(settings)
    if settings.kernels != "off" or sparse is not None or settings.pre_layer_norm:
        # inductor fuses the blocks that it compiles
        compiled = to_be_compiled(now.model) if chooses and settings.compile.blocks else ()
        from hf_zero.integrations import fused  # with all kernels

        fused.prepare(now.model, settings.kernels, sparse, settings.pre_layer_norm, compiled)


def mark_units(now: Application) -> None:
    mark_configured(now.model, now.settings.zero.leaf_module)


def take_optimizer(now: Application) -> None:
    """Replace tied parameters in the optimizer, and its class by one that updates shards. One that
    has made state of parameters before they were cut is made again.
    """
    request = now.planned.resolved.request
    made_here = request.user_optimizer is None and now.optimizer is not None
    if made_here and now.planned.cuts and now.optimizer.state:
        now.optimizer = request.make_optimizer()
    if now.optimizer is not None:
        without_tied(now.optimizer, now.tied)
        adopt(now.optimizer)


def load_data(now: Application) -> None:
    request, techniques = now.planned.resolved.request, now.planned.resolved.techniques
    loader: Any = data_loader(request.training_data, request.collate_fn, now.settings)
    if loader is not None and now.sequence is not None:
        loader = now.sequence.batches(loader)
    tell_of_lost_place(loader)
    follow(techniques, getattr(loader, "data_sampler", None))
    now.loader = loader


def shard(now: Application) -> None:
    """Build the engine: parameters, optimizer state and offloaded memory in shards, and hooks."""
    resolved, model = now.planned.resolved, now.model
    if resolved.request.takes_over is not None:
        resolved.request.takes_over(model)
    release_holders(model)
    others: dict[str, Any] = {**sequence_parallel.on_model(now.sequence), **on_model(model)}
    techniques = resolved.techniques.with_others(others)
    engine_plan = plan_of_engine(resolved, now.optimizer)
    now.engine = resolved.engine_class(engine_plan, resolved.patches, techniques)
    on_rollback(now.engine.destroy)
    now.engine.training_dataloader = now.loader
    if now.engine.global_rank == 0:
        describe(now.planned.report)


def schedule(now: Application) -> None:
    given = now.planned.resolved.request.lr_scheduler
    if callable(given) and not hasattr(given, "step"):
        given = given(now.optimizer)
    if isinstance(given, ReduceLROnPlateau):
        log_rank0(
            "lr_scheduler ReduceLROnPlateau takes a metric, which the engine does not have: call "
            "its step(metric) where the script knows one; checkpoints hold its state"
        )
    if given is None and now.settings.scheduler is not None and now.optimizer is not None:
        given = build_scheduler(now.settings.scheduler, now.optimizer)
    now.engine.lr_scheduler = now.scheduler = given


def resume(now: Application) -> None:
    """Load the checkpoint, with counters, generators and the place in the data."""
    engine, checkpoint = now.engine, now.planned.resolved.checkpoint
    folder = now.planned.resolved.request.resume
    if folder not in (None, LATEST) and (checkpoint is None or checkpoint.in_memory):
        engine.measures.keep_in(os.fspath(folder))
    if checkpoint is not None:
        engine.resumed_from, engine.client_state = engine.load_checkpoint(
            checkpoint.directory, checkpoint.tag, load_rng=True, load_loader=True
        )
