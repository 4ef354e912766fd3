"""The table of retired keys in the facade's README is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.facade import FOLDER
from hf_zero.errors import NotBuiltError
from hf_zero.optim.build import build_optimizer

VALUES: dict[str, Any] = {
    "amp": {"enabled": True, "opt_level": "O1"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
    "eigenvalue": {"enabled": True},
    "elasticity": {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4]},
    "graph_harvesting": True,
    "nebula": {"enabled": True},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    "quantize_training": {"enabled": True},
    "sparse_attention": {"mode": "fixed", "block": 16},
    "sparse_gradients": True,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.mics_hierarchical_params_gather": True,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
}


WITH: dict[str, Any] = {
    "zero_optimization.zeropp_loco_param": {"zero_quantized_gradients": True},
}
OTHERWISE: dict[str, Any] = {
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "gradient_clipping": 1.0,
    "bf16.check_grad_overflow": True,
    "managed_gradient_accumulation": False,
    "wall_clock_breakdown": True,
    "tensorboard": {"enabled": True},
    "comms_logger": {"enabled": True},
    "steps_per_print": 10,
    "dump_state": True,
    "zero_optimization.zero_quantized_gradients": True,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_nontrainable_weights": True,
}


def rows(heading: str = "Keys that DeepSpeed has retired") -> dict[str, str]:
    text = (Path(FOLDER) / "README.md").read_text().partition(f"## {heading}")[2]
    text = text.partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)`[^|]*\|[^|]*\| (.*) \|$", text, re.MULTILINE))


def test_all_of_them_are_in_the_table() -> None:
    assert rows().keys() == {*VALUES, "optimizer.type"}


@pytest.mark.parametrize("key", VALUES)
def test_each_does_what_the_table_says(key: str) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = VALUES[key]
    config["zero_optimization"].update(WITH.get(key, {}))
    said = rows()[key]
    if said.startswith("works"):
        ZeroConfig.from_dict(config).resolve(4)
    else:
        assert said.startswith("refused: ")
        with pytest.raises(NotBuiltError, match=re.escape(name)):
            ZeroConfig.from_dict(config)


@pytest.mark.parametrize("key", OTHERWISE)
def test_keys_that_mean_something_else(key: str) -> None:
    said = rows("Keys that mean something else here")
    assert said.keys() == OTHERWISE.keys()
    section, _, name = key.rpartition(".")
    value = {name: OTHERWISE[key]}
    if section == "zero_optimization":
        value["stage"] = 3
    config = {"gradient_clipping": 0.0, **({section: value} if section else value)}
    if said[key].startswith("refused: "):
        with pytest.raises(NotBuiltError, match="offload_optimizer, whose exact update"):
            ZeroConfig.from_dict(config)
    else:
        ZeroConfig.from_dict(config).resolve(4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("OneBitAdam", {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}),
        (
            "OneBitLamb",
            {
                "freeze_step": 1000,
                "bias_correction": False,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
                "coeff_beta": 0.9,
                "factor_max": 4.0,
                "factor_min": 0.5,
                "factor_threshold": 0.1,
                "cuda_aware": False,
                "comm_backend_name": "nccl",
            },
        ),
        (
            "ZeroOneAdam",
            {
                "var_freeze_step": 1000,
                "var_update_scaler": 16,
                "local_step_scaler": 1000,
                "local_step_clipper": 16,
                "cuda_aware": False,
                "comm_backend_name": "nccl",
            },
        ),
    ],
)
def test_optimizers_of_one_bit_take_deepspeeds_settings(name: str, settings: Any) -> None:
    params = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01, **settings}
    config = ZeroConfig.from_dict({"optimizer": {"type": name, "params": params}})
    assert config.optimizer is not None
    made: Any = build_optimizer(config.optimizer, [torch.nn.Parameter(torch.ones(2))])
    assert type(made).__name__ == name and made.param_groups[0]["eps"] == 1e-6
    last = settings.get("freeze_step", settings.get("var_freeze_step"))
    assert made.is_dense(1) and not made.is_dense(last + 1)
