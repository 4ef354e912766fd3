"""The schedule of a training step under offload, recorded from the engine itself: for
``offload_model.py``.

The engine runs on the CPU over a scaled-down model, with streams and events that only write down
what it does with them, so that it takes the paths it takes on a GPU: gradients cross on the stream
of ``GradientOffload``, new parameters are staged by ``Updater`` or copied by the storages, and the
waits are the engine's own. What is recorded is, for the training thread and for the
thread that updates, the list of :class:`Op` in program order; sizes are those of the real model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

COMPUTE = "compute"
TRAIN, UPDATE = "train", "update"  # the two threads
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Op:
    """One thing a thread does.

    ``launch``: put ``what`` (kernel, copy, record, wait) on ``stream``; ``sync``: wait for
    ``event``; ``submit``, ``begin``, ``end`` and ``join``: of a job of the update thread; ``host``:
    pass over ``size`` bytes of host memory; ``disk``: start a transfer; ``landed``: wait for it;
    ``mark``: a step is over.
    """

    kind: str
    what: str = ""
    stream: str = ""
    event: int = -1
    size: float = 0.0  # bytes
    flops: float = 0.0
    label: str = ""


@dataclass
class Schedule:
    """Ops by thread, in program order."""

    threads: dict[str, list[Op]] = field(default_factory=lambda: {TRAIN: [], UPDATE: []})

    def of(self, kind: str, thread: str | None = None) -> list[Op]:
        return [
            op
            for name, ops in self.threads.items()
            if thread in (None, name)
            for op in ops
            if op.kind == kind
        ]


class _Event:
    def __init__(self, recorder: Recorder, stream: str):
        self.number = recorder.number()
        self._recorder = recorder
        recorder.add(Op("launch", "record", stream, self.number))

    def synchronize(self) -> None:
        self._recorder.add(Op("sync", event=self.number))

    def query(self) -> bool:
        self.synchronize()  # the answer depends on the machine: taken as a wait
        return True


class _Stream:
    def __init__(self, recorder: Recorder, name: str):
        self.name = name
        self._recorder = recorder

    def record_event(self) -> _Event:
        return _Event(self._recorder, self.name)

    def wait_event(self, event: _Event) -> None:
        self._recorder.add(Op("launch", "wait", self.name, event.number))

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Copies(TorchFunctionMode):
    """Writes down every ``copy_`` in the block as one on the current stream."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            blocks = not ((kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2]))
            self._recorder.copied(args[0], blocks)
        return func(*args, **(kwargs or {}))


class _Ticket:
    def __init__(self, recorder: Recorder, number: int, ticket: Any):
        self._recorder, self._number, self._ticket = recorder, number, ticket

    def wait(self) -> None:
        self._recorder.add(Op("landed", event=self._number))
        self._ticket.wait()

    def done(self) -> bool:
        self.wait()  # as for events
        return True


class _Extent:
    """An extent of a file whose transfers are written down; ``real`` gives the bytes of the real
    one from an offset and a size.
    """

    def __init__(
        self, recorder: Recorder, extent: Any, label: str, real: Callable[[int, int], float]
    ):
        self._recorder, self._extent, self._label, self._real = recorder, extent, label, real

    def read(self, offset: int, out: torch.Tensor, priority: Any) -> _Ticket:
        return self._move("read", offset, out, priority)

    def write(self, offset: int, data: torch.Tensor, priority: Any) -> _Ticket:
        return self._move("write", offset, data, priority)

    def _move(self, what: str, offset: int, tensor: torch.Tensor, priority: Any) -> _Ticket:
        number = self._recorder.number()
        size = self._real(offset, tensor.nbytes)
        self._recorder.add(Op("disk", what, str(priority.name), number, size, label=self._label))
        return _Ticket(
            self._recorder, number, getattr(self._extent, what)(offset, tensor, priority)
        )


class _Promise(Future[Any]):
    """The future of a unit that the updater waits for, completed in whichever job reaches
    the unit.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder, self._job = recorder, -1

    def set_result(self, result: Any) -> None:
        self._job = self._recorder.job
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        value = super().result(timeout)
        if self._job >= 0:  # else the thread that trains has updated it
            self._recorder.add(Op("join", event=self._job))
        return value


class _Worker:
    """The executor of the updater: one thread, whose jobs are written down."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(1)

    def submit(self, run: Callable[..., Any], *args: Any) -> None:
        number = self._recorder.number()
        self._recorder.add(Op("submit", event=number))

        def recorded() -> Any:
            self._recorder.add(Op("begin", event=number))
            self._recorder.job = number
            run(*args)
            self._recorder.add(Op("end", event=number))

        self._pool.submit(recorded)

    def shutdown(self, wait: bool = True) -> None:
        self._pool.shutdown(wait)


class Recorder:
    """Attached to ``engine`` on the CPU; :meth:`recording` writes down what it does as on a GPU.

    Args:
        engine: over the scaled-down model, with its optimizer or parameters offloaded.
        sizes: elements of the real model by unit name.
        flops: of one forward by name of module, of the real model; a backward takes twice as many.
    """

    def __init__(self, engine: Any, sizes: Mapping[str, int], flops: Mapping[str, float]):
        self.schedule = Schedule()
        self._engine = engine
        # by what else of a flat buffer the engine passes around
        self._flat_of = {
            part: flat for flat in engine.flats for part in (flat.gradient, flat.optimizer_shard)
        }
        self._sizes = sizes
        self._flops = flops
        self._numbers = 0
        self.job = -1  # of the update thread
        self._lock = threading.Lock()
        self._here = threading.local()
        self._trainer = threading.current_thread()
        self._streams = 0
        self._on = False

    def number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def add(self, op: Op) -> None:
        if self._on:
            self.schedule.threads[
                TRAIN if threading.current_thread() is self._trainer else UPDATE
            ].append(op)

    def _factor(self, flat: Any) -> float:
        """Real elements for one of the scaled-down ``flat``."""
        return self._sizes[flat.unit.name] / flat.layout.numel

    # ---- streams ----

    def _current(self) -> _Stream:
        return getattr(self._here, "stream", None) or _Stream(self, COMPUTE)

    def _new_stream(self, *_: Any, **__: Any) -> _Stream:
        self._streams += 1
        return _Stream(self, f"copy {self._streams}")

    @contextmanager
    def _under(self, stream: _Stream | None) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = before if stream is None else stream
        try:
            yield
        finally:
            self._here.stream = before

    @contextmanager
    def _moving(self, direction: str, flat: Any) -> Iterator[None]:
        """Copies in the block are of ``flat``, in ``direction``."""
        before, self._here.moving = getattr(self._here, "moving", None), (direction, flat)
        try:
            with _Copies(self):
                yield
        finally:
            self._here.moving = before

    def copied(self, out: torch.Tensor, blocks: bool) -> None:
        direction, flat = self._here.moving
        stream = self._current()
        self.add(
            Op(
                "launch",
                direction,
                stream.name,
                size=out.nbytes * self._factor(flat),
                label=flat.unit.label,
            )
        )
        if blocks:
            stream.synchronize()

    # ---- what of the engine is wrapped ----

    @contextmanager
    def recording(self) -> Iterator[Schedule]:
        """Steps in the block are recorded; :meth:`mark` after each."""
        from hf_zero.device import streams
        from hf_zero.offload import update as updates
        from hf_zero.offload.gradient_offload import GradientOffload
        from hf_zero.offload.sub_group_update import Update
        from hf_zero.zero.layout.flat_buffer import FlatBuffer

        engine, gpu = self._engine, torch.device("cuda", 0)
        engine.updater.finish()
        with ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, value))

            beside = self._new_stream()
            replace(streams, "side_stream", self._new_stream)
            replace(streams, "on_stream", self._under)
            replace(streams, "current_stream", lambda device=None: self._current())
            replace(streams, "record_event", lambda stream: stream.record_event())
            replace(streams, "shard_stream", lambda device: beside)
            replace(
                FlatBuffer,
                "part_in_host_memory",
                _where_a_gpu_would(FlatBuffer.part_in_host_memory),
            )
            replace(FlatBuffer, "bring_shard", self._bring(FlatBuffer.bring_shard))
            replace(FlatBuffer, "store_part", self._store(FlatBuffer.store_part))
            replace(Update, "_apply", self._apply(Update._apply))
            replace(engine.bound, "step", self._step(engine.bound.step))
            if engine.updater.units:
                offload = GradientOffload(gpu, engine.sharded_model.placement.take_pinned)
                replace(offload, "send", self._send(offload.send))
                reducer = engine.backward_pass.reducer
                for each in (reducer, reducer._intake, reducer._reductions, engine.updater):
                    replace(each, "_offload", offload)
                replace(engine.updater, "_device", gpu)
                replace(engine.updater._copies, "_device", gpu)
                replace(engine.updater._queue, "_worker", _Worker(self))
                replace(updates, "Future", lambda: _Promise(self))
                replace(engine.bound, "begin", self._begin(engine.bound.begin))
            self._proxy_files(replace)
            self._tell_of_compute(stack)
            self._on = True
            try:
                yield self.schedule
                if engine.updater.units:
                    engine.updater.finish()
            finally:
                if engine.updater.units:  # the end of its last job is to be recorded, too
                    engine.updater._queue._worker.shutdown()
                self._on = False

    def mark(self) -> None:
        self.add(Op("mark"))

    def _bring(self, bring: Any) -> Any:
        def bring_shard(flat: Any) -> Any:
            if not flat.is_away:
                return bring(flat)
            flat.optimizer_shard.wait_for_update()
            with self._moving("h2d", flat):
                return bring(flat)

        return bring_shard

    def _store(self, store: Any) -> Any:
        def store_part(flat: Any, start: int, values: torch.Tensor) -> None:
            if not flat.optimizer_shard.offloaded or flat.is_away:
                store(flat, start, values)
                return
            with self._moving("h2d", flat):
                store(flat, start, values)

        return store_part

    def _send(self, send: Any) -> Any:
        def sent(gradient: Any, values: torch.Tensor, accumulate: bool, scale: float = 1.0) -> None:
            flat = self._flat_of[gradient]
            # Gradients have been taken into one buffer, copied and normed: five passes over the
            # memory of the GPU.
            self._kernel(
                f"gradient of {flat.unit.label}", size=5 * values.nbytes * self._factor(flat)
            )
            with self._moving("d2h", flat):
                send(gradient, values, accumulate, scale)

        return sent

    def _apply(self, apply: Any) -> Any:
        from hf_zero.ops.host import Blocks

        def applied(
            update: Any,
            segment: Any,
            held: Mapping[str, Any],
            grad: torch.Tensor,
            out: torch.Tensor | None,
        ) -> None:
            flat, numel = self._flat_of[segment.parts[0].flat], segment.stop - segment.start
            kept = sum(
                array.nbytes if isinstance(array, Blocks) else array.numel() * array.element_size()
                for array in held.values()
            )
            size = 2 * kept + grad.nbytes + (out.nbytes if out is not None else 0)
            self.add(
                Op(
                    "host",
                    size=size * self._factor(flat),
                    label=f"{flat.unit.label} {segment.sub_group}",
                    flops=numel * self._factor(flat),
                )
            )
            apply(update, segment, held, grad, out)

        return applied

    def _begin(self, begin: Any) -> Any:
        def begun(divisor: float, step: int) -> Any:
            if self._engine.max_norm or self._engine.backward_pass.losses.may_overflow:
                self._current().synchronize()  # the host has asked for the norm
            return begin(divisor, step)

        return begun

    def _step(self, step: Any) -> Any:
        def stepped(divisor: Any, **more: Any) -> Any:
            here = sum(
                self._sizes[flat.unit.name]
                for flat in self._engine.sharded_model.trainable
                if not flat.optimizer_shard.offloaded
            )
            if here:
                # Norm 4, Adam 28 and the cast 6 bytes an element; fp32 gradients are kept.
                self._kernel("update on the GPU", size=38.0 * here)
            return step(divisor, **more)

        return stepped

    def _proxy_files(self, replace: Any) -> None:
        from hf_zero.offload.nvme import NvmeStorage, paged
        from hf_zero.offload.storage import SHARD
        from hf_zero.ops.host import BLOCK

        def proxy(flat: Any, storage: Any) -> None:
            def real_of(name: str) -> Callable[[int, int], float]:
                how, offsets = storage._formats[name], storage._offsets[name]

                def real(offset: int, nbytes: int) -> float:
                    start, stop = storage.sub_groups[offsets.index(offset)]
                    if name == SHARD:
                        return flat.layout.numel * self._factor(flat) * how.dtype.itemsize
                    numel = math.ceil((stop - start) * self._factor(flat))
                    return (
                        paged(numel) + paged(4 * math.ceil(numel / BLOCK))
                        if how.blocks
                        else paged(numel * how.dtype.itemsize)
                    )

                return real

            proxies = {
                name: _Extent(self, extent, flat.unit.label, real_of(name))
                for name, extent in storage._extents.items()
            }
            replace(storage, "_extents", proxies)

        for flat in self._engine.flats:
            for storage in (flat.optimizer_shard.storage, flat._storage):
                if isinstance(storage, NvmeStorage):
                    proxy(flat, storage)

    # ---- compute ----

    def _kernel(self, label: str, flops: float = 0.0, size: float = 0.0) -> None:
        self.add(Op("launch", "kernel", self._current().name, size=size, flops=flops, label=label))

    def _tell_of_compute(self, stack: ExitStack) -> None:
        for name, flops in self._flops.items():
            module = self._engine.module.get_submodule(name)
            stack.enter_context(
                mock.patch.object(module, "forward", self._forward(module.forward, name, flops))
            )
            # After the engine's own hooks: its hook on the output gathers the unit before the
            # backward begins.
            handle = module.register_forward_hook(self._watch(name, 2 * flops))
            stack.callback(handle.remove)

    def _forward(self, forward: Any, name: str, flops: float) -> Any:
        def told(*args: Any, **kwargs: Any) -> Any:
            self._kernel(f"{FORWARD} {name}", flops)
            return forward(*args, **kwargs)

        return told

    def _watch(self, name: str, flops: float) -> Any:
        def watched(module: Any, args: Any, output: Any) -> None:
            first = output if isinstance(output, torch.Tensor) else output[0]
            if first.requires_grad:
                first.register_hook(lambda grad: self._kernel(f"{BACKWARD} {name}", flops))

        return watched


def _where_a_gpu_would(part: Any) -> Any:
    def part_in_host_memory(flat: Any, start: int, stop: int) -> torch.Tensor | None:
        return part(flat, start, stop) if flat.is_away else None

    return part_in_host_memory
