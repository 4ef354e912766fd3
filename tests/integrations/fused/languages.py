"""Tiny language models of every class that has a fused head, and batches for them with padding
and ignored labels.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.integrations.fused import animals
from tests.integrations.fused.animals import GROUPED, causal
from tests.integrations.fused.animals import VOCABULARY as VOCABULARY

_SCALED = GROUPED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Families that have a fused head alone.
_HEADS_ALONE = {name: causal(name.capitalize(), _SCALED) for name in ("granite", "cohere")}
# Options of a family's configuration, by the family and what its head does more.
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gemma2, capped": {"final_logit_softcapping": 3.0},
    "mixtral, with its routers' loss": {"output_router_logits": True, "router_aux_loss_coef": 0.3},
    "gpt2": {},
    "granite, scaled": {"logits_scaling": 3.0},
    "cohere, scaled": {"logit_scale": 0.3},
}
MASKED: dict[str, dict[str, Any]] = {
    name: {} for name in ("bert", "roberta", "deberta-v2", "distilbert")
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"tie_word_embeddings": True, "scale_decoder_outputs": True},
    "t5, untied": {"tie_word_embeddings": False, "scale_decoder_outputs": False},
}
LANGUAGES = {**CAUSAL, **MASKED, **SEQ2SEQ}


def animal_of(name: str) -> animals.Animal:
    family = name.partition(",")[0]
    return _HEADS_ALONE.get(family) or animals.ANIMALS[family]


def build(name: str) -> Any:
    """Return the model of that name in training mode, the same one at each call, with biases and
    norms that are not 0 and 1.
    """
    return animals.build(animal_of(name), **LANGUAGES[name])


def pair(name: str) -> tuple[Any, Any]:
    """Return two models alike."""
    model = build(name)
    return model, copy.deepcopy(model)


def batch(seed: int = 0, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    return animals.inputs("llama", rows=rows, tokens=length, seed=seed)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Compare every gradient within ``tolerance`` of the largest one of its model (a key's bias has
    a gradient of rounding alone); NaN equals NaN.
    """
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name].isnan(), exact[name].isnan()) for name in exact)
    found, exact = (
        {name: grad.nan_to_num() for name, grad in grads.items()} for grads in (found, exact)
    )
    largest = max(float(each.abs().max()) for each in exact.values())
    errors = {name: float((found[name] - exact[name]).abs().max()) for name in exact}
    errors = {
        name: error
        for name, error in errors.items()
        if error > tolerance * (largest * 0.01 + float(exact[name].abs().max()))
    }
    assert not errors, errors
