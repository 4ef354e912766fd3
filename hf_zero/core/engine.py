"""The engine: a model whose parameters, gradients and optimizer state are sharded, with the
training step around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_zero.config import ZeroConfig
from hf_zero.core.backward import AccumulationWindow, Backward, Counters
from hf_zero.core.consolidate import consolidated, whole_state_dict
from hf_zero.core.guards import Override, Patches, refuse_foreign_step
from hf_zero.core.optimizer_step import OptimizerStep, refuse_half_done
from hf_zero.core.sanity import SanityChecks
from hf_zero.core.sharded_model import ShardedModel, retire_flats, take_native_threads
from hf_zero.core.state_bytes import bytes_by_tier, state_bytes
from hf_zero.core.stopping import StopRequests
from hf_zero.core.takeover import patch_optimizer, restore_optimizer
from hf_zero.device import kinds
from hf_zero.distributed import process_group, rank_status
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logs import logger
from hf_zero.parameters.tree import map_tensors
from hf_zero.storage.placement import Placement
from hf_zero.units.flat_buffer import FlatBuffer
from hf_zero.units.policy import POLICIES
from hf_zero.units.precision import LossScaler
from hf_zero.units.unit import Unit

_guarding: list[Any] = []  # the one process-wide hook on optimizer steps


class TrainingEngine(nn.Module):
    """``model`` under ZeRO: forward, backward, step. :class:`hf_zero.Engine` is one that saves
    checkpoints, too.

    The loss given to :meth:`backward` (or a plain ``loss.backward()``) is the unscaled loss of one
    micro-batch on this rank; the engine averages over the accumulation window and over ranks, and
    scales for fp16. With ``shard_only`` it trains nothing: parameters keep their dtypes, and may be
    frozen and unfrozen.
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
        self.optimizer: Any = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.shard_only = shard_only
        # names that whole state dicts without frozen parameters have all the same
        self.kept_when_frozen: frozenset[str] = frozenset()
        self.counters = Counters()
        self.accumulation = AccumulationWindow(config.gradient_accumulation_steps or 1)
        self._installed: ExitStack | None = None  # what destroy undoes; None: destroyed
        device = device or process_group.default_device()
        kinds.set_device(device)
        policy = POLICIES[config.stage]
        mesh = Mesh(
            policy.shards(process_group.get_world_size(), config.replicate_size),
            device,
            config.timeout,
            config.offload_optimizer.on and policy.gathers_after_step,
        )
        try:
            with ExitStack() as installed:
                self._build(mesh, installed)
                self._installed = installed.pop_all()
        except BaseException as error:
            mesh.close(
                groups=not policy.shards_parameters,
                why=f"could not build the engine ({rank_status.first_line(error)})",
            )
            raise
        if not _guarding:
            _guarding.append(register_optimizer_step_pre_hook(refuse_foreign_step))

    def _build(self, mesh: Mesh, installed: ExitStack) -> None:
        """Partition the model and put everything on it; ``installed`` undoes it, in reverse."""
        config, model, device = self.config, self.module, mesh.device
        placement = Placement(config, device, mesh.rank, mesh.world)
        installed.callback(placement.close)
        installed.callback(retire_flats, model, mesh)
        self.patches.check(model, not POLICIES[config.stage].shards_parameters)
        precision = None if self.shard_only else config.precision
        sharded = ShardedModel(model, config, mesh, placement, self.optimizer, precision)
        self.sharded_model = sharded
        installed.callback(sharded.retire)
        sharded.attach(weakref.ref(self))
        if self.optimizer is not None:
            installed.callback(take_native_threads(placement))
        scaler = LossScaler.from_config(config)
        sanity = SanityChecks(device, self.accumulation.steps, config.precision, mesh.rank)
        self.optimizer_step = OptimizerStep(sharded, self.optimizer, config, scaler, sanity)
        self.backward_pass = Backward(
            sharded, self.optimizer_step, config, self.accumulation, self.counters, sanity
        )
        installed.callback(self.backward_pass.remove)
        self.backward_pass.install(scaler)
        installed.callback(sharded.guards.remove)
        installed.callback(self.patches.remove)
        self.patches.install(model, sharded.units, device, mesh.rank == 0)
        model.zero_grad = Override(self.zero_grad, model, "zero_grad")  # type: ignore[method-assign, assignment]
        installed.callback(model.__dict__.pop, "zero_grad", None)
        self.stop_requests = StopRequests(mesh, sharded.schedule.shards)
        if self.optimizer is not None:
            patch_optimizer(self.optimizer, self)
            installed.callback(restore_optimizer, self.optimizer)
            self.publish_scale()
        with sharded.schedule.shards.writing():
            pass  # what the partition wrote

    def publish_scale(self) -> None:
        """Show the loss scale on the optimizer, where scripts look for it."""
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
        """Backpropagate the loss of a micro-batch, a scalar, unscaled, and return it as it is.

        ``scale_wrt_gas=False``: the caller has divided by the accumulation steps (or by the tokens
        of the window) already.
        """
        self.backward_pass.run(loss, retain_graph, None if scale_wrt_gas else 1.0)
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside belong to an accumulation window that goes on: stages 0 and 1 keep their
        gradients on this rank.

        Stages 2 and 3 keep no whole gradient and reduce in every backward all the same; the result
        is equal.
        """
        self.backward_pass.take_in_unannounced()
        with self.accumulation.no_sync():
            yield
            self.backward_pass.take_in_unannounced()

    @property
    def in_no_sync(self) -> bool:
        """Whether a ``no_sync`` block is open."""
        return not self.accumulation.syncs

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from outside whether the next backward ends the accumulation window; it holds
        until said otherwise.
        """
        self.accumulation.boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward under way, or the next, ends the accumulation window."""
        return self.accumulation.ends

    @property
    def window_is_open(self) -> bool:
        """Whether micro-batches have been counted that the next update will use."""
        return self.accumulation.micro_batches > 0 and not self.backward_pass.reducer.spoiled

    def reduce_gradients(self) -> None:
        """Reduce what backwards have left unreduced (collective); a step does this by itself."""
        self.backward_pass.reduce()
        self.backward_pass.reducer.wait()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the gradient that the next step will use, before clipping, loss scale
        removed; 0.0 without one (collective).
        """
        self.backward_pass.reduce()
        return self.optimizer_step.gradient_norm()

    @torch.no_grad()
    def write_gradient(self, flat: FlatBuffer, name: str, value: torch.Tensor | None) -> None:
        """What ``parameter.grad = value`` does between a backward and the step: every rank passes
        the whole averaged gradient, or None.

        No communication: each rank keeps its part, and a parameter for which all ranks have None is
        left as it is by the step.
        """
        self.backward_pass.write(flat, name, value)

    # ---- parameters ----

    def gather_on_use(self, unit: Unit) -> bool:
        """For a parameter that is read while released: gather it if a forward of this engine is
        under way.
        """
        return self.backward_pass.hooks.gather_on_use(unit)

    def gathered(self, unit: Unit) -> AbstractContextManager[None]:
        """A context in which ``unit`` is whole (collective)."""
        return self.sharded_model.gathered(unit)

    def hold(self, unit: Unit, node: torch.autograd.graph.Node) -> None:
        """Keep ``unit``, which is gathered, for the backward of ``node``, which was recorded
        inside GatheredParameters.
        """
        self.backward_pass.hooks.hold(unit, node)

    def take_user_writes(self) -> None:
        """Take what the script has written to whole parameters over into shards and master
        weights.
        """
        self.optimizer_step.take_user_writes()

    @torch.no_grad()
    def refresh_params(self, flats: Sequence[FlatBuffer] | None = None) -> None:
        """Bring parameters up to date with the masters (collective): cast into shards; gather
        where they are whole.
        """
        chosen = self.flats if flats is None else list(flats)
        self.sharded_model.refresh(chosen, chosen)

    # ---- the step ----

    @torch.no_grad()
    def step(self) -> None:
        """At the end of an accumulation window: clip, update, let the scheduler step. Elsewhere:
        count the micro-batch.

        In fp16 a gradient that overflowed skips the update: weights, optimizer and scheduler stay
        as they are.
        """
        if self.destroyed:
            raise PartitionError(
                "step() of an engine that was destroyed; train with another one: "
                "hf_zero.initialize(model=..., optimizer=...)"
            )
        self.backward_pass.reset(counts_only=not self.accumulation.ends)
        self.backward_pass.take_in_unannounced()
        self.sharded_model.guards.check()
        self.backward_pass.refuse_unusable()
        optimizer_step, losses = self.optimizer_step, self.backward_pass.losses
        optimizer_step.applied = False
        if not self.accumulation.ends:
            self._count_micro_batch()
            self.accumulation.micro_batches += 1
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
        optimizer_step.refuse_failed_writes()
        self.backward_pass.reduce_for_step()
        if not self.config.zero.ignore_unused_parameters:
            self.backward_pass.refuse_unused()
        self._count_micro_batch()
        self.accumulation.micro_batches = 0
        overflow = optimizer_step.update(self.global_steps, losses.may_overflow)
        self._publish_events()
        self.schedule.meet()
        self.stop_requests.end_step()
        self.backward_pass.reducer.clear()
        scaler = losses.update_scale(overflow)
        if self.optimizer is not None:
            self.optimizer.overflow = overflow
        self.publish_scale()
        if self.sharded_model.placement.measures and not overflow:
            optimizer_step.bring_back_what_fits()
        self.counters.global_steps += 1
        self.counters.skipped_steps += overflow
        optimizer_step.applied = not overflow
        if overflow and scaler.at_floor:
            logger.warning(
                "step %d skipped: fp16 gradients overflow at the smallest loss scale, %g; the loss "
                "or the learning rate has diverged",
                self.global_steps,
                scaler.scale,
            )
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step()

    def _publish_events(self) -> None:
        """Publish what the other ranks are to see when all meet at the end of this step."""

    def _count_micro_batch(self) -> None:
        self.counters.micro_steps += 1
        self.counters.global_samples += self.train_micro_batch_size_per_gpu() * self.world_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the accumulation window too. Its count of micro-batches
        stays; :meth:`restart_window` begins it anew.
        """
        self.backward_pass.reset()
        refuse_half_done(self.updater, "zero_grad()")
        self.backward_pass.reducer.clear()
        self.backward_pass.losses.forget()

    def restart_window(self) -> None:
        """Forget all gradients and begin the accumulation window anew: the next micro-batch is its
        first. Every rank must call it, or none.
        """
        self.zero_grad()
        self.accumulation.micro_batches = 0

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

    # ---- whole values, stopping ----

    def consolidated(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters on the CPU, one unit at a time, under their first names (collective:
        exhaust it on every rank).
        """
        return consolidated(self, dtype)

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, **kwargs: Any
    ) -> dict[str, Any] | None:
        """The consolidated model's state dict, as the bare model's. Collective at stage 3.

        ``rank0_only``: others get None, and hold one unit at a time.
        """
        if rank0_only:
            return whole_state_dict(self, everywhere=False)
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``load_state_dict`` of the bare model, over whole values (collective at stage 3)."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def stop_on(self, *signals: int) -> None:
        """Listen for signals, and for :meth:`request_stop`, from now on. Every rank must call it
        before the next step; after each, ``if engine.stop_requested``, save and leave.

        A signal among ``signals`` no longer ends this process. What handled it before is called
        too, and comes back with another ``stop_on()`` or at ``destroy``. Needs the main thread if
        there are signals.
        """
        self.stop_requests.listen(*signals)

    def request_stop(self) -> None:
        """Ask all ranks to stop after one of the next steps.

        One rank is enough; signal handlers may call it.
        """
        self.stop_requests.request()

    @property
    def stop_requested(self) -> bool:
        """Whether a rank was asked to stop.

        It changes at the end of a step, on all ranks at that of the same one.
        """
        return self.stop_requests.agreed

    # ---- what the engine says about itself ----

    stage = property(attrgetter("config.stage"))
    mesh = property(attrgetter("sharded_model.mesh"))
    device = property(attrgetter("sharded_model.mesh.device"))
    global_rank = property(attrgetter("sharded_model.mesh.rank"))
    world_size = property(attrgetter("sharded_model.mesh.world"))
    shard_rank = property(attrgetter("sharded_model.mesh.shard.rank"))
    shard_world = property(attrgetter("sharded_model.mesh.shard.size"))
    units = property(attrgetter("sharded_model.units"))
    flats = property(attrgetter("sharded_model.flats"))
    schedule = property(attrgetter("sharded_model.schedule"))
    aliases = property(attrgetter("sharded_model.aliases"))
    param_dtypes = property(attrgetter("sharded_model.param_dtypes"))
    bound = property(attrgetter("optimizer_step.bound"))
    updater = property(attrgetter("optimizer_step.updater"))
    updates_state = property(attrgetter("optimizer_step.updates_state"))
    scaler = property(attrgetter("backward_pass.losses.scaler"))
    global_steps = property(attrgetter("counters.global_steps"))
    global_samples = property(attrgetter("counters.global_samples"))
    micro_steps = property(attrgetter("counters.micro_steps"))
    skipped_steps = property(attrgetter("counters.skipped_steps"))

    @property
    def local_rank(self) -> int:
        """This rank among those of its host."""
        return process_group.get_local_rank()

    @property
    def max_norm(self) -> float:
        """To which the gradient is clipped; 0.0: not. It may change between steps."""
        return self.optimizer_step.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        self.optimizer_step.max_norm = value

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation.steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def train_batch_size(self) -> int:
        return self.config.train_batch_size or self.world_size

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradient before clipping, loss scale removed; 0.0 before the
        first step.

        The host waits for the device: :meth:`grad_norm_tensor` does not.
        """
        return float(self.grad_norm_tensor())

    def grad_norm_tensor(self) -> torch.Tensor:
        """The same as a 0-dim tensor on the device, which later steps leave as it is."""
        norm = self.optimizer_step.norm
        return torch.zeros((), dtype=torch.float64, device=self.device) if norm is None else norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group of the optimizer; empty without one."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"]) for group in groups]

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights: False between boundaries and after an
        overflow.
        """
        return self.optimizer_step.applied

    def loss_scale(self) -> float:
        """What an fp16 loss is multiplied by now; 1.0 in other precisions."""
        return float(self.scaler.scale)

    state_bytes = state_bytes
    bytes_by_tier = bytes_by_tier

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    @property
    def destroyed(self) -> bool:
        """Whether :meth:`destroy` has been called."""
        return self._installed is None

    def destroy(self, gather: bool = False) -> None:
        """Take the engine off the model and free gradients and optimizer state. Idempotent.

        Whole parameters become plain ones. Sharded ones stay released until another ``initialize``
        takes them over; ``gather=True`` (collective) gives them back whole.
        """
        if self._installed is None:
            return
        installed, self._installed = self._installed, None
        # Sharded values that stay so can be gathered by another engine, over the groups of this
        # one.
        groups = gather or not any(flat.sharded for flat in self.flats)
        with ExitStack() as ending:  # from the last to the first
            ending.callback(self.mesh.close, groups=groups)
            ending.push(installed)
            ending.callback(self.sharded_model.release, gather)
            ending.callback(self.stop_requests.restore_handlers)
            ending.callback(self.optimizer_step.close)
