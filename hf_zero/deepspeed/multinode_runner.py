"""``deepspeed.launcher.multinode_runner``: the commands of pdsh, srun and mpirun that start a
script on several hosts. hf-zero reads ranks from the variables that srun and mpirun set.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence, Sized
from typing import Any

from hf_zero.errors import ConfigError

PLAIN = re.compile(r"[\w@%+=:,./-]*")  # text that a shell takes unquoted
PDSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"  # variable whose options pdsh appends to ssh
FAN_OUT = 1024  # hosts that pdsh reaches at once
BTL_INTERFACE = "btl_tcp_if_include"
Slots = Sized | int  # of a host: their numbers, or how many


class MultiNodeRunner(ABC):
    """Builder of the command for the options ``args`` of the ``deepspeed`` command; ``exports`` are
    the variables that it sets. Raises ConfigError for options that the launcher does not support.
    """

    label = ""
    takes_filters = False
    takes_numbers = False

    def __init__(
        self,
        args: Namespace,
        world_info_base64: str,
        resource_pool: Mapping[str, Slots] | None = None,
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool or {}
        self.exports: dict[str, str] = {}
        self.validate_args()
        self.user_script = args.user_script
        self.user_arguments = self.parse_user_args()

    @abstractmethod
    def backend_exists(self) -> str | None:
        """Return whether the launcher's program is installed."""

    @abstractmethod
    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> Any:
        """Return the command for the hosts ``active_resources`` and their slots."""

    @property
    def name(self) -> str:
        return self.label or type(self).__name__

    def add_export(self, key: str, var: str) -> None:
        """Set the variable ``key`` on the ranks; text that a shell would split is quoted."""
        value = var.strip()
        self.exports[key.strip()] = value if PLAIN.fullmatch(value) else f'"{value}"'

    def parse_user_args(self) -> list[str]:
        """Return the script's arguments in the form that the command takes."""
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """Raise ConfigError for options that cannot be passed on."""
        options = vars(self.args)
        filters = () if self.takes_filters else ("include", "exclude")
        numbers = () if self.takes_numbers else ("num_nodes", "num_gpus")
        refused = [name for name in filters if options.get(name)]
        refused += [name for name in numbers if options.get(name, -1) != -1]
        if refused:
            raise ConfigError(
                f"{self.name} does not take --{' and --'.join(refused)}; write a hostfile of the "
                "hosts and slots that take part"
            )

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Slots]) -> None:
        """Raise ConfigError for hosts or slots that the launcher cannot choose: here for none."""
        if not active_resources:
            raise ConfigError("no host is left to start ranks on; choose others by --include")

    def _exported(self) -> dict[str, str]:
        """Return the variables without quotes, as the ranks see them."""
        bare = ((name, value.removeprefix('"')) for name, value in self.exports.items())
        return {name: value.removesuffix('"') for name, value in bare}

    def _launcher_args(self) -> list[str]:
        return shlex.split(getattr(self.args, "launcher_args", None) or "")

    def _script(self) -> list[str]:
        """Return the command that each rank runs."""
        python = [] if self.args.no_python else [sys.executable, "-u"]
        module = ["-m"] if self.args.module and python else []
        return [*python, *module, str(self.user_script), *self.user_arguments]

    def _meeting(self) -> dict[str, str]:
        """Return the rendezvous variables that the options give."""
        variables = (("MASTER_ADDR", "master_addr"), ("MASTER_PORT", "master_port"))
        values = {name: getattr(self.args, option, None) for name, option in variables}
        return {name: str(value) for name, value in values.items() if value}


def _counts(pool: Mapping[str, Slots]) -> dict[str, int]:
    """Return the ranks of each host, for a pool of numbers or of slots."""
    return {
        host: len(slots) if isinstance(slots, Sized) else int(slots) for host, slots in pool.items()
    }


def _equal(pool: Mapping[str, Slots], launcher: str) -> int:
    """Return the ranks of every host. Raises ConfigError if hosts differ."""
    counts = _counts(pool)
    if len(set(counts.values())) != 1:
        raise ConfigError(
            f"{launcher} starts equally many ranks on every host, and the hosts have {counts}; "
            "write as many slots for each, or choose hosts by --include"
        )
    return next(iter(counts.values()))


class PDSHRunner(MultiNodeRunner):
    """pdsh; each host starts only its own part."""

    label = "pdsh"
    takes_filters = takes_numbers = True

    def backend_exists(self) -> str | None:
        return shutil.which("pdsh")

    def parse_user_args(self) -> list[str]:
        return [shlex.quote(arg) for arg in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Slots]
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return (command, command that ends the parts, environment of both)."""
        args, slots = self.args, _equal(active_resources, self.name)
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if args.ssh_port is not None:
            before = environment.get(PDSH_OPTIONS, "")
            environment[PDSH_OPTIONS] = f"{before} -p {args.ssh_port}".strip()
        reach = ["pdsh", "-S", "-f", str(FAN_OUT), "-w", ",".join(active_resources)]
        reach += self._launcher_args()
        exports = [f"export {k}={shlex.quote(v)};" for k, v in self._exported().items()]
        part = [sys.executable, "-u", "-m", "deepspeed.launcher.runner", "--no_ssh"]
        part += [f"--num_nodes={len(active_resources)}", f"--num_gpus={slots}", "--node_rank=%n"]
        part += [f"--{name.lower()}={value}" for name, value in self._meeting().items()]
        flags = ("no_python", "module", "no_local_rank")
        part += [f"--{flag}" for flag in flags if getattr(args, flag)]
        run = [*exports, f"cd {shlex.quote(os.getcwd())};", *part]
        ending = [*reach, "pkill", "-f", shlex.quote(" ".join(part[1:]))]
        script = shlex.quote(str(self.user_script))  # read by the shells of the hosts
        return [*reach, *run, script, *self.user_arguments], ending, environment


class _MPIRunner(MultiNodeRunner):
    program = "mpirun"

    def backend_exists(self) -> str | None:
        return shutil.which(self.program)


class OpenMPIRunner(_MPIRunner):
    """mpirun of Open MPI, over the interface eth0 unless ``launcher_args`` name one."""

    label = "openmpi"
    program = "ompi_info"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: object) -> list[str]:
        more = self._launcher_args()
        interface = [] if BTL_INTERFACE in more else ["--mca", BTL_INTERFACE, "eth0"]
        exports = self._meeting() | self._exported()
        ranks = sum(_counts(self.resource_pool).values())
        return [
            *("mpirun", "-n", str(ranks), "-hostfile", str(self.args.hostfile)),
            *("--mca", "btl", "^openib", *interface, *more),
            *(word for name, value in exports.items() for word in ("-x", f"{name}={value}")),
            *self._script(),
        ]


class _HydraRunner(_MPIRunner):
    """mpirun with Hydra's options."""

    own_exports: Mapping[str, str] = {}

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: object) -> list[str]:
        per_host = _equal(self.resource_pool, self.name)
        ranks = per_host * len(self.resource_pool)
        exports = {**self._meeting(), **self.own_exports, **self._exported()}
        return [
            *("mpirun", "-n", str(ranks), "-ppn", str(per_host)),
            *("-hosts", ",".join(self.resource_pool), *self._launcher_args()),
            *(word for name, value in exports.items() for word in ("-genv", name, value)),
            *self._script(),
        ]


class MPICHRunner(_HydraRunner):
    """mpirun of MPICH."""

    label = "mpich"


class IMPIRunner(_HydraRunner):
    """mpirun of Intel MPI, without its own pinning of ranks to cores."""

    label = "impi"
    own_exports = {"I_MPI_PIN": "0"}


class MVAPICHRunner(_HydraRunner):
    """mpirun of MVAPICH2."""

    label = "mvapich"
    program = "mpiname"
    own_exports = {"MV2_SUPPORT_DL": "1", "MV2_ENABLE_AFFINITY": "0"}


class SlurmRunner(MultiNodeRunner):
    """srun, inside an allocation or with a new one. Variables are passed by its environment."""

    label = "slurm"
    takes_filters = takes_numbers = True

    def backend_exists(self) -> str | None:
        return shutil.which("sinfo")

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Slots]) -> None:
        super().validate_active_resources(active_resources)
        for host, slots in active_resources.items():
            if isinstance(slots, Sequence) and [*slots] != [*range(len(slots))]:
                raise ConfigError(
                    f"srun counts ranks and cannot choose slots {[*slots]} of {host}; choose whole "
                    "hosts, or the first slots of each"
                )
        _equal(active_resources, cls.label)

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Slots]
    ) -> list[str]:
        self.validate_active_resources(active_resources)
        args, counts = self.args, _counts(active_resources)
        command = ["srun", "-n", str(sum(counts.values())), *self._launcher_args()]
        if getattr(args, "slurm_comment", ""):
            command += ["--comment", args.slurm_comment]
        if args.include or args.exclude:
            command += ["--nodelist", ",".join(counts), "--nodes", str(len(counts))]
        if args.num_nodes > 0:
            command += ["--nodes", str(args.num_nodes)]
        if args.num_gpus > 0:
            command += ["--gpus-per-node", str(args.num_gpus)]
        environment.update(self._meeting() | self._exported())  # --export splits at commas
        return [*command, "--export=ALL", *self._script()]


RUNNERS: dict[str, type[MultiNodeRunner]] = {
    runner.label: runner
    for runner in (OpenMPIRunner, MPICHRunner, IMPIRunner, MVAPICHRunner, SlurmRunner)
}
"""By the name that ``--launcher`` has for it; pdsh's hosts are reached over ssh, by agents."""
