"""``from_pretrained`` in shards, on real ranks: the plain loader's model, bit for bit, and what
scripts do with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
import transformers

from tests.helpers.processes import run_processes, say
from tests.loading.cases import CASES, loads_like_the_plain_loader
from tests.loading.zoo import MORE, ZOO, save

Cases = dict[str, Callable[[int, Path], None]]
# like another one to a loader; cases load some of them, too
SELDOM = ("roberta", "gpt2", "qwen2", "deepseek_v3", "mamba")


def models(names: Iterable[str]) -> Cases:
    return {name: partial(loads_like_the_plain_loader, name=name) for name in names}


def run_cases(rank: int, cases: Cases, folder: Path) -> None:
    """Run all cases on this rank, or end at one that fails."""
    transformers.logging.disable_progress_bar()
    for name, case in cases.items():
        say(name)
        dist.barrier()  # what one case leaves in the folder is there for the next
        try:
            case(rank, folder)
        except Exception as error:
            raise AssertionError(f"case {name!r}") from error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    transformers.logging.disable_progress_bar()
    save(ZOO, made)
    return made


def test_loading_in_shards(folder: Path) -> None:
    """Of folders as the hub keeps them."""
    for name in ZOO:
        assert len(list((folder / name).glob("*.safetensors"))) > 1, name
    index = json.loads((folder / "mixtral" / "model.safetensors.index.json").read_text())
    # the model has them merged
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in index["weight_map"]
    often = models(name for name in ZOO if name not in SELDOM)
    run_processes(2, run_cases, often | CASES, folder, timeout=400)


@pytest.mark.long
def test_more_models_in_shards(tmp_path: Path) -> None:
    save([*SELDOM, *MORE], tmp_path)
    run_processes(2, run_cases, models([*SELDOM, *MORE]), tmp_path, timeout=400)


@pytest.mark.long
def test_four_ranks_without_the_hook_at_the_start_of_python(folder, monkeypatch):
    """``hf_zero.from_pretrained`` puts the seams in by itself."""
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "0")
    chosen = models(["llama", "mixtral", "qwen2", "deepseek_v3", "wav2vec2"])
    chosen |= {name: CASES[name] for name in ("saving", "files that are damaged")}
    run_processes(4, run_cases, chosen, folder, timeout=400, start="spawn")
