"""The names of fused kernels, and which of them "auto" means where."""

from __future__ import annotations

from collections.abc import Iterable

NAMES = ("norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer")

AUTO: dict[str, tuple[str, ...]] = {
    "cuda": NAMES,
    # A GPU for which Triton has no driver, or is switched off: references would run.
    "cuda without Triton": ("loss",),
    # There are no kernels for norms and the like on CPUs: their references would run, slower than
    # torch's own.
    "cpu": ("loss", "optimizer"),
}
"""What "auto" means, by the kind of device."""

IN_COMPILED_BLOCKS = ("qkv",)
"""Of those, what "auto" means inside a compiled block: inductor fuses norms, activations,
rotations and sums there itself.
"""


def auto(device: str) -> tuple[str, ...]:
    """The kernels of "auto" on ``device``, a key of :data:`AUTO`; none on a kind that has no
    row.
    """
    return AUTO.get(device, ())


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` once each, in the order of :data:`NAMES`.

    Raises ValueError for one that is not there.
    """
    given = set(names)
    if unknown := given - set(NAMES):
        raise ValueError(min(unknown))
    return tuple(name for name in NAMES if name in given)
