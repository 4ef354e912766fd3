"""``deepspeed.initialize``, and the command line arguments that scripts pass to it."""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from hf_zero.config import ZeroConfig
from hf_zero.config.activations import NUMBER, ActivationCheckpointing
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.deepspeed.modules import refuse
from hf_zero.deepspeed.optimizers import name_made
from hf_zero.deepspeed.zero_config import (
    GRADIENT_CLIPPING_DEFAULT,
    clipped_by_default,
    takes_default_clipping,
    without_autos,
)
from hf_zero.engine import engines_of
from hf_zero.initialize import initialize as _initialize
from hf_zero.initialize import start
from hf_zero.logging import log_rank0
from hf_zero.setup.request import SetupRequest, configuration
from hf_zero.zero.layout.precision import holds_raw_bytes
from hf_zero.zero.layout.wrap import repeated_blocks

_SIGNATURE = inspect.signature(_initialize)


@wraps(_initialize)
def initialize(*args: object, **kwargs: object) -> Any:
    """Run :func:`hf_zero.initialize`; the engine is a :class:`DeepSpeedEngine`.

    Raises NotBuiltError for DeepSpeed's argument ``mesh_param``.
    """
    if kwargs.pop("mesh_param", None):
        refuse("initialize(mesh_param=...)", "write sequence_parallel_size in the configuration")
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if not isinstance(arguments["args"], torch.nn.Module):
        _as_deepspeed(arguments)
    answer = start(SetupRequest.read(DeepSpeedEngine, **arguments, takes_over=_take_over))
    engine, optimizer = answer[:2]
    engine.collate_fn, engine.mpu = arguments["collate_fn"], arguments["mpu"]
    if optimizer is not None:
        name_made(optimizer, engine.config)
    return answer


def _take_over(model: torch.nn.Module) -> None:
    """End the training of an earlier engine with ``model``, because another one begins."""
    for engine in engines_of(model):
        if engine.module is model and engine.bound is not None:
            log_rank0(
                "initialize was called again for a model: its former engine is destroyed, and its "
                "weights are where the new one starts",
                logging.WARNING,
            )
            engine.destroy()


def _as_deepspeed(arguments: dict[str, object]) -> None:
    """Replace the configuration in ``arguments`` of ``initialize`` by one that is read as DeepSpeed
    reads it: ``config`` is then a ZeroConfig, ``args`` and ``config_params`` are None. The log
    reports the consequences.

    A key that is "auto" gets its default. An optimizer or scheduler that is passed replaces the
    configuration's, and gradients are clipped if no clipping is written.
    """
    config = configuration(
        arguments["args"], arguments["config"], arguments["config_params"], foreign=True
    )
    native = any(isinstance(arguments[name], ZeroConfig) for name in ("config", "config_params"))
    clips = takes_default_clipping(config, native)
    config = without_autos(config)
    for section, name in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
        argument, written = arguments[name], getattr(config, section)
        if argument is not None and written is not None:
            log_rank0(
                f"the {name} that is passed ({type(argument).__name__}) is used, and the "
                f"configuration's {section} {written.type!r} is not",
                logging.WARNING,
            )
            config = config.without(section)
    if clips:
        clipped = clipped_by_default(config)
        if clipped is not config and (arguments["optimizer"] or config.optimizer) is not None:
            log_rank0(
                "gradient_clipping has no value: gradients are clipped at "
                f"{GRADIENT_CLIPPING_DEFAULT}, as DeepSpeed 0.19.8 does and older ones do not; "
                "write gradient_clipping, 0 for none",
                logging.WARNING,
            )
        config = clipped
    if not native:
        config = _without_checkpoints(arguments["model"], config)
        config = _in_precision_of(arguments["model"], config)
    arguments.update(args=None, config=config, config_params=None)


def _without_checkpoints(model: object, config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` without a number of checkpoints that ``model`` has no blocks for:
    DeepSpeed only configures ``deepspeed.checkpointing`` by it.
    """
    section = config.section_of(ActivationCheckpointing)
    if section.blocks is not None or not section.number or not isinstance(model, torch.nn.Module):
        return config
    if repeated_blocks(model):
        return config
    log_rank0(
        f"{NUMBER} = {section.number} has no effect: {type(model).__name__} has no repeated "
        "blocks; call deepspeed.checkpointing.checkpoint in its forward, or remove the key",
        logging.WARNING,
    )
    return config.without(NUMBER)


def _in_precision_of(model: object, config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` with bf16 or fp16 if neither is enabled and all trainable parameters have
    that dtype: like DeepSpeed's ZeRO, the engine then keeps fp32 master weights.
    """
    if config.precision != "fp32" or not isinstance(model, torch.nn.Module):
        return config
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and not holds_raw_bytes(p)}
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if len(dtypes) != 1 or not dtypes <= names.keys():
        return config
    name = names[dtypes.pop()]
    log_rank0(
        f"the model is in {name} and neither bf16 nor fp16 is enabled: it trains as with {name}, "
        f'from fp32 master weights, without a loss scale; write "{name}": {{"enabled": true}}',
        logging.WARNING,
    )
    section: dict[str, object] = {"enabled": True}
    if name == "fp16":
        section["loss_scale"] = 1.0
    return config.override({name: section}, "computed: the model's dtype")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to ``parser`` and return it.

    ``--local_rank`` is left to the script.
    """
    group = parser.add_argument_group(
        "ZeRO", "arguments of DeepSpeed scripts, read by hf_zero.initialize(args=...)"
    )
    group.add_argument(
        "--deepspeed",
        action="store_true",
        default=False,
        help="the script asks this flag whether to use ZeRO",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        default=None,
        help="the ZeRO configuration, a JSON file",
    )
    return parser


DeepSpeedOptimizerCallable = Callable[[Iterable[torch.nn.Parameter]], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], object]
