"""The names of fused kernels, and which of them "auto" means where."""

from __future__ import annotations

from collections.abc import Iterable

NAMES = ("norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer")

AUTO: dict[tuple[str, bool], tuple[str, ...]] = {
    ("cuda", False): NAMES,
    # Inside a compiled block inductor fuses norms, activations, rotations and sums itself.
    ("cuda", True): ("qkv", "loss", "optimizer"),
    # There are no kernels for norms and the like on CPUs: their references would run, slower than torch's own.
    ("cpu", False): ("loss", "optimizer"),
    ("cpu", True): ("loss", "optimizer"),
}
"""What "auto" means, by the kind of device and whether blocks are compiled."""


def auto(device: str, compiled: bool) -> tuple[str, ...]:
    """The kernels of "auto" on ``device`` ("cuda", "cpu"); none on a kind that has no row."""
    return AUTO.get((device, compiled), ())


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` once each, in the order of :data:`NAMES`. Raises ValueError for one that is not there."""
    given = set(names)
    if unknown := given - set(NAMES):
        raise ValueError(min(unknown))
    return tuple(name for name in NAMES if name in given)
