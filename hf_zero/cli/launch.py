"""``hf-zero launch``: start the ranks of a script, on this machine or on the hosts of a
hostfile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hf_zero.cli.completions import complete_preset, one_of
from hf_zero.cli.options import expanded, refuse
from hf_zero.cli.printing import AsJson, print_json
from hf_zero.config.feature_rows import SECRETS
from hf_zero.config.launched import LAUNCHED_BY, OWN, WRITTEN
from hf_zero.config.variables import warn_once
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.launch.front import carry_out
from hf_zero.launch.plan import LaunchPlan, Request, plan, refuse_missing
from hf_zero.logging import JsonObject

if TYPE_CHECKING:
    from hf_zero.config.training_file import TrainingFile

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
CPU_RANKS = 2


Command = Annotated[
    list[str], typer.Argument(help="The script and its arguments.", metavar="SCRIPT [ARGS]...")
]


@dataclass(frozen=True)
class Configured:
    """Options that name a configuration of ZeRO in place of the script's."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="Stage of ZeRO: zero0, zero1, zero2 or zero3; starts with accelerate launch.",
            autocompletion=complete_preset,
        ),
    ] = None
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="As --preset zero0 to zero3.")] = (
        None
    )
    config: Annotated[
        Path | None,
        typer.Option(help="Accelerate YAML with the configuration; starts with accelerate launch."),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, bf16 or fp16, with --preset.", autocompletion=one_of(*MIXED_PRECISION)
        ),
    ] = None
    set_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With --preset: a key of the configuration, such as metrics.enabled=true; repeat "
            "it for several.",
        ),
    ] = None

    @property
    def given(self) -> list[str]:
        """The options that were written."""
        names: dict[str, object] = {
            "preset": self.preset,
            "stage": self.stage,
            "config": self.config,
        }
        names |= {"precision": self.precision, "set": self.set_keys or None}
        return [f"--{name}" for name, value in names.items() if value is not None]

    def start(self) -> ConfiguredStart:
        """Return what the options add to a launch, checked."""
        preset, pairs = self.preset, self.set_keys or []
        if self.stage is not None:
            if preset is not None:
                raise ConfigError(f"--stage {self.stage} and --preset {preset}: write one of them")
            preset = f"zero{self.stage}"
        written = _written(pairs, preset)
        export = _launched_by(preset, self.config, self.precision, pairs)
        if written:
            export.append(f"{WRITTEN}={json.dumps(written)}")
        return ConfiguredStart(_accelerate(preset, self.config, self.precision), tuple(export))


Ranks = Annotated[int | None, typer.Option(help="Ranks in total, on this machine.")]
NumProcs = Annotated[
    int | None,
    typer.Option(
        "--num-procs",
        "--num-gpus",
        help="Ranks on each host; default: its slots, or the GPUs of this "
        "machine, else 2 on the CPU.",
    ),
]
NumNodes = Annotated[
    int | None,
    typer.Option("--num-nodes", help="Number of hosts to use, taken from the top of the hostfile."),
]
# in place of the default file of `accelerate config`, which would add its keys to a preset
OF_PRESETS = Path(__file__).resolve().parents[1] / "launch" / "preset.yaml"

Hostfile = Annotated[
    Path | None,
    typer.Option("--hostfile", "-H", help="Lines of `host slots=N`; # begins a comment."),
]
Include = Annotated[
    str,
    typer.Option(
        "--include",
        "-i",
        help="Use only these hosts and slots: worker-0@worker-1:0,2 is all of worker-0 and two "
        "slots of worker-1.",
    ),
]
Exclude = Annotated[
    str,
    typer.Option(
        "--exclude", "-e", help="Use all hosts and slots but these, written as for --include."
    ),
]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        "--master-addr", help="Address where the ranks meet; default: that of the first host."
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master-port",
        help="Port where the ranks meet; default: a free port, or, if the first host is another "
        "machine, a random one.",
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank",
        help="Start only the ranks of this host, without ssh; run the command on each host with "
        "its number.",
    ),
]
Interface = Annotated[
    str | None, typer.Option(help="Network interface of gloo and NCCL, on all hosts.")
]
Module = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
]
NoPython = Annotated[
    bool, typer.Option("--no-python", help="SCRIPT is a program, not run by python.")
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME or NAME=VALUE of a variable for other hosts. Those of NCCL_, HF_, PYTHON "
        "and the like are always passed on."
    ),
]
EnvFile = Annotated[
    list[Path] | None,
    typer.Option("--env-file", help="NAME=VALUE lines for all hosts, such as .deepspeed_env."),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder on each host that gets stdout.log and stderr.log of each rank; lines on the "
        "terminal begin with the number of the rank on its host."
    ),
]
Ssh = Annotated[
    str | None,
    typer.Option(
        help="Program to call as PROGRAM HOST LINE in place of ssh; default: HF_ZERO_SSH, else ssh."
    ),
]
SshPort = Annotated[int | None, typer.Option("--ssh-port", min=1, max=65535, help="Port of ssh.")]


@expanded
def launch(
    command: Command,
    options: Configured,
    ranks: Ranks = None,
    num_procs: NumProcs = None,
    num_nodes: NumNodes = None,
    hostfile: Hostfile = None,
    include: Include = "",
    exclude: Exclude = "",
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    node_rank: NodeRank = None,
    interface: Interface = None,
    module: Module = False,
    no_python: NoPython = False,
    export: Export = None,
    env_file: EnvFile = None,
    log_dir: LogDir = None,
    ssh: Ssh = None,
    ssh_port: SshPort = None,
    as_json: AsJson = False,
) -> None:
    """Start a script's ranks with torchrun or, with --stage, --preset or --config, with accelerate
    launch. With --json, print the commands without running them; without --master-addr, the first
    host is asked for its address.

    The hosts of --hostfile are reached through ssh without a password and need the same folder and
    the same Python. If one fails, and at Ctrl-C, all are ended, and none starts again: for hosts
    that come back start torchrun --nnodes 1:4 on each, and a script that resumes.

    Example: hf-zero launch --hostfile hosts --include worker-0@worker-1:0,1 train.py --lr 1e-4
    """
    procs = ranks_of_options(ranks, num_procs, hostfile)
    if hostfile is None or node_rank is not None:
        why = "no host is reached through ssh; pass --hostfile without --node-rank, or leave it out"
        refuse({"--ssh": ssh, "--ssh-port": ssh_port}, why)
    configured = options.start()
    warn_once()
    script, *arguments = command
    request = Request(
        script, tuple(arguments), module, no_python, hostfile=hostfile, include=include,
        exclude=exclude, num_nodes=num_nodes, num_procs=procs, master_addr=master_addr,
        master_port=master_port, node_rank=node_rank, interface=interface,
        accelerate=configured.accelerate, machines_of_file=_machines(options.config),
        export=(*(export or ()), *configured.export), env_files=tuple(env_file or ()),
        log_dir=log_dir, ssh=ssh, ssh_port=ssh_port,
    )  # fmt: skip
    start_ranks(request, as_json)


def start_ranks(request: Request, as_json: bool = False) -> None:
    """Start the ranks of ``request``, and exit with their code; ``as_json``: print the commands."""
    planned = plan(request, default_ranks)
    refuse_missing(request)
    if as_json:
        print_json(_described(planned))
        return
    raise typer.Exit(carry_out(planned))


def ranks_of_options(ranks: int | None, num_procs: int | None, hostfile: Path | None) -> int | None:
    """Return the number of ranks that --ranks or --num-procs names; None for neither."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} is not a number of ranks; pass at least 1")
    if ranks is not None and (num_procs is not None or hostfile is not None):
        raise LaunchError(
            "--ranks counts only the ranks of this machine; "
            f"{'with --hostfile' if hostfile else 'in place of it'} use --num-procs"
        )
    return ranks if ranks is not None else num_procs


class ConfiguredStart(NamedTuple):
    """What the options that name a configuration add to a launch: options of ``accelerate launch``
    (None: torchrun), and variables of the ranks.
    """

    accelerate: tuple[str, ...] | None
    export: tuple[str, ...]


def request_on_this_machine(
    command: list[str], ranks: int | None, options: Configured, module: bool = False
) -> Request:
    """Return the request for the ranks of a script on this machine, with these options of
    :func:`launch`.
    """
    configured = options.start()
    script, *arguments = command
    return Request(
        script, tuple(arguments), module, num_procs=ranks_of_options(ranks, None, None),
        accelerate=configured.accelerate,
        machines_of_file=None if options.config is None else "1", export=configured.export,
    )  # fmt: skip


def request_of_training(training: TrainingFile, script: str, *arguments: str) -> Request:
    """Return the request for the ranks of ``training``, whose script is the file ``script``."""
    from hf_zero.launch.training_script import launch_options

    options = launch_options(training)
    configured = Configured(
        preset=options["preset"], precision=options["precision"], set_keys=options["set"]
    )
    return request_on_this_machine([script, *arguments], options.get("ranks"), configured)


def _written(pairs: list[str], preset: str | None) -> dict[str, object]:
    """Return the sections that the ``KEY=VALUE`` pairs of --set write, checked.

    Raises ConfigError for an unknown key or value, and for a key that another option sets.
    """
    from hf_zero.config import PRESETS, ZeroConfig
    from hf_zero.config.files import load_yaml
    from hf_zero.config.sourced import merge

    sections: JsonObject = {}
    unset: list[str] = []
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {pair} is not KEY=VALUE; write --set metrics.enabled=true")
        *path, name = key.split(".")
        section = sections
        for depth, part in enumerate(path, 1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                above = f"{'.'.join(path[:depth])}={section}"
                raise ConfigError(f"--set {pair} and --set {above} contradict; keep one")
        if isinstance(section.get(name), dict):
            below = f"{key}.{next(iter(section[name]), 'KEY')}"
            raise ConfigError(f"--set {pair} and --set {below} contradict; keep one")
        section[name] = load_yaml(f"value: {text}", f"--set {key}")["value"]
        if section[name] is None:
            unset.append(pair)
    if sections and preset is None:
        raise ConfigError(
            f"--set {pairs[0]} goes with --preset; a file of --config has its keys under "
            "deepspeed_config, and with torchrun the script's configuration has them"
        )
    zero = sections.get("zero_optimization", {})
    if not isinstance(zero, dict):  # it would also replace the stage of --preset
        raise ConfigError(
            f"--set zero_optimization={zero} is not a key of that section; write --set "
            "zero_optimization.KEY=VALUE"
        )
    if "stage" in zero:
        raise ConfigError("--set zero_optimization.stage: --preset names the stage; leave this out")
    if unset:
        key = unset[0].partition("=")[0]
        raise ConfigError(f"--set {unset[0]} names no value; write --set {key}=VALUE")
    for name in {"bf16", "fp16"} & sections.keys():
        raise ConfigError(f"--set {name}: write --precision {name} in place of it")
    whole = {"zero_optimization": {"stage": PRESETS.get(preset or "", 0)}}
    ZeroConfig.from_dict(merge(whole, sections), source="--set", allow_auto=True)
    return sections


def _launched_by(
    preset: str | None, config: Path | None, precision: str | None, pairs: list[str]
) -> list[str]:
    """Return the variable by which ranks know this command and its options that name a
    configuration.
    """
    options = {"preset": preset, "config": config, "precision": precision}
    named = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    for key, _, value in (pair.partition("=") for pair in pairs):
        named += f" --set {key}={'***' if key in SECRETS else value}"
    return [f"{LAUNCHED_BY}={OWN}{named}"]


def _described(planned: LaunchPlan) -> dict[str, object]:
    """Return the plan for JSON, with the names of variables only: a value may be a secret."""
    if planned.alone:
        return {
            "command": planned.starts[0].command,
            "environment": sorted(planned.starts[0].environment),
        }
    return {
        "meeting": planned.meeting,
        "hosts": [
            {
                "host": start.host.name,
                "slots": start.host.slots,
                "reached_by": start.reached_by,
                "command": start.command,
                "environment": sorted(start.environment),
            }
            for start in planned.starts
        ],
    }


def _accelerate(
    preset: str | None, config: Path | None, precision: str | None
) -> tuple[str, ...] | None:
    """Return the options of ``accelerate launch``, without the number of ranks, which the plan
    counts; None for torchrun.
    """
    from hf_zero.config import PRESETS, ZeroConfig
    from hf_zero.config.accelerate_yaml import is_accelerate
    from hf_zero.config.files import load_file

    if preset is not None and config is not None:
        raise ConfigError(
            f"--preset {preset} and --config {config} cannot be given together; keep one"
        )
    if precision is not None and preset is None:
        raise ConfigError(
            f"--precision {precision} goes with --preset; a file says its own, and with "
            "torchrun the script does"
        )
    if config is not None:
        # raise for a faulty file before any process starts
        written = load_file(config)
        ZeroConfig.from_dict(written, source=f"config file {config}", allow_auto=True)
        if not is_accelerate(written):
            raise ConfigError(
                f"--config {config} is a ZeRO configuration, and --config takes an Accelerate "
                "YAML: name the file in the script, or in a YAML with distributed_type: DEEPSPEED "
                f"and deepspeed_config: {{deepspeed_config_file: {config}}}"
            )
        return ("--config_file", str(config.resolve()))
    if preset is None:
        return None
    if preset not in PRESETS:
        raise ConfigError(
            f"--preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}, or pass --config "
            "with an Accelerate YAML"
        )
    if (precision or "fp32") not in MIXED_PRECISION:
        raise ConfigError(
            f"--precision {precision!r} is unknown; choose one of {', '.join(MIXED_PRECISION)}"
        )
    stage = PRESETS[preset]
    options = {
        "zero_stage": stage,
        "mixed_precision": MIXED_PRECISION[precision or "fp32"],
        "dynamo_backend": "no",  # its default, which accelerate warns of where it is left out
        **({"zero3_init_flag": "true", "zero3_save_16bit_model": "true"} if stage == 3 else {}),
    }
    return (
        *("--config_file", str(OF_PRESETS)),
        "--use_deepspeed",
        *(text for name, value in options.items() for text in (f"--{name}", str(value))),
    )


def _machines(config: Path | None) -> str | None:
    """Return ``num_machines`` of an Accelerate YAML, as text; None without a file."""
    from hf_zero.config.files import load_file

    return None if config is None else str(load_file(config).get("num_machines") or 1)


def default_ranks() -> int:
    """Return the number of ranks without an option for it: that of this machine's GPUs, else 2."""
    from hf_zero.device import kinds

    return kinds.device_count() or CPU_RANKS
