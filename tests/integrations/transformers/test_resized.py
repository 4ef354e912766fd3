"""``resize_token_embeddings`` of a model in shards: before initialize, in ``hf_zero.Init`` and
after it, and of a model that an engine trains. The oracle is the same model in one process.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

RANKS, WORDS, MORE, ROWS = 2, 61, 70, 2
FP32 = {"rtol": 1e-4, "atol": 1e-6}


def saved(folder: Path, tied: bool = False) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": zero}


def words(step: int, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, most, (RANKS * ROWS, 8), generator=generator)


def steps(call: Any, update: Any, rows: slice, numbers: range, most: int) -> None:
    for number in numbers:
        ids = words(number, most)[rows]
        update(call(input_ids=ids, labels=ids).loss)


def resize(model: Any, size: int, mean: bool) -> None:
    """New rows of zeros, or close to the mean: rank 0 draws them, not from one process' place."""
    model.config.initializer_range = 1e-9
    embeddings = model.resize_token_embeddings(size, mean_resizing=mean)
    assert embeddings.weight.shape[0] == size == model.config.vocab_size


def plainly(folder: Path, before: int, size: int, mean: bool) -> dict[str, torch.Tensor]:
    """Weights after four steps, with a new vocabulary after ``before`` of them."""
    model = read(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    everything = slice(None)
    steps(model, update, everything, range(before), WORDS)
    held = {id(p): dict(optimizer.state[p]) for p in model.parameters() if p in optimizer.state}
    resize(model, size, mean)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ends = {id(p) for p in (model.get_input_embeddings().weight, model.lm_head.weight)}
    for p in model.parameters():
        if id(p) in held and id(p) not in ends:
            optimizer.state[p] = held[id(p)]
    steps(model, update, everything, range(before, 4), min(size, WORDS))
    return {name: value.detach() for name, value in model.state_dict().items()}


def on_rank(
    rank: int, folder: Path, where: str, stage: int, before: int, size: int, mean: bool
) -> dict[str, torch.Tensor]:
    config = settings(stage)
    if where == "plain":
        model = read(folder)
    else:
        with hf_zero.Init(config_dict_or_path=config):
            model = read(folder)
            if where == "inside Init":
                resize(model, size, mean)
    if where == "after Init":
        resize(model, size, mean)
    engine = hf_zero.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), config=config
    )[0]

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    own = slice(rank * ROWS, (rank + 1) * ROWS)
    steps(engine, update, own, range(before), WORDS)
    if before:
        resize(engine.module, size, mean)
    steps(engine, update, own, range(before, 4), min(size, WORDS))
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return weights


CELLS = [
    ("after Init", 3, 0, MORE, True),
    ("inside Init", 3, 0, MORE, False),
    ("inside Init", 1, 0, MORE, True),
    ("plain", 0, 2, MORE, True),
    ("plain", 2, 2, WORDS - 7, False),
    ("in Init", 3, 2, MORE, False),
    ("plain", 3, 2, MORE, True),
]


def on_ranks(rank: int, folders: list[str]) -> list[dict[str, torch.Tensor]]:
    """The weights of each cell. In processes: from_pretrained replaces functions of transformers
    and torch while it runs, and threads would put back each other's.
    """
    return [on_rank(rank, Path(folder), *cell) for folder in folders for cell in CELLS]


def test_it_trains_as_in_one_process(tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(tied), tied) for tied in (False, True)]
    every = run_processes(RANKS, on_ranks, [str(folder) for folder in folders])
    for at, (folder, cell) in enumerate(itertools.product(folders, CELLS)):
        _, _, before, size, mean = cell
        want = plainly(folder, before, size, mean)
        for got in (cells[at] for cells in every):
            assert got.keys() == want.keys()
            for name, value in want.items():
                # around the mean, transformers draws rows of a deviation of some 1e-6
                near = {"rtol": 1e-2, "atol": 2e-5} if mean else FP32
                torch.testing.assert_close(got[name], value, **near)


def test_an_engine_that_trains_nothing_keeps_its_vocabulary(tmp_path: Path) -> None:
    engine = hf_zero.initialize(model=read(saved(tmp_path)), config=settings(0))[0]
    with pytest.raises(PartitionError, match=r"needs an engine with an optimizer"):
        engine.module.resize_token_embeddings(MORE)
    assert engine.module.config.vocab_size == WORDS
    assert engine.module.get_input_embeddings().num_embeddings == WORDS
    engine.destroy()


def test_in_an_open_window_nothing_is_changed(tmp_path: Path) -> None:
    models = [read(saved(tmp_path)) for _ in range(RANKS)]

    def run(rank: int) -> None:
        model = models[rank]
        engine = hf_zero.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings(3)
        )[0]
        ids = words(0, WORDS)[:ROWS]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        with pytest.raises(PartitionError, match=rf"resize_token_embeddings\({MORE}\) comes betw"):
            model.resize_token_embeddings(MORE)
        assert model.config.vocab_size == WORDS
        engine.step()
        engine.destroy()

    run_ranks(RANKS, run)
