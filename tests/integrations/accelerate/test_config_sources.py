"""Values keep the place where they were written, through Accelerate's and the Trainer's hands; a
path that is wrong is named; nothing of offload is lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from hf_zero.config import OffloadOptimizer, ZeroConfig
from hf_zero.config.launched import LAUNCH_FILE, LAUNCHED_BY, WRITTEN, check_launch
from hf_zero.config.summary import written
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget
from tests.integrations.accelerate.test_loop import assert_close, loader, plain, small, train

YAML = """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  zero_stage: 3
  gradient_clipping: 0.5
  zero3_save_16bit_model: true
"""


def shown(plugin: Any) -> dict[str, str]:
    """Return the sources of the configuration keys that a training logs, after Accelerate has added
    its own.
    """
    config = plugin.deepspeed_config
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    config |= {"train_batch_size": 8, "bf16": {"enabled": False}}
    config["zero_allow_untested_optimizer"] = True
    return {row.key: row.source for row in written(ZeroConfig.from_dict(config).explain())}


def plugin(monkeypatch: pytest.MonkeyPatch, given: Any = None, **variables: str) -> Any:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return DeepSpeedPlugin(hf_ds_config=given)


LAUNCHED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
BATCH = dict.fromkeys(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "zero_allow_untested_optimizer",
    ),
    "Accelerate",
)
KEPT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def test_the_file_of_accelerate_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "zero3.yaml"
    file.write_text(YAML)
    assert shown(plugin(monkeypatch, **LAUNCHED, **{LAUNCH_FILE: str(file)})) == BATCH | {
        "zero_optimization.stage": f"config file {file}: deepspeed_config.zero_stage",
        "gradient_clipping": f"config file {file}: deepspeed_config.gradient_clipping",
        KEPT: f"config file {file}: deepspeed_config.zero3_save_16bit_model",
    }
    # an option of the command replaces what the file says
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "2.0")
    assert shown(plugin(monkeypatch))["gradient_clipping"] == "accelerate launch"


def test_keys_set_beside_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    by = "hf-zero launch --preset zero3"
    keys = ("zero_optimization.stage", "gradient_clipping", KEPT)
    made = plugin(monkeypatch, **LAUNCHED, **{LAUNCHED_BY: by})
    assert shown(made) == BATCH | dict.fromkeys(keys, by)
    by = f"{by} --set gradient_clipping=0.0 --set ..."
    threshold = {"stage3_param_persistence_threshold": 0}
    section = threshold | {"offload_optimizer": {"device": "cpu"}}
    given = json.dumps({"gradient_clipping": 0.0, "zero_optimization": section})
    made = plugin(monkeypatch, **{LAUNCHED_BY: by, WRITTEN: given})
    config = ZeroConfig.from_dict(made.deepspeed_config, allow_auto=True)
    assert (config.stage, config.gradient_clipping) == (3, 0.0)
    assert config.offload_optimizer.device == "cpu"
    assert config.sources["zero_optimization.stage3_param_persistence_threshold"] == by
    check_launch(config)
    other = made.deepspeed_config | {"zero_optimization": {"stage": 3, **threshold}}
    with pytest.raises(ConfigError, match=r"offload_optimizer cpu .the script: none"):
        check_launch(ZeroConfig.from_dict(other, allow_auto=True))


def test_a_file_a_dict_or_a_preset_of_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, own = tmp_path / "ds.json", tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    made = plugin(monkeypatch, str(file))
    made.deepspeed_config["gradient_clipping"] = 1.0
    by_file = {"zero_optimization.stage": f"config file {file}: zero_optimization.stage"}
    assert shown(made) == BATCH | by_file | {"gradient_clipping": "Accelerate"}
    own.write_text('{"stage": 1, "gradient_clipping": 1.0}')
    for given, stage in (
        ({"zero_optimization": {"stage": 2}}, "config dict: zero_optimization.stage"),
        ("zero2", "preset zero2"),
        (str(own), f"config file {own}: stage"),
    ):
        assert shown(plugin(monkeypatch, given))["zero_optimization.stage"] == stage
    for given, says in (
        ("no/such.json", "config file no/such.json does not exist"),
        ("zero4", "'zero4' is neither a file, JSON nor a preset"),
        ("{", "is not valid JSON"),
    ):
        with pytest.raises(ConfigError, match=says):
            plugin(monkeypatch, given)


LOOP = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}


@in_turn("by", ["preset", "dict", "object", "variable"])
def test_an_accumulation_that_the_configuration_leaves_to_the_accelerator(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    (tmp_path / "loop.json").write_text(json.dumps(LOOP))
    if by == "variable":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "loop.json"))
    given = {"preset": "zero3", "dict": {**LOOP}, "object": HfDeepSpeedConfig({**LOOP})}
    ours = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given.get(by)),
    )
    reference, model = small(), small()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    engine, optimizer, data = ours.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(6)
    )
    found, expected = [], []
    for micro_batch, (batch, other) in enumerate(zip(data, loader(6), strict=True)):
        with ours.accumulate(engine):
            loss = engine(**batch).loss
            ours.backward(loss)
            ours.clip_grad_norm_(engine.parameters(), float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
        loss = reference(**other).loss
        (loss / 3).backward()
        if micro_batch % 3 == 2:
            theirs.step()
            theirs.zero_grad()
        expected.append(loss.item())
    assert engine.global_steps == 2
    assert_close(found, expected)


CPU = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
ADAMW = {"lr": 1e-2, "eps": 1e-6, "betas": (0.8, 0.9), "weight_decay": 0.1}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@in_turn("name, force", [("AdamW", True), ("SGD", True), ("AdamW", None)])
def test_the_optimizer_that_trains(name: str, force: bool | None) -> None:
    """Accelerate would train an Adam in place of the script's SGD, and one without the betas of a
    group that was added later. Without ``force`` it is one of the configuration.
    """
    forget()
    model, reference = small(), small()
    theirs = OPTIMIZERS[name](reference.parameters())
    if force is None:
        params = {"lr": "auto", "weight_decay": "auto", "eps": 1e-6, "betas": [0.8, 0.9]}
        keys: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    else:
        keys = {"zero_force_ds_cpu_optimizer": force}
        optimizer = OPTIMIZERS[name](model.parameters())
    config = {"zero_optimization": CPU, "train_micro_batch_size_per_gpu": "auto", **keys}
    ours = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, optimizer, data = ours.prepare(model, optimizer, loader())
    assert type(optimizer.optimizer) is type(theirs)
    assert engine.config.offload_optimizer == OffloadOptimizer("cpu", ratio="auto")
    assert_close(train(ours, engine, data, optimizer), plain(reference, theirs))


def test_a_misspelt_section_is_named_before_accelerate_asks_for_it(tmp_path: Path) -> None:
    written = {"train_micro_batch_size_per_gpu": "auto", "zero_optimisation": {"stage": 2}}
    (tmp_path / "typo.json").write_text(json.dumps(written))
    for given in (written, str(tmp_path / "typo.json")):
        with pytest.raises(ConfigError, match="'zero_optimisation'; did you mean 'zero_opt"):
            DeepSpeedPlugin(hf_ds_config=given)


@in_turn("form", ["path", "mapping", "object"])
def test_a_configuration_of_any_form_is_the_plugins(form: str, tmp_path: Path) -> None:
    """Accelerate leaves what is no dict and no string out, and its stage of 2 would train."""
    forget()
    file = tmp_path / "zero1.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    forms = {
        "path": file,
        "mapping": MappingProxyType({"zero_optimization": {"stage": 1}}),
        "object": ZeroConfig(stage=1),
    }
    made = DeepSpeedPlugin(hf_ds_config=forms[form])
    assert made.zero_stage == 1
    assert made.deepspeed_config["zero_optimization"]["stage"] == 1


@in_turn(
    "given, named",
    [(5, "type int"), ([1], "type list"), ({"zero_optimization": "x"}, "zero_optimization")],
)
def test_what_is_no_configuration_is_named(given: object, named: str) -> None:
    forget()
    with pytest.raises(ConfigError, match=named):
        DeepSpeedPlugin(hf_ds_config=given)
