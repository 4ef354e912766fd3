"""The ``deepspeed`` command line (``deepspeed.launcher.runner.main``) in terms of
``hf_zero.hosts``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.hosts.front import carry_out
from hf_zero.hosts.plan import Request, plan

ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500  # without ssh all hosts have to assume the same one
OVER_SSH = ("pdsh", "ssh")
NOT_BUILT = {
    "launcher_args": "pass options of ssh with HF_ZERO_SSH",
    "save_pid": "the process that you start ends all others",
    "enable_each_rank_log": "redirect the output: each line begins with its host",
    "autotuning": "choose the configuration yourself",
    "bind_cores_to_rank": "start the script with numactl and --no_python",
    "bind_core_list": "start the script with numactl and --no_python",
    "venv_script": "start this command from the environment: the hosts use the same Python",
}


def main(args: Sequence[str] | None = None) -> None:
    """DeepSpeed's options: the hosts of a hostfile, or this machine.

    Ends the process where something has failed.
    """
    given = _parser().parse_args(args)
    for name, instead in NOT_BUILT.items():
        if getattr(given, name):
            raise NotBuiltError(
                f"--{name} of the deepspeed command is not built in this version; {instead}"
            )
    if given.launcher.lower() not in OVER_SSH:
        raise NotBuiltError(
            f"--launcher {given.launcher} is not built in this version; start the script with srun "
            "or mpirun itself, hf-zero knows their variables"
        )
    if max(given.num_nodes, given.num_gpus) >= 0 and (given.include or given.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus cannot be given with --include or --exclude; write the "
            "hosts and slots there"
        )
    os.environ.setdefault("HF_ZERO_LOG_LEVEL", "error" if given.quiet else given.log_level)
    default = Path(DEFAULT_HOSTFILE)
    hostfile = Path(given.hostfile) if given.hostfile else default if default.is_file() else None
    files = [Path(folder, ENVIRONMENT_FILE) for folder in (Path.home(), Path.cwd())]
    request = Request(
        given.user_script,
        tuple(given.user_args),
        given.module,
        given.no_python,
        local_rank_argument=not given.no_local_rank,
        hostfile=hostfile,
        include=given.include,
        exclude=given.exclude,
        num_nodes=_unless_negative(given.num_nodes),
        num_procs=_unless_negative(given.num_gpus),
        master_addr=given.master_addr or None,
        master_port=given.master_port or (DEFAULT_PORT if given.no_ssh else None),
        node_rank=_unless_negative(given.node_rank) if given.no_ssh else None,
        env_files=tuple(dict.fromkeys(file for file in files if file.is_file())),
        ssh_port=given.ssh_port,
    )
    code = carry_out(plan(request, _ranks_here))
    if code:
        sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="hf-zero in place of the deepspeed launcher; see also `hf-zero launch --help`",
    )
    parser.add_argument(
        "-H",
        "--hostfile",
        help=f"lines of `host slots=N`; default: {DEFAULT_HOSTFILE}, if there is one",
    )
    parser.add_argument(
        "-i", "--include", default="", help="only these hosts and slots: worker-0@worker-1:0,2"
    )
    parser.add_argument("-e", "--exclude", default="", help="all but these")
    parser.add_argument("--num_nodes", type=int, default=-1, help="the first hosts of the hostfile")
    parser.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host"
    )
    parser.add_argument("--master_addr", default="", help="default: the first host's address")
    parser.add_argument("--master_port", type=int, help="where the ranks meet; default: a free one")
    parser.add_argument(
        "--node_rank", type=int, default=-1, help="the number of this host, with --no_ssh"
    )
    parser.add_argument("--no_ssh", action="store_true", help="start the part of this host alone")
    parser.add_argument("--ssh_port", type=int)
    for flag in (
        "--module",
        "--no_python",
        "--no_local_rank",
        "--save_pid",
        "--bind_cores_to_rank",
    ):
        parser.add_argument(flag, action="store_true")
    for flag in ("--no_ssh_check", "--force_multi"):
        parser.add_argument(
            flag,
            action="store_true",
            help="accepted: a host that cannot be reached says so by itself",
        )
    for option in ("--launcher_args", "--autotuning", "--venv_script", "--bind_core_list"):
        parser.add_argument(option, default="")
    parser.add_argument(
        "--enable_each_rank_log", type=lambda text: "" if text == "None" else text, default=""
    )
    parser.add_argument("--launcher", default=OVER_SSH[0])
    parser.add_argument(
        "--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"]
    )
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def _unless_negative(number: int) -> int | None:
    return None if number < 0 else number


def _ranks_here() -> int:
    from hf_zero.device import kinds

    return kinds.device_count() or 2
