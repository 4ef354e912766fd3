"""Optimizer state between steps: per-element tensors and scalars, distinguished, created, carried
over; its entries by segment; the state of segments on the device, slices of arrays in which each
state of a flat buffer is one view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from hf_zero.device import kinds
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER
from hf_zero.ops.coded_arrays import CodedArray, StateArray, decoded
from hf_zero.ops.flat_tiles import PHASE
from hf_zero.optim.moment_formats import codec_of
from hf_zero.optim.probing import bare_twin
from hf_zero.optim.segments import (
    FetchedArrays,
    MemoryRegion,
    ParamGroup,
    ParamState,
    Regions,
    Segment,
    StateArrays,
    current_settings,
    masters,
)
from hf_zero.optim.whole_tensor import tensor_state_names
from hf_zero.zero.layout.flat_layout import Slot

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard

# Numbers that torch.optim keeps beside the tensors, with their values before the first step.
_SCALARS: dict[str, float] = {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": 0.0}
# Classes whose state, up to torch 2.12, only the constructor makes, for the parameters it is given.
MADE_BY_CONSTRUCTORS = (torch.optim.Adagrad,)

InitialValues = Callable[[int, Tensor], ParamState]
"""Initial state of a parameter of a group, like a tensor."""
View = Callable[["Segment", str], object]
"""Memory of a state of a segment."""


def nothing() -> None:
    """Wait for nothing: no state is offloaded."""


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


def refuse_unknown(
    optimizer: torch.optim.Optimizer, name: str, value: object, where: str
) -> NoReturn:
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
        if name in tensor_state_names(optimizer):  # created by the first step
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


def copied(value: Any) -> Any:
    """Return a copy of ``value``, a number or the state of a whole tensor."""
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
    # that of a live engine, which is built again, is not read: it is by member
    entries = dict(optimizer.state) if isinstance(optimizer.state, dict) else {}
    for owner, entry in entries.items():
        # A frozen parameter is not stepped, so its state (Adagrad creates it at once) is not
        # needed.
        is_tensor = isinstance(owner, Tensor)
        trains = is_tensor and owner.requires_grad
        if not (is_tensor and (id(owner) in known or not trains or not without_none(entry))):
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
            if isinstance(value, CodedArray):
                per_element[key] = value.decode()
            elif key in tensor_state_names(optimizer):
                carried.tensor_state.setdefault(name, {})[key] = value
            elif is_scalar(key, value, shape):
                scalars[key] = float(value)
            elif is_elementwise(key, value, shape):
                per_element[key] = value.detach().reshape(-1)
            else:
                refuse_unknown(optimizer, key, value, f"parameter {name!r} of shape {shape}")
        if state:
            carried.scalars[name], carried.per_element[name] = scalars, per_element
    return carried


class NarrowStates(Protocol):
    """The state of an optimizer in fewer bits between steps, in which it is in fp32: ``masters``
    and ``moments``, its per-element states; ``kahan``: with rounding errors of the former.
    """

    @property
    def masters(self) -> bool: ...
    @property
    def moments(self) -> bool: ...
    @property
    def kahan(self) -> bool: ...
    @property
    def most_widened(self) -> int:
        """The most elements on the device that are in fp32 together."""

    def cast_initial(self, state: ParamState, like: Tensor) -> ParamState:
        """Return the initial ``state`` in the dtypes in which it is kept."""

    def widen(self, arrays: StateArrays) -> ParamState:
        """Return ``arrays``, master weights and states by name, in fp32."""

    def narrow(
        self, segment: Segment, arrays: StateArrays, wide: StateArrays, steps_before: int
    ) -> None:
        """Round the arrays of ``segment`` in ``wide`` into those of ``arrays``."""

    def batches(self, segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
        """Return ``segments`` in batches to be widened together; at least one."""

    def widened(
        self,
        segments: Sequence[Segment],
        states: MutableMapping[Tensor, ParamState],
        steps_before: int,
    ) -> AbstractContextManager[Callable[[Callable[[], None]], None]]:
        """Context in which ``segments`` and their ``states`` are in fp32. Yields a function that
        runs hooks, which may write to the weights in bf16.
        """


class SegmentStateAccess:
    """The optimizer's state by segment: ``states``, which ``optimizer.state`` is in a step of its
    own, with views of the arrays, placeholders and scalars. ``wait`` waits for the update of
    offloaded state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bf16: NarrowStates | None = None) -> None:
        self.optimizer, self.bf16 = optimizer, bf16
        self.of_wholes = tensor_state_names(optimizer)  # state of whole tensors
        self.states = defaultdict[Tensor, ParamState](dict)
        self.wait: Callable[[], object] = nothing

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def of(self, segment: Segment) -> ParamState:
        """Return the state of ``segment`` by name; empty if it has none."""
        self.wait()
        state = self.states.get(segment.tensor)
        return without_none(state) if state else {}

    def of_whole(self, segment: Segment) -> ParamState:
        """Return the live entries of ``segment``, which must have been stepped or be stepped now,
        with the state of its whole tensor; empty if there can be none.
        """
        return self.states[segment.tensor] if self.of_wholes else {}

    def elementwise(self, segment: Segment) -> dict[str, StateArray]:
        """Return the per-element states of ``segment``."""
        shape = segment.tensor.shape
        return {
            name: value
            for name, value in self.of(segment).items()
            if isinstance(value, CodedArray)
            or (is_elementwise(name, value, shape) and name not in self.of_wholes)
        }

    def carry(self, former: Segment, segment: Segment, view: View) -> None:
        """Create the entries of ``segment``, cut from the same span as ``former``: views of the
        same states, and copies of its scalars.
        """
        own = self.elementwise(former)
        segment.begun = former.begun
        entries = {
            name: view(segment, name) if name in own else copied(value)
            for name, value in self.of(former).items()
        }
        if entries:
            self.states[segment.tensor] = entries

    def scalars(self, segment: Segment) -> dict[str, float]:
        """Return the scalar states of ``segment``."""
        shape = segment.tensor.shape
        return {
            name: float(value)
            for name, value in self.of(segment).items()
            if is_scalar(name, value, shape) and name not in self.of_wholes
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
    state, allocated when the optimizer is bound. Entries have views of them, from the first step of
    a segment on. In a region with state in blocks of 8 bits, an array is in pieces,
    one for each span, that are allocated by the first step.

    ``base``: the optimizer's class among those with a known update; ``begins_with_gradient``:
    whether its first step sets the momentum to the gradient.
    """

    def __init__(
        self, entries: SegmentStateAccess, base: type | None, begins_with_gradient: bool
    ) -> None:
        super().__init__()
        self.entries = entries
        # whether state has known values before the first step
        self._by_constructor = isinstance(entries.optimizer, MADE_BY_CONSTRUCTORS)
        self._is_known = base is not None or self._by_constructor
        self._begins_with_gradient = begins_with_gradient
        self.names_in_8_bits: frozenset[str] = frozenset()  # parameters with moments in 8 bits
        self.allocations = 0  # number of arrays allocated so far: they are then at other places

    def _is_coded(self, segment: Segment) -> bool:
        return not self.names_in_8_bits.isdisjoint(segment.names)

    def _is_in_blocks(self, region: MemoryRegion) -> bool:
        return bool(self.names_in_8_bits) and any(map(self._is_coded, region.spans))

    def renew(self) -> None:
        """Allocate the arrays of all regions whose state is known before the first step; no segment
        has state. The former arrays stay in state dicts that a script keeps.
        """
        for segment in self.all_segments:
            segment.begun = False
        first = self.entries.initial_values()
        dtypes: dict[str, dict[MemoryRegion, torch.dtype]] = {}
        for region in self.regions:
            region.arrays.clear()
            if self._is_in_blocks(region) or not self._is_known:
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
        """Allocate state ``name`` of regions with its initial values. Regions of one dtype and
        device (a stand-in may be in host memory) share a storage, in which each has the alignment
        of its masters: one launch updates all of them.
        """
        self.allocations += 1
        kinds = {r: (dtype, r.segments[0].tensor.device) for r, dtype in dtypes.items()}
        for kind in dict.fromkeys(kinds.values()):
            places: dict[MemoryRegion, int] = {}
            total = 0
            for region in (region for region in dtypes if kinds[region] == kind):
                begin = region.segments[0]
                total += (int(begin.tensor.storage_offset()) - begin.start - total) % PHASE
                places[region] = total
                total += region.numel
            whole = torch.zeros(total, dtype=kind[0], device=kind[1])
            for region, place in places.items():
                array = region.arrays[name] = whole[place : place + region.numel]
                for segment in region.segments:
                    if name not in self.entries.of(segment):
                        value = first(segment.group, segment.tensor).get(name)
                        if value is not None and bool(value):
                            array[segment.start : segment.stop] = value

    def _pieces(self, region: MemoryRegion, name: str, dtype: torch.dtype) -> list[StateArray]:
        """Return state ``name`` of each span of ``region``, in the format of its moments."""
        optimizer, device = self.entries.optimizer, region.segments[0].tensor.device
        codec = codec_of(optimizer, name)
        return [
            codec.zeros(span.stop - span.start, device)
            if codec is not None and self._is_coded(span)
            else torch.zeros(span.stop - span.start, dtype=dtype, device=device)
            for span in region.spans
        ]

    # ---- the first step ----

    def begin(self, segments: Iterable[Segment]) -> list[Segment]:
        """Create the state of those of ``segments`` that make their first step now. Return those
        whose state only the step itself can create, which :meth:`adopt` takes afterwards.
        """
        new = [segment for segment in segments if not segment.begun]
        if not new:
            return []
        by_step: list[Segment] = []
        first, groups = self.entries.initial_values(), self.entries.groups
        # a hook before the step may yet change the rate, on which initial values can depend
        hooked = self.entries.optimizer._optimizer_step_pre_hooks and self.entries.bf16 is None
        known = self._by_constructor or (self._is_known and not hooked)
        if self._begins_with_gradient:
            new = [segment for segment in new if groups[segment.group]["momentum"]]
        for segment in new:
            damps = self._begins_with_gradient and groups[segment.group]["dampening"]
            if not known or damps or self.entries.of(segment):
                by_step.append(segment)
                continue
            self.create(segment, first)
            if self._begins_with_gradient:  # -0.0 plus a gradient is that gradient, a -0.0 too
                for value in self.entries.elementwise(segment).values():
                    if isinstance(value, Tensor):
                        value.fill_(-0.0)
        for segment in new:
            segment.begun = True
        return by_step

    def create(self, segment: Segment, first: InitialValues | None = None) -> None:
        """Create the initial state of ``segment``, if it has none; ``first``: initial values."""
        if self.entries.of(segment):
            return
        first = first or self.entries.initial_values()
        if segment.begun:  # a script has removed it
            self.move([*segment.region.arrays], first)
        live = self.entries.states[segment.tensor]
        for name, value in first(segment.group, segment.tensor).items():
            if is_elementwise(name, value, (1,)):
                live[name] = self._view(segment, name, value.dtype, first)
                _set(live[name], value)
            else:
                live[name] = copied(value)

    def unstep(self, segment: Segment) -> None:
        """Reset ``segment`` as if it had never been stepped."""
        segment.begun = False
        if self.entries.states.pop(segment.tensor, None):
            for name in segment.region.arrays:
                _set(self.view(segment, name), 0.0)

    def _view(
        self, segment: Segment, name: str, dtype: torch.dtype, first: InitialValues
    ) -> StateArray:
        """Return the memory of state ``name`` of ``segment``; allocate the array if it is new."""
        region = segment.region
        if name not in region.arrays:
            if self._is_in_blocks(region):
                region.arrays[name] = self._pieces(region, name, dtype)
            else:
                self._allocate(name, {region: dtype}, first)
        return self.view(segment, name)

    @staticmethod
    def view(segment: Segment, name: str) -> StateArray:
        """Return the entry of state ``name`` of ``segment``."""
        [(_, moment)] = segment.region.moments(name, segment.start, segment.stop)
        return moment

    def move(self, names: Iterable[str], first: InitialValues | None = None) -> None:
        """Move the states ``names`` into new memory: the former stays as it is, in state dicts that
        a script keeps.
        """
        live, first = self.entries.states, first or self.entries.initial_values()
        for name in names:
            former = {r: r.arrays[name] for r in self.regions if name in r.arrays}
            own = [
                segment
                for region in former
                for segment in region.segments
                for value in [self.entries.of(segment).get(name)]
                if value is not None and _address(value) == _address(self.view(segment, name))
            ]
            whole = {r: array.dtype for r, array in former.items() if isinstance(array, Tensor)}
            self._allocate(name, whole, first)
            for region, array in former.items():
                if region in whole:
                    region.arrays[name].copy_(array)
                else:
                    region.arrays[name] = deepcopy(array)
            for segment in own:
                live[segment.tensor][name] = self.view(segment, name)

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        live = self.entries.states[segment.tensor]
        if name not in live:
            dtype = step_dtype(segment.tensor.dtype)
            live[name] = self._view(segment, name, dtype, self.entries.initial_values())
            _set(live[name], 0.0)
        if isinstance(live[name], CodedArray):
            live[name].put(at, values)
            return
        live[name][at : at + values.numel()].copy_(values)

    def adopt(self, segments: Iterable[Segment], by_step: bool = False) -> None:
        """Move tensors in entries that are not in the arrays there: a step of the script's class
        has assigned them, or, ``by_step``, a first step has created them.

        Raises UnsupportedOptimizerError for state that is neither per element nor a scalar.
        """
        first, live = self.entries.initial_values(), self.entries.states
        others = list[tuple[Segment, str, StateArray]]()
        for segment in segments:
            shape = segment.tensor.shape
            for name, value in self.entries.of(segment).items():
                if isinstance(value, CodedArray):
                    dtype = torch.float32
                elif is_scalar(name, value, shape) or name in self.entries.of_wholes:
                    continue
                elif is_elementwise(name, value, shape):
                    dtype = value.dtype
                else:
                    key = segment.parts[0].flat.key if segment.parts else "no parameter"
                    what = f"a segment of {key!r}"
                    refuse_unknown(self.entries.optimizer, name, value, what)
                if _address(value) != _address(self._view(segment, name, dtype, first)):
                    others.append((segment, name, value))
        if not by_step:
            self.move(dict.fromkeys(name for _, name, _ in others), first)
        for segment, name, value in others:
            own = live[segment.tensor][name] = self.view(segment, name)
            _set(own, value)

    # ---- arrays of flat buffers ----

    @property
    def all_arrays(self) -> list[Tensor]:
        """The arrays of all regions that are not in pieces."""
        arrays = [array for region in self.regions for array in region.arrays.values()]
        return [array for array in arrays if isinstance(array, Tensor)]

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return the master weights and each per-element state of ``flat`` that has begun, 1-D over
        ``flat.owned``: writable views, or states in new memory if its region has some in 8 bits.
        """
        arrays = {MASTER: masters(flat)}
        parts = self.parts(flat)
        if not parts:
            return arrays
        self.adopt(segment for segment, _ in parts)
        begun = (name for segment, _ in parts for name in self.entries.elementwise(segment))
        # now: a save decodes on a thread of its own
        pieces = {name: self._moments_of(flat, name) for name in dict.fromkeys(begun)}
        views = {
            name: moment
            for name, of in pieces.items()
            for _, moment in of
            if isinstance(moment, Tensor) and moment.shape == arrays[MASTER].shape
        }
        if views.keys() == pieces.keys():
            return arrays | views
        dtypes = {MASTER: arrays[MASTER].dtype} | {
            name: torch.float32 if isinstance(of[0][1], CodedArray) else of[0][1].dtype
            for name, of in sorted(pieces.items())
        }

        def read(name: str) -> Tensor:
            if name == MASTER:
                return arrays[name]
            out = torch.zeros_like(arrays[MASTER], dtype=dtypes[name])
            for at, moment in pieces[name]:
                values = decoded(moment)
                out[at : at + values.numel()] = values
            return out

        return FetchedArrays(dtypes, read)

    def _moments_of(self, flat: OptimizerShard, name: str) -> list[tuple[int, StateArray]]:
        region, base = self._region_of[flat.key]
        return region.moments(name, base, base + flat.owned[1] - flat.owned[0])

    def memory(self, flat: OptimizerShard) -> list[Tensor]:
        """Return the tensors that hold the per-element states of ``flat``."""
        parts = self.parts(flat)
        if not parts:
            return []
        self.adopt(segment for segment, _ in parts)
        names = self._region_of[flat.key][0].arrays
        tensors = list[Tensor]()
        for _, moment in (piece for name in names for piece in self._moments_of(flat, name)):
            if isinstance(moment, CodedArray):
                tensors += moment.codes, moment.scales
            else:
                tensors.append(moment)
        return tensors

    def address(self, flat: OptimizerShard, name: str) -> int:
        """Return the address of the first number of state ``name`` of ``flat``; 0 if missing.
        :meth:`arrays` may move it.
        """
        for segment, part in self.parts(flat):
            value = self.entries.of(segment).get(name)
            if value is not None:
                return int(value.data_ptr() + (part.offset - part.start) * value.itemsize)
        return 0


def _address(moment: StateArray) -> int:
    return (moment.codes if isinstance(moment, CodedArray) else moment).data_ptr()


def _set(moment: StateArray, values: StateArray | float) -> None:
    """Overwrite ``moment`` with ``values``, of its shape, or one for all elements: 0 in codes."""
    if isinstance(moment, Tensor):
        moment[:] = values.decode() if isinstance(values, CodedArray) else values
    elif isinstance(values, Tensor) and values.numel() == moment.numel > 1:
        moment.encode(values)
    else:
        none = moment.codec.zeros(moment.numel, moment.codes.device)
        moment.copy_(values if isinstance(values, CodedArray) else none)
