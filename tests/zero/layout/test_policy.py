"""The stage table against the published numbers of ZeRO (arXiv 1910.02054, figure 1, table 1 and
section 7).
"""

from __future__ import annotations

import pytest

from hf_zero.zero.layout.stage_policy import POLICIES, bytes_per_parameter

GB = 1e9
STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage, published", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_a_7_5_billion_model_on_64_ranks(stage, published):
    """Figure 1: K = 12, 16-bit parameters and gradients."""
    found = 7.5e9 * bytes_per_parameter(stage, 64, "float16", gradient="float16") / GB
    assert found == pytest.approx(published, abs=0.05)


def test_a_trillion_parameters_on_1024_ranks():
    assert 1e12 * bytes_per_parameter(
        3, 1024, "bfloat16", gradient="bfloat16"
    ) / GB == pytest.approx(16, rel=0.03)
    assert 1e12 * bytes_per_parameter(
        0, 1024, "bfloat16", gradient="bfloat16"
    ) / GB == pytest.approx(16000)


@pytest.mark.parametrize("stage, published", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_a_step(stage, published):
    assert POLICIES[stage].traffic() == published
    assert POLICIES[stage].traffic(recompute=True) == published


@pytest.mark.parametrize("stage, moved", [(0, 2), (1, 2), (2, 1 + 4), (3, 3 * 4)])
def test_traffic_of_a_step_of_four_micro_batches(stage, moved):
    """Stages 2 and 3 hold no whole gradient and reduce every micro-batch; stage 3 gathers in
    each as well.
    """
    assert POLICIES[stage].traffic(accumulation=4) == moved


@pytest.mark.parametrize(
    "stage, parameters, gradients, optimizer",
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 2 / 8, 4 / 8, 12 / 8)],
)
def test_the_parts_with_gradients_in_fp32(stage, parameters, gradients, optimizer):
    found = POLICIES[stage].bytes_per_parameter(8)
    assert found == {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    assert bytes_per_parameter(stage, 8) == pytest.approx(parameters + gradients + optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_the_master_is_the_parameter(stage):
    """The row of fp32 training is 4 + 4 + 8 for Adam, 4 + 4 + 4 for momentum, 4 + 4 for plain
    SGD.
    """
    for moments in (2, 1, 0):
        assert bytes_per_parameter(stage, 1, "float32", moments) == 4 + 4 + 4 * moments


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_one_rank_pays_the_same_at_every_stage_and_more_ranks_never_more(precision):
    assert len({bytes_per_parameter(stage, 1, precision) for stage in STAGES}) == 1
    for shards in (2, 16, 1024):
        costs = [bytes_per_parameter(stage, shards, precision) for stage in STAGES]
        assert costs == sorted(costs, reverse=True) and len(set(costs)) == 4
    assert bytes_per_parameter(3, 64, precision) == pytest.approx(
        bytes_per_parameter(3, 1, precision) / 64
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world, replicas", [(1, 1), (8, 1), (8, 2), (8, 8), (1024, 16)])
def test_the_mesh(stage, world, replicas):
    shards = POLICIES[stage].shards(world, replicas)
    assert shards == (1 if stage == 0 else world // replicas)
    assert POLICIES[stage].parameter_shards(shards) == (shards if stage == 3 else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_that_do_not_divide_the_ranks_are_refused(stage):
    with pytest.raises(
        ValueError, match="6 ranks cannot be split into 4 equal replicas; choose a replicate_size"
    ):
        POLICIES[stage].shards(6, 4)


def test_what_each_stage_does():
    rows = {
        stage: (p.stage, p.shards_parameters, p.shards_gradients, p.shards_optimizer)
        for stage, p in POLICIES.items()
    }
    assert rows == {
        0: (0, False, False, False),
        1: (1, False, False, True),
        2: (2, False, True, True),
        3: (3, True, True, True),
    }
    assert [POLICIES[stage].reduces_every_backward for stage in STAGES] == [
        False,
        False,
        True,
        True,
    ]
    assert [POLICIES[stage].gathers_after_step for stage in STAGES] == [False, True, True, False]
