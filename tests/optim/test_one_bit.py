"""Messages of a configuration and an optimizer about momenta in one bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.optim import OneBitAdam, ZeroOneAdam
from hf_zero.optim.one_bit import as_sent, one_bit_of

ONE: dict[str, Any] = {"compressed_communication": {"bits": 1, "freeze_step": 5}}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4, 4))]


def config(stage: int = 1, zero: Any = None, **more: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"zero_optimization": {"stage": stage, **(zero or {})}, **more})


def test_any_adam_sends_its_momentum_where_the_section_asks_for_it():
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        found = one_bit_of(config(**ONE), cls(parameters(), lr=0.1))
        assert found is not None and found.block == 2048
        assert [found.is_dense(step) for step in (1, 5, 6)] == [True, True, False]
    assert one_bit_of(config(), torch.optim.AdamW(parameters())) is None
    assert one_bit_of(config(**ONE), None) is None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_runs_at_stage_1(stage):
    given = config(stage)
    made = as_sent(given, one_bit_of(given, OneBitAdam(parameters(), freeze_step=3)))
    assert (made.stage, made.compressed_communication.bits) == (1, 1)
    assert "1 bit" in made.sources["compressed_communication.bits"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(3), "OneBitAdam in 1 bit does not go with zero_optimization.stage: 3: .* stage 1"),
        (config(compressed_communication={"bits": 4}), "one of the two; remove the key"),
        (config(zero={"zero_quantized_gradients": True}), "travel twice; remove the key"),
        (config(zero={"offload_optimizer": {"device": "cpu"}}), "offload_optimizer: the update"),
        (config(replicate_size=2), "replicate_size: messages go over one axis"),
        (config(zero={"mics_shard_size": 1}).resolve(2), "mics_shard_size: messages go over one"),
        (config(data_types={"grad_accum_dtype": "bf16"}), "gradient_accumulation_dtype: the grad"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        one_bit_of(given, OneBitAdam(parameters(), freeze_step=3))


def test_groups_that_do_not_go_with_it_are_named():
    groups = [{"params": parameters()}, {"params": parameters(), "betas": (0.5, 0.9)}]
    for optimizer, message in (
        (torch.optim.AdamW(parameters(), amsgrad=True), "amsgrad: a group sets it"),
        (torch.optim.AdamW(parameters(), maximize=True), "maximize: a group sets it"),
        (torch.optim.AdamW(groups), "betas: groups differ"),
        (torch.optim.AdamW(parameters(), betas=(0.0, 0.9)), r"give a first one in \(0, 1\)"),
        (torch.optim.Adam(parameters(), weight_decay=0.1), "weight_decay of Adam, .*: take AdamW"),
        (torch.optim.SGD(parameters(), lr=0.1), "the optimizer is SGD; take one of them, or .*: 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            one_bit_of(config(**ONE), optimizer)
    with pytest.raises(ConfigError, match=r"1 without compressed_communication\.freeze_step"):
        one_bit_of(
            config(compressed_communication={"bits": 1}), torch.optim.AdamW(parameters(), lr=0.1)
        )


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (OneBitAdam, {"freeze_step": 0}, "OneBitAdam: freeze_step is 0; give a number of steps"),
        (ZeroOneAdam, {"var_freeze_step": 2.5}, "var_freeze_step is 2.5"),
        (ZeroOneAdam, {"var_update_scaler": True}, "var_update_scaler is True"),
        (ZeroOneAdam, {"local_step_clipper": 0}, "local_step_clipper is 0"),
        (OneBitAdam, {"betas": (0.0, 0.9)}, "needs a first one in"),
        (OneBitAdam, {"lr": -1.0}, "Invalid learning rate"),
    ],
    ids=str,
)
def test_settings_outside_their_range(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(parameters(), **settings)


def test_what_has_no_effect_is_said(caplog):
    caplog.set_level("INFO", "hf_zero")
    groups = [{"params": parameters(), "exp_avg_mask": torch.ones(4, 4)}]
    ZeroOneAdam(groups, cuda_aware=False, comm_backend_name="nccl")
    said = caplog.text
    for key in ("cuda_aware", "comm_backend_name", "exp_avg_mask"):
        assert key in said, key


def test_a_freeze_step_that_nothing_reads_is_refused():
    freeze = {"freeze_step": 4}
    for given, optimizer, message in (
        (freeze, OneBitAdam(parameters()), "write freeze_step in the parameters of OneBitAdam"),
        (freeze, torch.optim.AdamW(parameters()), "write bits: 1, or remove it"),
        (
            {**freeze, "bits": 4},
            torch.optim.AdamW(parameters()),
            "is for bits: 1 with Adam or AdamW",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            one_bit_of(config(compressed_communication=given), optimizer)
