"""Linear layers of torchao's at every stage against the same layers in a plain loop, and the
folder that a conversion writes. Runs where torchao is installed: ``pip install hf-zero[torchao]``.
"""

import copy
import sys

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.techniques.blocks import linears_of_blocks
from hf_zero.techniques.quantized_linears import base_config
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import llama, seeded, tokens
from tests.helpers.stacks import by_hand, on_ranks, run_steps, stack
from tests.helpers.training import sgd

TYPES = ("int4_weight", "int8_weight", "int8_dynamic_int4_weight", "int8_dynamic_int8_weight")


def has_torchao():
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True


needs_torchao = pytest.mark.skipif(
    not has_torchao(), reason="torchao is not installed; pip install hf-zero[torchao]"
)


def distance(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def aware(name, group_size=8):
    return {"quantization_aware_training": {"config": name, "group_size": group_size}}


def prepared(name):
    """The same model by torchao's own calls."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = stack()
    quantize_(
        model,
        QATConfig(base_config(name, 8), step="prepare"),
        filter_fn=lambda module, path: isinstance(module, nn.Linear) and "blocks." in path,
    )
    return model


def trained(rank, model, config):
    engine = start(model, sgd(model), config)
    run_steps(engine, rank, range(3))
    weights = full_weights(engine)
    engine.destroy()
    return weights


@needs_torchao
@in_turn("stage, name", list(enumerate(TYPES)))
def test_trains_as_torchao_in_a_plain_loop(stage, name):
    found = on_ranks(2, trained, config_of(stage, **aware(name)))[0]
    windows = [[(1.0, 0)]] * 3
    wanted, _ = by_hand(sgd, windows, 2, build=lambda: prepared(name))
    plain, _ = by_hand(sgd, windows, 2)
    for key, value in wanted.items():
        assert distance(found[key], value) < 1e-5, key
    assert distance(wanted["blocks.0.up.weight"], plain["blocks.0.up.weight"]) > 1e-5


@needs_torchao
def test_a_checkpoint_becomes_a_quantized_folder(tmp_path):
    """It computes what the training computed, loaded by ``from_pretrained``."""
    import transformers
    from typer.testing import CliRunner

    from hf_zero.cli.app import app

    def wide():
        config = copy.deepcopy(llama().config)
        config.update(
            {"hidden_size": 32, "intermediate_size": 64, "architectures": ["LlamaForCausalLM"]}
        )
        return transformers.LlamaForCausalLM(config)

    def run(rank, model):
        section = aware("int8_dynamic_int4_weight")
        engine = start(model, sgd(model), config_of(3, **section))
        ids = tokens(0, 0, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=tokens(5, 0, 0)).logits
        engine.save_checkpoint(str(tmp_path / "runs"))
        return logits

    logits = on_ranks(2, run, build=lambda: seeded(wide))[0]
    arguments = ["convert-checkpoint", str(tmp_path / "runs"), str(tmp_path / "model")]
    arguments += ["--quantize", "int8_dynamic_int4_weight", "--group-size", "8", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.quantization_config.quant_method == "torchao"
    weight = loaded.model.layers[0].mlp.up_proj.weight
    assert type(weight) is not nn.Parameter and type(loaded.lm_head.weight) is nn.Parameter
    with torch.no_grad():
        assert distance(loaded(input_ids=tokens(5, 0, 0)).logits, logits) < 1e-5


@needs_torchao
def test_float8_by_emulation():
    """A linear layer in float8 is near the one in fp32, and not the same."""
    config = config_of(3, float8_training={"recipe": "tensorwise", "emulate": True})
    found = on_ranks(2, trained, config)[0]
    plain, _ = by_hand(sgd, [[(1.0, 0)]] * 3, 2)
    for key, value in plain.items():
        assert distance(found[key], value) < 0.1, key
    assert distance(found["blocks.0.up.weight"], plain["blocks.0.up.weight"]) > 1e-6


@needs_torchao
def test_refuses_what_cannot_be_in_few_bits():
    with pytest.raises(ConfigError, match="group_size = 7 does not divide the 64 inputs"):
        start(stack(), None, config_of(1, **aware("int4_weight", 7)))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9"):
        start(stack(), None, config_of(1, float8_training={"recipe": "rowwise"}))


def test_refuses_both_and_models_without_blocks():
    both = {**aware("int8_weight"), "float8_training": {"recipe": "rowwise"}}
    with pytest.raises(ConfigError, match="both replace the linear layers; keep one"):
        start(stack(), None, config_of(1, **both))
    with pytest.raises(ConfigError, match="this model has none there"):
        start(nn.Sequential(nn.Linear(7, 5)), None, config_of(1, **aware("int8_weight")))


def test_without_torchao_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"needs torchao.*pip install hf-zero\[torchao\]"):
        start(stack(), None, config_of(1, **aware("int8_weight")))


def test_the_layers_chosen_are_those_of_blocks():
    assert linears_of_blocks(stack()) == [
        f"blocks.{number}.{name}" for number in range(3) for name in ("up", "down")
    ]


def test_a_folder_is_quantized_to_what_is_known(tmp_path):
    from hf_zero.integrations.transformers.quantized_folder import quantize_folder

    with pytest.raises(ConfigError, match="'int3' is not a format to quantize to"):
        quantize_folder(tmp_path, tmp_path, "int3")
