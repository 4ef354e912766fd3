"""Partition of a model into units, modules that are gathered and released together, and the choice
of the parameters that stay whole between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout.walk import (
    attribute_of,
    declared,
    modules_of,
    named_modules_of,
    parameters_of,
)

LARGE_LEAF = 0.25  # of the largest block: an embedding or head of this size is a unit of its own
PARTS = 16  # a model without blocks is cut into about this many units
WHOLE = "_z3_leaf"  # DeepSpeed's attribute of a module to be gathered whole (leaf_modules.py)
# a module's tuples of parameter names to be placed one after another
PACKED = "_hf_zero_packed"
MIN_UNIT = 1 << 16  # elements: a gather of fewer costs more in latency than it saves
# elements: default limit for consecutive blocks that share a unit
GRANULARITY = MIN_UNIT
# elements: default limit for parameters that stay whole between steps where others are sharded;
# DeepSpeed's default, which its scripts rely on when they read a scale or a bias between steps
PERSISTENCE = 100_000
# elements of parameters that are yet to be cut among ranks, in place of their own
Sizes = Mapping[nn.Parameter, int]
OWN: Sizes = MappingProxyType({})
PACKED_UNITS = 16  # 4 MiB in fp32: fewer messages, and a backward still begins to send early


@dataclass(frozen=True)
class UnitSpec:
    """Plan of a unit: the modules it wraps and the parameters it owns, by first name and in the
    order of their flat buffer.
    """

    paths: tuple[str, ...]  # of the modules; without modules, the name of the unit
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def name(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]}..{self.paths[-1]}"

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def outside(self) -> bool:
        """Return whether no module of the model has its parameters (``outside.py``)."""
        return not self.modules


def _size(parameter: nn.Parameter, sizes: Sizes) -> int:
    size = sizes.get(parameter) if sizes else None
    return parameter.numel() if size is None else size


def _numel(module: nn.Module, sizes: Sizes = OWN) -> int:
    return sum([_size(parameter, sizes) for parameter in parameters_of(module)])


def _is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward of its own: hooks on a container never fire."""
    return type(module).forward is not nn.Module.forward


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _outermost(model: nn.Module, ids: set[int]) -> list[tuple[str, nn.Module]]:
    """Return the modules with these ``ids`` that are not inside another, in definition order."""
    outermost: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if id(module) in ids and module is not model:
            outermost.append((name, module))
            return
        for child_name, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return outermost


def _with_parameters(modules: Iterable[nn.Module]) -> set[int]:
    return {id(module) for module in modules if parameters_of(module)}


def find_blocks(model: nn.Module, sizes: Sizes = OWN) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of ``model``, else parts of about equal size."""
    return repeated_blocks(model, sizes) or _by_size(model, sizes)


def repeated_blocks(model: nn.Module, sizes: Sizes = OWN) -> list[tuple[str, nn.Module]]:
    """Return gradient-checkpointing layers, else ``_no_split_modules``, else the items of
    ModuleLists, in definition order.
    """
    modules = modules_of(model)
    blocks = _outermost(
        model,
        _with_parameters(m for m in modules if "GradientCheckpointingLayer" in _class_names(m)),
    )
    if not blocks:
        names = set().union(*declared(model, "_no_split_modules").values())
        blocks = _outermost(
            model, _with_parameters(m for m in modules if type(m).__name__ in names)
        )
    if not blocks:
        lists = [
            m for m in modules if isinstance(m, nn.ModuleList) and len(m) > 1 and m is not model
        ]
        numels = [_numel(m, sizes) for m in lists]
        largest = max(numels, default=0)
        chosen = [m for m, numel in zip(lists, numels) if numel * 4 >= largest > 0]
        blocks = _outermost(model, _with_parameters(item for m in chosen for item in _called(m)))
    return blocks


def _called(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of ``container``. An item that is itself a container of modules, without a
    forward and parameters of its own, is replaced by its items.
    """
    for item in container.children():
        if _is_called(item) or item._parameters or not any(map(_is_called, item.modules())):
            yield item
        else:
            yield from _called(item)


def names_in_blocks(model: nn.Module) -> frozenset[str]:
    """Return first names of the parameters in blocks of ``model``, including tied ones."""
    inside = {id(p) for _, block in find_blocks(model) for p in parameters_of(block)}
    return frozenset(name for name, p in model.named_parameters() if id(p) in inside)


def _by_size(model: nn.Module, sizes: Sizes) -> list[tuple[str, nn.Module]]:
    total = _numel(model, sizes)
    if total < 2 * MIN_UNIT:
        return []
    target = max(total // PARTS, MIN_UNIT)
    chosen: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            size = _numel(child, sizes)
            if size < target // 4:
                continue
            if _is_called(child) and (
                size <= target
                or not any(_numel(part, sizes) >= target // 4 for part in child.children())
            ):
                chosen.add(id(child))
            else:
                visit(child)

    visit(model)
    return _outermost(model, chosen)


def find_units(
    model: nn.Module,
    granularity: int | None = None,
    in_root: Collection[int] = (),
    sizes: Sizes = OWN,
) -> tuple[list[UnitSpec], dict[str, str]]:
    """Return the units of ``model`` (the first is the root) and its tied names as ``{alias: first
    name}``.

    Consecutive blocks of one container share a unit as long as they have at most ``granularity``
    elements together: the cost of a gather, a reduction and the Python around them does not shrink
    with the blocks. 0: each block is a unit; None: :data:`GRANULARITY`. A module marked
    :data:`WHOLE` is a unit unless it is inside one, whatever blocks it holds. Parameters of one
    unit that a module lists together in :data:`PACKED` follow the first of them; raises
    PartitionError for a name that the module does not have. A parameter reached from two units
    belongs to the root: their lowest common ancestor, since units do not nest. Parameters with ids
    in ``in_root`` belong to it, too. ``sizes``: elements of parameters, in place of their own.
    """
    names, aliases = _names(model)
    blocks = find_blocks(model, sizes)
    alone = _alone(model, blocks, sizes)
    wrapped = _outermost(model, alone | {id(block) for _, block in blocks})
    root, owned = _owners(model, names, wrapped, in_root)
    packs = _packs(model)
    limit = GRANULARITY if granularity is None else granularity
    units: list[list[UnitSpec]] = []  # the blocks of each
    numel = 0  # of the last one
    for (name, module), parameters in zip(wrapped, owned):
        if not parameters:
            continue
        block = UnitSpec((name,), (module,), _in_packs(parameters, packs))
        added = sum(_size(parameter, sizes) for _, parameter in parameters)
        last = units[-1][-1] if units else None
        if (
            last is not None
            and numel + added <= limit
            and not alone & {id(last.module), id(module)}
            and last.name.rpartition(".")[0] == name.rpartition(".")[0]
        ):
            units[-1].append(block)
            numel += added
        else:
            units.append([block])
            numel = added
    return [UnitSpec(("",), (model,), _in_packs(root, packs)), *map(_joined, units)], aliases


def _joined(blocks: Sequence[UnitSpec]) -> UnitSpec:
    """Return the unit of ``blocks``."""
    of = chain.from_iterable
    return UnitSpec(
        tuple(of(block.paths for block in blocks)),
        tuple(of(block.modules for block in blocks)),
        tuple(of(block.parameters for block in blocks)),
    )


def _names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return the parameters of ``model`` by first name, and the other names of tied ones as
    ``{alias: first name}``.
    """
    first_name: dict[int, str] = {}
    names: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), name)
        if first == name:
            names[name] = parameter
        else:
            aliases[name] = first
    return names, aliases


def _alone(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], sizes: Sizes) -> set[int]:
    """Return the ids of modules that are units by themselves: those marked :data:`WHOLE`, and large
    embeddings and heads outside ``blocks``.
    """
    inside = {id(m) for _, block in blocks for m in modules_of(block)}
    users: dict[int, int] = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)] = users.get(id(parameter), 0) + 1
    largest = max((_numel(block, sizes) for _, block in blocks), default=0)
    leaves = {
        id(m)
        for m in modules_of(model)
        if id(m) not in inside
        and isinstance(m, (nn.Embedding, nn.Linear))
        and largest
        and _numel(m, sizes) >= max(LARGE_LEAF * largest, MIN_UNIT)
        and all(users[id(p)] == 1 for p in parameters_of(m))
    }
    whole = _with_parameters(
        m for m in modules_of(model) if attribute_of(m, WHOLE) and _is_called(m)
    )
    return leaves | whole


def _owners(
    model: nn.Module,
    names: Mapping[str, nn.Parameter],
    wrapped: Sequence[tuple[str, nn.Module]],
    in_root: Collection[int],
) -> tuple[list[tuple[str, nn.Parameter]], list[list[tuple[str, nn.Parameter]]]]:
    """Return the root's parameters, and those reached from each of the ``wrapped`` modules only."""
    reached: dict[int, set[int]] = {}
    for index, (_, module) in enumerate(wrapped):
        for parameter in parameters_of(module):
            reached.setdefault(id(parameter), set()).add(index)
    reached_outside = _reached_outside(model, {id(module) for _, module in wrapped})
    reached_outside.update(in_root)
    owned: list[list[tuple[str, nn.Parameter]]] = [[] for _ in wrapped]
    root: list[tuple[str, nn.Parameter]] = []
    for name, parameter in names.items():
        units = reached.get(id(parameter), set())
        if len(units) == 1 and id(parameter) not in reached_outside:
            owned[next(iter(units))].append((name, parameter))
        else:
            root.append((name, parameter))
    return root, owned


def persistence(most: int | None) -> int:
    """Return the limit of :func:`persistent_names` for ``most``."""
    return PERSISTENCE if most is None else most


def persistent_names(
    model: nn.Module, most: int | None, in_all: int | None, sizes: Sizes
) -> frozenset[str]:
    """Return first names of the parameters of ``model`` that stay whole between steps where
    parameters are sharded: parameters of at most ``most`` elements (None: :data:`PERSISTENCE`), in
    the order of the model, as long as they have at most ``in_all`` elements together (None: any
    number).

    A pack (:data:`PACKED`) stays whole as a whole, or not at all. ``sizes``: elements of
    parameters, in place of their own.
    """
    limit = persistence(most)
    chosen: dict[int, str] = {}
    budget = in_all
    for name, parameter in model.named_parameters():
        size = _size(parameter, sizes)
        if 0 < size <= limit and (budget is None or size <= budget):
            chosen[id(parameter)] = name
            budget = None if budget is None else budget - size
    for pack in _packs(model):
        if not chosen.keys() >= set(pack):
            for key in pack:
                chosen.pop(key, None)
    return frozenset(chosen.values())


def packed_elements(granularity: int | None = None) -> int:
    """Return the number of elements that small units may have together in one message, for units of
    at most ``granularity`` elements as in :func:`find_units`.
    """
    return PACKED_UNITS * (GRANULARITY if granularity is None else granularity)


def _packs(model: nn.Module) -> list[list[int]]:
    """Return the parameter ids of each pack that a module of ``model`` declares."""
    packs = []
    for name, module in named_modules_of(model):
        for pack in attribute_of(module, PACKED) or ():
            try:
                packs.append([id(module.get_parameter(parameter)) for parameter in pack])
            except AttributeError as error:
                raise PartitionError(
                    f"{PACKED} of {name or 'the model'} ({type(module).__name__}) names a "
                    f"parameter that is not there: {error}; "
                    "name the parameters as module.named_parameters() does"
                ) from None
    return packs


def _in_packs(
    parameters: list[tuple[str, nn.Parameter]], packs: list[list[int]]
) -> tuple[tuple[str, nn.Parameter], ...]:
    """Return ``parameters`` in order, with the members of a pack moved behind its first."""
    order = {id(parameter): (index, 0) for index, (_, parameter) in enumerate(parameters)}
    for pack in packs:
        members = [key for key in pack if key in order]
        if members:
            first, _ = min(order[key] for key in members)
            order.update((key, (first, index)) for index, key in enumerate(members))
    return tuple(sorted(parameters, key=lambda item: order[id(item[1])]))


def _reached_outside(model: nn.Module, wrapped: set[int]) -> set[int]:
    reached: set[int] = set()
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen or id(module) in wrapped:
            return
        seen.add(id(module))
        reached.update(id(p) for p in module._parameters.values() if p is not None)
        for child in module.children():
            visit(child)

    visit(model)
    return reached
