"""A momentum of SGD that a script switches off and on: its buffers stay over every way of loading
state, as torch keeps them, and a group without momentum gets none. The same of amsgrad.
"""

import copy
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hf_zero.checkpoint import convert_checkpoint
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks, run_steps, squared, stack
from tests.helpers.training import At

LOAD = 3  # the step before which state is saved and loaded
MOMENTA = {
    "off at the load": (0.9, 0.9, 0.0, 0.0, 0.9, 0.9),
    "off at the save alone": (0.9, 0.9, 0.0, 0.9, 0.9, 0.9),
    "off before the save": (0.0, 0.0, 0.9, 0.9, 0.9, 0.9),
}


def sgd(model):
    """Two groups: the momentum of the second one begins after the load."""
    parameters = [*model.parameters()]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    return torch.optim.SGD(groups, lr=0.1, dampening=0.5)


def switch(optimizer, momentum, step):
    optimizer.param_groups[0]["momentum"] = momentum
    optimizer.param_groups[1]["momentum"] = 0.9 * (step > LOAD)


def plainly(momenta):
    model = stack()
    optimizer = sgd(model)
    for step, momentum in enumerate(momenta):
        switch(optimizer, momentum, step)
        optimizer.zero_grad()
        squared(model, At(step, 0, 0)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@in_turn("tier, stage, way, momenta", [
    ("device", 1, "checkpoint", "off at the load"),
    ("device", 3, "universal", "off at the save alone"),
    ("device", 1, "state dict", "off at the load"),
    ("device", 3, "state dict of torch", "off before the save"),
    ("optimizer on cpu", 1, "universal", "off at the load"),
    ("optimizer on cpu", 1, "state dict", "off at the save alone"),
    ("all in files", 3, "checkpoint", "off at the save alone"),
    ("all in files", 3, "state dict of torch", "off at the load"),
])  # fmt: skip
def test_a_momentum_that_is_switched_off_stays_over_a_load(
    tier: str, stage: int, way: str, momenta: str, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    config = config_of(stage, zero_optimization=offload(tier, stage, tmp_path / "files"))

    def opened(model):
        return start(model, sgd(model), config | {"zero_force_ds_cpu_optimizer": False})

    def train(rank, models):
        model, target = models
        engine = opened(model)
        for step, momentum in enumerate(MOMENTA[momenta]):
            if step == LOAD and way == "state dict":
                engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
            elif step == LOAD:
                engine.save_checkpoint(tmp_path)
                state = copy.deepcopy(get_state_dict(model, engine.optimizer))
                engine.destroy()
                engine = opened(target)
                if way == "universal":
                    if rank == 0:
                        convert_checkpoint(tmp_path, tmp_path / "other", to="universal")
                    torch.distributed.barrier()
                    engine.load_checkpoint(tmp_path / "other")
                elif way == "checkpoint":
                    engine.load_checkpoint(tmp_path)
                else:
                    set_state_dict(
                        target,
                        engine.optimizer,
                        model_state_dict=state[0],
                        optim_state_dict=state[1],
                    )
            switch(engine.optimizer, momentum, step)
            engine.backward(squared(engine, At(step, 0, 0)))
            engine.step()
        found = full_weights(engine)
        engine.destroy()
        return found

    want = plainly(MOMENTA[momenta])
    for found in on_ranks(2, train, build=lambda: (stack(), stack())):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@in_turn("stage", [1, 3])
def test_state_dicts_of_torch_have_the_same_entries_on_all_ranks(stage: int) -> None:
    """Some ranks have no element whose group had a momentum."""

    def train(rank, model):
        engine = start(model, sgd(model), config_of(stage))
        for step, momentum in enumerate((0.9, 0.9, 0.0)):
            engine.optimizer.param_groups[0]["momentum"] = momentum
            engine.backward(squared(engine, At(step, 0, 0)))
            engine.step()
        _, content = get_state_dict(model, engine.optimizer)
        engine.destroy()
        return {name: sorted(state) for name, state in content["state"].items()}

    first, *others = on_ranks(4, train)
    with_momentum = [*dict(stack().named_parameters())][::2]
    assert {name for name, kinds in first.items() if kinds} == set(with_momentum)
    assert all(each == first for each in others)


@in_turn("tier, stage", [("device", 3), ("optimizer on cpu", 2)])
def test_a_load_gives_a_stepped_adam_the_maxima_of_amsgrad(
    tier: str, stage: int, tmp_path: Path
) -> None:
    config = config_of(stage, zero_optimization=offload(tier, stage, tmp_path))

    def train(rank, models):
        saving, loading = (
            start(model, torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=amsgrad), config)
            for model, amsgrad in zip(models, (True, False))
        )
        run_steps(saving, rank, range(2))
        saving.save_checkpoint(tmp_path / "run")
        run_steps(saving, rank, range(2, 4))
        run_steps(loading, rank, range(3))
        loading.load_checkpoint(tmp_path / "run")
        run_steps(loading, rank, range(2, 4))
        want = full_weights(saving)
        for name, value in full_weights(loading).items():
            torch.testing.assert_close(value, want[name], msg=name)
        saving.destroy()
        loading.destroy()

    on_ranks(2, train, build=lambda: (stack(), stack()))
