"""Objects of bitsandbytes' and torchao's 8-bit optimizers, converted to the classes of this package
that make the same update over shards: settings of groups, options, and state of earlier steps.

Of bitsandbytes, ``Adam`` and ``AdamW`` both decouple weight decay from the gradient, as
torch.optim.AdamW does. A paged optimizer keeps its state on the device here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import StateDict

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.moment_blocks import BLOCK
from hf_zero.optim.cpu_base import CPUOptimizer
from hf_zero.optim.eight_bit import (
    Adam8bit,
    AdamW8bit,
    Lion8bit,
    SGD8bit,
    convert_state,
    keep_8_bits,
)
from hf_zero.optim.segments import ParamGroup, ParamState
from hf_zero.zero.layout.flat_layout import LARGE


def refuse(optimizer: torch.optim.Optimizer, option: str, remedy: str) -> None:
    kind = type(optimizer)
    raise UnsupportedOptimizerError(
        f"{kind.__module__.partition('.')[0]}'s {kind.__name__} has {option}, which hf-zero does "
        f"not support over shards: {remedy}"
    )


class _Adopted(CPUOptimizer):
    """A class that takes over objects of another library."""

    SETTINGS: Mapping[str, object] = {"maximize": False}

    @classmethod
    def adopt_groups(cls, optimizer: torch.optim.Optimizer) -> None:
        """Check the options of ``optimizer`` and give its groups the settings of this class."""
        for group in optimizer.param_groups:
            cls.check(optimizer, group)
            settings = {**cls.SETTINGS, **cls.settings_of(group)}
            for name, value in settings.items():
                group.setdefault(name, value)
        bits, size = cls.format_options(optimizer)
        keep_8_bits(optimizer, bits, size)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group with the settings of this class."""
        super().add_param_group(param_group)
        self.adopt_groups(self)

    def __setstate__(self, state: ParamState) -> None:
        super().__setstate__(state)
        self.adopt_groups(self)  # groups that the library has saved lack settings

    @classmethod
    def check(cls, optimizer: torch.optim.Optimizer, group: ParamGroup) -> None:
        """Raise UnsupportedOptimizerError for an option that has no counterpart."""

    @classmethod
    def settings_of(cls, group: ParamGroup) -> StateDict:
        return {}

    @classmethod
    def format_options(cls, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Return the bits of moments, and the least size of a parameter in 8 bits."""
        return 8, LARGE

    @classmethod
    def adopt_state(cls, state: ParamState) -> None:
        convert_state(state, cls.moment_names)


class _FromBitsandbytes(_Adopted):
    @classmethod
    def check(cls, optimizer: Any, group: ParamGroup) -> None:
        options = vars(optimizer.args)
        if options.get("max_unorm"):
            refuse(optimizer, f"max_unorm = {options['max_unorm']}", "set it to 0")
        if options.get("skip_zeros"):
            refuse(optimizer, "skip_zeros", "set it to False")
        if options.get("percentile_clipping", 100) != 100:
            remedy = "set it to 100, and gradient_clipping in the configuration"
            refuse(optimizer, f"percentile_clipping = {options['percentile_clipping']}", remedy)
        if not options.get("block_wise", True):
            refuse(optimizer, "block_wise = False", "set it to True")
        overrides = list(optimizer.mng.pid2config.items())
        triples = optimizer.mng.module_weight_config_triple
        overrides += [(id(getattr(module, name)), config) for module, name, config in triples]
        of = dict(overrides)
        for parameter in group["params"]:
            config = of.get(id(parameter), {})
            if others := sorted(set(config) - {"optim_bits"}):
                remedy = "put the parameter into a group of its own with these settings"
                refuse(optimizer, f"an override of {', '.join(others)} for a parameter", remedy)
            if "optim_bits" in config:
                parameter.optim_bits = config["optim_bits"]

    @classmethod
    def format_options(cls, optimizer: Any) -> tuple[int, int]:
        return optimizer.args.optim_bits, optimizer.args.min_8bit_size


_ADAM = {"amsgrad": False, "bias_correction": True, "maximize": False}


class BitsandbytesAdamW(_FromBitsandbytes, AdamW8bit):
    """bitsandbytes' Adam and AdamW."""

    SETTINGS = {**_ADAM, "decoupled_weight_decay": True}


class BitsandbytesLion(_FromBitsandbytes, Lion8bit):
    """bitsandbytes' Lion."""


class BitsandbytesSGD(_FromBitsandbytes, SGD8bit):
    """bitsandbytes' SGD, which ignores dampening."""

    SETTINGS = {"dampening": 0.0, "nesterov": False, "maximize": False}

    @classmethod
    def settings_of(cls, group: ParamGroup) -> StateDict:
        return {"momentum": group["betas"][0]}


class _FromTorchao(_Adopted):
    @classmethod
    def check(cls, optimizer: Any, group: ParamGroup) -> None:
        if optimizer.block_size != BLOCK:
            refuse(optimizer, f"block_size = {optimizer.block_size}", f"set it to {BLOCK}")
        if group["amsgrad"]:
            refuse(optimizer, "amsgrad", "use torch.optim.AdamW with amsgrad, in fp32")

    @classmethod
    def settings_of(cls, group: ParamGroup) -> StateDict:
        return {"whole_blocks_of": BLOCK}


class TorchaoAdamW8bit(_FromTorchao, AdamW8bit):
    """torchao's AdamW8bit."""

    SETTINGS = {**_ADAM, "decoupled_weight_decay": True}


class TorchaoAdam8bit(_FromTorchao, Adam8bit):
    """torchao's Adam8bit."""

    SETTINGS = {**_ADAM, "decoupled_weight_decay": False}
