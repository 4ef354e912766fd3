"""Start of ZeRO ranks: wrappers of ``accelerate launch``: its parser, validation and launchers."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from hf_zero.config import ZeroConfig
from hf_zero.config.accelerate_yaml import PASSED_ON
from hf_zero.config.launched import LAUNCH_FILE, WRITTEN
from hf_zero.config.refusals import STANDARD, launcher_refusal
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.launched_ranks import is_true
from hf_zero.integrations.seams import Original

LauncherCommand = Callable[[Namespace], tuple[list[str], dict[str, str]]]


def alias_config(
    original: Original, self: ArgumentParser, *args: object, **kwargs: object
) -> object:
    """Wraps ``accelerate.commands.utils.CustomArgumentParser.add_argument``: ``--config`` becomes
    an alias of ``--config_file``.
    """
    if "--config_file" in args and "--config" not in args:
        args = (*args, "--config")
    return original(self, *args, **kwargs)


def check_zero_launch(original: Original, args: Namespace) -> object:
    """Wraps ``accelerate.commands.launch._validate_launch_command``: ``--cpu`` with ZeRO means CPU
    ranks, instead of disabling ZeRO.
    """
    args, defaults, precision_from_file = original(args)
    if args.use_deepspeed and args.cpu and finder.chosen():
        args.cpu, args.use_cpu = False, True
    return args, defaults, precision_from_file


def _read_strictly(path: str | None) -> str:
    """Return the configuration file that Accelerate uses if it asks for ZeRO, else "". Raises
    ConfigError for mistakes in it before any rank starts: Accelerate drops unknown keys.
    """
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.utils import DistributedType

    chosen = path or default_config_file
    if (
        os.path.isfile(chosen)
        and load_config_from_file(chosen).distributed_type == DistributedType.DEEPSPEED
    ):
        ZeroConfig.from_file(chosen, allow_auto=True, foreign=True)
        return str(chosen)
    return ""


def prepare_ranks(original: LauncherCommand, args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Wraps ``accelerate.utils.launch.prepare_deepspeed_cmd_env``: returns the launcher's command
    and the environment of ZeRO ranks.
    """
    if not finder.chosen():
        return original(args)
    # The file is checked here, not in _validate_launch_command: `python -m
    # accelerate.commands.launch` has that function in a module called __main__.
    file = _read_strictly(args.config_file)
    refusal = launcher_refusal(args.deepspeed_multinode_launcher, args.num_machines)
    if refusal:
        raise ConfigError(f"deepspeed_multinode_launcher: {refusal}")
    args.deepspeed_multinode_launcher = STANDARD
    command, environment = original(args)
    if (
        is_true(environment.pop("ACCELERATE_USE_CPU", "false"))
        or getattr(args, "use_cpu", False)
        or getattr(args, "cpu", False)
    ):
        # Accelerate disables DEEPSPEED if ACCELERATE_USE_CPU is set. Ranks that see no GPU
        # select the CPU by themselves.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # DeepSpeedPlugin reads these variables, but Accelerate sets neither.
    for path in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if getattr(args, path, None) is not None:
            environment[f"ACCELERATE_DEEPSPEED_{path.upper()}"] = str(getattr(args, path))
    # Accelerate has turned all keys below deepspeed_config into attributes.
    written = {
        name: value for name in PASSED_ON if (value := getattr(args, name, None)) is not None
    }
    if file:
        environment[LAUNCH_FILE] = file
    if written:
        if (config_file := args.deepspeed_config_file) not in (None, "none"):
            raise ConfigError(
                f"deepspeed_config.{min(written)} is given besides --deepspeed_config_file "
                f"{config_file}, but Accelerate reads only the file; move it into {config_file}"
            )
        environment[WRITTEN] = json.dumps(written)
    return command, environment


def refuse_plain_launch(
    original: LauncherCommand, args: Namespace
) -> tuple[list[str], dict[str, str]]:
    """Wraps ``accelerate.utils.launch.prepare_simple_launcher_cmd_env``: raises ConfigError if a
    ZeRO configuration would start one unsharded process.
    """
    if getattr(args, "use_deepspeed", False) and finder.chosen():
        raise ConfigError(
            "--cpu beside a DEEPSPEED configuration would start one process without ZeRO; "
            "remove --cpu and write `use_cpu: true` in the file"
        )
    return original(args)
