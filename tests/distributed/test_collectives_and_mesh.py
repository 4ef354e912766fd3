"""Groups and collectives where one process is all there is, the arithmetic at the end of a
reduction, and the communicators of a job on NCCL, which is played; tests/gpu has NCCL itself.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_zero.config import ZeroConfig
from hf_zero.distributed import (
    backends,
    communicators,
    flat_mesh,
    init,
    mesh,
    process_group,
    world_group,
)
from hf_zero.distributed.collective_log import (
    CollectiveLog,
    CollectiveStats,
    PendingCollective,
    Starting,
)
from hf_zero.distributed.flat_mesh import DimMaker
from hf_zero.distributed.handle import Handle, tagged_barrier
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.host_transfers import HostTransfers
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.two_hops import TwoHops
from hf_zero.errors import ConfigError, LaunchError, PartitionError, RankMismatchError
from tests.helpers.accelerators import play_accelerator
from tests.helpers.cells import in_one_item

CPU, GPU = torch.device("cpu"), torch.device("cuda", 2)
OFF = Watchdog()


@pytest.fixture(autouse=True)
def no_group_before_or_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    for name in (*names.split(), "ACCELERATE_USE_CPU", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    process_group.destroy_process_group()
    assert not process_group.is_initialized()


def test_the_environment_as_a_meeting_place_is_the_launcher_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``env://`` under srun, which sets none of torch's variables."""
    given = {"PROCID": "0", "LOCALID": "0", "STEP_ID": "1", "NTASKS": "2", "JOB_ID": "5"}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    joined: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kwargs: joined.append((args, sorted(kwargs)))
    )
    monkeypatch.setattr(dist, "get_world_size", lambda *args: 1)
    provided = init.provided
    kept = {"store_of_attempt": lambda *args: dist.HashStore()}
    monkeypatch.setattr(init, "provided", lambda name, *of: kept.get(name) or provided(name, *of))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes them back
    init.init_distributed("gloo", 30, init_method="env://")
    assert joined == [(("gloo",), ["device_id", "rank", "store", "timeout", "world_size"])]
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "2", "0"]


def test_a_backend_that_is_not_here_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play_accelerator(monkeypatch, count=0)
    monkeypatch.setattr(init, "choose_interface", None)
    wrong: list[Any] = [
        "foo",
        "",
        "undefined",
        "cpu:gloo,cuda:foo",
        "cuda:cpu:gloo",
        "gloo,",
        "gloo,gloo",
        3,
    ]
    for built in (False, True):
        monkeypatch.setattr(dist, "is_nccl_available", lambda built=built: built)
        for backend in ("nccl", "NCCL", "cpu:gloo,cuda:nccl", "mpi", "gloo,gloo", 3, *wrong):
            with pytest.raises(ConfigError, match=re.escape(f"the backend {backend!r} ")):
                init.init_distributed(backend)
    config = ZeroConfig(2, distributed_backend="nccl")
    with pytest.raises(ConfigError, match="distributed_backend"):
        init.init_from_config(config)


def test_arguments_that_no_ranks_could_meet_by() -> None:
    infinite = float("inf"), float("nan"), timedelta(0), 1e10, 1e15, timedelta.max
    for timeout in ("30", True, -5, 0, *infinite):
        with pytest.raises(ConfigError, match=r"init_distributed\(timeout="):
            init.init_distributed(timeout=timeout)
    for port in ("29500", 0, -1, 65536, 1.5):
        with pytest.raises(ConfigError, match=rf"init_distributed\(port={port!r}\)"):
            init.init_distributed(port=port)  # type: ignore[arg-type]
    for interface in (3, "", ["lo"]):
        with pytest.raises(ConfigError, match=r"init_distributed\(interface="):
            init.init_distributed(interface=interface)  # type: ignore[arg-type]
    before = dict(os.environ)
    for name, number in itertools.product(("rank", "world_size"), ("0", "", True, 1.5, None)):
        with pytest.raises(ConfigError, match=rf"init_distributed\({name}={number!r}\)"):
            init.init_distributed(**{name: number})  # type: ignore[arg-type]
    assert os.environ == before
    ranks = {"rank": 0, "world_size": 2}
    for address, given in (
        ("garbage", ranks),
        (3, ranks),
        ("", ranks),
        ("tcp://127.0.0.1", ranks),
        ("tcp://:1234", ranks),
        ("tcp://127.0.0.1:p", ranks),
        ("tcp://127.0.0.1:99999", ranks),
        ("tcp://127.0.0.1:1234", {}),
        ("tcp://127.0.0.1:1234", {"rank": 0}),
        ("tcp://127.0.0.1:1234?rank=x&world_size=2", {}),
        ("tcp://127.0.0.1:1234?rank=0", {}),
        ("tcp://127.0.0.1:1234?rank=0", ranks),
        ("tcp://127.0.0.1:1234?rank=2&world_size=2", {}),
        ("tcp://127.0.0.1:1234", {"rank": 2, "world_size": 2}),
        ("file:///tmp/store", {"world_size": 2}),
        ("file:///no/such/folder/store", ranks),
        ("file://store", ranks),
        ("foo://127.0.0.1:1234", ranks),
    ):
        with pytest.raises(LaunchError, match=r"init_method=") as raised:
            init.init_distributed(init_method=address, **given)  # type: ignore[arg-type]
        assert str(address) in str(raised.value)


def test_ranks_in_an_address_count_as_if_they_were_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: joined.append(given))
    monkeypatch.setattr(init, "raise_file_limit", joined.append)
    address = "tcp://127.0.0.1:1234?rank=0&world_size=2"
    init.init_distributed(init_method=address)
    ranks, given = joined
    assert ranks == 2 and (given["rank"], given["world_size"]) == (-1, -1), "torch reads them"


def test_a_local_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", 5), (" ", 5), ("3", 3)):
        monkeypatch.setenv("LOCAL_RANK", text)
        assert process_group.get_local_rank(5) == expected
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(LaunchError, match="LOCAL_RANK='one'"):
        process_group.get_local_rank()


def test_a_group_of_one_gives_way_to_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only hf-zero's own; one of several ranks is a script's choice, unless arguments say more."""
    joined: list[Any] = []

    def alone() -> None:
        init.init_distributed()
        joined.clear()
        monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: joined.append(given))
        monkeypatch.setattr(init, "_group_by_store", lambda place, _: {"place": place})

    alone()
    places: tuple[dict[str, Any], ...] = ({}, {"rank": 0, "world_size": 1}, {"rank": 1})
    for given in places:
        init.init_distributed(**given)
        assert dist.is_initialized() and not joined, given
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**address, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    init.init_distributed()
    assert not dist.is_initialized() and joined[0]["place"].world_size == 2
    monkeypatch.undo()
    for made, given, refused in (
        ((0, 1), {}, False),
        ((0, 1), {"rank": 1, "world_size": 2}, True),
        ((1, 3), {"rank": 1, "world_size": 2}, True),
        ((1, 3), {"rank": 1, "world_size": 3}, False),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=made[0], world_size=made[1])
        monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
        with pytest.raises(LaunchError, match="world_size") if refused else nullcontext():
            init.init_distributed(**given)
        assert dist.get_world_size() == made[1]
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "8")
        with pytest.raises(LaunchError, match="WORLD_SIZE") if made[1] == 1 else nullcontext():
            init.leave_group_of_one()
        monkeypatch.undo()
        with monkeypatch.context() as patch:  # a simulation of one rank, beside a launcher's two
            patch.setenv("RANK", "1")
            patch.setenv("WORLD_SIZE", "8")
            init.init_distributed()
        dist.destroy_process_group()


def test_backends_that_others_have_registered_with_torch_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "rings"])
    for backend in ("rings", "Rings", "cpu:gloo,xpu:rings", "gloo", "GLOO", dist.Backend("gloo")):
        backends.refuse_missing_backends(backend)
    monkeypatch.setitem(dist.Backend.backend_capability, "rings", ["npu"])
    for count in (0, 1):
        play_accelerator(monkeypatch, "npu", count)
        with nullcontext() if count else pytest.raises(ConfigError, match="'rings'"):
            backends.refuse_missing_backends("rings")


def test_one_rank_runs_every_operation_and_sends_nothing() -> None:
    init.init_distributed()
    alone = Mesh(1, CPU, 5.0)
    assert alone.consensus is None and type(alone.watchdog) is Watchdog
    full, chunk = torch.zeros(8), torch.arange(8.0)
    alone.shard.all_gather([(full, chunk)], "unit").wait()
    assert full.tolist() == chunk.tolist()
    alone.shard.all_gather([(full, full)], "unit").wait()
    out = torch.ones(8)
    alone.shard.reduce_scatter(full, "unit").reduce_into(out, True, 0.5)
    assert out.tolist() == [1 + 0.5 * at for at in range(8)]
    alone.replicate.all_reduce(out, "norm").wait()
    alone.broadcast(out)
    alone.barrier()
    assert alone.broadcast_object({"a": 1}) == {"a": 1} and alone.all_gather_object("x") == ["x"]
    assert out[2] == 2 and alone.stats == CollectiveStats()


class Work:
    def __init__(self, watchdog: Watchdog = OFF) -> None:
        self.watchdog, self.seen = watchdog, list[str]()

    def wait(self) -> None:
        current = self.watchdog.current
        self.seen.append("" if current is None else current[0].what)


ENDS = itertools.product((1, 3), (torch.float32, torch.bfloat16), (1.0, 0.25), (False, True))


@in_one_item(ENDS)
def test_the_end_of_a_reduction(case: tuple[int, torch.dtype, float, bool]) -> None:
    """``out = scale * sum`` or ``out += scale * sum``, with the precision of ``out``, in which 1 +
    2⁻⁹ is not 1; the receive buffers go back once. It may end where its own part lies.
    """
    parts, wire, scale, accumulate = case
    received = [torch.full((5,), 2.0 ** (-9 * (at % 2))).to(wire) for at in range(parts)]
    fresh = [part.clone() for part in received]
    out, freed = torch.full((5,), 100.0), []
    want = scale * sum(part.float() for part in received) + (100.0 if accumulate else 0.0)
    work = Work()
    free = lambda: freed.append(True)  # noqa: E731
    handle = Handle([work], OFF, PendingCollective("reduction"), received, free)
    handle.reduce_into(out, accumulate, scale)
    assert torch.equal(out, want) and len(work.seen) == 1
    assert freed == [True] and handle._parts == [] and handle._free is None
    if wire == torch.float32 and not accumulate:
        Handle([], OFF, PendingCollective("reduction"), fresh).reduce_into(fresh[0], False, scale)
        assert torch.equal(fresh[0], want)


class Failing:
    """A work whose first wait raises ``error``, if there is one."""

    def __init__(self, error: BaseException | None = None):
        self.error, self.waits = error, 0

    def wait(self) -> None:
        self.waits += 1
        error, self.error = self.error, None
        if error is not None:
            raise error


def handle(works: Sequence[Failing], **given: Any) -> tuple[Handle, Watchdog]:
    watchdog = Watchdog()
    pending = CollectiveLog("gathers", (0, 1), 9.0).issue("all-gather of a unit")
    return Handle(works, watchdog, pending, **given), watchdog


def test_a_wait_that_was_interrupted_goes_on() -> None:
    works, ends = [Failing(), Failing(KeyboardInterrupt()), Failing()], list[int]()
    waiting, _ = handle(works, finish=lambda: ends.append(1))
    with pytest.raises(KeyboardInterrupt):
        waiting.wait()
    for _ in range(2):
        waiting.wait()
    assert [work.waits for work in works] == [1, 2, 1] and ends == [1]


def test_an_end_that_was_interrupted_runs_again() -> None:
    """Unless it may not be repeated: a codec of differences adds to what is there."""
    for repeats in (True, False):
        end = Failing(KeyboardInterrupt())
        waiting, _ = handle([Failing()])
        waiting.finish_with(end.wait, repeats)
        with pytest.raises(KeyboardInterrupt):
            waiting.wait()
        for _ in range(2):
            with nullcontext() if repeats else pytest.raises(PartitionError, match="all-gather"):
                waiting.wait()
        assert end.waits == (2 if repeats else 1)


def test_the_second_hop_of_an_interrupted_gather_is_issued_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dim:
        size, rank = 2, 0

        def __init__(self, first: Failing):
            self.issued, self.first = 0, first

        def all_gather(self, pairs: Any, key: str) -> Failing:
            self.issued += 1
            return self.first

    across, node = Dim(Failing(KeyboardInterrupt())), Dim(Failing())
    hops = TwoHops(across, node)
    gather = hops.gather([(torch.zeros(8), torch.zeros(2))], "a unit", None)
    with pytest.raises(KeyboardInterrupt):
        gather.wait()
    gather.wait()
    assert (across.issued, across.first.waits, node.issued, node.first.waits) == (1, 2, 1, 1)

    broken = Dim(Failing())
    monkeypatch.setattr(broken, "all_gather", lambda *_: Failing(KeyboardInterrupt()).wait())
    gather = TwoHops(across, broken).gather([(torch.zeros(8), torch.zeros(2))], "a unit", None)
    with pytest.raises(KeyboardInterrupt):
        gather.wait()
    with pytest.raises(PartitionError, match="a unit"):
        gather.wait()


def test_every_wait_raises_what_its_end_has_raised() -> None:
    waiting, _ = handle([Failing()], finish=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            waiting.wait()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_no_lost_connection(kind: type[RuntimeError]) -> None:
    waiting, watchdog = handle([Failing(kind("of this device"))])
    for _ in range(2):
        with pytest.raises(kind, match="of this device"):
            waiting.wait()
    with (
        pytest.raises(kind),
        Starting(watchdog, waiting._pending, "all_gather", "a unit", 4),
    ):
        raise kind("of this device")
    assert not watchdog.verdict


def test_a_message_in_a_group_that_was_destroyed_names_the_remedy() -> None:
    """Before the works of an agreement, and of a collective; other errors stay."""
    waiting, watchdog = handle([])
    empty, pending = torch.zeros(1, dtype=torch.uint8), waiting._pending
    for group in (None, dist.distributed_c10d.ProcessGroup(0, 2)):
        with pytest.raises(PartitionError, match="destroy_process_group"):
            tagged_barrier(pending, (0, 1), 0, group, watchdog)
        with (
            pytest.raises(PartitionError, match="destroy_process_group"),
            Starting(watchdog, pending, "all_gather", "a unit", 4),
        ):
            dist.isend(empty, 1, group)
    with pytest.raises(ValueError, match="other"), Starting(watchdog, pending, "", "", 4):
        raise ValueError("other")
    assert not watchdog.verdict


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_one_kernel_of_a_device_casts_and_scales_with_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of 16 bits, among them zeros of both signs, infinities and subnormal numbers."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    monkeypatch.setattr(process_group.kinds, "is_synchronous", lambda device: False)
    for scale in (1.0, 0.5, 1 / 3, 2.0**-30):
        want, out = every.float() * scale, torch.empty(every.numel())
        Handle([], OFF, PendingCollective("x"), [every]).reduce_into(out, False, scale)
        same = out.view(torch.int32) == want.view(torch.int32)
        assert (same | want.isnan()).all() and out.isnan().equal(want.isnan()), scale


def test_values_in_host_memory_need_a_backend_that_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    world_group.broadcast(torch.ones(2), 0)
    play_accelerator(monkeypatch, count=2)
    monkeypatch.setattr(dist, "get_backend_config", lambda *args: "cuda:nccl")
    said = r"\(cuda:nccl\) has no backend for tensors on cpu.*\('cpu:gloo,cuda:nccl'\)"
    with pytest.raises(ConfigError, match=said):
        world_group.broadcast(torch.ones(2), 0)


def test_ranks_that_launch_through_one_connection_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker = DimMaker(0, torch.device("cuda", 0), "nccl", OFF, 60.0)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1: .*; unset it"):
        maker.make([(0, 1)], "engine 1", CollectiveStats())
    assert maker.make([(0,), (1,)], "engine 1", CollectiveStats()).size == 1
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    maker._check_connections([(0, 1)])


UNLIMITED = resource.RLIM_INFINITY


# soft and hard limit, ranks, limit afterwards, whether it is told
LIMITS = [
    (1024, 524_288, 8, 1024, False),
    (1024, 524_288, 256, 4608, False),
    (1024, UNLIMITED, 1024, 16_896, False),
    (1024, 4096, 1024, 4096, True),
    (65_536, 65_536, 1024, 65_536, False),
    (UNLIMITED, UNLIMITED, 1024, UNLIMITED, False),
]


def test_the_limit_of_open_files_is_raised_to_what_ranks_need(
    monkeypatch: pytest.MonkeyPatch, heard_in_full: list[str]
) -> None:
    for soft, hard, world, limit, told in LIMITS:
        heard_in_full.clear()
        limits = {resource.RLIMIT_NOFILE: (soft, hard)}
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", limits.get)
            patch.setattr(resource, "setrlimit", limits.__setitem__)
            backends.raise_file_limit(world)
        assert limits == {resource.RLIMIT_NOFILE: (limit, hard)}
        assert any("Too many open files" in line for line in heard_in_full) == told


DEVICE = torch.device("cuda", 0)
WORLD, SHARDS = 1024, 8


class Options:
    """In the place of ProcessGroupNCCL.Options, with the fields of NCCL ``newest``."""

    newest = True

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        fields = {"min_ctas": None, "max_ctas": None}
        self.config = SimpleNamespace(**fields, **({"cta_policy": None} if self.newest else {}))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Groups that this rank of a job on NCCL, the only one that exists, splits or makes, and their
    options; ``job`` is the default group.
    """
    made = SimpleNamespace(splits=[], groups=[], options=[])
    backend = SimpleNamespace(
        supports_splitting=True, options=SimpleNamespace(global_ranks_in_group=[])
    )

    def split_group(split_ranks: Any, timeout: Any, pg_options: Any, backend: str) -> Any:
        # torch crashes without them, if the process has had another group of the backend
        named = made.job._get_backend(DEVICE).options.global_ranks_in_group
        assert named == list(range(WORLD)) and backend == "cuda:nccl" and timeout
        made.splits.append(split_ranks)
        made.options.append(pg_options)
        return next(tuple(ranks) for ranks in split_ranks if 0 in ranks)

    def new_group(ranks: Any, timeout: Any, backend: str, pg_options: Any) -> Any:
        assert backend == "nccl" and timeout
        made.groups.append(ranks)
        return tuple(ranks)

    made.job = SimpleNamespace(
        bound_device_id=DEVICE, size=lambda: WORLD, _get_backend=lambda device: backend
    )
    nccl = SimpleNamespace(Options=Options, NCCL_CTA_POLICY_ZERO=2)
    played = SimpleNamespace(new_group=new_group, split_group=split_group, ProcessGroupNCCL=nccl)
    played.group = SimpleNamespace(WORLD=made.job)
    monkeypatch.setattr(communicators, "dist", played)
    monkeypatch.setattr(communicators, "_selects_backends", lambda: True)
    monkeypatch.setattr(flat_mesh, "connect", lambda *args: None)
    return made


def both_dimensions(**fields: Any) -> list[Any]:
    """The dimensions of a job with 128 copies of 8 shards each."""
    maker = DimMaker(0, DEVICE, "nccl", Watchdog(), 5.0, fields)
    rows = [list(range(at, at + SHARDS)) for at in range(0, WORLD, SHARDS)]
    columns = [list(range(at, WORLD, SHARDS)) for at in range(SHARDS)]
    return [maker.make(sets, "engine 1", CollectiveStats()) for sets in (rows, columns)]


def test_a_bound_job_splits_its_group_for_all_dimensions(made: Any) -> None:
    rows, columns = both_dimensions(max_ctas=4, cta_policy="zero")
    assert len(made.splits) == 4 and not made.groups
    assert rows.group == tuple(range(8)) and columns.group == tuple(range(0, WORLD, 8))
    assert [options.is_high_priority_stream for options in made.options] == [True, False] * 2
    for options in made.options:
        assert vars(options.config) == {"min_ctas": None, "max_ctas": 4, "cta_policy": 2}
        assert options._timeout == timedelta(seconds=35)
    made.splits.clear()
    made.job.bound_device_id = None
    both_dimensions()
    assert len(made.groups) == 2 * (WORLD // SHARDS + SHARDS) and not made.splits


def test_an_older_nccl_names_the_field_and_the_release(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Options, "newest", False)
    said = r"nccl\.cta_policy: this build of torch .* without cta_policy; .* wheels of torch 2\.11"
    with pytest.raises(ConfigError, match=said):
        both_dimensions(cta_policy="zero")


def test_the_default_group_is_bound_where_it_can_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    named: list[torch.device] = []
    note = lambda backend, device_id, **_: joined.append((backend, device_id))  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", note)
    monkeypatch.setattr(init, "name_ranks", named.append)
    monkeypatch.setattr(dist, "get_world_size", lambda *args: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "")
    others: dict[str, Any] = {"init_method": "tcp://127.0.0.1:1234", "rank": 0, "world_size": 2}
    for kind, selects, backend, more, bound in (
        ("cuda", True, None, others, DEVICE),
        ("cuda", True, "nccl", others, DEVICE),
        ("cuda", True, "gloo", others, None),
        ("cuda", True, None, {}, None),
        ("cuda", False, None, others, None),
        ("mps", True, None, others, None),
    ):
        play_accelerator(monkeypatch, kind)
        monkeypatch.setattr(communicators, "_selects_backends", lambda s=selects: s)
        init.init_distributed(backend, **more)
        assert joined.pop()[1] == bound, (kind, selects, backend)
        assert named == ([DEVICE, torch.device("cpu")] if bound else [])
        named.clear()
    process_group.choose_device(torch.device("cuda"))
    try:
        init.init_distributed(**others)
        assert joined.pop()[1] is None, "without an index"
    finally:
        process_group.choose_device(None)


def test_a_barrier_stays_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``dist.barrier`` of a group that is bound to its device waits on the device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(dist, "barrier", None)
    reduced: list[torch.device] = []
    monkeypatch.setattr(dist, "all_reduce", lambda token, group: reduced.append(token.device))
    mesh.get_world_group().barrier()
    assert reduced == [torch.device("cpu")]


def test_a_plain_broadcast_fills_a_leaf_with_gaps(monkeypatch):
    """One that requires grad, as one without gaps."""
    sent = torch.arange(6.0).view(2, 3)
    monkeypatch.setattr(process_group, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        process_group.dist,
        "broadcast",
        lambda flat, source: flat.copy_(sent.view(torch.uint8).view(-1)),
    )
    leaf = torch.zeros(3, 2).t().requires_grad_()
    process_group.broadcast(leaf, 1)
    assert torch.equal(leaf.detach(), sent) and leaf.is_leaf


def test_closed_connections_between_host_memories_say_so() -> None:
    transfers = HostTransfers("of a test", 0, 1, 1.0)
    assert transfers.agree(True)
    transfers.close()
    with pytest.raises(RankMismatchError, match=r"rank 0 has closed its connections .* start the"):
        transfers.transfer([], [])


def test_sizes_of_axes_are_numbers_of_ranks() -> None:
    for axis, size in (("tensor", 0), ("tensor", "2"), ("pipeline", 1.5), ("context", True)):
        says = rf"ParallelDims: {axis} = {size!r} is not a number of ranks; write an integer of at"
        with pytest.raises(ConfigError, match=says):
            ParallelDims.over(4, **{axis: size})
    with pytest.raises(ConfigError, match=r"4 ranks cannot be 3 tensor x .*; choose sizes whose"):
        ParallelDims.over(4, tensor=3)
