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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.techniques import (
    MASK,
    ORDERS,
    SCHEDULE,
    TOKEN_DROP,
    DataEfficiency,
    TokenDropSection,
)
from hf_zero.errors import ConfigError
from hf_zero.ops import philox
from hf_zero.techniques.blocks import (
    Call,
    DrawsForBlocks,
    StackedBlock,
    first_of,
    hidden_state,
    stacked_blocks,
    with_first,
)
from hf_zero.techniques.schedules import Growth
from hf_zero.techniques.sequence_length import DECODER_TOKENS, NOT_TEXT, TOKENS
from hf_zero.techniques.token_cut import TokenCut
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.unit import OutermostForward
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.walk import described

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

BY_ROW = (*TOKENS, *DECODER_TOKENS, *NOT_TEXT)  # model arguments whose first dimension is rows


def tokens_read(section: TokenDropSection) -> Growth:
    """Return the schedule of the number of tokens that the selected blocks read."""
    low, high = section.min_value, section.max_value
    every, steps = section.seq_per_step, section.require_steps
    assert low is not None and high is not None and every is not None and steps is not None
    return Growth(low, high, steps, every, least=-(-low // every) * every)


def sample(
    seed: int,
    at: tuple[int, int, int],
    block: int,
    rows: int,
    tokens: int,
    read: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the indices of the ``read`` of ``tokens`` tokens that each of ``rows`` sequences
    keeps: [rows, read], int64, ascending.

    ``at``: step, forward and data-parallel rank.
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


class TokenDrop(DrawsForBlocks[tuple[int, int, int]]):
    """Random layerwise token dropping on the model of one engine."""

    key = TOKEN_DROP

    def __init__(self, section: TokenDropSection, seed: int):
        super().__init__()
        self._section, self._seed = section, seed
        self._tokens_read = tokens_read(section)
        self._count = ForwardCount()
        self._layers: dict[nn.Module, tuple[int, StackedBlock]] = {}
        self._chosen: set[nn.Module] = set()
        self._rows: set[int] = set()  # batch sizes in the arguments of the current forward
        self._watching: Any = None

    @classmethod
    def from_config(cls, config: ZeroConfig) -> TokenDrop:
        """Return the technique as ``config`` has it. Raises ConfigError for missing or
        contradictory keys.
        """
        section = config.section_of(TokenDropSection)
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
        return cls(section, config.section_of(DataEfficiency).seed)

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for a model without blocks, or without the chosen ones."""
        self._choose(plan.model)

    def _choose(self, model: nn.Module) -> tuple[list[StackedBlock], set[nn.Module]]:
        """Return the repeated blocks of ``model``, and those that drop tokens."""
        section = self._section
        layers = stacked_blocks(model, TOKEN_DROP)
        chosen = section.random_ltd_layer_id
        if chosen is None:
            chosen = tuple(at for at, layer in enumerate(layers) if 1 < layer.place < layer.of)
        wrong = [number for number in chosen if number >= len(layers) or layers[number].keeps]
        total, count = section.total_layer_num, section.random_ltd_layer_num
        if wrong:
            raise ConfigError(
                f"{TOKEN_DROP}.random_ltd_layer_id names {wrong}, and {type(model).__name__} has "
                f"{len(layers)} blocks, of which the first of a stack reads all tokens where it "
                "returns more than a hidden state; leave them out of the list"
            )
        if (total or len(layers)) != len(layers) or (count or len(chosen)) != len(chosen):
            raise ConfigError(
                f"{TOKEN_DROP}: total_layer_num = {total} and random_ltd_layer_num = {count}, but "
                f"{type(model).__name__} has {len(layers)} blocks and "
                f"random_ltd_layer_id {len(chosen)}; correct them, or leave both out"
            )
        blocks = {layers[number].block for number in chosen}
        for block in blocks:
            batch_first = {getattr(part, "batch_first", None) for part in block.modules()}
            if (not self._rows_first) in batch_first and self._rows_first not in batch_first:
                raise self._other_order(block, f"has batch_first = {not self._rows_first}")
        return layers, blocks

    def apply(self, engine: TrainingEngine) -> None:
        layers, self._chosen = self._choose(engine.module)
        # unselected blocks too: each records what it returns beside the hidden state
        self._layers = {layer.block: (number, layer) for number, layer in enumerate(layers)}
        self._watching = engine.module.register_forward_pre_hook(
            Attached(self._watch), with_kwargs=True
        )
        self._take_over(engine, list(self._layers), self._chosen)

    @property
    def _rows_first(self) -> bool:
        return self._section.hidden_state_order == "batch_seq_dim"

    def _watch(self, model: nn.Module, args: Any, kwargs: Mapping[str, object]) -> None:
        """Record the rows in the call of ``model``, where names of its arguments reveal them."""
        named = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
        self._rows = {
            named[name].shape[0]
            for name in BY_ROW
            if isinstance(named.get(name), torch.Tensor) and named[name].dim() > 1
        }

    def _check_call(
        self, block: nn.Module, kwargs: Collection[str], states: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``states``, the hidden state of ``block``. Raise ConfigError if it has another
        dimension order than configured, or the block lacks the configured mask argument.
        """
        mask = self._section.model_mask_name
        names = {*inspect.signature(type(block).forward).parameters, *kwargs}
        if mask != MASK and mask not in names:
            raise ConfigError(
                f"{TOKEN_DROP}.model_mask_name = {mask!r} is no argument of {described(block)}, "
                f"whose mask it is to name{did_you_mean(mask, names - {'self', 'kwargs'})}"
            )
        if states is None or states.dim() != 3:
            has = "no" if states is None else states.dim()
            raise self._uncut(
                block, f"its hidden state has {has} dimensions instead of rows, tokens and width"
            )
        rows, tokens = states.shape[:2]
        if rows not in self._rows and tokens in self._rows:
            raise self._other_order(
                block, f"was called with {rows} rows, and the model with {tokens}"
            )
        return states

    def _uncut(self, block: nn.Module, why: str) -> ConfigError:
        return ConfigError(
            f"{TOKEN_DROP} cannot draw tokens of {described(block)}: {why}; remove the section, or "
            "leave the block out of random_ltd_layer_id"
        )

    def _other_order(self, block: nn.Module, why: str) -> ConfigError:
        order, other = ORDERS if self._rows_first else ORDERS[::-1]
        return ConfigError(
            f"{TOKEN_DROP}.hidden_state_order = {order!r} is not the order of "
            f"{described(block)}, which {why}; write {other}"
        )

    def _draw(self, forward: OutermostForward) -> Collection[nn.Module]:
        if not any(block.training for block in self._layers):
            return ()
        self._rows = set()
        step = self._engine.global_steps
        forward.drawn[self] = (step, self._count.next(step), self._engine.data_rank)
        self._returned.clear()
        return ()

    def _change(
        self,
        drawn: tuple[int, int, int],
        block: nn.Module,
        run: Call,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        number, layer = self._layers[block]
        before = self._returned.take(layer)
        if block not in self._chosen:
            return self._returned.note(layer, run(*args, **kwargs))
        index, state = hidden_state(block, args, kwargs) or (None, None)
        first = self._rows_first
        if state is not None and state.dim() > 1 and not first:
            state = state.transpose(0, 1)
        states = self._check_call(block, kwargs, state)  # [rows, tokens, width]
        rows, tokens = states.shape[:2]
        read = int(self._tokens_read.at(drawn[0]))
        if read >= tokens:
            return self._returned.note(layer, run(*args, **kwargs))
        sampled = sample(self._seed, drawn, number, rows, tokens, read, states.device)
        places = sampled[..., None].expand(-1, -1, states.shape[2])
        part = states.gather(1, places)
        hidden = part if first else part.transpose(0, 1)
        cut = TokenCut(block, sampled, tokens, self._section.model_mask_name, self._uncut)
        args, kwargs = cut.arguments(args, kwargs, index, hidden)
        output = run(*args, **kwargs)
        new = first_of(output)
        if not isinstance(new, torch.Tensor) or new.shape != hidden.shape:
            shape = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise self._uncut(
                block, f"for a hidden state of shape {list(hidden.shape)} it returns {shape}"
            )
        new = states.to(new.dtype).scatter(1, places, new if first else new.transpose(0, 1))
        beside = output if before is None else before
        whole = with_first(beside, new if first else new.transpose(0, 1))
        return self._returned.note(layer, whole)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restart the count of forwards; no state is saved."""
        self._count.restart()

    def remove(self) -> None:
        super().remove()
        if self._watching is not None:
            self._watching.remove()
        self._watching, self._layers = None, {}
