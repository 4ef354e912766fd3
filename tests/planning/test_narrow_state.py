"""What a proposal tries last: moments in 8 bits and master weights in bf16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hf_zero
from hf_zero.config import OptimizerConfig, ZeroConfig
from hf_zero.device.free_memory import FreeBytes
from hf_zero.integrations.transformers.meta_model import sized_model
from hf_zero.optim.build import build_optimizer
from hf_zero.planning import narrow_state
from hf_zero.planning.estimate_job import asked_for, plans_of
from hf_zero.planning.needs import needs
from tests.cli.test_estimate import TINY
from tests.helpers.engines import full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import run_steps

ROWS = Path(__file__).parents[2] / "scripts/bench/results/gpu-2026-11-27-peers.jsonl"
GIB = 1 << 30
LARGE = sized_model(20e9)


def test_costs_are_those_that_were_measured() -> None:
    kinds = {"fp32": "hfz1+all", "8 bits": "hfz1+all+8bit", "8 bits, bf16": "hfz1+all+16bit"}
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for state, of in kinds.items():
        (row,) = [r for r in rows if r.get("of") == of and r.get("call") == 2 and "1b" in r["work"]]
        assert narrow_state.MEASURED[state] == round(row["loss"], 4) and row["steps"] == 15
    assert narrow_state.cost("bf16") == narrow_state.NOT_MEASURED


def test_20b_on_one_card_of_139_gib_and_a_host_of_128() -> None:
    free = FreeBytes(139 * GIB, 128 * GIB)
    proposal = hf_zero.propose(LARGE, 1, free)
    assert proposal.fit.chosen is not None and proposal.cost == ""
    offloaded = {"device": "cpu", "ratio": 0.8, "moments": "int8"}
    assert proposal.config is not None
    assert proposal.config["zero_optimization"]["offload_optimizer"] == offloaded
    others = hf_zero.propose(LARGE, 1, replace(free, ram=64 * GIB))  # other programs have the rest
    assert others.fit.chosen is not None and others.fit.chosen.narrow is not None
    assert "updates in the backward" in others.fit.chosen.name


def test_narrow_state_is_tried_last() -> None:
    """On 20B parameters without host memory, from the largest device on."""
    early, bits = "updates in the backward, moments in 8 bits", "moments in 8 bits"
    names = {
        250: bits,
        190: early,
        122: f"{bits}, master weights in bf16",
        90: f"{early}, master weights in bf16",
    }
    for device, name in names.items():
        free = FreeBytes(int(device * 1e9 / 0.8) + 1, 1000)
        proposal = hf_zero.propose(LARGE, 1, free)
        chosen, config = proposal.fit.chosen, proposal.config
        assert chosen is not None and config is not None and chosen.name.endswith(name), device
        trials = [trial.narrow is not None for trial in proposal.fit.trials]
        assert trials == sorted(trials) and not trials[0]
        assert config["optimizer"]["type"] == "AdamW8bit"
        assert config["bf16"].get("bf16_master_weights_and_grads", False) == ("bf16" in name)
        assert config.get("gradient_accumulation_steps") == (1 if "backward" in name else None)
        settings = ZeroConfig.from_dict(config).resolve(1)
        (again,) = plans_of(LARGE, asked_for(1, "bf16", "AdamW", config=config), settings)
        assert needs(again) == chosen.needs
        assert proposal.cost.startswith(bits) and "loss 5.5" in proposal.cost
        assert proposal.to_dict()["cost"] == proposal.cost


def test_what_a_script_makes_itself_is_not_replaced() -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    trials = hf_zero.propose(TINY, 1, FreeBytes(1000, 1000), config=config).fit.trials
    states = {trial.narrow.name for trial in trials if trial.narrow is not None}
    assert states == {"moments and master weights in bf16"}
    fp32 = hf_zero.propose(TINY, 1, FreeBytes(1000, 1000), "fp32").fit.trials
    names = {trial.narrow.name for trial in fp32 if trial.narrow is not None}
    assert names == {"moments in 8 bits"}
    muon = hf_zero.propose(TINY, 1, FreeBytes(1000, 1000), optimizer="Muon").fit.trials
    assert not [trial for trial in muon if trial.narrow is not None]


def test_optimizers_in_8_bits_make_the_same_update() -> None:
    def twin(kind: str, **params: Any) -> Any:
        known = {key: value for key, value in params.items() if value != "auto"}
        model = torch.nn.Linear(2, 2)
        optimizer = build_optimizer(OptimizerConfig(kind, known), model.parameters(), model)
        made = narrow_state.in_8_bits(OptimizerConfig(kind, params), optimizer)
        return None if made is None else (made.type, dict(made.params))

    rate = {"lr": 1e-3, "weight_decay": 0.0}
    assert twin("AdamW", torch_adam=False) == ("AdamW8bit", rate)
    assert twin("Adam", adam_w_mode=False, lr="auto") == ("Adam8bit", {**rate, "lr": "auto"})
    assert twin("AdamW", amsgrad=True) is None and twin("Adam", bias_correction=False) is None
    assert twin("SGD", lr=0.1) is None
    assert twin("SGD", lr=0.1, momentum=0.9)[0] == "SGD8bit"
    assert twin("Muon") is None and twin("RMSprop") is None


def test_what_is_proposed_trains() -> None:
    """On the CPU, in each narrow state with updates in the backward."""
    model = seeded(lambda: Stack(2, 64))
    trials = hf_zero.propose(model, 1, FreeBytes(1000, 1000)).fit.trials
    early = [t for t in trials if t.narrow and t.plan.settings.zero.update_in_backward]
    at_one = [trial for trial in early if trial.plan.settings.stage == 1]
    assert [trial.narrow.name for trial in at_one if trial.narrow] == [
        "moments in 8 bits",
        "moments in 8 bits, master weights in bf16",
    ]
    for trial in at_one:
        built = seeded(lambda: Stack(2, 64))
        before = {name: p.detach().clone() for name, p in built.named_parameters()}
        written = {"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}}
        engine = start(built, None, {**written, **trial.to_config()})
        run_steps(engine, 0, range(2))
        for name, value in full_weights(engine).items():
            assert value.isfinite().all() and not torch.equal(value, before[name]), name
        engine.destroy()
