"""The names that PEFT saves of a model are known without its values, for kinds of adapters that
keep their parameters in different ways.
"""

from __future__ import annotations

import peft
import torch

from hf_zero.integrations.peft.adapters import written as names_written
from tests.helpers.adapters import KINDS, llama
from tests.helpers.cells import in_one_item


@in_one_item(KINDS)
def test_names_are_those_that_are_written(kind: str) -> None:
    model = peft.get_peft_model(llama(), KINDS[kind]())
    if kind == "LoRA":
        model.add_adapter("frozen", KINDS[kind]())
    marks = {
        name: torch.full_like(p, float(number))
        for number, (name, p) in enumerate(model.named_parameters(remove_duplicate=False), 1)
    }
    buffers = {name: torch.zeros_like(b) for name, b in model.named_buffers(remove_duplicate=False)}
    written = {
        float(value.reshape(-1)[0])
        for adapter in model.peft_config
        for value in peft.get_peft_model_state_dict(
            model, {**marks, **buffers}, adapter_name=adapter
        ).values()
    }
    want = {name for name, mark in marks.items() if float(mark.reshape(-1)[0]) in written}
    found = names_written(model)
    assert want <= found
    embeddings = {name for name in marks if "embed_tokens" in name or "lm_head" in name}
    assert found - want <= embeddings, "no more than what is written in some cases"
    assert any(p.requires_grad for name, p in model.named_parameters() if name in want)
    if kind == "LoRA":
        assert any(".frozen." in name for name in want)
