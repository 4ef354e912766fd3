"""``callbacks=[ZeroCallback(zero_config)]``: sharded training in a stock Trainer with stock
arguments, with reports.

The routing itself is in ``trainer_route.py``; the callback holds the config, checks that the
routing happened, and adds memory, throughput and the gradient norm to the Trainer's training logs.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from hf_zero.deepspeed import accelerator
from hf_zero.device import free_memory, kinds
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers.trainer_config import ZeroConfigLike, read
from hf_zero.integrations.transformers.trainer_logs import TrainingLogs
from hf_zero.integrations.transformers.trainer_route import process_under_zero
from hf_zero.logging import JsonObject, log_rank0

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import Trainer, TrainerState, TrainingArguments

MEBIBYTE = 2**20


class ZeroCallback(TrainerCallback):
    """Route the Trainer that receives this callback through hf-zero.

    ``zero_config`` takes the same values as ``hf_zero.TrainingArguments(zero_config=…)``. With None
    the callback only reports, for a Trainer that already uses ZeRO. Because the model exists before
    the Trainer, every rank first holds the whole model, and then shards it.

    Added to every training log: ``memory_mib`` and ``peak_memory_mib`` (this rank's allocated GPU
    memory, or resident memory on a CPU), ``samples_per_second`` and ``tokens_per_second`` (all
    ranks; without evaluation and saving; tokens if the model's main input is [rows, tokens]
    integers, this rank's count times the ranks), ``grad_norm``. The rates are those between two
    logs; with ``metrics.enabled`` they are the engine's, of the last step, and so are ``grad_norm``
    and the rest of ``hf_zero/measures/figures.py``.

    Raises ConfigError if the Trainer cannot use hf-zero, or does not use it.
    """

    def __init__(self, zero_config: ZeroConfigLike | None = None) -> None:
        if zero_config is not None:
            finder.choose()
        self.config: JsonObject | None = None if zero_config is None else read(zero_config)
        self.throughput = Throughput()
        # the Trainer that was made last with this callback
        self.trainer: weakref.ref[Trainer] | None = None
        self._ready = False
        self._said = False

    def on_init_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._ready = process_under_zero()
        if not self._ready:
            raise ConfigError(_UNROUTED)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: object,
        model: nn.Module | None = None,
        optimizer: object = None,
        **kwargs: object,
    ) -> None:
        if not (self._ready and process_under_zero()):
            raise ConfigError(_UNROUTED)
        if self.config is not None and not self._said:
            self._said = True
            log_rank0(
                f"ZeroCallback: stage {self.config['zero_optimization']['stage']} over "
                f"{args.world_size} rank{'s' if args.world_size > 1 else ''}. The model was made "
                "before the Trainer: whole on every rank, unless hf_zero.from_pretrained loaded it"
            )
        self.throughput.start(args, state, None if args.torch_compile else model)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"trainer": None}  # a weak reference cannot be pickled

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object
    ) -> None:
        trainer = None if self.trainer is None else self.trainer()
        if trainer is None or trainer.state is not state:
            # Transformers has made the callback from its class, or another Trainer has it too
            self.throughput.step(args.gradient_accumulation_steps)
        else:
            self.throughput.step(trainer.current_gradient_accumulation_steps)

    def on_evaluate(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.throughput.resume()

    def on_save(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.throughput.resume()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        rates = self.throughput.rates()
        added = {name: logs.get(name, rate) for name, rate in rates.items()}
        added |= memory(args.device)
        logs.update(added)
        if isinstance(logs, TrainingLogs):
            logs.figures = logs.figures - added.keys()  # the terminal shows them
        # The Trainer has copied the logs into its history before this event.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(added)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.throughput.stop()


_UNROUTED = (
    "ZeroCallback is in a Trainer that is not under ZeRO and would train unsharded; pass it in "
    "Trainer(callbacks=[…]), with a zero_config, when the Trainer is made (trainer.add_callback "
    "comes too late), or use hf_zero.TrainingArguments(zero_config=…)"
)


def memory(device: torch.device) -> dict[str, float]:
    """Return ``memory_mib`` and ``peak_memory_mib`` of this rank."""
    if not kinds.is_synchronous(device):
        now, peak = free_memory.allocated(device), free_memory.max_allocated(device)
    else:
        now, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    return {"memory_mib": round(now / MEBIBYTE, 1), "peak_memory_mib": round(peak / MEBIBYTE, 1)}


class Throughput:
    """Samples and tokens per second between two logs, over the time spent in steps."""

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._clear()
        self._mark = 0.0
        self._samples_a_batch = self._ranks = 1

    def _clear(self) -> None:
        self._seconds = 0.0
        self._batches = self._tokens = 0

    def start(self, args: TrainingArguments, state: TrainerState, model: nn.Module | None) -> None:
        """Start measuring; without ``model`` count only samples, and register no hook."""
        self.stop()
        self._clear()
        groups = get_parallel()
        shared = groups.dims if groups is not None else ParallelDims(data=args.world_size)
        self._ranks = shared.gradient_ranks
        rows = state.train_batch_size or args.per_device_train_batch_size
        self._samples_a_batch = rows * shared.data
        if model is not None:
            name = getattr(model, "main_input_name", "input_ids")
            self._hook = model.register_forward_pre_hook(
                lambda module, positional, named: self._count(
                    module, named.get(name, positional[0] if positional else None)
                ),
                with_kwargs=True,
            )
        self.resume()

    def _count(self, module: torch.nn.Module, tokens: object) -> None:
        if (
            module.training
            and isinstance(tokens, torch.Tensor)
            and tokens.dim() == 2
            and not tokens.is_floating_point()
        ):
            self._tokens += tokens.numel()

    def resume(self) -> None:
        self._mark = time.perf_counter()

    def step(self, batches: int) -> None:
        """Count a step of ``batches`` micro-batches on each rank."""
        now = time.perf_counter()
        self._seconds += now - self._mark
        self._mark = now
        self._batches += batches

    def rates(self) -> dict[str, float]:
        """Return the rates since the last call."""
        figures = {}
        if self._seconds > 0:
            figures["samples_per_second"] = round(
                self._batches * self._samples_a_batch / self._seconds, 3
            )
            if self._tokens:
                figures["tokens_per_second"] = round(self._tokens * self._ranks / self._seconds, 1)
        self._clear()
        return figures

    def stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
