"""``PipelineModule``: a list of layers in the stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.activations.checkpointing import repeatable
from hf_zero.config.value_types import argument, integer
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.parallel.pipeline.layer_specs import (
    LayerSpec,
    TiedLayerSpec,
    name_of_layer,
    training_numel,
)
from hf_zero.parallel.pipeline.stage_bounds import bounds_of
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.topology import PipelineParallelGrid, ProcessTopology


def _recompute(function: Callable[..., object], *args: object) -> object:
    return checkpoint(repeatable(function), *args, use_reentrant=False)


class PipelineModule(StagedModule):
    """Sequence of ``layers``, of which this rank holds those of its stages.

    A layer is a module, a function, or a :class:`LayerSpec`, built only by the rank that holds it.
    Its output is the input of the next one; where the next one is in another stage, it is a tensor,
    or a plain tuple or list of tensors and None. Of inputs in a tuple of one, the first layer gets
    that one, as in DeepSpeed with recomputation. Parameter names begin with the index of their
    layer in the list, those of tied layers with ``tied_modules.KEY``; they are the same for any
    number of stages.
    """

    def __init__(
        self,
        layers: Iterable[object],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[object, object], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., object] = _recompute,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        stages_per_rank: int = 1,
    ):
        """
        Args:
            num_stages: number of ranks that a sample passes; or ``topology``, with an axis "pipe".
            loss_fn: mean loss of the last layer's output and the labels; None: that output itself.
            seed_layers: seed the generators with ``base_seed`` plus the index of the layer before
                each layer is built, and in each forward with ``seed_fn`` (None: all generators),
                so that values do not depend on the stages.
            partition_method: "parameters", "uniform", or "type:regex" on the classes of layers.
            activation_checkpoint_interval: number of layers recomputed together in the backward,
                by ``activation_checkpoint_func``; 0: none. ``checkpointable_layers``: class names
                that all of these layers must have; None: any, if one has parameters.
            dynamic_shape: accepted; shapes may differ from one micro-batch to the next.
            stages_per_rank: more than 1 for an interleaved schedule.

        Raises:
            ConfigError: arguments that contradict each other or the ranks that were started.
        """
        super().__init__(num_stages, topology, stages_per_rank)
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn or set_random_seed
        self.base_seed = argument("PipelineModule", "base_seed", integer(), base_seed)
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._checkpoint, self._checkpointable = activation_checkpoint_func, checkpointable_layers
        self.micro_offset = 0
        layers = _checked_layers(layers)
        if isinstance(checkpointable_layers, str) or not all(
            isinstance(name, str) for name in checkpointable_layers or ()
        ):
            raise ConfigError(
                f"checkpointable_layers is {checkpointable_layers!r}; pass a list of class names"
            )
        functions = {"loss_fn": loss_fn, "seed_fn": seed_fn}
        functions["activation_checkpoint_func"] = activation_checkpoint_func
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ConfigError(
                    f"{name} = {function!r:.40} is no function; pass one, or leave it out"
                )
        names = [name_of_layer(layer) for layer in layers]
        count = self.num_stages * self.stages_per_rank
        by_numel = str(partition_method).lower() == "parameters"
        numels = [training_numel(layer) for layer in layers if by_numel]
        self.parts = bounds_of(partition_method, count, names, numels)
        self._check_shared(layers, names)
        self.make_parallel()
        self.tied_modules = nn.ModuleDict()
        # by stage of this rank: the functions that run its layers
        self._functions = {
            stage: [
                self._build(index, layers[index])
                for index in range(self.parts[stage], self.parts[stage + 1])
            ]
            for stage in self.stages_here
        }
        if self.global_rank == 0:
            shown = [
                f"  stage {stage}: {', '.join(names[start:stop])}"
                for stage, (start, stop) in enumerate(zip(self.parts, self.parts[1:]))
            ]
            logger.info(
                "layers of the pipeline (partition_method %r):\n%s",
                partition_method,
                "\n".join(shown),
            )

    def _check_shared(self, layers: Sequence[object], names: Sequence[str]) -> None:
        """Raise ConfigError for a trainable parameter of layers that lie on different ranks."""
        first: dict[nn.Parameter, int] = {}
        for index, layer in enumerate(layers):
            if not isinstance(layer, nn.Module):
                continue
            for name, parameter in layer.named_parameters():
                other = first.setdefault(parameter, index)
                stages = self.stage_owner(other), self.stage_owner(index)
                if parameter.requires_grad and (stages[0] - stages[1]) % self.num_stages:
                    raise ConfigError(
                        f"{name} of layer {index} ({names[index]}) is a parameter of layer {other} "
                        f"({names[other]}), too, and stages {stages[1]} and {stages[0]} would "
                        "train copies of it apart; make both layers a TiedLayerSpec of one key"
                    )

    def _build(self, index: int, layer: Any) -> Callable[..., object]:
        """Register layer ``index``, built from its spec if needed; return its callable."""
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module):
            self.add_module(str(index), built)
        function: Callable[..., object] = built
        return function

    def forward(self, inputs: object, stage: int | None = None) -> object:
        stage = self.stage_id if stage is None else stage
        functions, first = self._functions[stage], self.parts[stage]
        self.micro_offset += 1
        every = self.activation_checkpoint_interval or len(functions)
        for start in range(0, len(functions), every):
            chosen = functions[start : start + every]
            # a function that recomputes takes tensors as arguments of their own
            rebuild = _rebuild(inputs)
            args: Any = (inputs,) if rebuild is None else inputs
            run = partial(self._run, chosen, first + start, self.micro_offset + 1, rebuild)
            recomputes = torch.is_grad_enabled() and self._is_recomputed(chosen)
            inputs = self._checkpoint(run, *args) if recomputes else run(*args)
        return inputs

    def _run(
        self,
        functions: Sequence[Callable[[object], object]],
        first: int,
        offset: int,
        rebuild: Callable[[Sequence[object]], object] | None,
        *inputs: object,
    ) -> object:
        value = inputs[0] if rebuild is None else rebuild(inputs)
        for index, function in enumerate(functions, first):
            if self.seed_layers:
                self.seed_fn(self.base_seed * offset + index)
            value = function(value)
        return value

    def _is_recomputed(self, functions: Sequence[Callable[[object], object]]) -> bool:
        if not self.activation_checkpoint_interval:
            return False
        classes = self._checkpointable
        if classes is not None:
            return all(type(function).__name__ in classes for function in functions)
        modules = [function for function in functions if isinstance(function, nn.Module)]
        return any(True for module in modules for _ in module.parameters())

    def loss(self, output: Any, labels: object) -> torch.Tensor:
        loss = output if self.loss_fn is None else self.loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor):
            source = "the last layer, without a loss_fn," if self.loss_fn is None else "loss_fn"
            raise ConfigError(
                f"{source} gives a {type(loss).__name__} as the loss of a micro-batch; pass a "
                "loss_fn that returns one tensor, the mean loss"
            )
        return loss

    def split_batch(self, batch: object) -> tuple[Any, Any]:
        inputs, labels = super().split_batch(batch)
        single = type(inputs) is tuple and len(inputs) == 1
        return inputs[0] if single else inputs, labels

    def partitions(self) -> list[int]:
        """Return the index of the first layer of each stage, and the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds layer ``layer_idx``. Raises ConfigError for no such layer."""
        for stage, (start, stop) in enumerate(zip(self.parts, self.parts[1:])):
            if start <= layer_idx < stop:
                return stage
        raise ConfigError(
            f"layer {layer_idx} is in no stage: the pipeline has layers 0 to {self.parts[-1] - 1}"
        )

    def mpu(self) -> PipelineParallelGrid:
        """Return the position of this rank, with the method names of a Megatron ``mpu``."""
        return PipelineParallelGrid(self.topology)

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def set_checkpoint_interval(self, interval: int | None) -> None:
        """Recompute ``interval`` layers together from now on; 0, None: none. Raises ConfigError for
        what is not a number of layers.
        """
        self.activation_checkpoint_interval: int = argument(
            "PipelineModule", "activation_checkpoint_interval", integer(0), interval or 0
        )


def _rebuild(values: object) -> Callable[[Sequence[object]], object] | None:
    """Return what makes ``values`` again of its items; None unless it is a list or a tuple, plain
    or with names.
    """
    kind: Any = type(values)
    if kind in (tuple, list):
        return kind  # type: ignore[no-any-return]
    return getattr(kind, "_make", None) if isinstance(values, tuple) else None


def _checked_layers(layers: Iterable[object]) -> list[object]:
    """Return ``layers`` as a list. Raises ConfigError for another object than an iterable, and for
    what is not a layer.
    """
    try:
        layers = list(layers)
    except TypeError as error:
        raise ConfigError(
            f"layers is a {type(layers).__name__}; pass a list of layers, such as "
            "[LayerSpec(torch.nn.Linear, 8, 8), torch.tanh]"
        ) from error
    for layer in layers:
        if isinstance(layer, type) and issubclass(layer, nn.Module):
            raise ConfigError(
                f"{layer.__name__} in layers is a class of modules; pass LayerSpec"
                f"({layer.__name__}, ...) with the arguments that build it"
            )
        if not callable(layer) and not isinstance(layer, LayerSpec):
            raise ConfigError(
                f"{layer!r} in layers is neither a module, a function nor a LayerSpec; pass what "
                "can be called with the output of the layer before"
            )
    return layers


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
