"""The keys of activation checkpointing and offload: what they mean together, and what
contradicts.
"""

from __future__ import annotations

from typing import Any

from hf_zero.config import ActivationCheckpointing, ActivationOffload, ZeroConfig
from tests.helpers.cells import in_one_item


def notes(values: dict[str, Any]) -> dict[str, str]:
    return {row.key: row.note for row in ZeroConfig.from_dict(values).explain()}


BLOCKS: list[tuple[dict[str, Any], int | None, bool]] = [
    ({}, 0, False),
    ({"blocks": True}, None, False),
    ({"blocks": 3}, 3, False),
    ({"blocks": "Selective"}, None, True),
    ({"number_checkpoints": 4}, 4, False),
    ({"number_checkpoints": None}, 0, False),
    ({"blocks": True, "number_checkpoints": 0}, None, False),
    ({"blocks": 4, "number_checkpoints": 4}, 4, False),
    ({"blocks": "selective", "number_checkpoints": 4}, 4, True),
    ({"blocks": False, "number_checkpoints": 4}, 0, False),
]


@in_one_item(BLOCKS)
def test_how_many_blocks(case: tuple[dict[str, Any], int | None, bool]) -> None:
    section, number, selective = case
    found = ZeroConfig.from_dict({"activation_checkpointing": section}).activation_checkpointing
    assert (found.number, found.selective) == (number, selective)


def test_offload_is_on_by_a_word_or_by_its_section() -> None:
    on = ActivationOffload(enabled=True)
    for given in (True, {"enabled": True}, {"min_bytes": 1 << 20}, on):
        assert ZeroConfig(2, activation_offload=given).activation_offload == on, given
    for given in (False, {"enabled": False}, {"enabled": False, "min_bytes": 1}, None):
        assert not ZeroConfig(2, activation_offload=given).activation_offload.enabled, given


def test_offload_that_is_computed_is_computed_anew() -> None:
    config = ZeroConfig.from_dict({"activation_offload": {"min_bytes": 5}})
    source = config.sources["activation_offload.enabled"]
    assert source == "computed: activation_offload.min_bytes is written"
    assert ZeroConfig.from_dict(config.to_dict()).activation_offload == config.activation_offload
    off = config.override({"activation_offload": {"enabled": False}}, "script")
    assert not off.activation_offload.enabled


def test_sections_as_objects() -> None:
    config = ZeroConfig(3, activation_checkpointing=ActivationCheckpointing(blocks=2, profile=True))
    assert config.activation_checkpointing.number == 2
    assert config.to_dict()["activation_checkpointing"] == {"blocks": 2, "profile": True}


def test_explain_says_what_has_no_effect() -> None:
    section = {"blocks": False, "number_checkpoints": 3, "partition_activations": True}
    section["contiguous_memory_optimization"] = True
    offload = {"enabled": False, "min_bytes": 7}
    found = notes({"activation_checkpointing": section, "activation_offload": offload})
    name, idle = "activation_checkpointing", "no effect: "
    assert found[f"{name}.number_checkpoints"] == f"{idle}{name}.blocks is false"
    assert found["activation_offload.min_bytes"] == f"{idle}activation_offload is off"
    assert "does not divide saved activations" in found[f"{name}.partition_activations"]
    assert "expandable_segments" in found[f"{name}.contiguous_memory_optimization"]
    used = {name: {"cpu_checkpointing": True}, "activation_offload": {"min_bytes": 7}}
    assert "no effect" not in notes(used)["activation_offload.min_bytes"]
