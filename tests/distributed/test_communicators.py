"""The communicators of a job on NCCL, which is played: whether groups are split or made anew, and
the options that reach them; tests/gpu has NCCL itself.
"""

from __future__ import annotations

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
    maker = DimMaker(0, DEVICE, "nccl", Watchdog(enabled=False), 5.0, fields)
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
