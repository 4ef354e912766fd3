"""Pipelines by DeepSpeed's names: a script in the manner of its examples, on one rank."""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineError
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn

from tests.helpers.ranks import run_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((2, 2)),
        nn.Flatten(1),
        nn.Linear(16, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 10),
    )


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=draw), index % 10


def test_a_script_that_trains_from_its_own_data():
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "steps_per_print": 1,
    }

    def rank(_):
        layers = [*net()[:3], lambda x: torch.flatten(x, 1), *net()[4:]]
        model = PipelineModule(
            layers=layers,
            loss_fn=nn.CrossEntropyLoss(),
            num_stages=1,
            partition_method="parameters",
            activation_checkpoint_interval=0,
        )
        engine, optimizer, _, _ = deepspeed.initialize(
            config=config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            training_data=Images(),
        )
        assert isinstance(engine, PipelineEngine) and engine.pipeline_parallelism
        assert isinstance(engine, deepspeed.DeepSpeedEngine) and optimizer is engine.optimizer
        assert engine.is_first_stage() and engine.is_last_stage() and engine.micro_batches == 4
        assert (engine.prev_stage, engine.stage_id, engine.next_stage) == (-1, 0, 1)
        grid = engine.grid
        assert isinstance(grid, PipelineParallelGrid) and grid.stage_to_global(0) == 0
        assert isinstance(model.mpu(), PipelineParallelGrid)
        assert grid.get_pipe_parallel_world_size() == grid.get_data_parallel_world_size() == 1
        assert grid.get_model_parallel_rank() == 0 and grid.get_data_parallel_group_ranks() == [0]
        with pytest.raises(PipelineError, match="only train_batch"):
            engine.step()
        order = [index for epoch in range(2) for index in _order(engine, epoch)]
        losses = [float(engine.train_batch()) for _ in range(4)]  # of two epochs
        engine.destroy()
        return losses, order

    ((losses, order),) = run_ranks(1, rank)
    model, data = net(), Images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        chosen = [data[index] for index in order[8 * step : 8 * step + 8]]
        images, labels = (
            torch.stack([image for image, _ in chosen]),
            torch.tensor([label for _, label in chosen]),
        )
        expected = nn.functional.cross_entropy(model(images), labels)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


def _order(engine, epoch):
    sampler = engine.training_dataloader.data_sampler
    sampler.set_epoch(epoch)
    return list(sampler)
