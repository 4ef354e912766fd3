"""What a Lightning Trainer under ZeroStrategy refuses, and the same in ways that are right."""

from __future__ import annotations

from argparse import Namespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero.errors import CheckpointError, ConfigError, UnsupportedOptimizerError
from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers.cells import in_one_item
from tests.helpers.plain_process import forget

pytestmark = [
    pytest.mark.usefixtures("plain_process"),
    pytest.mark.filterwarnings("ignore:::lightning"),
]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wide(Net):
    def __init__(self, criterion):
        super().__init__()
        self.save_hyperparameters()


def net(**members):
    """A module with methods of its own."""
    return type("Own", (Net,), members)()


def with_schedule(module):
    optimizer = Net.configure_optimizers(module)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


TWO = {
    "automatic_optimization": False,
    "configure_optimizers": lambda self: [Net.configure_optimizers(self) for _ in range(2)],
}
BY_VALUE = {
    "configure_gradient_clipping": lambda self, optimizer, *ignored, **more: self.clip_gradients(
        optimizer, 0.1, "value"
    )
}
OF_WHOLE_TENSORS = {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())}
NO_OPTIMIZER = {"configure_optimizers": lambda self: None}
NOTHING = {
    "training_step": lambda self, batch, index: Net.training_step(self, batch, 0) if index else None
}


def trainer(strategy="zero_stage_3", **more):
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    chosen = {"devices": 1, "strategy": strategy, "max_epochs": 1, **dict.fromkeys(quiet, False)}
    return pl.Trainer(**{**chosen, "accelerator": "cpu", **more})


def fit(module=None, strategy="zero_stage_3", ckpt_path=None, **more):
    made = trainer(strategy, **more)
    data = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    made.fit(Net() if module is None else module, data, ckpt_path=ckpt_path)
    return made


def with_config(**config):
    return ZeroStrategy(config={"zero_optimization": {"stage": 2}, **config})


def another_group():
    """A model under another strategy first made a group of one rank."""
    fit()
    made = trainer()
    made.strategy.cluster_environment.set_world_size(2)
    made.strategy.parallel_devices = [torch.device("cpu")] * 2
    made.strategy.setup_distributed()


SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {}}}


def keys(config, **more):
    return lambda: fit(strategy=with_config(**config), **more)


CLIPPED = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
ODD_BATCH = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4}
# what the ConfigError names
REFUSED = {
    "2 optimizers": lambda: fit(net(**TWO)),
    "'WarmupLR'": lambda: fit(net(configure_optimizers=with_schedule), with_config(**SCHEDULE)),
    "find_unused_parameters": lambda: ZeroStrategy(find_unused_parameters=True),
    "ZeroStrategy(stage=3)": lambda: ZeroStrategy({"zero_optimization": {"stage": 2}}, stage=3),
    "Trainer(precision='bf16-mixed')": keys({"bf16": {"enabled": True}}),
    "64-true": lambda: trainer(precision="64-true"),
    "MixedPrecision": lambda: trainer(plugins=[MixedPrecision("bf16-mixed", "cpu")]),
    "gradient_clip_algorithm='value'": lambda: fit(**CLIPPED),
    "use 'norm'": lambda: fit(net(**BY_VALUE)),
    "gradient_clip_val=1.0": keys({"gradient_clipping": 2}, gradient_clip_val=1.0),
    "accumulate_grad_batches=1": keys({"gradient_accumulation_steps": 4}),
    "train_batch_size = 6": keys(ODD_BATCH),
    "StochasticWeightAveraging": lambda: fit(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]),
    "WeightAveraging keeps": lambda: fit(callbacks=[WeightAveraging()]),
    "compiled as a whole": lambda: fit(torch.compile(Net(), backend="eager")),
    "optimizer LBFGS": lambda: fit(net(**OF_WHOLE_TENSORS)),
    "storage_options": lambda: fit().save_checkpoint("folder", storage_options={"a": 1}),
    "a process group of 1 rank(s)": another_group,
}


@in_one_item(REFUSED)
def test_what_cannot_be_is_refused_by_name(says):
    forget()
    kind = UnsupportedOptimizerError if "LBFGS" in says else ConfigError
    with pytest.raises(kind) as raised:
        REFUSED[says]()
    assert says in str(raised.value)


def test_what_does_not_resume_or_save_is_named(tmp_path):
    file = tmp_path / "weights.ckpt"
    fit().save_checkpoint(file, weights_only=True)
    with pytest.raises(CheckpointError, match=r"weights.ckpt is a file of whole weights"):
        fit(ckpt_path=file)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        fit(ckpt_path=tmp_path / "nothing")
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    with pytest.raises(CheckpointError, match=r"Wide\['criterion'\] of type Namespace"):
        fit(Wide(Namespace(a=1)), **saves)


@in_one_item(["bf16-true", "16-mixed"])
def test_precisions(kind):
    forget()
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float16
    scale = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    made = fit(strategy=with_config(**({} if "bf" in kind else scale)), precision=kind)
    engine = made.strategy.engine
    assert engine.config.precision == {"b": "bf16", "1": "fp16"}[kind[0]]
    assert engine.skipped_steps == 0 and engine.global_steps == 2
    assert {p.dtype for p in engine.module.parameters()} == {dtype}


def test_the_same_in_ways_that_are_right():
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto = with_config(
        **dict.fromkeys((*names, "gradient_clipping"), "auto"), bf16={"enabled": "auto"}
    )
    given = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    filled = fit(strategy=auto, **given).strategy.engine.config
    assert (filled.precision, filled.gradient_clipping, filled.train_batch_size) == ("bf16", 0.5, 1)
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    named = fit(net(**NO_OPTIMIZER), with_config(**optimizer, **SCHEDULE))
    assert type(named.optimizers[0]).__name__ == "SGD"
    assert type(named.lr_scheduler_configs[0].scheduler).__name__ == "WarmupLR"
    assert named.strategy.engine.global_steps == 2
    assert fit(net(**NO_OPTIMIZER)).strategy.engine.global_steps == 0
    assert fit(net(**NOTHING)).strategy.engine.global_steps == 1
