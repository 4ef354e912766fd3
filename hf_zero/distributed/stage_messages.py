"""Messages between the stages of a pipeline: activations one way, their gradients the other.

A message of activations is preceded by a header of fixed size that says what comes: the shapes may
differ from one micro-batch to the next. The gradients of what a stage has sent come back in the
same shapes, so they need none. Headers travel through host memory where the process group has a
backend for it; a stage waits there for the one before it, which the watchdog sees.

[Note: one operation]
On NCCL the messages of a pipeline follow each other on the stream of one communicator, in batches
or not: a batch takes the communicator of its group, and so does a single operation where the group
is bound to its device. Each operation waits there until the other rank has come to it. So a message
is one operation: several tensors travel end to end in one buffer, and are parts of one where they
arrive.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.collectives import MARGIN_SECONDS, MeshDim
from hf_zero.distributed.flat_mesh import DimMaker, connect
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.process_group import (
    CPU,
    abort,
    backend_serving,
    backends_of_parts,
    group_backend,
)
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError

HEADER = 128  # numbers in a header
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
HEADER_TAG, FORWARD_TAG, BACKWARD_TAG = 1, 2, 3
ALIGNED = 16  # bytes, to a multiple of which each tensor of a message begins
# torch warns of single operations on a group that is bound to its device
WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"

Activations = tuple[torch.Tensor | None, ...]
Shape = tuple[tuple[int, ...], torch.dtype]


class StageMessages:
    """The messages of one rank of a pipeline with the others, ``ranks``, over ``group``."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dim: MeshDim,
        watchdog: Watchdog,
        name: str,
        timeout: float,
    ):
        """``ranks`` are global, ``rank`` is this one among them. Messages are counted as those of
        ``dim``.
        """
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self.device = device
        self._group = group
        self._dim = dim
        self._watchdog = watchdog
        self._headers = CPU if self.size > 1 and backend_serving(CPU) else device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # headers in flight
        self._waiting = ExitStack()
        self._logs: dict[tuple[int, int], CollectiveLog] = {}
        off = partial(abort, group, group_backend(device), device)
        for peer in range(self.size):
            for pair in ((self.rank, peer), (peer, self.rank)):
                if peer != self.rank:
                    source, target = (self.ranks[index] for index in pair)
                    log = CollectiveLog(
                        f"pipeline messages of {name} from rank {source} to rank {target}",
                        (source, target),
                        timeout,
                        off,
                        native=watchdog.rank_status is None or device.type == "cpu",
                    )
                    if watchdog.rank_status is not None:
                        log = watchdog.rank_status.register(log)
                    self._logs[pair] = log

    @classmethod
    def over(cls, groups: ParallelGroups, name: str, timeout: float) -> StageMessages:
        """Make this rank's messages in its pipeline, for engine ``name`` (collective over all)."""
        dims, joined = groups.dims, None
        if dims.pipeline > 1:
            limit = timedelta(seconds=timeout + MARGIN_SECONDS)
            # Bound to the device, NCCL uses one communicator for all messages. Otherwise a message
            # that a schedule issues alone uses a communicator of two ranks, and never matches its
            # counterpart in a batch.
            bound = None if kinds.is_host(groups.device) else groups.device
            if bound is not None:
                os.environ.setdefault(WARNING, "0")
            for ranks in dict.fromkeys(
                dims.ranks_along(rank, "pipeline") for rank in range(dims.world)
            ):
                group = dist.new_group(list(ranks), limit, backends_of_parts(), device_id=bound)
                if groups.rank in ranks:
                    joined = group
                    watchdog = get_world_group().watchdog
                    connect(group, ranks, groups.device, watchdog, f"the pipeline of {name}")
        return cls(
            dims.ranks_along(groups.rank, "pipeline"),
            groups.rank,
            joined,
            groups.device,
            groups.along("pipeline"),
            get_world_group().watchdog if joined is not None else Watchdog(enabled=False),
            name,
            timeout,
        )

    def close(self) -> None:
        """Release the communicator."""
        for log in self._logs.values():
            log.closed = "destroyed its engine"
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _issue(self, source: int, target: int, what: str) -> PendingCollective:
        return self._logs[source, target].issue(what, (self.ranks[source],))

    # ---- headers ----

    def announce(self, peer: int, numbers: Sequence[int]) -> None:
        """Send ``numbers``, a header, to ``peer``."""
        header = torch.tensor(numbers, dtype=torch.int64).to(self._headers)
        work = dist.isend(header, group=self._group, group_dst=peer, tag=HEADER_TAG)
        assert work is not None
        self._sent = [(w, h) for w, h in self._sent if not w.is_completed()]
        self._sent.append((work, header))

    def announced_by(self, peer: int, pending: PendingCollective) -> Sequence[int]:
        """Wait for the next header of ``peer``, and return its numbers."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self._headers)
        self._watchdog.check()
        try:
            with self._watchdog.watching(pending):
                work = dist.irecv(header, group=self._group, group_src=peer, tag=HEADER_TAG)
                assert work is not None
                work.wait()
                numbers: list[int] = header.tolist()
        except RuntimeError as error:
            raise self._watchdog.explain_failure(pending, error) from error
        return numbers

    # ---- activations ----

    def send(self, peer: int, activations: Activations, single: bool, key: str) -> list[dist.P2POp]:
        """Send the header of ``activations`` to ``peer``, and return the operations that send the
        tensors. ``single``: they are one tensor, not a tuple of one.
        """
        self._issue(self.rank, peer, f"{key} forward")
        self.announce(peer, _header(activations, single))
        tensors = [activation.detach() for activation in activations if activation is not None]
        return self._send("send_activations", tensors, peer, FORWARD_TAG, key)

    def receive(
        self, peer: int, key: str
    ) -> tuple[Activations, tuple[bool, ...], bool, list[dist.P2POp]]:
        """Wait for the header of the next activations of ``peer``. Return memory for them, which of
        them require grad, whether they are one tensor, and the operations that fill that memory.
        """
        pending = self._issue(peer, self.rank, f"{key} forward")
        announced, grads, single = _announced(self.announced_by(peer, pending))
        tensors, buffer = _room([form for form in announced if form is not None], self.device)
        received = iter(tensors)
        activations = tuple(None if form is None else next(received) for form in announced)
        return activations, grads, single, self._operation(dist.irecv, buffer, peer, FORWARD_TAG)

    # ---- gradients ----

    def send_gradients(
        self, peer: int, gradients: Sequence[torch.Tensor], key: str
    ) -> list[dist.P2POp]:
        self._issue(self.rank, peer, f"{key} backward")
        return self._send("send_gradients", gradients, peer, BACKWARD_TAG, key)

    def receive_gradients(
        self, peer: int, outputs: Sequence[torch.Tensor], key: str, blocks: bool
    ) -> tuple[list[torch.Tensor], list[dist.P2POp]]:
        """Return memory for the gradients of ``outputs`` that ``peer`` sends next, and the
        operations that fill it. ``blocks``: the caller waits for them before it does anything else,
        and calls :meth:`came`.
        """
        pending = self._issue(peer, self.rank, f"{key} backward")
        if blocks:
            self._waiting.enter_context(self._watchdog.watching(pending))
        shapes = [(tuple(output.shape), output.dtype) for output in outputs]
        gradients, buffer = _room(shapes, self.device)
        return gradients, self._operation(dist.irecv, buffer, peer, BACKWARD_TAG)

    def came(self) -> None:
        """End the watched waits: the messages that the caller waited for have arrived."""
        self._waiting.close()

    def explain(self, error: RuntimeError) -> Exception:
        """Return the exception to raise for ``error`` of a wait for another stage."""
        self.came()
        pending = PendingCollective("the stages of the pipeline", needs=tuple(self.ranks))
        return self._watchdog.explain_failure(pending, error)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        self.came()
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _send(
        self, what: str, tensors: Sequence[torch.Tensor], peer: int, tag: int, key: str
    ) -> list[dist.P2POp]:
        if size := sum(tensor.numel() * tensor.element_size() for tensor in tensors):
            self._dim.stats.record(what, f"{key} (pipeline)", size)
        return self._operation(dist.isend, _packed(tensors), peer, tag)

    def _operation(
        self,
        operation: Callable[..., dist.Work | None],
        buffer: torch.Tensor,
        peer: int,
        tag: int,
    ) -> list[dist.P2POp]:
        if not buffer.numel():
            return []
        return [dist.P2POp(operation, buffer, group=self._group, tag=tag, group_peer=peer)]


def receives(operation: dist.P2POp) -> bool:
    """Return whether ``operation`` fills memory, rather than sending it."""
    return operation.op is dist.irecv


def _places(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """Return at which byte of a message each of ``shapes`` begins, and the size of the message."""
    starts, at = [], 0
    for shape, dtype in shapes:
        at = -(-at // ALIGNED) * ALIGNED
        starts.append(at)
        at += math.prod(shape) * dtype.itemsize
    return starts, at


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``tensors`` as the bytes of one message: not every backend knows every dtype."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    if len(flat) < 2:
        return flat[0] if flat else torch.empty(0, dtype=torch.uint8)
    starts, size = _places([((tensor.numel(),), torch.uint8) for tensor in flat])
    message = flat[0].new_empty(size)
    for start, part in zip(starts, flat):
        message[start : start + part.numel()].copy_(part)
    return message


def _room(shapes: Sequence[Shape], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return memory for tensors of ``shapes``, and all of it as the bytes of the message that
    brings them.

    No tensor is a view of it, so that one may be changed in place where another is saved for a
    backward.
    """
    full = [shape for shape in shapes if math.prod(shape[0])]
    starts, size = _places(full)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    offsets = iter(starts)
    tensors = []
    for shape, dtype in shapes:
        if not math.prod(shape):
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        at, part = next(offsets), torch.empty(0, dtype=dtype, device=device)
        tensors.append(part.set_(buffer.untyped_storage(), at // dtype.itemsize, shape))  # type: ignore[call-overload]
    return tensors, buffer


def _header(activations: Activations, single: bool) -> list[int]:
    numbers = [len(activations), int(single)]
    for activation in activations:
        if activation is None:
            numbers.append(-1)
        else:
            numbers += [
                DTYPES.index(activation.dtype),
                int(activation.requires_grad),
                activation.dim(),
                *activation.shape,
            ]
    if len(numbers) > HEADER:
        raise PartitionError(
            f"a stage of the pipeline passes on {len(activations)} tensors, whose shapes are more "
            f"than {HEADER} numbers; pass fewer from layer to layer, or stack them"
        )
    return [*numbers, *[0] * (HEADER - len(numbers))]


def _announced(
    numbers: Sequence[int],
) -> tuple[list[Shape | None], tuple[bool, ...], bool]:
    """Return the shapes that a header announces, whether each requires grad, and whether it is one
    tensor rather than several.
    """
    stream = iter(numbers)
    count, single = next(stream), bool(next(stream))
    shapes: list[Shape | None] = []
    grads: list[bool] = []
    for _ in range(count):
        code = next(stream)
        if code < 0:
            shapes.append(None)
            grads.append(False)
            continue
        grads.append(bool(next(stream)))
        shapes.append((tuple(next(stream) for _ in range(next(stream))), DTYPES[code]))
    return shapes, tuple(grads), single


def dim_of_stages(
    groups: ParallelGroups, stages: Sequence[int], name: str, timeout: float
) -> MeshDim:
    """Return the dimension over the ranks of this rank's pipeline at ``stages``, if it is one of
    them; else over itself alone (collective over all ranks).
    """
    dims = groups.dims
    columns = dict.fromkeys(dims.ranks_along(rank, "pipeline") for rank in range(dims.world))
    sets = [
        dim
        for ranks in columns
        for dim in (
            tuple(ranks[stage] for stage in stages),
            *((rank,) for stage, rank in enumerate(ranks) if stage not in stages),
        )
    ]
    watchdog = get_world_group().watchdog
    backend = group_backend(groups.device)
    maker = DimMaker(groups.rank, groups.device, backend, watchdog, timeout)
    return maker.make(sets, name, groups.stats["pipeline"], 2)
