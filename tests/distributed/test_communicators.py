"""The communicators of a job on NCCL: how many ids go through the store, which calls make groups,
and the options that reach them. NCCL itself is played; tests/gpu has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_zero.distributed import communicators, flat_mesh, init, mesh, process_group
from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.flat_mesh import DimMaker
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import ConfigError
from tests.helpers.accelerators import play_accelerator

DEVICE = torch.device("cuda", 0)
WORLD, SHARDS = 1024, 8


class Options:
    """In the place of ProcessGroupNCCL.Options, with the fields of NCCL ``newest``."""

    newest = True

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        fields = {"min_ctas": None, "max_ctas": None}
        self.config = SimpleNamespace(**fields, **({"cta_policy": None} if self.newest else {}))


class Job:
    """A job on NCCL of which only this rank exists: the groups it makes, the ids that the ranks of
    the job write to the store and the calls of the store for them.
    """

    def __init__(self, bound: bool, selects: bool, host: str):
        self.bound, self.selects, self.host = bound, selects, host
        self.ids, self.calls = 1, WORLD  # of the default group: one rank writes, the others read
        self.splits: list[list[list[int]]] = []
        self.groups: list[list[int]] = []
        self.options: list[Any] = []
        self.bound_device_id = DEVICE if bound else None
        self.backend = SimpleNamespace(
            supports_splitting=True, options=SimpleNamespace(global_ranks_in_group=[])
        )

    def size(self) -> int:
        return WORLD

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    def split_group(self, split_ranks: Any, timeout: Any, pg_options: Any, **only: Any) -> Any:
        # torch crashes without them, if the process has had another group of the backend
        assert self.backend.options.global_ranks_in_group == list(range(WORLD))
        assert only == ({"backend": "cuda:nccl"} if self.selects else {}) and timeout
        self.splits.append(split_ranks)
        self.options.append(pg_options)
        return next((tuple(ranks) for ranks in split_ranks if 0 in ranks), None)

    def new_group(self, ranks: Any, timeout: Any, backend: str, pg_options: Any) -> Any:
        assert backend == "nccl" and timeout
        self.groups.append(ranks)
        self.options.append(pg_options)
        if not self.bound:
            self.ids, self.calls = self.ids + 1, self.calls + len(ranks)
        return tuple(ranks)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(bound: bool = True, selects: bool = True, host: str = "gloo") -> Job:
        job = Job(bound, selects, host)
        played = SimpleNamespace(
            new_group=job.new_group,
            split_group=job.split_group,
            group=SimpleNamespace(WORLD=job),
            ProcessGroupNCCL=SimpleNamespace(Options=Options, NCCL_CTA_POLICY_ZERO=2),
        )
        monkeypatch.setattr(communicators, "dist", played)
        monkeypatch.setattr(communicators, "_selects_backends", lambda: selects)
        monkeypatch.setattr(communicators, "backend_serving", lambda device: host)
        monkeypatch.setattr(flat_mesh, "connect", lambda *args: None)
        return job

    return begin


def both_dimensions(**fields: Any) -> list[Any]:
    """The dimensions of a job with 128 copies of 8 shards each."""
    maker = DimMaker(0, DEVICE, "nccl", Watchdog(enabled=False), 5.0, fields)
    rows = [list(range(at, at + SHARDS)) for at in range(0, WORLD, SHARDS)]
    columns = [list(range(at, WORLD, SHARDS)) for at in range(SHARDS)]
    return [maker.make(sets, "engine 1", CollectiveStats()) for sets in (rows, columns)]


def test_a_bound_job_of_1024_ranks_has_one_id_and_splits_for_the_rest(play: Any) -> None:
    job = play(bound=False)
    both_dimensions()
    sets = WORLD // SHARDS + SHARDS
    assert len(job.groups) == 2 * sets == 272 and not job.splits
    assert (job.ids, job.calls) == (273, 5 * WORLD)

    job = play()
    rows, columns = both_dimensions()
    assert len(job.splits) == 4 and not job.groups
    assert (job.ids, job.calls) == (1, WORLD)
    assert rows.group == tuple(range(8)) and columns.group == tuple(range(0, WORLD, 8))


def test_the_fields_reach_each_communicator_and_gathers_have_high_priority(play: Any) -> None:
    job = play()
    both_dimensions(max_ctas=4, cta_policy="zero")
    assert [options.is_high_priority_stream for options in job.options] == [True, False] * 2
    for options in job.options:
        assert vars(options.config) == {"min_ctas": None, "max_ctas": 4, "cta_policy": 2}
        assert options._timeout == timedelta(seconds=35)


def test_an_older_nccl_names_the_field_and_the_release(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    monkeypatch.setattr(Options, "newest", False)
    said = r"nccl\.cta_policy: this build of torch .* without cta_policy; .* wheels of torch 2\.11"
    with pytest.raises(ConfigError, match=said):
        both_dimensions(cta_policy="zero")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []

    def note(backend: str, device_id: Any, **options: Any) -> None:
        calls.append((backend, device_id))

    monkeypatch.setattr(dist, "init_process_group", note)
    yield calls


def test_the_default_group_is_bound_where_it_can_be_split(
    joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[torch.device] = []
    monkeypatch.setattr(init, "name_ranks", named.append)
    monkeypatch.setattr(dist, "get_world_size", lambda *args: 1)
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
