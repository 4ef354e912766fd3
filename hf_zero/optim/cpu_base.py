"""Base class of the optimizers over host kernels: parameters, moment formats, state dicts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER
from hf_zero.ops.moment_blocks import Blocks, BlocksFormat
from hf_zero.optim import ranges
from hf_zero.optim.moment_formats import FORMATS, FormattedOptimizer
from hf_zero.optim.segments import ParamGroup, ParamState
from hf_zero.zero.layout.flat_layout import LARGE, Slot

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CPUOptimizer(ranges.CheckedOptimizer, FormattedOptimizer):
    """An optimizer of parameters in CPU memory, or on any device with ``moments="dynamic8"``: it
    updates one parameter at a time, in one pass over memory. Parameters in 16 bits get fp32 master
    weights of their own, the state ``master``.

    In memory the moments of ``moment_names`` are fp32 tensors, bf16 tensors or
    :class:`~hf_zero.ops.moment_blocks.Blocks`. A state dict holds plain tensors of the parameter's
    shape, as torch.optim's does: Blocks are decoded, and encode to the same codes when they are
    loaded. So a state dict can be loaded under any setting of ``moments``, and into the torch class
    of the same update.
    """

    # the states that a group's ``moments`` setting applies to, and whether they are signed
    moment_names: dict[str, bool] = {}

    def updates_in_host_memory(self, device: torch.device) -> bool:
        """Return whether the update runs on the CPU alone, and state is elsewhere; and with moments
        in blocks of int8, which only offloaded state has. Moments in bitsandbytes' 8 bits have a
        kernel.
        """
        moments = {group.get("moments") for group in self.param_groups}
        return "int8" in moments or (device.type != "cpu" and moments != {"dynamic8"})

    def keeps_in_8_bits(self, group: ParamGroup, param: Tensor, slot: Slot) -> bool:
        """Return whether moments are in bitsandbytes' 8 bits: whether a parameter is large enough
        does not depend on how it is cut. A part of a tensor that is cut below the size from which a
        layout aligns parameters stays in fp32.
        """
        large = group.get("moments") == "dynamic8" and slot.numel >= LARGE
        return large and in_8_bits(group, param, math.prod(slot.whole))

    def codec_of(self, name: str) -> BlocksFormat | None:
        """Return bitsandbytes' format of the moment ``name``."""
        signs = self.moment_names
        return BlocksFormat(signs[name], dynamic=True) if name in signs else None

    def update(
        self,
        group: ParamGroup,
        state: ParamState,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        seed: int,
    ) -> None:
        """Make one step of one parameter.

        ``master`` and ``grad`` are 1-D; ``state`` is the state of ``param``, whose shape new states
        get.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is a
        closure.

        Raises:
            UnsupportedOptimizerError: a parameter that is not fp32, bf16 or fp16, or neither in CPU
                memory nor in a group with ``moments="dynamic8"``, or a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        seed = 0
        for group in self.param_groups:
            for param in group["params"]:
                seed += 1
                if param.grad is not None:
                    self.update_parameter(group, self.state[param], param, seed)
        return loss

    def update_parameter(
        self, group: ParamGroup, state: ParamState, param: Tensor, seed: int
    ) -> None:
        """Update ``param``, which has a gradient, with the settings of ``group``."""
        self._check(group, param)
        assert param.grad is not None
        flat = own_master(param, state)
        dense = param.grad.to_dense() if param.grad.is_sparse else param.grad
        gradient = dense.contiguous().view(-1).float()
        self.update(group, state, param, flat, gradient, seed)
        write_master(param, state, flat)

    def state_dict(self) -> StateDict:
        """Return torch.optim's state dict, with moments as tensors of their parameter's shape."""
        packed = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        packed["state"] = {
            index: {
                name: v.decode().view(params[index].shape) if isinstance(v, Blocks) else v
                for name, v in values.items()
            }
            for index, values in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class or of the torch class of the same update; the settings
        :data:`FORMATS` of the groups stay unchanged.
        """
        formats = [
            {name: group[name] for name in FORMATS if name in group} for group in self.param_groups
        ]
        super().load_state_dict(state_dict)
        self._load_in_fp32(state_dict)
        for group, settings in zip(self.param_groups, formats):
            for name in FORMATS:
                group.pop(name, None)
            group.update(settings)
            for param in group["params"]:
                state = self.state.get(param, {})
                for name, value in state.items():
                    if isinstance(value, Tensor):  # kernels take the elements in their order
                        state[name] = value.contiguous()
                for name, signed in self.moment_names.items():
                    if isinstance(state.get(name), Tensor):
                        form = self.format_of(group, param)
                        state[name] = packed_moment(form, state[name], signed)

    def _load_in_fp32(self, state_dict: StateDict) -> None:
        """Restore the saved fp32 state of 16-bit parameters: torch has cast it to their dtype."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params):
            if param.dtype == torch.float32:
                continue
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[param][name] = value.to(param.device, torch.float32, copy=True)

    def __setstate__(self, state: ParamState) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @staticmethod
    def arrays(state: ParamState, master: Tensor) -> ParamState:
        """Return the arrays that kernels take: the moments in ``state`` (1-D) and ``master``."""
        moments = {
            name: flat_moment(value)
            for name, value in state.items()
            if name not in ("step", MASTER) and value is not None
        }
        return {MASTER: master, **moments}

    def new_moment(self, group: ParamGroup, name: str, param: Tensor) -> Blocks | Tensor:
        """Return a moment of zeros for ``param``."""
        form = self.format_of(group, param)
        if form in ("int8", "dynamic8"):
            dynamic = form == "dynamic8"
            return Blocks.zeros(param.numel(), self.moment_names[name], dynamic, param.device)
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        return torch.zeros(param.shape, dtype=dtype, device=param.device)

    def format_of(self, group: ParamGroup, param: Tensor) -> str:
        """Return the format of the moments of ``param``, a parameter of ``group``: with "dynamic8"
        only large parameters have moments in 8 bits.
        """
        if group.get("moments", "fp32") != "dynamic8":
            return str(group.get("moments", "fp32"))
        if self.segment_format is not None:
            return self.segment_format(param)
        return "dynamic8" if in_8_bits(group, param, param.numel()) else "fp32"

    def leaves_zeros(self, group: ParamGroup) -> bool:
        """Return whether elements with a zero gradient stay unchanged: a sparse gradient then gives
        the same update as the dense one.
        """
        return False

    def _check(self, group: ParamGroup, param: Tensor) -> None:
        kind, where = type(self).__name__, f"a parameter of shape {tuple(param.shape)}"
        if param.device.type != "cpu" and group.get("moments") != "dynamic8":
            raise UnsupportedOptimizerError(
                f"{kind}: {where} is on {param.device}, and the update runs on the CPU. Use "
                "torch.optim's class there, or offload the "
                'optimizer: "zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
            )
        if param.dtype not in DTYPES:
            raise UnsupportedOptimizerError(
                f"{kind}: {where} is {param.dtype}; keep parameters in fp32, bf16 or fp16"
            )
        assert param.grad is not None
        if param.grad.is_sparse and not self.leaves_zeros(group):
            raise UnsupportedOptimizerError(
                f"{kind}: the gradient of {where} is sparse; make it dense"
            )


def in_8_bits(group: ParamGroup, param: Tensor, numel: int) -> bool:
    """Return whether moments of ``param``, of ``numel`` elements as a whole, are kept in 8 bits if
    its group has ``moments`` of ``"dynamic8"``: the rule of bitsandbytes, or torchao's, which
    leaves out parameters that are not whole blocks (``whole_blocks_of``). ``optim_bits`` of 32
    excludes it: the attribute of the parameter, or else the setting of the group.
    """
    large = numel >= group.get("min_8bit_size", LARGE)
    whole = numel % (group.get("whole_blocks_of") or 1) == 0
    bits = getattr(param, "optim_bits", group.get("optim_bits", 8))
    return bool(large and whole and bits == 8)


def own_master(param: Tensor, state: ParamState) -> Tensor:
    """Return the fp32 values that an update of ``param`` writes, 1-D: a view of its memory if that
    is fp32 and contiguous. Elements of a 16-bit parameter that the script has written replace the
    master weights.
    """
    if param.dtype == torch.float32:
        return param.contiguous().view(-1)
    master = state.get(MASTER)
    if master is None:
        return param.detach().float().contiguous().view(-1)
    return torch.where(param == master.to(param.dtype), master, param.float()).reshape(-1)


def write_master(param: Tensor, state: ParamState, flat: Tensor) -> None:
    """Write ``flat``, the updated result of :func:`own_master`, back to ``param``."""
    if param.dtype != torch.float32:
        state[MASTER] = flat.view(param.shape)
        param.copy_(state[MASTER])
    elif not param.is_contiguous():
        param.copy_(flat.view(param.shape))


def packed_moment(moments: str, values: Tensor, signed: bool) -> Blocks | Tensor:
    """Return ``values`` (fp32) in the format ``moments``: a tensor of their shape, or Blocks."""
    if moments in ("int8", "dynamic8"):
        blocks = Blocks.zeros(values.numel(), signed, moments == "dynamic8", values.device)
        blocks.encode(values.float().contiguous().view(-1))
        return blocks
    return values.to(torch.bfloat16 if moments == "bf16" else torch.float32).contiguous()


def flat_moment(value: Tensor | Blocks) -> Tensor | Blocks:
    """Return ``value`` in the form that the kernels take."""
    return value if isinstance(value, Blocks) else value.view(-1)
