"""Scripts started on several hosts, by SLURM and by MPI, against one process."""

import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from hf_zero.distributed.rendezvous import discover
from hf_zero.launch.hosts import free_port
from tests.helpers.commands import completed
from tests.helpers.hosts import NAMESPACES, two_hosts
from tests.helpers.launched import beside, ended, environment, reports, running

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "hosts_train.py"
ROUTES = SCRIPTS / "launcher_routes.py"
CLI = [sys.executable, "-c", "from hf_zero.cli import main; main()", "launch"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """One process, while the ranks are at work."""
    with beside(TRAIN, tmp_path_factory.mktemp("oracle"), "--oracle") as report:
        yield report


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as made:
        yield made


def same(found, name, oracle):
    """The mean of the ranks' losses and everybody's weights are those of one process."""
    plain, cases = oracle(), [report["cases"][name] for report in found]
    means = torch.tensor([case["losses"] for case in cases], dtype=torch.float64).mean(0)
    expected = torch.tensor(plain["losses"], dtype=torch.float64)
    assert (means - expected).norm() <= TOLERANCE * expected.norm(), (means, expected)
    for case in cases:
        assert case["weights"].keys() == plain["weights"].keys()
        for key, values in plain["weights"].items():
            want, got = torch.tensor(values), torch.tensor(case["weights"][key])
            assert (got - want).norm() <= TOLERANCE * want.norm(), key


def said(folder, name="log"):
    return (folder / f"{name}.txt").read_text()


def started(command, folder, extra=None, name="log"):
    """A command with its output in a file; its ranks are interpreters of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**environment(), "PYTHON_EXEC": sys.executable, **(extra or {})}
    return running(command, folder, folder / f"{name}.txt", environ)


def reported(command, folder, ranks, extra=None):
    with started(command, folder, extra) as process:
        code = ended(process, 300.0)
    assert code == 0, f"ended with {code}\n{said(folder)[-8000:]}"
    return reports(folder, ranks)


def until(process, condition, *where):
    limit = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < limit and process.poll() is None, said(*where)[-8000:]
        time.sleep(0.1)


def launch(hosts, folder, *options, slots=1):
    """``hf-zero launch --hostfile``."""
    folder.mkdir(exist_ok=True)
    return [*CLI, "--hostfile", str(hosts.hostfile(folder / "hosts", slots)), *options]


def over(hosts, folder, *arguments, ranks=2, options=(), **extra):
    """The reports of the training script over ``hosts``."""
    command = launch(hosts, folder, *options, slots=ranks // 2)
    given = [str(TRAIN), "--out", str(folder), *arguments]
    return reported([*command, *given], folder, ranks, {**hosts.environment(), **extra})


def test_two_hosts_are_one_job(hosts, tmp_path):
    folder = tmp_path / "run dir"
    odd = 'it\'s $HOME; "two words" & *'
    extra = {"MARK": f"a=b {odd}", "HF_TOKEN": "hush-hush"}
    found = over(hosts, folder, "--odd", odd, options=["--export", "MARK"], **extra)
    places, log = [report["place"] for report in found], said(folder)
    assert [place["RANK"] for place in places] == ["0", "1"]
    assert {place["LOCAL_RANK"] for place in places} == {"0"}
    assert {place["MASTER_ADDR"] for place in places} == {hosts.addresses[0]}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    for place in places:  # two shells have left them as they were
        assert place["argv"][-1] == odd and place["MARK"] == f"a=b {odd}"
    for rank, name in enumerate(hosts.names):
        assert f"[{name}] rank {rank} is done\n" in log
    assert "hush-hush" not in log
    if hosts.kind == NAMESPACES:
        assert tuple(place["address"] for place in places) == hosts.addresses
        assert [place["addresses"] for place in places] == [list(hosts.addresses)] * 2
        assert tuple(place["GLOO_SOCKET_IFNAME"] for place in places) == hosts.devices
        assert set(hosts.entered.read_text().split()) == set(hosts.names)
    else:
        assert {place["GLOO_SOCKET_IFNAME"] for place in places} == {"lo"}


@pytest.mark.long
def test_shards_within_a_host_and_replicas_across(hosts, tmp_path, oracle):
    """By ``accelerate launch`` on each host."""
    given = ("--case", "all=3/1", "--case", "hybrid=3/2")
    found = over(hosts, tmp_path / "run", *given, ranks=4, options=["--preset", "zero3"])
    for name in ("all", "hybrid"):
        same(found, name, oracle)
    hybrid = [report["cases"]["hybrid"] for report in found]
    assert [case["shards"] for case in hybrid] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [case["replicas"] for case in hybrid] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    if hosts.kind == NAMESPACES:  # ranks that share shards share a host
        where = [report["place"]["address"] for report in found]
        assert where == [address for address in hosts.addresses for _ in range(2)]


@pytest.mark.long
def test_the_deepspeed_command(tmp_path, oracle):
    """On this machine: its script gets the local rank on the command line as well."""
    code = "import torch; from deepspeed.launcher.runner import main; main()"
    place = ["--num_gpus", "2", "--master_port", str(free_port())]
    given = [str(TRAIN), "--out", str(tmp_path), "--case", "zero3=3/1"]
    found = reported([sys.executable, "-c", code, *place, *given], tmp_path, 2)
    same(found, "zero3", oracle)
    assert [report["local_rank"] for report in found] == [0, 1]
    assert [report["place"]["argv"][0] for report in found] == ["--local_rank=0", "--local_rank=1"]


# ---- hosts that are lost, and ends ----


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, tmp_path):
    """In the middle of a step.

    Each host's part is started by itself, so that nobody ends the slower one before it has spoken.
    """
    namespaces, out, lost = hosts.kind == NAMESPACES, tmp_path / "run", 0
    meeting = ["--master-addr", hosts.addresses[0], "--master-port", str(free_port())]
    stepping = [out / f"stepping-{rank}" for rank in (0, 1)]
    with ExitStack() as stack:
        parts = []
        for place in (0, 1):
            options = ["--node-rank", str(place), "--num-nodes", "2", "--num-procs", "1", *meeting]
            given = [str(TRAIN), "--out", str(out), "--until-lost", "15.0"]
            command = hosts.inside(place, [*CLI, *options, *given])
            name = {"HF_ZERO_HOST": hosts.names[place]}
            parts.append(stack.enter_context(started(command, out, name, f"log-{place}")))
        # a rank leads a session of its own, and one that is stopped ends by no other means
        stack.callback(kill_all, stepping)
        for place, file in enumerate(stepping):
            until(parts[place], lambda file=file: numbers(file), out, f"log-{place}")
        if namespaces:
            hosts.cut(lost)
        else:
            os.kill(*numbers(stepping[lost]), signal.SIGSTOP)
        for place in (0, 1) if namespaces else (1 - lost,):
            assert ended(parts[place], 180.0) not in (0, None), said(out, f"log-{place}")
            peer = 1 - place
            # as that rank sees it: all loopback addresses are reached from one
            address = hosts.addresses[peer] if namespaces else "127.0.0.1"
            wanted = f".*rank {peer} on {re.escape(f'{hosts.names[peer]} ({address})')}"
            log = said(out, f"log-{place}")
            assert re.search(rf"ERROR rank {place}\] {wanted}", log), log[-6000:]


def numbers(*files):
    """The process ids that are written by now."""
    return [int(file.read_text()) for file in files if file.exists() and file.read_text()]


def kill_all(files):
    for pid in filter(alive, numbers(*files)):
        os.kill(pid, signal.SIGKILL)


# ---- srun and mpirun ----


def unused_job():
    """The id of a job whose port is free: it is computed from the id."""
    while True:
        job = str(random.randrange(10**6, 10**9))
        place = discover({**srun(0, job), "MASTER_ADDR": ""})
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", place.master_port))
                return job
            except OSError:
                continue


def srun(rank, job):
    """Return the variables that srun 22.05 sets for two tasks on this host."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here", "SLURM_JOB_NODELIST": "here",
    }  # fmt: skip


def open_mpi(rank, job):
    """Return the variables that mpirun of Open MPI 4.1 sets for two processes on this host."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": str(rank), "PMIX_NAMESPACE": job,
    }  # fmt: skip


def hydra(rank, job):
    """Return the variables of mpiexec of MPICH and Intel MPI, and a port, as it names no job."""
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(discover(srun(0, job)).master_port),
    }  # fmt: skip


def by_mpirun():
    program = shutil.which("mpirun")
    return program and "Open MPI" in completed([program, "--version"]).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "words, route", [(srun, "stock"), (hydra, "accelerate"), (open_mpi, "accelerate")]
)
def test_processes_of_srun_and_mpi_train_as_one(words, route, tmp_path, oracle):
    """Two processes with nothing but a launcher's variables; by mpirun where it is installed."""
    command = [sys.executable, str(ROUTES), "--out", str(tmp_path), "--route", route]
    if words is open_mpi and by_mpirun():
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        found = reported([*mpirun, *command], tmp_path, 2)
    else:
        job = unused_job()
        with ExitStack() as stack:
            both = [
                stack.enter_context(started(command, tmp_path, words(rank, job), f"log-{rank}"))
                for rank in (0, 1)
            ]
            codes = [ended(each, 300.0) for each in both]
        assert codes == [0, 0], "\n".join(said(tmp_path, f"log-{rank}") for rank in (0, 1))
        found = reports(tmp_path, 2)
    same(found, route, oracle)
    for rank, report in enumerate(found):
        assert (report["cases"][route]["rank"], report["cases"][route]["world"]) == (rank, 2)
        assert report["place"]["LOCAL_RANK"] == str(rank)
        assert report["place"]["GLOO_SOCKET_IFNAME"] == "lo"
