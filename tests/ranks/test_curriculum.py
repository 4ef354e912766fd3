"""Curriculum learning by sequence length: how a model is called, resumes, what is cut, refusals.
Plain loops over batches that were cut are rows of ``test_capabilities.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.techniques.sequence_length import from_config
from tests.helpers.capabilities_of_techniques import LEGACY, SCHEDULE, by_metric, cut
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB, tokens
from tests.helpers.stacks import on_each_rank
from tests.helpers.training import adamw


class Words(nn.Module):
    """A model of one's own, with names of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)
        self.seen: Any = None

    def forward(self, idx, targets=None, **more):
        if isinstance(idx, dict):
            idx, targets = idx["tokens"], idx["targets"]
        elif isinstance(idx, list):
            idx, targets = idx
        self.seen = {"idx": idx, "targets": targets, **more}
        logits = self.head(self.embed(idx)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(engine, model, steps):
    """Lengths of the sequences that each step sees."""
    lengths = []
    for step in steps:
        ids = tokens(step, 0, 0)
        engine.backward(engine(ids, ids))
        engine.step()
        lengths.append(model.seen["idx"].shape[1])
    return lengths


@on_each_rank(1, build=Words)
def test_however_a_model_is_called(rank, model):
    """With names of its own, and by itself; evaluation sees whole sequences."""
    engine = start(model, adamw(model), config_of(2, **LEGACY))
    ids = tokens(0, 0, rank)
    square = torch.zeros(2, 1, LENGTH, LENGTH)
    for net in (engine, model):
        for call in (
            lambda net=net: net(ids, ids),
            lambda net=net: net({"tokens": ids, "targets": ids}, 0),
            lambda net=net: net([ids, ids]),
            lambda net=net: net(ids, targets=ids, mask=square, scores=torch.zeros(2, LENGTH, 4)),
        ):
            call()
            assert model.seen["idx"].shape == model.seen["targets"].shape == (2, 3)
        assert model.seen["mask"].shape == (2, 1, 3, 3) and model.seen["scores"].shape == (2, 3, 4)
        with torch.no_grad():
            net(ids, ids)
        assert model.seen["idx"].shape[1] == LENGTH
    engine.eval()
    engine(ids, ids)
    assert model.seen["idx"].shape[1] == LENGTH
    engine.destroy()
    model.train()
    model(ids, ids)
    assert model.seen["idx"].shape[1] == LENGTH


@on_each_rank(1)
def test_a_loop_that_passes_the_number_of_its_labels(rank):
    """Its number is that of whole sequences' labels; after prepare_batch it is the loop's own."""
    model = ARCHITECTURES["llama"].build()
    engine = start(model, adamw(model), config_of(0, **LEGACY))
    batch = ARCHITECTURES["llama"].batch(0, 0, rank)
    short = cut(batch, 3)
    counted = batch["labels"][:, 1:].numel()
    plain = ARCHITECTURES["llama"].build()
    wanted = plain(**short, num_items_in_batch=short["labels"][:, 1:].numel()).loss
    torch.testing.assert_close(wanted, plain(**short).loss)
    for number in (counted, torch.tensor(counted)):
        torch.testing.assert_close(engine(**batch, num_items_in_batch=number).loss, wanted)
    prepared = engine.prepare_batch(batch)
    assert {name: value.shape[1] for name, value in prepared.items()} == dict.fromkeys(batch, 3)
    got = engine(**prepared, num_items_in_batch=prepared["labels"][:, 1:].numel()).loss
    torch.testing.assert_close(got, wanted)
    hidden = {**batch, "labels": batch["labels"].clone()}
    hidden["labels"][:, :3] = -100  # nothing that counts is left
    assert engine(**hidden, num_items_in_batch=counted).loss.item() == 0.0
    engine.destroy()


def technique(config, model):
    made = from_config(ZeroConfig.from_dict(config))
    assert made is not None
    made.sequences.install(model)
    return made


def batch_of(**more):
    ids = tokens(0, 0, 0)
    return {"input_ids": ids, **more}


def test_what_is_cut_and_what_stays_whole():
    made = technique(LEGACY, Words())
    wide = torch.randn(2, LENGTH, LENGTH)  # a width that is the length of the sequence
    found = made.prepare_batch({"inputs_embeds": wide, "attention_mask": torch.ones(2, LENGTH)})
    assert torch.equal(found["inputs_embeds"], wide[:, :3])
    whole = batch_of(
        labels=torch.zeros(2, dtype=torch.long),
        head_mask=torch.zeros(2, LENGTH),
        position_ids=torch.arange(LENGTH)[None],
        attention_mask=torch.ones(2, LENGTH, LENGTH),
        start_positions=torch.zeros(2),
        note="a word",
    )
    found = made.prepare_batch(whole)
    assert found.pop("note") == "a word"
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "input_ids": (2, 3),
        "labels": (2,),
        "head_mask": (2, LENGTH),
        "position_ids": (1, 3),
        "attention_mask": (2, 3, 3),
        "start_positions": (2,),
    }
    several = batch_of(labels=torch.zeros(2, LENGTH))  # a number for each of LENGTH classes
    assert made.prepare_batch(several)["labels"].shape == (2, LENGTH)
    short = cut(ARCHITECTURES["bert"].batch(0, 0, 0), 2)
    assert made.prepare_batch(short) is short
    assert made.prepare_batch([1, 2]) == [1, 2]
    rows = technique(by_metric("seqlen_reshape"), Words())
    got = rows.prepare_batch(batch_of(position_ids=torch.arange(LENGTH)[None]))
    assert got["input_ids"].shape == (6, 3) and got["position_ids"].tolist() == [[0, 1, 2]]


PADDED = torch.tensor([[0, 0] + [1] * 7, [1] * 9])


@in_one_item(
    [
        ({"pixel_values": torch.zeros(2, 3, 4, 4)}, "pixel_values"),
        ({"cu_seq_lens_q": torch.zeros(3)}, "cu_seq_lens_q"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2)}, "position_ids"),
        ({"attention_mask": PADDED + 1}, "numbers above 1 in attention_mask"),
        ({"attention_mask": PADDED}, "padding_side"),
        ({"input_ids": None}, "called with none: input_ids"),
    ]
)
def test_batches_that_cannot_be_cut(case):
    more, said = case
    made = technique(LEGACY, Words())
    made.prepare_batch(batch_of())  # a batch in order says nothing of the next
    with pytest.raises(ConfigError, match=rf"curriculum_learning truncates .*{said}"):
        made.prepare_batch(batch_of(**more))


def test_what_no_rows_can_be_made_of():
    made = technique(by_metric("seqlen_reshape"), Words())
    with pytest.raises(ConfigError, match=r"attention_mask has shape \(2, 1, 9, 9\); cut them"):
        made.prepare_batch(batch_of(attention_mask=torch.zeros(2, 1, LENGTH, LENGTH)))
    with pytest.raises(ConfigError, match="next_sentence_label has one value for each row"):
        made.prepare_batch(batch_of(next_sentence_label=torch.zeros(2, dtype=torch.long)))
    model = ARCHITECTURES["t5"].build()  # which holds the configuration that is asked
    made = technique(by_metric("seqlen_reshape"), model)
    with pytest.raises(ConfigError, match="one for its decoder; cut them instead"):
        made.prepare_batch(batch_of())


SHORT = {"total_curriculum_step": 90, "difficulty_step": 8}


@in_one_item(
    [
        ({**LEGACY, **by_metric("seqlen_truncate")}, "each cut sequences"),
        (by_metric("seqlen_reshape", difficulty_type="percentile"), "write value"),
        ({"curriculum_learning": {"enabled": True}}, "min_difficulty"),
        (
            by_metric("seqlen_reshape", schedule_type="fixed_linear", schedule_config=SHORT),
            "makes sequences of 0 tokens",
        ),
    ]
)
def test_configurations_that_are_refused(case):
    config, said = case
    with pytest.raises(ConfigError, match=said):
        technique(config, Words())


@on_each_rank(1)
def test_functions_as_schedules(rank):
    custom = by_metric("seqlen_truncate", schedule_type="custom")
    for config, given, error in (
        ({}, len, "curriculum learning, which is off"),
        (LEGACY, len, "write custom, or leave the call out"),
        (custom, {"seqlen_reshape": len}, "only seqlen_truncate is scheduled"),
    ):
        model = Words()
        engine = start(model, adamw(model), config_of(0, **config))
        with pytest.raises(ConfigError, match=error):
            engine.set_custom_curriculum_learning_schedule(given)
        engine.destroy()
    off = {"curriculum_learning": {"enabled": False, **SCHEDULE}}
    model, ids = Words(), tokens(0, 0, 0)
    engine = start(model, adamw(model), config_of(0, **off))
    assert "curriculum_learning" not in engine.feature_set
    engine.destroy()
    engine = start(model, adamw(model), config_of(0, **custom))
    engine.set_custom_curriculum_learning_schedule({"seqlen_truncate": lambda step: 2 * step})
    assert engine.prepare_batch({"input_ids": ids})["input_ids"].shape == (2, 2)
    engine.destroy()
