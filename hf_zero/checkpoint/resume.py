"""Resume of a run by ``hf_zero.initialize(resume=...)``: the choice of the checkpoint, before there
is an engine, and the batch sizes that keep its number of samples a step on this number of ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hf_zero.checkpoint.failures import collective_try, decide_on_rank_0
from hf_zero.checkpoint.find import HUGGINGFACE, locate, newest_complete
from hf_zero.checkpoint.generations import kept_generations
from hf_zero.checkpoint.load_sharded import check, check_names
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.match import LoadTarget
from hf_zero.checkpoint.reader import recognize
from hf_zero.checkpoint.save_sharded import parallel_sizes
from hf_zero.checkpoint.storage import AnyPath, as_path, place_of
from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import ACCUMULATION, MICRO, TOTAL
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.logging import counted, log_rank0

LATEST = "latest"  # value of ``resume``: the newest one in ``checkpoint.folder``


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from: its run's folder, its tag, and what its manifest says
    about the batch of a step and about ranks. ``in_memory``: the folder is one in memory, with its
    ``marks``; ``find_another`` then finds the one to resume from in its place.
    """

    directory: str
    tag: str
    batch: dict[str, int]
    world: dict[str, int]
    in_memory: bool = False
    marks: Sequence[object] = field(default=(), repr=False, compare=False)
    find_another: Callable[[], Resumed | None] | None = field(default=None, compare=False)

    def check_sizes(self, config: ZeroConfig, dims: ParallelDims) -> None:
        """Raise ConfigError if ``config`` and ``dims`` spread the model or its sequences over other
        numbers of ranks than the save.
        """
        sizes = parallel_sizes(config, dims)
        changed = [a for a in sizes if a in self.world and self.world[a] != sizes[a]]
        if changed:
            changes = ", ".join(f"{axis} {self.world[axis]}, now {sizes[axis]}" for axis in changed)
            raise ConfigError(
                f"resume: {self} was saved with other parallel sizes ({changes}); configure those "
                "of the save, or leave resume out and call engine.load_checkpoint(), which takes "
                "any"
            )

    def fitting(self, target: LoadTarget) -> Resumed:
        """Return this checkpoint, if it fits ``target``; in place of a generation in memory of
        another model, which is logged, another one to resume from, which is to be planned for.
        Raises CheckpointError on all ranks if there is none, or what is found does not fit.
        """
        if self.find_another is not None:
            try:
                self._try(partial(check_names, target, self.directory, self.tag))
            except CheckpointError as error:
                another = self.find_another()
                if another is None:
                    raise
                log_rank0(f"resume: {self} in memory is skipped: {error}", logging.WARNING)
                return another
        self._try(partial(check, target, self.directory, self.tag, in_memory=self.in_memory))
        return self

    def _try(self, check: Callable[[], None]) -> None:
        collective_try(get_world_group(), check, self.directory, "Nothing was loaded.")

    def keep_batch(self, config: ZeroConfig, readers: int) -> ZeroConfig:
        """Return ``config`` with a number of micro-batches that leaves a step the samples of the
        save on ``readers`` data-parallel ranks. Raises ConfigError if none does, and if the
        configuration names another number of samples.
        """
        saved = self.batch
        if not saved or (config.elasticity or {}).get("enabled"):
            return config
        samples, before = saved["samples"], saved["readers"]
        written = config.train_batch_size
        if written is None and readers == before:
            micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
            written = None if micro is None else micro * (steps or 1) * readers
        if written not in (None, samples):
            raise ConfigError(
                f"resume: {self} was saved with steps of {samples} samples, and the configuration "
                f"has {written}; write {TOTAL}: {samples}, or leave resume out and call "
                "engine.load_checkpoint(), which takes any"
            )
        if readers == before:
            return config
        micro = config.train_micro_batch_size_per_gpu or _fitting(
            saved, readers, config.gradient_accumulation_steps
        )
        steps = micro_batches(saved, micro, readers, str(self))
        return config.override(
            {TOTAL: samples, MICRO: micro, ACCUMULATION: steps}, f"resume of {self}"
        )

    def __str__(self) -> str:
        return f"{self.directory}/{self.tag}"


def micro_batches(
    saved: dict[str, int], micro: int, readers: int, source: str, key: str = MICRO
) -> int:
    """Return the number of micro-batches of ``micro`` samples that a step has on ``readers``
    data-parallel ranks, so that it keeps the samples of ``saved`` (``batch`` of the manifest).

    Raises ConfigError if they do not divide, naming the values of ``key`` that do.
    """
    samples, before = saved["samples"], saved["readers"]
    steps, remainder = divmod(samples, micro * readers)
    if remainder:
        raise ConfigError(
            f"resume: {source} was saved with steps of {samples} samples by "
            f"{counted(before, 'data-parallel rank')}, which micro-batches of {micro} on "
            f"{counted(readers, 'rank')} do not make; {_remedy(samples, readers, key)}"
        )
    log_rank0(
        f"resume on {counted(readers, 'data-parallel rank')}, {before} before: a step keeps its "
        f"{samples} samples, in {counted(steps, 'micro-batch', 'micro-batches')} of {micro} a rank"
    )
    return steps


def _fitting(saved: dict[str, int], readers: int, steps: int | None) -> int:
    """Return the samples of a micro-batch where the configuration leaves them open: those of
    ``steps`` micro-batches, else the most that divide a rank's share of a step and are no more
    than before, so that the memory suffices.
    """
    share, remainder = divmod(saved["samples"], readers)
    if remainder:
        return saved["micro_batch"]
    if steps is not None and share % steps == 0:
        return share // steps
    return max(size for size in range(1, saved["micro_batch"] + 1) if share % size == 0)


def _remedy(samples: int, readers: int, key: str) -> str:
    share, remainder = divmod(samples, readers)
    if remainder:
        fitting = [ranks for ranks in range(1, samples + 1) if samples % ranks == 0]
        near = sorted(sorted(fitting, key=lambda ranks: abs(ranks - readers))[:4])
        return f"start {' or '.join(map(str, near))} of them"
    fitting = [micro for micro in range(1, share + 1) if share % micro == 0]
    return f"write {key}: {' or '.join(map(str, fitting[-4:]))}"


def find_resumed(
    resume: str | os.PathLike[str], config: ZeroConfig, skipped: tuple[str, ...] = ()
) -> Resumed | None:
    """Return the checkpoint to resume from in the folder ``resume`` (:func:`newest_complete`), or
    in ``checkpoint.folder`` of the configuration for "latest", or a newer one in the memory of the
    hosts; None, with a line in the log (a warning for a folder that ``resume`` names), if there is
    none. If ``resume`` is a checkpoint itself, also one of another program, return that. The saves
    ``skipped`` into memory are left out. Collective.

    Raises ConfigError without a folder or for a value that is none, and CheckpointError if all
    checkpoints there are damaged and no generation in memory is whole.
    """
    if not isinstance(resume, (str, os.PathLike)):
        raise ConfigError(
            f"resume={resume!r} is neither a folder nor {LATEST!r}; write resume={LATEST!r}"
        )
    folder = config.checkpoint.folder if resume == LATEST else os.fspath(resume)
    in_memory = kept_generations().are_kept(config)
    if not folder and not in_memory:
        raise ConfigError(
            f"resume={LATEST!r} takes the newest checkpoint of the run's folder, and none is "
            'configured; write "checkpoint": {"folder": "runs/a"}, or pass resume="runs/a"'
        )

    def choose() -> Resumed | None:
        complete = newest_complete(as_path(folder)) if folder else None
        return complete and _resumed(*complete)

    chosen: Resumed | None = None
    damage: CheckpointError | None = None
    try:
        chosen = decide_on_rank_0(get_world_group(), choose)
    except CheckpointError as error:
        if not in_memory:
            raise
        log_rank0(f"resume: {error}; looking in the memory of the hosts", logging.WARNING)
        damage = error
    on_disk = chosen and place_of(locate(chosen.directory, chosen.tag))
    if on_disk is None or on_disk != place_of(folder):
        directory, tag = (None, None) if chosen is None else (chosen.directory, chosen.tag)
        checkpoint = kept_generations().newest(config, directory, tag, folder or None, skipped)
        if checkpoint is not None and checkpoint.tag is not None:
            newest = _resumed(checkpoint.directory, checkpoint.tag)
            find_another = partial(find_resumed, resume, config, (*skipped, checkpoint.save_id))
            return replace(
                newest, in_memory=True, marks=checkpoint.marks, find_another=find_another
            )
    if damage is not None:
        raise damage
    if chosen is None and not skipped:
        where = [folder] if folder else []
        where += ["the memory of the hosts"] if in_memory else []
        weights = bool(folder) and recognize(as_path(folder)) == HUGGINGFACE
        log_rank0(
            f"resume: {folder} holds weights without training state; starting from scratch (pass "
            "it to from_pretrained to start from these weights)"
            if weights
            else f"resume: there is no checkpoint in {' or '.join(where)}; starting from scratch",
            logging.INFO if resume == LATEST else logging.WARNING,
        )
    return chosen


def _resumed(directory: AnyPath, tag: str) -> Resumed:
    folder = locate(directory, tag)
    if not (folder / MANIFEST_NAME).is_file():  # of another program
        return Resumed(str(directory), tag, {}, {})
    manifest = read_manifest(folder / MANIFEST_NAME)
    return Resumed(str(directory), tag, manifest.batch, manifest.world)
