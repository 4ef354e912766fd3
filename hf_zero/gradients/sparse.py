"""Sparse gradients, which embeddings with ``sparse=True`` give: they are made dense, and the log
says so once.
"""

from __future__ import annotations

import logging
import weakref

import torch

from hf_zero.distributed.mesh import Mesh
from hf_zero.logs import log_rank0
from hf_zero.units.flat_buffer import FlatBuffer

_warned: weakref.WeakSet[Mesh] = weakref.WeakSet()  # of engines


def dense(flat: FlatBuffer, place: int, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, the sparse gradient of the parameter at ``place`` of ``flat``, as a dense
    tensor.
    """
    if flat.mesh not in _warned:
        _warned.add(flat.mesh)
        log_rank0(
            f"the gradient of {flat.layout.slots[place].name} is sparse and is made dense, because "
            "flat buffers travel whole; "
            "sparse=True saves nothing here and costs a copy",
            logging.WARNING,
        )
    return grad.to_dense()
