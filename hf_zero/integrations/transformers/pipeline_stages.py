"""``hf_zero.pipeline_stages``: a causal model of transformers as the stages of a pipeline.

[Note: the model's own forward]
A rank keeps the model with the blocks of its stages; all other blocks are replaced by modules that
return their first argument. A stage calls the forward of the decoder, with ``inputs_embeds`` from
the second stage on: masks, positions, rotary tables and the kind of attention of each block are
computed there as in the whole model, and parameters keep their names in the whole model. Masks and
positions of a batch travel with the hidden states, so stages in between need no data. There is no
cache: positions that begin anew separate packed sequences, as in the model with
``use_cache=False``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn

from hf_zero.errors import ConfigError, PipelineError
from hf_zero.integrations.transformers.loading import read_later
from hf_zero.loading import make_pending, make_real, read_pending
from hf_zero.parallel.cutting import check_module
from hf_zero.parallel.pipeline.layer_specs import training_numel
from hf_zero.parallel.pipeline.stage_bounds import bounds_of
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.topology import ProcessTopology
from hf_zero.zero.layout.flat_buffer import owner_of


@dataclass(frozen=True)
class Family:
    """Names of a causal model's parts: ``base`` and ``head`` in the model, the others in the base.

    added: embeddings that the base adds to ``inputs_embeds``. between: a module applied to the sum.
    """

    base: str = "model"
    embeddings: str = "embed_tokens"
    blocks: str = "layers"
    norm: str = "norm"
    added: str | None = None
    between: str | None = None
    head: str = "lm_head"


_DECODER = Family()
_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "Olmo2", "SmolLM3", "StableLm")
FAMILIES = {
    **{f"{name}ForCausalLM": _DECODER for name in _DECODERS},
    "GPT2LMHeadModel": Family("transformer", "wte", "h", "ln_f", "wpe", "drop"),
}
INPUTS = ("input_ids", "attention_mask", "position_ids")


class _Elsewhere(nn.Module):
    """Placeholder for a module of another stage: returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden


class _AddsNothing(nn.Module):
    """Placeholder for embeddings that the first stage has added: returns 0."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        # allocated on the device: the host would wait for a copy
        return torch.zeros((), device=positions.device)


def _family_of(model: nn.Module) -> Family:
    family = FAMILIES.get(type(model).__name__)
    if family is None:
        raise ConfigError(
            f"pipeline_stages() does not know how to cut a {type(model).__name__}; it cuts "
            f"{', '.join(FAMILIES)}: write others as a PipelineModule of their layers"
        )
    return family


def _block_list(model: nn.Module, family: Family) -> nn.ModuleList:
    blocks = model.get_submodule(f"{family.base}.{family.blocks}")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _parts(
    model: nn.Module,
    family: Family,
    count: int,
    method: str = "parameters",
    numel: Callable[[nn.Module], int] = training_numel,
) -> list[int]:
    """Return the bounds of ``count`` stages in the list of the embeddings, the blocks, and the head
    with its norm: the start of each stage, and the end. ``numel``: trainable elements of a module.
    """
    base, head = model.get_submodule(family.base), model.get_submodule(family.head)
    blocks = _block_list(model, family)
    numels = [*map(numel, (base.get_submodule(family.embeddings), *blocks))]
    numels.append(numel(base.get_submodule(family.norm)) + numel(head))
    names = ["embeddings", *(type(block).__name__ for block in blocks), "head"]
    return bounds_of(method, count, names, numels)


def _blocks_of(parts: list[int]) -> list[range]:
    """Return the blocks of each stage: item 0 of the list is the embeddings, the last the head."""
    return [
        range(max(0, start - 1), min(parts[-1] - 2, stop - 1)) for start, stop in pairwise(parts)
    ]


def _elsewhere(
    model: nn.Module, family: Family, parts: list[int], stages: Sequence[int]
) -> dict[str, nn.Module]:
    """Return the placeholders of a rank with ``stages``, by the paths of the modules they replace.
    If the embeddings are tied to the head, the last stage keeps them, too.
    """
    base = model.get_submodule(family.base)
    head, embeddings = model.get_submodule(family.head), base.get_submodule(family.embeddings)
    first, last = 0 in stages, len(parts) - 2 in stages
    tied = any(a is b for a in head.parameters() for b in embeddings.parameters())
    blocks = _blocks_of(parts)
    local = {index for stage in stages for index in blocks[stage]}
    replacements: dict[str, nn.Module] = {
        f"{family.base}.{family.blocks}.{index}": _Elsewhere()
        for index in range(parts[-1] - 2)
        if index not in local
    }
    if not first:
        if not (last and tied):
            replacements[f"{family.base}.{family.embeddings}"] = _Elsewhere()
        if family.added is not None:
            replacements[f"{family.base}.{family.added}"] = _AddsNothing()
        if family.between is not None:
            replacements[f"{family.base}.{family.between}"] = _Elsewhere()
    if not last:
        replacements[f"{family.base}.{family.norm}"] = replacements[family.head] = _Elsewhere()
    return replacements


def planned_parts(
    model: nn.Module, count: int, shapes: Callable[[nn.Parameter], tuple[int, ...]]
) -> list[int]:
    """Return the bounds of ``count`` stages of ``model``, which is not changed, once its parameters
    have the shapes that ``shapes`` returns. Raises ConfigError like :func:`pipeline_stages`.
    """

    def numel(module: nn.Module) -> int:
        return sum(math.prod(shapes(p)) for p in module.parameters() if p.requires_grad)

    return _parts(model, _family_of(model), count, numel=numel)


def names_of_stages(model: nn.Module, parts: list[int]) -> list[frozenset[str]]:
    """Return the parameter names of each stage of ``model``, which is not changed."""
    names, family = [name for name, _ in model.named_parameters()], _family_of(model)
    gone = [
        tuple(f"{path}." for path in _elsewhere(model, family, parts, [stage]))
        for stage in range(len(parts) - 1)
    ]
    return [frozenset(name for name in names if not name.startswith(prefix)) for prefix in gone]


def blocks_elsewhere(model: nn.Module, parts: list[int], stage: int) -> dict[nn.Module, nn.Module]:
    """Return the placeholders of the blocks of other stages, by the blocks that they replace."""
    family = _family_of(model)
    blocks = _block_list(model, family)
    local = _blocks_of(parts)[stage]
    return {block: _Elsewhere() for index, block in enumerate(blocks) if index not in local}


def stages_of_tied(names: Sequence[Collection[str]]) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter that several stages hold, by name. ``names``: the result
    of :func:`names_of_stages`.
    """
    holders = {
        name: tuple(stage for stage, stage_names in enumerate(names) if name in stage_names)
        for name in sorted(frozenset().union(*names))
    }
    return {name: stages for name, stages in holders.items() if len(stages) > 1}


class CausalLMStages(StagedModule):
    """Result of :func:`pipeline_stages`. ``hf_model`` is the model that was cut."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        num_stages: int | None,
        topology: ProcessTopology | None,
        stages_per_rank: int,
        parts_of: Callable[[nn.Module, Family, int], list[int]],
    ):
        super().__init__(num_stages, topology, stages_per_rank)
        self._family = family
        self.parts = parts_of(model, family, self.num_stages * stages_per_rank)
        self.make_parallel()
        self._blocks = _blocks_of(self.parts)
        for path, instead in _elsewhere(model, family, self.parts, self.stages_here).items():
            model.set_submodule(path, instead)
        for name, child in model.named_children():
            self.add_module(name, child)
        self.__dict__["hf_model"] = model  # not as a child: its children are ours already
        if self.num_stages > 1:
            model.register_forward_pre_hook(_refuse_forward)  # generate() calls forward, too

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "hf_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["hf_model"], name)

    def split_batch(self, batch: object) -> tuple[dict[str, torch.Tensor], object]:
        if isinstance(batch, Mapping):
            inputs = {key: batch[key] for key in batch if key != "labels"}
            labels = batch.get("labels")
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
            arguments = {"input_ids": inputs["input_ids"]}
        else:
            several = isinstance(inputs, tuple)
            hidden, mask, positions = inputs if several else (inputs, None, None)
            arguments = {"inputs_embeds": hidden}
        hidden = base(
            **arguments, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        if stage == len(self.parts) - 2:
            return self.hf_model.get_output_embeddings()(hidden)
        return hidden if mask is None and positions is None else (hidden, mask, positions)

    def _base(self, stage: int) -> nn.Module:
        """Return the decoder with only the blocks of ``stage``."""
        family, base = self._family, getattr(self.hf_model, self._family.base)
        if self.stages_per_rank == 1:
            return base
        # the same modules, with placeholders for those of other stages
        chosen, local = copy.copy(base), self._blocks[stage]
        chosen._modules = dict(base._modules)
        chosen._modules[family.blocks] = nn.ModuleList(
            block if index in local else _Elsewhere()
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

    def loss(self, output: object, labels: object) -> torch.Tensor:
        if labels is None:
            raise ConfigError(
                "the micro-batches of the pipeline have no labels, which the loss of a causal "
                'model compares; add "labels" to the batch'
            )
        loss: torch.Tensor = self.hf_model.loss_function(
            logits=output, labels=labels, vocab_size=self.hf_model.config.vocab_size
        )
        return loss


def _refuse_forward(model: nn.Module, inputs: object) -> NoReturn:
    raise PipelineError(
        f"{type(model).__name__} was called or asked to generate() after pipeline_stages(): this "
        "rank has a part of it; only train_batch() and eval_batch() of the engine run it. To "
        "generate, write it by save_checkpoint(), make model files of that by "
        "hf-zero convert-checkpoint, and load those in one process"
    )


def pipeline_stages(
    model: nn.Module | Callable[[], nn.Module],
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    stages_per_rank: int = 1,
    partition_method: str = "parameters",
) -> CausalLMStages:
    """Reduce ``model``, a causal model of transformers, to this rank's pipeline stages, for
    ``hf_zero.initialize`` and ``engine.train_batch``. Collective over all ranks.

    A batch is a mapping with input_ids, labels and, optionally, attention_mask and position_ids.
    The model computes the loss. ``model`` is modified: it keeps only this rank's layers, with their
    names. Tied embeddings remain on the first and the last stage.

    Args:
        model: the model, or a function that calls from_pretrained or from_config. With a function,
            each rank reads or initializes only its own layers, and never holds the whole model.
        num_stages: number of ranks that a sample passes; or ``topology``, with an axis "pipe".
        stages_per_rank: more than 1 for an interleaved schedule.
        partition_method: "parameters", "uniform" or "type:regex" over the embeddings, the blocks
            and the head.

    Raises:
        ConfigError: a model of an unknown family, without values or held by an engine, or sizes
            that do not match the ranks or the layers.
    """
    how = topology, stages_per_rank, partition_method
    if isinstance(model, nn.Module):
        return _stages_of(model, num_stages, *how)
    if not callable(model):
        check_module(model, "pipeline_stages")
    with read_later() as building:
        with building:
            built = model()
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"the function given to pipeline_stages() returned a {type(built).__name__}; it "
                "must return a causal model, as AutoModelForCausalLM.from_pretrained(path) does"
            )
        make_pending(built)
        stages = _stages_of(built, num_stages, *how)
        make_real(stages)
        read_pending(stages)
    return stages


def stages_without_values(model: nn.Module, parts: list[int]) -> CausalLMStages:
    """Return this rank's stage of ``model``, on any device, meta included, with the bounds
    ``parts``; ``model`` is modified as by :func:`pipeline_stages`.
    """
    family = _family_of(model)
    return CausalLMStages(model, family, len(parts) - 1, None, 1, lambda *_: parts)


def _stages_of(
    model: nn.Module,
    num_stages: int | None,
    topology: ProcessTopology | None,
    stages_per_rank: int,
    partition_method: str,
) -> CausalLMStages:
    family = _family_of(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"pipeline_stages() got a {type(model).__name__} on the meta device, which has no "
            "values; pass a function that loads it, and each rank reads only its own layers"
        )
    if any((flat := owner_of(parameter)) and not flat.retired for parameter in model.parameters()):
        raise ConfigError(
            f"pipeline_stages() got a {type(model).__name__} that an engine holds or that was made "
            "in shards (ZeRO-3, zero.Init); pass a function that loads it, without these"
        )
    parts_of = partial(_parts, method=partition_method)
    return CausalLMStages(model, family, num_stages, topology, stages_per_rank, parts_of)
