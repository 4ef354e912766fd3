"""Launch plan from a user's request: the selected hosts, the rendezvous address and port, and the
command and exported environment variables of each host.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from hf_zero.distributed.rank_hosts import VARIABLES as INTERFACE_VARIABLES
from hf_zero.distributed.rank_hosts import interface_of
from hf_zero.distributed.rendezvous import LOOPBACK, is_loopback
from hf_zero.errors import LaunchError
from hf_zero.launch.hosts import (
    LOCAL,
    Host,
    address_of,
    free_port,
    is_here,
    read_hostfile,
    select,
    ssh_command,
)

AGENT = "hf_zero.launch.agent"
LAUNCHER = "hf_zero.launch.launcher"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = "PET_NNODES"  # the default of --nnodes of torchrun: set by Kubeflow in each pod
HOST_NAME = "HF_ZERO_HOST"  # variable with the name by which errors refer to the host of a rank
PORTS = range(15000, 29000)  # below Linux's ephemeral ports
FAMILIES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "TRITON_",
    "PYTHON", "HF_", "HUGGINGFACE_", "TRANSFORMERS_",
    "DATASETS_", "TOKENIZERS_", "ACCELERATE_", "WANDB_", "MLFLOW_", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "VIRTUAL_ENV", "DS_",
)  # fmt: skip
NOT_EXPORTED = frozenset({VISIBLE})  # each host sees its own devices
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# before the script: argparse would take an option of the script, --n, for one of torchrun
END_OF_OPTIONS = "--"
STDOUT_AND_STDERR = "3"  # of torchrun's --tee
WITH_LOCAL_RANK = (
    'script=$1; shift; exec {python} -u {module}"$script" --local_rank="$LOCAL_RANK" "$@"'
)


@dataclass(frozen=True)
class Request:
    """Options of a launch. ``log_dir``: folder on each host for the output of each of its ranks.

    ``accelerate``: options of ``accelerate launch``, which then starts the ranks; None means
    torchrun. ``machines_of_file``: ``num_machines`` of a file among them, which counts the ranks
    unless an option does; None without one.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    local_rank_argument: bool = False
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_procs: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    interface: str | None = None
    accelerate: tuple[str, ...] | None = None
    machines_of_file: str | None = None
    export: tuple[str, ...] = ()
    env_files: tuple[Path, ...] = ()
    log_dir: Path | None = None
    ssh: str | None = None
    ssh_port: int | None = None
    python: str = field(default_factory=lambda: sys.executable)

    @property
    def counts_ranks(self) -> bool:
        """Return whether the options, and no file, count the ranks of ``accelerate launch``."""
        selects = self.hostfile is not None or bool(self.include or self.exclude)
        counts = self.num_procs is not None or self.node_rank is not None
        return self.machines_of_file is None or selects or counts


@dataclass(frozen=True)
class Start:
    """Launch of one host: the command of its ranks, its variables, and the command that starts its
    agent from here.
    """

    host: Host
    command: list[str]
    environment: dict[str, str]
    reached_by: list[str]
    here: bool

    @property
    def order(self) -> bytes:
        """The line that the agent reads."""
        return (
            json.dumps({"command": self.command, "environment": self.environment}).encode() + b"\n"
        )


@dataclass(frozen=True)
class LaunchPlan:
    """Launches of all hosts. ``alone`` is true if there is a single one and it runs here, in place
    of this process.
    """

    starts: list[Start]
    meeting: str | None

    @property
    def alone(self) -> bool:
        return len(self.starts) == 1 and self.starts[0].here


def refuse_missing(request: Request) -> None:
    """Raise LaunchError before any rank starts if there is no such script, or with ``no_python`` no
    such program. Other hosts have this folder at the same path.
    """
    if request.module or os.path.exists(request.script):
        return
    if request.no_python:
        if shutil.which(request.script) is None:
            raise LaunchError(f"{request.script} is neither a program nor a file; pass its path")
        return
    raise LaunchError(
        f"the script {request.script} is not in {os.getcwd()}; pass its path, or a module with -m"
    )


def plan(request: Request, default_ranks: Callable[[], int]) -> LaunchPlan:
    """Return the launch plan for ``request``.

    ``default_ranks`` counts the ranks of this machine. Raises LaunchError for hosts that cannot be
    selected or reached as requested.
    """
    if request.module and request.no_python:
        raise LaunchError(
            "--module and --no-python cannot be given together; a module is run by python"
        )
    hosts = _hosts(request, default_ranks)
    if request.node_rank is not None and not 0 <= request.node_rank < len(hosts):
        raise LaunchError(
            f"--node-rank {request.node_rank}: there are {len(hosts)} host(s); pass 0 to "
            f"{len(hosts) - 1}, and --num-nodes or --hostfile"
        )
    if request.accelerate is not None and len({len(host.slots) for host in hosts}) > 1:
        counts = ", ".join(f"{host.name}: {len(host.slots)}" for host in hosts)
        raise LaunchError(
            f"accelerate launch starts equally many ranks on every host ({counts}); pass "
            "--num-procs, or leave --preset and --config out"
        )
    ssh = ssh_command(request.ssh, request.ssh_port)
    meeting = _meeting(request, hosts, ssh)
    starts = [_start(request, hosts, rank, meeting, ssh) for rank in range(len(hosts))]
    if request.node_rank is not None:
        starts = [starts[request.node_rank]]
    return LaunchPlan(starts, f"{meeting[0]}:{meeting[1]}" if meeting else None)


def _start(
    request: Request,
    hosts: Sequence[Host],
    rank: int,
    meeting: tuple[str, int] | None,
    ssh: Sequence[str],
) -> Start:
    """Return the launch of host ``rank``. With --node-rank each host runs this command itself."""
    host, on_each_host = hosts[rank], request.node_rank is not None
    is_local = on_each_host or host.name == LOCAL or is_here(host.name)
    inherits = on_each_host or (len(hosts) == 1 and is_local)  # the environment of this process
    environment = exported(os.environ, request.export, request.env_files, families=not inherits)
    if not inherits:
        environment[HOST_NAME] = host.name
    if request.interface:
        environment |= dict.fromkeys(INTERFACE_VARIABLES, request.interface)
    elif len(hosts) == 1 and (meeting is None or is_loopback(meeting[0])):
        environment = _loopback_of_gloo() | environment
    if host.chosen:
        # the slots of a hostfile are numbers of devices, also where the command runs on each host
        indexes_visible = inherits and not (on_each_host and request.hostfile is not None)
        environment[VISIBLE] = _devices(host, indexes_visible)
    agent = shlex.join(["cd", os.getcwd()]) + " && exec " + shlex.join(_agent(request.python))
    reached_by = ["sh", "-c", agent] if is_local else [*ssh, host.name, agent]
    return Start(host, _command(request, hosts, rank, meeting), environment, reached_by, is_local)


def _hosts(request: Request, default_ranks: Callable[[], int]) -> list[Host]:
    """Return the hosts of ``request``: those of its hostfile, or this machine once for each node.
    Raises LaunchError for numbers and filters that select none, and where a variable or a file says
    that this is one of several hosts, which the request does not name.
    """
    if request.hostfile is not None:
        return select(
            read_hostfile(request.hostfile), request.include, request.exclude, request.num_nodes,
            request.num_procs,
        )  # fmt: skip
    if request.num_nodes is not None and request.num_nodes < 1:
        raise LaunchError(
            f"--num-nodes {request.num_nodes} is not a number of hosts; pass at least 1"
        )
    if request.num_nodes is not None and request.num_nodes != 1 and request.node_rank is None:
        raise LaunchError(
            f"--num-nodes {request.num_nodes} needs --hostfile with the names of the hosts, or "
            "--node-rank on each of them"
        )
    if request.num_procs is not None and request.num_procs < 1:
        raise LaunchError(
            f"--num-procs {request.num_procs} is not a number of ranks; pass at least 1"
        )
    declared = os.environ.get(NODES, "1")
    if request.num_nodes is None and declared != "1":
        raise LaunchError(
            f"{NODES}={declared} says that this is one of several hosts, which would train alone; "
            "start it with torchrun, which reads this variable, or pass --num-nodes, --node-rank, "
            "--master-addr and --master-port"
        )
    machines = request.machines_of_file or "1"
    if request.num_nodes is None and machines != "1" and request.counts_ranks:
        raise LaunchError(
            f"num_machines = {machines} in the file of --config says that this is one of several "
            "hosts, which would train alone; pass --hostfile, or --num-nodes, --node-rank, "
            "--master-addr and --master-port, or leave out the options that count ranks"
        )
    this_host = Host(LOCAL, tuple(range(request.num_procs or default_ranks())))
    chosen = select([this_host], request.include, request.exclude, None, request.num_procs)
    return chosen * (request.num_nodes or 1)


def _meeting(request: Request, hosts: Sequence[Host], ssh: Sequence[str]) -> tuple[str, int] | None:
    """Return the address and port where torchrun's agents and the ranks meet.

    None on a single host: the agent then chooses a free port.
    """
    if request.master_port is not None and not 0 < request.master_port < 65536:
        raise LaunchError(f"--master-port {request.master_port} is not a port; pass 1 to 65535")
    first, given = hosts[0].name, request.master_addr
    remote = not all(is_loopback(host.name) for host in hosts)  # else all are this machine
    if given and is_loopback(given) and remote and len(hosts) > 1:
        raise LaunchError(
            f"--master-addr {given} is a loopback address, which means another machine on each "
            f"host; pass the address by which the others reach {first}, or leave it out"
        )
    if request.node_rank is not None:
        tells = request.hostfile is not None and not (remote and is_loopback(first))
        address = given or (_address(first, remote, ssh) if tells else None)
        if address is None or request.master_port is None:
            lacking = "--master-addr" if address is None else "--master-port"
            raise LaunchError(
                f"--node-rank needs {lacking}: the same on every host, where host 0 is to be found"
            )
        return address, request.master_port
    if len(hosts) == 1:
        if request.master_addr or request.master_port:
            return (request.master_addr or LOOPBACK, request.master_port or free_port())
        return None
    address = given or _address(first, remote, ssh)
    return address, request.master_port or random.choice(PORTS)


def _address(first: str, remote: bool, ssh: Sequence[str]) -> str:
    """Return the address by which hosts reach ``first``; ``remote``: not all are this machine."""
    return address_of(first, ssh) if remote or not is_loopback(first) else first


def _loopback_of_gloo() -> dict[str, str]:
    """Return the variable by which gloo listens on the loopback interface, unless it is set."""
    gloo, name = INTERFACE_VARIABLES[0], interface_of(LOOPBACK)
    return {gloo: name} if name and not os.environ.get(gloo) else {}


def _devices(host: Host, indexes_visible: bool) -> str:
    """Return the devices of the slots of ``host``; ``indexes_visible``: slots index those that this
    process sees. Where CUDA_VISIBLE_DEVICES hides all devices, it stays. Raises LaunchError for
    slots beyond them.
    """
    shown = os.environ.get(VISIBLE) if indexes_visible else None
    if shown is None:
        return ",".join(map(str, host.slots))
    entries = (entry.strip() for entry in shown.split(","))
    visible = [*takewhile(lambda entry: entry not in ("", "-1"), entries)]  # as CUDA reads it
    beyond = [str(slot) for slot in host.slots if slot >= len(visible)]
    if visible and beyond:
        raise LaunchError(
            f"{VISIBLE}={shown} shows {len(visible)} device(s), slots 0 to {len(visible) - 1}, and "
            f"slot {', '.join(beyond)} is chosen; choose fewer (--num-procs, --include), or unset "
            f"{VISIBLE}"
        )
    return ",".join(visible[slot] for slot in host.slots) if visible else shown


def _agent(python: str) -> list[str]:
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if os.environ.get("PYTHONPATH") else []
    return ["env", *path, python, "-m", AGENT]


def _command(
    request: Request, hosts: Sequence[Host], rank: int, meeting: tuple[str, int] | None
) -> list[str]:
    launcher = _accelerate if request.accelerate is not None else _torchrun
    words = [request.python, "-m", LAUNCHER, *launcher(request, hosts, rank, meeting)]
    return [*words, request.script, *request.arguments]


def _torchrun(
    request: Request, hosts: Sequence[Host], rank: int, meeting: tuple[str, int] | None
) -> list[str]:
    options: dict[str, object] = {
        "--nnodes": len(hosts),
        "--nproc-per-node": len(hosts[rank].slots),
    }
    if request.log_dir is not None:
        options |= {"--log-dir": request.log_dir, "--tee": STDOUT_AND_STDERR}
    if meeting is None:
        options |= {"--rdzv-backend": "c10d", "--rdzv-endpoint": f"{LOOPBACK}:0"}
        options |= {"--local-addr": LOOPBACK}
    else:
        options |= {"--node-rank": rank, "--master-addr": meeting[0], "--master-port": meeting[1]}
    words = ["torch.distributed.run", *_words(options)]
    if request.local_rank_argument and not request.no_python:
        run = WITH_LOCAL_RANK.format(
            python=shlex.quote(request.python), module="-m " if request.module else ""
        )
        return [*words, "--no-python", END_OF_OPTIONS, "sh", "-c", run, "sh"]
    return [*words, *_kind_of_script(request, "--module", "--no-python"), END_OF_OPTIONS]


def _accelerate(
    request: Request, hosts: Sequence[Host], rank: int, meeting: tuple[str, int] | None
) -> list[str]:
    options: dict[str, object] = {}
    if request.log_dir is not None:
        options |= {"--log_dir": request.log_dir, "--tee": STDOUT_AND_STDERR}
    if request.counts_ranks:
        options |= {"--num_machines": len(hosts), "--machine_rank": rank}
        options |= {"--num_processes": sum(len(host.slots) for host in hosts)}
    if meeting is not None:
        options |= {"--main_process_ip": meeting[0], "--main_process_port": meeting[1]}
    elif request.machines_of_file is None:
        options |= {"--main_process_port": 0}
    words = ["accelerate.commands.launch", *(request.accelerate or ()), *_words(options)]
    words += ["--same_network"] if len(hosts) > 1 else []
    return [*words, *_kind_of_script(request, "--module", "--no_python")]


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def _kind_of_script(request: Request, module: str, no_python: str) -> list[str]:
    """Return the option that says that the script is a module or a program; ``module`` and
    ``no_python`` are the launcher's names of them.
    """
    return [module] if request.module else [no_python] if request.no_python else []


def exported(
    environ: Mapping[str, str],
    names: Sequence[str] = (),
    files: Sequence[Path] = (),
    families: bool = True,
) -> dict[str, str]:
    """Return the variables to export: with ``families`` those of the families above, then the lines
    of ``files``, then ``names`` (``NAME``, or ``NAME=VALUE``).

    Raises LaunchError for a name that is not set in ``environ``, and for a line that is not
    NAME=VALUE.
    """
    out = {
        name: value
        for name, value in environ.items()
        if families and name.startswith(FAMILIES) and name not in NOT_EXPORTED
    }
    for path in files:
        out.update(_variables_in(path))
    for entry in names:
        name, separator, value = entry.partition("=")
        if NAME.fullmatch(name) is None:
            raise LaunchError(f"--export {entry!r} is not NAME or NAME=VALUE")
        if not separator and name not in environ:
            raise LaunchError(
                f"--export {name}: it is not set here; set it, or pass --export {name}=VALUE"
            )
        out[name] = value if separator else environ[name]
    return out


def _variables_in(path: Path) -> dict[str, str]:
    """Return the variables of a file of NAME=VALUE lines. Raises LaunchError for another line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"the file of variables {path} cannot be read: {why}; pass one of NAME=VALUE lines"
        ) from None
    out = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.partition("=")
        if not separator or NAME.fullmatch(name.strip()) is None:
            raise LaunchError(f"{path}, line {number}: {text!r} is not NAME=VALUE")
        out[name.strip()] = value.strip()
    return out
