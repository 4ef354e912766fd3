"""Load: every rank reads the byte ranges that it owns, whatever the number of ranks and the stage
at the save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from hf_zero.checkpoint import find, run_state
from hf_zero.checkpoint.copy_ranges import CopyRange, copy_ranges
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.find import complete_tags_beside
from hf_zero.checkpoint.manifest import MANIFEST_NAME, MASTER, RNG, GroupEntry, Manifest, class_name
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.match import LoadTarget, match, match_names
from hf_zero.checkpoint.match_schedule import scheduled_settings
from hf_zero.checkpoint.progress import Tick, progress_bar
from hf_zero.checkpoint.random_generators import set_rng_state
from hf_zero.checkpoint.reader import Checkpoint, open_checkpoint
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.checkpoint.tensorfile import TensorReader
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, in_units, listed, log_rank0
from hf_zero.optim.group_scalars import ParameterScalars
from hf_zero.optim.whole_tensor_state import TensorsByParameter
from hf_zero.zero.layout.whole_names import persistent_buffers
from hf_zero.zero.state_entries import StateEntry, StateSource, transfer

if TYPE_CHECKING:
    from hf_zero.zero.layout.flat_buffer import FlatBuffer

Read = TypeVar("Read")


class VerifyLevel(Enum):
    """What a load compares with the hashes in the manifest: nothing; each block that it reads; or,
    before it changes the engine, all files as well, divided among the ranks.
    """

    NOTHING = "nothing"
    BLOCKS = "blocks"
    FILES = "files"


@dataclass(frozen=True)
class LoadOptions:
    """The parts of a checkpoint that :func:`load` loads, and what it checks. ``optimizer`` and
    ``schedule`` are False with ``module_only``.
    """

    strict: bool
    optimizer: bool
    schedule: bool
    module_only: bool
    rng: bool
    data_position: bool
    verify: VerifyLevel


def load(
    engine: SavedEngine,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    verify: bool | None = None,
    load_rng: bool = False,
    load_loader: bool = False,
    in_memory: bool = False,
) -> tuple[str, dict[str, object]]:
    """Load ``<directory>/<tag>`` into ``engine``; return that folder and the client state.
    Collective.

    Args:
        tag: by default the one that ``latest`` names.
        load_module_strict: refuse a checkpoint that lacks a parameter of the model or has one that
            the model lacks; else load what both have.
        load_optimizer_states: also load moments, step counts, hyper-parameters and the fp16 loss
            scale; else those of the engine stay.
        load_lr_scheduler_states: also load the schedule, if the engine has one and one was saved,
            with what it has written into the optimizer's groups (learning rates).
        load_module_only: load the model's weights and buffers alone; counters stay as they are, and
            so do parameters of the optimizer outside the model, as in DeepSpeed.
        verify: None: check block hashes while reading, unless ``in_memory`` or
            ``checkpoint.verify`` of the configuration turns that off. True: also hash every
            file, divided among the ranks, before modifying the engine; ``in_memory`` only check
            block hashes, since the files have been compared already. False: no hashing. A
            checkpoint of an older release without block hashes is read without them.
        load_rng: restore this rank's random generators (torch, Python, NumPy), if the number of
            ranks equals that of the save.
        load_loader: put ``engine.training_dataloader`` at the saved place in the data.
        in_memory: the folder is that of a generation in memory: it may lack files that no rank of
            this host reads, and those that are there have been compared with their hashes.

    Raises:
        CheckpointError: on all ranks, if anything failed on one. What can be checked is checked
            before anything changes, but for the header of a file with only generators or the place
            in the data to read; if a file fails while it is read, the engine is partly loaded and
            must not train on.
    """
    started = time.perf_counter()
    engine.refuse_destroyed("load into")
    level = VerifyLevel.NOTHING
    if verify:
        level = VerifyLevel.BLOCKS if in_memory else VerifyLevel.FILES
    elif verify is None and engine.config.checkpoint.verify and not in_memory:
        level = VerifyLevel.BLOCKS
    options = LoadOptions(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only and engine.bound is not None,
        schedule=load_lr_scheduler_states and not load_module_only,
        module_only=load_module_only,
        rng=load_rng,
        data_position=load_loader,
        verify=level,
    )

    with ExitStack() as opened:

        def open_and_check() -> _RankLoad:
            target, folder = LoadTarget.of(engine, load_module_only), find.locate(directory, tag)
            hashes = level is not VerifyLevel.NOTHING
            checkpoint = _open(folder, target, hashes=hashes, sizes=not in_memory)
            opened.callback(checkpoint.close)
            return _RankLoad(engine, target, checkpoint, options)

        rank_load, seen = collective_try(
            engine.mesh.job,
            open_and_check,
            directory,
            "Nothing was loaded.",
            lambda load: (load.checkpoint.folder.name, load.manifest.save_id),
        )
        _check_same(seen, directory)
        folder, manifest = rank_load.checkpoint.folder, rank_load.manifest
        rank_load.apply()
    if engine.generations.exist or not load_module_only:
        step = manifest.counters.get("global_steps", -1)
        engine.generations.loaded(manifest.attempt, step, options.optimizer and not in_memory)
    log_rank0(
        f"loaded {folder}, {_origin(manifest)}: "
        f"{in_units(rank_load.nbytes)} on this rank in {time.perf_counter() - started:.2f} s"
    )
    return str(folder), rank_load.client_state


def _origin(manifest: Manifest) -> str:
    """Return the program that wrote the checkpoint or, for one of hf-zero, its ranks and stage."""
    writer = manifest.software.get("written_by")
    if writer:
        return f"written by {writer}"
    return f"of {counted(manifest.world['size'], 'rank')} at stage {manifest.stage}"


def _check_same(seen: list[tuple[str, str]], directory: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless all ranks have opened the same save. ``seen``, by rank: (name of
    the folder, save_id or "" for a checkpoint of another program).
    """
    if len({save_id or folder for folder, save_id in seen}) > 1:
        by_rank = listed(
            f"rank {rank} {folder} ({save_id[:8]})" for rank, (folder, save_id) in enumerate(seen)
        )
        raise CheckpointError(
            f"the ranks see different checkpoints in {directory}: {by_rank}; pass the same folder "
            "and tag on every rank, on storage that all ranks share. Nothing was loaded."
        )


def check(target: LoadTarget, directory: str, tag: str, *, in_memory: bool = False) -> None:
    """Raise CheckpointError if a load of ``<directory>/<tag>`` into an engine of ``target`` would
    refuse it; only headers and pickles are read. ``in_memory`` as in :func:`load`.
    """
    folder = find.locate(directory, tag)
    with _open(folder, target, hashes=False, sizes=not in_memory) as checkpoint:
        match(target, checkpoint, strict=True, loads_optimizer=True, loads_schedule=True)


def check_names(target: LoadTarget, directory: str, tag: str) -> None:
    """Raise CheckpointError if ``<directory>/<tag>`` is of another model than ``target``."""
    manifest = read_manifest(find.locate(directory, tag) / MANIFEST_NAME)
    match_names(target, manifest, f"checkpoint {tag}", strict=True)


def _open(folder: AnyPath, target: LoadTarget, *, hashes: bool, sizes: bool) -> Checkpoint:
    return _suggest_other_tags(
        folder, lambda: open_checkpoint(folder, target.grouped, hashes=hashes, sizes=sizes)
    )


def _suggest_other_tags(folder: AnyPath, action: Callable[[], Read]) -> Read:
    """Return ``action()``; its CheckpointError also names complete ones beside ``folder``."""
    try:
        return action()
    except CheckpointError as error:
        others = complete_tags_beside(folder)
        if not others:
            raise
        raise CheckpointError(
            f"{error}. Complete in {folder.parent}: {listed(reversed(others))}"
        ) from error


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two CPU tensors of one dtype are bitwise equal, so that NaN equals itself."""
    return torch.equal(
        *(
            each.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for each in (one, other)
        )
    )


class _RankLoad(StateSource):
    """One rank's part of a load: the source of the state. The constructor looks up and checks
    everything, :meth:`apply` changes the engine.
    """

    def __init__(
        self, engine: SavedEngine, target: LoadTarget, checkpoint: Checkpoint, options: LoadOptions
    ) -> None:
        self.engine, self.checkpoint, self.options = engine, checkpoint, options
        self.manifest = checkpoint.manifest
        self.match = match(
            target, checkpoint, options.strict, options.optimizer, options.schedule, warns=True
        )
        # the saved state of the optimizer, if it is loaded
        self.saved_optimizer = self.manifest.optimizer if options.optimizer else None
        self.client_state = checkpoint.client_state()
        # for each flat buffer, by kind, the ranges of its weights and of each optimizer state
        self.ranges: dict[FlatBuffer, dict[str, list[CopyRange]]] = {}
        self.nbytes = 0  # to read for the flat buffers
        for flat in engine.flats:
            start, stop = flat.owned
            weights = list(
                copy_ranges(self.manifest, flat.layout, start, stop, self.match.saved_names)
            )
            states = checkpoint.states(weights) if options.optimizer and flat.trainable else {}
            self.ranges[flat] = {MASTER: weights} | states
            for kind, ranges in self.ranges[flat].items():
                self.nbytes += checkpoint.nbytes(ranges, kind)
        saved = self.saved_optimizer.tensor_states if self.saved_optimizer else {}
        for name in engine.bound.state.tensor_state.names if saved and engine.bound else ():
            if self.match.saved_names.get(name) in saved:
                checkpoint.file(saved[self.match.saved_names[name]].file)
        self.buffers = self._read_buffers()
        if options.verify is VerifyLevel.FILES:
            files = checkpoint.hashed_files()
            checkpoint.verify(files[engine.global_rank :: engine.mesh.dims.world])
        self.tick: Tick | None = None

    def apply(self) -> None:
        """Read the state into the engine, and refresh what depends on it. Collective."""
        engine, options, folder = self.engine, self.options, self.checkpoint.folder
        lost = sorted(self.manifest.features.keys() - engine.feature_set.by_name.keys())
        if lost and not options.module_only:
            text = (
                f"{folder} has state of {listed(lost, 6)}, which this configuration leaves off: it "
                "is not loaded, and the next checkpoints lack it; switch it on to go on with it"
            )
            log_rank0(text, logging.WARNING)
        # all of the state, so that an engine whose last change was broken off is whole again
        replaces = options.strict and not options.module_only
        replaces &= options.optimizer or engine.bound is None
        with engine.changes.change(f"the load of {folder}", replaces=replaces):
            engine.changes.begin_load()
            shown = None if engine.global_rank == 0 else False
            with progress_bar(shown, self.nbytes, f"loading {folder}") as self.tick:
                partly = "The engine is partly loaded: load again before training on."
                read = partial(_suggest_other_tags, folder, self._read_state)
                collective_try(engine.mesh.job, read, folder, partly)
            engine.refresh_params()
            engine.drop_gradients()
            if not options.data_position and engine.training_dataloader is not None:
                engine.window_start.note(engine)
            engine.set_scale_on_optimizer()

    @torch.no_grad()
    def _read_state(self) -> None:
        saved = self.saved_optimizer
        self._load_buffers()
        if self.match.schedule is not None:
            self.engine.lr_scheduler.load_state_dict(self.match.schedule)
        if saved is not None:  # after the schedule: values that a script set on the groups prevail
            self._load_hyperparameters()
        elif self.match.schedule is not None:
            self._load_scheduled()
        transfer(self, self.engine, optimizer=saved is not None)
        if saved is not None:
            self._load_scaler()
            self._warn_of_dropped()
        if not self.options.module_only:
            for field in fields(self.engine.counters):
                if field.name in self.manifest.counters:
                    setattr(self.engine.counters, field.name, self.manifest.counters[field.name])
            self.engine.feature_set.load_state_dict(self.manifest.features)
        if self.options.data_position:
            run_state.restore(self.engine, self.manifest, self._file_of_this_rank())
        if self.options.rng:
            self._load_rng()

    def _read_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that differ from the model's, in their dtypes there.

        Raises CheckpointError for saved values that the model cannot take.
        """
        buffers = persistent_buffers(self.engine.module)
        changed, refused = dict[str, torch.Tensor](), []
        for name, saved_name in self.match.buffers.items():
            if name not in buffers:
                continue  # scales that are in a flat buffer now
            saved = self.checkpoint.buffer(saved_name)
            value = saved.to(buffers[name].dtype)
            if not (saved.is_floating_point() and value.is_floating_point()) and not _same_bits(
                value.to(saved.dtype), saved
            ):
                refused.append(name)  # floats into integers
            # Write changed values only: an expanded constant cannot be written.
            elif not _same_bits(buffers[name].cpu(), value):
                changed[name] = value
        self._refuse_buffers(refused)
        return changed

    def _load_buffers(self) -> None:
        if not self.buffers:
            return
        buffers, changed = persistent_buffers(self.engine.module), self.buffers.items()
        for name, value in changed:
            buffers[name].copy_(value)
        after = persistent_buffers(self.engine.module)  # every state_dict() may compute some
        self._refuse_buffers([n for n, v in changed if not _same_bits(after[n].cpu(), v)])

    def _refuse_buffers(self, names: Sequence[str]) -> None:
        if names:
            raise CheckpointError(
                f"{self.checkpoint.folder} has other values of {listed(names)}, which the model "
                "cannot take; build and quantize it as it was at the save"
            )

    def held(self, flat: FlatBuffer) -> Mapping[str, Collection[str]]:
        parameters, loadable = dict[str, set[str]](), {*self.match.saved_names, *self.match.buffers}
        for kind in self.ranges[flat]:
            parameters[kind] = loadable
            if kind != MASTER:  # the weights may be stored as SHARD, and no chunk lacks them
                lacking = [
                    stored
                    for stored in self.ranges[flat][MASTER]
                    if kind not in stored.flat.chunks[stored.chunk].tensors
                ]
                names = (self._names(flat, stored) for stored in lacking)
                parameters[kind] = loadable.difference(self._never_stepped, *names)
        return parameters

    @cached_property
    def _never_stepped(self) -> set[str]:
        """The parameters here that had made no step at the save."""
        saved = self.manifest.optimizer
        groups = () if saved is None else saved.groups
        never = frozenset[str]().union(*(group.never_stepped for group in groups))
        return {name for name, saved_name in self.match.saved_names.items() if saved_name in never}

    def _names(self, flat: FlatBuffer, stored: CopyRange) -> set[str]:
        """Return the parameters of ``flat`` with elements in ``stored``."""
        start = flat.owned[0] + stored.target
        return {piece.name for piece in list(flat.layout.pieces(start, start + stored.length))}

    def read(self, entries: Sequence[StateEntry], out: torch.Tensor) -> None:
        kind = entries[0].kind
        self.checkpoint.fill(out, self.ranges[entries[0].flat].get(kind, ()), kind, self.tick)
        for entry in entries:
            if kind == MASTER and entry.name in self.match.buffers:
                name = self.match.buffers[entry.name]
                self.checkpoint.read(name, entry.range[0], entry.part(out))

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, ParameterScalars]:
        saved = {
            name: group.numbers_of(name) for group in self._groups() for name in group.parameters
        }
        # one without a saved name was frozen or missing at the save
        saved_names = self.match.saved_names
        scalars = {name: saved.get(saved_names[name]) for name in parameters if name in saved_names}
        scalars |= dict.fromkeys(self._never_stepped & scalars.keys())
        optimizer, bound = self.saved_optimizer, self.engine.bound
        other = optimizer is not None and optimizer.class_name != class_name(bound.optimizer)
        if other and not bound.state.keeps("step"):
            # of classes with one update, those with moments in 8 bits may count steps
            for name, numbers in scalars.items():
                scalars[name] = numbers and {k: n for k, n in numbers.items() if k != "step"}
        return scalars

    def tensor_state(self, parameters: Mapping[str, nn.Parameter]) -> TensorsByParameter:
        saved_names, bound = self.match.saved_names, self.engine.bound
        return {
            name: self.checkpoint.tensor_states(saved_names[name])
            for name in bound.state.tensor_state.names
            if name in saved_names
        }

    def _groups(self) -> list[GroupEntry]:
        """Return the saved group of each group of the optimizer; [] if they were not paired."""
        if self.manifest.optimizer is None:
            return []
        return [self.manifest.optimizer.groups[at] for at in self.match.groups]

    def _load_hyperparameters(self) -> None:
        bound = self.engine.bound
        settings = [dict(group.hyperparameters) for group in self._groups()]
        if self.engine.lr_scheduler is not None and self.match.schedule is None:
            # a schedule that starts anew sets these, and some of torch's multiply their last value
            for values, live in zip(settings, bound.groups):
                values |= scheduled_settings(self.engine.lr_scheduler, live, values)
        bound.settings.load(settings)

    def _load_scheduled(self) -> None:
        """Write the settings of the loaded schedule into the groups of an optimizer that is not
        loaded: torch's schedules keep a part of their state there.
        """
        scheduler, bound, state = self.engine.lr_scheduler, self.engine.bound, self.match.schedule
        rates = (state or {}).get("_last_lr")
        if bound is None or not isinstance(rates, (list, tuple)):
            return  # schedules without it, as DeepSpeed's, write the groups as they are loaded
        saved = [group.hyperparameters for group in self._groups()] or [{}] * len(bound.groups)
        settings = [
            # another class of optimizer may have other settings
            {name: value for name, value in values.items() if name in live}
            for values, live in zip(saved, bound.groups, strict=True)
        ]
        bound.settings.load(
            [
                scheduled_settings(scheduler, values, live) | {"lr": rate}
                for values, live, rate in zip(settings, bound.groups, rates, strict=True)
            ]
        )

    def _warn_of_dropped(self) -> None:
        """Log which state of the checkpoint is dropped: that of parameters of the optimizer that
        are frozen now.
        """
        given = {id(parameter) for group in self.engine.group_parameters for parameter in group}
        saved_names, saved = self.match.saved_names, self.manifest.slots
        dropped = [
            name
            for flat in self.engine.flats
            if not flat.trainable
            for name, parameter in flat.parameters.items()
            if id(parameter) in given and name in saved_names and saved[saved_names[name]][0].states
        ]
        if dropped:
            text = (
                f"{self.checkpoint.folder} has optimizer state of {listed(dropped, 3)}, frozen "
                "here: it is dropped, and begins anew where they train again; to keep it, set "
                "requires_grad to True before the load, and freeze them after it"
            )
            log_rank0(text, logging.WARNING)

    def _load_scaler(self) -> None:
        precision, saved = self.engine.config.precision, self.manifest.scaler
        if saved is not None and precision == "fp16":
            scaler = self.engine.scaler
            if scaler.dynamic:
                scaler.load_state_dict(saved)
            elif saved["scale"] != scaler.scale:
                log_rank0(
                    f"{self.checkpoint.folder} has a loss scale of {saved['scale']:g}, which is "
                    f"not loaded: fp16.loss_scale keeps {scaler.scale:g}; set it to 0 for the "
                    "dynamic scale of the checkpoint",
                    logging.WARNING,
                )
        elif (self.manifest.precision == "fp16") != (precision == "fp16"):
            log_rank0(
                f"{self.checkpoint.folder} was saved in {self.manifest.precision}, this run is in "
                f"{precision}: the loss scale starts from its initial value"
            )

    def _file_of_this_rank(self) -> TensorReader | None:
        """Return the file that this rank saved; None if another number of ranks saved."""
        rank = self.engine.global_rank
        index = next((i for i, entry in enumerate(self.manifest.files) if entry.rank == rank), None)
        if self.manifest.world["size"] != self.engine.mesh.dims.world or index is None:
            return None
        return self.checkpoint.file(index)

    def _load_rng(self) -> None:
        file = self._file_of_this_rank()
        if file is None:
            text = (
                f"{self.checkpoint.folder} was saved by "
                f"{counted(self.manifest.world['size'], 'rank')}: the states of random generators "
                f"are not restored on {counted(self.engine.mesh.dims.world, 'rank')}, so that "
                "dropout draws other numbers"
            )
            log_rank0(text, logging.WARNING)
            return
        for kind in ("cpu", kinds.accelerator() or "cpu", "python", "numpy"):
            name = f"{RNG}{kind}"
            if name in file.entries:
                state = torch.empty(file.entries[name].numel, dtype=torch.uint8)
                file.read_into(name, 0, state)
                set_rng_state(kind, state)
