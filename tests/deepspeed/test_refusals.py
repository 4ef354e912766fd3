"""Calls of the facade that are refused, as one table: the error, what it says, and the call."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from hf_zero.deepspeed.config_model import get_bfloat16_config, get_float16_config
from hf_zero.deepspeed.optimizers import DeepSpeedCPUAdagrad
from hf_zero.deepspeed.partitioned_tensor import reduce_scatter_coalesced
from hf_zero.deepspeed.pinned_tensors import PinHandle
from hf_zero.deepspeed.state_offload import checked
from hf_zero.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from hf_zero.deepspeed.zero_config import get_gradient_clipping
from hf_zero.errors import (
    ConfigError,
    HostMemoryError,
    LaunchError,
    NotBuiltError,
    PartitionError,
)
from tests.helpers.cells import in_one_item

SPLIT = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
ULYSSES = "runtime.sequence_parallel.ulysses_sp"
X = torch.arange(12.0).reshape(2, 6)


def calling(path: str, *given: Any, **keys: Any) -> Callable[[], Any]:
    return lambda: attrgetter(path)(deepspeed)(*given, **keys)


def inference(config: Any = None, **keys: Any) -> Callable[[], Any]:
    return calling("init_inference", nn.Linear(2, 2), config, **keys)


def never(*values: Any, **keys: Any) -> None:
    raise AssertionError("called before the arguments were checked")


def tiles(y: Any, reduction: str, shards: int = 2) -> Callable[[], Any]:
    path = f"{ULYSSES}.TiledFusedLogitsLoss.apply"
    return calling(path, never, None, X, y, None, shards, None, reduction)


def tiled(seqlen: int, shards: Any, reduction: str | None = None) -> Callable[[], Any]:
    path = f"{ULYSSES}.sequence_tiled_compute"
    return calling(path, never, seqlen, shards, {"x": X}, {}, "x", output_reduction=reduction)


def scaler(**keys: Any) -> Callable[[], Any]:
    return calling(f"{SCALERS}.DynamicLossScaler", **keys)


def pinned(count: Any) -> None:
    PinHandle().new_cpu_locked_tensor(count, X)


def groups(*items: Any) -> Callable[[], Any]:
    return calling("moe.utils.configure_moe_param_groups", list(items))


Row = tuple[type[Exception], str, Callable[[], Any]]
ONE, LAYER = [nn.Parameter(torch.ones(1))], nn.Linear(1, 1)
BOTH = "dtype is 'fp32' in config and dtype is 'bf16' as an argument; pass one"
ALIAS = r"tp is {'tp_size': 2} in config and tensor_parallel is {'tp_size': 1} as an argument"
INSTEAD = "'all_gather_coalesced': call all_reduce or all_gather_into_tensor of each tensor"
NO_FP32 = "DeepSpeedCPUAdagrad.fp32_optimizer_states=False"
NO_MPU = r"mpu.get_model_parallel_world_size\(\) is 2"
TILED, CORES = "zero.TiledLinear", "utils.numa.parse_range_list"
LEVEL = "utils.logging.get_log_level_from_string"
UTILS, GROUPS, PLANS = "runtime.utils", "utils.groups", "runtime.pipe.schedule"
SCALERS, ELASTIC = "runtime.fp16.loss_scaler", "elasticity.compute_elastic_config"
BATCHES = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
LAYERS: Any = deepspeed.zero.TiledLinear
REFUSED: list[Row] = [
    (ConfigError, "no section elasticity", calling(ELASTIC, {})),
    (NotBuiltError, "replace_.*_layer.* is not built", calling("replace_transformer_layer", None)),
    (NotBuiltError, "DeepSpeedCPULamb.* is not built", calling("ops.lamb.DeepSpeedCPULamb")),
    (NotBuiltError, "DualPipeVEngine.* is not built", calling("DualPipeVEngine")),
    (NotBuiltError, "DualPipeVModule.* is not built", calling("pipe.DualPipeVModule")),
    (NotBuiltError, "init_distributed", calling("comm.TorchBackend", "gloo", None, None)),
    (
        NotBuiltError,
        "transformer_inference is not built",
        lambda: deepspeed.ops.op_builder.InferenceBuilder().load(),
    ),
    (NotBuiltError, NO_FP32, lambda: DeepSpeedCPUAdagrad(ONE, fp32_optimizer_states=False)),
    (NotBuiltError, NO_MPU, calling("checkpointing.configure", SPLIT)),
    (AttributeError, INSTEAD, lambda: deepspeed.comm.all_gather_coalesced),
    (
        AttributeError,
        "no 'memory_cached': use memory_reserved",
        lambda: deepspeed.get_accelerator().memory_cached(),
    ),
    (ConfigError, "a NoneType; pass", calling("init_inference", None)),
    (ConfigError, r"zero.Init\(\) got a int, which is not a module", calling("zero.Init", 5)),
    (ConfigError, BOTH, inference({"dtype": "fp32"}, dtype="bf16")),
    (ConfigError, ALIAS, inference({"tp": {"tp_size": 2}}, tensor_parallel={"tp_size": 1})),
    (
        ConfigError,
        "configuration of the type list; pass a dict, or",
        inference([("dtype", "fp32")]),
    ),
    (ValidationError, "known are fp32", inference(dtype="fp64")),
    (ValidationError, "no_such_key", inference(no_such_key=1)),
    *(
        (NotBuiltError, f"init_inference.{name}=.* is not built", inference(**{name: value}))
        for name, value in {
            "checkpoint": "model.json",
            "enable_cuda_graph": True,
            "keep_module_on_host": True,
            "quant": {"enabled": True},
            "save_mp_checkpoint_path": "parts",
            "set_empty_params": True,
            "use_triton": True,
            "zero": {"stage": 3},
            "dtype": torch.int8,
        }.items()
    ),
    (
        NotBuiltError,
        "mesh_param.* sequence_parallel_size",
        calling("initialize", model=LAYER, mesh_param=(1, 1)),
    ),
    (LaunchError, "mpirun", calling("comm.mpi_discovery")),
    (
        ConfigError,
        r"no module of Linear is one of \['ReLU'\]",
        calling("utils.set_z3_leaf_modules", LAYER, [nn.ReLU]),
    ),
    (
        ValueError,
        r"no module named \['7'\]",
        calling("utils.set_z3_leaf_modules_by_name", LAYER, ["7"]),
    ),
    (PartitionError, "in_splits is 8; write 1 to 7", calling(TILED, 7, 5, in_splits=8)),
    (
        PartitionError,
        "out_features is 5 here and 6",
        calling(TILED, 7, 5, init_linear=nn.Linear(7, 6)),
    ),
    (ValueError, "write 'mean' or 'sum'", tiles(X, "none")),
    (ValueError, r"y has the shape \(2, 5\)", tiles(X[:, :5], "sum")),
    (ConfigError, "shards = 0 is not a number of tiles", tiles(X, "sum", 0)),
    (
        ConfigError,
        "shards = 0 is not a number of tiles",
        calling(f"{ULYSSES}.TiledMLP.apply", never, None, X, 0),
    ),
    (ConfigError, "shards = 0 is not a number of tiles", tiled(6, 0)),
    (ConfigError, "unknown output_reduction 'none'", tiled(6, 2, "none")),
    (ConfigError, r"x has the shape \(2, 6\) and seqlen is 5", tiled(5, 2)),
    (
        ConfigError,
        r"1 values for the keys \['x', 'y'\]",
        calling(
            f"{ULYSSES}.SequenceTiledCompute.apply",
            never,
            6,
            2,
            ["x"],
            ["y"],
            "x",
            None,
            1,
            None,
            X,
        ),
    ),
    (ConfigError, "a parameter of an optimizer group is a tuple", groups(("weight", ONE[0]))),
    (ConfigError, "an optimizer group is a Parameter; pass", groups({"params": ONE}, ONE[0])),
    (ConfigError, "a Parameter; pass parameters alone", groups({"params": ONE, "moe": 1}, ONE[0])),
    (ConfigError, r"group has the keys \['lr'\], no 'params'", groups({"lr": 1.0})),
    (ConfigError, "needs min_version", calling("utils.torch.required_torch_version")),
    (ConfigError, "trim_percent", calling("utils.timer.trim_mean", [1], 0.5)),
    (ConfigError, "'loud' is not a level", calling(LEVEL, "loud")),
    (ConfigError, "'x' is no version of torch", calling("utils.torch.required_torch_version", "x")),
    (
        ConfigError,
        "'7B' is no parameter; pass tensors",
        calling(f"{UTILS}.get_weight_norm", ["7B"]),
    ),
    (ConfigError, "None is no parameter; pass", calling(f"{UTILS}.clip_grad_norm_", None, 1.0)),
    (ConfigError, "'lr' is no parameter", calling(f"{UTILS}.CheckOverflow", [{"lr": 1.0}])),
    (ConfigError, r"set_accelerator\(5\): it is no", calling("accelerator.set_accelerator", 5)),
    (
        ConfigError,
        "configure.enabled='false'.*true or false",
        calling("comm.configure", None, "false"),
    ),
    (
        ConfigError,
        "the backend 5 is not a name",
        calling("comm.init_distributed", 5),
    ),
    *(
        (
            ConfigError,
            "there is no expert group",
            calling(f"{GROUPS}._get_expert_parallel_rank", name),
        )
        for name in ("ep_size_²", "ep_size_2", None)
    ),
    (
        NotBuiltError,
        "use_data_before_expert_parallel_=True is not built",
        calling(f"{GROUPS}._create_expert_and_data_parallel", 1, True),
    ),
    *(
        (ConfigError, f"num_elem={count}.*an integer of at least 1", lambda c=count: pinned(c))
        for count in (0, -1, 2.5, None)
    ),
    (HostMemoryError, "bytes could not be locked in memory", lambda: pinned(1 << 60)),
    (ConfigError, "None is not a level", calling(LEVEL, None)),
    (ConfigError, "micro_batches = 0 is not a number", calling(f"{PLANS}.TrainSchedule", 0, 2, 0)),
    (ConfigError, "stages = None is not", calling(f"{PLANS}.InferenceSchedule", 4, None, 0)),
    *(
        (ConfigError, "TrainSchedule.stage_id=", calling(f"{PLANS}.TrainSchedule", 4, 2, stage))
        for stage in (-1, 2, "7B")
    ),
    (ConfigError, "bf16=True.* not a section", lambda: get_bfloat16_config({"bf16": True})),
    (ConfigError, "fp16=5.* not a section", lambda: get_float16_config({"fp16": 5})),
    (NotBuiltError, "amsgrad=True", lambda: DeepSpeedCPUAdagrad(ONE, amsgrad=True)),
    (ConfigError, "shards = '2' is not a number of tiles", tiled(6, "2")),
    (
        ConfigError,
        r"x has the shape \(6,\)",
        calling(f"{ULYSSES}.TiledMLP.apply", never, None, X[0], 2),
    ),
    (PartitionError, "in_splits is 2.5; write 1 to 7", calling(TILED, 7, 5, in_splits=2.5)),
    (ConfigError, "in_features = '7B' is not a number of features", calling(TILED, "7B", 5)),
    (PartitionError, "got 1 inputs; pass in_splits = 2", lambda: LAYERS(6, 5, in_splits=2)([X])),
    *(
        (ConfigError, f"{name}={value!r}.*a number greater than 0", scaler(**{name: value}))
        for name in ("init_scale", "min_scale")
        for value in (0, float("nan"), "7B", None)
    ),
    (ConfigError, "scale=-1", calling(f"{SCALERS}.LossScaler", -1)),
    (ConfigError, "scale_window = 0 is not a number of steps", scaler(scale_window=0)),
    (ConfigError, "delayed_shift = None is not a number of overflows", scaler(delayed_shift=None)),
    (ConfigError, "normalizer=0", lambda: SynchronizedWallClockTimer().log("forward", 0)),
    (ConfigError, "normalizer=0", lambda: SynchronizedWallClockTimer().get_mean(["forward"], 0)),
    (ConfigError, "batch_size='7B'", lambda: ThroughputTimer(batch_size="7B")),  # type: ignore[arg-type]
    (
        ConfigError,
        "gradient_clipping='7B'",
        lambda: get_gradient_clipping({"gradient_clipping": "7B"}),
    ),
    *(
        (ConfigError, "ds_config, or its section elasticity, is", calling(ELASTIC, config))
        for config in (5, "ds.json", {"elasticity": True})
    ),
    (ConfigError, "world_size='7B'", calling(ELASTIC, {"elasticity": BATCHES}, "", "7B")),
    *(
        (ConfigError, "is not a state; choose among", lambda given=given: checked(given, "cpu"))
        for given in (5, "optim", [5, "x"])
    ),
    (
        PartitionError,
        "tensors of torch.bfloat16, torch.float32",
        lambda: reduce_scatter_coalesced([X, X.bfloat16()]),
    ),
    (ConfigError, "stge", calling("runtime.zero.config.DeepSpeedZeroConfig", stge=3)),
    *(
        (ValueError, "does not ascend at", calling(CORES, text))
        for text in ("0,2-6,5-9", "8,2-6", "1,6-2", "1,1")
    ),
    *(
        (ValueError, "is not a range", calling(CORES, text))
        for text in ("", "a", "1-", "-2", "1-x", "1,,2", None)
    ),
]


@in_one_item(REFUSED)
def test_a_call_is_refused(row: Row) -> None:
    error, said, call = row
    with pytest.raises(error, match=said):
        call()
