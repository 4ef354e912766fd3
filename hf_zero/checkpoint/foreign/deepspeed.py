"""DeepSpeed's checkpoints: a tag folder of a run, or a universal checkpoint of ``ds_to_universal``,
with whole tensors in a folder per parameter, ``zero/<name>/{fp32,exp_avg,…}.pt``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.foreign.assembled import (
    MASTER,
    Asked,
    Assembled,
    OptimizerGroup,
    Parameter,
    ParameterPart,
)
from hf_zero.checkpoint.foreign.deepspeed_folder import DeepSpeedFolder
from hf_zero.checkpoint.foreign.deepspeed_parts import CLASSES, groups_of
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.errors import CheckpointError

FOLDER, SETTINGS, WEIGHTS, STEP = "zero", "optimizer_state.pt", "fp32", "step"


class Universal(DeepSpeedFolder):
    """Reader of a universal checkpoint. The model's files are next to ``zero``, as in DeepSpeed's
    other checkpoints.
    """

    def _optimizer_files(self) -> list[Path]:
        return []

    def _trained(self) -> Iterator[Parameter]:
        for group in self.shapes():
            for name, shape in group.items():
                tensors = {
                    path.stem: self._tensor(path)
                    for path in sorted((self.folder / FOLDER / name).glob("*.pt"))
                    if path.stem != STEP
                }
                if WEIGHTS not in tensors:
                    raise CheckpointError(
                        f"{self.folder / FOLDER / name / WEIGHTS}.pt is missing; restore it, or "
                        "convert the checkpoint again"
                    )
                flat = {
                    MASTER if state == WEIGHTS else state: tensor.reshape(-1)
                    for state, tensor in tensors.items()
                }
                yield Parameter(name, shape, self._dtype(name), True, (ParameterPart(0, flat),))

    def _groups(self) -> tuple[OptimizerGroup, ...] | None:
        saved = load_pickle(self.folder / FOLDER / SETTINGS, CLASSES)
        base: Mapping[str, Any] = saved.get("optimizer_state_dict", saved)
        first = next((name for group in self.shapes() for name in group), "")
        step = self.folder / FOLDER / first / f"{STEP}.pt"
        count = load_pickle(step, CLASSES) if step.is_file() else None
        return groups_of(base, self.shapes(), count)

    @staticmethod
    def _tensor(path: Path) -> torch.Tensor:
        held = load_pickle(path, CLASSES)
        found: torch.Tensor = held["param"] if isinstance(held, dict) else held
        return found.detach()


def open_checkpoint(folder: Path, asked: Asked = ()) -> Assembled:
    """Open ``folder``, one tag of a DeepSpeed run, as a checkpoint.

    Raises CheckpointError for a damaged one, and for tensor- or pipeline-parallel ones, each of
    whose files holds a part of the model.
    """
    kind = Universal if (folder / FOLDER).is_dir() else DeepSpeedFolder
    try:
        return Assembled(kind(folder, asked).found())
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not what DeepSpeed 0.19 writes, or is damaged ({type(error).__name__}: "
            f"{error}); restore its files, or name another checkpoint"
        ) from error
