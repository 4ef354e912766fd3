"""``hf_zero.pipeline_stages``: a causal model of transformers as the stages of a pipeline.

[Note: the model's own forward]
A rank keeps the model with the blocks of its stages; all others are replaced by modules that give
back what they are given. A stage calls the forward of the decoder, on ``inputs_embeds`` after the
first: masks, positions, rotary tables and the kind of attention of each block are made there as in
the whole model, and names of parameters stay those of the whole model. Masks and positions that a
batch has travel with the hidden states, so that stages in between need no data. There is no cache:
positions that begin anew separate packed sequences, as in the model with ``use_cache=False``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.parallel.pipeline.layers import training_numel
from hf_zero.parallel.pipeline.partition import bounds_of
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.topology import ProcessTopology


@dataclass(frozen=True)
class Family:
    """Where the parts of a causal model lie: ``base`` in the model, the others in the base.

    added: embeddings that the base adds to ``inputs_embeds``. between: what it applies to the sum.
    """

    base: str = "model"
    embeddings: str = "embed_tokens"
    blocks: str = "layers"
    norm: str = "norm"
    added: str | None = None
    between: str | None = None


_DECODER = Family()
FAMILIES = {
    "LlamaForCausalLM": _DECODER,
    "MistralForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _DECODER,
    "Qwen3ForCausalLM": _DECODER,
    "GemmaForCausalLM": _DECODER,
    "Phi3ForCausalLM": _DECODER,
    "Olmo2ForCausalLM": _DECODER,
    "SmolLM3ForCausalLM": _DECODER,
    "StableLmForCausalLM": _DECODER,
    "GPT2LMHeadModel": Family("transformer", "wte", "h", "ln_f", "wpe", "drop"),
}
INPUTS = ("input_ids", "attention_mask", "position_ids")


class _Elsewhere(nn.Module):
    """In the place of what another stage holds: gives its first argument back."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class _AddsNothing(nn.Module):
    """In the place of embeddings that the first stage has added."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


class CausalLMStages(StagedModule):
    """See :func:`pipeline_stages`. ``hf_model`` is the model that was cut."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        num_stages: int | None,
        topology: ProcessTopology | None,
        stages_per_rank: int,
        partition_method: str,
    ):
        super().__init__(num_stages, topology, stages_per_rank)
        self._family = family
        base: Any = getattr(model, family.base)
        blocks = getattr(base, family.blocks)
        embeddings = getattr(base, family.embeddings)
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        norm = getattr(base, family.norm)
        numels = [*map(training_numel, (embeddings, *blocks)), training_numel(norm)]
        numels[-1] += training_numel(head)
        names = ["embeddings", *(type(block).__name__ for block in blocks), "head"]
        count = self.num_stages * stages_per_rank
        self.parts = bounds_of(partition_method, count, names, numels)
        # the blocks of each stage: layer 0 of the list is the embeddings, the last one the head
        self._blocks = [
            range(max(0, start - 1), min(len(blocks), stop - 1))
            for start, stop in zip(self.parts, self.parts[1:])
        ]
        here = {index for stage in self.stages_here for index in self._blocks[stage]}
        for index in range(len(blocks)):
            if index not in here:
                blocks[index] = _Elsewhere()
        first, last = 0 in self.stages_here, count - 1 in self.stages_here
        tied = any(
            a is b for a in head.parameters() for b in embeddings.parameters()
        )  # then the last stage has the embeddings, too
        if not first:
            if not (last and tied):
                setattr(base, family.embeddings, _Elsewhere())
            if family.added is not None:
                setattr(base, family.added, _AddsNothing())
            if family.between is not None:
                setattr(base, family.between, _Elsewhere())
        if not last:
            setattr(base, family.norm, _Elsewhere())
            model.set_output_embeddings(_Elsewhere())  # type: ignore[operator]
        for name, child in model.named_children():
            self.add_module(name, child)
        self.__dict__["hf_model"] = model  # no child: its children are

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "hf_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["hf_model"], name)

    def split_batch(self, batch: Any) -> tuple[dict[str, torch.Tensor], Any]:
        if isinstance(batch, Mapping):
            inputs, labels = (
                {key: batch[key] for key in batch if key != "labels"},
                batch.get("labels"),
            )
        else:
            inputs, labels = super().split_batch(batch)
            inputs = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
        unknown = [key for key in inputs if key not in INPUTS and inputs[key] is not None]
        if unknown or inputs.get("input_ids") is None:
            raise ConfigError(
                f"a batch of {sorted(inputs)} for a pipeline of a causal model: it takes "
                f"{', '.join(INPUTS)} and labels; leave {unknown or 'nothing of these'} out"
            )
        return inputs, labels

    def forward(self, inputs: Any, stage: int | None = None) -> Any:
        stage = self.stage_id if stage is None else stage
        base = self._base(stage)
        if stage == 0:
            mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
            given = {"input_ids": inputs["input_ids"]}
        else:
            several = isinstance(inputs, tuple)
            hidden, mask, positions = inputs if several else (inputs, None, None)
            given = {"inputs_embeds": hidden}
        hidden = base(
            **given, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        if stage == len(self.parts) - 2:
            return self.hf_model.get_output_embeddings()(hidden)
        return hidden if mask is None and positions is None else (hidden, mask, positions)

    def _base(self, stage: int) -> Any:
        """The decoder with the blocks of ``stage`` alone."""
        family, base = self._family, getattr(self.hf_model, self._family.base)
        if self.stages_per_rank == 1:
            return base
        # the same modules, with others in the places of those that are not this stage's
        chosen, own = copy.copy(base), self._blocks[stage]
        chosen._modules = dict(base._modules)
        chosen._modules[family.blocks] = nn.ModuleList(
            block if index in own else _Elsewhere()
            for index, block in enumerate(getattr(base, family.blocks))
        )
        if stage > 0:
            if family.added is not None:
                chosen._modules[family.added] = _AddsNothing()
            if family.between is not None:
                chosen._modules[family.between] = _Elsewhere()
        if stage < len(self.parts) - 2:
            chosen._modules[family.norm] = _Elsewhere()
        return chosen

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        if labels is None:
            raise ConfigError(
                "the micro-batches of the pipeline have no labels, which the loss of a causal "
                'model compares; add "labels" to the batch'
            )
        loss: torch.Tensor = self.hf_model.loss_function(
            logits=output, labels=labels, vocab_size=self.hf_model.config.vocab_size
        )
        return loss


def pipeline_stages(
    model: nn.Module,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    stages_per_rank: int = 1,
    partition_method: str = "parameters",
) -> CausalLMStages:
    """``model``, a causal model of transformers, as this rank's stages of a pipeline: what
    ``hf_zero.initialize`` takes, to train by ``engine.train_batch``. Collective over all ranks.

    A batch is a mapping with input_ids, labels and, if wanted, attention_mask and position_ids. The
    loss is the model's own. ``model`` is cut: it keeps this rank's layers alone, under its own
    names, and tied embeddings on the first and on the last stage.

    Args:
        num_stages: ranks that a sample passes; or ``topology``, with an axis "pipe".
        stages_per_rank: more than 1 for an interleaved schedule.
        partition_method: "parameters", "uniform" or "type:regex" over the embeddings, the blocks
            and the head.

    Raises:
        ConfigError: a model of another family, or sizes that the ranks or the layers do not have.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None:
        raise ConfigError(
            f"pipeline_stages() does not know how to cut a {type(model).__name__}; it cuts "
            f"{', '.join(FAMILIES)}: write others as a PipelineModule of their layers"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"pipeline_stages() got a {type(model).__name__} on the meta device, which has no "
            "values; load it on the CPU, and each rank keeps the layers of its stages alone"
        )
    return CausalLMStages(model, family, num_stages, topology, stages_per_rank, partition_method)
