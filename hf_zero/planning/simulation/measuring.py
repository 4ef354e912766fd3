"""Rates of the ranks at hand, for simulations of more of them: a block of the model, a pass over
memory and messages of the engine's kind are timed, on all ranks at once.

[Note: in turns]
What is timed runs in turns, round after round, as the parts of a step do, so that other work of the
machine slows all of it alike. Ranks begin each part together, and the slowest sets the pace. Of the
times of a part the slowest and the fastest eighth are dropped, and the others averaged, as a step
is the sum of its parts.

A message is timed alone, several beside a block, and into memory that was released before, as
gathers of stage 3 write it: a host gives some of such memory back to the system, page by page.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_zero.device import kinds
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.process_group import default_device, get_rank, get_world_size
from hf_zero.distributed.store_rate import requests_a_second
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.measures.collectives import wire_bytes
from hf_zero.planning.simulation.machine import Machine
from hf_zero.planning.simulation.recording import BACKWARD, FORWARD, Recording, Work
from hf_zero.zero.layout.meta_run import copy_on_meta
from hf_zero.zero.layout.wrap import repeated_blocks

ROUNDS = (8, 32)  # at least and at most
SECONDS = 10.0  # of all rounds, where more than the least fit in
COPIES = 3  # of the block, in turns: in a step weights come from memory, not from caches
IN_A_ROW = COPIES  # calls that are timed together: a device computes one and launches the next
SMALL = 1 << 14  # bytes of the smaller message that is timed
LARGE = (1 << 20, 1 << 26)  # bounds of the larger one, which has those of a block
BESIDE = 4  # such messages that are timed beside a block
PASSED = 1 << 23  # elements of each tensor of the pass over memory


@dataclass(frozen=True)
class Measured:
    """Times on the ranks at hand, of which there are ``ranks``.

    block_seconds: of a forward and backward of ``block``. memory: bytes a second of a pass over it.
    operation: seconds of one on the tensors of a single token. latency, link: seconds of a small
    message, and bytes a second that a rank sends; None with one rank. overlap: the share of a
    message during which computation goes on. asynchronous: the device computes while the host
    launches the next operations. first_write: seconds of a byte that a message writes
    to memory which was released before. store: requests a second that a store answers.
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
    first_write: float = 0.0
    store: float | None = None

    def machine(self, recording: Recording, base: Machine) -> Machine:
        """Return ``base`` with what was measured in place of what was assumed: the rate of matrix
        products is that which gives the block of ``recording`` the measured time. Raises
        ConfigError if that block is of another model.
        """
        works = [
            event
            for event in recording.events
            if isinstance(event, Work)
            and event.place.block == self.block
            and event.place.phase in (FORWARD, BACKWARD)
            and event.place.micro_batch == 0
        ]
        if not works:
            raise ConfigError(
                f"measured is of the block {self.block}, which the simulated model does not run; "
                "measure that model"
            )
        flops = sum(work.flops for work in works)
        others = sum(work.nbytes for work in works) / self.memory
        others += 0.0 if self.asynchronous else sum(w.operations for w in works) * self.operation
        remaining = max(self.block_seconds - others, 0.1 * self.block_seconds)
        rates: dict[str, object] = {
            "flops": flops / remaining,
            "memory": self.memory,
            "operation": self.operation,
            "overlap": self.overlap,
            "asynchronous": self.asynchronous,
            "first_write": self.first_write,
        }
        if self.link is not None:
            rates |= {"latency": self.latency, "node": self.link, "network": self.link * self.ranks}
            rates["ranks_per_host"] = max(self.ranks, base.ranks_per_host)
        if self.store is not None:
            rates["store"] = self.store
        rates = {name: value for name, value in rates.items() if name not in base.sources}
        return base.replaced(rates, "measured")


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
    try:
        block = _TimedBlock(model, name, device, dtype)
        run, run_token = block.passes(rows, length, COPIES), block.passes(1, 1)
        with _Operations() as counted:
            run_token()
        left, right, out = (torch.ones(PASSED, device=device, dtype=dtype) for _ in range(3))
        calls: dict[str, Callable[[], object]] = {
            "block": run,
            "token": run_token,
            "pass": lambda: torch.add(left, right, out=out),
        }
        size = 0
        if mesh is not None:
            size = _size(block.nbytes, ranks)
            calls |= _messages(mesh.shard, size, device, run)
        took = _times(calls, device, mesh)
        store = requests_a_second() if get_rank() == 0 else 0.0
        if mesh is not None:
            store = mesh.broadcast_object(store)
    finally:
        if mesh is not None:
            mesh.close()
    memory = 3 * out.nbytes / took["pass"]
    measured = Measured(
        name,
        took["block"],
        memory,
        took["token"] / max(1, counted.number),
        ranks,
        latency=None,
        link=None,
        overlap=1.0,
        asynchronous=not kinds.is_synchronous(device),
        store=store,
    )
    return measured if mesh is None else _with_messages(measured, took, size)


def refuse_parts(dims: ParallelDims) -> None:
    """Raise ConfigError if ranks of ``dims`` have parts of blocks, which are measured whole."""
    if max(dims.tensor, dims.sequence_context, dims.expert) > 1:
        raise ConfigError(
            "measured rates are of whole blocks, of which a rank has parts with tensor, "
            "sequence, context or expert parallelism; measure without it, and give the rates"
        )


def _with_messages(base: Measured, took: Mapping[str, float], size: int) -> Measured:
    """Return ``base`` with what the times of messages tell, the larger of ``size`` bytes."""
    alone, message = took["block"], took["large"]
    hidden = alone + BESIDE * message - took["both"]
    copied = 2 * size / base.ranks / base.memory  # this rank's own part, which is work of a step
    return dataclasses.replace(
        base,
        latency=took["small"],
        link=wire_bytes("all_gather", size, base.ranks) / max(message - took["small"], 1e-9),
        overlap=min(1.0, max(0.0, hidden / min(alone, BESIDE * message))),
        first_write=max(0.0, took["released"] - message - copied) / size,
    )


def _size(nbytes: int, ranks: int) -> int:
    """Return the bytes of the larger message, as many for each of ``ranks``."""
    least, most = LARGE
    return max(least, min(most, nbytes)) // (16 * ranks) * 16 * ranks


def _times(
    calls: Mapping[str, Callable[[], object]], device: torch.device, mesh: Mesh | None
) -> dict[str, float]:
    """Return the seconds of each of ``calls`` on the slowest rank, by the note above."""

    def taken(call: Callable[[], object]) -> float:
        if mesh is not None:
            mesh.barrier()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        kinds.synchronize(device)
        return (time.perf_counter() - began) / IN_A_ROW

    def over_ranks(values: Sequence[float]) -> list[float]:
        if mesh is None:
            return list(values)
        return list(map(max, zip(*mesh.all_gather_object(list(values), "times of ranks"))))

    for _ in range(2):
        began = time.perf_counter()
        for call in calls.values():
            taken(call)
        [once] = over_ranks([time.perf_counter() - began])
    least, most = ROUNDS
    rounds = max(least, min(most, int(SECONDS / once)))
    rows = [[taken(call) for call in calls.values()] for _ in range(rounds)]
    middles = over_ranks([_middle(times) for times in zip(*rows)])
    return dict(zip(calls, middles))


def _middle(times: Sequence[float]) -> float:
    """Return the mean of ``times`` without the extreme eighths."""
    cut = len(times) // 8
    return statistics.mean(sorted(times)[cut : len(times) - cut])


def _messages(
    dim: MeshDim, size: int, device: torch.device, run: Callable[[], None]
) -> dict[str, Callable[[], object]]:
    """Return the calls that time messages: a small one, one of ``size`` bytes, :data:`BESIDE` of
    these beside ``run``, and one into memory that was released before.
    """

    def bytes_of(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def gather(full: torch.Tensor, chunk: torch.Tensor | None = None) -> Handle:
        part = full.chunk(dim.size)[dim.rank] if chunk is None else chunk
        return dim.all_gather([(full, part)], "measured")

    small, large, chunk = bytes_of(SMALL), bytes_of(size), bytes_of(size // dim.size)

    def both() -> None:
        handles = [gather(large) for _ in range(BESIDE)]
        run()
        for handle in handles:
            handle.wait()

    blocks = [bytes_of(size) for _ in range(COPIES)]
    for block in blocks[1:]:
        block.untyped_storage().resize_(0)

    def released() -> None:
        """Gather the next block, then release the one before, as a step does."""
        blocks.append(blocks.pop(0))
        blocks[0].untyped_storage().resize_(size)
        gather(blocks[0], chunk).wait()
        blocks[-1].untyped_storage().resize_(0)

    return {
        "small": lambda: gather(small).wait(),
        "large": lambda: gather(large).wait(),
        "both": both,
        "released": released,
    }


class _Inputs(Exception):
    """Carries the arguments of a block out of a forward."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]):
        self.args_of_block, self.kwargs_of_block = args, kwargs


def _with_inputs(
    model: nn.Module, name: str, rows: int, length: int
) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    """Return the block ``name`` of a copy of ``model`` on the meta device, and the arguments of its
    call in a forward.
    """
    copied = copy_on_meta(model).train()
    block = copied.get_submodule(name)
    config = getattr(copied, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False  # the keys and values of a call would reach into the next one

    def stop(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        raise _Inputs(args, kwargs)

    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    with ExitStack() as stack:
        stack.enter_context(without_memory(copied, length))
        hook = block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            copied(input_ids=ids)
        except _Inputs as reached:
            return block, reached.args_of_block, reached.kwargs_of_block
        finally:
            hook.remove()
    raise ConfigError(
        f"the forward of {type(model).__name__} does not call its block {name}, so that it cannot "
        "be timed; give the rates, by flops and memory, instead of measuring them"
    )


class _TimedBlock:
    """The block ``name`` of ``model`` in ``dtype`` on ``device``, and copies of it."""

    def __init__(self, model: nn.Module, name: str, device: torch.device, dtype: torch.dtype):
        self._model, self._name, self._device, self._dtype = model, name, device, dtype
        block = _real(_with_inputs(model, name, 1, 1)[0], device, dtype)
        self._copies = [block, *(copy.deepcopy(block) for _ in range(COPIES - 1))]
        self.nbytes = sum(parameter.nbytes for parameter in block.parameters())

    def passes(self, rows: int, length: int, copies: int = 1) -> Callable[[], None]:
        """Return a function that runs a forward and backward of ``rows`` sequences of ``length``
        tokens, of the next one of ``copies`` in each call.
        """
        _, args, kwargs = _with_inputs(self._model, self._name, rows, length)
        args, kwargs = _inputs(args, kwargs, self._device, self._dtype)
        blocks = itertools.cycle(self._copies[:copies])

        def run() -> None:
            block = next(blocks)
            out = block(*args, **kwargs)
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.backward(out.detach())
            block.zero_grad()

        return run


def _real(block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return ``block`` with memory and small values."""
    block.to(dtype).to_empty(device=device)
    for module in block.modules():
        config: object = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "sdpa"
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02)
    return block


def _inputs(
    args: tuple[object, ...], kwargs: dict[str, object], device: torch.device, dtype: torch.dtype
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments of a block with their tensors, which are on the meta device, in memory."""

    def real(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        tensor = torch.full(value.shape, 0.01, dtype=dtype, device=device)
        return tensor.requires_grad_(value.requires_grad)

    return tree_map(real, args), tree_map(real, kwargs)


class _Operations(TorchDispatchMode):
    """Dispatch mode that counts operations."""

    number = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.number += 1
        return func(*args, **(kwargs or {}))
