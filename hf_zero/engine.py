"""``hf_zero.Engine``: the training engine, with checkpoints that are written in the call or by a
thread while training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hf_zero import checkpoint
from hf_zero.checkpoint.background_saves import BackgroundSaves
from hf_zero.checkpoint.commit import SavesOfHost
from hf_zero.checkpoint.generations import Generations, kept_generations
from hf_zero.checkpoint.load_sharded import load
from hf_zero.checkpoint.run_state import SavedEngine, WindowStart
from hf_zero.checkpoint.save_sharded import save
from hf_zero.checkpoint.storage import as_path
from hf_zero.config.feature_rows import provided
from hf_zero.device.spans import span
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.logging import logger
from hf_zero.zero.access.full import safe_get_full_fp32_param
from hf_zero.zero.access.gathered_parameters import GatheredParameters
from hf_zero.zero.access.wholes import WeightBuckets
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter_views import forget
from hf_zero.zero.layout.walk import parameters_with


class Engine(SavedEngine):
    """A model under ZeRO, created by :func:`hf_zero.initialize`. Call it like the model.

    Pass the unscaled loss of one micro-batch on this rank to :meth:`backward`, or call
    ``loss.backward()``. The engine averages over the micro-batches of a step and over ranks, and
    scales for fp16. With ``shard_only`` it shards the model without training it: parameters keep
    their dtypes, and can be frozen and unfrozen.
    """

    resumed_from: str | None = None
    """The checkpoint that ``initialize(resume=...)`` has loaded."""

    client_state: Mapping[str, Any] = MappingProxyType({})
    """The user state in that checkpoint."""
    generations: Generations = Generations()
    """Its checkpoints beside those in its folder."""

    def _build(self, plan: EnginePlan, mesh: Mesh, installed: ExitStack) -> None:
        super()._build(plan, mesh, installed)
        self.background_saves = BackgroundSaves(mesh, self.schedule.shards, self.config.checkpoint)
        self.generations = kept_generations().of(self, plan, self.generations)
        self.window_start = WindowStart()
        self.save_log = provided("save_log", SavesOfHost)()

    def quiesce(self, what: str) -> None:
        self.wait_for_checkpoint(what)
        super().quiesce(what)

    def take_apart(self) -> dict[str, Any]:
        generations, folder = self.generations, self.measures.folder
        self.background_saves.close()
        self.save_log.close()
        generations.take_apart()
        kept = {"generations": generations, "folder": folder, "window_start": self.window_start}
        return super().take_apart() | kept

    def restore_parts(self, before: Mapping[str, Any]) -> None:
        super().restore_parts(before)
        self.window_start, folder = before["window_start"], before["folder"]
        self.measures.loaded(self, True, None if folder is None else str(folder))
        self.generations.continue_from(before["generations"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        raise PartitionError(
            "an engine cannot be copied, its process groups and threads are the ranks'; copy the "
            "model before initialize, or its weights: engine.state_dict()"
        )

    def _announce_to_ranks(self) -> None:
        if self.background_saves.saver is not None:
            self.background_saves.announce_failure()

    def step(self) -> None:
        """End an accumulation window: clip, update, step the scheduler. Inside a window: count the
        micro-batch.

        In fp16 a gradient that overflowed skips the update: weights, optimizer and scheduler stay
        as they are. Raises CheckpointError, on all ranks, if a save in the background has failed:
        the step is complete by then.
        """
        before = self.accumulation.updates
        was_broken = self.changes.broken
        try:
            with self.measures.step(self):
                super().step()
        except BaseException:
            if self.changes.broken != was_broken:
                self.generations.break_step()
            raise
        ends_window = self.accumulation.updates > before
        if ends_window and self.training_dataloader is not None:
            self.window_start.note(self)
        if ends_window and self.background_saves.saver is not None:
            self.background_saves.raise_failure()
        if ends_window and self.generations.exist:
            self.generations.end_step(self)

    def finish_update_in_backward(self) -> None:
        was_broken = self.changes.broken
        try:
            super().finish_update_in_backward()
        except BaseException:
            if self.changes.broken != was_broken:
                self.generations.break_step()
            raise

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures of the last step whose numbers have reached the host, by the names of
        ``hf_zero/measures/figures.py``; empty unless ``metrics.enabled``.
        """
        return self.measures.figures

    def trace(self, steps: int = 1, folder: str = "") -> None:
        """Trace the next ``steps`` optimizer steps of all ranks (collective); rank 0 then writes
        one file into ``folder``, gzipped, for Perfetto and chrome://tracing, and logs its name.
        Does nothing while a trace is under way. Raises ConfigError for less than one step, while
        another profiler runs, or if the folder cannot be made.
        """
        if steps < 1:
            raise ConfigError(f"trace(steps={steps!r}) traces nothing; pass 1 or more")
        self.measures.trace(self, steps, folder)

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Callable[[int], float] | Mapping[str, Callable[[int], float]]
    ) -> None:
        """Set the function ``schedule(step)`` that returns the difficulty of optimizer step
        ``step``, counted from 1, for a curriculum whose ``schedule_type`` is ``custom``; a mapping
        has functions by the names of metrics. The same on all ranks, before training and before a
        load. Raises ConfigError if no such curriculum is on.
        """
        provided("set_custom_schedule")(self.feature_set, schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[..., object]) -> None:
        """Have ``post_process_func(batch, state)`` make each batch of the loader of
        ``training_data=`` while samples are chosen by difficulty; ``state`` has
        ``curriculum_step``, the optimizer step of the batch, counted from 1, and
        ``current_difficulties`` by metric. Called in this process, on each rank. Raises
        ConfigError if no samples are chosen by difficulty.
        """
        provided("set_post_process")(self.feature_set, post_process_func)

    def iter_weights(
        self,
        bucket: str | int = "512MiB",
        dtype: str | torch.dtype | None = "bf16",
        names: str = "hf",
        adapters: str = "merged",
        rank0_only: bool = False,
        changed_only: bool = False,
    ) -> WeightBuckets:
        """Return the whole weights of this moment, to be sent to another program: an iterable of
        buckets, lists of (name, tensor on the device), each gathered while the one before is used.
        Making it and each loop over it are collective.

        Tensors are valid until the next bucket, on the stream that is current where a bucket is
        asked for. A loop raises PartitionError if weights have been written since this call;
        ``step`` of the result is the number of optimizer steps before it, ``tensors`` lists names,
        dtypes and shapes without a gather.

        Args:
            bucket: bytes of a bucket, a number or text such as "512MiB". At most two are in memory;
                a larger flat buffer is a bucket of its own.
            dtype: "bf16", "fp16", "fp32", or a torch dtype; None: each parameter's own. fp32
                selects the master weights.
            names: "hf": those of the bare Transformers model; "model": those of :attr:`module`,
                with adapters as they are.
            adapters: "merged": the active PEFT adapters merged into their weights; "apart": beside
                them, under the names of adapter files. Only with ``names="hf"``.
            rank0_only: other ranks take part and get no bucket.
            changed_only: leave out flat buffers that no step, load or script has changed since the
                last complete loop, if that had the same dtype, names and active adapters.

        Raises:
            ConfigError: an argument is none of these, or differs between ranks.
            PartitionError: the engine was destroyed.
        """
        stream: WeightBuckets = provided("weight_stream")(
            self, bucket, dtype, names, adapters, rank0_only, changed_only
        )
        return stream

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the consolidated model in its working precision to one file, from rank 0
        (collective).

        Always returns True.
        """
        checkpoint.save_whole(self, save_dir, save_filename, exclude_frozen_parameters)
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
        keep: int | None = None,
    ) -> bool:
        """Save model, optimizer, scheduler, counters and the place in the training data, sharded,
        into ``save_dir/tag`` (collective); see checkpoint/FORMAT.md. ``save_dir`` is by default
        ``checkpoint.folder`` of the configuration.

        ``blocking=False`` (None: ``checkpoint.async_save`` of the configuration decides) returns
        once the state is copied to host memory, and a thread writes it while training goes on; with
        ``checkpoint.staging_bytes``, once a part is, and updates wait for the copy of the rest. A
        failure is then raised on all ranks at the end of one of the next steps, by the next save or
        load, or by :meth:`wait_for_checkpoint`, whichever is first. The checkpoint appears when it
        is complete. ``keep``: number of checkpoints kept in ``save_dir`` whose tags differ only by
        their numbers; without a tag ``checkpoint.keep`` of the configuration is the default. Raises
        CheckpointError on all ranks if the save fails on one, and RankMismatchError on the others
        if a rank ends during a blocking save; earlier checkpoints stay.
        """
        save_dir = self._run_folder(save_dir, "save_checkpoint")
        self.changes.refuse_within("save_checkpoint()")
        self.changes.refuse("save_checkpoint()")
        if self.bound is not None:
            self.bound.members.check()
        self.take_user_writes()
        if keep is None and tag is None:
            keep = self.config.checkpoint.keep
        if self.window_is_open and self.global_rank == 0:
            logger.warning(
                "the save of %s is in the middle of an accumulation window: the gradients of its "
                "%d micro-batches so far are not saved, and a "
                "run that resumes repeats the whole window; save after the step that ends a window",
                save_dir,
                self.held_micro_batches,
            )
        self.wait_for_checkpoint(f"the save of {save_dir}")
        during = self.mesh.job.during("save")
        with torch.device("cpu"), during, span("save", str(tag or save_dir)):
            self.measures.saving(self, save_dir)
            in_background = self.config.checkpoint.async_save if blocking is None else not blocking
            saver = self.background_saves.get_saver() if in_background else None
            save(
                self,
                save_dir,
                tag,
                client_state,
                exclude_frozen_parameters=exclude_frozen_parameters,
                save_latest=save_latest,
                keep=keep,
                saver=saver,
                ready_file=None if saver is None else self.generations.ready_file(self, saver),
            )
            # after the save: client state that it refuses, generations in memory would refuse, too
            if self.generations.exist:
                noted = isinstance(client_state, Mapping) and self.global_rank == 0
                self.generations.end_save(save_dir, client_state if noted else None)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        verify: bool | None = None,
        load_rng: bool = False,
        load_loader: bool = False,
        **unused: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from ``load_dir`` on any number of ranks and any stage (collective); return (path,
        client_state). The path is None only under ``import deepspeed``, for a folder without a
        checkpoint.

        Values are compared with the hashes of their blocks, unless ``verify=False`` or
        ``checkpoint.verify`` of the configuration turns that off; ``verify=True`` checks the hashes
        of all files first, except of a generation in memory. ``load_rng`` restores this rank's
        random generators, too, and ``load_loader`` the place in the training data:
        ``initialize(resume=...)`` does both.
        ``load_dir`` is by default ``checkpoint.folder`` of the configuration, and may be a
        checkpoint itself, also one of FSDP or torch.distributed.checkpoint. Without a ``tag`` a
        newer generation in the memory of the hosts (``checkpoint.memory``) is loaded, in loads of
        everything, unless the engine has made a step: it then goes back to the checkpoint in
        ``load_dir``. After a step that was broken off it takes the newer generation again.
        """
        load_dir = self._run_folder(load_dir, "load_checkpoint")
        run: str | None = str(as_path(load_dir))
        if unused:
            raise PartitionError(
                f"load_checkpoint does not know {sorted(unused)}; drop these arguments"
            )
        self.changes.refuse_within("load_checkpoint()")
        if self.bound is not None:
            self.bound.members.writes.accept()
            self.bound.members.check()
        self.wait_for_checkpoint(f"the load of {load_dir}")
        if self.sharded_model.engine_flats.trainability_changed:
            if self.changes.unconfirmed is not None:
                self._end_window()
            self.changes.begin_load()
            self.rebuild_if_unfrozen(loads=True)
        with torch.device("cpu"), self.mesh.job.during("load"):
            resumes = load_optimizer_states and not load_module_only
            in_memory = False
            if self.generations.exist:
                chosen = self.generations.choose(self, load_dir, tag, load_module_strict, resumes)
                load_dir, tag, in_memory = chosen.directory, chosen.tag, chosen.in_memory
                if in_memory and str(as_path(load_dir)) == run:
                    run = None  # the folder was chosen before; its run is unknown
            self.measures.finish(self)
            with self.schedule.shards.writing():
                answer = load(
                    self,
                    load_dir,
                    tag,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                    verify=verify,
                    load_rng=load_rng,
                    load_loader=load_loader,
                    in_memory=in_memory,
                )
        if run == answer[0]:  # a checkpoint itself, without its run's folder
            run = str(as_path(run).absolute().parent)
        self.measures.loaded(self, not load_module_only, run)
        if self.generations.exist:
            self.generations.end_load(run, answer[1], resumes)
        return answer

    def _run_folder(self, given: str | os.PathLike[str] | None, who: str) -> str:
        folder = self.config.checkpoint.folder if given is None else given
        if folder is None or folder == "":
            raise ConfigError(
                f"{who}() was given no folder, and none is configured; pass one, or write "
                '"checkpoint": {"folder": "runs/a"}'
            )
        # what is no path is refused by name
        return os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else str(as_path(folder))

    def wait_for_checkpoint(self, who: str = "", below: str | None = None) -> None:
        """Return when no checkpoint is being written any more. Raises CheckpointError, on all
        ranks, if a save failed.

        ``who`` waits is logged if it takes time. ``below``: wait only for saves in this folder.
        Every rank must call it, or none.
        """
        if self.background_saves.saver is not None:
            self.background_saves.wait(who, below)

    def destroy(self, gather: bool = False) -> None:
        """Detach the engine from the model and free gradients and optimizer state. Idempotent.

        Waits for a checkpoint that is being written, and raises its error last. Whole parameters
        become plain ones. Sharded ones stay released until another ``initialize`` takes them over;
        ``gather=True`` (collective) makes them whole again.
        """
        with ExitStack() as ending:  # callbacks run from the last to the first
            ending.callback(super().destroy, gather)
            ending.callback(self.save_log.close)
            ending.callback(self._end_saves)

    @torch.no_grad()
    def destroy_and_restore(self) -> None:
        """Destroy the engine and leave its model whole on every rank, in its original dtypes, so
        that it can be trained, or sharded, again (collective).

        Trained values are taken from the fp32 master weights: a model trained further from them
        loses no precision.
        """
        whole: list[tuple[nn.Parameter, torch.Tensor]] = []
        for name, parameter in self.module.named_parameters():
            flat = owner_of(parameter)
            if flat is None:  # of a module that a script has added to the model since
                continue
            dtype = getattr(torch, self.sharded_model.param_dtypes[name])
            if flat.optimizer_shard.has_master:
                values = safe_get_full_fp32_param(parameter)
                assert values is not None  # master weights exist for every trainable parameter
            elif flat.sharded:
                with GatheredParameters([parameter]):
                    values = parameter.detach().clone()
            else:
                values = parameter.detach()
            whole.append((parameter, values.to(dtype)))
        self.destroy()
        for parameter, values in whole:
            forget(parameter)  # its sharding stays: the module still holds a part
            parameter.data = values

    def _end_saves(self) -> None:
        """Wait for the saves under way. The generations in memory stay if a save on disk fails, or
        if the state is half changed: a resume takes them.
        """
        failing, keep = None, bool(self.changes.broken)
        try:
            self.background_saves.close()
        except BaseException:
            failing, keep = False, True  # the save into memory under way is waited for
            raise
        finally:
            self.generations.close(failing, keep)


def engines_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Engine]:
    """Return the engines that shard parameters of ``model`` or ``optimizer``, each once."""
    flats = dict.fromkeys(map(owner_of, parameters_with(model, optimizer)))
    engines = [flat.engine_as(Engine) for flat in flats if flat is not None]
    return list({id(engine): engine for engine in engines if engine is not None}.values())


def release_holders(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Destroy the engines of ``model`` and of parameters of ``optimizer`` that train nothing. The
    parameters keep their layout, for another engine.

    These are shard-only engines, and those initialized without an optimizer: a model may first be
    used for inference, for example as a reference model, before it is trained.
    """
    for engine in engines_of(model, optimizer):
        if engine.bound is None:
            engine.destroy()
