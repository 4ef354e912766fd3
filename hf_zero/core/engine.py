"""The engine: a model whose parameters, gradients and optimizer state are sharded, with the
training step around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_zero.config import ZeroConfig
from hf_zero.core.answers import Answers, Counters
from hf_zero.core.flat import Flat
from hf_zero.core.grads import GradientReducer
from hf_zero.core.guards import (
    Attached,
    ModuleGuards,
    Override,
    refuse_foreign_step,
    refuse_switched,
)
from hf_zero.core.homeward import Homeward
from hf_zero.core.hooks import Hooks
from hf_zero.core.layout import Slot
from hf_zero.core.losses import Losses
from hf_zero.core.materialize import check_parameters, partition
from hf_zero.core.parameter import owner_of
from hf_zero.core.patches import Patches
from hf_zero.core.policy import POLICIES
from hf_zero.core.precision import LossScaler, Scaling
from hf_zero.core.sanity import SanityChecks
from hf_zero.core.saving import Saving
from hf_zero.core.schedule import Schedule
from hf_zero.core.stopping import Stopping
from hf_zero.core.takeover import patch_optimizer, refuse_unknown_params, restore_optimizer
from hf_zero.core.tree import map_tensors
from hf_zero.core.trouble import refuse_half_done, refuse_step
from hf_zero.core.unit import Unit
from hf_zero.core.update import Updater
from hf_zero.core.updating import Updating
from hf_zero.core.usage import Usage
from hf_zero.core.wrap import find_units
from hf_zero.device import kinds
from hf_zero.distributed import process_group, rank_status
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logs import logger
from hf_zero.ops import native
from hf_zero.optim.elementwise import check
from hf_zero.optim.fused import reads_16_bits
from hf_zero.optim.offloaded import OffloadedOptimizer
from hf_zero.optim.segments import BoundOptimizer
from hf_zero.optim.state import collect, numbers_kept
from hf_zero.storage.placement import Placement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_guarding: list[Any] = []  # the one process-wide hook on optimizer steps


class Engine(Answers, Stopping, Saving, Updating):
    """``model`` under ZeRO. Made by :func:`hf_zero.initialize`; call it like the model.

    The loss given to :meth:`backward` (or a plain ``loss.backward()``) is the unscaled loss of one
    micro-batch on this rank; the engine averages over the accumulation window and over ranks, and
    scales for fp16.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        patches: Patches,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        device: torch.device | None = None,
        shard_only: bool = False,
    ):
        super().__init__()
        self.module = model
        self.config = config
        self.patches = patches
        self._installed = ExitStack()  # what destroy undoes
        # no training is configured yet: parameters keep their dtype, and may be frozen and unfrozen
        self.shard_only = shard_only
        # names that whole state dicts without frozen parameters have all the same
        self.kept_when_frozen: frozenset[str] = frozenset()
        self.stage = config.stage
        self.device = device or process_group.default_device()
        kinds.set_device(self.device)
        self.optimizer: Any = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.counters = Counters()
        self.scaler = LossScaler.from_config(config)
        self._policy = POLICIES[config.stage]
        beside = config.offload_optimizer.on and self._policy.gathers_after_step
        self.mesh = Mesh(
            self._policy.shards(process_group.get_world_size(), config.replicate_size),
            self.device,
            config.timeout,
            beside,
        )
        self.global_rank, self.world_size, self.local_rank = (
            self.mesh.rank,
            self.mesh.world,
            process_group.get_local_rank(),
        )
        self.shard_rank, self.shard_world = self.mesh.shard.rank, self.mesh.shard.size
        self._accumulation = config.gradient_accumulation_steps or 1
        self._boundary: bool | None = None  # set from outside
        self._micro = 0  # micro-batches since the last step
        self._syncs = True
        # to which the gradient is clipped; 0: not. It may change between steps
        self.max_norm = float(config.gradient_clipping or 0.0)
        self._norm: torch.Tensor | None = None
        self._sanity = SanityChecks(
            self.device, self._accumulation, config.precision, self.global_rank
        )
        self._placement = Placement(config, self.device, self.mesh.rank, self.mesh.world)
        self.updater: Updater | None = None  # of what is offloaded
        self._threads: int | None = None  # that kernels ran on before
        self._applied = False
        self._destroyed = False
        try:
            self._build(model, optimizer)
        except BaseException as error:
            for parameter in model.parameters():
                flat = owner_of(parameter)
                if flat is not None and flat.axis in (self.mesh.shard, self.mesh.replicate):
                    flat.retire()  # the model must not stay with an engine that nobody holds
            self._placement.close()
            self.mesh.close(
                groups=not self._policy.shards_parameters,
                why=f"could not build the engine ({rank_status.first_line(error)})",
            )
            raise
        if not _guarding:
            _guarding.append(register_optimizer_step_pre_hook(refuse_foreign_step))

    def _build(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        config = self.config
        fixed = not self._policy.shards_parameters  # parameters keep their addresses
        self.patches.check(model, fixed)
        specs, self.aliases = find_units(model, config.zero.module_granularity_threshold)
        check_parameters(specs, self.device)
        given = {name: parameter for spec in specs for name, parameter in spec.parameters}
        self.param_dtypes = {
            name: str(parameter.dtype).removeprefix("torch.") for name, parameter in given.items()
        }
        groups: dict[int, int] = {}
        if optimizer is not None:
            check(optimizer, config.elementwise_optimizers)
            groups = {
                id(p): index
                for index, group in enumerate(optimizer.param_groups)
                for p in group["params"]
            }
            refuse_unknown_params(optimizer, {id(p) for p in given.values()})
        group_of = {
            name: groups[id(p)] for name, p in given.items() if id(p) in groups and p.requires_grad
        }
        # state that cannot be carried over is refused before the model is cut up
        if optimizer is not None:
            collect(
                optimizer,
                given,
                {name: Slot(name, tuple(given[name].shape), 0) for name in group_of},
                group_of,
            )
        accumulate, wire = config.gradient_accumulation_dtype, config.communication_data_type
        self.units = partition(
            model,
            specs,
            group_of,
            self._policy,
            self.mesh,
            self.device,
            None if self.shard_only else config.precision,
            self._placement,
            DTYPES[accumulate] if accumulate else None,
            DTYPES[wire] if wire else None,
            numbers_kept(optimizer) if optimizer is not None and self._placement.in_files else 0,
            optimizer is not None and reads_16_bits(optimizer, config.kernels, self.device),
        )
        self.flats: list[Flat] = [flat for unit in self.units for flat in unit.flats]
        for flat in self.flats:
            flat.engine = weakref.ref(self)
        self._training = [flat for flat in self.flats if flat.trainable]
        self.bound = self._bind(optimizer, group_of, given) if optimizer is not None else None
        item = max((flat.dtype.itemsize for flat in self.flats), default=4)
        self.schedule = Schedule(
            self.units,
            self.mesh,
            int(config.zero.prefetch_bucket_size) * item,
            self._placement.reads_ahead,
        )
        predivide = config.gradient_predivide_factor
        scaling = Scaling.over(
            self.world_size, config.precision, config.prescale_gradients, predivide, wire
        )
        away = self._placement.offloads_optimizer and self.bound is not None
        homeward = (
            Homeward(self.device, self._placement.take_pinned)
            if away and not kinds.is_host(self.device)
            else None
        )
        if away:
            self.updater = Updater(
                self.units,
                self.mesh,
                self.device,
                self._placement.piece,
                self._placement.take_pinned,
                homeward,
            )
        self._usage = Usage(self._training, self.mesh, self.device)
        self._reducer = GradientReducer(
            self.units,
            self.mesh,
            self._policy,
            scaling,
            self._usage,
            DTYPES[wire] if wire else None,
            homeward,
            config.kernels,
        )
        if self.updater is not None:
            self.schedule.on_use = self.updater.used
        self._hooks = Hooks(
            model,
            self.units,
            self.schedule,
            self._reducer,
            self._backward_begins,
            lambda: self._losses.part_joins(),
        )
        self._losses = Losses(
            self.global_rank,
            self.scaler,
            config.precision == "fp16",
            self._training,
            self._hooks.is_in_backward,
            self._hooks.watch_gradients,
        )
        self._guards = ModuleGuards(model, self.units, self.schedule)
        self._installed.enter_context(
            self.patches.install(model, self.units, self.device, self.global_rank == 0)
        )
        model.zero_grad = Override(self.zero_grad, model, "zero_grad")  # type: ignore[method-assign, assignment]
        self._scaling_hook = (
            model.register_forward_hook(Attached(self._losses.scale_outputs))
            if config.precision == "fp16"
            else None
        )
        if optimizer is not None:
            patch_optimizer(optimizer, self)
            self._publish_scale()
        with self.schedule.writing():
            pass  # what the partition wrote

    def _bind(
        self,
        optimizer: torch.optim.Optimizer,
        group_of: Mapping[str, int],
        given: Mapping[str, nn.Parameter],
    ) -> BoundOptimizer:
        if not self._placement.offloads_optimizer:
            return BoundOptimizer(optimizer, self._training, group_of, given, self.config.kernels)
        if self._placement.cores < 1.0 and native.available():
            self._threads = native.threads()
            native.set_threads(max(1, int(self._placement.cores * native.default_share().threads)))
        return OffloadedOptimizer(
            optimizer, self._training, group_of, given, self._placement.moments, self.config.kernels
        )

    def _publish_scale(self) -> None:
        if self.optimizer is not None:
            self.optimizer.cur_scale = self.optimizer.loss_scale = self.scaler.scale

    # ---- forward and backward ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.precision == "fp16" and self.config.fp16.auto_cast:
            args, kwargs = map_tensors(
                (args, kwargs), lambda t: t.half() if t.is_floating_point() else t
            )
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backpropagate the loss of a micro-batch: a scalar, unscaled.

        ``scale_wrt_gas=False``: the caller has divided by the accumulation steps (or by the tokens
        of the window) already.
        """
        if not isinstance(loss, torch.Tensor):
            said = (
                f"backward needs the loss, a scalar tensor, not {type(loss).__name__}; pass "
                "outputs.loss, or what your loss function returns"
            )
            raise PartitionError(said)
        if loss.numel() != 1:
            raise PartitionError(
                f"backward needs a scalar loss, not one of shape {tuple(loss.shape)}; reduce it "
                "with .mean() or .sum()"
            )
        self._take_in_unannounced()
        self._sanity.on_loss(loss)
        with self._losses.carrying(loss.dtype, None if scale_wrt_gas else 1.0) as scale:
            root = loss.float() * scale if scale != 1.0 else loss
            with self._hooks.announced(root):
                root.backward(retain_graph=retain_graph)
        return loss

    def _take_in_unannounced(self) -> None:
        self._hooks.notice_broken()
        self._hooks.take_in_unannounced()

    def _backward_begins(self) -> None:
        if self.bound is not None:
            refuse_switched(self.flats)
            refuse_half_done(self.updater, "another backward")
            self._sanity.on_backward(self._syncs and self._boundary is not False)
        self._reducer.weight, self._reducer.unscale = self._losses.begin(1.0 / self._accumulation)
        self._reducer.reduces = self._syncs and self.is_gradient_accumulation_boundary()
        early = (
            self._reducer.reduces
            and self._placement.updates_in_backward
            and not (self.max_norm or self._losses.may_overflow)
        )
        early = early and not self._failed_writes()
        self._reducer.on_landed = self._update_early if early else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside belong to an accumulation window that goes on: stages 0 and 1 keep their
        gradients on this rank.

        Stages 2 and 3 keep no whole gradient and reduce in every backward all the same; the result
        is equal.
        """
        self._take_in_unannounced()
        before, self._syncs = self._syncs, False
        try:
            yield
            self._take_in_unannounced()
        finally:
            self._syncs = before

    @property
    def in_no_sync(self) -> bool:
        """Whether a ``no_sync`` block is open."""
        return not self._syncs

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from outside whether the next backward ends the accumulation window; it holds
        until said otherwise.
        """
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward under way, or the next, ends the accumulation window."""
        return (
            self._boundary if self._boundary is not None else self._micro + 1 >= self._accumulation
        )

    def gather_on_use(self, unit: Unit) -> bool:
        """For a parameter that is read while released: gather it if a forward of this engine is
        under way.
        """
        return self._hooks.gather_on_use(unit)

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """``unit`` gathered inside (collective); parameters tell of graphs and views that are
        taken of them.
        """
        self.schedule.pin(unit)
        unit.watch()
        try:
            yield
        finally:
            unit.unwatch()
            self.schedule.unpin(unit)

    def hold(self, unit: Unit, node: torch.autograd.graph.Node) -> None:
        """Keep ``unit``, which is gathered, for the backward of ``node``, which was recorded
        inside GatheredParameters.
        """
        self._hooks.hold(unit, node)

    @property
    def window_is_open(self) -> bool:
        """Whether micro-batches have been counted that the next update will use."""
        return self._micro > 0 and not self._reducer.spoiled

    def reduce_gradients(self) -> None:
        """Reduce what backwards have left unreduced (collective); a step does this by itself."""
        self._take_in_unannounced()
        self._reducer.reduce_windows()
        self._reducer.arrive()

    # ---- the step ----

    @torch.no_grad()
    def step(self) -> None:
        """At the end of an accumulation window: clip, update, let the scheduler step. Elsewhere:
        count the micro-batch.

        In fp16 a gradient that overflowed skips the update: weights, optimizer and scheduler stay
        as they are.
        """
        if self._destroyed:
            raise PartitionError(
                "step() of an engine that was destroyed; train with another one: "
                "hf_zero.initialize(model=..., optimizer=...)"
            )
        self._sanity.on_step()
        self._hooks.reset()
        self._take_in_unannounced()
        self._guards.check()
        if self._reducer.spoiled:
            refuse_half_done(self.updater, "a step whose gradients are not complete")
            raise PartitionError(
                "a backward was broken by an exception after part of its gradients had been taken "
                "in; call engine.zero_grad() and repeat the window"
            )
        self._applied = False
        if not self._syncs:
            raise PartitionError(
                "step() inside no_sync() would use gradients that are not reduced; leave "
                "the no_sync block first"
            )
        if not self.is_gradient_accumulation_boundary():
            self._count_micro_batch()
            self._micro += 1
            return
        if self.bound is None:
            raise PartitionError(
                "step() needs an optimizer; pass one to hf_zero.initialize or "
                "name one in the config"
            )
        if self.max_norm:
            refuse_half_done(
                self.updater, "gradient clipping that was switched on after the backward"
            )
        refuse_step(self._failed_writes())
        self._reducer.reduce_windows()
        if self._training and not any(flat.reduced for flat in self._training):
            raise PartitionError(
                "step() has no gradient: there was no backward since the last step or zero_grad(), "
                "or its loss does not depend on a "
                "parameter that trains; call engine.backward(loss) first, and zero_grad() not "
                "between it and step()"
            )
        self._count_micro_batch()
        self._micro = 0
        overflow = self._update()
        self._tell_of_failed_save()
        self.schedule.meet()
        self._meet_to_stop()
        self._reducer.clear()
        scaler = self._losses.update_scale(overflow)
        if self.optimizer is not None:
            self.optimizer.overflow = overflow
        self._publish_scale()
        if self._placement.measures and not overflow:
            self._bring_back_what_fits()
        self.counters.global_steps += 1
        self.counters.skipped_steps += overflow
        self._applied = not overflow
        if overflow and scaler.at_floor:
            logger.warning(
                "step %d skipped: fp16 gradients overflow at the smallest loss scale, %g; the loss "
                "or the learning rate has diverged",
                self.global_steps,
                scaler.scale,
            )
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step()
        self._raise_failed_save()  # last: the step is complete

    def _count_micro_batch(self) -> None:
        self.counters.micro_steps += 1
        self.counters.global_samples += self.train_micro_batch_size_per_gpu() * self.world_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the accumulation window too."""
        self._sanity.on_step()
        self._hooks.reset()
        refuse_half_done(self.updater, "zero_grad()")
        self._reducer.clear()
        self._losses.forget()

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compile each block's forward as ``compile: blocks`` does, with these arguments of
        torch.compile; gathers stay outside.
        """
        self.patches.compile(backend, **{**(compile_kwargs or {}), **options})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    def destroy(self, gather: bool = False) -> None:
        """Take the engine off the model and free gradients and optimizer state. Idempotent.

        A checkpoint that is being written is waited for, and its error raised last. Whole
        parameters become plain ones. Sharded ones stay released until another ``initialize`` takes
        them over; ``gather=True`` (collective) gives them back whole.
        """
        if self._destroyed:
            return
        self._destroyed = True
        failure = self.updater.close() if self.updater is not None else None
        unsaved = self._last_save()
        if self._placement.offloads_anything:
            # no copy may outlive the host memory that it reads or fills
            kinds.synchronize(self.device)
        if self._threads is not None:
            native.set_threads(self._threads)
        self._give_signals_back()
        for unit in self.units:
            if unit.sharded and gather:
                self.schedule.pin(unit)
            elif unit.sharded:
                unit.release(keep_views=True)  # on every rank, whatever is still here on this one
        self._installed.close()  # what was put on last goes first
        self._hooks.remove()
        self._losses.close()
        self._guards.remove()
        if self._scaling_hook is not None:
            self._scaling_hook.remove()
        self.module.__dict__.pop("zero_grad", None)
        for flat in self.flats:
            flat.retire()
        self._placement.close()
        self._reducer.close()
        if self.optimizer is not None:
            restore_optimizer(self.optimizer)
        self.bound = None
        # Sharded values that stay so can be gathered by another engine, over the groups of this
        # one.
        self.mesh.close(groups=gather or not any(flat.sharded for flat in self.flats))
        if failure is not None:  # the values that were given back are not those of the last step
            raise failure
        if unsaved is not None:
            raise unsaved
