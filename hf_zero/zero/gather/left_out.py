"""Modules that no rank runs in a forward, as techniques that drop blocks say beforehand: their
units are neither gathered nor reduced in it, and their parameters are known to get no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from torch import nn

from hf_zero.zero.gather.unit import OutermostForward, Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer

# Returns the modules that no rank runs in an outermost forward.
ModulesLeftOut = Callable[[OutermostForward], Collection[nn.Module]]


class LeftOutModules:
    """The modules of ``model`` that the functions ``sources`` leave out, forward by forward."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]):
        self._model, self._units = model, list(units)
        self.sources: list[ModulesLeftOut] = []
        # by module: parameters that no other module holds, as bits in flat buffers
        self._held: dict[nn.Module, list[tuple[FlatBuffer, int]]] = {}

    def record(self, forward: OutermostForward) -> None:
        """Record on ``forward``, an outermost one, the units and parameters that no rank uses in
        it. A submodule that is called directly is never left out.
        """
        modules = {module for source in self.sources for module in source(forward)}
        if forward.path:
            part = self._model.get_submodule(forward.path)
            modules &= {*part.modules()} - {part}
        if modules:
            forward.left_out = frozenset(
                unit
                for unit in self._units[1:]
                if unit.modules and all(module in modules for module in unit.modules.values())
            )
            forward.idle = self._idle(modules)

    def _idle(self, modules: set[nn.Module]) -> dict[FlatBuffer, int]:
        """Return, by flat buffer, the bits of the parameters that no module outside ``modules``
        holds; each of these counts with its submodules.
        """
        if not modules <= self._held.keys():
            bits = {
                id(parameter): (flat, 1 << index)
                for unit in self._units
                for flat in unit.trainable_flats
                for index, parameter in enumerate(flat.members)
            }
            holders = _holders_in(self._model)
            for module in modules - self._held.keys():
                inside = _holders_in(module).items()
                alone = [key for key, number in inside if number == holders[key]]
                self._held[module] = [bits[key] for key in alone if key in bits]
        idle: dict[FlatBuffer, int] = {}
        for module in modules:
            for flat, bit in self._held[module]:
                idle[flat] = idle.get(flat, 0) | bit
        return idle


def _holders_in(module: nn.Module) -> Counter[int]:
    """Return the number of modules in ``module`` that hold each parameter, by its id."""
    registries = (part._parameters.values() for part in module.modules())
    return Counter(map(id, chain.from_iterable(registries)))
