"""The keys of activation checkpointing and offload: what they mean together, and what
contradicts.
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ActivationCheckpointing, ActivationOffload, ZeroConfig


def notes(values: dict[str, Any]) -> dict[str, str]:
    return {row.key: row.note for row in ZeroConfig.from_dict(values).explain()}


@pytest.mark.parametrize(
    "section, number, selective",
    [
        ({}, 0, False),
        ({"blocks": True}, None, False),
        ({"blocks": False}, 0, False),
        ({"blocks": 3}, 3, False),
        ({"blocks": "Selective"}, None, True),
        ({"number_checkpoints": 4}, 4, False),
        ({"number_checkpoints": 0}, 0, False),
        ({"number_checkpoints": None}, 0, False),
        ({"blocks": True, "number_checkpoints": 4}, 4, False),
        ({"blocks": True, "number_checkpoints": 0}, None, False),
        ({"blocks": 4, "number_checkpoints": 4}, 4, False),
        ({"blocks": "selective", "number_checkpoints": 4}, 4, True),
        ({"blocks": False, "number_checkpoints": 4}, 0, False),
    ],
)
def test_how_many_blocks(section: dict[str, Any], number: int | None, selective: bool) -> None:
    found = ZeroConfig.from_dict({"activation_checkpointing": section}).activation_checkpointing
    assert (found.number, found.selective) == (number, selective)


@pytest.mark.parametrize(
    "given", [True, {"enabled": True}, {"min_bytes": 1 << 20}, ActivationOffload(enabled=True)]
)
def test_offload_is_on_by_a_word_or_by_its_section(given: Any) -> None:
    assert ZeroConfig(2, activation_offload=given).activation_offload == ActivationOffload(
        enabled=True
    )


@pytest.mark.parametrize(
    "given", [False, {"enabled": False}, {"enabled": False, "min_bytes": 1}, None]
)
def test_offload_is_off(given: Any) -> None:
    assert not ZeroConfig(2, activation_offload=given).activation_offload.enabled


def test_offload_that_is_computed_is_computed_anew() -> None:
    config = ZeroConfig.from_dict({"activation_offload": {"min_bytes": 5}})
    assert (
        config.sources["activation_offload.enabled"]
        == "computed: activation_offload.min_bytes is written"
    )
    assert ZeroConfig.from_dict(config.to_dict()).activation_offload == config.activation_offload
    assert not config.override(
        {"activation_offload": {"enabled": False}}, "script"
    ).activation_offload.enabled


def test_sections_as_objects() -> None:
    config = ZeroConfig(
        3,
        activation_checkpointing=ActivationCheckpointing(
            blocks=2, cpu_checkpointing=True, profile=True
        ),
    )
    assert config.activation_checkpointing.number == 2
    assert config.activation_checkpointing.cpu_checkpointing
    assert config.to_dict()["activation_checkpointing"] == {
        "blocks": 2,
        "cpu_checkpointing": True,
        "profile": True,
    }


def test_explain_says_what_has_no_effect() -> None:
    found = notes(
        {
            "activation_checkpointing": {
                "blocks": False,
                "number_checkpoints": 3,
                "partition_activations": True,
                "contiguous_memory_optimization": True,
            },
            "activation_offload": {"enabled": False, "min_bytes": 7},
        }
    )
    assert (
        found["activation_checkpointing.number_checkpoints"]
        == "no effect: activation_checkpointing.blocks is false"
    )
    assert found["activation_offload.min_bytes"] == "no effect: activation_offload is off"
    assert (
        "does not divide saved activations"
        in found["activation_checkpointing.partition_activations"]
    )
    assert "expandable_segments" in found["activation_checkpointing.contiguous_memory_optimization"]
    assert (
        "no effect"
        not in notes(
            {
                "activation_checkpointing": {"cpu_checkpointing": True},
                "activation_offload": {"min_bytes": 7},
            }
        )["activation_offload.min_bytes"]
    )
