"""4-bit layers of bitsandbytes, by what their modules have; its own layers are in
``ranks/test_weights_of_parts.py``.
"""

from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn

from hf_zero.deepspeed.construction import Loading, current_loading
from hf_zero.errors import PartitionError
from hf_zero.integrations.bitsandbytes import keep_packing
from hf_zero.integrations.transformers import loading


def layer(**state):
    made = nn.Linear(2, 2)
    made.support_avx512bf16_for_cpu = True
    made.weight.quant_state = SimpleNamespace(**state)
    return made


def test_an_evaluation_does_not_pack_weights_in_another_way():
    model = nn.Sequential(layer(), nn.Linear(2, 2))
    keep_packing(model)
    assert model[0].support_avx512bf16_for_cpu is False


def test_weights_that_are_packed_in_another_way_are_refused():
    model = nn.Sequential(layer(), layer(packing_format_for_cpu=True))
    with pytest.raises(PartitionError, match=r"packed the weight of 1 for .*load the model again"):
        keep_packing(model)


def test_other_quantized_models_are_loaded_whole_and_said_to_be(monkeypatch):
    said = []
    monkeypatch.setattr(loading, "log_rank0", lambda text, level: said.append(text))
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="torchao"))
    given = SimpleNamespace(hf_quantizer=quantizer, is_quantized=True)
    load = partial(loading.open_lazily, lambda *args: args)
    token = current_loading.set(Loading(shards=True))
    try:
        found = load(nn.Linear(2, 2), None, ["model.safetensors"], given)
    finally:
        current_loading.reset(token)
    assert found[1] is None
    (line,) = said
    assert "Linear is quantized by torchao: each rank loads the whole model; " in line
    assert "BitsAndBytesConfig(load_in_4bit=True)" in line
