"""The oracle for losses of deferred logits: inside the model's forward and after it, with adapters,
recomputation and offload, and where ranks share sequences.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from hf_zero.activations import policy
from hf_zero.errors import KernelError
from hf_zero.ops.deferred import heads, tensor
from hf_zero.ops.deferred.tensor import DeferredOutput
from tests.helpers import oracle, sequences
from tests.helpers.capabilities import SMALL
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, engine_opener, start, train_on_threads
from tests.helpers.late_transfers import Late
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import Ranks
from tests.helpers.training import At, Driver, Plan, Way, own_loss, plain_sgd

LLAMA = ARCHITECTURES["llama"]
OWN = own_loss("llama")
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def logits_of(net: Driver, at: At) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels of the same rows, from a forward without labels."""
    batch = LLAMA.batch(at.step, at.micro, at.rank)
    logits = net(input_ids=batch["input_ids"]).logits
    return logits[:, :-1], batch["labels"][:, 1:]


def script_loss(net: Driver, at: At) -> torch.Tensor:
    logits, labels = logits_of(net, at)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def log_probabilities(net: Driver, at: At) -> torch.Tensor:
    logits, labels = logits_of(net, at)
    logits = logits / 0.7
    chosen = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return -chosen.sum(-1).sigmoid().mean() + 0.1 * entropy.mean()


def with_metric(net: Driver, at: At) -> torch.Tensor:
    outputs = net(**LLAMA.batch(at.step, at.micro, at.rank))
    assert outputs.logits.argmax(-1).shape == outputs.logits.shape[:-1]
    return outputs.loss


def with_whole(net: Driver, at: At) -> torch.Tensor:
    outputs = net(**LLAMA.batch(at.step, at.micro, at.rank))
    return outputs.loss + 0.1 * outputs.logits.square().mean()


def adapted(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = LoraConfig(r=4, init_lora_weights=False, **settings)
        return get_peft_model(LLAMA.make(), config)  # type: ignore[arg-type,return-value]

    return make


def recomputed() -> nn.Module:
    model: Any = LLAMA.make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = LLAMA.make
    loss: Callable[[Driver, At], torch.Tensor] = OWN
    keys: dict[str, Any] = field(default_factory=dict)
    whole: bool = False  # something reads whole logits


CASES = {
    "own loss": Case(),
    "bert": Case(ARCHITECTURES["bert"].make, own_loss("bert")),
    "gpt2, tied": Case(ARCHITECTURES["gpt2"].make, own_loss("gpt2")),
    "t5, tied and scaled": Case(ARCHITECTURES["t5"].make, own_loss("t5")),
    "loss of the script": Case(loss=script_loss),
    "log-probabilities": Case(loss=log_probabilities),
    "metric": Case(loss=with_metric),
    "whole logits beside the loss": Case(loss=with_whole, whole=True),
    "LoRA on the head": Case(adapted(target_modules=["q_proj", "lm_head"])),
    "a head of the adapter": Case(adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "recomputed": Case(recomputed),
    "recomputed by the engine": Case(keys={"activation_checkpointing": {"blocks": True}}),
    "offloaded weights": Case(keys={"zero_optimization": OFFLOAD}),
    "offloaded activations": Case(keys={"activation_offload": SMALL}),
    "compiled blocks": Case(keys={"compile": {"blocks": True, "backend": "aot_eager"}}),
}
CELLS = [(name, 3) for name in CASES] + [("own loss", 2), ("LoRA on the head", 2)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "rows_of_a_chunk", lambda *_: 5)
    monkeypatch.setattr(heads.chunked_head, "rows_of_a_chunk", lambda *_: 5)


@in_one_item(CELLS)
def test_losses_as_in_one_process(cell: tuple[str, int]) -> None:
    name, stage = cell
    case = CASES[name]
    computed: list[tuple[int, ...]] = []
    calls: list[Any] = []
    plain, of_call = DeferredOutput.materialize, DeferredOutput.of_call

    def materialize(one: DeferredOutput) -> torch.Tensor:
        computed.append(tuple(one.shape))
        return plain(one)

    job = Way(f"deferred: {name}", case.make, case.loss, plain_sgd)
    plan = Plan(ranks=2, steps=2)
    opener = engine_opener(stage, kernels=["loss"], **case.keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "transfers_of", lambda device: Late())
        patch.setattr(DeferredOutput, "materialize", materialize)
        patch.setattr(DeferredOutput, "of_call", lambda *args: calls.append(1) or of_call(*args))
        found = train_on_threads(job, plan, opener)
    oracle.compare(found, oracle.kept(job, plan))
    assert calls and bool(computed) == case.whole, computed


def adapted_llama() -> nn.Module:
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"])
    return get_peft_model(sequences.llama(), config)  # type: ignore[arg-type,return-value]


@in_turn(
    "make, ranks, stage",
    [(adapted_llama, Ranks(2), 0), (sequences.llama, Ranks(1, context=2), 3)],
)
def test_ranks_that_share_sequences(
    make: Callable[[], nn.Module], ranks: Ranks, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Any] = []
    materialize = DeferredOutput.materialize
    monkeypatch.setattr(
        DeferredOutput, "materialize", lambda one: computed.append(one) or materialize(one)
    )
    job, plan = sequences.SequenceJob(make), Plan(ranks=1, steps=2, accumulation=2)
    job.name = f"deferred: {make.__name__}"
    found, _ = sequences.train_on_threads(job, plan, ranks, stage, kernels=["loss"])
    oracle.compare(found, oracle.kept(job, plan))
    assert not computed


def test_what_one_rank_shows_or_stores_starts_no_collective() -> None:
    """At stage 3 one rank alone prints logits, and may not pickle them; reading is for all."""

    def run(rank: int, models: list[nn.Module]) -> float:
        engine = start(models[rank], plain_sgd(models[rank]), config_of(3, kernels=["loss"]))
        logits = engine(input_ids=LLAMA.batch(0, 0, rank)["input_ids"]).logits
        gathered = engine.mesh.stats.counts["all_gather"]
        if rank == 0:
            shown = f"shape={tuple(logits.shape)}, dtype=torch.float32, not computed"
            assert repr(logits) == f"{logits}" == f"DeferredOutput({shown})"
            for store in (pickle.dumps, copy.deepcopy):
                with pytest.raises(KernelError, match="whose weight is sharded over ranks"):
                    store(logits)
        assert engine.mesh.stats.counts["all_gather"] == gathered
        total = float(logits.detach().sum())
        assert repr(logits).startswith("tensor(")
        engine.destroy()
        return total

    models = [LLAMA.build() for _ in range(2)]
    run_ranks(2, run, models)
