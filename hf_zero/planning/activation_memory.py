"""Activation bytes of one forward and backward pass, from a run without memory: the model is on the
meta device, where operations compute shapes only, and every storage is counted while it is alive.

The run uses the model's own code with the modifications of the configuration: checkpointed blocks,
tiled MLPs, a fused loss without logits, sequences divided among ranks. Attention keeps
what a kernel like flash attention keeps, never a matrix of tokens x tokens. Kernels are torch's;
fused ones need less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.activations.checkpointing import Checkpoints, blocks_to_checkpoint
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import ActivationCheckpointing, TiledMlpSection
from hf_zero.device import kinds
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused import sequence_attention
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.integrations.fused.deferred_heads import defer_head
from hf_zero.ops.chunked_head import rows_of_a_chunk
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.sequence_parallel import division_of
from hf_zero.parallel.sequence.tiled_mlp import TiledMlps
from hf_zero.planning.fit import ActivationOption
from hf_zero.planning.live_bytes import LiveBytes
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.meta_run import META, copy_on_meta

LOSS_HEAD = torch.ops.hf_zero.linear_cross_entropy.default


@dataclass(frozen=True)
class ActivationSettings:
    """The settings of a configuration that reduce activation memory."""

    checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    kernels: tuple[str, ...] = ()
    tiled_mlp: TiledMlpSection = field(default_factory=TiledMlpSection)

    @classmethod
    def from_config(cls, config: ZeroConfig) -> ActivationSettings:
        kernels = () if isinstance(config.kernels, str) else config.kernels
        return cls(
            config.section_of(ActivationCheckpointing), kernels, config.section_of(TiledMlpSection)
        )

    def variants(self) -> Iterator[tuple[str, ActivationSettings, dict[str, object]]]:
        """Yield this and settings that save more and more memory, cheapest first, each as
        (description of what was added, settings, configuration keys that add it).
        """
        steps: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        if "loss" not in self.kernels:
            kernels = (*self.kernels, "loss")
            steps.append(("no logits", {"kernels": kernels}, {"kernels": [*kernels]}))
        if self.checkpointing.blocks is not True:
            section = ActivationCheckpointing(blocks=True)
            keys = {"activation_checkpointing": {"blocks": True}}
            steps.append(("blocks recomputed", {"checkpointing": section}, keys))
        if not self.tiled_mlp.enabled:
            tiled = TiledMlpSection(enabled=True)
            keys = {"tiled_mlp": {"enabled": True}}
            steps.append(("MLPs in stretches", {"tiled_mlp": tiled}, keys))
        more = self
        words: list[str] = []
        written: dict[str, object] = {}
        yield "", self, {}
        for what, changes, keys in steps:
            more, written = replace(more, **changes), written | keys
            words.append(what)
            yield ", ".join(words), more, written


@dataclass(frozen=True)
class LengthEstimate:
    """Activations of a micro-batch of ``rows`` sequences of ``length`` tokens, of which a rank has
    ``tokens``. ``ways`` go from the fastest to the smallest.
    """

    length: int
    rows: int
    tokens: int
    ways: tuple[ActivationOption, ...]


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one rank: ``kept`` for the backward after the forward, ``most`` at the peak."""

    kept: int
    most: int


@dataclass(frozen=True)
class Sequences:
    """A micro-batch of ``rows`` sequences of ``length`` tokens, each divided by ``division``."""

    length: int
    rows: int = 1
    division: Division = field(default_factory=Division)

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if ``model`` cannot process such sequences."""
        if self.length < 1 or self.length % self.division.multiple:
            raise ConfigError(
                f"sequences of {self.length} tokens do not divide among the ranks of "
                f"{self.division}; choose a multiple of {self.division.multiple}"
            )
        if self.division.ranks > 1:
            sequence_attention.check(model, self.division)


def activation_bytes(
    model: nn.Module,
    sequences: Sequences,
    dtypes: Mapping[str, torch.dtype],
    saving: ActivationSettings,
    device: torch.device,
) -> ActivationBytes:
    """Return the bytes that a rank holds for one micro-batch in addition to parameters and
    gradients.

    ``model``: a language model on any device, left unchanged. ``dtypes``: those in which its
    parameters compute, by name, as the plan of an engine has them; others keep theirs. ``device``:
    where it would compute. The gradient of a parameter counts until it is complete.
    Raises ConfigError for a model that cannot run without memory, and for sequences that it cannot
    process.
    """
    sequences.check(model)
    copied = copy_on_meta(model, dtypes).train()
    inputs = torch.zeros(
        sequences.rows, sequences.length // sequences.division.ranks, dtype=torch.int64, device=META
    )
    with ExitStack() as stack:
        stack.enter_context(without_memory(copied, sequences.length, sequences.division))
        stack.callback(_save(copied, saving))
        for parameter in copied.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        counted = stack.enter_context(_Counted(copied, inputs, device))
        try:
            loss = copied(input_ids=inputs, labels=inputs, return_dict=False)[0]
            saved = counted.live.now
            loss.backward()
        except ConfigError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{type(model).__name__} cannot be run without memory on input_ids and labels, so "
                f"that its activations are not known ({type(error).__name__}: {reason}); leave the "
                "sequence lengths out, and measure them on one rank"
            ) from error
    return ActivationBytes(saved, counted.most)


def length_estimate(plan: EnginePlan, length: int) -> LengthEstimate:
    """Return the estimate for sequences of ``length`` tokens, each shared by the sequence-parallel
    ranks, in micro-batches as in the settings of ``plan``.

    Raises ConfigError as :func:`activation_bytes` does.
    """
    device, division = plan.device, division_of(plan.settings)
    config = plan.settings.on_device(device.type)
    sequences = Sequences(length, config.train_micro_batch_size_per_gpu or 1, division)
    ways = []
    for name, saving, keys in ActivationSettings.from_config(config).variants():
        nbytes = activation_bytes(plan.model, sequences, plan.dtypes, saving, device)
        ways.append(ActivationOption(name, keys, nbytes.kept, nbytes.most))
    return LengthEstimate(length, sequences.rows, length // division.ranks, tuple(ways))


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _save(model: nn.Module, saving: ActivationSettings) -> Callable[[], None]:
    """Apply ``saving`` to ``model``, a copy. Returns the function that undoes the checkpointing."""
    blocks = blocks_to_checkpoint(model, saving.checkpointing)
    checkpoints = Checkpoints(model, blocks, saving.checkpointing, META, tells=False)
    if "loss" in saving.kernels:
        defer_head(model)
    if saving.tiled_mlp.enabled and TiledMlps.mlps(model):
        alone = SimpleNamespace(size=1)
        mesh = SimpleNamespace(shard=alone, replicate=alone)
        engine: Any = SimpleNamespace(module=model, stage=0, mesh=mesh, device=META)
        TiledMlps(saving.tiled_mlp).apply(engine)
    return checkpoints.remove


class _Counted(TorchDispatchMode):
    """Dispatch mode that counts bytes: ``live``, and ``most`` of them at the peak."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, device: torch.device):
        super().__init__()
        self._device = device
        self.live = LiveBytes((*model.parameters(), *model.buffers(), inputs))
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.live.add(leaf.untyped_storage())
        inside = self._inside_the_head(*args[:2]) if func is LOSS_HEAD else 0
        self.most = max(self.most, self.live.now + inside)
        return out

    def _inside_the_head(self, hidden: torch.Tensor, weight: torch.Tensor) -> int:
        """Return the bytes inside the fused loss: the logits of a chunk and, on a CPU, copies of
        the hidden states of labeled tokens and their gradients.
        """
        (tokens, width), words, itemsize = hidden.shape, weight.shape[0], hidden.element_size()
        rows = min(tokens, rows_of_a_chunk(tokens, words, itemsize, self._device))
        return rows * (words + 2 * width * kinds.is_synchronous(self._device)) * itemsize
