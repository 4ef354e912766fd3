"""Attention masks whose padding is known from the host: no forward reads them back, and its
numbers are the same.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import masking_utils

from hf_zero.device import graphs
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers import attention_masks
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB
from tests.helpers.plain_process import forget

ROWS = 4


def _causal(cache: Any, config: Any, embeds: torch.Tensor, mask: torch.Tensor) -> Any:
    return masking_utils.create_causal_mask(config, embeds, mask, cache)


def rows(padded: bool, count: int = 3 * ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        mask = torch.ones_like(ids)
        if padded and index % 2:
            mask[-2:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def batches(padded: bool) -> DataLoader[Any]:
    return DataLoader(rows(padded), batch_size=ROWS)  # type: ignore[arg-type]


def accelerated(architecture: str, padded: bool) -> tuple[Any, Any]:
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": ROWS}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = ARCHITECTURES[architecture].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, loader = accelerator.prepare(model, optimizer, batches(padded))
    return engine, loader


@in_turn("architecture, padded", [("bert", False), ("t5", True)])
def test_a_forward_reads_nothing_back(architecture: str, padded: bool) -> None:
    forget()
    plain = ARCHITECTURES[architecture].build()
    engine, loader = accelerated(architecture, padded)
    for batch in loader:
        with HostSyncs() as syncs:
            got = engine(**batch).loss
        assert not syncs.found
        expected = plain(**{name: value.clone() for name, value in batch.items()}).loss
        assert torch.equal(got, expected)


@in_one_item([("bert", "sdpa", False), ("llama", "sdpa", False), ("llama", "eager", True)])
def test_masks_are_those_of_transformers(case: tuple[str, str, bool]) -> None:
    architecture, attention, padded = case
    config = ARCHITECTURES[architecture].build().config
    config._attn_implementation = attention
    mask = torch.stack([row["attention_mask"] for row in rows(padded)])
    make: Any = masking_utils.create_bidirectional_mask
    if architecture == "llama":
        make = partial(_causal, None)
    embeds = torch.zeros(*mask.shape, config.hidden_size)
    expected = make(config, embeds, mask.clone())
    attention_masks.note_mask(mask, padded)
    with HostSyncs() as syncs:
        got = make(config, embeds, mask)
    assert not syncs.found
    assert (got is None and expected is None) or torch.equal(got, expected)


def test_a_step_that_is_captured_reads_no_mask_and_keeps_its_kernel_of_attention() -> None:
    """Attention needs no mask where none is given, or one that the host knows to mask nothing, and
    the positions are the model's own.
    """
    config = ARCHITECTURES["llama"].build().config
    config._attn_implementation = "sdpa"
    device = torch.device("cuda")
    ones, padded = (
        torch.stack([row["attention_mask"] for row in rows(padding)]) for padding in (False, True)
    )
    whole, known = ones.clone(), padded.clone()
    attention_masks.note_mask(whole, False)
    attention_masks.note_mask(known, True)
    embeds = torch.zeros(*ones.shape, config.hidden_size)
    positions = torch.arange(ones.shape[1])[None]

    def make(mask: torch.Tensor | None, *given: str) -> Any:
        with graphs.repeatable(device, ("input_ids", *given)), HostSyncs() as syncs:
            made = masking_utils.create_causal_mask(
                config, embeds, mask, None, position_ids=positions
            )
        assert not syncs.found
        return made

    assert make(None) is None and make(whole, "attention_mask") is None
    expected = masking_utils.create_causal_mask(config, embeds, padded, None)
    for mask in (known, padded):
        assert torch.equal(make(mask, "attention_mask"), expected)
    assert make(ones, "attention_mask") is not None  # nobody knows
    assert make(None, "position_ids") is not None  # of several sequences, perhaps
    assert masking_utils.create_causal_mask(config, embeds, None, None) is None


def test_values_that_change_and_masks_shorter_than_the_cache() -> None:
    """Those are read again; these are kept, as they say which part of a static cache is filled."""
    mask = torch.ones(2, 5, dtype=torch.long)
    attention_masks.note_mask(mask, False)
    assert attention_masks.known_padding(mask) is False
    config = ARCHITECTURES["llama"].build().config
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    embeds = torch.zeros(2, 5, 32)
    _, kept, *_ = masking_utils._preprocess_mask_arguments(config, embeds, mask, cache, None, 0)
    assert kept is not None and kept.all()
    mask[:, 3:] = 0
    assert attention_masks.known_padding(mask) is None
    config = ARCHITECTURES["bert"].build().config
    assert masking_utils.create_bidirectional_mask(config, embeds, mask) is not None


def test_an_original_that_answers_otherwise_is_refused() -> None:
    """The places in its result are found by a call, whatever its parameters are called."""
    plain: Any = inspect.unwrap(masking_utils._preprocess_mask_arguments)

    def turned(store, config, inputs_embeds, attention_mask, position_ids=None):
        return plain(config, inputs_embeds, attention_mask, store, position_ids, 0)[::-1]

    mask = torch.ones(2, 5, dtype=torch.long)
    attention_masks.note_mask(mask, False)
    config = SimpleNamespace(_attn_implementation="sdpa")
    embeds = torch.zeros(2, 5, 4)
    examined = attention_masks.examine_preprocessing(turned)
    result = attention_masks.drop_whole_masks(examined, None, config, embeds, attention_mask=mask)
    assert result == (0, 0, 5, 5, None, None, False)
    for other in (lambda *given, **named: turned(*given, **named)[:3], lambda config: None):
        with pytest.raises(ConfigError, match="something else for a mask of three keys"):
            attention_masks.examine_preprocessing(other)
