"""The 4-bit layers of bitsandbytes under an engine."""

from __future__ import annotations

from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout.walk import attribute_of, named_modules_of

_PACKS = "support_avx512bf16_for_cpu"


def keep_packing(model: nn.Module) -> None:
    """Keep the 4-bit layers of ``model`` from packing their weights in another way in evaluations
    on CPUs: that replaces bytes and scales, which an engine has laid out.

    Raises PartitionError for weights that are packed so already; they give no gradients.
    """
    for name, module in named_modules_of(model):
        state = getattr(attribute_of(module, "weight"), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise PartitionError(
                f"a forward in eval mode has packed the weight of {name} for inference on this "
                "CPU, in which form it gives no gradients: load the model again, and call "
                "initialize, or model.train(), before the first forward"
            )
        if attribute_of(module, _PACKS):
            setattr(module, _PACKS, False)
