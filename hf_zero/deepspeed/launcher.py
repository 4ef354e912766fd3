"""The ``deepspeed`` command line (``deepspeed.launcher.runner``) in terms of ``hf_zero.launch``:
its options, hostfiles, filters of hosts, and lists of cores.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hf_zero.config.variables import warn_once
from hf_zero.deepspeed.multinode_runner import PDSH_OPTIONS, RUNNERS, MultiNodeRunner
from hf_zero.errors import ConfigError, LaunchError, NotBuiltError
from hf_zero.launch.front import carry_out
from hf_zero.launch.hosts import SSH, VARIABLE, Host, read_hostfile, select
from hf_zero.launch.plan import Request, exported, plan, refuse_missing
from hf_zero.logging import logger

ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEFAULT_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Prefixes of variables that DeepSpeed's launcher hands to other hosts; hf-zero's hands over all
that ``.deepspeed_env`` names.
"""
DEFAULT_PORT = 29500  # without ssh all hosts must assume the same port
OVER_SSH = ("pdsh", "ssh")
FLAGS = ("module", "no_python", "no_local_rank", "save_pid", "bind_cores_to_rank")
TEXTS = ("launcher_args", "slurm_comment", "autotuning", "venv_script", "bind_core_list")
NOT_BUILT = {
    "launcher_args": "pass options of ssh with HF_ZERO_SSH",
    "enable_each_rank_log": "hf-zero launch --log-dir and --launcher pdsh write one per rank",
    "save_pid": "the process that you start ends all others",
    "autotuning": "choose the configuration yourself",
    "bind_cores_to_rank": "start the script with numactl and --no_python",
    "bind_core_list": "start the script with numactl and --no_python",
    "venv_script": "start this command from the environment: the hosts use the same Python",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the ``deepspeed`` command: start a script on the hosts of a hostfile, or on this machine.

    Ends the process with the exit code of a failure. Raises NotBuiltError and ConfigError for
    options that hf-zero does not have or that contradict each other.
    """
    options = parse_args(args)
    runner = RUNNERS.get(options.launcher.lower())
    _refuse_options(options, runner)
    os.environ.setdefault("HF_ZERO_LOG_LEVEL", "error" if options.quiet else options.log_level)
    warn_once()
    default = Path(DEFAULT_HOSTFILE) if Path(DEFAULT_HOSTFILE).is_file() else None
    hostfile = Path(options.hostfile) if options.hostfile else default
    folders = dict.fromkeys((Path.home(), Path.cwd()))
    files = [file for folder in folders if (file := folder / ENVIRONMENT_FILE).is_file()]
    if runner is not None:
        _run_by(runner, options, hostfile, files)
        return
    request = _request(options, hostfile, files)
    planned = plan(request, _ranks_here)
    refuse_missing(request)
    code = carry_out(planned)
    if code:
        sys.exit(code)


def _refuse_options(options: argparse.Namespace, runner: type[MultiNodeRunner] | None) -> None:
    """Raise NotBuiltError for options that ``runner``, or hf-zero without one, does not have, and
    ConfigError for numbers beside filters.
    """
    for name, instead in NOT_BUILT.items():
        built = {"launcher_args": runner, "enable_each_rank_log": runner is None}.get(name)
        if getattr(options, name) and not built:
            raise NotBuiltError(
                f"--{name} of the deepspeed command is not built in this version; {instead}"
            )
    if runner is None and options.launcher.lower() not in OVER_SSH:
        raise NotBuiltError(
            f"--launcher {options.launcher} is not built in this version; write one of "
            f"{', '.join([*OVER_SSH, *RUNNERS])}"
        )
    if max(options.num_nodes, options.num_gpus) >= 0 and (options.include or options.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus cannot be given with --include or --exclude; write the "
            "hosts and slots there"
        )


def _request(options: argparse.Namespace, hostfile: Path | None, files: Sequence[Path]) -> Request:
    """Return the request to ``hf_zero.launch`` for ``options``."""
    return Request(
        options.user_script, tuple(options.user_args), options.module, options.no_python,
        local_rank_argument=not options.no_local_rank, hostfile=hostfile,
        include=options.include, exclude=options.exclude,
        num_nodes=_unless_negative(options.num_nodes), num_procs=_unless_negative(options.num_gpus),
        master_addr=options.master_addr or None,
        master_port=options.master_port or (DEFAULT_PORT if options.no_ssh else None),
        node_rank=_unless_negative(options.node_rank) if options.no_ssh else None,
        env_files=tuple(files),
        log_dir=Path(options.enable_each_rank_log) if options.enable_each_rank_log else None,
        ssh=_ssh(options.launcher.lower()), ssh_port=options.ssh_port,
    )  # fmt: skip


def _ssh(launcher: str) -> str | None:
    """Return ssh with the options that pdsh would append to it; None without any, and if
    HF_ZERO_SSH names the program.
    """
    options = os.environ.get(PDSH_OPTIONS, "") if launcher == "pdsh" else ""
    return f"{SSH} {options}" if options and not os.environ.get(VARIABLE) else None


def _run_by(
    runner_class: type[MultiNodeRunner],
    options: argparse.Namespace,
    hostfile: Path | None,
    files: Sequence[Path],
) -> None:
    """Replace this process by the launcher's program. Raises LaunchError if that is not installed,
    and without a hostfile.
    """
    if hostfile is None:
        raise LaunchError(
            f"--launcher {options.launcher} starts ranks on the hosts of a hostfile; "
            "pass --hostfile"
        )
    options.hostfile = os.fspath(hostfile)
    pool = fetch_hostfile(hostfile)
    if pool is None:
        raise LaunchError(f"--hostfile {hostfile}: there is no such file; pass another one")
    chosen = parse_inclusion_exclusion(pool, options.include, options.exclude)
    runner_class.validate_active_resources(chosen)
    options.master_addr = options.master_addr or next(iter(chosen))
    options.master_port = options.master_port or DEFAULT_PORT
    runner = runner_class(options, encode_world_info(chosen), pool)
    if not runner.backend_exists():
        raise LaunchError(
            f"--launcher {options.launcher}: its program is not installed here; load its module, "
            "or leave --launcher out to reach the hosts over ssh"
        )
    for name, value in exported(os.environ, files=files).items():
        runner.add_export(name, value)
    environment = dict(os.environ)
    command = runner.get_cmd(environment, chosen)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the ``deepspeed`` command; None: this process's arguments."""
    return _parser().parse_args(args)


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
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("--no_ssh_check", "--force_multi"):
        parser.add_argument(
            flag,
            action="store_true",
            help="accepted: a host that cannot be reached says so by itself",
        )
    for option in TEXTS:
        parser.add_argument(f"--{option}", default="")
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


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise LaunchError as ConfigError: scripts of DeepSpeed catch ValueError."""
    try:
        yield
    except LaunchError as error:
        raise ConfigError(str(error)) from None


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> OrderedDict[str, int] | None:
    """Return the slots of each host, in the order of the file; None, with a warning, if there is no
    such file. Raises ConfigError, naming the line, for an invalid hostfile.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s; this machine alone takes part", path)
        return None
    with _as_value_error():
        return OrderedDict((host.name, len(host.slots)) for host in read_hostfile(path))


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Return the part of ``host_info`` (slots of each host) that one of the filters leaves, such as
    ``worker-0@worker-1:0,2``, in the order of ``host_info``.

    Raises ConfigError for both filters at once, and for unknown hosts and slots.
    """
    if not include_str and not exclude_str:
        return host_info
    hosts = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    with _as_value_error():
        chosen = select(hosts, include_str, exclude_str, may_be_empty=True)
    return OrderedDict((host.name, list(host.slots)) for host in chosen)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """Run :func:`parse_resource_filter` on the number of slots of each host."""
    slots = OrderedDict((name, list(range(count))) for name, count in resource_pool.items())
    return parse_resource_filter(slots, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Return ``world_info`` as JSON in URL-safe base64, as launchers pass it on."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_range_list(range_str: str) -> list[int]:
    """Return the numbers of ``0,2-4,6``: both ends belong to a range. Raises ConfigError for an
    invalid list, or one that does not ascend.
    """
    numbers: list[int] = []
    for part in str(range_str).split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{part!r} in {range_str!r} is not a range; write 3, or 2-4")
        interval = range(int(first), int(last or first) + 1)
        if not interval or (numbers and interval[0] <= numbers[-1]):
            raise ConfigError(f"{range_str!r} does not ascend at {part!r}; sort its ranges")
        numbers += interval
    return numbers
