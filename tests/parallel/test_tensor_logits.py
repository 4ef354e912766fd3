"""Deferred logits of a vocabulary in parts, against one plain process: no rank holds the logits of
all tokens, nor sends them.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from hf_zero.errors import KernelError
from hf_zero.ops.deferred import heads, tensor
from hf_zero.ops.deferred.tensor import DeferredOutput
from hf_zero.parallel.tensor.axis import TensorAxis
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import ROWS, Architecture, Batch, tokens
from tests.helpers.oracle import FP32_TOLERANCE, compare, kept
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import HEADS, HIDDEN, train_tensor_parallel
from tests.helpers.training import ArchitectureJob, At, Driver, Plan, plain_sgd
from tests.integrations.fused.uses_of_logits import Identity

WORDS = 66  # parts of 33
CHUNK = 5
_SIZES = {
    "vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": 48,
    "initializer_range": 0.2, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def llama(tied: bool = False, bias: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=tied)
    model: Any = transformers.LlamaForCausalLM(config)
    if bias:
        model.lm_head = nn.Linear(HIDDEN, WORDS)
        nn.init.normal_(model.lm_head.bias)
    return model  # type: ignore[no-any-return]


def gemma2() -> nn.Module:
    sizes = _SIZES | {"head_dim": 8, "final_logit_softcapping": 2.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))


def masked(step: int, micro: int, rank: int) -> Batch:
    ids = tokens(step, micro, rank) % WORDS
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and labels of the same rows


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ignore a label that the second rank's part has at its first place; weigh classes and rows."""
    labels = labels.where(labels != -100, 33).flatten()
    weight, logits = torch.linspace(0.1, 1.0, WORDS), logits.flatten(0, 1) / 0.7
    rows = F.cross_entropy(logits, labels, weight, ignore_index=33, reduction="none")
    return (rows * torch.linspace(-1, 1, len(rows))).sum()


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, at = logits / 0.7, labels.clamp(min=0)[..., None]
    ratio = logits.log_softmax(-1).gather(-1, at)[..., 0] + 0.1 * logits.logsumexp(-1)
    return -ratio.sum(-1).sigmoid().mean()


def by_logsumexp(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen - logits.logsumexp(-1)).mean()


def metric(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    right = (logits.argmax(-1) == labels).float().mean()
    places = logits.detach().argmax(-1, keepdim=True).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * (1 + right + places.mean())


def whole(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return smoothed(logits, labels) + 0.01 * logits.topk(3).values.square().mean()


def below_torch_functions(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return smoothed(Identity.apply(logits), labels)


def with_a_penalty(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = log_probabilities(logits, labels)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    return loss + grad.square().sum()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = llama
    loss: Loss | None = None  # None: the model's own
    gathers: bool = False  # logits between the ranks
    computes: bool = False  # whole logits, as something reads them


CASES = {
    "own loss": Case(),
    "own loss, soft cap": Case(gemma2),
    "label smoothing, bias": Case(lambda: llama(bias=True), smoothed, gathers=True),
    "weights, ignore_index among the labels": Case(lambda: llama(tied=True), padded),
    "log-probabilities": Case(lambda: llama(bias=True), log_probabilities),
    "logsumexp": Case(gemma2, by_logsumexp, gathers=True),
    "argmax": Case(loss=metric),
    "below torch functions": Case(loss=below_torch_functions, gathers=True, computes=True),
    "a penalty on gradients": Case(loss=with_a_penalty, gathers=True, computes=True),
    "whole logits beside the loss": Case(loss=whole, gathers=True, computes=True),
}


class CaseJob(ArchitectureJob):
    def __init__(self, name: str) -> None:
        case = CASES[name]
        super().__init__(Architecture(name, case.make, masked), plain_sgd)
        self.name, self.case = f"logits in parts: {name}", case

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        batch = masked(at.step, at.micro, at.rank)
        if self.case.loss is None:
            return net(**batch).loss
        return self.case.loss(net(input_ids=batch["input_ids"]).logits, batch["labels"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "rows_of_a_chunk", lambda *_: CHUNK)
    monkeypatch.setattr(heads.chunked_head, "rows_of_a_chunk", lambda *_: CHUNK)


def check(cell: tuple[str, int]) -> None:
    name, stage = cell
    job, plan, case = CaseJob(name), Plan(ranks=1, steps=2, accumulation=2), CASES[name]
    joined: list[torch.Size] = []
    computed: list[torch.Size] = []
    deferred: list[Any] = []
    join, materialize, of_call = TensorAxis.join, DeferredOutput.materialize, DeferredOutput.of_call

    def noted_join(axis: TensorAxis, x: torch.Tensor, name: str) -> torch.Tensor:
        joined.append(x.shape)
        return join(axis, x, name)

    def noted(one: DeferredOutput) -> torch.Tensor:
        computed.append(one.shape)
        return materialize(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorAxis, "join", noted_join)
        patch.setattr(DeferredOutput, "materialize", noted)
        patch.setattr(DeferredOutput, "of_call", lambda *a: deferred.append(a) or of_call(*a))
        found = train_tensor_parallel(job, plan, 2, stage, kernels=["loss"])
    compare(found, kept(job, plan), 2 * FP32_TOLERANCE)
    assert deferred and bool(computed) == case.computes
    logits = [shape for shape in joined if shape[-1] == WORDS // 2]
    assert bool(logits) == case.gathers
    assert case.computes or all(shape[:-1].numel() <= CHUNK for shape in logits)


@in_one_item([(name, at % 4) for at, name in enumerate(CASES)])
def test_losses_as_in_one_process(cell: tuple[str, int]) -> None:
    check(cell)


def test_what_one_rank_shows_or_stores_starts_no_collective() -> None:
    def run(rank: int, models: list[nn.Module]) -> None:
        written = config_of(0, tensor_parallel={"autotp_size": 2}, kernels=["loss"])
        engine = start(models[rank], plain_sgd(models[rank]), written)
        logits = engine(input_ids=masked(0, 0, 0)["input_ids"]).logits
        assert logits.shape[0] == ROWS and logits.shape[-1] == WORDS
        if rank == 0:
            assert repr(logits).startswith(f"DeferredOutput(shape={tuple(logits.shape)}")
            with pytest.raises(KernelError, match="whose weight is sharded over ranks"):
                pickle.dumps(logits)
        torch.testing.assert_close(logits[:, 2].argmax(-1), logits.clone().argmax(-1)[:, 2])
        engine.destroy()

    models = [Architecture("llama", llama, masked).build() for _ in range(2)]
    run_ranks(2, run, models)


def test_a_part_whose_words_are_masked_leaves_the_others_finite() -> None:
    def run(rank: int, models: list[nn.Module]) -> None:
        written = config_of(0, tensor_parallel={"autotp_size": 2}, kernels=["loss"])
        engine = start(models[rank], plain_sgd(models[rank]), written)
        ids = masked(0, 0, 0)["input_ids"]
        logits = engine(input_ids=ids).logits
        assert isinstance(logits, DeferredOutput)
        at = (ids % (WORDS // 2))[..., None]
        found = logits.log_softmax(-1).gather(-1, at), logits.logsumexp(-1)
        values = logits.detach().clone() + 0
        expected = values.log_softmax(-1).gather(-1, at), values.logsumexp(-1)
        torch.testing.assert_close(found, expected)
        engine.backward(found[0].mean() + found[1].mean())
        engine.step()
        assert math.isfinite(engine.get_global_grad_norm())
        engine.destroy()

    def build() -> nn.Module:
        model: Any = Architecture("llama", lambda: llama(bias=True), masked).build()
        with torch.no_grad():
            model.lm_head.bias[WORDS // 2 :] = -torch.inf
        return model  # type: ignore[no-any-return]

    run_ranks(2, run, [build() for _ in range(2)])
