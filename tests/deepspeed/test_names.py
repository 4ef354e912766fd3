"""The facade's smaller names: devices, activation checkpointing, optimizers, leaves, copies,
zero.Init.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.activations import policy as activations
from hf_zero.activations.checkpointing import Checkpoints
from hf_zero.config import ZeroConfig
from hf_zero.deepspeed import (
    accelerator,
    activation_checkpointing,
    optimizers,
    random_states,
    zero_init,
)
from hf_zero.deepspeed.state_dicts import clone_tensors_for_torch_save
from hf_zero.deepspeed.tiled_compute import TiledMLP
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, NotBuiltError, OffloadError, UnsupportedOptimizerError
from hf_zero.optim.elementwise import check
from hf_zero.optim.lion import Lion
from hf_zero.parallel.pipeline.module import PipelineModule
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_grads, start
from tests.helpers.late_transfers import Late


def test_the_cpu_under_the_names_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.get_accelerator().device_name() == process_group.default_device().type
    assert accelerator.get_accelerator() is accelerator.get_accelerator()
    monkeypatch.setenv("LOCAL_SIZE", "3")
    cpu = accelerator.DeepSpeedAccelerator("cpu")
    assert cpu.device_name("1") == cpu.current_device_name() == "cpu" and cpu.current_device() == 0
    assert cpu.device() == torch.device("cpu")
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_available() and cpu.is_bf16_supported() and cpu.is_fp16_supported()
    cpu.empty_cache()
    cpu.synchronize()
    cpu.reset_peak_memory_stats()
    assert cpu.device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "three")
    with pytest.raises(ConfigError, match="LOCAL_SIZE is 'three'; write a number"):
        cpu.device_count()
    monkeypatch.delenv("LOCAL_SIZE")
    assert cpu.device_count() >= 1
    assert cpu.is_synchronized_device() and not cpu.is_triton_supported() and cpu.Event is None
    assert cpu.LongTensor([1, 2]).dtype == torch.long and cpu.random() is torch.random
    assert cpu.default_generator(0) is torch.default_generator
    cpu.range_push("a")
    cpu.range_pop()
    assert cpu.lazy_call(lambda: 7) == 7
    assert cpu.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]
    tensor = torch.ones(2)
    assert cpu.on_accelerator(tensor) and cpu.pin_memory(tensor) is tensor
    assert 0 < cpu.memory_allocated() <= cpu.max_memory_allocated() < cpu.total_memory()
    assert 0 < cpu.available_memory() < cpu.total_memory()


def test_a_gpu_under_the_names_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of DeepSpeed chooses the CPU beside it."""
    emptied = []
    answers: dict[str, Any] = {
        "current_device": lambda: 3,
        "is_available": lambda: True,
        "is_bf16_supported": lambda: False,
        "empty_cache": lambda: emptied.append(1),
        "mem_get_info": lambda index=None: (5, 9),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    gpu = accelerator.DeepSpeedAccelerator("cuda")
    names = (gpu.device_name(), gpu.device_name("1"), gpu.current_device_name())
    assert names == ("cuda", "cuda:1", "cuda:3")
    assert gpu.communication_backend_name() == "nccl"
    assert gpu.is_available() and not gpu.is_bf16_supported()
    gpu.empty_cache()
    assert emptied == [1]
    for name in ("memory_allocated", "manual_seed_all"):
        assert getattr(gpu, name) is getattr(torch.cuda, name)
    assert (gpu.available_memory(), gpu.total_memory(0)) == (5, 9)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(process_group.kinds, "accelerator", lambda: "meta")
    monkeypatch.setattr(process_group.kinds, "device_count", lambda: 1)
    assert process_group.default_device().type == "meta"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert process_group.default_device().type == "cpu"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Late]]:
    """Forgets what a test has configured; what leaves the device goes through these."""
    made: list[Late] = []

    def late(device: torch.device) -> Late:
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(activations, "transfers_of", late)
    yield made
    activation_checkpointing.configure()


def checkpointed_steps(model: nn.Sequential, way: Any = None) -> list[torch.Tensor]:
    """Gradients of two windows of two micro-batches, through checkpoints."""
    found = []
    model.zero_grad()
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(5, 8)
        for layer in model:
            x = (way or activation_checkpointing.checkpoint)(
                lambda y, layer=layer: nn.functional.dropout(torch.tanh(layer(y)), 0.2), x
            )
        x.square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def test_inputs_of_checkpoints_wait_in_host_memory(
    configured: list[Late], heard_in_full: list[str]
) -> None:
    """By an argument, or by the configuration, which arguments go before."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    profiled = {"activation_checkpointing": {"profile": True}}
    more = {"partition_activations": True, "contiguous_checkpointing": True, "synchronize": True}
    activation_checkpointing.configure(None, profiled, num_checkpoints=2, **more)
    activation_checkpointing.set_num_layers(4)
    plain = checkpointed_steps(model)
    parts = ("4 forwards in", "4 recomputations in")
    assert sum(all(part in line for part in parts) for line in heard_in_full) == 4
    torch.testing.assert_close(plain, checkpointed_steps(model, lambda run, x: run(x)))
    small = {"min_bytes": 1, "in_flight_bytes": 1}
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for keys, more in (
        ({"activation_offload": small}, {"checkpoint_in_cpu": True}),
        ({**section, "activation_offload": {**small, "enabled": False}}, {}),
    ):
        configured.clear()
        activation_checkpointing.configure(None, deepspeed_config=keys, **more)
        assert activation_checkpointing.is_configured()
        for got, want in zip(checkpointed_steps(model), plain, strict=True):
            assert torch.equal(got, want)
        (late,) = configured
        assert late.sent_bytes == 4 * 4 * 5 * 8 * 4, "the input of each checkpoint, once"
        reloaded = [what for what, _ in late.log].count("reload")
        assert reloaded == 4 * 3, "the last one of a forward has stayed"
        activation_checkpointing.checkpoint(torch.tanh, torch.randn(5, 8, requires_grad=True))
        activation_checkpointing.reset()  # no backward
    configured.clear()
    activation_checkpointing.configure(None, section, checkpoint_in_cpu=False)
    x = torch.randn(5, 8, requires_grad=True)
    activation_checkpointing.checkpoint(torch.tanh, x).sum().backward()
    assert configured == []


class DropMLP(nn.Module):
    """Gives ``mask * weight**2`` for ones, so that a gradient of ``2 * weight`` has its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with random_states.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x * self.weight, 0.5) * self.weight


class Drops(nn.Module):
    """Two blocks beside each other, each run by ``way``."""

    def __init__(self, way: Any = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.way = nn.ModuleList(DropMLP() for _ in range(2)), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.way(block, x) for block in self.blocks])


@pytest.fixture
def tracker() -> Iterator[random_states.RandomStates]:
    random_states.model_parallel_cuda_manual_seed(3)
    found = random_states.get_cuda_rng_tracker()
    yield found
    found.reset()


def piped(block: nn.Module, x: torch.Tensor) -> Any:
    return PipelineModule([block], 1, activation_checkpoint_interval=1)(x)


@in_turn(
    "build, keys",
    (
        (partial(Drops, activation_checkpointing.checkpoint), {}),
        (partial(Drops, piped), {}),
        (partial(Drops, lambda block, x: TiledMLP.apply(lambda m, y: m(y), block, x, 3)), {}),
        (Drops, {"activation_checkpointing": {"blocks": True}}),
        (Drops, {"activation_checkpointing": {"blocks": "selective"}}),
        (Drops, {"tiled_mlp": {"enabled": True, "shards": 3}}),
    ),
)
def test_recomputations_draw_from_the_named_states_of_their_forward(
    tracker: Any, build: Any, keys: dict[str, Any]
) -> None:
    """Draws after the backward are those of a run without recomputation."""
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = start(model, sgd, config_of(0, train_micro_batch_size_per_gpu=3, **keys))
    outputs = [engine(torch.ones(3, 16)) for _ in range(2)]
    (after,) = tracker.get_states().values()
    engine.backward(sum(outputs).sum())
    for got, want in zip(full_grads(engine).values(), sum(outputs), strict=True):
        assert torch.equal(got, 2 * want.detach().sum(0))
    (left,) = tracker.get_states().values()
    assert torch.equal(left, after)
    engine.destroy()


@pytest.mark.parametrize("blocks", [True, "selective"])
def test_a_seeded_tracker_breaks_no_graph_of_the_script(tracker: Any, blocks: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    section = ZeroConfig.coerce({"activation_checkpointing": {"blocks": blocks}})
    patched = Checkpoints(
        model, [*model], section.activation_checkpointing, torch.device("cpu"), False
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 8)
    compiled(x).sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    patched.remove()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()])


def test_repeated_and_failed_recomputations(tracker: Any) -> None:
    """Named states are left as a run without recomputation leaves them."""
    fails = False

    def run(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            y = nn.functional.dropout(x, 0.5) * x
        if fails:
            raise ArithmeticError
        return y.exp().log()

    x = torch.ones(8, requires_grad=True)
    y = activation_checkpointing.checkpoint(run, x)
    (after,) = tracker.get_states().values()
    for _ in range(2):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, 2 * y.detach())
    fails = True
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    (left,) = tracker.get_states().values()
    assert torch.equal(left, after)


KEPT = ("exp_avg", "exp_avg_sq")


ADAM, ADAMW, ADAGRAD = torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
DECAY = {"weight_decay": 0.1}
PAIRS: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
    (optimizers.FusedAdam, {}, ADAMW, DECAY),
    (optimizers.FusedAdam, {"adam_w_mode": False}, ADAM, DECAY),
    (optimizers.DeepSpeedCPUAdam, {"adamw_mode": False}, ADAM, {}),
    (optimizers.DeepSpeedCPUAdagrad, {}, ADAGRAD, DECAY),
    (optimizers.FusedLion, {}, partial(Lion, betas=(0.9, 0.999)), DECAY),
    (optimizers.DeepSpeedCPULion, {}, partial(Lion, betas=(0.9, 0.999)), {}),
]


@in_one_item(PAIRS)
def test_optimizers_by_name_update_like_those_of_torch(pair: Any) -> None:
    named, own, plain, both = pair
    start = torch.linspace(-1, 1, 7)
    results = []
    for build, options in ((named, own | both), (plain, both)):
        parameter = nn.Parameter(start.clone())
        optimizer = build([parameter], lr=1e-2, **options)
        check(optimizer)
        for step in range(12):
            parameter.grad = torch.sin(start + step) / (1 + step**2)  # so that momentum weighs
            optimizer.step()
        results.append(parameter.detach())
    # the host kernels round once where torch's vector library may not
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@in_one_item([(True, torch.float32), (False, torch.bfloat16)])
def test_steps_of_sub_groups_and_their_way_back(case: tuple[bool, torch.dtype]) -> None:
    """Two sub-groups in one optimizer, each as if it had one of its own."""
    adamw_mode, dtype = case
    options = {"lr": 1e-2, "weight_decay": 0.1, "adamw_mode": adamw_mode}
    starts = [torch.randn(9).to(dtype), torch.randn(4).to(dtype)]
    both = optimizers.DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))], **options)
    alone = [
        optimizers.DeepSpeedCPUAdam([nn.Parameter(start.clone())], **options) for start in starts
    ]
    parts = [nn.Parameter(start.clone()) for start in starts]
    before = []
    for step in range(3):
        for number, part in enumerate(parts):
            (own,) = alone[number].param_groups[0]["params"]
            part.grad = own.grad = torch.sin(starts[number] + step)
            both.param_groups[0]["params"] = [part]
            if step == 2:
                moments = both.state[number]
                before.append([part.detach().clone(), *(moments[k].clone() for k in KEPT)])
            both.step_subgroup(number)
            alone[number].step()
            assert torch.equal(part, own) and both.state[number]["step"] == step + 1
    for number, part in enumerate(parts):
        both.param_groups[0]["params"] = [part]
        both.rollback_subgroup(number)
        state = both.state[number]
        assert state["step"] == 2
        torch.testing.assert_close([part.detach(), *(state[k] for k in KEPT)], before[number])
        for _ in range(2):
            both.rollback_subgroup(number)
        with pytest.raises(RuntimeError, match=r"sub_group_id \d: step count is 0"):
            both.rollback_subgroup(number)
    with pytest.raises(OffloadError, match="sub_group_id 7: it has made no step"):
        both.rollback_subgroup(7)
    both.param_groups[0]["params"] = parts
    with pytest.raises(UnsupportedOptimizerError, match="2 parameters have gradients"):
        both.step_subgroup(0)
    both.param_groups[0].update(params=[parts[0]], amsgrad=True)
    both.step_subgroup(0)
    with pytest.raises(NotBuiltError, match="amsgrad"):
        both.rollback_subgroup(0)


def test_copies_are_small_whole_apart_and_tied() -> None:
    buffer = torch.arange(1000.0)
    state = OrderedDict(
        a=buffer[:6].view(2, 3), b=[buffer[10:12], (torch.tensor(3), "text")], c=None
    )
    copy = clone_tensors_for_torch_save(state)
    assert type(copy) is OrderedDict and copy["c"] is None and copy["b"][1][1] == "text"
    assert copy["a"].untyped_storage().nbytes() == 24
    buffer.zero_()
    assert copy["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copy["b"][0].tolist() == [10.0, 11.0]
    weight, empty = torch.randn(4, 2), torch.empty(0)
    tied = {"decoder": weight, "embedding": weight.view(4, 2), "part": weight[:2]}
    copy = clone_tensors_for_torch_save({**tied, "e": empty, "f": torch.empty(0)})
    assert copy["decoder"].data_ptr() == copy["embedding"].data_ptr()
    assert copy["part"].data_ptr() != copy["decoder"].data_ptr()
    assert copy["e"].numel() == copy["f"].numel() == 0
    sparse = torch.eye(3).to_sparse()
    copied: Any = clone_tensors_for_torch_save({"s": sparse})
    sparse.values().zero_()
    assert copied["s"].is_sparse and torch.equal(copied["s"].to_dense(), torch.eye(3))


def test_copies_of_other_containers() -> None:
    pair, groups = namedtuple("Pair", "x y"), defaultdict(list, a=[torch.ones(1)])
    state = {"pair": pair(torch.ones(2), 3), "groups": groups, "user": UserDict(x=torch.ones(3))}
    copy: Any = clone_tensors_for_torch_save(state, "meta")
    assert type(copy["pair"]) is pair and copy["pair"].x.is_meta and copy["pair"].y == 3
    assert copy["groups"].default_factory is list and copy["groups"]["a"][0].is_meta
    assert copy["user"]["x"].is_meta and not state["user"]["x"].is_meta


def test_init_on_one_rank_leaves_parameters_whole_and_takes_every_argument(
    plain_process: None,
) -> None:
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
    more = {"remote_device": "cpu", "pin_memory": True, "tensor_overrides": []}
    with zero_init.Init(config_dict_or_path=config, **more) as context:
        layer = nn.Linear(3, 2)
    assert type(layer.weight) is nn.Parameter and layer.weight.shape == (2, 3)
    assert context.enabled
    assert not zero_init.Init(enabled=False).enabled
    zero_init.Init(module=layer)
    zero_init.register_external_parameter(layer, layer.weight)
    assert zero_init.zero_wrapper_for_fp_tensor_constructor(torch.zeros, torch.half) is torch.zeros


def test_only_making_a_model_takes_the_ordinary_path(plain_process: None, tmp_path: Path) -> None:
    """Resized embeddings, generation and the Trainer must go on knowing that the model is
    sharded.
    """
    import transformers.modeling_utils as modeling
    from transformers import BertConfig, BertModel
    from transformers.integrations import HfDeepSpeedConfig

    class Asking(BertModel):
        def __init__(self, config: BertConfig) -> None:
            answers.append(modeling.is_deepspeed_zero3_enabled())
            super().__init__(config)

    answers: list[bool] = []
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert modeling.is_deepspeed_zero3_enabled() and kept.is_zero3()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=16, intermediate_size=8, **sizes)
    made = Asking._from_config(config)
    assert answers == [False] and modeling.is_deepspeed_zero3_enabled()
    made.save_pretrained(tmp_path)
    for model in (made, BertModel.from_pretrained(tmp_path)):
        facts: list[Any] = list(model.parameters())
        assert len({p.ds_id for p in facts}) == len(facts)
        assert all(p.ds_shape == p.shape and p.ds_status.name == "AVAILABLE" for p in facts)
