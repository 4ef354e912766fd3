"""Messages between the stages of a pipeline: activations one way, their gradients the other.

A message of activations is preceded by a header of fixed size that says what comes: the shapes may
differ from one micro-batch to the next. The gradients of what a stage has sent come back in the
same shapes, so they need none. Headers travel through host memory where the process group has a
backend for it; a stage waits there for the one before it, which the watchdog sees.

A header also says of which run of the schedule its message is, and of which stage and micro-batch:
ranks that differ in their runs raise before activations meet the labels of other samples. Gradients
are safe without: their activations belong to the same run, and the rank whose run an exception has
ended compares itself with the others before the next run (recovery.py).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.aborting import abort
from hf_zero.distributed.backends import group_backend, serving_backend, subgroup_backend_string
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.collectives import MARGIN_SECONDS, MeshDim
from hf_zero.distributed.flat_mesh import DimMaker, connect
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.hang_detection import HangDetection
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.process_group import CPU, destroy_if_current
from hf_zero.distributed.recovery import REMEDY
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError, RankMismatchError

HEADER = 128  # numbers that describe activations in a header
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
# classes of what a stage passes on: one tensor, or several and None
PASSED_CLASSES: tuple[type[Any], ...] = (torch.Tensor, tuple, list)
Shape = tuple[tuple[int, ...], torch.dtype]


class _Position(NamedTuple):
    """The position of a message: the first numbers of its header."""

    run: int
    training: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "training" if self.training else "evaluation"
        return (
            f"micro-batch {self.micro_batch} of stage {self.stage} in run {self.run} of the "
            f"pipeline ({what})"
        )


class StageMessages:
    """The messages of one rank of a pipeline with the others, ``ranks``, over ``group``."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dim: MeshDim,
        detection: HangDetection,
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
        self._watchdog = detection.watchdog
        self._headers = CPU if self.size > 1 and serving_backend(CPU) else device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # headers in flight
        self._unfinished: dict[int, PendingCollective] = {}  # by id of the operation
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
                        reports_dead_peers=device.type == "cpu",
                    )
                    self._logs[pair] = self._watchdog.rank_status.register(log)
        logs = [*self.logs, dim.gathers, dim.reductions] if self.size > 1 else []
        self._run, self._training = 0, False
        self._passes = detection.tracker(
            f"{name} in the pipeline of ranks {', '.join(map(str, self.ranks))}",
            rank,
            self.ranks,
            {log.name: log for log in logs},
            timeout,
        )

    @classmethod
    def over(cls, groups: ParallelGroups, name: str, timeout: float) -> StageMessages:
        """Make this rank's messages in its pipeline, for engine ``name`` (collective over all)."""
        dims, joined = groups.dims, None
        if dims.pipeline > 1:
            limit = timedelta(seconds=timeout + MARGIN_SECONDS)
            # Bound to the device, NCCL uses one communicator for all messages. Otherwise a message
            # that a schedule issues alone uses a communicator of two ranks, and never matches its
            # counterpart in a batch.
            bound = None if kinds.is_synchronous(groups.device) else groups.device
            if bound is not None:
                os.environ.setdefault(WARNING, "0")
            for ranks in dict.fromkeys(
                dims.ranks_along(rank, "pipeline") for rank in range(dims.world)
            ):
                group = dist.new_group(
                    list(ranks), limit, subgroup_backend_string(), device_id=bound
                )
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
            get_world_group().detection if joined is not None else HangDetection(),
            name,
            timeout,
        )

    @property
    def logs(self) -> list[CollectiveLog]:
        """The logs of its messages, one for each direction between two ranks."""
        return list(self._logs.values())

    def close(self) -> None:
        """Release the communicator."""
        self._passes.close()
        for log in self.logs:
            log.end("destroyed its engine")
            log.close()
        destroy_if_current(self._group)
        self._group = None

    @contextmanager
    def running(self, training: bool) -> Iterator[None]:
        """Context of one run of the schedule, which all ranks of the pipeline begin together: of a
        ``training`` step or of an evaluation.
        """
        self._run, self._training = self._run + 1, training
        what = f"run of the pipeline ({'training' if training else 'evaluation'})"
        self._passes.begin(what, self._run)
        try:
            yield
        except BaseException:
            # Those that were launched may never be sent: their works end with the schedule.
            for pending in self._unfinished.values():
                if pending.log is not None and pending.log.num_issued == pending.number + 1:
                    pending.log.abandon(pending.number, pending.what)
            self._passes.broke()
            raise
        finally:
            self._unfinished.clear()
        self._passes.end()

    def launch(
        self,
        own: Callable[..., list[Any]],
        operations: Sequence[dist.P2POp],
        desc: str | None = None,
    ) -> list[Any]:
        """Launch ``operations`` by ``own``, torch's function. Return its works, whose waits the
        watchdog sees.
        """
        works = own(operations, desc)
        parts = [[operation] for operation in operations]
        if len(works) != len(operations):  # one for a batch, in which receives are the last
            parts = [[*operations]] * len(works)
        return [
            Handle([work], self._watchdog, pending, finish=partial(self._finished, part))
            if (pending := self._unfinished.get(id(part[-1]))) is not None
            else work
            for work, part in zip(works, parts)
        ]

    def _finished(self, operations: Sequence[dist.P2POp]) -> None:
        for operation in operations:
            self._unfinished.pop(id(operation), None)

    def _issue(self, source: int, target: int, what: str) -> PendingCollective:
        other = target if source == self.rank else source
        return self._logs[source, target].issue(what, (self.ranks[other],))

    def announce(self, peer: int, header: Sequence[int]) -> None:
        """Send ``header`` to ``peer``."""
        message = torch.tensor(header, dtype=torch.int64).to(self._headers)
        work = dist.isend(message, group=self._group, group_dst=peer, tag=HEADER_TAG)
        assert work is not None
        self._sent = [(w, h) for w, h in self._sent if not w.is_completed()]
        self._sent.append((work, message))

    def announced_by(self, peer: int, pending: PendingCollective) -> Sequence[int]:
        """Wait for the next header of ``peer``, and return it."""
        size = len(_Position._fields) + HEADER
        message = torch.empty(size, dtype=torch.int64, device=self._headers)
        self._watchdog.check()
        try:
            with self._watchdog.watching(pending):
                work = dist.irecv(message, group=self._group, group_src=peer, tag=HEADER_TAG)
                assert work is not None
                work.wait()
                header: list[int] = message.tolist()
        except RuntimeError as error:
            raise self._watchdog.conclude_failure(pending, error) from error
        return header

    def send(
        self, peer: int, stage: int, micro_batch: int, activations: Activations, kind: type[Any]
    ) -> list[dist.P2POp]:
        """Send the header of ``activations``, of ``stage``, to ``peer``, and return the operations
        that send the tensors. ``kind``: the class of what they are, of :data:`PASSED_CLASSES`.
        """
        key, position = _key(stage, micro_batch), self._position(stage, micro_batch)
        header = [*position, *_header(activations, kind)]
        pending = self._issue(self.rank, peer, f"{key} forward")
        self.announce(peer, header)
        tensors = [activation.detach() for activation in activations if activation is not None]
        return self._send("send_activations", tensors, peer, FORWARD_TAG, key, pending)

    def receive(
        self, peer: int, stage: int, micro_batch: int
    ) -> tuple[Activations, tuple[bool, ...], type[Any], list[dist.P2POp]]:
        """Wait for the header of the next activations of ``peer``, of ``stage``. Return memory for
        them, which of them require grad, the class of what they are, of :data:`PASSED_CLASSES`, and
        the operations that fill that memory.

        Raises RankMismatchError if they are of another run or micro-batch.
        """
        pending = self._issue(peer, self.rank, f"{_key(stage, micro_batch)} forward")
        header = self.announced_by(peer, pending)
        run, training, *message = header[: len(_Position._fields)]
        came = _Position(run, bool(training), *message)
        self._refuse_other(peer, came, self._position(stage, micro_batch))
        announced, grads, kind = _announced(header[len(came) :])
        tensors, buffer = _receive_buffer(
            [form for form in announced if form is not None], self.device
        )
        received = iter(tensors)
        activations = tuple(None if form is None else next(received) for form in announced)
        operations = self._operation(dist.irecv, buffer, peer, FORWARD_TAG, pending)
        return activations, grads, kind, operations

    def _position(self, stage: int, micro_batch: int) -> _Position:
        return _Position(self._run, self._training, stage, micro_batch)

    def _refuse_other(self, peer: int, came: _Position, awaited: _Position) -> None:
        """Raise RankMismatchError, on all ranks, unless the header that ``peer`` has sent is of the
        ``awaited`` message.
        """
        if came == awaited:
            return
        here, sender = self.ranks[self.rank], self.ranks[peer]
        text = (
            f"rank {here} awaits {awaited}, and rank {sender} has sent {came}: an exception has "
            "ended a run on one of them alone, or one trains where the other evaluates. Call "
            f"train_batch and eval_batch in the same order on all ranks. {REMEDY}"
        )
        self._watchdog.end(text)
        raise RankMismatchError(text)

    def send_gradients(
        self, peer: int, stage: int, micro_batch: int, gradients: Sequence[torch.Tensor]
    ) -> list[dist.P2POp]:
        key = _key(stage, micro_batch)
        pending = self._issue(self.rank, peer, f"{key} backward")
        return self._send("send_gradients", gradients, peer, BACKWARD_TAG, key, pending)

    def receive_gradients(
        self, peer: int, stage: int, micro_batch: int, outputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[dist.P2POp]]:
        """Return memory for the gradients of ``outputs``, of ``stage``, that ``peer`` sends next,
        and the operations that fill it.
        """
        pending = self._issue(peer, self.rank, f"{_key(stage, micro_batch)} backward")
        shapes = [(tuple(output.shape), output.dtype) for output in outputs]
        gradients, buffer = _receive_buffer(shapes, self.device)
        return gradients, self._operation(dist.irecv, buffer, peer, BACKWARD_TAG, pending)

    def explain(self, error: RuntimeError) -> Exception:
        """Return the exception to raise for ``error`` of the launch of a message."""
        pending = PendingCollective("the stages of the pipeline", required=tuple(self.ranks))
        return self._watchdog.conclude_failure(pending, error)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _send(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        peer: int,
        tag: int,
        key: str,
        pending: PendingCollective,
    ) -> list[dist.P2POp]:
        if size := sum(tensor.numel() * tensor.element_size() for tensor in tensors):
            self._dim.stats.record(what, f"{key} (pipeline)", size)
        return self._operation(dist.isend, _packed(tensors), peer, tag, pending)

    def _operation(
        self,
        operation: Callable[..., dist.Work | None],
        buffer: torch.Tensor,
        peer: int,
        tag: int,
        pending: PendingCollective,
    ) -> list[dist.P2POp]:
        if not buffer.numel():
            return []
        message = dist.P2POp(operation, buffer, group=self._group, tag=tag, group_peer=peer)
        self._unfinished[id(message)] = pending
        return [message]


def _key(stage: int, micro_batch: int) -> str:
    return f"micro-batch {micro_batch} between stages {stage} and {stage + 1}"


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
    """Return ``tensors`` as the bytes of one message: not every backend supports every dtype."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    if len(flat) < 2:
        return flat[0] if flat else torch.empty(0, dtype=torch.uint8)
    starts, size = _places([((tensor.numel(),), torch.uint8) for tensor in flat])
    message = flat[0].new_empty(size)
    for start, part in zip(starts, flat):
        message[start : start + part.numel()].copy_(part)
    return message


def _receive_buffer(
    shapes: Sequence[Shape], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return tensors of ``shapes``, and their memory as the bytes of the message that fills it.

    The tensors share the storage of the buffer without being autograd views of it, so each has its
    own version counter: one may be changed in place while another is saved for a backward.
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


def _header(activations: Activations, kind: type[Any]) -> list[int]:
    header = [len(activations), PASSED_CLASSES.index(kind)]
    for activation in activations:
        if activation is None:
            header.append(-1)
        elif activation.dtype not in DTYPES:
            raise PartitionError(
                f"a stage of the pipeline passes on a tensor of {activation.dtype}; pass one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, a complex "
                "one as torch.view_as_real of it"
            )
        else:
            header += [
                DTYPES.index(activation.dtype),
                int(activation.requires_grad),
                activation.dim(),
                *activation.shape,
            ]
    if len(header) > HEADER:
        raise PartitionError(
            f"a stage of the pipeline passes on {len(activations)} tensors, whose shapes are more "
            f"than {HEADER} numbers; pass fewer from layer to layer, or stack them"
        )
    return [*header, *[0] * (HEADER - len(header))]


def _announced(header: Sequence[int]) -> tuple[list[Shape | None], tuple[bool, ...], type[Any]]:
    """Return the shapes that a header announces, whether each requires grad, and the class of what
    they are, of :data:`PASSED_CLASSES`.
    """
    stream = iter(header)
    count, kind = next(stream), PASSED_CLASSES[next(stream)]
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
    return shapes, tuple(grads), kind


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
