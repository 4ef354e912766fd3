"""Names of the facade that training scripts use and libraries do not: loaders, messages, random
states, an engine's answers, inference.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.integrations.fused import report
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.helpers.cells import in_one_item
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import llama


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(deepspeed.logger, "propagate", True)
    caplog.set_level(logging.INFO, deepspeed.logger.name)
    return caplog


def test_a_repeating_loader_begins_again() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=2)
    batches = deepspeed.utils.RepeatingLoader(loader)
    assert [next(batches)[0].tolist() for _ in range(5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]
    assert iter(batches) is batches
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


def test_messages_of_chosen_ranks(
    said: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of memory only when forced."""
    deepspeed.log_dist("before a group everybody speaks")
    monkeypatch.setattr(process_group, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "get_rank", lambda: 1)
    for ranks in (None, [], [0], [0, 1], [-1], 1, 0):
        deepspeed.log_dist(f"to {ranks}", ranks)
        deepspeed.utils.logging.print_dist(f"to {ranks}", ranks)
    told = [record.getMessage() for record in said.records]
    assert told == ["before a group everybody speaks", "to [0, 1]", "to [-1]", "to 1"]
    assert capsys.readouterr().out.splitlines() == ["to [0, 1]", "to [-1]", "to 1"]
    deepspeed.utils.logging.logger.log_dist_once("once", 1)  # type: ignore[attr-defined]
    said.clear()
    tell = deepspeed.runtime.utils.see_memory_usage
    tell("another rank", force=True)
    monkeypatch.setattr(process_group, "get_rank", lambda: 0)
    tell("quiet")
    tell("after the step", force=True)
    (record,) = said.records
    device = deepspeed.get_accelerator().device_name()
    assert record.getMessage().startswith(f"after the step: {device} ")
    assert "GiB now" in record.getMessage()


def test_random_states_apart_from_the_default() -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(11)
    with tracker.fork():
        inside = torch.rand(3)
    outside = torch.rand(3)
    with tracker.fork():
        more = torch.rand(3)

    torch.manual_seed(11)
    assert torch.equal(outside, torch.rand(3))  # as if nothing had been drawn inside
    torch.manual_seed(11 + 2718)
    # one stream, continued
    assert torch.equal(torch.cat([inside, more]), torch.cat([torch.rand(3), torch.rand(3)]))

    kept = tracker.get_states()
    tracker.reset()
    with pytest.raises(ConfigError, match="no random state 'model-parallel-rng'"), tracker.fork():
        pass
    tracker.set_states(kept)
    with pytest.raises(ConfigError, match="'model-parallel-rng' or its seed 5 is in use already"):
        tracker.add("model-parallel-rng", 5)
    tracker.add("mine", 5)
    with tracker.fork("mine"):
        mine = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(mine, torch.rand(2))
    tracker.reset()


def test_what_an_engine_says_of_itself(plain_process: None, tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        "zero_optimization": {"stage": 3},
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(2, 1), training_data=data, config=config
    )
    assert engine.gradient_clipping() == 0.5
    assert engine.training_dataloader is loader and loader.batch_size == 2
    assert issubclass(deepspeed.runtime.dataloader.DeepSpeedDataLoader, DataLoader)
    assert isinstance(loader, DataLoader) and loader.data_sampler is loader.sampler
    assert engine.get_mom() == [(0.8, 0.9)] and engine.get_lr() == [0.1]
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (1.0, False)
    assert engine.zero_optimization_partition_gradients()
    assert engine.zero_optimization_partition_weights()
    engine.destroy()

    plain = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0,
    }
    sgd = torch.optim.SGD((model := nn.Linear(2, 1)).parameters(), lr=0.1, momentum=0.7)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=plain)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (16.0, True)
    assert (engine.get_mom(), engine.gradient_clipping()) == ([0.7], 0.0)
    assert not engine.zero_optimization_partition_gradients() and engine.training_dataloader is None
    engine.destroy()

    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={})
    assert engine.loaded_checkpoint_tag is engine.losses is None and engine.get_mom() == []
    assert engine.checkpoint_engine.name == "TorchCheckpointEngine"
    engine.timers("forward").start()
    engine.timers("forward").stop()
    engine.save_checkpoint(str(tmp_path), tag="first")
    engine.load_checkpoint(str(tmp_path))
    assert engine.loaded_checkpoint_tag == "first"
    engine.destroy()


def test_names_that_deepspeed_chat_and_others_import(tmp_path: Path) -> None:
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.constants import CROSS_RANK
    from deepspeed.launcher.runner import DLTS_HOSTFILE, EXPORT_ENVS
    from deepspeed.module_inject.layers import GatherReplacedLayerParams
    from deepspeed.runtime.activation_checkpointing.checkpointing import _CUDA_RNG_STATE_TRACKER
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.utils.logging import log_dist

    assert deepspeed.log_dist is log_dist and deepspeed.dist is deepspeed.comm
    assert deepspeed.DeepSpeedConfigError is ConfigError
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    layer = model[0][0]
    assert recursive_getattr(model, "0.0") is layer
    recursive_setattr(model, "0.0", nn.Identity())
    assert isinstance(model[0][0], nn.Identity)
    writer = TorchCheckpointEngine()
    writer.save({"a": torch.ones(2)}, str(tmp_path / "file.pt"))
    assert torch.equal(writer.load(str(tmp_path / "file.pt"))["a"], torch.ones(2))
    with GatherReplacedLayerParams(layer.parameters(), model):
        pass
    set_sharding(layer.weight, Sharding(("tensor",)))
    cut = GatherReplacedLayerParams(layer.weight, layer)
    with pytest.raises(NotBuiltError, match="state_dict"), cut:
        pass
    with GatherReplacedLayerParams(None, layer, enabled=False):
        pass
    with pytest.raises(NotBuiltError, match=r"tp_model_init\(tp_group=...\).* leave it out"):
        deepspeed.tp_model_init(model, 1, tp_group=object())
    with pytest.raises(TypeError, match="tp_size_"):
        deepspeed.tp_model_init(model, 1, tp_size_=2)
    assert deepspeed.checkpointing.get_cuda_rng_tracker() is _CUDA_RNG_STATE_TRACKER
    assert (CROSS_RANK, DLTS_HOSTFILE) == ("CROSS_RANK", "/job/hostfile") and "UCX" in EXPORT_ENVS


TOKENS = torch.arange(6).view(1, 6)


@pytest.fixture
def model() -> Any:
    return seeded(llama).eval()


def test_a_model_computes_and_generates_as_before(model: Any) -> None:
    want = model(TOKENS).logits
    made = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    engine = deepspeed.init_inference(model.train(), dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine) and not model.training
    assert engine.module is model and engine.config is model.config
    assert torch.equal(engine(TOKENS).logits, want)
    again = engine.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(again, made)
    with pytest.raises(AttributeError, match="no_such"):
        _ = engine.no_such
    assert not engine.training
    config = {"dtype": "torch.float32", "kernel_inject": True, "quant": {"enabled": False}}
    engine = deepspeed.init_inference(model, config, replace_with_kernel_inject=True)
    assert report(engine.module).replaced
    torch.testing.assert_close(engine(TOKENS).logits, want)


@in_one_item([{"tensor_parallel": {"tp_size": 2}}, {"mp_size": 2}])
def test_layers_are_cut_over_ranks(key: dict[str, Any]) -> None:
    models = [seeded(llama).eval() for _ in range(2)]
    want = seeded(llama).eval()(TOKENS).logits

    def run(rank: int) -> tuple[torch.Tensor, int]:
        engine = deepspeed.init_inference(models[rank], dtype="fp32", **key)
        with torch.no_grad():
            return engine(TOKENS).logits, sum(p.numel() for p in engine.module.parameters())

    whole = sum(p.numel() for p in seeded(llama).parameters())
    for got, elements in run_ranks(2, run):
        torch.testing.assert_close(got, want)
        assert elements < whole
