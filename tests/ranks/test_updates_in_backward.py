"""Updates of state on the device in the backward: the bits of a run whose step makes the update,
gradients of a few units at a time, and refusals of what would use a model that is half updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import FreeBytes
from hf_zero.errors import PartitionError
from hf_zero.ops import dispatch
from hf_zero.ops.flat_tiles import Tiles
from hf_zero.optim import AdamW8bit, Lamb
from hf_zero.planning.needs import device_gradients, needs
from hf_zero.zero.access import full, local
from hf_zero.zero.layout.gradients import GradientMemory
from tests.helpers import offloads
from tests.helpers.cells import in_turn
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import config_of, start
from tests.helpers.models import Block, Stack, features, seed_of, seeded
from tests.helpers.offloads import ended, same
from tests.helpers.optimizers import ELEMENTWISE
from tests.helpers.plans import planned
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Plan, adamw, trainable
from tests.ranks.test_unused import HeadsJob

EARLY = "update_in_backward"
UNITS = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}


def build() -> nn.Module:
    return seeded(lambda: Stack(4, 32))


def opened(model: nn.Module, stage: int, early: bool, make: Any = adamw, **keys: Any) -> Any:
    zero = {"stage": stage, EARLY: early, **UNITS, **keys.pop("zero", {})}
    plan = Plan(precision=keys.pop("precision", "fp32"), accumulation=keys.pop("accumulation", 1))
    return start(model, make(model), config_of(stage, plan, zero_optimization=zero, **keys))


def loss_of(engine: Any, at: At) -> torch.Tensor:
    return squared(engine, at, next(engine.module.parameters()).dtype)


def train(engine: Any, rank: int, steps: range, loss: Any = loss_of) -> list[float]:
    """Return the gradient norms."""
    norms = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss(engine, At(step, micro, rank)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def alike(
    stage: int,
    make: Any = adamw,
    ranks: int = 2,
    steps: int = 4,
    loss: Any = loss_of,
    model_of: Callable[[], nn.Module] = build,
    **keys: Any,
) -> None:
    """Weights, norms and state have the bits of a run whose step makes the update."""

    def run(rank: int, model: nn.Module, early: bool) -> Any:
        engine = opened(model, stage, early, make, **keys)
        norms = train(engine, rank, range(steps), loss)
        shards = [flat.optimizer_shard for flat in engine.flats if flat.trainable]
        state = {
            f"{shard.key} {name}": values.clone()
            for shard in shards
            for name, values in engine.bound.state.tensors(shard).items()
        }
        return norms, state, engine.bound.state.scalars.of_groups(), ended(engine)

    want, got = (on_ranks(ranks, run, early, build=model_of) for early in (False, True))
    for one, other in zip(got, want):
        same(one[1], other[1], exact=True)
        same(one[3], other[3], exact=True)
        assert one[0] == other[0] and one[2] == other[2]


@in_turn(
    "stage, precision, accumulation",
    [(0, "fp32", 1), (1, "bf16", 1), (2, "fp32", 2), (3, "bf16", 1), (3, "fp32", 1)],
)
def test_weights_and_state_have_the_same_bits(stage, precision, accumulation):
    alike(stage, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize(
    "keys, why",
    [
        ({}, ""),
        ({"gradient_clipping": 1.0}, "the norm that gradient_clipping needs"),
        ({"fp16": {"enabled": True}}, "whether fp16 gradients overflowed"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "whether gradients are finite"),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, "whether parameters are un"),
    ],
)
@pytest.mark.parametrize("spelling", [{EARLY: True}, {"offload_optimizer": {EARLY: True}}])
def test_what_prevents_it_is_said(keys, why, spelling):
    zero = {"stage": 2, **spelling, **keys.get("zero_optimization", {})}
    config = ZeroConfig.from_dict({**keys, "zero_optimization": zero})
    (row,) = (row for row in config.explain() if row.key == f"zero_optimization.{EARLY}")
    assert row.value is True
    assert row.note.startswith(f"no effect: {why}") if why else "no effect" not in row.note


class Counting(torch.optim.SGD):
    """One that the engine does not know, which counts the steps of its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


@in_turn("kind", [Lamb, Counting])
def test_some_optimizers_prevent_it_with_a_warning(kind, caplog):
    def run(rank: int, model: nn.Module) -> tuple[bool, Any]:
        known = {"elementwise_optimizers": ["Counting"]}
        engine = opened(model, 2, True, lambda model: kind(trainable(model), lr=0.1), **known)
        engine.backward(loss_of(engine, At(0, 0, rank)))
        begun = engine.changes.unconfirmed is not None
        engine.step()
        steps = engine.optimizer.param_groups[0].get("steps", 1)
        engine.destroy()
        return begun, steps

    with caplog.at_level("WARNING", "hf_zero"):
        assert on_ranks(1, run, build=build) == [(False, 1)]
    assert f"update_in_backward has no effect: {kind.__name__}" in caplog.text


class Peak:
    """The largest number of bytes of gradients allocated at once since :meth:`begin`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memories: set[GradientMemory]) -> None:
        self.memories, self.nbytes = memories, 0
        allocate = GradientMemory.set_allocated

        def noted(memory: GradientMemory, allocated: bool) -> None:
            allocate(memory, allocated)
            if memory in self.memories:
                self.nbytes = max(self.nbytes, sum(each.nbytes for each in self.memories))

        monkeypatch.setattr(GradientMemory, "set_allocated", noted)


@in_turn("stage, ranks", [(0, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_a_backward_holds_the_gradients_of_few_units(stage, ranks, monkeypatch):
    def run(rank: int, model: nn.Module) -> tuple[list[int], list[int]]:
        engine, peaks = opened(model, stage, True), []
        memories = [flat.gradient.memory for flat in engine.flats]
        sizes = [memory._elements.nbytes for memory in memories]
        peak = Peak(monkeypatch, set(memories))
        for step in range(3):
            peak.nbytes = 0
            train(engine, rank, range(step, step + 1))
            peaks.append(peak.nbytes)
        engine.destroy()
        return sizes, peaks

    zero = {"stage": stage, EARLY: True, **UNITS}
    plan = planned(build(), config_of(stage, Plan(), zero_optimization=zero), ranks)
    for sizes, peaks in on_ranks(ranks, run, build=build):
        assert peaks == [device_gradients(plan)] * 3
        assert max(sizes) <= peaks[0] < 0.8 * sum(sizes), (sizes, peaks)


@in_turn("more, proposed", [({}, True), ({"gradient_clipping": 1.0}, False)])
def test_it_is_proposed_where_it_makes_a_configuration_fit(more, proposed):
    config = config_of(3, Plan(precision="bf16"), optimizer={"type": "AdamW", "params": {}}, **more)
    early = {**config, "zero_optimization": {"stage": 3, EARLY: True}}
    model = build()
    whole, least = (
        needs(planned(model, keys, 2, gpu=True)).device_bytes for keys in (config, early)
    )
    assert (least < whole) is proposed
    free = FreeBytes(
        device=round((least + whole) / 2 / 0.8) if proposed else whole - 1, ram=1 << 30
    )
    zero = hf_zero.propose(model, 2, free, config=config, stage=3).config["zero_optimization"]
    assert zero.get(EARLY, False) is proposed and ("offload_optimizer" in zero) is not proposed


@in_turn("name", ["amsgrad", "sgd", "lion", "adagrad", "nadam", "cpu adam", "8 bits"])
def test_elementwise_optimizers(name):
    """In two groups, so that a flat buffer has several segments."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        thin = [p for p in trainable(model) if p.dim() == 1]
        thick = [p for p in trainable(model) if p.dim() > 1]
        chosen = ELEMENTWISE.get(name, lambda groups: AdamW8bit(groups, lr=1e-2))
        return chosen([{"params": thick}, {"params": thin, "weight_decay": 0.0}])

    alike(2, make, steps=3, model_of=lambda: seeded(lambda: Stack(2, 64)))


@in_turn(
    "stage, keys",
    [
        (3, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
        (3, {"zero": {"stage3_param_persistence_threshold": 100}}),
        (3, {"zero": {"offload_param": {"device": "cpu"}}, "precision": "bf16"}),
        (2, {"zero": {"zero_quantized_gradients": True}}),
        (3, {"activation_checkpointing": {"blocks": True}}),
    ],
)
def test_beside_other_features(stage, keys):
    alike(stage, **keys)


def test_in_one_launch(monkeypatch):
    """A launch for each flat buffer, whose tables stay from step to step."""
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    cut, tables = Tiles.cut, []

    def counted(*args: Any) -> Tiles:
        tables.append(cut(*args))
        return tables[-1]

    monkeypatch.setattr(Tiles, "cut", counted)
    with checked_triton(poison=False):
        alike(2, precision="bf16", steps=3)

        def run(rank: int, model: nn.Module) -> tuple[int, int]:
            engine = opened(model, 2, True, precision="bf16")
            train(engine, rank, range(1))
            del tables[:]
            train(engine, rank, range(1, 3))
            launches = sum(len(each.launches) for each in engine.bound._fused._tables.values())
            engine.destroy()
            return launches, len(tables)

        assert on_ranks(1, run, build=build) == [(5, 0)]


def test_parameters_that_no_rank_uses_stay_as_they_are():
    """Heads differ from step to step and from rank to rank."""
    job = HeadsJob("adamw")
    alike(2, job.optimizer, 2, 5, lambda engine, at: job.loss(driver(engine), at), job.build)


class Gains(nn.Module):
    """A layer with two gains, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.gains = nn.ParameterList(torch.ones(16) for _ in range(2))

    def forward(self, x: torch.Tensor, gain: int) -> torch.Tensor:
        return x + torch.tanh(self.layer(x)) * self.gains[gain]


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gains() for _ in range(3))

    def forward(self, x: torch.Tensor, gain: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, gain)
        return x


def inputs(at: At) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(seed_of(*astuple(at))))


def test_unused_parameters_in_one_of_the_flat_buffers_of_a_unit():
    """The weights are sharded, and the gains, in another flat buffer, are not."""

    def loss(engine: Any, at: At) -> torch.Tensor:
        return engine(inputs(at), int(at.step > 0)).pow(2).mean()

    zero = {"stage3_param_persistence_threshold": 100}
    alike(3, loss=loss, model_of=lambda: seeded(Chosen), zero=zero)


class Detached(nn.Module):
    """The first of the blocks also reads a weight of the last one, which gets no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[-1].up.weight.detach()
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at == 0:
                x = x + x @ weight.T @ weight
        return x


@in_turn("stage, ranks, precision", [(0, 1, "fp32"), (1, 2, "fp32"), (2, 1, "fp32")])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_reads_of_a_weight_after_its_update_are_refused(stage, ranks, precision, offload):
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, True, precision=precision, zero=offload)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(engine(inputs(At(0, 0, rank))).pow(2).mean())
        with pytest.raises(PartitionError, match="load a checkpoint"):
            engine.step()
        engine.destroy()

    on_ranks(ranks, run, build=lambda: seeded(Detached))


def driver(engine: Any) -> Any:
    """``engine`` as a net of a job."""
    engine.dtype = torch.float32
    return engine


class Shared(nn.Module):
    """Two blocks and two uses of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (0, 1, 0, 2):
            x = self.blocks[at](x)
        return x + x @ self.blocks[1].up.weight.T @ self.blocks[1].up.weight


@in_turn("stage", [0, 2, 3])
def test_modules_and_weights_with_several_uses(stage):
    def loss(engine: Any, at: At) -> torch.Tensor:
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed_of(*astuple(at))))
        return engine(x).pow(2).mean()

    alike(stage, loss=loss, model_of=lambda: seeded(Shared))


@in_turn("stage, ranks", [(0, 1), (2, 2), (3, 2)])
def test_gradients_for_inputs_are_taken_in_no_sync(stage, ranks):
    """Adversarial examples; the refusal where they are not names the way."""

    def loss(engine: Any, at: At) -> torch.Tensor:
        x = inputs(at).requires_grad_()
        with engine.no_sync():
            (slope,) = torch.autograd.grad(engine(x).pow(2).sum(), x)
        return engine(x.detach() + 0.1 * slope.sign()).pow(2).mean()

    def refused(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, True)
        train(engine, rank, range(2), loss)
        x = inputs(At(2, 0, rank)).requires_grad_()
        torch.autograd.grad(engine(x).pow(2).sum(), x)
        with pytest.raises(PartitionError, match=r"torch\.autograd\.grad, inside engine\.no_sync"):
            engine(x)
        engine.destroy()

    alike(stage, ranks=ranks, loss=loss, model_of=lambda: seeded(Shared))
    on_ranks(ranks, refused, build=lambda: seeded(Shared))


@in_turn("stage", [1, 3])
def test_going_on(stage, tmp_path):
    """From a checkpoint between steps, with a schedule, and after parts freeze and train again."""

    def run(rank: int, model: nn.Module, early: bool, resumes: bool) -> dict[str, torch.Tensor]:
        folder = str(tmp_path / str(early))
        engine = opened(model, stage, early)
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        for step in range(4):
            if step == 2 and resumes:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder)
            model.head.requires_grad_(step != 1)
            train(engine, rank, range(step, step + 1))
            schedule.step()
        return ended(engine)

    want = on_ranks(2, run, False, False, build=build)
    for got in on_ranks(2, run, True, True, build=build):
        same(got, want[0], exact=True)


def hooks_warned_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "find no gradients of the parameters" in text]


@pytest.mark.parametrize("offloaded", [False, True])
def test_hooks_of_the_optimizer_run_once_a_step(
    offloaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With one before the step its gradients are there, unless their state is offloaded."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offloaded else {}

    def run(rank: int, model: nn.Module) -> list[int]:
        engine, calls = opened(model, 2, True, zero=zero), [0, 0]

        def count(at: int) -> Any:
            def hook(*args: Any) -> None:
                calls[at] += 1

            return hook

        engine.optimizer.register_step_post_hook(count(1))
        train(engine, rank, range(2))
        assert not hooks_warned_of(caplog)
        handle = engine.optimizer.register_step_pre_hook(count(0))
        train(engine, rank, range(2, 4))
        handle.remove()
        train(engine, rank, range(4, 5))
        engine.destroy()
        return calls

    assert on_ranks(2, run, build=build) == [[2, 5]] * 2
    assert len(hooks_warned_of(caplog)) == 2 * offloaded  # once an engine


@in_turn("way", ["device", "optimizer on cpu", "optimizer in files"])
def test_a_rank_with_a_hook_before_the_step_updates_in_it(way: str, tmp_path: Any) -> None:
    """The others update in the backward, unless state is offloaded."""

    def run(rank: int, model: nn.Module, hooked: int) -> Any:
        engine = opened(model, 2, True, zero=offloads.offload(way, 2, tmp_path))
        train(engine, rank, range(1))
        if rank < hooked:
            engine.optimizer.register_step_pre_hook(lambda *_: None)
        engine.backward(loss_of(engine, At(1, 0, rank)))
        waits = rank < hooked if way == "device" else hooked > 0
        assert (engine.changes.unconfirmed is None) is waits
        engine.step()
        train(engine, rank, range(2, 4))
        return ended(engine)

    (want, _), *runs = (on_ranks(2, run, hooked, build=build) for hooked in range(3))
    for got in (weights for each in runs for weights in each):
        same(got, want, exact=True)


@in_turn("stage", [0, 2])
def test_gradients_that_a_hook_after_the_step_sets_have_no_effect(stage: int) -> None:
    def run(rank: int, model: nn.Module, early: bool) -> Any:
        engine = opened(model, stage, early)

        def set_gradients(*_: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)

        engine.optimizer.register_step_post_hook(set_gradients)
        norms = train(engine, rank, range(3))
        return norms, ended(engine)

    want, got = (on_ranks(2, run, early, build=build) for early in (False, True))
    for one, other in zip(got, want):
        assert one[0] == other[0]
        same(one[1], other[1], exact=True)


def half_done(model: nn.Module, stage: int = 2, **keys: Any) -> Any:
    engine = opened(model, stage, True, **keys)
    train(engine, 0, range(2))
    engine.backward(squared(engine, At(2, 0, 0)))
    assert engine.changes.unconfirmed is not None
    return engine


def clipped(engine: Any, folder: str) -> None:
    engine.max_norm = 0.1
    engine.step()


def written(engine: Any, folder: str) -> None:
    weight = engine.module.head.weight
    weight.grad = torch.ones(weight.shape)


def another_rate(engine: Any, folder: str) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5
    engine.step()


def hooked(engine: Any, folder: str) -> None:
    engine.optimizer.register_step_pre_hook(lambda *_: None)
    engine.step()


def again(engine: Any, folder: str) -> None:
    bias = engine.module.head.bias
    with hf_zero.GatheredParameters(bias):
        loss = bias.sum()
    engine.backward(loss)


def modified(engine: Any, folder: str) -> None:
    with hf_zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
        pass


def summoned(engine: Any, folder: str) -> None:
    with hf_zero.summon_full_params(engine.module, writeback=True):
        pass


def halved(engine: Any, folder: str) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    engine.step()


def stored(form: str, what: str, names: tuple[str, ...], engine: Any, folder: str) -> None:
    weight = engine.module.blocks[1].up.weight
    access = full if form == "full" else local
    value = getattr(access, f"safe_get_{form}_fp32_param")(weight)
    getattr(access, f"safe_set_{form}_{what}")(weight, value, *names)


REFUSED: dict[str, Callable[[Any, str], None]] = {
    "a forward": lambda engine, folder: engine(features(0, 0, 0)),
    r"optimizer\.load_state_dict": lambda engine, folder: engine.optimizer.load_state_dict({}),
    "^load_state_dict": lambda engine, folder: engine.load_state_dict({}, strict=False),
    "GatheredParameters with a modifier_rank": modified,
    "a write to": summoned,
    "another backward": again,
    r"^zero_grad\(": lambda engine, folder: engine.zero_grad(),
    r"zero_grad\(": lambda engine, folder: engine.optimizer.zero_grad(),
    "gradient clipping": clipped,
    "clip_grad_norm_": lambda engine, folder: engine.clip_gradient(0.1),
    "optimizer.state.clear": lambda engine, folder: engine.optimizer.state.clear(),
    "a write to optimizer.state": halved,
    "writing head.weight.grad": written,
    "a change of the optimizer's settings": another_rate,
    "a hook registered or removed": hooked,
    **{
        f"safe_set_{form}_{what}": partial(stored, form, what, names)
        for form in ("full", "local")
        for what, names in (("grad", ()), ("fp32_param", ()), ("optimizer_state", ("exp_avg",)))
    },
}
OFFLOADS = ({}, {"offload_optimizer": {"device": "cpu"}})


@in_turn("what", REFUSED)
def test_what_would_precede_the_update_in_a_plain_loop_is_refused(what, tmp_path):
    def run(rank: int, model: nn.Module, offload: dict[str, Any]) -> None:
        engine = half_done(model, stage=3, zero=offload)
        with pytest.raises(PartitionError, match=f"{what}.* comes after a backward that has upd"):
            REFUSED[what](engine, str(tmp_path))
        if "clear" in what:  # it goes on
            engine.step()
            engine.optimizer.state.clear()
            train(engine, rank, range(3, 4))
        engine.destroy()

    # docs/offload.md: writes in place to offloaded moments are not seen
    for offload in OFFLOADS[:1] if what == "a write to optimizer.state" else OFFLOADS:
        on_ranks(1, run, offload, build=build)


def test_a_gradient_that_an_update_on_the_device_has_used_is_not_read():
    def run(rank: int, model: nn.Module) -> None:
        engine = half_done(model, stage=3)
        with pytest.raises(PartitionError, match=r"reading a gradient.* comes after a b"):
            hf_zero.safe_get_full_grad(engine.module.head.weight)
        engine.destroy()

    on_ranks(1, run, build=build)


def test_what_may_be_read_is_right():
    """The norm, the weights and their masters, of the parts that are updated."""

    def run(rank: int, model: nn.Module, early: bool) -> Any:
        engine = opened(model, 2, early)
        train(engine, rank, range(2))
        engine.backward(squared(engine, At(2, 0, rank)))
        norms = [engine.optimizer_step.gradient.current(), float(engine.measure_gradient())]
        norms.append(float(engine.clip_gradient(math.inf)))
        engine.step()
        return [*norms, engine.get_global_grad_norm()], ended(engine)

    (norms, got), (own_norms, want) = (
        on_ranks(2, run, early, build=build)[0] for early in (True, False)
    )
    assert norms == own_norms == norms[:1] * 4 and norms[0] > 0
    same(got, want, exact=True)


@in_turn("pauses", ["evaluation", "save"])
def test_figures_of_a_step_that_an_evaluation_or_a_save_follows(pauses, tmp_path):
    """They come before ``step()``, which counts the step once."""

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2, True, metrics={"enabled": True, "path": str(tmp_path)})
        for step in range(2):
            engine.backward(squared(engine, At(step, 0, rank)))
            if pauses == "save":
                engine.save_checkpoint(str(tmp_path))
            else:
                with torch.no_grad():
                    squared(engine.eval(), At(step, 0, rank))
                engine.train()
            engine.step()
            assert engine.figures["step"] == step + 1
            assert engine.figures["samples_per_second"] > 0
        engine.destroy()

    on_ranks(2, run, build=build)


@in_turn("mends, offload", [*product((False, True), OFFLOADS)])
def test_a_backward_that_breaks_half_way(mends, offload, tmp_path):
    """Only a checkpoint mends what it has left half updated."""

    class Broken(Exception):
        pass

    def fail(*args: Any) -> None:
        raise Broken

    def run(rank: int, model: nn.Module) -> dict[str, torch.Tensor]:
        engine = opened(model, 3, True, zero=offload)
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path))
        handle = engine.module.blocks[1].register_full_backward_hook(fail)
        with pytest.raises(Broken):
            engine.backward(squared(engine, At(2, 0, rank)))
        handle.remove()
        with pytest.raises(PartitionError, match="load a checkpoint"):
            engine.step()
        if mends:
            engine.load_checkpoint(str(tmp_path))
            train(engine, rank, range(2, 4))
        return ended(engine)

    def plain(rank: int, model: nn.Module) -> dict[str, torch.Tensor]:
        engine = opened(model, 3, False, zero=offload)
        train(engine, rank, range(4))
        return ended(engine)

    (got,) = on_ranks(1, run, build=build)
    if mends:
        same(got, on_ranks(1, plain, build=build)[0], exact=True)


class Nested(nn.Module):
    """A weight of the last block is also used before it, in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].up.weight
        x = checkpoint(lambda x: x + x @ weight.T @ weight, self.blocks[0](x), use_reentrant=True)
        return self.blocks[1](x)


def test_gradients_after_an_update_are_refused():
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2, True)
        with pytest.raises(PartitionError, match=r"blocks\.1 came after their update.*reentrant"):
            engine.backward(engine(torch.randn(3, 16, requires_grad=True)).pow(2).mean())
        engine.destroy()

    on_ranks(1, run, build=lambda: seeded(Nested))
