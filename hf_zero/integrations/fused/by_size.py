"""The blocks in which "auto" installs no kernel because they are narrow.

A kernel of Triton is launched from Python, which takes the host longer than a launch of torch's
takes. In wide blocks the GPU works longer than the host, and in compiled blocks inductor launches;
in narrow ones that are not compiled, the GPU waits for launches: on one H200 a model of 16 layers
of width 1,024 took longer with kernels than without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

NARROW = 1024  # the widest blocks that were seen to be slower; no wider ones were


def width_of(block: nn.Module) -> float:
    """Return the width of ``block``: the largest number that a linear layer of it has both inputs
    and outputs of; infinite if it has no such layer.
    """
    widths = []
    for module in block.modules():
        sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
        if None in sizes:  # transformers' Conv1D
            sizes = [getattr(module, name, None) for name in ("nx", "nf")]
        known = [size for size in sizes if isinstance(size, int)]
        if len(known) == 2:
            widths.append(min(known))
    return max(widths, default=math.inf)


def narrow_blocks(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the ``blocks`` of at most :data:`NARROW`."""
    return [block for block in blocks if width_of(block) <= NARROW]
