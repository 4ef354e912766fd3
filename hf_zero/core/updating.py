"""From reduced gradients to new parameters: the norm, the update of what is on the device and of
what is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.core.answers import Counters
from hf_zero.core.flat import Flat
from hf_zero.core.grads import GradientReducer
from hf_zero.core.hooks import Hooks
from hf_zero.core.losses import Losses
from hf_zero.core.materialize import ways_back
from hf_zero.core.norm import squared_norm
from hf_zero.core.precision import LossScaler
from hf_zero.core.sanity import SanityChecks
from hf_zero.core.schedule import Schedule
from hf_zero.core.trouble import failed_writes, refuse_half_done
from hf_zero.core.unit import Unit
from hf_zero.core.update import Updater
from hf_zero.core.usage import Usage
from hf_zero.distributed.mesh import Mesh
from hf_zero.logs import logger
from hf_zero.spans import span
from hf_zero.storage.placement import Chunk, Placement, room_beside_a_step
from hf_zero.storage.states import MASTER


class Updating:
    """Methods of :class:`hf_zero.core.engine.Engine` that change parameters."""

    config: ZeroConfig
    units: list[Unit]
    flats: list[Flat]
    mesh: Mesh
    device: torch.device
    schedule: Schedule
    scaler: LossScaler
    counters: Counters
    bound: Any
    updater: Updater | None
    max_norm: float
    global_rank: int
    _training: list[Flat]
    _hooks: Hooks
    _reducer: GradientReducer
    _usage: Usage
    _losses: Losses
    _placement: Placement
    _norm: torch.Tensor | None
    _sanity: SanityChecks
    # the engine itself reads and writes the optimizer's state now: nothing has to be waited for
    updates_state = False

    @contextmanager
    def _updating_state(self) -> Iterator[None]:
        self.updates_state = True
        try:
            yield
        finally:
            self.updates_state = False

    def _failed_writes(self) -> str:
        return failed_writes(self._placement, self.updater, self.schedule, self.mesh)

    def _update_early(self, unit: Unit) -> None:
        """The gradients of ``unit`` are here, and nothing can forbid its update any more."""
        assert self.updater is not None
        if unit.offloaded:
            unit.take_user_writes()
            with self._updating_state():
                self.updater.start_early(
                    self.updater.early or self.bound.begin(1.0, self.counters.global_steps), unit
                )

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the gradient that the next step will use, before clipping, loss scale
        removed; 0.0 without one (collective).
        """
        self._hooks.take_in_unannounced()
        self._reducer.reduce_windows()
        if not any(flat.reduced for flat in self._training):
            return 0.0
        total = self._squares()
        self.mesh.shard.all_reduce(total, "gradient norm").wait()
        return float(total.sqrt()) / self.scaler.scale

    def _squares(self) -> torch.Tensor:
        return squared_norm(self._training, self.device, self.config.kernels)

    def _update(self) -> bool:
        """One optimizer step from the reduced gradients; True where an fp16 overflow forbade it."""
        assert self.bound is not None
        total = self._usage.agree(self._squares(), self.counters.global_steps)
        scale, limit = self.scaler.scale, self.max_norm
        self._norm = total.sqrt() / scale
        if self._losses.may_overflow and not bool(torch.isfinite(total)):
            return True
        if not self._losses.may_overflow:
            self._sanity.on_norm(self._norm, self.counters.global_steps + 1)
        divisor = None
        if limit > 0.0:
            divisor = scale * ((self._norm + 1e-6) / limit).clamp(min=1.0)
        elif scale != 1.0:
            divisor = torch.full((), scale, device=self.device)
        with self.schedule.writing(), self._updating_state():  # in fp32 the masters are the shards
            self.take_user_writes()
            with span("update", "parameters on the device"):
                written = self.bound.step(divisor, shards=self._shards_to_write())
            if self.updater is not None:
                update = self.updater.early or self.bound.begin(
                    1.0 if divisor is None else float(divisor), self.counters.global_steps
                )
                self.updater.start(update)
        self._refresh([flat for flat in self.flats if flat.states is None], self.flats, written)
        return False

    @torch.no_grad()
    def write_gradient(self, flat: Flat, name: str, value: torch.Tensor | None) -> None:
        """What ``parameter.grad = value`` does between a backward and the step: every rank passes
        the whole averaged gradient, or None.

        No communication: each rank keeps its part, and a parameter for which all ranks have None is
        left as it is by the step.
        """
        if self.updater is not None and flat.unit in self.updater.updated_early:
            refuse_half_done(self.updater, f"writing {name}.grad")
        self._reducer.arrive()
        flat.wait_for_update()
        flat.write_gradient(
            name, value, self.scaler.scale * self._reducer.unreduced, self.scaler.scale
        )

    def take_user_writes(self) -> None:
        """Take what the script has written to whole parameters over into shards and master
        weights.
        """
        for unit in self.units:
            if self.updater is not None and unit in self.updater.updated_early:
                for name in (name for flat in unit.trainable for name in flat.user_writes.names()):
                    refuse_half_done(self.updater, f"a write to {name}")
            unit.take_user_writes()

    def _shards_to_write(self) -> dict[str, torch.Tensor]:
        """Shards that a kernel of the optimizer can write while it has the new masters in
        registers, by key of their flat.
        """
        if not self.bound.takes_shards():
            return {}
        here = [
            flat
            for flat in self._training
            if flat.states is None and flat.has_own_master and not flat.is_away
        ]
        return {flat.key: flat.shard_to_fill() for flat in here}

    @torch.no_grad()
    def refresh_params(self, flats: Sequence[Flat] | None = None) -> None:
        """Bring parameters up to date with the masters (collective): cast into shards; gather
        where they are whole.
        """
        chosen = self.flats if flats is None else list(flats)
        self._refresh(chosen, chosen)

    def _refresh(
        self, stale: Sequence[Flat], chosen: Sequence[Flat], written: Set[str] = frozenset()
    ) -> None:
        """Cast the masters of ``stale`` into their shards, and gather them where they are whole;
        and units among ``chosen`` that are pinned.

        The shards of flats whose keys are in ``written`` are up to date already.
        """
        with self.schedule.writing(), span("update", "shards in compute dtype"):
            for flat in stale:
                master = flat.master
                if master is not None and flat.key not in written:
                    flat.store_shard(master)
        handles = []
        for flat in stale:
            if not flat.sharded and flat.layout.shards > 1:
                handles.append(
                    self.mesh.shard.all_gather([(flat.full, flat.shard)], f"updated {flat.key}")
                )
        with span("wait_all_gather", "updated parameters"):
            for handle in handles:
                handle.wait()
        resident = frozenset(self.schedule.resident)
        for unit in dict.fromkeys(flat.unit for flat in chosen):
            if unit.index in resident:
                # whole across the step on every rank: its values are those of before
                unit.launch_gather()
                unit.finish_gather()
            else:
                # Here by a graph that this rank has not dropped yet, which keeps the values of
                # before; other ranks may have none.
                unit.release(keep_views=True)

    def _bring_back_what_fits(self) -> None:
        """After the first step: keep the state of those units on the device that come first and
        for which it has room (collective).
        """
        assert self.updater is not None
        self._placement.measured()
        self.updater.finish()
        chunks = [
            Chunk(flat.key, flat.owned[1] - flat.owned[0], flat.dtype, True)
            for flat in self._training
            if flat.states is not None
        ]
        names = {name for flat in self._training for name in self.bound.tensors(flat)} - {MASTER}
        room = min(
            self.mesh.all_gather_object(room_beside_a_step(self.device), "room on the device")
        )
        chosen = self._placement.fitting(chunks, len(names), room)
        self.bound.bring_back(
            ways_back([flat for flat in self._training if flat.key in chosen], self.device)
        )
        self.updater.refresh()
        if self.global_rank == 0:
            logger.info(
                "offload ratio auto: %d of %d flats fit on the device beside the "
                "first step and stay there",
                len(chosen),
                len(chunks),
            )
