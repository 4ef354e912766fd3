"""Truncation of batches to a sequence length, before the model's forward or in a training loop, and
curriculum learning by it: each step trains on sequences of the length of its schedule.

Sequences are in ``input_ids`` or ``inputs_embeds``, of shape [B, S] or [B, S, …]; in a model with a
decoder, also in ``decoder_input_ids`` or ``labels``. Without these names the first two-dimensional
argument of integers counts as the sequences. Every tensor with both dimensions is truncated with
them, masks [B, 1, S, S] in both of their dimensions; labels of shape [B], or with one number for
each class, are not.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import (
    CURRICULUM_LEARNING,
    LENGTHS,
    METRICS,
    CurriculumSection,
    curricula,
)
from hf_zero.errors import ConfigError
from hf_zero.techniques.schedules import DifficultySchedule
from hf_zero.zero.feature import Feature
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.layout.walk import config_of
from hf_zero.zero.step.window import Counters

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

TOKENS = ("input_ids", "inputs_embeds")
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
POSITIONS = ("position_ids", "decoder_position_ids", "cache_position")
MASKS = ("attention_mask", "decoder_attention_mask")
PER_HEAD = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
LABELS = ("shift_labels", "labels")
COUNT = "num_items_in_batch"
IGNORED = -100  # label that the losses of transformers ignore

_PACKED_ADVICE = (
    "several sequences lie in one row, which a length would cut at random; build the rows of the "
    "first phases shorter, or train without packing"
)

Batch = Mapping[Any, Any]


class SequenceLength:
    """Truncate the arguments of one engine's model, in training, to ``length()`` tokens.

    ``reshape`` keeps the rest of the sequences as further rows, [B, S] -> [B · (S // length),
    length], and drops the remainder. ``section`` is the name of the configuration in errors. Raises
    ConfigError, from a forward, for batches without sequences, with images or audio, packed, or
    padded on the left; the host waits for the values of each truncated batch.
    """

    def __init__(self, length: Callable[[], int | None], section: str, reshape: bool = False):
        self._length = length
        self._section = section
        self._reshape = reshape
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._names: list[str] = []

    def install(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._names = [
            name
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self._hook = model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def cut(self, batch: object) -> object:
        """Return ``batch``, a mapping of tensors by the names of the model's arguments, with
        sequences truncated to this step's length; the same object if none is longer.
        """
        length = self._length()
        if length is None or not isinstance(batch, Mapping):
            return batch
        return self._cut(batch, length)

    def _before(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if not (model.training and torch.is_grad_enabled()):
            return None
        length = self._length()
        if length is None:
            return None
        named: dict[Any, Any] = dict(enumerate(args))
        named.update(kwargs)
        names = dict(enumerate(self._names[: len(args)]))
        inner = {at: value for at, value in named.items() if _is_batch(value)}
        if inner:  # model(batch)
            named |= {at: self._cut_container(value, length) for at, value in inner.items()}
        else:
            by_name = {names.get(at, at): value for at, value in named.items()}
            cut = self._cut(by_name, length)
            if cut is by_name:
                return None
            if by_name.get(COUNT) is not None:
                cut[COUNT] = self._share(by_name, cut) * by_name[COUNT]
            named = {at: cut[names.get(at, at)] for at in named}
        return tuple(named[at] for at in range(len(args))), {name: named[name] for name in kwargs}

    def _cut_container(self, batch: Any, length: int) -> object:
        if isinstance(batch, Mapping):
            return self._cut(batch, length)
        cut = self._cut(dict(enumerate(batch)), length)
        return type(batch)(cut[at] for at in range(len(batch)))

    def _cut(self, batch: Batch, length: int) -> Any:
        """Return a truncated dict, or ``batch`` itself if nothing was truncated."""
        self._refuse(batch)
        model = self._model() if self._model is not None else None
        config = config_of(model)
        two_sided = bool(getattr(config, "is_encoder_decoder", False))
        if two_sided and self._reshape:
            raise ConfigError(
                f"{self._section} makes rows of the rest of sequences, and "
                f"{type(model).__name__} has a sequence for its encoder and one for its decoder; "
                "cut them instead (seqlen_truncate)"
            )
        decoder = {name for name in batch if two_sided and _is_decoders(name)}
        sides = [{name: value for name, value in batch.items() if name not in decoder}]
        sides += [{name: batch[name] for name in decoder}] if decoder else []
        changed: dict[object, object] = {}
        for side, name_of_tokens in zip(sides, (TOKENS, DECODER_TOKENS)):
            tokens = self._tokens(side, name_of_tokens)
            if tokens.shape[1] > length:
                self._look_at(side)
                changed |= self._cut_side(side, tokens.shape[0], tokens.shape[1], length)
        return {**batch, **changed} if changed else batch

    def _cut_side(self, side: Batch, rows: int, whole: int, length: int) -> dict[object, object]:
        changed = {}
        for name, value in side.items():
            dimensions = _sequence_dimensions(name, value, rows, whole)
            if not dimensions:
                if self._reshape and _is_by_row(name, value, rows):
                    raise ConfigError(
                        f"{self._section} makes rows of the rest of sequences, and {name} has one "
                        "value for each row as it was; cut them instead (seqlen_truncate)"
                    )
                continue
            if not self._reshape:
                for dimension in dimensions:
                    value = value.narrow(dimension, 0, length)
            elif len(dimensions) == 1 and value.shape[0] == rows and dimensions == (1,):
                cut = value.narrow(1, 0, whole // length * length)
                value = cut.reshape(-1, length, *value.shape[2:])
            elif name in POSITIONS:
                value = value.narrow(-1, 0, length)
                value = value[:1] if value.dim() == 2 else value
            else:
                raise ConfigError(
                    f"{self._section} makes rows of the rest of sequences, and {name} has shape "
                    f"{tuple(value.shape)}; cut them instead (seqlen_truncate), or give a mask "
                    "of shape [B, S]"
                )
            changed[name] = value.contiguous()
        return changed

    def _tokens(self, side: Batch, names: tuple[str, ...]) -> torch.Tensor:
        for name in names:
            value = side.get(name)
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                return value
        for value in side.values():
            whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
            if whole and value.dim() == 2:
                tokens: torch.Tensor = value
                return tokens
        raise ConfigError(
            f"{self._section} truncates sequences, and the model was called with none: "
            f"{', '.join(map(str, side)) or 'nothing'}; give it {names[0]} of shape [B, S], or "
            "remove the section"
        )

    def _refuse(self, batch: Batch) -> None:
        for name in NOT_TEXT:
            if batch.get(name) is not None:
                raise ConfigError(
                    f"{self._section} truncates sequences of tokens, and the model was called with "
                    f"{name}: what belongs to a picture or a sound would be cut apart; remove the "
                    "section"
                )
        for name in PACKED:
            if batch.get(name) is not None:
                raise ConfigError(
                    f"{self._section} truncates sequences, and {name} says that {_PACKED_ADVICE}"
                )

    def _look_at(self, side: Batch) -> None:
        """Raise ConfigError for batches with unsupported values; waits for the device."""
        for name in POSITIONS:
            positions: Any = side.get(name)
            is_tensor = isinstance(positions, torch.Tensor) and positions.dim() >= 2
            if is_tensor and bool((positions[..., 1:] < positions[..., :-1]).any()):
                raise ConfigError(
                    f"{self._section} truncates sequences, and {name} that begin again within a "
                    f"row say that {_PACKED_ADVICE}"
                )
        for name in MASKS:
            mask: object = side.get(name)
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
                continue
            if bool((mask > 1).any()):
                raise ConfigError(
                    f"{self._section} truncates sequences, and numbers above 1 in {name} say that "
                    f"{_PACKED_ADVICE}"
                )
            if not bool(mask[:, 0].all()):
                raise ConfigError(
                    f"{self._section} truncates sequences at the end, but {name} marks padding on "
                    'the left; set tokenizer.padding_side = "right"'
                )

    def _share(self, before: Batch, after: Batch) -> torch.Tensor | float:
        """Return the share of a micro-batch's labels that remains, as counted by the loss. A number
        of labels in all micro-batches times this is exact only if they all lose the same share.
        """
        labeled = (name for name in LABELS if isinstance(before.get(name), torch.Tensor))
        name: str | None = next(labeled, None)
        if name is None:
            return 1.0
        model: object = self._model() if self._model is not None else None
        shifts = name == "labels" and getattr(model, "loss_type", None) == "ForCausalLM"
        first = 1 if shifts else 0
        remaining, whole = (
            (batch_seen[name][..., first:] != IGNORED).sum()
            if batch_seen[name].dim() > 1
            else batch_seen[name].numel()
            for batch_seen in (after, before)
        )
        share = torch.as_tensor(remaining / whole)
        return torch.where(share > 0, share, torch.ones_like(share))


def _is_batch(value: object) -> bool:
    """Return whether an argument is a container with the tensors of a batch."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value)


def _is_by_row(name: object, value: object, rows: int) -> bool:
    if not isinstance(value, torch.Tensor) or name in PER_HEAD or name in POSITIONS:
        return False
    return value.dim() > 0 and value.shape[0] == rows


def _is_decoders(name: object) -> bool:
    return isinstance(name, str) and (name.startswith("decoder_") or name in LABELS)


def _sequence_dimensions(name: object, value: object, rows: int, whole: int) -> tuple[int, ...]:
    """Return the dimensions of an argument that are sequence dimensions of ``whole`` tokens."""
    if not isinstance(value, torch.Tensor) or name in PER_HEAD:
        return ()
    shape = tuple(value.shape)
    if name in POSITIONS:
        return (len(shape) - 1,) if shape and shape[-1] == whole else ()
    if name in LABELS and len(shape) == 2 and value.is_floating_point():
        return ()  # one number for each class
    by_token = name in (*TOKENS, *DECODER_TOKENS, *LABELS)  # their width may equal S too
    if shape[-2:] == (whole, whole) and len(shape) > 2 and not by_token:
        return (len(shape) - 2, len(shape) - 1)
    return (1,) if shape[:2] == (rows, whole) else ()


class CurriculumLearning(Feature):
    """Cuts batches to the difficulty of the step that is being trained, ``global_steps + 1``."""

    def __init__(self, settings: Mapping[str, object], section: str, reshape: bool = False):
        self.schedule = DifficultySchedule(settings, section)
        self.sequences = SequenceLength(self.length, section, reshape)
        self._section = section
        self._counters = Counters()
        if self.schedule.schedule_type != "custom":
            self.length()

    def length(self) -> int:
        """Return the sequence length of this step, in tokens. Raises ConfigError if below 1."""
        step = self._counters.global_steps + 1
        length = int(self.schedule.at(step))
        if length < 1:
            raise ConfigError(
                f"{self._section} makes sequences of {length} tokens for step {step}; write a "
                "min_difficulty of at least 1 that is not below difficulty_step"
            )
        return length

    @property
    def schedules(self) -> Mapping[str, DifficultySchedule]:
        """The schedule, by the name of the scheduled quantity."""
        return {self._section.rpartition(".")[2]: self.schedule}

    def apply(self, engine: TrainingEngine) -> None:
        self._counters = engine.counters
        if engine.optimizer is not None:
            self.sequences.install(engine.module)

    def prepare_batch(self, batch: object) -> object:
        return self.sequences.cut(batch)

    def state_dict(self) -> dict[str, object]:
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.schedule.load_state_dict(state)

    def remove(self) -> None:
        self.sequences.remove()


def metrics_of(config: ZeroConfig) -> dict[str, dict[str, object]]:
    """Return the settings of each active metric; none if a switch is off. Raises ConfigError for a
    metric without settings.
    """
    metrics: dict[str, Any] = dict(curricula(config.written))
    for name, settings in metrics.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"{METRICS}.{name} = {settings!r} is not a section of keys; write min_difficulty, "
                "max_difficulty and schedule_type there, or remove it"
            )
    return metrics


def from_config(config: ZeroConfig) -> CurriculumLearning | None:
    """Return the curriculum of ``config`` that truncates sequences, or None. Raises ConfigError if
    there are several.
    """
    metrics = metrics_of(config)
    lengths = [name for name in metrics if name in LENGTHS]
    if config.section_of(CurriculumSection).enabled:
        lengths.append(CURRICULUM_LEARNING)
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} each cut sequences to a length of their own; keep one"
        )
    if not lengths:
        return None
    if lengths == [CURRICULUM_LEARNING]:
        return CurriculumLearning(asdict(config.section_of(CurriculumSection)), CURRICULUM_LEARNING)
    name = lengths[0]
    if metrics[name].get("difficulty_type", "value") != "value":
        raise ConfigError(
            f"{METRICS}.{name}.difficulty_type is {metrics[name]['difficulty_type']!r}, and a "
            "length of sequences is a value; write value"
        )
    return CurriculumLearning(metrics[name], f"{METRICS}.{name}", LENGTHS[name])
