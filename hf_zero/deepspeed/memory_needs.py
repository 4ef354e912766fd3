"""``estimate_zero*_model_states_mem_needs*``: hf-zero's own estimates under DeepSpeed's names.

A model described by two numbers only is made on the meta device, in blocks of the largest layer's
size. Numbers that describe no model raise ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from pkgutil import resolve_name

import torch
from torch import nn

from hf_zero.errors import ConfigError

GIB = 1 << 30
MOST_LAYERS = 10_000  # of a model, each a module: more take minutes and are a mistake in the sizes


def _count(name: str, value: float) -> int:
    """Return a number of parameters, which may be a float: DeepSpeed's examples pass 2851e6."""
    if not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; write a number of parameters, such as 7e9")
    return int(value)


def _model_of(total_params: float, largest_layer_params: float) -> nn.Module:
    """Return a model in blocks of at most ``largest_layer_params``."""
    total = _count("total_params", total_params)
    largest = _count("largest_layer_params", largest_layer_params)
    if total > largest * MOST_LAYERS:
        raise ConfigError(
            f"largest_layer_params is {largest_layer_params!r} of {total:,} parameters: more than "
            f"{MOST_LAYERS:,} layers; write the number of parameters of the largest layer"
        )
    largest = max(largest, 1)
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    model = nn.Module()
    model.blocks = nn.ModuleList()
    for size in sizes:
        block = nn.Module()
        block.weight = nn.Parameter(torch.empty(size, device="meta"))
        model.blocks.append(block)
    return model


def _needs(
    model: nn.Module, stage: int, per_node: int, nodes: int, optimizer: bool, params: bool
) -> tuple[int, int]:
    """Return the bytes of host memory on each machine, and of each device."""
    # by name: planning stands above this package, and is imported for these calls alone
    row = resolve_name("hf_zero.planning.estimate:estimate")(
        model, per_node * nodes, stage=stage,
        offload_optimizer="cpu" if optimizer else None, offload_param="cpu" if params else None,
    ).at(stage)  # fmt: skip
    return row.tiers.ram * per_node, row.tiers.device


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of host memory on each machine, of each device, and of the largest layer in
    fp32, at stage 3. A model made outside ``zero.Init`` is first whole on every rank, in fp32.
    """
    model = _model_of(total_params, largest_layer_params)
    host, device = _needs(
        model, 3, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload and cpu_offload_params
    )
    if not zero_init:
        host = max(host, int(4 * total_params) * num_gpus_per_node)
    return int(host * additional_buffer_factor), device, int(4 * largest_layer_params)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of host memory on each machine, and of each device, at stage 2."""
    model = _model_of(total_params, max(_count("total_params", total_params) // 32, 1))
    host, device = _needs(model, 2, num_gpus_per_node, num_nodes, cpu_offload, False)
    host = max(host, int(4 * total_params) * num_gpus_per_node)  # before the model is sharded
    return int(host * additional_buffer_factor), device


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of stage 3 with every choice of offloading, for a model given by sizes."""
    _heading(3, total_params, num_gpus_per_node, num_nodes)
    for optimizer, params, init in _choices():
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params,
            init, additional_buffer_factor,
        )  # fmt: skip
        where = f"offload_param={_device_name(params)}, offload_optimizer={_device_name(optimizer)}"
        _line(host, device, f"{where}, zero_init={int(init)}")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of stage 2 with and without offloading, for a model given by its size."""
    _heading(2, total_params, num_gpus_per_node, num_nodes)
    for optimizer in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, optimizer, additional_buffer_factor
        )
        _line(host, device, f"offload_optimizer={_device_name(optimizer)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of ``model`` at stage 3 with every choice of offloading."""
    sizes = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    total = sum(parameter.numel() for parameter in model.parameters())
    estimate_zero3_model_states_mem_needs_all_cold(
        total, max(sizes), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of ``model`` at stage 2 with and without offloading."""
    total = sum(parameter.numel() for parameter in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _choices() -> Iterator[tuple[bool, bool, bool]]:
    """Yield the choices of offload_optimizer, offload_param and zero_init."""
    for optimizer, params in ((True, True), (True, False), (False, False)):
        yield from ((optimizer, params, init) for init in (True, False))


def _device_name(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"


def _heading(stage: int, total: float, per_node: int, nodes: int) -> None:
    print(
        f"Estimated memory of parameters, gradients and optimizer state at stage {stage}: "
        f"{_count('total_params', total) / 1e6:.0f}M parameters, {nodes} x {per_node} ranks\n"
        "    machine |     device | options"
    )


def _line(host: int, device: int, options: str) -> None:
    print(f" {host / GIB:7.2f} GiB | {device / GIB:6.2f} GiB | {options}")
