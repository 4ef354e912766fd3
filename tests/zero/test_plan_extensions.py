"""What the plan of an engine reads of messages in few bits, and of gathers over more meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.compression import plan_extensions
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.compression.secondary_shards import SecondaryShards
from hf_zero.config import ZeroConfig
from hf_zero.distributed.two_hops import TwoHops
from hf_zero.zero.extensions import Extensions

FUNCTIONS = (
    plan_extensions.few_bits,
    plan_extensions.one_bit,
    plan_extensions.secondary_shards,
    plan_extensions.two_hops,
)
HOPS, NODE = "mics_hierarchical_params_gather", "zero_hpz_partition_size"
WEIGHTS, GRADIENTS = "zero_quantized_weights", "zero_quantized_gradients"


def config(stage: int = 3, **zero: Any) -> ZeroConfig:
    more = zero.pop("more", {})
    return ZeroConfig.from_dict({"zero_optimization": {"stage": stage, **zero}, **more})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_set_where_no_key_is_in_use(function: Any) -> None:
    assert function(config(), None) == {}
    assert function(config(**{HOPS: False, NODE: 1, WEIGHTS: False}), None) == {}


def test_gathers_in_hops_have_a_route_and_replicas_have_none() -> None:
    keys = (f"zero_optimization.{HOPS}",)
    assert plan_extensions.two_hops(config(3, **{HOPS: True}), None) == {
        "hierarchical": keys[0], "route": TwoHops, "needs_one_mesh": keys,
    }  # fmt: skip
    assert plan_extensions.two_hops(config(3, more={"replicate_size": 2}), None) == {
        "needs_one_mesh": ("replicate_size",)
    }


def test_secondary_shards_are_those_of_a_node() -> None:
    keys = (f"zero_optimization.{NODE}",)
    assert plan_extensions.secondary_shards(config(3, **{NODE: 4}), None) == {
        "gathers": SecondaryShards, "node": 4, "needs_one_mesh": keys,
    }  # fmt: skip


def test_codecs_are_those_of_the_keys_in_use() -> None:
    fields = plan_extensions.few_bits(config(3, **{WEIGHTS: True}), None)
    (codec,) = fields["codecs"]
    assert fields["needs_one_mesh"] == (f"zero_optimization.{WEIGHTS}",)
    assert str(codec.weights) == str(codec.frozen) == "int8 blocks of 256"
    assert codec.gradients is None and codec.deltas is None


def test_each_flat_buffer_has_errors_of_its_own_and_shares_a_codec_without_any() -> None:
    loco = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for more, is_shared in (({}, True), (loco, False)):
        settings = config(2, **{GRADIENTS: True}, **more)
        (codec,) = plan_extensions.few_bits(settings, optimizer)["codecs"]
        assert codec.gradients is not None
        first, second = codec.gradients(), codec.gradients()
        assert (first is second) is is_shared
        assert isinstance(first, ErrorCodec) is not is_shared


def test_every_field_is_one_of_the_extensions() -> None:
    assert set(plan_extensions.ExtensionFields.__annotations__) <= set(
        Extensions.__dataclass_fields__
    )
