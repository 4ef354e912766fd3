"""Every error hf-zero raises on purpose.

Each message names what was wrong and what to do about it.
"""

from __future__ import annotations

from typing import Any

from hf_zero.distributed.uncaught import watch


class HfZeroError(Exception):
    """Base of all errors raised by hf-zero.

    One that ends a rank is reported in a few lines (``distributed/uncaught.py``).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        watch(HfZeroError)
        if issubclass(cls, MemoryError):  # whose constructor refuses classes of two bases
            return Exception.__new__(cls, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)


class ConfigError(HfZeroError, ValueError):
    """A configuration that cannot be used: an unknown key, a wrong type, values that contradict
    each other.
    """


class ReplacedKeyError(ConfigError, AssertionError):
    """A former key of a configuration beside the key that has taken its place."""


class NotBuiltError(HfZeroError, NotImplementedError):
    """A name or key that hf-zero knows but does not provide in this version."""


class ReleasedParameterError(HfZeroError, RuntimeError):
    """The values of a sharded parameter were read or written while its unit is not gathered."""


class PartitionError(HfZeroError, RuntimeError):
    """An operation that a partitioned model cannot support, such as changing dtype or
    requires_grad after initialize.
    """


class PipelineError(HfZeroError, RuntimeError):
    """What the engine of a pipeline cannot do, because a rank has a part of the model alone."""


class UnusedParameterError(PartitionError, AssertionError):
    """A parameter that trains and got no gradient, where the configuration forbids that."""


class UnreducedGradientsError(PartitionError, AssertionError):
    """A step, or another block of its kind, inside ``no_sync``, where gradients are not reduced."""


class UnmanagedWindowError(PartitionError, AssertionError):
    """A boundary of accumulation windows, said where every step ends one by itself."""


class UnscalableLossError(PartitionError, AssertionError):
    """A loss that ``engine.scale`` cannot scale."""


class UnsupportedOptimizerError(HfZeroError, TypeError, AssertionError):
    """An optimizer whose update is not element-wise, or whose existing state cannot be carried
    over.
    """


class RankMismatchError(HfZeroError, RuntimeError):
    """Ranks that ask for different collectives, or a rank that did not arrive in time."""


class VerificationError(HfZeroError, RuntimeError):
    """A model that is cut among ranks and computes other numbers than the whole one."""


class CheckpointError(HfZeroError, RuntimeError):
    """A checkpoint that is missing, damaged, of another format version or of another model."""


class TargetMismatchError(CheckpointError, AssertionError):
    """Ranks that want to save a checkpoint in different places, where the configuration forbids
    that.
    """


class NoModelFolderError(CheckpointError, ValueError):
    """A sharded checkpoint where a model folder is asked for; Transformers' loaders take it for
    what they raise there themselves.
    """


class DoesNotFitError(HfZeroError, MemoryError):
    """Training as configured needs more than there is of the device's memory, of the host's, or
    of a disk.
    """


class LaunchError(HfZeroError, RuntimeError):
    """Ranks that cannot be started or told apart: a hostfile, a filter or a launcher's variable
    that lacks or contradicts.
    """


class HostMemoryError(HfZeroError, MemoryError):
    """Memory of the host that offloading asked for and that is not there."""


class DiskSpaceError(HfZeroError, OSError):
    """Room on a disk that offloading asked for and that is not there; ``errno`` and ``filename``
    are set.
    """


class OffloadError(HfZeroError, RuntimeError):
    """Offloaded state that a disk would not take, or that was used in a way it cannot be: past
    its end, closed, from a forked child.
    """


class DifficultyIndexError(HfZeroError, ValueError):
    """Difficulties of samples that are missing, damaged, no numbers, or about other data."""


class KernelError(HfZeroError, ValueError):
    """Tensors or numbers that a host kernel cannot take: a device, dtype, size or layout, or a
    native core that is not there.
    """
