"""Refusals, by name and with the remedy, of cases that would end in another library's error, or in
another training than was meant.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    Trainer,
)

from hf_zero import ZeroCallback
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.integrations.transformers import trainer_refusals
from hf_zero.integrations.transformers.trainer_config import refuse_full_eval
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget
from tests.helpers.trainers import BEST, EVERY_STEP, ROUTES, logged, routed


def bert() -> BertForMaskedLM:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 8)
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=20, **sizes, **layers))


@in_turn("loader", [AutoModelForMaskedLM, BertForMaskedLM])
def test_a_sharded_checkpoint_is_no_model_folder(tmp_path: Path, loader: Any) -> None:
    state = tmp_path / "step_200"
    (state / "pytorch_model").mkdir(parents=True)
    (state / "pytorch_model" / "manifest.json").write_text("{}")
    (state / "scheduler.bin").touch()
    for folder in (tmp_path, state, state / "pytorch_model"):
        with pytest.raises(CheckpointError, match=f"hf-zero convert-checkpoint {folder} MODEL"):
            loader.from_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(state)
    # it lies beside the checkpoint, and asks for the model's configuration
    assert AutoTokenizer.from_pretrained(state).vocab_size == 1
    bert().save_pretrained(state)  # a Trainer's folder is both
    assert loader.from_pretrained(state).config.vocab_size == 20


def test_one_process_beside_other_devices_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hf_zero.setup.request import _warn_other_devices

    module = __import__("sys").modules["hf_zero.setup.request"]
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    monkeypatch.setattr(module, "device_count", lambda: 8)
    monkeypatch.setattr(module.process_group, "is_initialized", lambda: False)
    for launched in (SimpleNamespace(), None):
        _warn_other_devices.cache_clear()
        monkeypatch.setattr(module, "announce", lambda place=launched: place)
        _warn_other_devices()
        assert ("one process trains on one of 8 devices" in caplog.text) is (launched is None)
    caplog.clear()
    _warn_other_devices()
    assert caplog.text == ""
    _warn_other_devices.cache_clear()


def test_an_evaluation_in_another_precision() -> None:
    names = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
    off = dict.fromkeys(names, False)
    for kind in ("bf16", "fp16"):
        full = off | {f"{kind}_full_eval": True}
        with pytest.raises(ConfigError, match=f"{kind}_full_eval=True without {kind}=True"):
            refuse_full_eval({"zero_optimization": {"stage": 2}}, SimpleNamespace(**full))
        refuse_full_eval({kind: {"enabled": True}}, SimpleNamespace(**full))
        refuse_full_eval({}, SimpleNamespace(**full | {kind: True}))
    refuse_full_eval({}, SimpleNamespace(**off))


@in_turn("route", ROUTES)
def test_arguments_that_transformers_refuses_under_deepspeed(route: str, tmp_path: Path) -> None:
    """The best of checkpoints with the model alone can be loaded after training."""
    forget()
    alone = {**EVERY_STEP, **BEST, "save_only_model": True, "max_steps": 2}
    for stage, changes, name in (
        (2, alone, "save_only_model"), (3, {"auto_find_batch_size": True}, "auto_find_batch_size")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            routed(route, stage, tmp_path, **changes)
        forget()
    with pytest.raises(ConfigError, match="unsharded"):  # without the launcher's configuration
        routed("plain", 0, tmp_path, callbacks=[ZeroCallback()], auto_find_batch_size=True)
    forget()
    remedy = {"load_best_model_at_end": False, "metric_for_best_model": "loss"}
    run = routed(route, 3, tmp_path, **alone | remedy)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = type(run.model).from_pretrained(run.state.best_model_checkpoint)
    forget()
    found = routed("plain", 0, tmp_path, model=best).evaluate()["eval_loss"]
    assert found == pytest.approx(logged(run, "eval_loss")[0], rel=1e-5)


@in_turn("route", ROUTES)
def test_batches_of_each_rank_are_refused_where_ranks_share_them(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers shares them among all ranks as if each read its own. It samples no stream, and
    nothing where nothing trains.
    """
    forget()
    own = {"train_sampling_strategy": "batch_rebalance"}
    layers = {"tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ConfigError, match="batch_rebalance"):
        routed(route, 1, tmp_path, config=layers, **own)
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"input_ids": [1]}]))
    for unsampled in (stream, None):
        forget()
        routed(route, 1, tmp_path, config=layers, train_dataset=unsampled, **own)
    forget()
    routed(route, 1, tmp_path, **own)
    forget()
    monkeypatch.setattr(trainer_refusals, "sequence_ranks", lambda state: 2)
    with pytest.raises(ConfigError, match="batch_rebalance"):
        routed(route, 1, tmp_path, **own)


@in_turn("kind", ["GRPOConfig", "RLOOConfig"])
def test_completions_of_ranks_that_share_layers_are_not_compared(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    written = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    chosen = {"use_cpu": True, "bf16": False, "report_to": [], "num_generations": 2}
    args = getattr(trl, kind)(str(tmp_path), deepspeed=written, **chosen)
    with pytest.raises(ConfigError, match=r"autotp_size = 2 ranks 0, 1 sample the same ones"):
        Trainer(bert(), args)
