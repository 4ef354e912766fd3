"""Ranks found in the variables of torchrun, srun and the MPI launchers, with every way in which
those can lack or contradict; the hosts of ranks, and the network interface that gloo is given.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from hf_zero.device import kinds
from hf_zero.distributed import init, rank_hosts, rendezvous
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.rank_hosts import VARIABLES, choose_interface, interface_of
from hf_zero.distributed.rendezvous import (
    DEFAULT_PORT,
    Place,
    discover,
    expand_hosts,
    expand_tasks,
)
from hf_zero.errors import LaunchError, RankMismatchError
from tests.helpers.cells import in_one_item

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
# What srun 22.05 sets for the third of three tasks on two nodes, and Open MPI 4.1 for the second of
# two on one host.
SRUN = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[06-09]", "SLURM_JOB_ID": "77",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2079784961", "PMIX_RANK": "1", "OMPI_MCA_ess_base_jobid": "2079784961",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "n0",
}  # fmt: skip
INTEL = {
    "PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "n0", "MASTER_PORT": "2345",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "n0", "MASTER_PORT": "9"}


def found(environ: dict[str, str], **given: Any) -> Place:
    place = discover(environ, **given)
    assert place is not None
    return place


def derived(job: str) -> int:
    """The port of a job and its step."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    return found({**SRUN, **dict(zip(names, job.split(".")))}).master_port


PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "0", "MASTER_ADDR": "n0"}
PMIX = {"PMIX_RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEETING
HAND = {"RANK": "1", "WORLD_SIZE": "2", **MEETING}
PLACES: dict[str, tuple[dict[str, str], Place]] = {
    "torchrun": (TORCHRUN, Place(3, 4, 1, 2, "node1", 1234, None)),
    "srun": (SRUN, Place(2, 3, 0, 1, "gpu07", derived("77.0"), "srun")),
    "mvapich": (MVAPICH, Place(5, 8, 1, 4, "n0", DEFAULT_PORT, "MVAPICH")),
    "intel": (INTEL, Place(5, 8, 1, 4, "n0", 2345, "MPICH or Intel MPI")),
    "pmi": (PMI, Place(2, 4, 0, None, "n0", DEFAULT_PORT, "PMI")),
    "pmix": (PMIX, Place(1, 2, 0, None, "n0", 9, "PMIx")),
    "by hand, one host": (
        HAND | {"MASTER_ADDR": "127.0.0.1"}, Place(1, 2, 1, 2, "127.0.0.1", 9, None)
    ),
    "by hand": (HAND, Place(1, 2, None, None, "n0", 9, None)),
}  # fmt: skip


@in_one_item(PLACES)
def test_each_launcher_in_its_own_words(name: str) -> None:
    environ, place = PLACES[name]
    assert discover(environ) == place


def test_all_ranks_of_srun_come_to_one_answer() -> None:
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    places = [
        found({**SRUN, **dict(zip(names, map(str, numbers)))})
        for numbers in ((0, 0, 0), (1, 0, 1), (2, 1, 0))
    ]
    own = [
        (each.rank, each.local_rank, each.local_world_size, each.several_hosts) for each in places
    ]
    assert own == [(0, 0, 2, True), (1, 1, 2, True), (2, 0, 1, True)]
    meetings = {(each.master_addr, each.master_port, each.world_size) for each in places}
    assert len(meetings) == 1
    # steps of one job meet at different ports
    assert len({derived(job) for job in ("77.0", "77.1", "78.0", "78.1")}) == 4
    without = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        assert found({**without, name: "a[3-4],b"}).master_addr == "a3"


def test_all_ranks_of_mpirun_in_a_slurm_job_come_to_one_answer() -> None:
    """Daemons on other hosts than mpirun's are a step of their own, which lists only these."""
    job = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    job |= {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODELIST": "n[1-2]"}
    first = found(job | {"OMPI_COMM_WORLD_RANK": "0"})
    second = found(job | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2"})
    assert (first.rank, second.rank) == (0, 1)
    for place in (first, second):
        assert (place.master_addr, place.master_port) == ("n1", first.master_port)


OWN = {key: value for key, value in TORCHRUN.items() if key != "TORCHELASTIC_RUN_ID"}


@in_one_item(
    [
        # a torchrun on each node, started by srun, whose own numbers count nodes
        {**TORCHRUN, **SRUN},
        {**TORCHRUN, **MPIRUN},
        # processes of one's own by srun, also in an interactive step
        {**OWN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
        {**OWN, **SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ]
)
def test_a_launcher_of_launchers_has_no_say(environ: dict[str, str]) -> None:
    place = found(environ)
    assert (place.rank, place.world_size, place.local_rank) == (3, 4, 1)
    assert place.master_addr == "node1"


# Variables, and after "=>" what is said of them; "nobody" where this process is alone. A name of a
# launcher in capitals stands for its variables.
ENVIRONMENTS = """
=> nobody
MASTER_ADDR=n0 MASTER_PORT=1 => nobody
WORLD_SIZE=1 => nobody
RANK=0 WORLD_SIZE=1 => nobody
LOCAL_RANK=0 => nobody
MASTER_ADDR= RANK=_ WORLD_SIZE= => nobody
SLURM_JOB_ID=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_NODELIST=n1 => nobody
SLURM_JOB_ID=1 SLURM_NTASKS=8 => nobody
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 => nobody
RANK=1 => RANK=1 ~ WORLD_SIZE is not ~ torchrun
WORLD_SIZE=2 => WORLD_SIZE=2 ~ RANK is not
LOCAL_RANK=1 => LOCAL_RANK=1 ~ RANK and WORLD_SIZE are not
RANK=2 WORLD_SIZE=2 => RANK=2 and WORLD_SIZE=2 contradict
RANK=x WORLD_SIZE=2 => RANK='x' is not a whole number
RANK=-1 WORLD_SIZE=2 => RANK='-1'
RANK=0 WORLD_SIZE=2 => WORLD_SIZE=2 ~ MASTER_ADDR is not
SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_LOCALID=0
    => MASTER_ADDR is not ~ srun does not tell the hosts ~ MASTER_ADDR=HOST srun
RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0 => MASTER_PORT is not
TORCHRUN MASTER_PORT=70000 => MASTER_PORT=70000 ~ 1 to 65535
TORCHRUN MASTER_PORT=0 => MASTER_PORT=0
TORCHRUN LOCAL_RANK=2 => LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict
TORCHRUN LOCAL_WORLD_SIZE=8 => LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4 contradict
TORCHRUN RANK=0 => LOCAL_RANK=1 and RANK=0 contradict
MPIRUN RANK=0 WORLD_SIZE=1 => WORLD_SIZE=1 contradicts OMPI_COMM_WORLD_SIZE=2
MPIRUN RANK=0 WORLD_SIZE=2 => RANK=0 contradicts OMPI_COMM_WORLD_RANK=1
MPIRUN WORLD_SIZE=4 => WORLD_SIZE=4 contradicts OMPI_COMM_WORLD_SIZE=2
OMPI_COMM_WORLD_SIZE=2 => OMPI_COMM_WORLD_SIZE=2 ~ RANK is not ~ OMPI_COMM_WORLD_RANK
OMPI_COMM_WORLD_RANK=1 => OMPI_COMM_WORLD_RANK=1 ~ WORLD_SIZE is not ~ OMPI_COMM_WORLD_SIZE
MPIRUN OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0
    => MASTER_ADDR is not ~ Open MPI ~ mpirun -x MASTER_ADDR
MPIRUN OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 MASTER_ADDR=localhost
    => MASTER_ADDR=localhost ~ OMPI_COMM_WORLD_LOCAL_SIZE=1
PMIX_RANK=0 PMIX_NAMESPACE=a@1 => PMIX_RANK=0 ~ WORLD_SIZE is not ~ PMIx does not tell it
PMI_RANK=0 PMI_SIZE=2 MASTER_ADDR=n0 => LOCAL_RANK is not set ~ PALS_LOCAL_RANKID
SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=1 => SLURM_NTASKS=2 ~ SLURM_STEP_ID is not ~ srun python
SRUN SLURM_NODEID=2 => SLURM_NODEID=2 and SLURM_STEP_TASKS_PER_NODE='2,1' contradict
SRUN SLURM_STEP_NODELIST=gpu[7- => SLURM_STEP_NODELIST='gpu[7-' ~ brackets
SRUN SLURM_STEP_NODELIST=n[1-99999999] => SLURM_STEP_NODELIST='n[1-99999999]' ~ 65,536 hosts at most
SRUN SLURM_STEP_TASKS_PER_NODE=two => SLURM_STEP_TASKS_PER_NODE='two'
"""
LAUNCHERS = {"TORCHRUN": TORCHRUN, "MPIRUN": MPIRUN, "SRUN": SRUN}


@in_one_item(ENVIRONMENTS.strip("\n").replace("\n    ", " ").splitlines())
def test_what_lacks_or_contradicts_is_named(row: str) -> None:
    given, said = row.split("=> ")
    environ = dict[str, str]()
    for word in given.split():
        name, _, value = word.partition("=")
        environ |= LAUNCHERS.get(word, {name: value.replace("_", " ") if value == "_" else value})
    if said == "nobody":
        assert discover(environ) is None
        return
    with pytest.raises(LaunchError) as raised:
        discover(environ)
    assert all(part in str(raised.value) for part in said.split(" ~ ")), str(raised.value)


def test_arguments_count_as_if_they_were_set() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    place = found(meeting, rank=1, world_size=2)
    assert (place.rank, place.world_size, place.local_rank) == (1, 2, 1)
    wrong: list[tuple[dict[str, str], dict[str, Any], str]] = [
        (TORCHRUN, {"rank": 1}, r"init_distributed\(rank\)=1 contradicts RANK=3"),
        (MPIRUN, {"world_size": 3}, r"\(world_size\)=3 contradicts OMPI_COMM_WORLD_SIZE=2"),
        (MPIRUN, {"port": 0}, "distributed_port=0 is not a port"),
    ]
    for environ, given, said in wrong:
        with pytest.raises(LaunchError, match=said):
            discover(environ, **given)


def test_lists_of_nodes_and_of_tasks() -> None:
    for text, hosts in {
        "a,b.c-d_1": "a b.c-d_1",
        "gpu[001-003,7,010],login": "gpu001 gpu002 gpu003 gpu7 gpu010 login",
        "gpu[9-11]x": "gpu9x gpu10x gpu11x",
        "r[1-2]n[01-02]": "r1n01 r1n02 r2n01 r2n02",
    }.items():
        assert expand_hosts(text, "LIST") == hosts.split()
    for text in ("", " , ", "a[1", "a]1[", "a[[1]]", "a[2-1]", "a[x]", "a[1-2-3]", "a[]", "a b"):
        with pytest.raises(LaunchError, match=r"^LIST="):
            expand_hosts(text, "LIST")
    for text, counts in {"4": [4], "2(x3),1": [2, 2, 2, 1], "1, 2": [1, 2]}.items():
        assert expand_tasks(text, "TASKS") == counts
    for text in ("", "2x3", "2(3)", "2(x3", "-1"):
        with pytest.raises(LaunchError, match=r"^TASKS="):
            expand_tasks(text, "TASKS")


class Lost:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(rank_hosts, "_hosts", names)
    return names


def test_a_collective_that_breaks_names_the_peers_and_their_hosts(known: list[str]) -> None:
    assert rank_hosts.named([0, 3]) == "ranks 0, 3"  # nobody told their hosts
    known += ["a (10.0.0.1)", "b (10.0.0.2)"]
    log = CollectiveLog("gathers", [0, 1], 60.0)
    handle = Handle([Lost()], Watchdog(), log.issue("all-gather of layer.1", (1,)))
    said = r"could not finish all-gather of layer.1.*Connection closed.*rank 1 on b \(10.0.0.2\)"
    for _ in range(2):  # a later wait does not take the result for complete
        with pytest.raises(RankMismatchError, match=said):
            handle.wait()


def test_a_name_that_does_not_resolve_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for source, remedy in (
        ("SLURM_STEP_NODELIST=bad[1-2]", "export MASTER_ADDR with an IP address"),
        ("MASTER_ADDR=bad1", "--local-addr"),  # under torchrun
    ):
        caplog.clear()
        with pytest.raises(LaunchError) as raised:
            rank_hosts.wait_for_address("bad1.invalid", source, 0.05, 0.01)
        assert "cannot resolve 'bad1.invalid', the host of rank 0" in str(raised.value)
        assert source in str(raised.value) and remedy in str(raised.value)
        assert caplog.text.count("hf-zero tries again for") == 1
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what a test sets


def chosen() -> list[str]:
    return [os.environ[name] for name in VARIABLES]


def test_ranks_that_meet_on_loopback_talk_on_loopback(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("127.0.0.1", "localhost", "127.0.0.2"):
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["lo", ""]
    for address in (None, "no-such-host.invalid"):  # where no way is known the choice is gloo's
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["", ""]
    choose_interface("10.1.2.3", several_hosts=True, interface="lo")  # for gloo and NCCL
    assert chosen() == ["lo", "lo"]
    assert interface_of("192.0.2.1") is None and interface_of("127.0.0.1") == "lo"


def test_an_interface_that_is_not_there_is_named(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"interface=eth99: this host has no network interface eth99; it has .*lo"
    with pytest.raises(LaunchError, match=said):
        choose_interface("127.0.0.1", several_hosts=False, interface="eth99")
    monkeypatch.setenv(VARIABLES[0], "lo,lo")
    choose_interface("127.0.0.1", several_hosts=False)
    assert chosen() == ["lo,lo", ""], "what the user set stays"
    monkeypatch.setenv(VARIABLES[0], "lo,eth98")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME=lo,eth98: .* interface eth98;"):
        choose_interface("127.0.0.1", several_hosts=False)


@in_one_item(
    {
        "variables": ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}, {}),
        "arguments": ({}, {"init_method": "tcp://10.0.0.1:5000", "rank": 3, "world_size": 8}),
        "an address": ({}, {"init_method": "tcp://10.0.0.1:5000?rank=3&world_size=8"}),
        "LOCAL_RANK": (
            {"LOCAL_RANK": "1"},
            {"init_method": "tcp://10.0.0.1:5000", "rank": 3, "world_size": 8},
        ),
    }.values()
)
def test_a_rank_takes_its_device_before_it_joins(
    case: tuple[dict[str, str], dict[str, Any]],
) -> None:
    """The same as once the process group knows its rank."""
    environ, given = case
    devices, patch = list[torch.device](), pytest.MonkeyPatch()

    def joined(*_: Any) -> None:
        raise InterruptedError

    with patch.context() as patch, pytest.raises(InterruptedError):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            patch.delenv(name, raising=False)
        for name, value in {**environ, "MASTER_PORT": "5000"}.items():
            patch.setenv(name, value)
        patch.setattr(kinds, "accelerator", lambda: "cuda")
        patch.setattr(kinds, "device_count", lambda: 4)
        patch.setattr(kinds, "set_device", devices.append)
        patch.setattr(init, "wait_for_address", joined)
        patch.setattr(init, "is_initialized", lambda: False)
        init.init_distributed(**given)
    assert devices == [torch.device("cuda", int(environ.get("LOCAL_RANK", 3)))]


def test_the_arguments_of_a_call_that_fails_do_not_count_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the launcher says stays, for reports of the error."""
    announced: list[tuple[str, ...]] = []

    def fails(*_: object) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT", *VARIABLES)
        announced.append(tuple(os.environ[name] for name in names))
        raise KeyboardInterrupt

    monkeypatch.setattr(init, "is_initialized", lambda: False)
    monkeypatch.setattr(init, "wait_for_address", lambda *_: None)
    monkeypatch.setattr(init, "_join", fails)
    for name in (*rendezvous.VARIABLES, *VARIABLES):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what is set
        monkeypatch.delenv(name)
    more = {"port": 1234, "interface": "lo"}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        init.init_distributed(rank=1, world_size=2, **more)
    assert announced.pop() == ("1", "2", "1234", "lo", "lo") and os.environ == before
    monkeypatch.delenv("MASTER_ADDR")
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        init.init_distributed(**more)
    assert announced.pop() == ("2", "3", "1234", "lo", "lo")
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("2", str(derived("77.0")))
    assert not {*VARIABLES} & os.environ.keys()
