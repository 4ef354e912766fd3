"""``deepspeed.runtime.checkpoint_engine``: classes that write and read one file at a time, for
files of scripts. ``engine.save_checkpoint`` writes hf-zero's checkpoints.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION


@dataclass
class CheckpointCommitInfo:
    """Name and folder of a checkpoint, and whether ``latest`` shall name it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Base class of file writers: ``create`` begins a checkpoint, ``commit`` ends it."""

    def __init__(self, config_params: object = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None: ...

    @abstractmethod
    def save(self, state_dict: object, path: str) -> None: ...

    @abstractmethod
    def load(self, path: str, map_location: MAP_LOCATION = None) -> Any: ...

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return whether files are written while training goes on."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        return None

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return None

    def cleanup(self) -> None:
        return None

    def preserves_storage_sharing(self) -> bool:
        """Return whether tensors that share memory are written once."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Read and write files of ``torch.save``."""

    def __init__(self, config_params: object = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: object, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: MAP_LOCATION = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True
