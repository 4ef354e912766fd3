"""Dispatch of an operation to its Triton kernel on a GPU, to the same kernel in Triton's
interpreter, or to its slow reference.

An operation is declared once, with both bodies and one signature::

    RMS_NORM = Kernel("rms_norm", "norms:rms_norm", references.rms_norm, example=lambda device: (…))
    out, rstd = RMS_NORM(x, weight, eps)

The kernel runs for CUDA tensors. With ``TRITON_INTERPRET=1`` in the environment before triton is
imported the interpreter runs for CPU tensors (tests). In all other cases, and always with
``HF_ZERO_TRITON=0``, the reference runs. Triton is imported at the first launch, never by importing
hf_zero. A kernel that cannot be compiled is reported once, at warning level, with the compiler's
last line; from then on its reference runs. ``broken()`` lists those, and ``hf-zero doctor`` tries
them all. If Triton finds no driver for a device that torch drives (containers without libcuda, no C
compiler), that is reported once, and all references run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hf_zero.config.variables import is_off
from hf_zero.device import kinds
from hf_zero.errors import KernelError
from hf_zero.logging import logger

R = TypeVar("R", covariant=True)
KERNELS: dict[str, Kernel[object]] = {}
_BROKEN: dict[str, str] = {}
# the interpreter keeps the running program in a global, and ranks may be threads
_INTERPRETER = threading.RLock()


def _takes_all(*args: object, **kwargs: object) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Kernel(Generic[R]):
    """An operation with two bodies of one signature: ``launch`` is "module:function" of
    hf_zero.ops.triton_kernels.

    ``refuses`` returns the reason why the kernel cannot take its arguments though the reference
    can, or "". ``example`` returns small arguments on a device; the doctor runs them.
    """

    name: str
    launch: str
    reference: Callable[..., R]
    refuses: Callable[..., str] = field(default=_takes_all)
    example: Callable[[torch.device], tuple[object, ...]] | None = None

    def __post_init__(self) -> None:
        if self.name in KERNELS:
            raise ValueError(
                f"two kernels are called {self.name!r}: "
                f"{KERNELS[self.name].launch} and {self.launch}"
            )
        KERNELS[self.name] = self

    def __call__(self, *args: object, **kwargs: object) -> R:
        device = _device(args)
        if self.name in _BROKEN or not runs_on(device) or self.refuses(*args, **kwargs):
            return self.reference(*args, **kwargs)
        if interpreted():
            with _INTERPRETER:
                return self.launcher()(*args, **kwargs)
        try:
            with _current(device):
                return self.launcher()(*args, **kwargs)
        except Exception as error:
            if not _cannot_compile(error):
                raise
            _BROKEN[self.name] = (
                f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1]}"
            )
            logger.warning(
                "the Triton kernel %s cannot be compiled here, so its slow reference "
                "runs from now on (%s)",
                self.name,
                _BROKEN[self.name],
            )
        return self.reference(*args, **kwargs)

    def launcher(self) -> FunctionType:
        """Return the function that launches the Triton kernel; imports triton."""
        return _load(self.launch)


def runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels run for tensors of ``device``."""
    if is_off("HF_ZERO_TRITON") or not installed():
        return False
    if interpreted():
        return kinds.runs_triton(device) or device.type == "cpu"
    return kinds.runs_triton(device) and not _warned_missing()


def kind_for_auto(device: torch.device | str) -> str:
    """Return the key of ``hf_zero.config.kernels.AUTO`` for ``device``."""
    device = torch.device(device)
    if kinds.runs_triton(device) and not runs_on(device):
        return f"{device.type} without Triton"
    return device.type


def wanted(name: str, kernels: str | tuple[str, ...], device: torch.device) -> bool:
    """Return whether the configuration's ``kernels`` asks for the kernels ``name`` and they run on
    ``device``; "auto" asks for them on a GPU.
    """
    if kernels in (None, "off") or not runs_on(device):
        return False
    if kernels == "auto":
        return kinds.runs_triton(device)
    return isinstance(kernels, str) or name in kernels


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def missing_driver() -> str:
    """Return the reason why Triton cannot launch anything in this process, or "".

    Imports triton, which builds its launcher with a C compiler.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_device()
    except Exception as error:
        # an assertion, a failed build, no driver or several: each release raises something else
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    return ""


@functools.cache
def _warned_missing() -> bool:
    why = missing_driver()
    if why:
        logger.warning(
            "Triton finds no driver for this GPU, so the slow references of all kernels run (%s); "
            "`hf-zero doctor` tells more, and `kernels: off` leaves the model as it is",
            why,
        )
    return bool(why)


@functools.cache
def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter; decided when triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def broken() -> dict[str, str]:
    """Return the kernels that this process failed to compile, with the compiler's last line."""
    return dict(_BROKEN)


@functools.cache
def _load(launch: str) -> FunctionType:
    module, function = launch.split(":")
    loaded: FunctionType = getattr(
        importlib.import_module(f"hf_zero.ops.triton_kernels.{module}"), function
    )
    return loaded


def _device(args: Iterable[object]) -> torch.device:
    """Return the device of the first tensor among ``args`` or in a list among them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0].device
    return torch.device("meta")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one: Triton launches on the current device and its stream,
    whatever the device of the tensors.
    """
    if not kinds.runs_triton(device) or device.index == kinds.current_index(device):
        return nullcontext()
    return kinds.device_guard(device)


def _cannot_compile(error: Exception) -> bool:
    """Return whether Triton's compiler, ptxas, or the C compiler of its launchers failed or is
    missing; nothing was launched then.
    """
    from triton import CompilationError
    from triton.runtime.errors import TritonError

    if isinstance(error, RuntimeError):
        return isinstance(error, TritonError) or any(
            text in str(error) for text in ("PassManager", "Failed to find C compiler")
        )
    return isinstance(error, (CompilationError, TritonError, subprocess.CalledProcessError))


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def as_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as [rows, width] with adjacent columns: a view if possible, else a copy."""
    width = tensor.shape[-1]
    rows = tensor.numel() // width if width else 0
    flat = tensor.reshape(rows, width)
    return flat if flat.stride(1) == 1 or width == 1 else flat.contiguous()


def check_float(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors have at least one axis, a dtype that kernels take, and one device.

    Raises:
        KernelError: one does not; the message has the remedy.
    """
    first_name, first = next(
        (name, tensor) for name, tensor in tensors.items() if tensor is not None
    )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise KernelError(
                f"{op}: {name} is {tensor.dtype}; give one of {', '.join(map(str, FLOATS))}"
            )
        if tensor.dim() == 0:
            raise KernelError(f"{op}: {name} has no axis; give at least one, [width]")
        if tensor.device != first.device:
            raise KernelError(
                f"{op}: {name} is on {tensor.device} and {first_name} on "
                f"{first.device}; move one of them"
            )


def check_alike(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise KernelError unless ``tensor`` has the shape of ``other``."""
    if tensor.shape != other.shape:
        raise KernelError(
            f"{op}: {name} has shape {list(tensor.shape)} and {other_name} {list(other.shape)}; "
            "give them the same shape"
        )


def check_bias(op: str, bias: Tensor | None, x: Tensor) -> None:
    """Raise KernelError unless ``bias`` is [width of x] or None."""
    if bias is not None and bias.shape != x.shape[-1:]:
        raise KernelError(
            f"{op}: bias has shape {list(bias.shape)} for an x of width {x.shape[-1]}; give "
            "one element a column"
        )


def version_of(tensor: Tensor) -> int | None:
    """Return the number of writes to ``tensor``; None: an inference tensor, which counts none."""
    return None if tensor.is_inference() else tensor._version


# Far above the effect of rounding on a few rows, far below that of a wrong index or a lost mask.
TOLERANCE = 0.02


def declared() -> dict[str, Kernel]:
    """Return every declared kernel by its name; imports all modules of hf_zero.ops except the
    kernels' own, which import triton.
    """
    for module in pkgutil.iter_modules([os.path.dirname(__file__)]):
        if module.name != "triton_kernels":
            importlib.import_module(f"hf_zero.ops.{module.name}")
    return dict(KERNELS)


def try_out(kernel: Kernel, device: torch.device) -> str:
    """Run ``kernel`` on its example on ``device``; return the reason why it is broken there, or "".

    Draws from torch's generators and restores them.
    """
    if kernel.example is None:
        return "it declares no example"
    devices = [] if kinds.is_synchronous(device) else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        outcomes = []
        for body in (kernel, kernel.reference):
            torch.manual_seed(0)
            try:
                arguments = kernel.example(device)
                result = body(*arguments)
                kinds.synchronize(device)
            except Exception as error:  # the doctor reports whatever a launch raises
                return (
                    f"{type(error).__name__}: "
                    f"{(str(error).strip().splitlines() or ['no message'])[0]}"
                )
            # In-place kernels write results into their arguments.
            outcomes.append(list(_tensors((result, arguments))))
    if kernel.name in broken():
        return f"cannot be compiled: {broken()[kernel.name]}"
    for index, (one, other) in enumerate(zip(*outcomes, strict=True)):
        off = _distance(one, other)
        if not off <= TOLERANCE:
            return (
                f"differs from its reference: tensor {index}, {list(one.shape)}, by "
                f"{off:.2g} of its norm"
            )
    return ""


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference over that of ``other``; infinite if their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    # Equal infinities, as in a mask of scores, are no difference.
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, one.double() - other.double()).norm()
    return float(
        difference / torch.where(other.isfinite(), other.double(), 0.0).norm().clamp_min(1e-6)
    )
