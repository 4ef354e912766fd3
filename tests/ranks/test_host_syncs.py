"""Host synchronisations of a step, engine and model apart: none where no number was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, HEADS, HIDDEN, LAYERS, VOCAB, Architecture, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan

SCALAR = "_local_scalar_dense"
CPU = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": CPU}
ALL: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}


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
OF_EXPERTS = {f"modeling_mixtral.py: {SCALAR}", "modeling_mixtral.py: nonzero"}
MASKS = {"t5": 2}


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


def of_ranks(family, config):
    make = mixtral if family == "mixtral" else ARCHITECTURES[family].make
    models = [Architecture(family, make, with_mask).build() for _ in range(2)]
    return run_ranks(2, counted, models, with_mask, config)


@in_turn(
    "family, stage, precision, offload, expected",
    [  # one: whether the step overflowed, or the divisor for the host's update
        ("bert", 3, "fp16", {}, 1),
        ("llama", 2, "bf16", OPTIMIZER, 1),
        ("llama", 3, "bf16", ALL, 1),
        ("bert", 1, "fp16", OPTIMIZER, 2),
        ("t5", 2, "fp32", {}, 0),
        ("mixtral", 3, "fp32", {}, 0),
    ],
)
def test_the_engine_reads_nothing_back(family, stage, precision, offload, expected):
    config = config_of(stage, Plan(accumulation=2, clip=1.0, precision=precision))
    config["zero_optimization"].update(offload)
    for syncs in of_ranks(family, config):
        engine = syncs.of("hf_zero")
        if offload:  # step counters of states that are in host memory
            engine.pop(f"bound_optimizer.py: {SCALAR}", None)
        assert engine == Counter({f"optimizer_step.py: {SCALAR}": expected} if expected else {})
        theirs = syncs.of("transformers")
        assert theirs.pop(f"masking_utils.py: {SCALAR}") // 2 == MASKS.get(family, 1)
        assert theirs.keys() == (OF_EXPERTS if family == "mixtral" else set())
        assert {owner for owner, _, _ in syncs.found} <= {"hf_zero", "transformers"}


def test_without_clipping_a_norm_is_not_read_either():
    for syncs in of_ranks("llama", config_of(1)):
        assert not syncs.of("hf_zero")


def test_measures_read_nothing_back_within_a_step():
    """On a host their figures are read as it ends, at once, in ``figures.py``."""
    on = {"metrics": {"enabled": True}, "comms_logger": {"enabled": True}}
    config = config_of(3, Plan(accumulation=2), wall_clock_breakdown=True, **on)
    for syncs in of_ranks("llama", config):
        assert dict(syncs.of("hf_zero")) == {"figures.py: tolist": 1}


# -- the counter itself ----------------------------------------------------------------------------


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


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


@in_turn("name", WAITS)
def test_what_waits_is_counted(name):
    with HostSyncs() as syncs:
        WAITS[name]()
    assert syncs.found == {("tests", "test_host_syncs.py", name): 1}


def test_a_backward_is_counted_too_and_what_does_not_wait_is_not():
    x = torch.ones(3, requires_grad=True)
    with HostSyncs() as syncs:
        Reads.apply(x).sum().backward()
    assert sum(syncs.found.values()) == 1
    with HostSyncs() as syncs:
        y = X[torch.tensor([1, 2])] * 2
        y[0] = 5.0
        torch.where(y > 1, y, y + 1).sum()
        torch.repeat_interleave(torch.tensor([1, 2]), output_size=3)
    assert not syncs.found
