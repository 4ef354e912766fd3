"""Optimizer state between steps: per-element tensors and scalars, distinguished, created, carried
over; ``optimizer.state`` under an engine, its entries by segment; the state of segments on the
device, slices of arrays in which each state of a flat buffer is one view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_zero.device import kinds
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER
from hf_zero.ops.flat_tiles import PHASE
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.optim.cpu_base import CPUOptimizer
from hf_zero.optim.probing import bare_twin
from hf_zero.optim.segments import (
    FetchedArrays,
    MemoryRegion,
    ParamGroup,
    ParamState,
    Regions,
    Segment,
    SegmentPart,
    StateArrays,
    current_settings,
    masters,
)
from hf_zero.zero.layout.flat_layout import Slot

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard

# Numbers that torch.optim keeps beside the tensors, with their values before the first step.
_SCALARS: dict[str, float] = {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": 0.0}
# Classes whose state, up to torch 2.12, only the constructor makes, for the parameters it is given.
MADE_BY_CONSTRUCTORS = (torch.optim.Adagrad,)

InitialValues = Callable[[int, Tensor], ParamState]
"""Initial state of a parameter of a group, like a tensor."""


def is_scalar(name: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether state ``name`` of a parameter of ``shape`` is one number for all of it."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return False
        return name in _SCALARS or tuple(value.shape) != tuple(shape)
    return isinstance(value, Number)


def is_elementwise(name: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether state ``name`` of a parameter of ``shape`` is a tensor with one value per
    element of it.
    """
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and not is_scalar(name, value, shape)
    )


def without_none(state: StateArrays) -> ParamState:
    """Return the entries of one parameter's state that hold a value (SGD may keep
    ``momentum_buffer: None``).
    """
    return {name: value for name, value in state.items() if value is not None}


def refuse_unknown(optimizer: torch.optim.Optimizer, name: str, value: object, where: str) -> None:
    what = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    raise UnsupportedOptimizerError(
        f"optimizer {type(optimizer).__name__} keeps state {name!r} for {where} as {what}; a "
        "sharded optimizer can keep one number per "
        "element or one number per group. Use an optimizer whose state is element-wise."
    )


def initial_state(
    optimizer: torch.optim.Optimizer, group: ParamGroup, like: Tensor
) -> dict[str, object]:
    """Return the initial state of a one-element parameter of ``group``, before its first step.

    It is found by one step over a throw-away parameter on a throw-away twin of the optimizer, so
    that names, dtypes and the devices of counters are the class's own. The twin has neither the
    ``step`` attribute of the user's object (the engine's own, a scheduler's wrapper) nor its hooks.
    """
    twin, probe = _stepped_twin(optimizer, group, like)
    state = without_none(twin.state[probe])
    for name, value in [*state.items()]:
        if isinstance(value, Mapping):  # of the whole tensor: created by the first step
            del state[name]
        elif is_scalar(name, value, probe.shape):
            start = float(group["lr"]) if name == "eta" else _SCALARS.get(name, float(value))
            state[name] = scalar_like(value, start)
        elif not is_elementwise(name, value, probe.shape):
            refuse_unknown(optimizer, name, value, "a parameter of shape (1,)")
    return state


def counted_elsewhere(optimizer: torch.optim.Optimizer, group: ParamGroup) -> list[str]:
    """Return the names of the scalars that a step changes in ``group`` or on the optimizer itself,
    rather than in the state of a parameter.
    """
    twin, _ = _stepped_twin(optimizer, group, torch.zeros(1))
    changed = [
        name for name, value in twin.param_groups[0].items() if _is_other(value, group.get(name))
    ]
    return changed + [
        name for name, value in vars(twin).items() if _is_other(value, vars(optimizer).get(name))
    ]


def _is_other(now: object, before: object) -> bool:
    number = isinstance(now, Number) or (isinstance(now, Tensor) and now.numel() == 1)
    return number and (before is None or bool(now != before))


def _stepped_twin(
    optimizer: torch.optim.Optimizer, group: ParamGroup, like: Tensor
) -> tuple[torch.optim.Optimizer, Tensor]:
    """Return a throw-away twin of ``optimizer`` after one step over a throw-away parameter of one
    element, with a gradient of zero; on the CPU where ``like`` has no values.
    """
    device = "cpu" if like.is_meta else like.device
    begin = torch.zeros(1, dtype=step_dtype(like.dtype), device=device)
    probe = torch.nn.Parameter(begin, requires_grad=False)
    probe.grad = torch.zeros_like(probe)
    settings = current_settings(group)
    if kinds.is_synchronous(like.device) and settings.get("capturable"):
        settings["capturable"] = False  # counters on the device: torch refuses others
    twin = bare_twin(optimizer, [{**settings, "params": [probe]}])
    # without ``tensors``, no collective runs; the format of moments is that of a small parameter
    for name in ("tensors", "segment_format"):
        vars(twin).pop(name, None)
    if isinstance(twin, MADE_BY_CONSTRUCTORS):
        begun = float(settings["initial_accumulator_value"])
        twin.state = torch.optim.Adagrad(twin.param_groups, initial_accumulator_value=begun).state
    bare_step(twin)
    return twin, probe


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of the class of ``optimizer`` without hooks, torch's global ones included."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def kept_states(optimizer: torch.optim.Optimizer, group: ParamGroup) -> set[str]:
    """Return the names of the per-element states that ``group`` keeps, or would with a momentum."""
    settings = {**unquantized(group), "momentum": group.get("momentum") or 0.5}
    state = initial_state(optimizer, settings, torch.zeros(1))
    return {name for name, value in state.items() if is_elementwise(name, value, (1,))}


def unquantized(group: ParamGroup) -> ParamGroup:
    """Return ``group`` with ``moments`` "fp32", if it has that setting."""
    return {**group, "moments": "fp32"} if "moments" in group else group


def step_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which master weights of ``dtype`` are stepped: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def scalar_like(value: Any, number: float) -> Any:
    """Return ``number`` in the form of ``value``: a tensor of its dtype, shape and device, or a
    Python number of its type.
    """
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def narrowed(
    entries: StateArrays, shape: Sequence[int], start: int, stop: int
) -> dict[str, object]:
    """Return the state of elements ``[start, stop)`` of a parameter of ``shape`` with ``entries``:
    views of tensors, copies of numbers.
    """

    def part(name: str, value: Any) -> object:
        if isinstance(value, Blocks):
            return value.narrow(start, stop - start)
        return value[start:stop] if is_elementwise(name, value, shape) else copied(value)

    return {name: part(name, value) for name, value in entries.items()}


def copied(value: Any) -> Any:
    """Return a copy of ``value``, a number or the state of a whole tensor."""
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True, eq=False)
class Carried:
    """Existing state of an optimizer, by parameter: its ``scalars``, its ``per_element`` tensors
    (1-D), and its ``tensor_state``, of whole tensors.
    """

    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    per_element: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    tensor_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def collect(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    slots: Mapping[str, Slot],
    group_of: Mapping[str, int],
) -> Carried:
    """Read the state that ``optimizer`` already has for whole parameters. Nothing is changed.

    Args:
        optimizer: the user's optimizer, before its parameters are replaced.
        parameters: name -> the parameter object the optimizer holds.
        slots: name -> slot of every parameter that will be optimized here or on another rank.
        group_of: name -> index of its group.

    Raises:
        UnsupportedOptimizerError: state that belongs to no parameter, and state that is neither
            per element nor a scalar.
    """
    kind, known = type(optimizer).__name__, {id(parameter) for parameter in parameters.values()}
    entries = dict(optimizer.state.items())
    for owner, entry in entries.items():
        # A frozen parameter is not stepped, so its state (Adagrad creates it at once) is not
        # needed.
        is_tensor = isinstance(owner, Tensor)
        if not (
            is_tensor and (id(owner) in known or not owner.requires_grad or not without_none(entry))
        ):
            what = f"a tensor of shape {tuple(owner.shape)}" if is_tensor else repr(owner)
            raise UnsupportedOptimizerError(
                f"optimizer {kind} has state for {what}, which is not a parameter of the model; "
                "call optimizer.state.clear() before initialize to drop its state, or pass a new "
                "optimizer"
            )
    carried = Carried()
    for name in slots.keys() & group_of.keys() if entries else ():
        shape, state = slots[name].shape, without_none(entries.get(parameters[name], {}))
        scalars, per_element = dict[str, float](), dict[str, Tensor]()
        for key, value in state.items():
            if isinstance(value, Blocks):
                per_element[key] = value.decode()
            elif isinstance(value, Mapping):
                carried.tensor_state[name] = dict(value)
            elif is_scalar(key, value, shape):
                scalars[key] = float(value)
            elif is_elementwise(key, value, shape):
                per_element[key] = value.detach().reshape(-1)
            else:
                refuse_unknown(optimizer, key, value, f"parameter {name!r} of shape {shape}")
        if state:
            carried.scalars[name], carried.per_element[name] = scalars, per_element
    return carried


class SegmentStates(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state`` under an engine, by segment.

    ``refuse`` raises for keys that never have an entry: parameters of the model. ``wait`` waits for
    the update of offloaded state, None if none is offloaded; ``restart`` resets all state to that
    before the first step, or raises.
    """

    refuse: Callable[[object], None] | None = None
    wait: Callable[[], None] | None = None
    restart: Callable[[], None] | None = None

    def _refuse(self, key: object) -> None:
        if self.refuse is not None:
            self.refuse(key)

    def _wait(self) -> None:
        if self.wait is not None:
            self.wait()

    def __getitem__(self, key: object) -> dict[str, object]:
        self._wait()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[object]:
        self._wait()
        return super().__iter__()

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def keys(self) -> Any:
        self._wait()
        return super().keys()

    def __len__(self) -> int:
        self._wait()
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._refuse(key)
        self._wait()
        return super().__contains__(key)

    def __setitem__(self, key: object, state: dict[str, object]) -> None:
        self._refuse(key)
        self._wait()
        super().__setitem__(key, state)

    def __delitem__(self, key: object) -> None:
        self._refuse(key)
        self._wait()
        super().__delitem__(key)

    def setdefault(self, key: object, default: Any = None) -> Any:
        self._refuse(key)
        self._wait()
        return super().setdefault(key, default)

    def update(self, *states: Any, **named: Any) -> None:
        for key, state in dict(*states, **named).items():
            self[key] = state

    def pop(self, key: object, *default: object) -> Any:
        self._refuse(key)
        self._wait()
        return super().pop(key, *default)

    def popitem(self) -> tuple[object, dict[str, object]]:
        self._wait()
        return super().popitem()

    def clear(self) -> None:
        if self.restart is not None:
            self.restart()
        else:
            super().clear()

    def __missing__(self, key: object) -> dict[str, object]:
        self._refuse(key)
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._refuse(key)
        self._wait()
        return super().get(key, default)


class NarrowStates(Protocol):
    """The state of an optimizer in bf16 (bf16_state.py); ``moments``: its per-element states."""

    @property
    def moments(self) -> bool: ...
    def cast_initial(self, state: ParamState, like: Tensor) -> ParamState:
        """Return the initial ``state`` in the dtypes in which it is kept."""


class SegmentStateAccess:
    """Access to the entries of ``optimizer.state`` by segment."""

    def __init__(self, optimizer: torch.optim.Optimizer, bf16: NarrowStates | None = None) -> None:
        self.optimizer, self.bf16 = optimizer, bf16

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def of(self, segment: Segment) -> ParamState:
        """Return the state of ``segment`` by name; empty if it has none."""
        tensor, states = segment.tensor, self.optimizer.state
        # an engine's states wait for the update under way at each look: one look is enough
        return without_none(dict.__getitem__(states, tensor)) if tensor in states else {}

    def elementwise(self, segment: Segment) -> dict[str, Tensor]:
        """Return the per-element states of ``segment`` that are tensors."""
        shape = segment.tensor.shape
        return {
            name: value
            for name, value in self.of(segment).items()
            if is_elementwise(name, value, shape)
        }

    def scalars(self, segment: Segment) -> dict[str, float]:
        """Return the scalar states of ``segment``."""
        shape = segment.tensor.shape
        return {
            name: float(value)
            for name, value in self.of(segment).items()
            if is_scalar(name, value, shape)
        }

    def initial(self, group: int, like: Tensor, decoded: bool = False) -> ParamState:
        """Return the initial state, before a first step, of a parameter like ``like`` in ``group``;
        ``decoded``: as tensors, whatever its storage format.
        """
        settings = unquantized(self.groups[group]) if decoded else self.groups[group]
        initial = initial_state(self.optimizer, settings, like)
        return initial if self.bf16 is None else self.bf16.cast_initial(initial, like)

    def initial_values(self, decoded: bool = False) -> InitialValues:
        """Return :meth:`initial` as a function that remembers its results: with the settings of
        groups, which a script may change at any time, they change.
        """
        known: dict[tuple[int, torch.dtype], ParamState] = {}

        def values(group: int, like: Tensor) -> ParamState:
            if (group, like.dtype) not in known:
                known[group, like.dtype] = self.initial(group, like, decoded)
            return known[group, like.dtype]

        return values

    def blocks(self, segment: Segment) -> dict[str, Blocks]:
        """Return the states of ``segment`` that are in 8 bits."""
        return {
            name: value for name, value in self.of(segment).items() if isinstance(value, Blocks)
        }

    def created(self, segment: Segment, name: str, value: Tensor) -> Tensor | Blocks:
        """Return the per-element state ``name`` of ``segment`` before its first step, which is
        ``value`` for each element, in the format in which the optimizer keeps it.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, CPUOptimizer) and name in optimizer.moment_names:
            group = self.groups[segment.group]
            if optimizer.format_of(group, segment.tensor) == "dynamic8":
                return optimizer.new_moment(group, name, segment.tensor)
        return value.expand(segment.tensor.shape).clone()

    def some_group_keeps(self, name: str, like: Tensor) -> bool:
        """Return whether a group keeps a state ``name`` for a parameter like ``like``, or would
        with a momentum.
        """
        groups = range(len(self.groups))
        return any(
            name in self.initial(group, like) or self.is_switched_off(group, name)
            for group in groups
        )

    def is_switched_off(self, group: int, name: str) -> bool:
        """Return whether ``group`` would keep a state ``name`` if its momentum were not 0."""
        settings = self.groups[group]
        return not settings.get("momentum", 1.0) and name in kept_states(self.optimizer, settings)


class DeviceState(Regions):
    """The state of segments on the device: one array for each region (``segments.py``) and name of
    state, allocated when the optimizer is bound. ``optimizer.state`` has slices of them, from the
    first step of a segment on. State in blocks of 8 bits is kept by segment instead, with all of
    its region.

    ``base``: the optimizer's class among those with a known update; ``begins_with_gradient``:
    whether its first step sets the momentum to the gradient.
    """

    def __init__(
        self, entries: SegmentStateAccess, base: type | None, begins_with_gradient: bool
    ) -> None:
        super().__init__()
        self._entries = entries
        # whether state has known values before the first step
        self._by_constructor = isinstance(entries.optimizer, MADE_BY_CONSTRUCTORS)
        self._is_known = base is not None or self._by_constructor
        self._begins_with_gradient = begins_with_gradient
        # segments that have not begun: their next step is the first, or the first with a momentum
        self.unbegun: set[Segment] = set()
        self._stand_ins: Sequence[Segment] = ()
        self.allocations = 0  # number of arrays allocated so far: they are then at other places

    def allocate(self, stand_ins: Sequence[Segment], names_in_8_bits: frozenset[str]) -> None:
        """Allocate the state of new regions and ``stand_ins``. ``names_in_8_bits``: parameters with
        moments in 8 bits.
        """
        self._stand_ins = stand_ins
        for region in self.regions if names_in_8_bits else ():
            in_fp32 = (names_in_8_bits.isdisjoint(segment.names) for segment in region.segments)
            region.in_blocks = not all(in_fp32)
        self.renew()

    def renew(self) -> None:
        """Allocate the arrays of all regions whose state is known before the first step; no segment
        has state. The former arrays stay in state dicts that a script keeps.
        """
        self.unbegun = {*self.all_segments, *self._stand_ins}
        first = self._entries.initial_values()
        dtypes: dict[str, dict[MemoryRegion, torch.dtype]] = {}
        for region in self.regions:
            region.arrays.clear()
            if region.in_blocks or not self._is_known:
                continue
            for group in dict.fromkeys(segment.group for segment in region.segments):
                for name, value in first(group, region.segments[0].tensor).items():
                    if is_elementwise(name, value, (1,)):
                        of_name = dtypes.setdefault(name, {})
                        dtype = of_name.get(region, value.dtype)
                        of_name[region] = torch.promote_types(dtype, value.dtype)
        for name, of_name in dtypes.items():
            self._allocate(name, of_name, first)

    def _allocate(
        self, name: str, dtypes: Mapping[MemoryRegion, torch.dtype], first: InitialValues
    ) -> None:
        """Allocate state ``name`` of regions with its initial values. Regions of one dtype share a
        storage, in which each has the alignment of its masters: one launch updates all of them.
        """
        self.allocations += 1
        for dtype in dict.fromkeys(dtypes.values()):
            places: dict[MemoryRegion, int] = {}
            total = 0
            for region in (region for region in dtypes if dtypes[region] == dtype):
                begin = region.segments[0]
                total += (int(begin.tensor.storage_offset()) - begin.start - total) % PHASE
                places[region] = total
                total += region.numel
            whole = torch.zeros(total, dtype=dtype, device=begin.tensor.device)
            for region, place in places.items():
                region.arrays[name] = whole[place : place + region.numel]
                for segment in region.segments:
                    if name not in self._entries.of(segment):
                        value = first(segment.group, segment.tensor).get(name)
                        if value is not None and bool(value):
                            region.arrays[name][segment.start : segment.stop] = value

    def bind(self, segment: Segment) -> None:
        """Give ``segment``, cut out of another one, its tensor."""
        segment.bind()

    def replace(self, pieces: Mapping[Segment, Sequence[Segment]]) -> None:
        super().replace(pieces)
        for segment in self.unbegun & pieces.keys():
            self.unbegun.remove(segment)
            self.unbegun.update(pieces[segment])

    # ---- the first step ----

    def begin(self, segments: Iterable[Segment]) -> list[Segment]:
        """Create the state of those of ``segments`` that make their first step now. Return those
        whose state only the step itself can create, which :meth:`adopt` takes afterwards.
        """
        by_step: list[Segment] = []
        first, groups = self._entries.initial_values(), self._entries.groups
        # a hook before the step may yet change the rate, on which initial values can depend
        hooked = self._entries.optimizer._optimizer_step_pre_hooks and self._entries.bf16 is None
        known = self._by_constructor or (self._is_known and not hooked)
        for segment in segments:
            if segment not in self.unbegun:
                continue
            group = groups[segment.group]
            if self._begins_with_gradient and not group["momentum"]:
                continue
            self.unbegun.discard(segment)
            damps = self._begins_with_gradient and group["dampening"]
            if not known or damps or self._entries.of(segment):
                by_step.append(segment)
                continue
            self.create(segment, first)
            if self._begins_with_gradient:  # -0.0 plus a gradient is that gradient, a -0.0 too
                for value in self._entries.elementwise(segment).values():
                    value.fill_(-0.0)
        return by_step

    def create(self, segment: Segment, first: InitialValues | None = None) -> None:
        """Create the initial state of ``segment``, if it has none; ``first``: initial values."""
        if self._entries.of(segment):
            return
        live = self._entries.optimizer.state[segment.tensor]
        first = first or self._entries.initial_values()
        for name, value in first(segment.group, segment.tensor).items():
            if not is_elementwise(name, value, (1,)):
                live[name] = copied(value)
            elif not segment.parts or self._region(segment).in_blocks:
                live[name] = self._entries.created(segment, name, value)
            else:
                live[name] = self._slice(segment, name, value.dtype, first).copy_(value)

    def unstep(self, segment: Segment) -> None:
        """Reset ``segment`` as if it had never been stepped."""
        self.unbegun.add(segment)
        if self._entries.optimizer.state.pop(segment.tensor, None) and segment.parts:
            for array in self._region(segment).arrays.values():
                array[segment.start : segment.stop].zero_()

    def _region(self, segment: Segment) -> MemoryRegion:
        return self._region_of[segment.parts[0].flat.key][0]

    def _slice(
        self, segment: Segment, name: str, dtype: torch.dtype, first: InitialValues
    ) -> Tensor:
        """Return the memory of state ``name`` of ``segment``; allocate the array if it is new."""
        region = self._region(segment)
        if name not in region.arrays:
            self._allocate(name, {region: dtype}, first)
        return region.arrays[name][segment.start : segment.stop]

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        live = self._entries.optimizer.state[segment.tensor]
        if name not in live:
            dtype = step_dtype(segment.tensor.dtype)
            live[name] = (
                torch.zeros_like(segment.tensor, dtype=dtype)
                if not segment.parts or self._region(segment).in_blocks
                else self._slice(segment, name, dtype, self._entries.initial_values()).zero_()
            )
        if isinstance(live[name], Blocks):
            live[name].put(at, values)
            return
        live[name][at : at + values.numel()].copy_(values)

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Move tensors in ``optimizer.state`` that are not in the arrays there: a first step has
        created them, or a script has assigned them.

        Raises UnsupportedOptimizerError for state that is neither per element nor a scalar.
        """
        first = self._entries.initial_values()
        for segment in segments:
            shape, entries = segment.tensor.shape, self._entries.of(segment)
            for name, value in entries.items():
                if not (
                    is_scalar(name, value, shape)
                    or is_elementwise(name, value, shape)
                    or isinstance(value, Mapping)
                    or (isinstance(value, Blocks) and value.dynamic)
                ):
                    key = segment.parts[0].flat.key if segment.parts else "no parameter"
                    what = f"a segment of {key!r}"
                    refuse_unknown(self._entries.optimizer, name, value, what)
            if not segment.parts or self._region(segment).in_blocks:
                continue
            for name, value in entries.items():
                if is_elementwise(name, value, shape):
                    own = self._slice(segment, name, value.dtype, first)
                    if value.data_ptr() != own.data_ptr():
                        own.copy_(value)
                        self._entries.optimizer.state[segment.tensor][name] = own

    def _is_kept(self, segment: Segment, name: str, value: object) -> bool:
        return isinstance(value, Blocks) or is_elementwise(name, value, segment.tensor.shape)

    # ---- arrays of flat buffers ----

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return the master weights and each per-element state of ``flat`` that has begun, 1-D over
        ``flat.owned``: writable views, or states in new memory if its region has some in 8 bits.
        """
        arrays = {MASTER: masters(flat)}
        parts = self.parts(flat)
        if not parts:
            return arrays
        self.adopt(segment for segment, _ in parts)
        region, base = self._region_of[flat.key]
        if region.in_blocks:
            dtypes = {MASTER: arrays[MASTER].dtype} | self._dtypes(parts)
            states = self._states(parts, dtypes)  # now: a save decodes on a thread of its own

            def read(name: str) -> Tensor:
                if name in arrays:
                    return arrays[name]
                return _decoded(name, states, torch.zeros_like(arrays[MASTER], dtype=dtypes[name]))

            return FetchedArrays(dtypes, read)
        numel = flat.owned[1] - flat.owned[0]
        for segment, _ in parts:
            for name in self._entries.elementwise(segment):
                if name not in arrays:
                    arrays[name] = region.arrays[name][base : base + numel]
        return arrays

    def _dtypes(self, parts: Sequence[tuple[Segment, SegmentPart]]) -> dict[str, torch.dtype]:
        """Return the dtypes of the per-element states of ``parts`` by name; of blocks, decoded."""
        return {
            name: torch.float32 if isinstance(value, Blocks) else value.dtype
            for segment, _ in parts
            for name, value in sorted(self._entries.of(segment).items())
            if self._is_kept(segment, name, value)
        }

    def _states(
        self, parts: Sequence[tuple[Segment, SegmentPart]], names: Collection[str]
    ) -> list[tuple[SegmentPart, ParamState, ParamState]]:
        """Return each of ``parts`` with the state of its segment, and with its initial state if it
        lacks some of ``names``.
        """
        first = self._entries.initial_values()
        states = []
        for segment, part in parts:
            of = self._entries.of(segment)
            lacks = any(name != MASTER and name not in of for name in names)
            states.append((part, of, first(segment.group, segment.tensor) if lacks else {}))
        return states

    def memory(self, flat: OptimizerShard) -> list[Tensor]:
        """Return the tensors that hold the per-element states of ``flat``."""
        parts = self.parts(flat)
        if not parts:
            return []
        region, base = self._region_of[flat.key]
        if not region.in_blocks:
            self.adopt(segment for segment, _ in parts)
            numel = flat.owned[1] - flat.owned[0]
            return [array[base : base + numel] for array in region.arrays.values()]
        tensors: list[Tensor] = []
        for segment, part in parts:
            numel = part.stop - part.start
            for name, value in self._entries.of(segment).items():
                if isinstance(value, Blocks):
                    blocks = value.narrow(part.offset, numel)
                    tensors += [blocks.codes, blocks.scales]
                elif self._is_kept(segment, name, value):
                    tensors.append(value[part.offset : part.offset + numel])
        return tensors

    def address(self, flat: OptimizerShard, name: str) -> int:
        """Return the address of the first number of state ``name`` of ``flat``; 0 if missing.
        :meth:`arrays` may move it.
        """
        for segment, part in self.parts(flat):
            value = self._entries.of(segment).get(name)
            if value is not None:
                return int(value.data_ptr() + (part.offset - part.start) * value.itemsize)
        return 0


def _decoded(
    name: str, states: Sequence[tuple[SegmentPart, StateArrays, StateArrays]], out: Tensor
) -> Tensor:
    """Return ``out`` [owned], filled with the state ``name`` of the parts in ``states``."""
    for part, of, first in states:
        value, target = of.get(name), out[part.start : part.stop]
        at, stop = part.offset, part.offset + part.stop - part.start
        if isinstance(value, Blocks):
            target.copy_(value.narrow(at, stop - at).decode())
        elif value is not None:
            target.copy_(value[at:stop])
        else:
            target[:] = first.get(name, 0.0)
    return out
