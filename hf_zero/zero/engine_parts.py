"""The parts of an engine: construction, removal, and properties that report on them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import dims_in_effect
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.logging import first_line
from hf_zero.offload.placement import Placement
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.own_step import reopen_fused
from hf_zero.zero.gather.model_patches import Override, refuse_foreign_step
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout import planner
from hf_zero.zero.layout.engine_plan import UNCUT, Cuts, EnginePlan, ExtensionsOf
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.materialize import make_mesh
from hf_zero.zero.pass_runner import PassRunner
from hf_zero.zero.reduce.losses import Fp16LossScaler
from hf_zero.zero.sharded_model import ShardedModel, limit_native_threads, retire_flats
from hf_zero.zero.state_bytes import bytes_by_tier, state_bytes
from hf_zero.zero.step.optimizer_patch import patch_optimizer
from hf_zero.zero.step.optimizer_step import OptimizerStep, failed_write
from hf_zero.zero.step.state_changes import StateChanges
from hf_zero.zero.step.step_interfaces import StepHooks, StepMeasures, StopRequests
from hf_zero.zero.step.window import AccumulationWindow, Counters
from hf_zero.zero.transaction import on_rollback, transaction

_guarding: list[RemovableHandle] = []  # the one process-wide hook on optimizer steps


class ModelWrapper(nn.Module):
    """A wrapper that forwards unknown attributes to ``module``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            try:
                return getattr(self.module, name)
            except AttributeError as error:
                if error.name not in (name, None):
                    raise  # of a property of the module
                raise AttributeError(
                    f"neither the engine nor its {type(self.module).__name__} has an attribute "
                    f"{name!r}",
                    name=name,
                    obj=self,
                ) from None


T = TypeVar("T")
E_contra = TypeVar("E_contra", contravariant=True)


class EngineFeatures(Protocol[E_contra]):
    """What an engine of class ``E_contra`` calls of its features, which are applied to it."""

    hooks: StepHooks
    by_name: dict[str, Any]

    def get(self, name: str, kind: type[T]) -> T | None: ...
    def check(self, plan: EnginePlan) -> None: ...
    def bind(self, step: OptimizerStep) -> None: ...
    def apply(self, engine: E_contra) -> None: ...
    def compile(self, backend: str, **options: object) -> None: ...
    def state_dict(self) -> dict[str, dict[str, object]]: ...
    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None: ...
    def remove(self) -> None: ...


class EngineParts(ModelWrapper):
    """The parts of the engine that ``plan`` describes, installed by the constructor (collective)
    and removed by :meth:`destroy`.
    """

    if TYPE_CHECKING:
        # Without these methods of nn.Module a checker reports unknown attributes: those of the
        # model are typed at ``module``.
        __getattr__: None  # type: ignore[assignment,misc]
        __setattr__: None  # type: ignore[assignment,misc]

        # defined by TrainingEngine
        def refuse_update(self) -> None: ...

        def finish_update_in_backward(self) -> None: ...

    # names of parameters and buffers that other pipeline stages hold
    elsewhere: frozenset[str] = frozenset()
    measures: StepMeasures[Any] = StepMeasures()
    feature_set: EngineFeatures[Self]

    def __init__(self, plan: EnginePlan, features: EngineFeatures[Self]):
        super().__init__()
        self.module = plan.model
        self.config = config = plan.settings
        self.written_config = config  # ``config`` follows changes of batch sizes
        self.data_ranks = plan.data_ranks
        self.feature_set = features
        self.optimizer: Any = plan.optimizer
        self.lr_scheduler: Any = None
        # the step after which the engine last stepped the scheduler, and its position then
        self._scheduled: tuple[int, object] | None = None
        self.training_dataloader: Any = None
        # names of frozen parameters that whole state dicts keep even with exclude_frozen
        self.kept_when_frozen: frozenset[str] = frozenset()
        self.counters = Counters()
        self.accumulation = AccumulationWindow(
            config.gradient_accumulation_steps or 1,
            config.managed_gradient_accumulation,
            warns=plan.rank == 0 and plan.optimizer is not None,
        )
        # the compute dtype, if floating-point inputs are cast to it
        self._cast_to = (
            torch.float16 if config.precision == "fp16" and config.fp16.auto_cast else None
        )
        self._installed: ExitStack | None = None  # undone by destroy; None: destroyed
        kinds.set_device(plan.device)
        self.assemble(plan)
        if not _guarding:
            _guarding.append(register_optimizer_step_pre_hook(refuse_foreign_step))
            on_rollback(lambda: _guarding.pop().remove())

    def assemble(self, plan: EnginePlan) -> None:
        """Build the parts of ``plan``, in the constructor and in a rebuild (collective). An
        exception removes them; the caller restores the model and the optimizer.
        """
        # the form in which weights were last sent to another program, and the changes of each flat
        # buffer then
        self.sent_changes: tuple[tuple[object, ...], Mapping[FlatBuffer, int]] | None = None
        mesh = make_mesh(plan)
        try:
            with transaction(), ExitStack() as installed:
                self.changes = StateChanges(mesh.passes)
                self._build(plan, mesh, installed)
                # Without this exchange, a rank could destroy its engine and close connections
                # that another rank is still making.
                get_world_group().all_gather_object(None, "end of making an engine")
                self._installed = installed.pop_all()
        except BaseException as error:
            # Parameters left sharded can be gathered by another engine, over these process groups.
            mesh.close(
                groups=not plan.policy.shards_parameters,
                why=f"could not build the engine ({first_line(error)})",
            )
            raise

    @classmethod
    def plan(
        cls,
        model: nn.Module,
        settings: ZeroConfig,
        optimizer: torch.optim.Optimizer | None,
        extensions_of: ExtensionsOf,
        shard_only: bool = False,
        dims: ParallelDims | None = None,
        cuts: Cuts = UNCUT,
    ) -> EnginePlan:
        """Return the plan of an engine of this class on this rank of the running job, from which it
        is made; see :func:`hf_zero.zero.layout.planner.plan`.

        ``dims``: of the job once ``cuts`` are made; None: the dims in effect.
        """
        return planner.plan(
            model,
            settings,
            dims or dims_in_effect(),
            optimizer,
            extensions_of=extensions_of,
            rank=process_group.get_rank(),
            device=process_group.default_device(),
            cuts=cuts,
            shard_only=shard_only,
        )

    def _build(self: Self, plan: EnginePlan, mesh: Mesh, installed: ExitStack) -> None:
        """Build ``plan`` and install everything on the model; ``installed`` collects the inverse
        operations, in reverse order.
        """
        placement = Placement(self.config, mesh.device, mesh.rank, mesh.pp_stage_ranks)
        installed.callback(placement.close)
        installed.callback(retire_flats, plan, mesh)
        self.feature_set.check(plan)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        # the model's parameters in each group of the optimizer
        self.group_parameters = [list(group["params"]) for group in groups]
        if self.optimizer is not None:
            installed.callback(reopen_fused(self.optimizer))
        self.extensions_of = plan.extensions_of
        sharded = self.sharded_model = ShardedModel(plan, mesh, placement)
        installed.callback(sharded.retire)
        self.mesh, self.device = mesh, mesh.device
        self.global_rank, self.world_size = mesh.rank, mesh.dims.world
        self.units, self.flats, self.schedule = sharded.units, sharded.flats, sharded.schedule
        self.aliases, self.shard_only = sharded.aliases, sharded.shard_only
        sharded.attach(weakref.ref(self))
        if self.optimizer is not None:
            installed.callback(limit_native_threads(placement))
        self._build_step(mesh, installed)
        installed.callback(sharded.patches.remove)
        self.module.__dict__["zero_grad"] = Override(self.zero_grad, self.module, "zero_grad")
        installed.callback(self.module.__dict__.pop, "zero_grad", None)
        if self.optimizer is not None:
            patch_optimizer(self.optimizer, self, installed)
            self.set_scale_on_optimizer()
        # Count the partition as a write: a fetch by a rank that is ahead waits for the shards of
        # this one.
        with sharded.schedule.shards.writing():
            pass
        if sharded.schedule.has_sharded_units:
            sharded.schedule.shards.serve()
        installed.callback(self.feature_set.remove)
        self.feature_set.apply(self)

    def _build_step(self, mesh: Mesh, installed: ExitStack) -> None:
        """Build the backward and the optimizer step of the sharded model, with their reports."""
        config, sharded = self.config, self.sharded_model
        scaler = self._loss_scaler()
        self.optimizer_step = OptimizerStep(
            sharded, self.optimizer, config, scaler, self.feature_set.hooks, self.changes
        )
        # before the parts below, which take over what features set on the step
        self.feature_set.bind(self.optimizer_step)
        self.optimizer_step.check_updates()
        self.updater, self.scaler = self.optimizer_step.updater, scaler
        self.changes.connect(self.updater)
        sharded.patches.refuse_load = self.changes.refuse_until_step
        self.pass_runner = PassRunner(
            sharded, self.optimizer_step, config, self.accumulation, self.counters
        )
        installed.callback(self.pass_runner.remove)
        self.pass_runner.install(scaler)
        requests: type[StopRequests] = provided("stop_requests", StopRequests)
        self.stop_requests = requests(mesh, sharded.schedule.shards)

    def _loss_scaler(self) -> Fp16LossScaler:
        """Return the loss scaler for the start of training."""
        return Fp16LossScaler.from_config(self.config)

    def quiesce(self, what: str) -> None:
        """End what is under way before a rebuild for ``what`` (collective). Raises OffloadError
        after a failed write of offloaded state.
        """
        if failed := self.optimizer_step.failed_writes():
            raise failed_write(failed)
        self.updater.finish()
        self.optimizer_step.take_user_writes()
        self.optimizer_step.complete_state()

    def take_apart(self) -> dict[str, object]:
        """Remove all parts, before :meth:`assemble`, and return them (collective)."""
        before = {
            "scaler": self.scaler.state_dict(),
            "features": self.feature_set.state_dict(),
            "step": self.optimizer_step.kept(),
            "stop_requests": self.stop_requests,
            "forwards": self.pass_runner.module_hooks.forward_count,
        }
        # its handlers stay, so that no signal is lost
        self.stop_requests = type(self.stop_requests)(self.mesh, self.schedule.shards)
        EngineParts.destroy(self)
        return before

    def restore_parts(self, before: Mapping[str, Any]) -> None:
        """Continue after :meth:`assemble` with what :meth:`take_apart` has returned."""
        self.scaler.load_state_dict(before["scaler"])
        self.feature_set.load_state_dict(before["features"])
        self.optimizer_step.restore(before["step"])
        self.pass_runner.module_hooks.forward_count = before["forwards"]
        self.stop_requests = before["stop_requests"]
        self.stop_requests.move(self.mesh, self.schedule.shards)
        self.set_scale_on_optimizer()

    def set_scale_on_optimizer(self) -> None:
        """Set the loss scale on the optimizer, where scripts read it."""
        if self.optimizer is not None:
            self.optimizer.cur_scale = self.optimizer.loss_scale = self.scaler.scale

    def gather_on_use(self, flat: FlatBuffer) -> bool:
        """Gather the unit of ``flat`` for a read of a released parameter if a forward of this
        engine is under way; return whether it did.
        """
        return self.pass_runner.module_hooks.gather_on_use(unit_of(flat))

    def gathered(self, flat: FlatBuffer) -> AbstractContextManager[None]:
        """Return a context in which ``flat`` is whole (collective)."""
        return self.sharded_model.gathered(unit_of(flat))

    def keep_for_backward(self, flat: FlatBuffer, node: torch.autograd.graph.Node) -> None:
        """Keep ``flat`` gathered for ``node``'s backward, recorded inside GatheredParameters."""
        self.pass_runner.module_hooks.keep_for_backward(unit_of(flat), node)

    @torch.no_grad()
    def write_gradient(self, flat: FlatBuffer, name: str, value: torch.Tensor | None) -> None:
        """Set a parameter's gradient between a backward and the step (``parameter.grad = value``):
        every rank passes the whole averaged gradient, or None.

        No communication: each rank keeps its part. The step leaves a parameter unchanged if all
        ranks pass None.
        """
        if self.bound is not None and self.bound.members.phase.in_step:
            self.changes.refuse_gradients(f"writing {name}.grad")
        self.pass_runner.write_gradient(flat, name, value)

    def refuse_unconfirmed(self, what: str) -> None:
        """Raise PartitionError for ``what`` between an update in a backward and its step()."""
        self.changes.refuse_unconfirmed(what)

    def take_user_writes(self) -> None:
        """Copy a script's writes to whole parameters into shards and master weights."""
        self.optimizer_step.take_user_writes()

    @torch.no_grad()
    def refresh_params(self, flats: Sequence[FlatBuffer] | None = None) -> None:
        """Update parameters from the masters (collective): cast into shards, gather whole ones."""
        chosen = self.flats if flats is None else list(flats)
        for flat in chosen:
            if flat.trainable:
                flat.count_change()
        self.schedule.refresh(chosen, chosen)
        if flats is None:
            for forget in self.optimizer_step.feature_hooks.forget:
                forget(self.scaler.scale)

    def reduce_gradients(self) -> None:
        """Reduce unreduced gradients of earlier backwards (collective); steps do so themselves."""
        self.pass_runner.reduce()
        self.pass_runner.reducer.wait_for_offload()

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.config.stage

    @property
    def bound(self) -> BoundOptimizer:
        """The optimizer bound to the shards; None without one, and after :meth:`destroy`."""
        return self.optimizer_step.bound

    @property
    def window_is_open(self) -> bool:
        """Return whether gradients of micro-batches are held that the next update will use."""
        if self.optimizer_step.bound is None or self.changes.unconfirmed is not None:
            return False
        return self.held_micro_batches > 0 and not self.pass_runner.reducer.gradients_lost

    @property
    def held_micro_batches(self) -> int:
        """Number of micro-batches whose gradients the next update will use, or whose update awaits
        its ``step()``.
        """
        return self.accumulation.held_micro_batches

    @property
    def global_steps(self) -> int:
        """Number of steps so far, skipped ones included."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Number of samples of all counted micro-batches on all ranks."""
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches that ``step()`` has counted so far."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps, each because gradients were not finite."""
        return self.counters.skipped_steps

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process, below :attr:`data_ranks`; equal on the ranks of a
        tensor-, sequence- or context-parallel group, which are neighbors.
        """
        ranks = self.mesh.dims.pp_stage_ranks
        return self.global_rank % ranks * self.data_ranks // ranks

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host."""
        return process_group.get_local_rank()

    @property
    def max_norm(self) -> float:
        """The norm to which gradients are clipped; 0.0: no clipping. Can change between steps."""
        return self.optimizer_step.gradient.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        self.optimizer_step.gradient.clip_to(value)

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation.accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def train_batch_size(self) -> int:
        return self.config.train_batch_size or self.data_ranks

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last step's gradient before clipping, without the loss scale; 0.0
        before the first step.

        The host waits for the device, unlike in :meth:`grad_norm_tensor`.
        """
        return float(self.grad_norm_tensor())

    def grad_norm_tensor(self) -> torch.Tensor:
        """Return the same as a 0-dim tensor on the device, which later steps do not change."""
        norm = self.optimizer_step.gradient.last
        return torch.zeros((), dtype=torch.float64, device=self.device) if norm is None else norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each optimizer group for the next step, 0.0 if the optimizer
        computes its own (Adafactor's ``relative_step``); empty without an optimizer. Includes the
        factor of training phases, unlike the rates in the groups and the scheduler.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"] or 0.0) * self.optimizer_step.lr_scale for group in groups]

    def was_step_applied(self) -> bool:
        """Return whether the last step() changed the weights: False between boundaries and after
        an overflow.
        """
        return self.optimizer_step.applied

    def loss_scale(self) -> float:
        """Return the current factor on an fp16 loss; 1.0 in other precisions."""
        return float(self.scaler.scale)

    state_bytes = state_bytes
    bytes_by_tier = bytes_by_tier

    @property
    def destroyed(self) -> bool:
        """Return whether :meth:`destroy` has been called."""
        return self._installed is None

    def refuse_destroyed(self, what: str) -> None:
        """Raise CheckpointError if the engine has released its shards and optimizer state, which
        are needed to ``what``.
        """
        if self.destroyed:
            raise CheckpointError(
                f"the engine was destroyed and holds no weights and no optimizer state to {what}; "
                f"{what} before destroy()"
            )

    def destroy(self, gather: bool = False) -> None:
        """Remove the engine from the model and free gradients and optimizer state. Idempotent.

        Whole parameters become plain ones. Sharded ones stay released until another ``initialize``
        takes them over; ``gather=True`` (collective) makes them whole.
        """
        if self._installed is None:
            return
        self.pass_runner.module_hooks.abort_broken_pass()
        # where steps send differences in few bits, whole values lag behind the master weights
        stale = [flat for flat in self.flats if flat.trainable and flat.spec.sends_differences]
        if gather and stale:
            with torch.no_grad():
                self.schedule.refresh(stale, stale)
        installed, self._installed = self._installed, None
        # Values left sharded can be gathered by another engine, over the process groups of this
        # one.
        groups = gather or not any(flat.sharded for flat in self.flats)
        with ExitStack() as ending:  # from the last to the first
            ending.callback(self.mesh.close, groups=groups)
            ending.push(installed)
            ending.callback(self.sharded_model.release, gather)
            ending.callback(self.stop_requests.restore_handlers)
            ending.callback(self.optimizer_step.close)
            if not gather:
                ending.callback(self.mesh.serve_until_nobody_asks)
