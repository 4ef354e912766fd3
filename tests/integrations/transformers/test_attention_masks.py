"""Attention masks whose padding is known from the host: no forward reads them back, and its
numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import masking_utils

from hf_zero.integrations.transformers import attention_masks
from hf_zero.integrations.transformers.training_arguments import TrainingArguments
from tests.helpers import trainers
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB

pytestmark = pytest.mark.usefixtures("plain_process")

ROWS = 4


def rows(padded: bool, count: int = 3 * ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        if padded and index % 2:
            mask[-2:] = 0
        made.append(
            {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        )
    return made


def accelerated(architecture: str, padded: bool) -> tuple[Any, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": ROWS,
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = ARCHITECTURES[architecture].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows(padded), batch_size=ROWS)
    )  # type: ignore[arg-type]
    return engine, loader


@pytest.mark.turns
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_reads_nothing_back(architecture: str, padded: bool) -> None:
    plain = ARCHITECTURES[architecture].build()
    engine, loader = accelerated(architecture, padded)
    for batch in loader:
        with HostSyncs() as syncs:
            got = engine(**batch).loss
        assert not syncs.found
        expected = plain(**{name: value.clone() for name, value in batch.items()}).loss
        assert torch.equal(got, expected)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("architecture", ["bert", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_are_those_of_transformers(architecture: str, attention: str, padded: bool) -> None:
    config = ARCHITECTURES[architecture].build().config
    config._attn_implementation = attention
    mask = torch.stack([row["attention_mask"] for row in rows(padded)])
    make = (
        masking_utils.create_bidirectional_mask
        if architecture == "bert"
        else masking_utils.create_causal_mask
    )
    more = {} if architecture == "bert" else {"past_key_values": None}
    embeds = torch.zeros(*mask.shape, config.hidden_size)
    expected = make(config, embeds, mask.clone(), **more)
    attention_masks._note(mask, padded)
    with HostSyncs() as syncs:
        got = make(config, embeds, mask, **more)
    assert not syncs.found
    assert (got is None and expected is None) or torch.equal(got, expected)


def test_values_that_change_are_read_again() -> None:
    batch = {"attention_mask": torch.ones(2, 5, dtype=torch.long)}
    attention_masks._note(batch["attention_mask"], False)
    assert attention_masks.known_padding(batch["attention_mask"]) is False
    batch["attention_mask"][:, 3:] = 0
    assert attention_masks.known_padding(batch["attention_mask"]) is None
    config = ARCHITECTURES["bert"].build().config
    assert (
        masking_utils.create_bidirectional_mask(
            config, torch.zeros(2, 5, 32), batch["attention_mask"]
        )
        is not None
    )


def test_a_mask_shorter_than_the_cache_is_kept() -> None:
    """The mask of a static cache says which part of the cache is filled."""
    config = ARCHITECTURES["llama"].build().config
    mask = torch.ones(2, 5, dtype=torch.long)
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    attention_masks._note(mask, False)
    _, kept, *_ = masking_utils._preprocess_mask_arguments(
        config, torch.zeros(2, 5, 32), mask, cache, None, 0
    )
    assert kept is not None and kept.all()


def test_without_zero_masks_are_left_alone() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(rows(False), batch_size=ROWS))  # type: ignore[arg-type]
    assert all(attention_masks.known_padding(batch["attention_mask"]) is None for batch in loader)


def batches_of_any_kind() -> Iterator[Any]:
    yield transformers.BatchEncoding({"attention_mask": torch.ones(2, 5)})
    yield {
        "decoder_attention_mask": torch.ones(2, 5),
        "attention_mask": torch.ones(2, 1, 5, 5),
        "input_ids": torch.ones(2, 5),
    }
    yield [torch.ones(2, 5), {"labels": torch.ones(2)}]
    with torch.inference_mode():
        yield {"attention_mask": torch.ones(2, 5)}


def test_batches_of_any_kind_pass() -> None:
    accelerated("bert", False)
    known = []
    for batch in batches_of_any_kind():
        sent = attention_masks.note_padding(
            lambda tensor, device, non_blocking=False, skip_keys=None: tensor
        )(batch, "cpu")
        found = sent.values() if hasattr(sent, "values") else ()
        known.append([attention_masks.known_padding(value) for value in found])
    assert known == [[False], [False, None, None], [], [None]]


# -- the Trainer -----------------------------------------------------------------------------------


def read_back(folder: Any, steps: int, **settings: Any) -> HostSyncs:
    args = TrainingArguments(
        **trainers.options(folder, max_steps=steps, **settings),
        zero_config={"zero_optimization": {"stage": 2}},
    )
    run = transformers.Trainer(
        model=ARCHITECTURES["llama"].build(), args=args, train_dataset=rows(False, 64)
    )  # type: ignore[arg-type]
    with HostSyncs() as syncs:
        run.train()
    if run.args.logging_steps == 1:
        assert all(isinstance(norm, float) for norm in trainers.logged(run, "grad_norm"))
        assert len(trainers.logged(run, "grad_norm")) == steps
    return syncs


@pytest.mark.turns
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("logged", [False, True], ids=["quiet", "logged"])
def test_steps_of_the_trainer(
    logged: bool, max_grad_norm: float, tmp_path: Any, heard: list[str]
) -> None:
    """Steps that log nothing read nothing back; the Trainer's filter of losses that are not finite,
    disabled here, reads two.
    """
    settings = {
        "logging_steps": 1 if logged else 100,
        "logging_nan_inf_filter": False,
        "max_grad_norm": max_grad_norm,
    }
    few, more = (read_back(tmp_path, steps, **settings).found for steps in (3, 5))
    more.subtract(few)
    found = {name: count / 2 for name, count in more.items() if count}
    # in host memory, wherever the model is
    assert found.pop(("hf_zero", "attention_masks.py", "_local_scalar_dense")) == 1
    # loss, norm, operations so far
    expected = {("transformers", "trainer.py", "_local_scalar_dense"): 3}
    assert found == (expected if logged else {})
    assert not [message for message in heard if "clip_grad_norm_" in message]
