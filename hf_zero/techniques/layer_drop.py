"""Progressive layer dropping (arXiv 2010.13369): training skips random blocks.

After t steps, block i of the L in its stack is kept with probability

    p_i(t) = 1 - i / L * (1 - theta(t)),  theta(t) = (1 - theta) * exp(-gamma * t) + theta

so all are kept in the first step, the last one finally in a share ``theta`` of the steps, and (3 +
theta) / 4 of a deep model on average. The paper's switchable transformer scales each of a block's
two residual branches f: x + G / p * f(x), with G = 1 if the block is kept and 0 if not. Here a
whole block is one residual branch: a kept block yields x + (block(x) - x) / p, a skipped one x.
Their expectation is block(x), so evaluation needs no scaling. Evaluation, generation and forwards
without gradients run unchanged.

[Note: decisions]
Decisions are a function of the configured seed, the step, the micro-batch in its accumulation
window (backwards since the step that produced gradients) and the index of the block (Philox,
counter-based); with ``per_rank`` also of the rank. So ranks agree without communication, whatever
extra forwards one of them runs, and a resumed run makes the same decisions as an uninterrupted one.
All forwards before the backward of a micro-batch skip the same blocks: a loss over several of them
(a comparison of two answers, say) is a loss of one network. Where only blocks train (adapters,
say), p is 1 for the trainable block with the largest one, so that the loss always has a gradient.
Recomputation in a backward reuses the decisions of its forward. Blocks that a script calls
directly, outside a forward of a larger module, are kept.

[Note: skipped units]
Units whose blocks all ranks skip are neither gathered nor reduced (``ModuleHooks.left_out``), and
their parameters have no gradient in that micro-batch; if no micro-batch of a step has used them,
the step leaves their weights and optimizer state unchanged.

[Note: first blocks]
Some blocks return more than a hidden state, and later blocks use it: T5's first block computes the
position bias for all. A skipped block returns those extra results of the block before it; the first
block of a stack is always kept unless its forward is annotated to return a single tensor. A cache
of keys and values has no entry for a skipped block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import LayerDropSection
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
from hf_zero.techniques.schedules import Decay
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.unit import OutermostForward
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.walk import described
from hf_zero.zero.step.window import Counters

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

KEY = "progressive_layer_drop"


def keep_probability(layer: int, layers: int, theta: float) -> float:
    """Return the keep probability of block ``layer``, counted from 1, of ``layers``, at ``theta`` =
    theta(t).
    """
    return 1.0 - layer / layers * (1.0 - theta)


def draw(seed: int, step: int, micro_batch: int, blocks: int, rank: int = 0) -> list[float]:
    """Return a number in [0, 1) for each of ``blocks``: a block is kept if its number is below its
    p.

    They are the first words of Philox for the counters (step, micro_batch, block, rank), with
    ``seed`` as key.
    """
    block = torch.arange(blocks, dtype=torch.int64, device="cpu")
    at = [torch.full_like(block, value) for value in (step, micro_batch, rank)]
    words = philox.words((at[0], at[1], block, at[2]), torch.tensor(seed, device="cpu"))
    drawn: list[float] = (words[0].double() / 2**32).tolist()
    return drawn


class LayerDrop(DrawsForBlocks[dict[nn.Module, float]]):
    """Progressive layer dropping on the model of one engine."""

    key = KEY

    def __init__(self, section: LayerDropSection, seed: int):
        super().__init__()
        self._section, self._seed = section, seed
        self._theta = Decay(section.theta, section.gamma)
        self._blocks: list[StackedBlock] = []
        self._stacked_of: dict[nn.Module, StackedBlock] = {}
        self._trained_alone: list[int] = []  # indices of trainable blocks, if nothing else trains
        self._counters = Counters()

    @classmethod
    def from_config(cls, config: ZeroConfig) -> LayerDrop:
        """Return the technique as ``config`` has it."""
        return cls(config.section_of(LayerDropSection), config.seed or 0)

    @property
    def theta(self) -> float:
        """The value of theta(t) in the next forward."""
        return self._theta.at(self._counters.global_steps)

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for a model without blocks, and if ranks that compute a block together
        would draw differently.
        """
        axes = ("tensor", "sequence", "context", "expert")
        sizes = {axis: plan.dims.size(axis) for axis in axes}
        shared = [axis for axis, size in sizes.items() if size > 1]
        if self._section.per_rank and shared:
            raise ConfigError(
                f"{KEY}.per_rank lets each rank leave out its own blocks, and the {shared[0]} "
                f"parallel ranks compute each block together; remove per_rank, or train without "
                f"{shared[0]} parallelism"
            )
        stacked_blocks(plan.model, KEY)

    def apply(self, engine: TrainingEngine) -> None:
        self._counters = engine.counters
        self._blocks = stacked_blocks(engine.module, KEY)
        self._trained_alone = self._blocks_trained_alone(engine)
        self._stacked_of = {layer.block: layer for layer in self._blocks}
        self._take_over(engine, list(self._stacked_of), list(self._stacked_of))

    def _blocks_trained_alone(self, engine: TrainingEngine) -> list[int]:
        """Return the indices of the trainable blocks; [] if something else trains, too."""
        trained = {
            id(p) for unit in engine.units for flat in unit.trainable_flats for p in flat.members
        }
        of_blocks = [{id(p) for p in layer.block.parameters()} for layer in self._blocks]
        if trained - set[int]().union(*of_blocks):
            return []
        return [at for at, parameters in enumerate(of_blocks) if parameters & trained]

    def _keep_probabilities(self) -> list[float]:
        """Return the probability with which the next forward keeps each block."""
        theta, p = self.theta, [1.0] * len(self._blocks)
        for at, layer in enumerate(self._blocks):
            if layer.block.training and not layer.keeps:
                p[at] = keep_probability(layer.place, layer.of, theta)
        if self._trained_alone:
            # or the loss may have no gradient
            p[max(self._trained_alone, key=lambda at: p[at])] = 1.0
        return p

    def _skips(self, micro_batch: int, p: Sequence[float], rank: int) -> list[bool]:
        """Return, for each block, whether ``rank`` skips it, given keep probabilities ``p``."""
        drawn = draw(self._seed, self._counters.global_steps, micro_batch, len(p), rank)
        return [u >= bound for u, bound in zip(drawn, p)]

    def _draw(self, forward: OutermostForward) -> Collection[nn.Module]:
        """Decide for ``forward``; return the blocks that all ranks skip."""
        if not any(layer.block.training for layer in self._blocks):
            return ()
        engine, per_rank = self._engine, self._section.per_rank
        p = self._keep_probabilities()
        ranks = range(engine.world_size) if per_rank else (0,)
        # the number of micro-batches is equal on all ranks
        skips = [self._skips(engine.held_micro_batches, p, rank) for rank in ranks]
        own_skips = skips[engine.global_rank if per_rank else 0]
        blocks = [layer.block for layer in self._blocks]
        # p of a kept block, 0 of a skipped one
        forward.drawn[self] = {
            block: 0.0 if skipped else keep for block, skipped, keep in zip(blocks, own_skips, p)
        }
        self._returned.clear()
        return {block for block, of_ranks in zip(blocks, zip(*skips)) if all(of_ranks)}

    def _change(
        self,
        drawn: dict[nn.Module, float],
        block: nn.Module,
        run: Call,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        hidden = hidden_state(block, args, kwargs)
        p, layer = drawn[block], self._stacked_of[block]
        before = self._returned.take(layer)
        if p == 0.0 and hidden is not None:
            self._returned.note(layer, before)
            return _passed(block, args, kwargs, with_first(before, hidden[1]))
        output = run(*args, **kwargs)
        state = first_of(output)
        if hidden is None or not isinstance(state, torch.Tensor) or state.shape != hidden[1].shape:
            raise ConfigError(
                f"{KEY} cannot leave out {described(block)}: it does not map a hidden state to "
                "another of the same shape; remove the key"
            )
        if p < 1.0:
            output = with_first(output, torch.lerp(hidden[1].to(state.dtype), state, 1.0 / p))
        return self._returned.note(layer, output)

    def remove(self) -> None:
        super().remove()
        self._blocks, self._stacked_of = [], {}


def _passed(block: nn.Module, args: object, kwargs: object, output: object) -> object:
    """Run the forward hooks of others on the ``output`` of a skipped block, and return it:
    transformers records hidden states by such hooks.
    """
    for number, hook in block._forward_hooks.items():
        if not isinstance(hook, Attached):
            named = (kwargs,) if number in block._forward_hooks_with_kwargs else ()
            hook(block, args, *named, output)
    return output
