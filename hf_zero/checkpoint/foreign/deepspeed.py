"""DeepSpeed's checkpoints: a run's folder, or what ``ds_to_universal`` makes of one."""

from __future__ import annotations

from pathlib import Path

from hf_zero.checkpoint.foreign.assembled import Asked, Assembled
from hf_zero.checkpoint.foreign.deepspeed_folder import DeepSpeedFolder
from hf_zero.checkpoint.foreign.universal import FOLDER, Universal
from hf_zero.errors import CheckpointError


def open_checkpoint(folder: Path, asked: Asked = ()) -> Assembled:
    """``folder``, one tag of a DeepSpeed run, as a checkpoint.

    Raises CheckpointError for a damaged one and for tensor- or pipeline-parallel ones, whose files
    each hold a part of the model.
    """
    kind = Universal if (folder / FOLDER).is_dir() else DeepSpeedFolder
    try:
        return Assembled(kind(folder, asked).found())
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not what DeepSpeed 0.19 writes, or is damaged ({type(error).__name__}: "
            f"{error}); restore its files, or name another checkpoint"
        ) from error
