"""``hf_zero.TrainingArguments(..., zero_config=…)``: the Trainer's arguments with a ZeRO config."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import transformers

from hf_zero.config import ZeroConfig
from hf_zero.config.launched import LAUNCH_FILE, launch_command, launched_values
from hf_zero.config.refusals import STAGE
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.launched_ranks import zero_asked_for
from hf_zero.integrations.transformers.trainer_config import read, refuse_contradictions


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with an additional field ``zero_config``.

    ``zero_config`` is a ``ZeroConfig``, a dict (DeepSpeed's dialect or our own keywords), the path
    of a JSON or YAML file, a JSON string, or a preset ("zero0" … "zero3"). Missing batch sizes,
    accumulation, clipping, precision, learning rate and schedule come from the other arguments. It
    is stored as ``deepspeed``, where all code of Transformers and Accelerate looks for ZeRO. None
    leaves the stock class unchanged.

    Raises ConfigError for an invalid config, and for one that contradicts another argument, with
    both values.
    """

    zero_config: dict | str | os.PathLike | ZeroConfig | None = field(
        default=None,
        # compared as `deepspeed`, where it is stored
        compare=False,
        metadata={
            "help": "Train with hf-zero: the path of a ZeRO config (JSON or YAML), a JSON string, "
            "or a preset: zero0, zero1, zero2, zero3."
        },
    )

    def __post_init__(self) -> None:
        if self.zero_config is None:
            super().__post_init__()
            return
        finder.choose()
        require_answering_imports()
        config = ZeroConfig.coerce(self.zero_config, allow_auto=True)
        written = config.to_dict()
        if self.deepspeed is not None and read(self.deepspeed) != written:
            raise ConfigError(
                f"deepspeed={self.deepspeed!r} contradicts zero_config={self.zero_config!r}; "
                "pass only zero_config"
            )
        if self.fsdp:
            raise ConfigError(
                f"fsdp={self.fsdp!r} and zero_config both shard the model; leave fsdp and "
                "fsdp_config out (`hf-zero migrate FILE` translates a file with them)"
            )
        _refuse_other_stage(config.stage)
        if not isinstance(self.zero_config, str):
            # a string or a dict survives serialization to JSON; other objects do not
            self.zero_config = (
                os.fspath(self.zero_config)
                if isinstance(self.zero_config, os.PathLike)
                else written
            )
        self.deepspeed = written
        self.use_cpu = self.use_cpu or bool(config.launch.use_cpu)
        super().__post_init__()
        refuse_contradictions(self.hf_deepspeed_config)


def _refuse_other_stage(stage: int) -> None:
    """Raise ConfigError if the launcher's config names another stage: the config of the arguments
    replaces it, which must not change the stage unnoticed.
    """
    if not zero_asked_for():
        return
    fields = sorted(filter(None, os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")))
    if fields:
        raise ConfigError(
            "zero_config and the file of accelerate launch both configure ZeRO "
            f"({', '.join(fields)}, in {os.environ.get(LAUNCH_FILE, 'its deepspeed_config')}); "
            "give it in one place: leave zero_config out, or start with torchrun or a plain "
            "accelerate launch"
        )
    launched = launched_values().get(STAGE, stage)
    if launched != stage:
        raise ConfigError(
            f"zero_config asks for stage {stage}, and `{launch_command()}` for stage {launched}; "
            "name it in one place: leave zero_config or the options of the launch out"
        )


def require_answering_imports() -> None:
    """Raise ConfigError if Transformers was imported while ``deepspeed`` was not available: its
    DeepSpeed classes then derive from object alone.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if HfDeepSpeedConfig.__mro__[1] is object:
        raise ConfigError(
            "transformers was imported before hf-zero answered for deepspeed (HF_ZERO_AUTOLOAD or "
            "TORCH_DEVICE_BACKEND_AUTOLOAD is 0?); unset the variable, or call "
            "hf_zero.integrations.finder.choose() before importing transformers"
        )
