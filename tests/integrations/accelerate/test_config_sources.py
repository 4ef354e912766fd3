"""Values keep the place where they were written, through Accelerate's and the Trainer's hands; a
path that is wrong is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.config.explaining import written
from hf_zero.config.launched import LAUNCH_FILE, LAUNCHED_BY, WRITTEN, check_launch
from hf_zero.errors import ConfigError

accelerate = pytest.importorskip("accelerate")

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
    config |= {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }
    config |= {"zero_allow_untested_optimizer": True, "bf16": {"enabled": False}}
    return {row.key: row.source for row in written(ZeroConfig.from_dict(config).explain())}


def plugin(monkeypatch: pytest.MonkeyPatch, given: Any = None, **variables: str) -> Any:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return accelerate.utils.DeepSpeedPlugin(hf_ds_config=given)


LAUNCHED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
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


def test_a_preset_of_hf_zero_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    by = "hf-zero launch --preset zero3"
    assert shown(plugin(monkeypatch, **LAUNCHED, **{LAUNCHED_BY: by})) == BATCH | dict.fromkeys(
        ("zero_optimization.stage", "gradient_clipping", KEPT), by
    )


def test_keys_set_beside_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    by = "hf-zero launch --preset zero3 --set gradient_clipping=0.0 --set ..."
    section = {"stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    given = json.dumps({"gradient_clipping": 0.0, "zero_optimization": section})
    made = plugin(monkeypatch, **LAUNCHED, **{LAUNCHED_BY: by, WRITTEN: given})
    config = ZeroConfig.from_dict(made.deepspeed_config, allow_auto=True)
    assert (config.stage, config.gradient_clipping) == (3, 0.0)
    assert config.offload_optimizer.device == "cpu"
    found = config.sources
    assert found["zero_optimization.stage3_param_persistence_threshold"] == by
    check_launch(config)
    with pytest.raises(ConfigError, match=r"offload_optimizer cpu .the script: none"):
        check_launch(
            ZeroConfig.from_dict(
                made.deepspeed_config
                | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
                allow_auto=True,
            )
        )


@pytest.mark.parametrize("trainer", [False, True])
@pytest.mark.parametrize("source", ["hf-zero launch --preset zero3 --precision bf16", "file"])
def test_the_precision_of_the_launch(
    trainer: bool, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate writes it into the configuration; the Trainer, whose arguments name none, may be
    the one that fills in what is left.
    """
    file = tmp_path / "zero3.yaml"
    file.write_text(f"mixed_precision: bf16\n{YAML}")
    by = {LAUNCH_FILE: str(file)} if source == "file" else {LAUNCHED_BY: source}
    made = plugin(monkeypatch, **LAUNCHED, **by, ACCELERATE_MIXED_PRECISION="bf16")
    made.set_mixed_precision("bf16")
    if trainer:
        made.deepspeed_config.filler = "the training arguments"
    found = ZeroConfig.from_dict(made.deepspeed_config, allow_auto=True).sources
    at_file = f"config file {file}: mixed_precision"
    assert found["bf16.enabled"] == (at_file if source == "file" else source)


def test_a_file_or_a_dict_of_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    made = plugin(monkeypatch, str(file))
    made.deepspeed_config["gradient_clipping"] = 1.0
    expected = BATCH | {
        "zero_optimization.stage": f"config file {file}: zero_optimization.stage",
        "gradient_clipping": "Accelerate",
    }
    assert shown(made) == expected
    assert shown(plugin(monkeypatch, {"zero_optimization": {"stage": 2}})) == BATCH | {
        "zero_optimization.stage": "config dict: zero_optimization.stage"
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("no/such.json", "config file no/such.json does not exist"),
        ("zero4", "is neither a file, JSON nor a preset"),
        ("{", "is not valid JSON"),
    ],
)
def test_what_is_no_config_is_named(monkeypatch: pytest.MonkeyPatch, given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plugin(monkeypatch, given)


def test_presets_and_our_keywords_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert shown(plugin(monkeypatch, "zero2"))["zero_optimization.stage"] == "preset zero2"
    (tmp_path / "own.json").write_text('{"stage": 1, "gradient_clipping": 1.0}')
    assert (
        shown(plugin(monkeypatch, str(tmp_path / "own.json")))["zero_optimization.stage"]
        == f"config file {tmp_path / 'own.json'}: stage"
    )
