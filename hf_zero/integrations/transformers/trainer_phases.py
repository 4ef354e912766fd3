"""Wrappers of ``transformers.trainer`` for training techniques: batches that they change, and
growing accumulation windows.

[Note: windows that grow]
The Trainer counts epochs, steps and the data that a resumed run skips in accumulation windows of
one size. If ``training_phases`` change the batch, an item of its inner loop is a whole window:
``get_batch_samples`` takes as many batches as the phase requires and returns them as one item,
whose batches ``training_step`` trains on one by one. An epoch ends with a window of the remaining
batches, as usual. What the Trainer counts by items, tokens, operations and the part of the epoch,
is counted by the batches of the window.

Imported while ``import transformers`` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import PHASES
from hf_zero.errors import ConfigError
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_batches import data_ranks
from hf_zero.integrations.transformers.trainer_route import engine_of, under_zero
from hf_zero.techniques import training_phases
from hf_zero.techniques.training_phases import phases_of

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments


# of set_initial_training_values: epochs, steps and samples of an epoch, samples of the run, samples
# of a step, length of the loader, steps of the run
TrainingValues = tuple[int, int, int, int, int, int | None, int]


class Window(dict[str, object]):
    """The batches of one accumulation window; as a mapping, the first of them."""

    def __init__(self, batches: Sequence[Mapping[str, object]]):
        super().__init__(batches[0])
        self.batches = batches


def batches_of(inputs: object) -> Sequence[object]:
    """Return the batches of an item of the Trainer's inner loop."""
    return inputs.batches if isinstance(inputs, Window) else (inputs,)


def windows_of(trainer: Trainer) -> Callable[[int], int] | None:
    """Return a function from the optimizer step, counted from 1, to its micro-batches on one rank;
    None if the batch size is constant. Raises ConfigError if the arguments accumulate, too.
    """
    if not under_zero(trainer):
        return None
    written = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    phases = training_phases.from_config(
        ZeroConfig.from_dict(written, allow_auto=True, foreign=True)
    )
    if phases is None or not phases.changes_batches:
        return None
    args = trainer.args
    if args.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"{PHASES} say how many micro-batches a step has, and so does "
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps} of the training "
            "arguments; write 1 there, and train_batch_size in the first phase"
        )
    micro = args.per_device_train_batch_size * data_ranks(trainer)
    phases.resize(micro, args.per_device_train_batch_size)
    return lambda step: phases.batch_size(step) // micro


def epochs(windows: Callable[[int], int], length: int) -> Iterator[tuple[int, int]]:
    """Yield after each optimizer step: the number of ended epochs, and of batches used in the
    current one; an epoch has ``length`` batches.
    """
    ended, used = 0, 0
    for step in count(1):
        used += windows(step)
        if used >= length:
            ended, used = ended + 1, 0
        yield ended, used


def _after(steps: int, windows: Callable[[int], int], length: int) -> tuple[int, int]:
    return next(islice(epochs(windows, length), steps - 1, None))


def take_prepared_batches(
    original: Original,
    self: Trainer,
    epoch_iterator: Iterator[Mapping[str, object]],
    num_batches: int,
    device: torch.device,
) -> object:
    """Wraps ``Trainer.get_batch_samples``: training techniques change the batches of an
    accumulation window before their labels are counted.
    """
    engine = engine_of(self)
    if engine is None:
        return original(self, epoch_iterator, num_batches, device)
    prepared = map(engine.prepare_batch, epoch_iterator)
    phases = phases_of(engine)
    if phases is None or not phases.changes_batches:
        return original(self, prepared, num_batches, device)
    batches, items = original(self, prepared, engine.gradient_accumulation_steps(), device)
    return [Window(batches)] if batches else [], items


def train_on_windows(
    original: Callable[..., torch.Tensor],
    self: Trainer,
    model: nn.Module,
    inputs: object,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor | int:
    """Wraps ``Trainer.training_step``: trains on each batch of a window, and ends the window with
    the last one.
    """
    if not isinstance(inputs, Window):
        with counting_whole_batches(self, inputs):
            return original(self, model, inputs, num_items_in_batch)
    self.current_gradient_accumulation_steps = len(inputs.batches)
    state, losses = self.accelerator.gradient_state, []
    for number, batch in enumerate(inputs.batches, 1):
        state._set_sync_gradients(number == len(inputs.batches))
        with counting_whole_batches(self, batch):
            losses.append(original(self, model, batch, num_items_in_batch))
    return sum(losses)


def count_operations(original: Callable[..., int], self: Trainer, inputs: object) -> int:
    """Wraps ``Trainer.floating_point_ops``: counts those of all batches of a window."""
    return sum(original(self, batch) for batch in batches_of(inputs))


@contextmanager
def counting_whole_batches(trainer: Trainer, inputs: object) -> Iterator[None]:
    """Make TRL's ``num_tokens`` count the tokens of whole batches if a rank has a part of the
    sequences, without an attention mask: TRL counts one row of the part.
    """
    from hf_zero.parallel.sequence.batches import tokens_of

    counted = getattr(trainer, "_total_train_tokens", None)
    positions = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    tokens = None if counted is None else tokens_of(positions)
    yield
    if counted is not None and tokens is not None:
        n = torch.as_tensor(tokens, device=trainer.accelerator.device)
        ranks = trainer.get_tp_size() * trainer.get_sp_size()  # ranks that share the batch
        total = counted + int(trainer.accelerator.gather(n).sum()) // ranks
        vars(trainer)["_total_train_tokens"] = total
        vars(trainer)["_metrics"]["train"]["num_tokens"] = [total]


def count_windows(
    original: Callable[..., TrainingValues],
    self: Trainer,
    args: TrainingArguments,
    dataloader: DataLoader[object],
) -> TrainingValues:
    """Wraps ``Trainer.set_initial_training_values``: computes epochs and steps of windows."""
    from transformers.trainer_utils import has_length

    windows = windows_of(self)
    if windows is not None and not has_length(dataloader):
        raise ConfigError(
            f"{PHASES} change the batch, for which the epochs of the Trainer are counted by the "
            f"length of its loader, and the {type(self.train_dataset).__name__} of train_dataset "
            "has none; pass a dataset with __len__, or leave the batch sizes out of the phases"
        )
    with _lengths_as_they_are(self, args, dataloader):
        values = original(self, args, dataloader)
    if windows is None:
        return values
    _, updates, examples, samples, batch, length, last = values
    assert length is not None  # the loader has a length
    if args.max_steps <= 0:
        needed = math.ceil(args.num_train_epochs * length)
        passed = (ended * length + used for ended, used in epochs(windows, length))
        last = next(step for step, batches in enumerate(passed, 1) if batches >= needed)
    ended, used = _after(last, windows, length)
    if args.max_steps > 0:
        samples = (ended * length + used) * batch
    return ended + (used > 0), updates, examples, samples, batch, length, last


@contextmanager
def _lengths_as_they_are(
    trainer: Trainer, args: TrainingArguments, dataloader: DataLoader[object]
) -> Iterator[None]:
    """Make the Trainer use the length of a loader that is distributed among sequence-parallel
    groups unchanged: it would multiply the length by the group size.
    """
    from hf_zero.parallel.sequence.batches import share_among_groups

    if not (under_zero(trainer) and trainer.get_sp_size() > 1 and share_among_groups(dataloader)):
        yield
        return
    total = trainer.get_total_train_batch_size(args)
    with replaced(trainer, get_sp_size=lambda: 1, get_total_train_batch_size=lambda args: total):
        yield


def resume_windows(
    original: Callable[..., tuple[int, int]],
    self: Trainer,
    max_steps: int,
    num_update_steps_per_epoch: int,
    num_train_epochs: int,
    resume_from_checkpoint: object,
    trial: object,
) -> tuple[int, int]:
    """Wraps ``Trainer._init_training_state``: computes the epochs and batches that a resumed run
    has trained on.
    """
    trained = original(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    )
    windows, steps = windows_of(self), self.state.global_step
    if windows is None:
        return trained
    from hf_zero.integrations.transformers.window_epochs import WindowEpochs

    # here the Trainer's steps are batches: its windows have one batch
    length = num_update_steps_per_epoch
    ended, used = _after(steps, windows, length) if steps else (0, 0)
    used = 0 if self.args.ignore_data_skip else used
    self.pop_callback(WindowEpochs)  # of an earlier train()
    # the first one, before those that read the epoch
    self.callback_handler.callbacks.insert(0, WindowEpochs(self, length, ended, used))
    return ended, used


def count_tokens_once(original: Original, self: Trainer, inputs: object) -> None:
    """Wraps ``Trainer._track_num_input_tokens``: counts the tokens of one of the tensor-parallel
    ranks, and those of all batches of a window.
    """
    before = self.state.num_input_tokens_seen
    for batch in batches_of(inputs):
        original(self, batch)
    if under_zero(self):
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()
