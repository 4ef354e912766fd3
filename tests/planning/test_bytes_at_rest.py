"""Bytes at rest: what the plan of an engine foresees for each rank, kind and tier equals, to the
byte, what the engine of that rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import OptimizerConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.optim.build import build_optimizer
from hf_zero.parallel.planned_cuts import planned_cuts
from hf_zero.planning.needs import state_bytes
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import squared
from tests.helpers.tensor_parallel import deepseek, llama, mixtral, phi3
from tests.helpers.training import At, Plan

FOUR_BITS = {"compressed_communication": {"bits": 4, "block_size": 64}}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
ROUNDED = {
    "quantize_training": {
        "enabled": True,
        "quantize_bits": {"start_bits": 3, "target_bits": 3},
        "quantize_schedule": {"schedule_offset": 0},
    }
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "one head of keys": partial(llama, key_value_heads=1),
    "tied": partial(llama, tied=True),
    "phi3": phi3,
    "deepseek": deepseek,
    "mixtral": mixtral,
}
NONE_PERSISTENT = {"stage3_param_persistence_threshold": 0}


class Job:
    """A model, its optimizer and the loss of a step; ``family``: of transformers, else a stack."""

    def __init__(
        self,
        stage: int,
        precision: str = "bf16",
        *,
        ranks: int = 2,
        way: str = "",
        optimizer: str = "AdamW",
        settings: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        family: str = "",
        frozen: bool = False,
        accumulation: int = 1,
        dims: dict[str, int] | None = None,
        **keys: Any,
    ) -> None:
        self.stage, self.ranks, self.way = stage, ranks, way
        self.plan = Plan(precision=precision, accumulation=accumulation)
        self.optimizer = OptimizerConfig(optimizer, settings or {})
        self.zero, self.family, self.frozen, self.keys = zero or {}, family, frozen, keys
        self.dims = dims or {}

    def __repr__(self) -> str:
        parts = [f"stage {self.stage}", self.plan.precision, self.way, self.family]
        parts += [f"{self.ranks} ranks" if self.ranks != 2 else ""]
        parts += [self.optimizer.type if self.optimizer.type != "AdamW" else ""]
        parts += [*self.optimizer.params, *self.zero, *self.dims]
        parts += [key for key in self.keys if key != "moments"]
        parts += ["frozen" if self.frozen else ""]
        parts += [f"{self.plan.accumulation} micro-batches" if self.plan.accumulation > 1 else ""]
        parts += [f"{self.keys[key]} {key}" for key in ("moments",) if key in self.keys]
        return ", ".join(filter(None, parts))

    def build(self) -> nn.Module:
        if self.family:
            return seeded(FAMILIES[self.family])
        model = seeded(lambda: Stack(4, 40))
        if self.frozen:
            model.blocks[1].requires_grad_(False)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trains = [p for p in model.parameters() if p.requires_grad]
        return build_optimizer(self.optimizer, trains, model)

    def config(self, folder: Path) -> dict[str, Any]:
        how: dict[str, Any] = {"moments": self.keys["moments"]} if "moments" in self.keys else {}
        section = offload(self.way, self.stage, folder, **how) if self.way else {}
        keys = {name: value for name, value in self.keys.items() if name != "moments"}
        zero = {"stage": self.stage, **section, **self.zero}
        return config_of(self.stage, self.plan, zero_optimization=zero, **keys)

    def loss(self, engine: Any, step: int, micro: int, rank: int) -> torch.Tensor:
        if self.family:
            ids = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(step))
            batch = {"input_ids": ids, "labels": ids}
            if "sequence" in self.dims:
                batch = hf_zero.sequence_parallel().shard(batch)
            return engine(**batch).loss
        return squared(engine, At(step, micro, rank), self.plan.dtype)

    def held(self, rank: int, model: nn.Module, config: dict[str, Any]) -> dict[Any, int]:
        """Bytes that an engine holds after a few steps."""
        engine = start(model, self.optimizer_of(model), config)
        for step in range(2):
            for micro in range(self.plan.accumulation):
                engine.backward(self.loss(engine, step, micro, rank))
                engine.step()
        if engine.updater.units:
            engine.updater.finish()
        found = held_bytes(engine)
        engine.destroy()
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    def foreseen(self, rank: int, config: dict[str, Any]) -> dict[Any, int]:
        """Bytes that the plan of ``rank`` has, of a model that is not cut yet."""
        model, dims = self.build(), ParallelDims.over(self.ranks, **self.dims)
        tensor, expert = self.dims.get("tensor", 1), self.dims.get("expert", 1)
        cuts = planned_cuts(model, tensor, expert, dims, rank)
        optimizer = self.optimizer_of(model)
        found = state_bytes(planned(model, config, dims, optimizer, rank=rank, cuts=cuts))
        return {key: nbytes for key, nbytes in found.items() if nbytes}


DENSE = {"freeze_step": 1}
SUMMED = {"data_types": {"grad_accum_dtype": "bf16"}}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
EXPERT = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
BOTH = {"tensor": 2, "expert": 2}
BITS = {"zero_quantized_gradients": True}
JOBS = {
    "stages": [Job(0, "fp32"), Job(1), Job(2, "fp16"), Job(3), Job(3, ranks=3)],
    "places": [
        Job(0, way="optimizer on cpu"),
        Job(3, "fp32", way="optimizer on cpu"),
        *(Job(2, way="optimizer on cpu", moments=kind) for kind in ("bf16", "int8")),
        Job(2, "fp16", way="optimizer on cpu", accumulation=2),
        Job(1, way="optimizer in files"),
        Job(3, way="half on cpu"),
        Job(3, way="all on cpu", frozen=True),
        Job(3, "fp32", way="parameters on cpu"),
        Job(3, way="all in files", moments="int8"),
    ],
    "dtypes and few bits": [
        Job(3, **SUMMED),
        Job(2, "fp32", communication_data_type="bf16"),
        Job(1, "fp32", **FOUR_BITS),
        Job(2, **FOUR_BITS),
        Job(3, zero={**BITS, "zero_quantized_weights": True}),
        Job(2, zero=BITS, **LOCO),
        Job(1, optimizer="OneBitAdam", settings=DENSE),
        Job(1, "fp32", optimizer="OneBitLamb", settings=DENSE),
        *(Job(stage, "fp32", optimizer="SGD", **ROUNDED) for stage in (0, 3)),
    ],
    "optimizers": [
        Job(3, optimizer="SGD", settings={"lr": 0.1, "momentum": 0.9}),
        Job(2, optimizer="Adam", settings={"amsgrad": True}),
        Job(3, optimizer="Muon"),
        Job(2, optimizer="Muon", way="optimizer on cpu"),
        Job(2, optimizer="Adafactor"),
        Job(3, zero=NONE_PERSISTENT, frozen=True),
    ],
    "meshes": [
        *(Job(stage, ranks=4, replicate_size=2) for stage in (1, 3)),
        Job(3, ranks=4, zero={"zero_hpz_partition_size": 2}),
        Job(3, ranks=4, family="llama", dims={"tensor": 2}, **TENSOR),
        Job(3, family="one head of keys", dims={"tensor": 2}, **TENSOR),
        Job(1, family="mixtral", dims={"expert": 2}, **EXPERT),
        Job(3, ranks=4, family="mixtral", dims=BOTH, **TENSOR, **EXPERT),
        Job(3, family="llama", dims={"sequence": 2}, sequence_parallel_size=2),
    ],
    "other families": [
        Job(stage, family=family, dims={"tensor": 2}, **TENSOR)
        for stage, family in ((3, "tied"), (3, "phi3"), (3, "deepseek"), (1, "llama"))
    ],
}


@pytest.mark.parametrize("kind", fast(JOBS, lambda kind: kind != "other families"))
def test_bytes_are_those_of_the_plan(kind: str, tmp_path: Path) -> None:
    def check(job: Job) -> None:
        config = job.config(tmp_path)
        models = [job.build() for _ in range(job.ranks)]
        found = run_ranks(job.ranks, lambda rank: job.held(rank, models[rank], config))
        assert found == [job.foreseen(rank, config) for rank in range(job.ranks)]

    in_one_item(JOBS[kind])(check)()
