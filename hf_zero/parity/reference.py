"""The reference engine: what ZeRO must equal, in untouched torch.

Every rank has the whole model, whole gradients and the whole optimizer. ZeRO divides these among
the ranks, and the rest of this package decides when they are sent and where they are kept; none of
that may change a number. So this module uses nothing of it: no hook, no flat buffer, no patched
optimizer, no kernel. Read it from :meth:`Reference.backward` to :meth:`Reference.step`.

In 16 bits the model computes in bf16 or fp16, and the optimizer updates fp32 copies of the weights,
the master weights (Micikevicius et al., arXiv:1710.03740). In fp32 a parameter is its own master.

[Note: where gradients are]
In fp32 autograd adds them up on the parameters, and the average over the ranks replaces them there.
In 16 bits each backward leaves one on the parameters; ``_take_gradients`` adds it to the sums of
this rank in ``_local``, in fp32, and ``_average`` adds the average of these to the gradients of the
masters. A gradient gets the weight of its micro-batch once: in fp32 in :meth:`Reference.backward`
(``_weighted``) or, after a plain ``loss.backward()``, in the step; in 16 bits when it is taken, or
averaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hf_zero.config import ZeroConfig
from hf_zero.distributed import backends, process_group
from hf_zero.errors import CheckpointError, ConfigError, PartitionError
from hf_zero.parity.precision import (
    DTYPES,
    LossScale,
    _half,
    floats,
    is_castable,
    kept_in_fp32,
    mapped,
)

FILE, LATEST = "reference.pt", "latest"
COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class Reference(nn.Module):
    """``module`` under data parallelism, with the methods that training loops call on an engine.

    The loss of :meth:`backward`, or of a plain ``loss.backward()``, is that of one micro-batch on
    this rank. A step uses the mean over ranks and over the micro-batches since the last step.
    """

    # of a run of the same script in full precision: 16-bit inputs are cast, and the steps that an
    # overflow skips in fp16 are skipped
    casts_to_fp32 = False
    skips_steps: frozenset[int] = frozenset()

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig
    ):
        super().__init__()
        self.module, self.optimizer, self.config = module, optimizer, config
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.client_state: Mapping[str, Any] = {}
        self.resumed_from: str | None = None
        self.device = process_group.default_device()
        self.global_rank, self.world_size = process_group.get_rank(), process_group.get_world_size()
        self.local_rank = process_group.get_local_rank()
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.max_norm = float(config.gradient_clipping or 0.0)
        self.accumulation_steps = config.gradient_accumulation_steps or 1
        self.scaler = LossScale(config)
        self.destroyed = self.stop_requested = False
        self._applied, self._norm = False, torch.zeros(())
        self._micro_batches = 0  # of this window, that a step has counted
        # parameters that had a gradient since the script last set gradients to None
        self._present = set[nn.Parameter]()
        self._boundary: bool | None = None  # whether the window ends, where the script says so
        self._syncs = True  # False inside no_sync
        self._in_backward = False  # of a loss that was passed to :meth:`backward`
        # where gradients are (the note)
        self._weighted = False  # fp32: they carry the weight of their micro-batch
        self._averaged = False  # they are those of all ranks
        self._local: dict[nn.Parameter, torch.Tensor] = {}
        # whether a backward came since the last call of step: calls of :meth:`backward` before the
        # next update, those that a step has counted, and the versions of gradients then
        self._backwards = self._counted = 0
        self._versions: list[int | None] = []
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Move the model to the device, with the values of rank 0, and make the master weights."""
        self.module.to(self.device)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            process_group.broadcast(tensor, 0)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        self.trained: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self._versions = self._versions_now()
        precision = self.config.precision
        if precision == "fp32":
            return
        # the order of the optimizer
        self.masters = {
            p: nn.Parameter(p.detach().to(torch.float32, copy=True), p.requires_grad)
            for p in self.trained
            if is_castable(p)
        }
        in_fp32 = kept_in_fp32(self.module, precision, self.config.keep_in_fp32_modules)
        for name, parameter in self.module.named_parameters():
            if is_castable(parameter):
                dtype = torch.float32 if name in in_fp32 else DTYPES[precision]
                parameter.data = parameter.data.to(dtype)
        for group in groups:
            group["params"] = [self.masters.get(p, p) for p in group["params"]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._averaged = False
        if self.masters:
            self._take_gradients(1 / self.accumulation_steps)  # of a plain loss.backward()
        fp16 = self.config.precision == "fp16"
        if fp16 and self.config.fp16.auto_cast:
            args, kwargs = mapped((args, kwargs), _half)
        if self.casts_to_fp32:
            args, kwargs = floats((args, kwargs))
        with self._autocast():
            outputs = self.call_module(args, kwargs)
        return mapped(outputs, self._scaled) if fp16 and torch.is_grad_enabled() else outputs

    def call_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        autocast = self.config.torch_autocast
        if not autocast.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[autocast.dtype])

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Add the gradients of ``loss`` to those of the window, and return ``loss``.

        ``scale_wrt_gas=False``: it is divided by the number of micro-batches already.
        """
        if self.masters:
            self._take_gradients(1 / self.accumulation_steps)
        weight = 1 / self.accumulation_steps if scale_wrt_gas else 1.0
        self._in_backward = True
        self._backwards += 1
        try:
            # in 16 bits the weight follows in fp32, where it rounds less
            factor = self.scaler.scale if self.masters else weight
            wide = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
            (wide * factor).backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        self._weighted, self._averaged = True, False
        self._end_micro_batch(weight)
        if self.ends_window and self._syncs and self._averages:
            self._average()  # a script may read and change them before the step
        return loss

    def _end_micro_batch(self, weight: float) -> None:
        """Take the gradients of a micro-batch in, in 16 bits."""
        if self.masters and self.config.stage >= 2 and self._syncs and not self._local:
            # ZeRO keeps no whole gradient then, and sends that of each micro-batch in 16 bits
            self._take_gradients(1.0)
            self._average(weight)
        elif self.masters:
            self._take_gradients(weight)

    @torch.no_grad()
    def _take_gradients(self, weight: float) -> None:
        """Add the gradients of the last backward to :attr:`_local`, in fp32: sums of 16-bit numbers
        lose small addends. One that a script has written since the average replaces it.
        """
        for parameter, master in self.masters.items():
            if parameter.grad is not None and self._averaged:
                master.grad, parameter.grad = parameter.grad.float() * self.scaler.scale, None
            elif parameter.grad is not None:
                if parameter in self._local:
                    self._local[parameter].add_(parameter.grad, alpha=weight)
                else:
                    self._local[parameter] = parameter.grad.float() * weight
                parameter.grad = None

    @torch.no_grad()
    def _average(self, weight: float = 1.0) -> None:
        """Average the gradients over the ranks by one all-reduce of each, rounded to the dtype that
        the parameter computes in. A rank that has not used a parameter adds zeros; one that no
        rank has used keeps no gradient.
        """
        grads = self._local if self.masters else {p: p.grad for p in self.trained}
        used = torch.tensor([float(grads.get(p) is not None) for p in self.trained])
        used = used.to(self.device)
        process_group.all_reduce(used)
        factor = weight / (self.world_size if self._averages else 1)
        wire, adds_in_fp32 = self.config.communication_data_type, self._adds_in_fp32
        for parameter, ranks in zip(self.trained, used.tolist()):
            if not ranks:
                continue
            gradient = grads.get(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            sent = (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()
            if self.world_size > 1:
                sent = sent.to(DTYPES[wire] if wire else parameter.dtype)
                sent = sent.float() if adds_in_fp32 else sent
                process_group.all_reduce(sent)
            master = self.masters.get(parameter)
            if master is None:
                parameter.grad = sent.to(parameter.dtype) * factor
            elif master.grad is None:
                master.grad = sent.float() * factor
            else:
                master.grad += sent.float() * factor
        self._local, self._averaged = {}, True

    @property
    def _adds_in_fp32(self) -> bool:
        """Whether ranks add 16-bit gradients in fp32, as over gloo where each has a shard."""
        has_shards = self.world_size > 1 and self.config.stage > 0
        return has_shards and backends.serving_backend(self.device) == "gloo"

    @property
    def _averages(self) -> bool:
        return self.config.gradient_allreduce_op == "mean"

    def step(self) -> None:
        """At the end of a window clip, update, and step the scheduler; else count the micro-batch.
        An fp16 gradient that overflows skips the update. Without a backward since the last call it
        does nothing, as an optimizer of torch without gradients.
        """
        if self.optimizer is None:
            raise ConfigError(
                "step() needs an optimizer; pass one to hf_zero.initialize or name one in the "
                "config"
            )
        if self._backwards == self._counted and self._versions_now() == self._versions:
            return
        if any(parameter.grad is not None for parameter in self.masters) and not self._averaged:
            self._end_micro_batch(1 / self.accumulation_steps)  # of a plain loss.backward()
        self._applied = False
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.world_size
        if not (self.ends_window or not self.config.managed_gradient_accumulation):
            self._micro_batches += 1
            self._counted, self._versions = self._backwards, self._versions_now()
            return
        self._finish_gradients()
        self._update(self.optimizer)
        self._present |= {p for p in self.trained if self.masters.get(p, p).grad is not None}
        self._drop_gradients()

    def _versions_now(self) -> list[int | None]:
        """Return the versions of the gradients on parameters, which a backward changes."""
        return [None if p.grad is None else p.grad._version for p in self.trained]

    def _finish_gradients(self) -> None:
        """Leave the gradient of the window, of all ranks, on the parameters that are updated."""
        window = 1 / self.accumulation_steps
        if self.masters:
            self._take_gradients(window)
        if not self._averaged:
            plain = not self.masters and not self._weighted
            self._average(window if plain else 1.0)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        updated = [self.masters.get(p, p) for p in self.trained]
        grads = [p.grad for p in updated if p.grad is not None]
        if not grads:
            raise PartitionError(
                "step() has no gradient: there was no backward since the last step, or its loss "
                "does not depend on a parameter that trains; call engine.backward(loss) first"
            )
        for gradient in grads:
            gradient /= self.scaler.scale
        self._norm = clip_grad_norm_(updated, self.max_norm or float("inf"))
        overflow = self.scaler.skips and not bool(torch.isfinite(self._norm))
        overflow = overflow or self.global_steps + 1 in self.skips_steps
        if not overflow:
            with torch.no_grad():
                for parameter, master in self.masters.items():  # what a script has written counts
                    kept = parameter == master.to(parameter.dtype)
                    master.copy_(torch.where(kept, master, parameter.float()))
            type(optimizer).step(optimizer)
            with torch.no_grad():
                for parameter, master in self.masters.items():
                    parameter.copy_(master)
        self.scaler.update(overflow)
        self.global_steps += 1
        self.skipped_steps += overflow
        self._applied = not overflow
        scheduler = self.lr_scheduler
        if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau) and not overflow:
            scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None or zero; the next micro-batch is the first of its window."""
        window = {p for p in self.trained if p.grad is not None or p in self._local}
        self._present = set() if set_to_none else self._present | window
        self._drop_gradients()
        for parameter in self._present:
            parameter.grad = torch.zeros_like(parameter)
        self._versions = self._versions_now()

    def _drop_gradients(self) -> None:
        for parameter in (*self.module.parameters(), *self.trained, *self.masters.values()):
            parameter.grad = None
        self._local, self._weighted, self._averaged = {}, False, False
        self._micro_batches = self._backwards = self._counted = 0
        self._versions = self._versions_now()

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        """Return ``output`` with the loss scale in the gradient of a plain ``loss.backward()``."""
        return _Scaled.apply(self, output) if output.requires_grad else output

    @property
    def ends_window(self) -> bool:
        """Return whether the backward under way, or the next, ends the accumulation window."""
        if self._boundary is not None:
            return self._boundary
        managed = self.config.managed_gradient_accumulation
        return managed and self._micro_batches + 1 >= self.accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.ends_window

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def restart_window(self) -> None:
        self.zero_grad()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        micro = self.train_micro_batch_size_per_gpu() * self.world_size
        self.accumulation_steps = train_batch_size // micro

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def train_batch_size(self) -> int:
        return self.config.train_batch_size or self.world_size

    def get_global_grad_norm(self) -> float:
        return float(self._norm)

    def grad_norm_tensor(self) -> torch.Tensor:
        return self._norm

    def get_lr(self) -> list[float]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"] or 0.0) for group in groups]

    def was_step_applied(self) -> bool:
        return self._applied

    def loss_scale(self) -> float:
        return self.scaler.scale

    @property
    def stage(self) -> int:
        return self.config.stage

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    @torch.no_grad()
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.module.load_state_dict(*args, **kwargs)
        for parameter, master in self.masters.items():
            master.copy_(parameter)
        return answer

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", **unused: Any
    ) -> bool:
        if self.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(self.module.state_dict(), Path(save_dir, save_filename))
        process_group.barrier()
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> bool:
        """Write everything into one file of torch, from rank 0."""
        folder = Path(self._folder(save_dir))
        tag = tag or f"global_step{self.global_steps}"
        if self.global_rank == 0:
            (folder / tag).mkdir(parents=True, exist_ok=True)
            torch.save(self._everything(client_state or {}), folder / tag / FILE)
            (folder / LATEST).write_text(tag)
        process_group.barrier()
        return True

    def _folder(self, given: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
        folder = given or self.config.checkpoint.folder
        if not folder:
            raise ConfigError("no folder is given, and checkpoint.folder names none; pass one")
        return folder

    def _everything(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        position = {parameter: number for number, parameter in enumerate(self.masters)}
        named = self.module.named_parameters(remove_duplicate=False)
        return {
            "module": self.module.state_dict(),
            "master_by_name": {name: position[p] for name, p in named if p in position},
            "masters": [master.detach() for master in self.masters.values()],
            "optimizer": None if optimizer is None else type(optimizer).state_dict(optimizer),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "counters": tuple(getattr(self, name) for name in COUNTERS),
            "scaler": vars(self.scaler).copy(),
            "client_state": dict(client_state),
        }

    @torch.no_grad()
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **unused: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what :meth:`save_checkpoint` has written; return its path and the client state."""
        folder = Path(self._folder(load_dir))
        if tag is None and (folder / LATEST).is_file():
            tag = (folder / LATEST).read_text()
        file = folder / (tag or "") / FILE
        if not file.is_file():
            raise CheckpointError(
                f"{file} does not exist: the reference resumes only from checkpoints that it has "
                "written; begin the script without a checkpoint"
            )
        saved = torch.load(file, map_location=self.device, weights_only=False)
        self.module.load_state_dict(saved["module"], strict=load_module_strict)
        for master, value in zip(self.masters.values(), saved["masters"]):
            master.copy_(value)
        if not load_module_only:
            for name, count in zip(COUNTERS, saved["counters"]):
                setattr(self, name, count)
            vars(self.scaler).update(saved["scaler"])
            if load_optimizer_states and self.optimizer is not None:
                type(self.optimizer).load_state_dict(self.optimizer, saved["optimizer"])
            if load_lr_scheduler_states and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(saved["scheduler"])
        return str(file.parent), saved["client_state"]

    def wait_for_checkpoint(self, who: str = "", below: str | None = None) -> None:
        """Return at once: every save is complete when it returns."""

    def prepare_batch(self, batch: Any) -> Any:
        return batch

    def stop_on(self, *signals: int) -> None:
        """Listen to nothing: the comparison ends the run."""

    def request_stop(self) -> None:
        self.stop_requested = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a compiled block computes the same."""

    @torch.no_grad()
    def destroy(self, gather: bool = False) -> None:
        """Give the optimizer its parameters back."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        parameters = {id(master): parameter for parameter, master in self.masters.items()}
        for group in groups:
            group["params"] = [parameters.get(id(p), p) for p in group["params"]]
        self.destroyed = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self.module, name)


class _Scaled(torch.autograd.Function):
    """Identity whose gradient gets the loss scale, unless the loss had it."""

    @staticmethod
    def forward(ctx: Any, engine: Reference, output: torch.Tensor) -> torch.Tensor:
        ctx.engine = engine
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        engine: Reference = ctx.engine
        return None, grads[0] if engine._in_backward else grads[0] * engine.scaler.scale
