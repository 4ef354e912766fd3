"""Contexts in which parameters are whole on every rank, for scripts to read and write. For one that
is cut by tensor or expert parallelism, "whole" means this rank's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_zero.distributed import process_group, world_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.logging import listed, logger
from hf_zero.zero.access.full import engine_of
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, flat_of, owner_of
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.layout.sharding import sharding_of


def _flatten(params: Any) -> list[torch.Tensor]:
    """Return the tensors in ``params``. Raises PartitionError for what is no parameter."""
    if params is None:
        return []
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, dict):
        params = params.values()
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise PartitionError(
            f"GatheredParameters was given {params!r:.80}; pass parameters, as those of "
            "model.parameters(), or a module"
        )
    return [tensor for item in params for tensor in _flatten(item)]


class GatheredParameters:
    """Context in which ``params`` are whole on every rank, so that scripts can read them.

    Args:
        params: a parameter, an iterable of them (None entries are skipped), or a module.
        modifier_rank: the global rank whose changes count: on exit, all ranks and the master
            weights take its values. With None, all ranks must write the same values: the exit
            compares them if there are any, and raises RankMismatchError on all ranks if they
            differ; one that alone has written raises it.
        fwd_module: accepted for scripts written for DeepSpeed, and ignored.
        enabled: False makes this a context without effect.

    All ranks must enter and leave together. Parameters that no engine owns are already whole; with
    a modifier rank they are broadcast, too. Of parameters that tensor or expert parallelism splits,
    each rank sees its own part, and a modifier rank raises PartitionError. Contexts can be nested.
    You can compute a loss from the parameters inside, and call its backward outside. If an
    exception leaves the context, writes inside it reach no other rank; a warning names them.
    """

    def __init__(
        self,
        params: object,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        del fwd_module
        self._params = _flatten(params) if enabled else []
        self._modifier = modifier_rank
        self._gathered = ExitStack()
        self._released: list[FlatBuffer] = []  # sharded ones that the exit releases
        self._watched: list[FlatBuffer] = []  # those whose writes count in this context
        self._compares = modifier_rank is None
        if modifier_rank not in (None, *range(process_group.get_world_size())):
            raise PartitionError(
                f"modifier_rank {modifier_rank} does not exist among "
                f"{process_group.get_world_size()} ranks; pass one of them or None"
            )
        if modifier_rank is not None:
            self._refuse_parts(modifier_rank)

    def _refuse_parts(self, modifier: int) -> None:
        groups = get_parallel()
        for parameter in self._params:
            axes = [a for a in sharding_of(parameter).axes if groups and groups.dims.size(a) > 1]
            if axes:
                raise PartitionError(
                    f"{name_of(parameter)} is cut over ranks by {axes[0]} parallelism, and "
                    f"modifier_rank = {modifier} would put that rank's part in the place of all "
                    "others; let each rank write its own part inside "
                    "hf_zero.summon_full_params(model, writeback=True), or give the whole tensor "
                    "to model.load_state_dict"
                )

    def __enter__(self) -> GatheredParameters:
        flats = [flat for flat in map(owner_of, self._params) if flat is not None]
        units = {
            unit_of(flat): engine_of(flat) for flat in sorted(flats, key=lambda flat: flat.index)
        }
        for engine in dict.fromkeys(units.values()):
            if engine.changes.parameters_away:
                engine.changes.refuse("GatheredParameters")
            if self._modifier is not None:
                engine.changes.refuse_until_step("GatheredParameters with a modifier_rank")
        if not any(unit.guard.watched for unit in units):
            for engine in dict.fromkeys(units.values()):
                engine.optimizer_step.take_member_writes()
        self._released, self._watched = [], []
        # ``__exit__`` does not run after an exception here
        with ExitStack() as entered:
            for unit, engine in units.items():
                watched = unit.guard.watched
                entered.enter_context(engine.sharded_model.gathered(unit))
                entered.callback(engine.schedule.shards.end_asking)
                if not watched:
                    unit.take_user_writes()  # writes of a forward, not of this context
                    self._released += unit.sharded_flats
                    self._watched += unit.flats
                if not watched or self._modifier is not None:  # else the outer context keeps them
                    entered.callback(unit.drop_user_writes)
            self._gathered.push(entered.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        with self._gathered:
            if exc[0] is not None:  # other ranks may not be here: nothing is sent
                written = [name for flat in self._watched for name in flat.user_writes.names()]
                if written:
                    logger.warning(
                        "%s: written inside GatheredParameters before an exception left it: the "
                        "values are lost, or this rank's alone; write them again on all ranks",
                        listed(written, 6),
                    )
                return
            self._refuse_other_shapes()
            if self._modifier is not None:
                self.keep()
                self.warn_of_writes(
                    "GatheredParameters of other parameters",
                    "give it every parameter that is written",
                    self._params,
                )
            elif self._compares:
                self._keep_equal_writes()

    def leave_writes(self) -> None:
        """Let the exit keep no writes of its own, nor compare any: the caller does."""
        self._compares = False

    def keep_without_messages(self) -> None:
        """Keep this rank's writes, as :meth:`keep` does, also where an exception leaves the context
        on this rank alone, of which no warning tells then.
        """
        self.keep()
        self._watched = []

    @torch.no_grad()
    def _keep_equal_writes(self) -> None:
        """Copy writes that are equal on all ranks into the shards and the master weights. A rank
        that has written nothing sends nothing.

        Raises RankMismatchError if ranks have written other parameters or values.
        """
        given = {id(parameter): parameter for parameter in self._params}
        written: dict[Any, list[torch.Tensor]] = {}
        for flat in self._watched:
            for name in flat.user_writes.names():
                if id(parameter := flat.parameters[name]) in given:
                    flat.refuse_changed(name)
                    written.setdefault(engine_of(flat), []).append(parameter)
        for engine, parameters in written.items():
            names = listed([name_of(parameter) for parameter in parameters], 6)
            digest = hashlib.sha256(repr([name_of(p) for p in parameters]).encode())
            for whole in parameters:
                if not sharding_of(whole).axes:  # ranks have parts of others
                    values = whole.detach().contiguous().cpu().view(-1).view(torch.uint8)
                    digest.update(values.numpy().tobytes())
            what = f"write to {names} inside GatheredParameters(modifier_rank=None)"
            if not engine.mesh.equal_on_all(what, int(digest.hexdigest()[:15], 16)):
                raise RankMismatchError(
                    f"{names}: rank {engine.global_rank} has written values inside "
                    "GatheredParameters(modifier_rank=None) that other ranks have not; write the "
                    "same values on all ranks, or pass modifier_rank=0 and write on rank 0"
                )
            for whole in parameters:
                if flat_of(whole).sharded:
                    self._keep(whole, None)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy writes into the shards and the master weights: the modifier rank's values, or
        without one each rank's own part. Raises PartitionError before any is kept.
        """
        for parameter in self._params:
            if (flat := owner_of(parameter)) is not None:
                flat.refuse_to_store(name_of(parameter))
        for parameter in self._params:
            self._keep(parameter, self._modifier)

    def warn_of_writes(self, where: str, remedy: str, kept: Iterable[torch.Tensor] = ()) -> None:
        """Warn of writes to sharded parameters other than ``kept``, which are dropped at the exit
        of this context, ``where``.
        """
        ids = {*map(id, kept)}
        written = [
            name
            for flat in self._released
            for name in flat.user_writes.names()
            if id(flat.parameters[name]) not in ids
        ]
        if written:
            logger.warning(
                "%s: written inside %s, which drops it for sharded parameters; %s",
                listed(written, 6),
                where,
                remedy,
            )

    def _refuse_other_shapes(self) -> None:
        for parameter in self._params:
            flat = owner_of(parameter)
            if (
                flat is not None
                and tuple(parameter.shape) != flat.layout.by_name[name_of(parameter)].shape
            ):
                got, view = tuple(parameter.shape), flat.views[name_of(parameter)]
                with torch.no_grad():
                    parameter.data = view
                raise PartitionError(
                    f"{name_of(parameter)} of shape {tuple(view.shape)} was given data of shape "
                    f"{got} inside GatheredParameters, but its place in the shards is fixed; put a "
                    "new nn.Parameter into the module before hf_zero.initialize"
                )

    def _keep(self, parameter: torch.Tensor, modifier: int | None) -> None:
        flat = owner_of(parameter)
        if flat is None:
            if parameter.is_meta or modifier is None:
                return
            values = parameter.data.contiguous()
            world_group.broadcast(values, modifier)
            if values.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(values)
            return
        name = name_of(parameter)
        flat.refuse_changed(name)
        engine_of(flat).changes.refuse_until_step(f"a write to {name}")
        view = flat.views[name]
        if parameter.data_ptr() != view.data_ptr() and parameter.numel():
            view.copy_(parameter.data)  # another tensor was assigned to parameter.data
            parameter.data = view
        group = flat.mesh.group
        if modifier is not None and group is not None:
            # a part that the modifier does not have is taken from the first rank that has it
            group.broadcast(view, modifier if modifier in group.ranks else group.ranks[0])
        with engine_of(flat).schedule.shards.writing():
            flat.store_gathered(name)


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Context in which all parameters of ``model`` (an engine, a model, or a part of one) are whole
    on every rank. Collective.

    Forwards inside gather nothing, so ranks may run different numbers of them, as in generation for
    reinforcement learning. With ``writeback`` each rank keeps the writes to its own shards, also
    of a context that an exception leaves, so all ranks must write the same values. Without it,
    writes to sharded parameters are lost, with a warning.
    """
    with GatheredParameters(model) as gathered:
        gathered.leave_writes()
        try:
            yield
        finally:
            if writeback:
                gathered.keep_without_messages()
        if not writeback:
            gathered.warn_of_writes("summon_full_params", "pass writeback=True to keep it")
