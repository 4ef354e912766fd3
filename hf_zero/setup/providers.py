"""The functions of ``integrations`` that lower layers call. Each imports its module on first use:
the libraries of Hugging Face are not imported for models that do without them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from hf_zero.zero.registered import register


def sequence_attention() -> ModuleType:
    """Return the module that splits the attention of models among ranks."""
    from hf_zero.integrations.fused import sequence_attention

    return sequence_attention


def adapter_names(*args: Any) -> Any:
    """Return the names of the weights of a model of PEFT, as ``AdapterNames`` does."""
    from hf_zero.integrations.peft.weight_names import AdapterNames

    return AdapterNames(*args)


def described_adapters(*args: Any) -> Any:
    """Return the description of the adapters of a model of PEFT."""
    from hf_zero.integrations.peft.adapters import described

    return described(*args)


def accelerate_division() -> Any:
    """Return the division of sequences that Accelerate is configured for; None without one."""
    if "accelerate" not in sys.modules:
        return None
    from hf_zero.integrations.accelerate.state import division_in_effect

    return division_in_effect()


def known_padding(mask: object) -> bool | None:
    """Return whether an attention mask masks anything; None if the host does not know."""
    from hf_zero.integrations.transformers import attention_masks

    return attention_masks.known_padding(mask)


def note_mask(mask: object, pads: bool) -> None:
    """Attach to an attention mask whether it masks anything."""
    from hf_zero.integrations.transformers import attention_masks

    attention_masks.note_mask(mask, pads)


for function in (
    accelerate_division,
    sequence_attention,
    adapter_names,
    described_adapters,
    known_padding,
    note_mask,
):
    register(function.__name__, function)
