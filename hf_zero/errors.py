"""Every error that hf-zero raises on purpose.

Each message names the offending value and the remedy.
"""

from __future__ import annotations

from typing import Any, Self

from hf_zero.distributed.uncaught import watch


class HfZeroError(Exception):
    """Base of all errors raised by hf-zero.

    One that ends a rank is reported in a few lines (``distributed/uncaught.py``).
    """

    def __new__(cls, *args: Any, **kwargs: object) -> Self:
        watch(HfZeroError)
        if issubclass(cls, MemoryError):  # its constructor rejects classes with two bases
            return Exception.__new__(cls, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)


class ConfigError(HfZeroError, ValueError):
    """A configuration that cannot be used: an unknown key, a wrong type, contradicting values."""


class ReplacedKeyError(ConfigError, AssertionError):
    """A deprecated configuration key given together with its replacement."""


class NotBuiltError(HfZeroError, NotImplementedError):
    """A name or key that hf-zero knows but does not provide in this version."""


class ReleasedParameterError(HfZeroError, RuntimeError):
    """A read or write of a sharded parameter's values while its unit is not gathered."""


class PartitionError(HfZeroError, RuntimeError):
    """An operation that a partitioned model cannot support, such as changing dtype or
    requires_grad after initialize.
    """


class PipelineError(HfZeroError, RuntimeError):
    """A request that a pipeline's engine cannot serve: each rank has only a part of the model."""


class UnusedParameterError(PartitionError, AssertionError):
    """A trainable parameter without a gradient, if the configuration forbids that."""


class UnreducedGradientsError(PartitionError, AssertionError):
    """A step, or a nested ``no_sync``, inside ``no_sync``, where gradients are not reduced."""


class UnmanagedWindowError(PartitionError, AssertionError):
    """A boundary of accumulation windows, set where every step ends one by itself."""


class UnscalableLossError(PartitionError, AssertionError):
    """A loss that ``engine.scale`` cannot scale."""


class UnsupportedOptimizerError(HfZeroError, TypeError, AssertionError):
    """An optimizer whose update is not element-wise, or whose state cannot be carried over."""


class RankMismatchError(HfZeroError, RuntimeError):
    """Ranks that ask for different collectives, or a rank that did not arrive in time.

    ``failed_rank``: the rank whose own error this one follows from; None if there is none.
    """

    failed_rank: int | None = None


class VerificationError(HfZeroError, RuntimeError):
    """A model split among ranks that computes other numbers than the whole one."""


class CheckpointError(HfZeroError, RuntimeError):
    """A checkpoint that is missing, damaged, of another format version or of another model."""


class TargetMismatchError(CheckpointError, AssertionError):
    """Ranks that would save a checkpoint in different places, if the configuration forbids it."""


class NoModelFolderError(CheckpointError, ValueError):
    """A sharded checkpoint where a model folder is needed; Transformers' loaders treat it like
    their own ValueError.
    """


class DoesNotFitError(HfZeroError, MemoryError):
    """A training configuration that needs more memory of the device or the host, or more disk
    space, than is free.
    """


class LaunchError(HfZeroError, RuntimeError):
    """Ranks that cannot be started or told apart: a hostfile, a filter or a launcher's variable
    that is incomplete or contradictory.
    """


class ParityError(HfZeroError, RuntimeError):
    """A script that cannot be compared with the same script over torch."""


class HostMemoryError(HfZeroError, MemoryError):
    """Host memory that offloading asked for and that is not available."""


class DiskSpaceError(HfZeroError, OSError):
    """Disk space for offload that is not available; ``errno`` and ``filename`` are set."""


class OffloadError(HfZeroError, RuntimeError):
    """Offloaded state that a disk would not take, or that was used in an invalid way: past its end,
    closed, from a forked child.
    """


class DifficultyIndexError(HfZeroError, ValueError):
    """Difficulties of samples that are missing, damaged, not numbers, or of other data."""


class KernelError(HfZeroError, ValueError):
    """Tensors or numbers that a host kernel does not support: a device, dtype, size or layout, or a
    missing native core.
    """
