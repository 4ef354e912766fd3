"""``torch.distributed.checkpoint.state_dict`` on the model of an engine: each rank gives and takes
the elements that it owns, without a gather.

[Note: parts instead of DTensors]
A rank owns a range of the elements of a flattened parameter, which begins and ends within a row: no
placement of a DTensor describes that without moving elements. So a state dict holds
:class:`TensorPart` in its place, which implements torch's protocol for tensors that name their own
chunks: the range as boxes of the whole tensor, at most two for each dimension. Checkpoints written
from it are those of any other program to torch, and parts read any checkpoint that torch reads.

``full_state_dict`` and submodules take torch's own way over the whole state dict.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.manifest import strip_wrappers
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed
from hf_zero.zero.access.wholes import version_of
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter import owner_of
from hf_zero.zero.layout.sharding import WholeNames, own_part, persistent_buffers, sharding_of

TARGET = "torch.distributed.checkpoint.state_dict"
States = dict[str, Any]


class TensorPart(torch.Tensor):
    """A rank's elements of one tensor, which has the whole tensor's shape.

    Attributes:
        local: the elements, 1-D.
        pieces: (offsets in the whole tensor, view of ``local``) of each box of them.
    """

    local: torch.Tensor
    pieces: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, place: tuple[tuple[int, ...], int, Box | None]
    ) -> TensorPart:
        shape, _, box = place
        whole = shape if box is None else box.whole
        made: TensorPart = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole, dtype=local.dtype, device=local.device
        )
        return made

    def __init__(self, local: torch.Tensor, place: tuple[tuple[int, ...], int, Box | None]):
        """``place``: shape of this rank's part along other axes, first element in it, its box."""
        self.local, self.place = local, place
        self.pieces = list(_pieces(local, *place))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"TensorPart({tuple(self.shape)}, {self.local.numel()} elements in {len(self.pieces)})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0]
        if func.overloadpacket is torch.ops.aten.new_empty and list(args[1]) == list(own.shape):
            return TensorPart(own.local.new_empty(own.local.shape, **(kwargs or {})), own.place)
        if func.overloadpacket not in COPIES:
            raise CheckpointError(
                f"{func} on a part of a parameter in a state dict; save and load it with "
                "torch.distributed.checkpoint, or ask for whole tensors with "
                "StateDictOptions(full_state_dict=True)"
            )
        return TensorPart(func(own.local, *args[1:], **(kwargs or {})), own.place)

    # ---- the protocol of torch.distributed.checkpoint ----

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), view.shape) for offsets, view in self.pieces
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(view for offsets, view in self.pieces if offsets == tuple(index.offset))


COPIES = {torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy}


def _pieces(
    local: torch.Tensor, shape: Sequence[int], start: int, box: Box | None
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes of :class:`TensorPart`: elements from ``start`` on of a part of ``shape``."""
    at = 0
    for offsets, sizes in _boxes(tuple(shape), start, start + local.numel()):
        view = local[at : at + math.prod(sizes)].view(sizes)
        at += view.numel()
        parts = [(offsets, view)]
        for dim, ranges in box.cuts if box is not None else ():
            parts = [each for part in parts for each in _within(*part, dim, ranges)]
        yield from parts


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that elements ``[start, stop)`` of the flattened tensor
    of ``shape`` form, in their order.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, first = divmod(start, row)
        if not first and stop - start >= row:
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(row, stop - index * row)
            for offsets, sizes in _boxes(shape[1:], first, end):
                yield (index, *offsets), (1, *sizes)
            start = index * row + end


def _within(
    offsets: tuple[int, ...], view: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes of ``view`` in the whole tensor, of which a part holds ``ranges`` of
    dimension ``dim``, end to end.
    """
    low, high, base = offsets[dim], offsets[dim] + view.shape[dim], 0
    for start, stop in ranges:
        first, last = max(low, base), min(high, base + stop - start)
        if first < last:
            place = (*offsets[:dim], start + first - base, *offsets[dim + 1 :])
            yield place, view.narrow(dim, first - low, last - first)
        base += stop - start


# ---- one engine ----


class _Own:
    """The elements of an engine's parameters on this rank, under their names in the model.
    ``on_host``: tensors are given in host memory, each copied there by itself.
    """

    def __init__(self, engine: Any, on_host: bool = False):
        self.engine, self._on_host = engine, on_host
        version_of(engine)  # updates are complete, and a script's writes are in the shards
        whole = WholeNames(engine.module)
        self.tied: dict[str, list[str]] = {}
        for tied, held in engine.aliases.items():
            self.tied.setdefault(held, []).append(strip_wrappers(whole.own(tied)))
        self.slots = [
            (flat, slot.name, strip_wrappers(whole.own(slot.name)))
            for flat in engine.flats
            for slot in flat.layout.slots
        ]
        buffers = persistent_buffers(engine.module)
        self.buffers = {strip_wrappers(whole.own(name)): value for name, value in buffers.items()}
        # names in the whole model, those of other ranks' experts included
        held = [*buffers, *engine.aliases, *(slot for _, slot, _ in self.slots)]
        self.every = {strip_wrappers(name) for each in held for name in whole.every(each)}

    def part(self, flat: FlatBuffer, name: str, values: torch.Tensor) -> TensorPart:
        """Return a copy of this rank's elements of parameter ``name`` of ``values`` [owned]."""
        first, start, stop = flat.spec.own_range(name)
        box = sharding_of(flat.parameters[name]).box
        place = (flat.layout.by_name[name].shape, first, box)
        own = values[start:stop].detach()
        return TensorPart(own.to("cpu", copy=True) if self._on_host else own.clone(), place)

    @torch.no_grad()
    def put(self, flat: FlatBuffer, name: str, value: torch.Tensor, into: torch.Tensor) -> None:
        """Copy ``value``, a part or a whole tensor, over the elements of ``name`` in ``into``."""
        first, start, stop = flat.spec.own_range(name)
        shape = flat.layout.by_name[name].shape
        if isinstance(value, TensorPart):
            own = value.local
        else:
            given = value.full_tensor() if hasattr(value, "full_tensor") else value
            given = own_part(sharding_of(flat.parameters[name]), given)
            own = given.reshape(-1)[first : first + stop - start] if given.shape == shape else given
        if own.numel() != stop - start:
            raise CheckpointError(
                f"{name}: {own.numel()} elements of a tensor of shape {tuple(value.shape)} in the "
                f"state dict, {stop - start} of one of shape {shape} on this rank; take the state "
                "dict of this engine"
            )
        into[start:stop].copy_(own)

    # ---- weights ----

    def weights(self, trainable_only: bool) -> States:
        state: States = {}
        for flat, slots in groupby(self.slots, itemgetter(0)):
            if flat.trainable or not trainable_only:
                values = _source(flat)
                for _, name, fqn in slots:
                    part = self.part(flat, name, values)
                    state.update(dict.fromkeys((fqn, *self.tied.get(name, ())), part))
        return state | {
            name: value.to("cpu") if self._on_host else value
            for name, value in self.buffers.items()
        }

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> Any:
        names = {fqn for _, _, fqn in self.slots} | {*self.buffers}
        missing, unexpected = sorted(names - state.keys()), sorted(state.keys() - self.every)
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the state dict lacks {listed(missing, 6) or 'nothing'} and has "
                f"{listed(unexpected, 6) or 'nothing'} besides; pass that of the same model, or "
                "StateDictOptions(strict=False)"
            )
        with self.engine.schedule.shards.writing():
            for flat in self.engine.flats:
                values = _source(flat).detach().clone()
                for own, name, fqn in self.slots:
                    if own is flat and fqn in state:
                        self.put(flat, name, state[fqn], values)
                if flat.optimizer_shard.has_master:
                    flat.optimizer_shard.store_master(values)
                else:
                    flat.store_shard(values)
        for name, value in self.buffers.items():
            if name in state:
                value.copy_(state[name])
        self.engine.refresh_params()
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    # ---- optimizer ----

    def trained(self) -> list[tuple[FlatBuffer, str, str]]:
        return [each for each in self.slots if each[0].trainable]

    def optimizer(self) -> States:
        bound, state = self.engine.bound, dict[str, States]()
        scalars, apart = bound.scalars(), dict[str, dict[str, float]]()
        for every in self.engine.mesh.all_gather_object(bound.apart(), "step counts"):
            for numbers in every:
                apart.update(numbers)
        fresh = _fresh(self.engine.optimizer, self.engine.device)
        for flat, slots in groupby(self.trained(), itemgetter(0)):
            held = dict(bound.tensors(flat.optimizer_shard))
            master = held.pop("master")
            held = dict.fromkeys(fresh["elements"], torch.zeros_like(master)) | held
            for _, name, fqn in slots:
                numbers = apart.get(name) or scalars[bound.group_of[name]] or fresh["numbers"]
                state[fqn] = {key: torch.tensor(float(each)) for key, each in numbers.items()}
                state[fqn] |= {key: self.part(flat, name, each) for key, each in held.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": []}
            for group in self.engine.optimizer.param_groups
        ]
        for _, name, fqn in self.trained():
            groups[bound.group_of[name]]["params"].append(fqn)
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_optimizer(self, given: Mapping[str, Any]) -> None:
        bound, state = self.engine.bound, given["state"]
        numbers: dict[str, dict[str, float]] = {}
        for flat in dict.fromkeys(flat for flat, _, _ in self.trained()):
            mine = [
                (name, fqn) for own, name, fqn in self.trained() if own is flat and fqn in state
            ]
            live = dict(bound.tensors(flat.optimizer_shard))
            elements: set[str] = set()
            for name, fqn in mine:
                numbers[name] = {k: float(v) for k, v in state[fqn].items() if not v.dim()}
                elements.update(key for key, value in state[fqn].items() if value.dim())
            for key in sorted(elements):
                out = live.get(key)
                out = torch.zeros_like(live["master"]) if out is None else out.detach().clone()
                for name, fqn in mine:
                    if key in state[fqn]:
                        self.put(flat, name, state[fqn][key], out)
                bound.load_tensor(flat.optimizer_shard, key, out)
        groups = given["param_groups"]
        bound.load_hyperparameters(
            [{k: v for k, v in group.items() if k != "params"} for group in groups]
        )
        of_groups: list[list[str]] = [[] for _ in groups]
        for name in numbers:
            of_groups[bound.group_of[name]].append(name)
        common = [_most(numbers[name] for name in names) for names in of_groups]
        bound.load_scalars(
            common,
            [
                {name: numbers[name] for name in names if numbers[name] != shared}
                for names, shared in zip(of_groups, common)
            ],
        )


def _source(flat: FlatBuffer) -> torch.Tensor:
    """Return the weights that a checkpoint keeps: the master weights where there are any."""
    master = flat.optimizer_shard.master
    return flat.shard if master is None else master


def _most(values: Iterator[dict[str, float]] | Any) -> dict[str, float]:
    found = Counter(tuple(sorted(each.items())) for each in values).most_common(1)
    return dict(found[0][0]) if found else {}


def _fresh(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Return the state of a parameter on ``device`` after no step, as torch's functions show it:
    ``numbers``, and the names of states with an element for each of the parameter's.
    """
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    # on the device: not every optimizer steps elsewhere (capturable=True)
    parameter = nn.Parameter(torch.zeros(3, device=device))
    parameter.grad = torch.zeros(3, device=device)
    alone = type(optimizer)([{**settings, "params": [parameter]}])  # type: ignore[call-arg]
    alone.step()
    state = alone.state[parameter]
    return {
        "numbers": {k: 0.0 for k, v in state.items() if torch.is_tensor(v) and not v.dim()},
        "elements": [k for k, v in state.items() if torch.is_tensor(v) and v.shape == (3,)],
    }


# ---- torch's functions ----


def engine_of(model: nn.Module) -> Any:
    """Return the engine that has the parameters of ``model``; None if there is none."""
    flat = next(filter(None, map(owner_of, model.parameters())), None)
    return None if flat is None or flat.retired else flat.engine()


def _own(model: nn.Module, info: Any) -> _Own | None:
    engine = engine_of(model)
    if engine is None or info.full_state_dict or info.submodule_prefixes:
        return None
    return _Own(engine, info.cpu_offload)


def _ours(torch_module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions that replace those of ``torch_module``, which they call for other
    models.
    """
    get, put = torch_module._get_model_state_dict, torch_module._load_model_state_dict
    get_optim, put_optim = torch_module._get_optim_state_dict, torch_module._load_optim_state_dict

    @wraps(get)
    def _get_model_state_dict(model: Any, info: Any) -> Any:
        own = _own(model, info) if info.handle_model else None
        return get(model, info) if own is None else own.weights(info.ignore_frozen_params)

    @wraps(put)
    def _load_model_state_dict(model: Any, state_dict: Any, info: Any) -> Any:
        own = _own(model, info) if info.handle_model and state_dict else None
        if own is None:
            return put(model, state_dict, info)
        return own.load_weights(state_dict, info.strict)

    @wraps(get_optim)
    def _get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
        own = _own(model, info) if info.handle_optim else None
        if own is None:
            return get_optim(model, optimizers, info)
        state = own.optimizer()
        flat = info.flatten_optimizer_state_dict
        return torch_module._flatten_optim_state_dict(state) if flat else state

    @wraps(put_optim)
    def _load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> None:
        own = _own(model, info) if info.handle_optim else None
        if own is None:
            put_optim(model, optimizers, state_dict, info)
        elif state_dict:
            nested = state_dict if "state" in state_dict else _nested(state_dict, own.optimizer())
            own.load_optimizer(nested)

    return {each.__name__: each for each in
            (_get_model_state_dict, _load_model_state_dict, _get_optim_state_dict,
             _load_optim_state_dict)}  # fmt: skip


def _nested(flat: Mapping[str, Any], like: States) -> States:
    """Return a state dict of ``flatten_optimizer_state_dict`` with the keys of ``like``."""
    state = {
        fqn: {key: flat[f"state.{fqn}.{key}"] for key in values}
        for fqn, values in like["state"].items()
    }
    groups = [
        {key: flat[f"param_groups.{group['params'][0]}.{key}"] for key in group if key != "params"}
        | {"params": group["params"]}
        for group in like["param_groups"]
        if group["params"]
    ]
    return {"state": state, "param_groups": groups}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces the functions when torch's module is imported: it takes long, and few need it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                vars(module).update(_ours(module))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_installed: list[bool] = []


def install() -> None:
    """Have torch's functions give and take parts for models of engines, once in a process."""
    if _installed:
        return
    _installed.append(True)
    module = sys.modules.get(TARGET)
    if module is not None:
        vars(module).update(_ours(module))
    else:
        sys.meta_path.insert(0, _AfterImport())
