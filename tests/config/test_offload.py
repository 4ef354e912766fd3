"""The keys of offload: every spelling means the same, what they need of one another, and where
"auto" is a value.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import AioSection, OffloadOptimizer, OffloadParam, ZeroConfig
from hf_zero.errors import ConfigError

PIN = "zero_optimization.offload_optimizer.pin_memory"


def zero(**keys: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"zero_optimization": {"stage": 3, **keys}})


@pytest.mark.parametrize(
    "config",
    [
        ZeroConfig(3, offload_optimizer="cpu", offload_param="cpu"),
        ZeroConfig(3, offload_optimizer=OffloadOptimizer("cpu"), offload_param=OffloadParam("cpu")),
        ZeroConfig(3, offload_optimizer={"device": "CPU"}, offload_param={"device": "cpu"}),
        ZeroConfig.from_dict(
            {"stage": 3, "offload_optimizer": "cpu", "offload_param": {"device": "cpu"}}
        ),
        zero(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        zero(cpu_offload=True, cpu_offload_params=True),
        zero(cpu_offload=True, cpu_offload_param=True),
        ZeroConfig.from_dict(
            {
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "cpu",
                },
                "use_cpu": True,
            }
        ),
    ],
)
def test_every_spelling_of_offload_to_the_cpu(config: ZeroConfig) -> None:
    assert (config.offload_optimizer, config.offload_param) == (
        OffloadOptimizer("cpu"),
        OffloadParam("cpu"),
    )
    assert config.offload_optimizer.on and config.offload_param.on
    assert ZeroConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimizer_is_offloaded_at_every_stage(stage: int) -> None:
    config = ZeroConfig(stage, offload_optimizer={"device": "cpu", "ratio": 0.5})
    assert (config.offload_optimizer.device, config.offload_optimizer.ratio) == ("cpu", 0.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_offloaded_at_stage_3_alone(stage: int) -> None:
    for device in ("cpu", "nvme"):
        config = ZeroConfig(stage, offload_param=device)
        assert not config.offload_param.on
        (row,) = (row for row in config.explain() if row.key.endswith("offload_param.device"))
        assert row.value == device
        assert row.note.startswith(f"no effect: at stage {stage} every rank")
    assert not ZeroConfig(stage, offload_param="none").offload_param.on


def test_everything_that_deepspeed_writes_for_infinity() -> None:
    config = ZeroConfig.from_dict(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "pin_memory": True,
                    "buffer_count": 8,
                    "pipeline_read": False,
                    "pipeline_write": False,
                    "fast_init": True,
                    "ratio": 0.9,
                    "cpuadam_cores_perc": 0.8,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": ["/nvme0", "/nvme1"],
                    "pin_memory": False,
                    "buffer_count": 7,
                    "buffer_size": 1e7,
                    "max_in_cpu": 0,
                },
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 16,
                "intra_op_parallelism": 2,
                "single_submit": True,
                "use_gds": False,
            },
        }
    )
    assert config.offload_optimizer == OffloadOptimizer(
        "nvme",
        ("/nvme",),
        True,
        buffer_count=8,
        pipeline_read=False,
        pipeline_write=False,
        ratio=0.9,
        cores=0.8,
    )
    assert config.offload_param == OffloadParam(
        "nvme", ("/nvme0", "/nvme1"), False, 7, 10_000_000, 0
    )
    assert config.aio == AioSection(262144, 16, 2)
    assert ZeroConfig.from_dict(config.to_dict()) == config


def test_objects_write_what_they_hold_beside_their_defaults() -> None:
    section = OffloadOptimizer(
        "nvme",
        ("/a", "/b"),
        moments="int8",
        ratio="auto",
        update_in_backward=True,
        cores=0.5,
        buffer_size=4096,
    )
    config = ZeroConfig(1, offload_optimizer=section, aio=AioSection(threads=4))
    assert config.offload_optimizer == section and config.aio == AioSection(1 << 20, 32, 4)
    assert config.to_dict()["aio"] == {"thread_count": 4}
    assert config.sources["zero_optimization.offload_optimizer.pin_memory"] == "default"


@pytest.mark.parametrize("section", ["aio", "zero_optimization.aio"])
@pytest.mark.parametrize("name", ["threads", "thread_count", "intra_op_parallelism"])
def test_the_number_of_threads_by_its_names(section: str, name: str) -> None:
    keys: dict[str, Any] = {name: 3}
    for part in reversed(section.split(".")):
        keys = {part: keys}
    assert ZeroConfig.from_dict(keys).aio.threads == 3


# -- paths -----------------------------------------------------------------------------------------


def test_relative_paths_are_resolved_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = zero(offload_optimizer={"device": "nvme", "nvme_path": "local_scratch"})
    assert config.offload_optimizer.nvme_path == (str(tmp_path / "local_scratch"),)
    row = next(row for row in config.explain() if row.key.endswith("nvme_path"))
    assert row.value == os.path.join(tmp_path, "local_scratch")
    assert zero(
        offload_optimizer={"device": "nvme", "nvme_path": ["~/a", Path("/b")]}
    ).offload_optimizer.nvme_path == (
        "/home/somebody/a",
        "/b",
    )


# -- former names and 16-bit states ----------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_former_pinning_goes_to_what_is_offloaded(pinned: bool) -> None:
    config = zero(cpu_offload=True, cpu_offload_use_pin_memory=pinned)
    assert (config.offload_optimizer.pin_memory, config.offload_param.pin_memory) == (pinned, None)
    assert config.sources[PIN] == "config dict: zero_optimization.cpu_offload_use_pin_memory"
    assert zero(cpu_offload_use_pin_memory=pinned).offload_param.pin_memory is pinned


def test_former_names_may_be_auto_and_off() -> None:
    early = ZeroConfig.from_dict({"zero_optimization": {"cpu_offload": "auto"}}, allow_auto=True)
    assert early.autos == {"zero_optimization.offload_optimizer.device"}
    assert zero(cpu_offload=False).offload_optimizer == OffloadOptimizer()


def test_optimizer_states_in_bf16() -> None:
    config = zero(offload_optimizer={"device": "cpu"})
    states = config.override({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "cli")
    moments = "zero_optimization.offload_optimizer.moments"
    assert (config.offload_optimizer.moments, states.offload_optimizer.moments) == ("fp32", "bf16")
    assert states.sources[moments] == "computed: bf16.bf16_optimizer_states"
    assert ZeroConfig.from_dict(states.to_dict()) == states
    assert states.resolve(2).resolve(4).offload_optimizer.moments == "bf16"
    without = states.override({"bf16": {"bf16_optimizer_states": False}}, "cli")
    assert without.offload_optimizer.moments == "fp32"
    said = r"moments = 'int8' \(cli: offload_optimizer\.moments\) contradicts bf16\.bf16_optimizer"
    with pytest.raises(ConfigError, match=said):
        states.override({"offload_optimizer": {"moments": "int8"}}, "cli")


# -- "auto" ----------------------------------------------------------------------------------------


def test_auto_is_a_value_of_the_ratio_and_a_hole_elsewhere() -> None:
    config = ZeroConfig(2, offload_optimizer={"device": "cpu", "ratio": "auto"})
    assert config.offload_optimizer.ratio == config.resolve(8).offload_optimizer.ratio == "auto"
    assert not config.autos
    assert config.to_dict()["zero_optimization"]["offload_optimizer"]["ratio"] == "auto"


def test_what_accelerate_fills_in() -> None:
    """It writes "none" where its own arguments are silent, also for a path."""
    holes = {"device": "auto", "nvme_path": "auto"}
    early = ZeroConfig.from_dict(
        {"zero_optimization": {"stage": 2, "offload_optimizer": holes, "offload_param": holes}},
        allow_auto=True,
    )
    assert not early.offload_optimizer.on and len(early.autos) == 4
    filled = {
        "offload_optimizer": {"device": "none", "nvme_path": "none"},
        "offload_param": {"device": "none", "nvme_path": "none"},
    }
    config = early.override(filled, "Accelerate").resolve(2)
    assert (config.offload_optimizer, config.offload_param) == (OffloadOptimizer(), OffloadParam())


# -- what has no effect is said --------------------------------------------------------------------


def notes(config: ZeroConfig) -> dict[str, str]:
    return {
        row.key.rpartition(".")[2]: row.note
        for row in config.explain()
        if "offload_optimizer" in row.key or row.key.startswith("aio")
    }


def test_without_offload_only_the_device_is_shown() -> None:
    assert set(notes(ZeroConfig(2))) == {"device"}
    assert "ratio" in notes(ZeroConfig(2, offload_optimizer="cpu"))
    assert "nvme_path" not in notes(ZeroConfig(2, offload_optimizer="cpu"))
    assert {"nvme_path", "queue_depth"} <= set(
        notes(ZeroConfig(2, offload_optimizer={"device": "nvme", "nvme_path": "/a"}))
    )
    assert (
        "moments" not in ZeroConfig(2).to_dict("default")["zero_optimization"]["offload_optimizer"]
    )


@pytest.mark.parametrize(
    ("keys", "name", "why"),
    [
        (
            {"offload_optimizer": {"device": "cpu", "nvme_path": "/a"}},
            "nvme_path",
            "zero_optimization.offload_optimizer.device is cpu",
        ),
        (
            {"offload_optimizer": {"ratio": 0.5}},
            "ratio",
            "zero_optimization.offload_optimizer.device is none",
        ),
        ({"aio": {"queue_depth": 4}}, "queue_depth", "nothing is offloaded to nvme"),
        (
            {
                "gradient_clipping": 1.0,
                "offload_optimizer": {"device": "cpu", "update_in_backward": True},
            },
            "update_in_backward",
            "the norm",
        ),
        (
            {"fp16": True, "offload_optimizer": {"device": "cpu", "update_in_backward": True}},
            "update_in_backward",
            "whether fp16",
        ),
        (
            {"offload_optimizer": {"update_in_backward": True}},
            "update_in_backward",
            "zero_optimization.offload_optimizer.device is none",
        ),
    ],
)
def test_a_key_without_effect_says_why(keys: dict[str, Any], name: str, why: str) -> None:
    assert notes(ZeroConfig(2, **keys))[name].startswith(f"no effect: {why}")
