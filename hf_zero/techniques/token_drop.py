"""Random layerwise token dropping (random-LTD, arXiv 2211.11586): during training, selected blocks
read a random subset of the tokens, drawn for each block, and the other tokens bypass the block.

The arguments of such a block are narrowed to the drawn tokens, in order: hidden states, masks,
positions and their embeddings. Its output is scattered to their positions among the unread tokens.
A causal block stays causal because the order is kept. Evaluation, generation and forwards without
gradients read all tokens.

The number of tokens after t steps is DeepSpeed's ``fixed_linear``: ``min + t / require_steps * (max
- min)``, rounded down to a multiple of ``seq_per_step``, at least the first multiple that holds
``min``, at most ``max``. The selection is a function of the seed, step, forward in its window,
block, rank and position (Philox), so recomputations and resumed runs draw the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config import TokenDropSection, ZeroConfig
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.techniques import MASK, ORDERS, SCHEDULE, TOKEN_DROP
from hf_zero.errors import ConfigError
from hf_zero.ops import philox
from hf_zero.techniques.blocks import (
    Call,
    DrawsForBlocks,
    Layer,
    first_of,
    layers_of,
    with_first,
)
from hf_zero.techniques.schedules import Growth
from hf_zero.techniques.sequence_length import DECODER_TOKENS, NOT_TEXT, TOKENS
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.layout.unit import RootForward

BY_ROW = (*TOKENS, *DECODER_TOKENS, *NOT_TEXT)  # model arguments whose first dimension is rows
# belong to the encoder's sequence, except for the query dimension of four-dimensional ones
ELSEWHERE = ("encoder_hidden_states", "encoder_attention_mask", "encoder_decoder_position_bias")
PACKED = ("cu_seq_lens", "cu_seqlens", "max_length_q", "max_length_k")


def tokens_read(section: TokenDropSection) -> Growth:
    """Return the schedule of the number of tokens that the selected blocks read."""
    low, high, every, steps = (
        section.min_value, section.max_value, section.seq_per_step, section.require_steps,
    )  # fmt: skip
    assert low is not None and high is not None and every is not None and steps is not None
    return Growth(low, high, steps, every, least=-(-low // every) * every)


def sample(
    seed: int, at: tuple[int, int, int], block: int, rows: int, tokens: int, read: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Return the indices of the ``read`` of ``tokens`` tokens that each of ``rows`` sequences
    keeps: [rows, read], int64, ascending.

    ``at``: step, forward and rank.
    """
    step, forward, rank = at
    counter = (block, step, forward << 16 | rank)
    words = philox.first_words(seed, counter, rows * tokens, device)
    chosen = words.view(rows, tokens).topk(read, dim=1).indices
    return chosen.sort(dim=1).values


class ForwardCount:
    """Count the training forwards of a step from 0: each draws its own tokens."""

    def __init__(self) -> None:
        self._step, self._number = -1, 0

    def next(self, step: int) -> int:
        """Return the number of a forward that begins after ``step`` steps."""
        self._number = self._number + 1 if step == self._step else 0
        self._step = step
        return self._number

    def restart(self) -> None:
        """Reset the count: a checkpoint resumes at the beginning of a step."""
        self._step = -1


class TokenDrop(DrawsForBlocks):
    """Random layerwise token dropping on the model of one engine."""

    def __init__(self, section: TokenDropSection, seed: int):
        super().__init__()
        self._section, self._seed = section, seed
        self._tokens_read = tokens_read(section)
        self._count = ForwardCount()
        self._layers: dict[nn.Module, tuple[int, Layer]] = {}
        self._chosen: set[nn.Module] = set()
        self._rows: set[int] = set()  # batch sizes in the arguments of the current forward
        self._watching: Any = None

    @classmethod
    def of(cls, config: ZeroConfig) -> TokenDrop | None:
        """Return the technique configured in ``config``, or None. Raises ConfigError for missing or
        contradictory keys.
        """
        section = config.random_ltd
        outer = (config.data_efficiency.enabled, config.data_routing.enabled)
        if not section.enabled or False in outer:
            return None
        for name in ("min_value", "max_value", "require_steps", "seq_per_step"):
            if getattr(section, name) is None:
                inner = "schedule_config." if name.endswith(("steps", "step")) else ""
                raise ConfigError(
                    f"{TOKEN_DROP}.enabled needs {TOKEN_DROP}.{SCHEDULE}.{inner}{name}; write it"
                )
        if (section.min_value or 0) > (section.max_value or 0):
            raise ConfigError(
                f"{TOKEN_DROP}.{SCHEDULE}.min_value = {section.min_value} is above max_value = "
                f"{section.max_value}; exchange them"
            )
        chosen = section.random_ltd_layer_id or ()
        if len({*chosen}) < len(chosen):
            raise ConfigError(
                f"{TOKEN_DROP}.random_ltd_layer_id = {list(chosen)} names a block twice; name each "
                "once"
            )
        return cls(section, config.data_efficiency.seed)

    def install(self, engine: Any) -> None:
        section = self._section
        layers = layers_of(engine.module, TOKEN_DROP)
        chosen = section.random_ltd_layer_id
        if chosen is None:
            chosen = tuple(at for at, each in enumerate(layers) if 1 < each.place < each.of)
        wrong = [number for number in chosen if number >= len(layers) or layers[number].keeps]
        total, count = section.total_layer_num, section.random_ltd_layer_num
        if wrong:
            raise ConfigError(
                f"{TOKEN_DROP}.random_ltd_layer_id names {wrong}, and "
                f"{type(engine.module).__name__} has {len(layers)} blocks, of which the first of a "
                "stack reads all tokens where it returns more than a hidden state; leave them out "
                "of the list"
            )
        if (total or len(layers)) != len(layers) or (count or len(chosen)) != len(chosen):
            raise ConfigError(
                f"{TOKEN_DROP}: total_layer_num = {total} and random_ltd_layer_num = {count}, but "
                f"{type(engine.module).__name__} has {len(layers)} blocks and "
                f"random_ltd_layer_id {len(chosen)}; correct them, or leave both out"
            )
        # unselected blocks too: each records what it returns beside the hidden state
        self._layers = {layer.block: (number, layer) for number, layer in enumerate(layers)}
        self._chosen = {layers[number].block for number in chosen}
        for block in self._chosen:
            said = {getattr(part, "batch_first", None) for part in block.modules()}
            if (not self._rows_first) in said and self._rows_first not in said:
                raise self._other_order(block, f"has batch_first = {not self._rows_first}")
        self._watching = engine.module.register_forward_pre_hook(
            Attached(self._watch), with_kwargs=True
        )
        self._take_over(engine, list(self._layers))

    @property
    def _rows_first(self) -> bool:
        return self._section.hidden_state_order == "batch_seq_dim"

    def _watch(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the number of rows in the call of ``model``, where names of its arguments reveal
        it.
        """
        named = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
        self._rows = {
            named[name].shape[0]
            for name in BY_ROW
            if isinstance(named.get(name), torch.Tensor) and named[name].dim() > 1
        }

    def _check_call(
        self, block: nn.Module, arguments: Mapping[str, Any], states: torch.Tensor
    ) -> None:
        """Raise ConfigError if ``block`` is called with a hidden state of another dimension order
        than configured, or lacks the configured mask argument.
        """
        mask = self._section.model_mask_name
        names = {*inspect.signature(type(block).forward).parameters, *arguments.get("kwargs", ())}
        if mask != MASK and mask not in names:
            raise ConfigError(
                f"{TOKEN_DROP}.model_mask_name = {mask!r} is no argument of "
                f"{type(block).__name__}, whose mask it is to name"
                f"{did_you_mean(mask, names - {'self', 'kwargs'})}"
            )
        if states.dim() != 3:
            raise ConfigError(
                f"{TOKEN_DROP} cannot draw tokens of {type(block).__name__}: its hidden state has "
                f"{states.dim()} dimensions instead of rows, tokens and width; remove the section, "
                "or leave the block out of random_ltd_layer_id"
            )
        rows, tokens = states.shape[:2]
        if rows not in self._rows and tokens in self._rows:
            raise self._other_order(
                block, f"was called with {rows} rows, and the model with {tokens}"
            )

    def _other_order(self, block: nn.Module, why: str) -> ConfigError:
        order, other = ORDERS if self._rows_first else ORDERS[::-1]
        return ConfigError(
            f"{TOKEN_DROP}.hidden_state_order = {order!r} is not the order of "
            f"{type(block).__name__}, which {why}; write {other}"
        )

    def _draw(self, forward: RootForward) -> Collection[nn.Module]:
        if not any(block.training for block in self._layers):
            return ()
        self._rows = set()
        step = self._engine.global_steps
        forward.drawn[self] = (step, self._count.next(step), self._engine.global_rank)
        self._before.clear()
        return ()

    def _call(
        self, block: nn.Module, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        forward = self._engine.backward_pass.hooks.forward_at_work
        at: Any = None if forward is None else forward.drawn.get(self)
        if at is None or not block.training:
            return run(*args, **kwargs)
        number, layer = self._layers[block]
        before = self._before.take(layer)
        if block not in self._chosen:
            return self._before.note(layer, run(*args, **kwargs))
        bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
        given = list(bound.arguments)[1]
        state = bound.arguments[given]
        first = self._rows_first
        states = state if first else state.transpose(0, 1)  # [rows, tokens, width]
        self._check_call(block, bound.arguments, states)
        rows, tokens = states.shape[:2]
        read = int(self._tokens_read.at(at[0]))
        if read >= tokens:
            return self._before.note(layer, run(*args, **kwargs))
        kept = sample(self._seed, at, number, rows, tokens, read, state.device)
        narrow = _Narrow(kept, tokens, self._section.model_mask_name, block)
        for name, value in list(bound.arguments.items())[2:]:
            bound.arguments[name] = narrow.argument(name, value)
        places = kept[..., None].expand(-1, -1, states.shape[2])
        part = states.gather(1, places)
        bound.arguments[given] = part if first else part.transpose(0, 1)
        output = run(*bound.args[1:], **bound.kwargs)
        new = first_of(output)
        new = states.to(new.dtype).scatter(1, places, new if first else new.transpose(0, 1))
        beside = output if before is None else before
        whole = with_first(beside, new if first else new.transpose(0, 1))
        return self._before.note(layer, whole)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restart the count of forwards; no state is saved."""
        self._count.restart()

    def remove(self) -> None:
        super().remove()
        if self._watching is not None:
            self._watching.remove()
        self._watching, self._layers = None, {}


class _Narrow:
    """Narrow the arguments of ``block`` to the tokens ``kept`` [rows, read] of ``tokens``."""

    def __init__(self, kept: torch.Tensor, tokens: int, mask: str, block: nn.Module):
        self._kept, self._tokens, self._mask, self._block = kept, tokens, mask, block

    def argument(self, name: str, value: Any) -> Any:
        """Return ``value``, the argument ``name``, narrowed to the kept tokens. Raises ConfigError
        if it cannot be narrowed.
        """
        if name.startswith(PACKED) or type(value).__name__ == "BlockMask":
            raise self._refusal(name, "of packed sequences, which have no rows to draw from")
        if name == self._mask and value is None:
            if any(getattr(part, "sliding_window", None) for part in self._block.modules()):
                raise self._refusal(name, "None, and its kernel counts a window over what it gets")
            return None
        if isinstance(value, Mapping):
            return {key: self.argument(key, each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(self.argument(name, each) for each in value)
        if hasattr(value, "get_seq_length"):
            return None  # no key-value cache: it would hold only part of the tokens
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [place for place, size in enumerate(value.shape) if size == self._tokens]
        last = value.dim() - 1
        if name in ELSEWHERE:  # [rows, heads, tokens, tokens of the encoder]
            return self._take(value, [2]) if value.dim() == 4 and 2 in sizes else value
        if name in (self._mask, "position_bias") and value.dim() in (3, 4):
            return self._take(value, [place for place in (last - 1, last) if place in sizes])
        if value.dim() in (2, 3) and 1 in sizes and value.shape[0] in (1, len(self._kept)):
            return self._take(value, [1])  # masks, positions and their embeddings
        if sizes:
            raise self._refusal(name, f"a tensor of shape {list(value.shape)}")
        return value

    def _take(self, value: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Return ``value``, whose first dimension is rows or 1, narrowed in the dimensions
        ``places``.
        """
        if places:
            value = value.expand(len(self._kept), *value.shape[1:])
        for place in places:
            shape = [1] * value.dim()
            shape[0], shape[place] = self._kept.shape
            sizes = list(value.shape)
            sizes[place] = self._kept.shape[1]
            value = value.gather(place, self._kept.view(shape).expand(sizes))
        return value

    def _refusal(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"{TOKEN_DROP} cannot draw tokens of {type(self._block).__name__}: its argument {name} "
            f"is {what}; remove the section, or leave the block out of random_ltd_layer_id"
        )
