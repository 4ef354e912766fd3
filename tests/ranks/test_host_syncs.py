"""Host synchronisations of a step, engine and model apart: none where no number was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, HEADS, HIDDEN, LAYERS, VOCAB, Architecture, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan

SCALAR = "_local_scalar_dense"
CPU = {"device": "cpu"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "": {},
    "optimizer": {"offload_optimizer": CPU},
    "all": {"offload_optimizer": CPU, "offload_param": CPU},
}


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=48,
        num_local_experts=4, max_position_embeddings=16, experts_implementation="eager",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def with_mask(step, micro, rank):
    ids = tokens(step, micro, rank)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


# What the models of transformers read back in a forward of two layers, given a mask that masks
# nothing: whether it does, by its file; and in the eager experts of Mixtral, layer by layer, which
# experts were chosen and by which tokens.
OF_THE_MODELS: dict[str, Callable[[dict[str, int]], bool]] = {
    "bert": lambda found: found == {f"masking_utils.py: {SCALAR}": 1},
    "gpt2": lambda found: found == {f"masking_utils.py: {SCALAR}": 1},
    "llama": lambda found: found == {f"masking_utils.py: {SCALAR}": 1},
    "t5": lambda found: found == {f"masking_utils.py: {SCALAR}": 2},
    "mixtral": lambda found: (
        found.keys()
        == {
            f"masking_utils.py: {SCALAR}",
            f"modeling_mixtral.py: {SCALAR}",
            "modeling_mixtral.py: nonzero",
        }
    ),
}
FAMILIES = {
    **{name: Architecture(name, ARCHITECTURES[name].make, with_mask) for name in ARCHITECTURES},
    "mixtral": Architecture("mixtral", mixtral, with_mask),
}


def counted(rank, models, batch, config):
    """The third step of two micro-batches, when orders have been recorded and states made."""
    model = models[rank]
    engine = start(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    for step in range(3):
        with HostSyncs() as syncs:
            for micro in range(config["gradient_accumulation_steps"]):
                engine.backward(engine(**batch(step, micro, rank)).loss)
                engine.step()
    engine.destroy()
    return syncs


def expected_of_the_engine(precision, offload):
    # whether the step overflowed; the divisor for the host's update
    if precision == "fp16" or offload:
        return {f"optimizer_step.py: {SCALAR}": 2 if precision == "fp16" and offload else 1}
    return {}


@pytest.mark.parametrize(
    ("family", "stage", "precision", "offload"),
    fast(
        [
            (family, stage, precision, offload)
            for family in FAMILIES
            for stage in STAGES
            for precision in ("fp32", "bf16", "fp16")
            for offload in OFFLOADS
            if (stage > 0 or not offload) and (stage == 3 or offload != "all")
        ],
        lambda family, stage, precision, offload: (
            (family == "bert" and not offload and precision == "fp16")
            or (family == "mixtral" and stage == 3 and not offload and precision == "fp32")
            or (family == "llama" and precision == "bf16" and (offload or stage == 0))
            or (family in ("gpt2", "t5") and (stage, precision, offload) == (2, "fp32", ""))
        ),
    ),
)
def test_the_engine_reads_nothing_back(family, stage, precision, offload):
    architecture = FAMILIES[family]
    config = config_of(stage, Plan(accumulation=2, clip=1.0, precision=precision))
    config["zero_optimization"].update(OFFLOADS[offload])
    for syncs in run_ranks(
        2, counted, [architecture.build() for _ in range(2)], architecture.batch, config
    ):
        engine = syncs.of("hf_zero")
        if offload:  # step counters of states that are in host memory
            engine.pop(f"bound_optimizer.py: {SCALAR}", None)
        assert dict(engine) == expected_of_the_engine(precision, offload)
        theirs = {name: count // 2 for name, count in syncs.of("transformers").items()}
        assert OF_THE_MODELS[family](theirs), theirs
        assert {owner for owner, _, _ in syncs.found} <= {"hf_zero", "transformers"}


def test_without_clipping_a_norm_is_not_read_either():
    architecture = FAMILIES["llama"]
    for syncs in run_ranks(
        2, counted, [architecture.build() for _ in range(2)], architecture.batch, config_of(1)
    ):
        assert not syncs.of("hf_zero")


MEASURED = {
    "metrics": {"enabled": True},
    "comms_logger": {"enabled": True},
    "wall_clock_breakdown": True,
}


@pytest.mark.parametrize("stage", STAGES)
def test_measures_read_nothing_back_within_a_step(stage):
    """On ranks whose device is the host the figures of a step are read as it ends, from memory of
    the host: one read of them all, in ``figures.py``.
    """
    architecture = FAMILIES["llama"]
    config = config_of(stage, Plan(accumulation=2), **MEASURED)
    for syncs in run_ranks(
        2, counted, [architecture.build() for _ in range(2)], architecture.batch, config
    ):
        assert dict(syncs.of("hf_zero")) == {"figures.py: tolist": 1}


# -- the counter itself ----------------------------------------------------------------------------

X = torch.arange(6.0)
WAITS: dict[str, Callable[[], Any]] = {
    "_local_scalar_dense": lambda: X.sum().item(),
    "nonzero": lambda: X.nonzero(),
    "masked_select": lambda: X.masked_select(X > 2),
    "equal": lambda: torch.equal(X, X + 1),
    "index": lambda: X[X > 2],
    "index_put_": lambda: X.clone().__setitem__(X > 9, torch.ones(0)),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_counted(name):
    with HostSyncs() as syncs:
        WAITS[name]()
    assert Counter({found: count for (_, _, found), count in syncs.found.items()}) == {name: 1}
    assert {(owner, file) for owner, file, _ in syncs.found} == {("tests", "test_host_syncs.py")}


def test_what_does_not_wait_is_not_counted():
    with HostSyncs() as syncs:
        y = X[torch.tensor([1, 2])] * 2
        y[0] = 5.0
        torch.where(y > 1, y, y + 1).sum()
        torch.repeat_interleave(torch.tensor([1, 2]), output_size=3)
    assert not syncs.found


def test_a_backward_is_counted_too():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = torch.ones(3, requires_grad=True)
    with HostSyncs() as syncs:
        Reads.apply(x).sum().backward()
    assert sum(syncs.found.values()) == 1
