"""What ranks of a launcher see before Accelerate counts them, and a training that begins without
ZeRO. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.config.launched import OWN, names_no_stage
from hf_zero.distributed.init import init_distributed
from hf_zero.distributed.rank_hosts import choose_interface
from hf_zero.distributed.rendezvous import announce, local_rank_told
from hf_zero.errors import LaunchError
from hf_zero.integrations import finder
from hf_zero.integrations.seams import Original
from hf_zero.logging import logger

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainingArguments


def see_ranks(original: Original, self: TrainingArguments) -> None:
    """Wraps ``TrainingArguments.__post_init__``: sets torchrun's variables for ranks of srun and
    mpirun before the arguments read them, and makes the group of CPU ranks, which Accelerate would
    make on a store that torchrun keeps from attempts before.
    """
    uses_engine = (self.deepspeed or zero_asked_for()) and finder.chosen()
    if uses_engine and launched() and (self.use_cpu or cpu_forced()):
        init_distributed("gloo", timeout=timedelta(seconds=self.ddp_timeout))
    original(self)


def prepare_without_zero(
    original: Original,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> object:
    """Wraps ``Accelerator.prepare_model``, which prepares models if no ZeRO configuration is named:
    under a ``hf-zero launch`` that names none, raises LaunchError if each rank would train alone,
    and warns if the ranks train by DDP.
    """
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and names_no_stage() and finder.chosen() and not evaluation_mode:
        remedy = (
            f"name a stage in the command: `{OWN} --preset zero3 --ranks {ranks} -- "
            f"{Path(sys.argv[0]).name}`"
        )
        if self.num_processes == 1:
            raise LaunchError(
                f"`{OWN}` started {ranks} ranks without a stage, and Accelerate sees one process "
                f"in each: every rank would train by itself, as the main process; {remedy}"
            )
        if self.distributed_type.value.startswith("MULTI_") and self.is_main_process:
            logger.warning(
                "%s names no stage, so Accelerate trains by DDP and not under ZeRO; %s", OWN, remedy
            )
    return original(self, model, device_placement, evaluation_mode)


def launched() -> bool:
    """Return whether a launcher has started this process. Sets torchrun's variables from the
    launcher's, and selects the network interface: Accelerate makes the groups of CPU ranks itself.
    """
    rendezvous = announce()
    if rendezvous is not None:
        choose_interface(rendezvous.master_addr, rendezvous.several_hosts)
    return local_rank_told(os.environ) is not None


def is_true(value: str) -> bool:
    return value.strip().lower() in {"1", "true", "yes", "y", "on", "t"}


def cpu_forced() -> bool:
    """Return whether the environment forces the CPU on everything that Accelerate starts."""
    return is_true(os.environ.get("ACCELERATE_USE_CPU", "false"))


def zero_asked_for() -> bool:
    """Return whether the environment asks for ZeRO, set by ``accelerate launch`` or the plugin."""
    return is_true(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))
