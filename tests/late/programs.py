"""Small programs, right and broken, and what the device says of each: ``python -m
tests.late.programs``.

Each is a function of no arguments that returns a number. Those in RIGHT must run without a report
and return what they return in mode inline; those in BROKEN name the kind of report that must come,
in every mode, also where the numbers happen to be right.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.late import device

import torch  # isort: skip

NAME = device.NAME
torch_device: Any = torch.get_device_module(NAME)
N = 20_000  # numbers: several pages

Program = Callable[[], float]
RIGHT: dict[str, Program] = {}
BROKEN: dict[str, tuple[Program, str]] = {}


def right(program: Program) -> Program:
    RIGHT[program.__name__] = program
    return program


def broken(kind: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        BROKEN[program.__name__] = (program, kind)
        return program

    return add


def current() -> Any:
    return torch_device.current_stream()


def ones(numel: int = N) -> torch.Tensor:
    return torch.ones(numel, device=NAME)


def side_stream() -> Any:
    """A stream that comes after what the current one has."""
    stream = torch_device.Stream()
    stream.wait_stream(current())
    return stream


def doubled(x: torch.Tensor, stream: Any, record: bool = False) -> torch.Tensor:
    with torch_device.stream(stream):
        y = x * 2
        if record:
            x.record_stream(stream)
    return y


def pinned(value: float) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


def total(x: torch.Tensor) -> float:
    return float(x.sum().item())


@right
def products_of_16_bits_are_added_in_32() -> float:
    left = torch.full((4, 300), 1.0, dtype=torch.bfloat16, device=NAME)
    into = torch.full((4, 4), 0.5, device=NAME)
    torch.ops.aten.addmm.dtype_out(into, left, left.t(), into.dtype, beta=1, out=into)
    return total(into)


@right
def waits_for_a_stream() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side, record=True)
    current().wait_stream(side)
    z = y + 1
    y.record_stream(current())
    return total(z)


@broken("race")
def reads_what_another_stream_writes() -> float:
    x, side = ones(), side_stream()
    return total(doubled(x, side) + 1)


@broken("race")
def writes_what_another_stream_reads() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side)
    x.fill_(7)
    current().wait_stream(side)
    return total(y)


@right
def a_query_that_says_yes_is_a_wait() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side)
    event = side.record_event()
    while not event.query():
        pass
    return total(y + 1)


def _columns(stop: int) -> float:
    """One stream fills columns up to ``stop``, another one those from 4 on."""
    x, side = torch.zeros(100, 8, device=NAME), side_stream()
    with torch_device.stream(side):
        x[:, :stop].fill_(1)
    x[:, 4:].fill_(2)
    current().wait_stream(side)
    return total(x)


@right
def columns_on_two_streams() -> float:
    return _columns(4)


@broken("race")
def overlapping_columns_on_two_streams() -> float:
    return _columns(5)


@right
def a_backward_on_the_streams_of_its_forward() -> float:
    weight = torch.ones(N, device=NAME, requires_grad=True)
    side = side_stream()
    with torch_device.stream(side):
        y = weight * 3
    current().wait_stream(side)
    y.record_stream(current())
    (y * y).sum().backward()
    assert weight.grad is not None
    return total(weight.grad)


@broken("reuse")
def freed_under_a_reader() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side)
    del x
    torch.zeros(N, device=NAME)  # may take the same memory
    current().wait_stream(side)
    return total(y)


@right
def freed_after_record_stream() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side, record=True)
    del x
    torch.zeros(N, device=NAME)
    current().wait_stream(side)
    y.record_stream(current())
    return total(y)


@broken("reuse")
def resized_under_a_reader() -> float:
    x, side = ones(), side_stream()
    y = doubled(x, side)
    x.untyped_storage().resize_(0)
    torch.zeros(N, device=NAME)
    x.untyped_storage().resize_(4 * N)
    current().wait_stream(side)
    return total(y)


@broken("host")
def host_reads_before_the_copy_is_over() -> float:
    x, host = ones(), pinned(0)
    host.copy_(x, non_blocking=True)
    return total(host)


@right
def host_reads_after_the_event() -> float:
    x, host = ones(), pinned(0)
    host.copy_(x, non_blocking=True)
    current().record_event().synchronize()
    return total(host)


@broken("host")
def pinned_buffer_refilled_under_its_copy() -> float:
    host = pinned(1)
    x = host.to(NAME, non_blocking=True)
    host.fill_(9)
    return total(x)


@broken("host")
def host_reads_device_memory() -> float:
    x = ones()
    torch_device.synchronize()
    return ctypes.c_float.from_address(x.data_ptr()).value


@broken("host")
def threads_of_the_native_core_read_under_a_copy() -> float:
    from hf_zero.ops import host, native

    if not native.available():
        return host_reads_before_the_copy_is_over()
    native.set_threads(4)
    many = 8 * 32768  # a turn of each thread's, and more
    x, sent, out = ones(many), torch.zeros(many).pin_memory(), torch.zeros(many)
    current().synchronize()
    sent.copy_(x, non_blocking=True)
    host.accumulate(out, sent)
    current().synchronize()
    return total(sent)


def _registered() -> tuple[Any, int, torch.Tensor]:
    nbytes = -(-4 * N // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(memory))
    assert device.C.host_register(address, nbytes) == 0
    return memory, address, torch.frombuffer(memory, dtype=torch.float32)[:N].fill_(1)


@right
def registered_memory_is_pinned() -> float:
    _, address, host = _registered()
    assert host.is_pinned() and host[N // 2 :].is_pinned() and not torch.ones(3).is_pinned()
    assert device.C.host_register(address, 4096) != 0, "memory is registered once"
    x = host.to(NAME, non_blocking=True)
    result = total(x)
    assert device.C.host_unregister(address) == 0 and not host.is_pinned()
    return result


@broken("unregistered")
def memory_unregistered_under_its_copy() -> float:
    _, address, host = _registered()
    x = torch.empty(N, device=NAME)
    x.copy_(host, non_blocking=True)
    device.C.host_unregister(address)
    return total(x)


def _in_a_thread(sets_its_device: bool) -> float:
    torch_device.set_device(1)
    device.only_device(1)
    x = torch.ones(N, device=torch.device(NAME, 1))

    def work() -> None:
        if sets_its_device:
            torch_device.set_device(1)
        x.add_(torch.ones(1, pin_memory=True).to(x.device))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return total(x)


@right
def a_thread_sets_its_device() -> float:
    return _in_a_thread(True)


@broken("context")
def a_thread_without_a_device() -> float:
    return _in_a_thread(False)


@right
def a_copy_between_devices() -> float:
    x = torch.ones(N, device=torch.device(NAME, 0))
    y = x.to(torch.device(NAME, 1), non_blocking=True)
    x.fill_(5)
    assert y.device.index == 1
    return total(y)


@right
def uploads_of_any_strides() -> float:
    from hf_zero.device.pinned import upload

    rows, target = torch.arange(12.0).view(3, 4), torch.device(NAME, 0)
    given = [rows, rows.t(), rows[:, ::2], rows[:1].expand(5, 4), rows[0, 0], rows[:0]]
    before = dict(device.stats()["sync_ops"])
    brought = [upload(each, target) for each in given]
    assert device.stats()["sync_ops"] == before
    assert [each.stride() for each in brought] == [each.to(NAME).stride() for each in given]
    return total(torch.cat([each.flatten() for each in brought]))


@right
def draws_are_those_of_the_launch_order() -> float:
    torch.manual_seed(3)
    first, side = torch.rand(N, device=NAME), side_stream()
    with torch_device.stream(side):
        second = torch.rand(N, device=NAME)
    current().wait_stream(side)
    own = torch.Generator(NAME).manual_seed(7)
    return total(first - second + torch.rand(N, device=NAME, generator=own))


@right
def tokens_are_drawn_without_a_wait() -> float:
    from hf_zero.techniques.token_drop import sample

    before = dict(device.stats()["sync_ops"])
    kept = sample(7, (3, 0, 1), 2, 4, 30, 11, torch.device(NAME, 0))
    assert device.stats()["sync_ops"] == before
    return total(kept)


def judged(name: str) -> dict[str, Any]:
    """What a program must report, and what it has returned and reported."""
    program, wanted = (RIGHT[name], "") if name in RIGHT else BROKEN[name]
    device.forget()
    try:
        value: Any = program()
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    finally:
        device.only_device(None)
        torch_device.set_device(0)
    device.synchronize_all()
    return {"name": name, "wanted": wanted, "value": value, "reports": device.reports()}


def main() -> None:
    """The modes given, one after the other; ``random:7`` has a seed. One line of JSON a program."""
    for mode in sys.argv[1:]:
        kind, _, seed = mode.partition(":")
        device.configure(kind, seed=int(seed or 0), max_us=2000, nap=0.5)
        for name in [*RIGHT, *BROKEN]:
            device.tell(mode=mode, **judged(name))


if __name__ == "__main__":
    main()
