"""Pipelines for tests, and what one process computes in their place."""

from __future__ import annotations

import copy

import torch
from torch import nn

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from hf_zero.parallel.pipeline.module import PipelineModule, set_random_seed

STEPS, VOCAB, WIDTH = 3, 11, 8
LR, MOMENTUM, CLIP = 0.5, 0.9, 0.3


def unembed(module, hidden):
    return nn.functional.linear(hidden, module.weight)  # type: ignore[arg-type]


class Pair(nn.Module):
    """Passes on what it is given beside a tensor of integers, and None."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, given):
        hidden = given[0] if isinstance(given, tuple) else given
        counts = torch.arange(hidden.shape[1], device=hidden.device)
        return hidden * self.scale, counts, None


class Joined(nn.Module):
    def forward(self, given):
        hidden, counts, nothing = given
        assert nothing is None and counts.dtype == torch.int64
        return torch.tanh(hidden) + counts[:, None]


def layers():
    """A model whose first and last layer share a weight; activations of all kinds between."""
    return [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(Pair),
        LayerSpec(Joined),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=unembed),
    ]


def loss_of(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def batches(count, seed=5):
    """Micro-batches whose lengths differ."""
    draw = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(0, VOCAB, (2, 4 + number % 3), generator=draw) for _ in range(2))  # type: ignore[misc]
        for number in range(count)
    ]


class Whole(nn.Module):
    """``layers`` in one process, under the names that they have in a pipeline."""

    def __init__(self):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        for index, layer in enumerate(layers()):
            set_random_seed(1234 + index)
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
            elif isinstance(layer, LayerSpec):
                self.add_module(str(index), layer.build())

    def forward(self, value):
        for index, layer in enumerate(layers()):
            if isinstance(layer, TiedLayerSpec):
                module = self.tied_modules[layer.key]
                value = layer.forward_fn(module, value) if layer.forward_fn else module(value)
            else:
                value = self._modules.get(str(index), layer)(value)
        return value


def plain(model, windows, loss, optimizer=None):
    """Train on the micro-batches of each window: (loss, norm) and the gradients of each step."""
    parameters = dict(model.named_parameters())
    made = (optimizer or sgd)(parameters.values())
    told, gradients = [], []
    for window in windows:
        made.zero_grad()
        total = 0.0
        for batch in window:
            value = loss(model, batch)
            (value / len(window)).backward()
            total += float(value.detach()) / len(window)
        gradients.append(
            {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        )
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), CLIP))
        made.step()
        told.append((total, norm))
    return told, gradients


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def config(micro_batches, stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        **more,
    }


def windows_of(data, micro_batches, ranks):
    """The micro-batches of each step over ``ranks`` data-parallel ranks."""
    size = micro_batches * ranks
    return (data[at : at + size] for at in range(0, len(data), size))


def pipeline(stages, world, made=None, **more):
    """A pipeline of the layers ``made``, or of ``layers``."""
    init_parallel(ParallelDims.over(world, pipeline=stages))
    given = {"seed_layers": True, "partition_method": "uniform", "loss_fn": loss_of, **more}
    return PipelineModule(layers() if made is None else made, stages, **given)


def gradients_of(engine):
    """The whole averaged gradients of the parameters of this rank that train, before clipping."""
    return {
        name: copy.deepcopy(hf_zero.safe_get_full_grad(parameter))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
