"""Rates of the ranks at hand, for simulations of more of them: a block of the model, a pass over
memory and messages of the engine's kind are timed, on all ranks at once.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_zero.device import kinds
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.process_group import default_device, get_world_size
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.measures.collectives import wire_bytes
from hf_zero.planning.activation_memory import copy_on_meta
from hf_zero.planning.simulation.machine import Machine
from hf_zero.planning.simulation.recording import BACKWARD, FORWARD, Recording, Work
from hf_zero.zero.layout.wrap import repeated_blocks

ROUNDS = 9
COPIES = 3  # of the block, in turns: in a step weights come from memory, not from caches
SMALL, LARGE = 1 << 14, 1 << 23  # bytes of the two messages that are timed
PASSED = 1 << 23  # elements of each tensor of the pass over memory


@dataclass(frozen=True)
class Measured:
    """Times on the ranks at hand.

    block_seconds: of a forward and backward of ``block``. memory: bytes a second of a pass over it.
    operation: seconds of one on the tensors of a single token. latency, link: seconds of a small
    message, and bytes a second that a rank sends; None with one rank. overlap: the share of a
    message during which computation goes on.
    """

    block: str
    block_seconds: float
    memory: float
    operation: float
    ranks: int
    latency: float | None
    link: float | None
    overlap: float
    asynchronous: bool

    def machine(self, recording: Recording, given: Machine) -> Machine:
        """Return ``given`` with what was measured in place of what was assumed: the rate of matrix
        products is that which gives the block of ``recording`` the measured time.
        """
        works = [
            each
            for each in recording.events
            if isinstance(each, Work)
            and each.place.block == self.block
            and each.place.phase in (FORWARD, BACKWARD)
            and each.place.micro_batch == 0
        ]
        flops = sum(each.flops for each in works)
        others = sum(each.nbytes for each in works) / self.memory
        others += 0.0 if self.asynchronous else sum(w.operations for w in works) * self.operation
        left = max(self.block_seconds - others, 0.1 * self.block_seconds)
        found: dict[str, Any] = {
            "flops": flops / left,
            "memory": self.memory,
            "operation": self.operation,
            "overlap": self.overlap,
            "asynchronous": self.asynchronous,
        }
        if self.link is not None:
            found |= {"latency": self.latency, "node": self.link, "network": self.link * self.ranks}
            found["ranks_per_host"] = max(self.ranks, given.ranks_per_host)
        found = {name: value for name, value in found.items() if name not in given.sources}
        return given.replaced(found, "measured")


def measure(model: nn.Module, rows: int, length: int, dtype: torch.dtype) -> Measured:
    """Time the first repeated block of ``model`` on ``rows`` sequences of ``length`` tokens in
    ``dtype``, memory and messages, on the ranks of the current job (collective; a process without a
    job measures itself).

    Raises ConfigError for a model without repeated blocks.
    """
    device, ranks = default_device(), get_world_size()
    name = next((name for name, _ in repeated_blocks(model)), None)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} has no repeated block to be timed; give the rates, by flops "
            "and memory, instead of measuring them"
        )
    mesh = Mesh(ranks, device) if ranks > 1 else None
    meet: Callable[[], None] = mesh.barrier if mesh is not None else _nothing
    timer = _Timer(device, meet)
    try:
        copied, args, kwargs = _with_inputs(model, name, rows, length)
        real = _real(copied, device, dtype)
        blocks = itertools.cycle([real, *(copy.deepcopy(real) for _ in range(COPIES - 1))])
        inputs = _inputs(args, kwargs, device, dtype)

        def run() -> None:
            _pass_of(next(blocks), *inputs)()

        whole = timer(run)
        _, small_args, small_kwargs = _with_inputs(model, name, 1, 1)
        step = _pass_of(real, *_inputs(small_args, small_kwargs, device, dtype))
        with _Operations() as counted:
            step()
        operation = timer(step) / max(1, counted.number)
        left, right, out = (torch.ones(PASSED, device=device, dtype=dtype) for _ in range(3))
        memory = 3 * left.nbytes / timer(lambda: torch.add(left, right, out=out))
        latency = link = None
        overlap = 1.0
        if mesh is not None:
            latency, link = _link(mesh.shard, device, timer)
            overlap = _overlap(
                mesh.shard, device, timer, run, whole, latency + whole_bytes(ranks) / link
            )
            # ranks wait for each other in each step: the slowest sets the pace
            every = mesh.all_gather_object((whole, memory, operation), "rates of ranks")
            wholes, memories, operations = zip(*every)
            whole, memory, operation = max(wholes), min(memories), max(operations)
    finally:
        if mesh is not None:
            mesh.close()
    streams = not kinds.is_host(device)
    return Measured(name, whole, memory, operation, ranks, latency, link, overlap, streams)


def whole_bytes(ranks: int) -> float:
    """Return the bytes that a rank sends in the large all-gather that is timed."""
    return wire_bytes("all_gather", LARGE, ranks)


def _nothing() -> None:
    """Meet nobody."""


class _Timer:
    """Mean seconds of a call, over some that all ranks begin together. The mean, as that of a step
    is the sum of those of its parts.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None]):
        self._device, self._meet = device, meet

    def __call__(self, call: Callable[[], Any]) -> float:
        for _ in range(2):
            call()
        kinds.synchronize(self._device)
        self._meet()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            call()
        kinds.synchronize(self._device)
        return (time.perf_counter() - began) / ROUNDS


def _gather(dim: MeshDim, nbytes: int, device: torch.device) -> Callable[[], Any]:
    chunk = torch.zeros(nbytes // dim.size, dtype=torch.uint8, device=device)
    full = torch.zeros(chunk.numel() * dim.size, dtype=torch.uint8, device=device)
    return lambda: dim.all_gather([(full, chunk)], "measured")


def _link(dim: MeshDim, device: torch.device, timer: _Timer) -> tuple[float, float]:
    """Return the seconds of a small message, and the bytes a second of a large one."""

    def taken(size: int) -> float:
        launch = _gather(dim, size, device)
        return timer(lambda: launch().wait())

    small, large = taken(SMALL), taken(LARGE)
    return small, whole_bytes(dim.size) / max(large - small, 1e-9)


def _overlap(
    dim: MeshDim,
    device: torch.device,
    timer: _Timer,
    run: Callable[[], None],
    alone: float,
    message: float,
) -> float:
    """Return the share of messages that costs a block beside them no time."""
    launch = _gather(dim, LARGE, device)

    def both() -> None:
        handle = launch()
        run()
        handle.wait()

    together = timer(both)
    hidden = alone + message - together
    return min(1.0, max(0.0, hidden / min(alone, message)))


class _Inputs(Exception):
    """Carries the arguments of a block out of a forward."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args_of_block, self.kwargs_of_block = args, kwargs


def _with_inputs(
    model: nn.Module, name: str, rows: int, length: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the block ``name`` of a copy of ``model`` on the meta device, and the arguments of its
    call in a forward.
    """
    copied = copy_on_meta(model, {}).train()
    block = copied.get_submodule(name)
    config: Any = getattr(copied, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # the keys and values of a call would reach into the next one

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Inputs(args, kwargs)

    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    with ExitStack() as stack:
        stack.enter_context(without_memory(copied, length))
        hook = block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            copied(input_ids=ids)
        except _Inputs as found:
            return block, found.args_of_block, found.kwargs_of_block
        finally:
            hook.remove()
    raise ConfigError(
        f"the forward of {type(model).__name__} does not call its block {name}, so that it cannot "
        "be timed; give the rates, by flops and memory, instead of measuring them"
    )


def _real(block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return ``block`` with memory and small values."""
    block.to(dtype).to_empty(device=device)
    for module in block.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "sdpa"
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02)
    return block


def _inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        made = torch.full(value.shape, 0.01, dtype=dtype, device=device)
        return made.requires_grad_(value.requires_grad)

    return tree_map(real, args), tree_map(real, kwargs)


def _pass_of(block: nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    def run() -> None:
        out = block(*args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.backward(out.detach())
        block.zero_grad()

    return run


class _Operations(TorchDispatchMode):
    """Dispatch mode that counts operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))
