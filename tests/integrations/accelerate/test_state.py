"""Accelerate's process state under ZeRO, in one process: what it believes about devices, ranks
and groups.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, NotBuiltError, RankMismatchError
from hf_zero.integrations import finder
from hf_zero.launch.hosts import free_port
from tests.helpers.accelerators import play_accelerator

pytestmark = pytest.mark.usefixtures("plain_process")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Accelerate sets the number of threads for CPU ranks."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plugin(stage: int = 3) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
    )


def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of torchrun, with a world of one."""
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_plain_process_has_a_group_of_one_rank() -> None:
    accelerator = Accelerator(deepspeed_plugin=plugin())
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert process_group.is_initialized()
    assert process_group.get_world_size() == accelerator.num_processes == 1
    accelerator.wait_for_everyone()
    PartialState().wait_for_everyone()
    assert accelerator.gather(torch.arange(3)).tolist() == [0, 1, 2]


def test_a_gather_on_a_device_warns_of_nothing_that_the_script_could_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(deepspeed_plugin=plugin())
    # the way that ranks on devices go
    monkeypatch.setitem(PartialState._shared_state, "backend", "nccl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerator.gather(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="counterpart of the next test: ranks without an accelerator"
)
def test_ranks_without_an_accelerator_meet_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    accelerator = Accelerator(deepspeed_plugin=plugin())
    assert PartialState().backend == "gloo"
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.device.type == "cpu"
    assert process_group.is_initialized()


def test_without_zero_accelerate_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = PartialState()
    assert (state.backend, state.distributed_type) == PartialState._prepare_backend.__wrapped__(
        state
    )


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_forcing_the_cpu_keeps_zero(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "variable":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator(cpu=how == "argument", deepspeed_plugin=plugin())
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.state.deepspeed_plugin.zero_stage == 3
    assert accelerator.device.type == "cpu" == process_group.default_device().type
    assert os.environ.get("ACCELERATE_USE_CPU") == ("true" if how == "variable" else None)


def test_the_engine_follows_accelerate_to_the_cpu_of_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play_accelerator(monkeypatch)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin())
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.device.type == "cpu" == process_group.default_device().type


def test_forcing_the_cpu_on_a_launched_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin())
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert PartialState().backend == "gloo"


def test_a_state_made_before_zero_was_asked_for_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    early = PartialState()
    assert early.distributed_type != DistributedType.DEEPSPEED
    Accelerator(deepspeed_plugin=plugin())
    assert early.backend == "gloo" and early.distributed_type == DistributedType.DEEPSPEED


def test_peers_that_accelerate_cannot_see_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "get_world_size", lambda: 2)
    with pytest.raises(
        RankMismatchError, match=r"counts 1 process\(es\) and the process group 2.*LOCAL_RANK"
    ):
        Accelerator(deepspeed_plugin=plugin())


def test_a_second_accelerator_shares_the_state() -> None:
    first = Accelerator(deepspeed_plugin=plugin())
    second = Accelerator()
    assert second.state.deepspeed_plugin is first.state.deepspeed_plugin
    assert second.distributed_type == DistributedType.DEEPSPEED


def test_another_deepspeed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "chosen", lambda: False)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin())
    assert accelerator.distributed_type == DistributedType.NO
    assert not process_group.is_initialized()


def test_an_accelerator_without_zero_is_left_alone() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.NO
    assert not process_group.is_initialized()


@pytest.mark.parametrize(
    "sizes, error, said",
    [
        ({"cp_size": 2}, NotBuiltError, r"cp_size=2.*ring attention.*write sp_size=2"),
        ({"tp_size": 2}, ConfigError, r"tp_size=2.*write tensor_parallel\.autotp_size = 2"),
    ],
)
def test_parallelism_of_accelerates_own_is_refused(
    sizes: dict[str, int], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Accelerator(deepspeed_plugin=plugin(), parallelism_config=ParallelismConfig(**sizes))


@pytest.mark.parametrize("flag", [True, False])
def test_models_made_with_zero_init_disabled_stay_whole(flag: bool) -> None:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    made_under = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2},
        zero3_init_flag=flag,
    )

    def has_facts_of_shards() -> bool:
        model = LlamaModel._from_config(LlamaConfig(num_hidden_layers=1, **sizes))
        return hasattr(model.norm.weight, "ds_id")

    Accelerator(deepspeed_plugin=made_under)
    assert has_facts_of_shards()
    with made_under.zero3_init_context_manager(enable=False):
        assert not has_facts_of_shards()
    assert has_facts_of_shards()
