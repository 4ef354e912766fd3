"""Scripts started as users of several hosts, of SLURM and of MPI start them; the oracle is one
process over the same global batch.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero.distributed.rendezvous import discover
from hf_zero.launch.hosts import free_port
from tests.helpers.commands import completed, end_group
from tests.helpers.hosts import LOOPBACK, NAMESPACES, loopback, two_hosts
from tests.helpers.launched import Report, beside, environment

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "hosts_train.py"
ROUTES = SCRIPTS / "launcher_routes.py"
CLI = [sys.executable, "-c", "from hf_zero.cli import main; main()", "launch"]
TOLERANCE = 1e-5

Oracle = Callable[[], Report]  # one process, while the ranks are at work


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    with beside(TRAIN, tmp_path_factory.mktemp("oracle"), "--oracle") as report:
        yield report


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as made:
        yield made


def same(found, name, oracle):
    """The mean of the ranks' losses and everybody's weights are those of one process."""
    plain = oracle()
    cases = [report["cases"][name] for report in found]
    means = torch.tensor([case["losses"] for case in cases], dtype=torch.float64).mean(0)
    expected = torch.tensor(plain["losses"], dtype=torch.float64)
    assert (means - expected).norm() <= TOLERANCE * expected.norm(), (means, expected)
    for case in cases:
        assert case["weights"].keys() == plain["weights"].keys()
        for key, values in plain["weights"].items():
            want, got = torch.tensor(values), torch.tensor(case["weights"][key])
            assert (got - want).norm() <= TOLERANCE * want.norm(), key


class Started:
    """A command with its output in a file, in a session of its own."""

    def __init__(self, command, folder, extra=None, name="log"):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.txt"
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment(), **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ends(self, timeout=300.0):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout:.0f} s\n{self.said()[-8000:]}"
            ) from None
        finally:
            end_group(self.process)

    def until(self, condition, timeout=120.0):
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit and self.process.poll() is None, self.said()[-8000:]
            time.sleep(0.1)

    def said(self):
        return self.log.read_text()


def reports(started, folder, ranks):
    code = started.ends()
    assert code == 0, f"ended with {code}\n{started.said()[-8000:]}"
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(ranks)]


def over(hosts, folder, *arguments, slots=1, options=(), extra=None):
    """``hf-zero launch --hostfile`` with the training script."""
    folder.mkdir(exist_ok=True)
    file = hosts.hostfile(folder / "hosts", slots)
    command = [
        *CLI,
        "--hostfile",
        str(file),
        *options,
        str(TRAIN),
        "--out",
        str(folder),
        *arguments,
    ]
    return Started(command, folder, {**hosts.environment(), **(extra or {})})


def check_two_hosts(hosts, folder, oracle):
    odd = 'it\'s $HOME; "two words" & *'
    started = over(
        hosts,
        folder,
        "--case",
        "zero3=3/1",
        "--odd",
        odd,
        options=["--export", "MARK"],
        extra={"MARK": f"a=b {odd}", "HF_TOKEN": "hush-hush"},
    )
    found = reports(started, folder, 2)
    same(found, "zero3", oracle)
    places = [report["place"] for report in found]
    assert [place["RANK"] for place in places] == ["0", "1"] and {
        place["LOCAL_RANK"] for place in places
    } == {"0"}
    assert {place["MASTER_ADDR"] for place in places} == {hosts.addresses[0]} and len(
        {place["MASTER_PORT"] for place in places}
    ) == 1
    assert all(place["argv"][-1] == odd and place["MARK"] == f"a=b {odd}" for place in places), (
        "two shells have left them as they were"
    )
    said = started.said()
    assert (
        all(f"[{name}] rank {rank} is done\n" in said for rank, name in enumerate(hosts.names))
        and "hush-hush" not in said
    )
    if hosts.kind == NAMESPACES:
        assert tuple(place["address"] for place in places) == hosts.addresses
        assert tuple(place["GLOO_SOCKET_IFNAME"] for place in places) == hosts.devices
        assert set(hosts.entered.read_text().split()) == set(hosts.names)
    else:
        assert {place["GLOO_SOCKET_IFNAME"] for place in places} == {"lo"}


def test_two_hosts_train_as_one_process(hosts, tmp_path, oracle):
    check_two_hosts(hosts, tmp_path / "run dir", oracle)


@pytest.mark.long
def test_two_loopback_addresses_train_as_one_process(tmp_path, oracle):
    """The way of machines that forbid namespaces, on all machines."""
    with loopback(tmp_path) as two:
        assert two.kind == LOOPBACK
        check_two_hosts(two, tmp_path / "run", oracle)


@pytest.mark.long
def test_shards_within_a_host_and_replicas_across(hosts, tmp_path, oracle):
    found = reports(
        over(
            hosts,
            tmp_path / "run",
            "--case",
            "all=3/1",
            "--case",
            "hybrid=3/2",
            "--case",
            "two=2/2",
            slots=2,
        ),
        tmp_path / "run",
        4,
    )
    for name in ("all", "hybrid", "two"):
        same(found, name, oracle)
    hybrid = [report["cases"]["hybrid"] for report in found]
    assert [case["shards"] for case in hybrid] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [case["replicas"] for case in hybrid] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    if hosts.kind == NAMESPACES:
        where = [report["place"]["address"] for report in found]
        assert where == [hosts.addresses[0]] * 2 + [hosts.addresses[1]] * 2, (
            "ranks that share shards share a host"
        )


@pytest.mark.long
def test_accelerate_launch_on_two_hosts(hosts, tmp_path, oracle):
    options = ["--preset", "zero3"]
    found = reports(
        over(hosts, tmp_path / "run", "--case", "zero3=3/1", options=options), tmp_path / "run", 2
    )
    same(found, "zero3", oracle)
    assert [report["place"]["MASTER_ADDR"] for report in found] == [hosts.addresses[0]] * 2


@pytest.mark.long
def test_the_deepspeed_command(tmp_path, oracle):
    """On this machine: its script gets the local rank on the command line as well."""
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "import torch; from deepspeed.launcher.runner import main; main()",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    found = reports(
        Started([*command, str(TRAIN), "--out", str(out), "--case", "zero3=3/1"], out), out, 2
    )
    same(found, "zero3", oracle)
    assert [report["local_rank"] for report in found] == [0, 1]
    assert [report["place"]["argv"][0] for report in found] == ["--local_rank=0", "--local_rank=1"]


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1], ids=["with the master", "the other"])
def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, lost, tmp_path):
    check_cut(hosts, lost, tmp_path / "run")


@pytest.mark.long
def test_a_host_that_is_silent_is_named(tmp_path):
    """The way of machines that forbid namespaces, on all machines: the lost host's ranks are
    stopped.
    """
    with loopback(tmp_path) as two:
        check_cut(two, 1, tmp_path / "run")


def check_cut(hosts, lost, out):
    """In the middle of a step.

    Each host's part is started by itself, so that nobody ends the slower one before it has spoken.
    """
    port, limit = str(free_port()), 15.0
    parts = []
    for place in (0, 1):
        options = [
            "--node-rank",
            str(place),
            "--num-nodes",
            "2",
            "--num-procs",
            "1",
            "--master-addr",
            hosts.addresses[0],
            "--master-port",
            port,
        ]
        command = hosts.inside(
            place, [*CLI, *options, str(TRAIN), "--out", str(out), "--until-lost", str(limit)]
        )
        parts.append(Started(command, out, {"HF_ZERO_HOST": hosts.names[place]}, f"log-{place}"))
    stepping = [out / f"stepping-{rank}" for rank in (0, 1)]
    try:
        for part, file in zip(parts, stepping):
            part.until(lambda file=file: file.exists() and file.read_text() != "")
        if hosts.kind == NAMESPACES:
            hosts.cut(lost)
        else:
            os.kill(int(stepping[lost].read_text()), signal.SIGSTOP)
        for place in (0, 1) if hosts.kind == NAMESPACES else (1 - lost,):
            assert parts[place].ends(timeout=180.0) != 0
            peer = 1 - place
            wanted = (
                rf"ERROR rank {place}\] .*rank {peer} on {re.escape(hosts.names[peer])} "
                rf"\({re.escape(own_address_of(hosts, peer))}\)"
            )
            assert re.search(wanted, parts[place].said()), parts[place].said()[-6000:]
    finally:
        for part in parts:
            end_group(part.process)
        # a rank leads a session of its own, and one that is stopped ends by no other means
        for file in stepping:
            if file.exists() and alive(int(file.read_text() or 0)):
                os.kill(int(file.read_text()), signal.SIGKILL)


def own_address_of(hosts, place):
    """Return the address of the rank as that rank sees it: all loopback addresses are reached from
    one.
    """
    return hosts.addresses[place] if hosts.kind == NAMESPACES else "127.0.0.1"


@pytest.mark.long
def test_a_host_that_fails_ends_the_others(hosts, tmp_path):
    """The failing script is on one host alone; the other would sleep for an hour."""
    out = tmp_path / "run"
    out.mkdir()
    script = out / "fails.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(f'pid-{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n"
        "while not all(pathlib.Path(f'pid-{rank}').exists() for rank in (0, 1)): time.sleep(0.1)\n"
        "time.sleep(1.0)\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(3600)\n"
    )
    started = Started(
        [*CLI, "--hostfile", str(hosts.hostfile(out / "hosts", 1)), str(script)],
        out,
        hosts.environment(),
    )
    assert started.ends() == 7, started.said()
    said = started.said()
    assert f"hf-zero: {hosts.names[1]} ended with code 7; ending the other hosts" in said
    assert f"[{hosts.names[1]}] " in said
    assert not any(alive(int((out / f"pid-{rank}").read_text())) for rank in (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_hosts(hosts, number, tmp_path):
    """Also where it has no time for last words: the agents see their input end."""
    out = tmp_path / "run"
    out.mkdir()
    script = out / "sleeps.py"
    script.write_text(
        "import os, pathlib, "
        "time\npathlib.Path(f'pid-{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\ntime.sleep(3600)\n"
    )
    started = Started(
        [*CLI, "--hostfile", str(hosts.hostfile(out / "hosts", 1)), str(script)],
        out,
        hosts.environment(),
    )
    files = [out / f"pid-{rank}" for rank in (0, 1)]
    started.until(lambda: all(file.exists() and file.read_text() for file in files))
    started.process.send_signal(number)
    code = started.process.wait(120.0)
    assert code == (130 if number == signal.SIGINT else -9), started.said()
    limit = time.monotonic() + 120.0
    while any(alive(int(file.read_text())) for file in files):
        assert time.monotonic() < limit, "ranks are left behind"
        time.sleep(0.2)
    end_group(started.process)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def unused_job():
    """The id of a job whose port is free: it is computed from the id."""
    while True:
        job = str(random.randrange(10**6, 10**9))
        place = discover({**srun(0, job), "MASTER_ADDR": ""})
        assert place is not None
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
    """Return the variables that mpiexec of MPICH and Intel MPI sets, and a port, as it names no
    job.
    """
    place = discover(srun(0, job))
    assert place is not None
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(place.master_port),
    }  # fmt: skip


def by_variables(words, folder, route):
    """Two processes with nothing but a launcher's variables."""
    job, command = (
        unused_job(),
        [sys.executable, str(ROUTES), "--out", str(folder), "--route", route],
    )
    both = [Started(command, folder, words(rank, job), f"log-{rank}") for rank in (0, 1)]
    try:
        codes = [each.ends() for each in both]
    finally:
        for each in both:
            end_group(each.process)
    assert codes == [0, 0], "\n".join(each.said()[-5000:] for each in both)
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in (0, 1)]


def check_route(found, route, oracle):
    same(found, route, oracle)
    assert [
        (report["cases"][route]["rank"], report["cases"][route]["world"]) for report in found
    ] == [(0, 2), (1, 2)]
    assert [report["place"]["LOCAL_RANK"] for report in found] == ["0", "1"]
    assert {report["place"]["GLOO_SOCKET_IFNAME"] for report in found} == {"lo"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "route"),
    [
        (srun, "stock"),
        (srun, "callback"),
        (srun, "accelerate"),
        (open_mpi, "ours"),
        (hydra, "deepspeed"),
    ],
)
def test_processes_of_srun_and_mpi_train_as_one(words, route, tmp_path, oracle):
    check_route(by_variables(words, tmp_path / "run", route), route, oracle)


def real_mpirun():
    """An mpirun of Open MPI on this machine, if there is one."""
    program = shutil.which("mpirun")
    said = completed([program, "--version"]).stdout if program else ""
    return program if "Open MPI" in said else None


@pytest.mark.long
def test_mpirun_trains_as_one_process(tmp_path, oracle):
    """The program where it is installed; where not, two processes with the variables it sets."""
    folder, program = tmp_path / "run", real_mpirun()
    if program is None:
        print(
            "no mpirun of Open MPI here: two processes with its variables instead", file=sys.stderr
        )
        found = by_variables(open_mpi, folder, "deepspeed")
    else:
        command = [
            program,
            "--allow-run-as-root",
            "--oversubscribe",
            "-np",
            "2",
            sys.executable,
            str(ROUTES),
            "--out",
            str(folder),
        ]
        found = reports(Started([*command, "--route", "deepspeed"], folder), folder, 2)
    check_route(found, "deepspeed", oracle)
