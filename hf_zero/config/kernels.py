"""The names of the fused kernels, and those that "auto" selects on each kind of device."""

from __future__ import annotations

from collections.abc import Iterable

NAMES = ("norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer")

AUTO: dict[str, tuple[str, ...]] = {
    "cuda": NAMES,
    # A GPU without a Triton driver, or with Triton disabled, would run the reference versions.
    "cuda without Triton": ("loss",),
    # CPUs have no kernels for norms and the like: the references are slower than torch's own.
    "cpu": ("loss", "optimizer"),
}
"""The kernels of "auto", by the kind of device."""

IN_BLOCKS = frozenset(("norms", "activations", "rotary", "qkv", "residual"))
"""The kernels that replace modules of blocks."""

IN_COMPILED_BLOCKS = ("qkv",)
"""The kernels of "auto" inside a compiled block, where inductor fuses norms, activations,
rotations and sums itself.
"""


def auto(device: str) -> tuple[str, ...]:
    """Return the kernels of "auto" on ``device``, a key of :data:`AUTO`; none for other devices."""
    return AUTO.get(device, ())


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` without duplicates in the order of :data:`NAMES`.

    Raises ValueError for an unknown name.
    """
    chosen = set(names)
    if unknown := chosen - set(NAMES):
        raise ValueError(min(unknown))
    return tuple(name for name in NAMES if name in chosen)
