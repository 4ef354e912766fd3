"""``optimizer.state`` and the members of groups between steps and in hooks, by parameter: what a
script reads and writes there has the effect that it has in plain torch.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, UnsupportedOptimizerError
from hf_zero.optim import AdamW8bit
from hf_zero.optim.group_member import GroupMember
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.offloads import offload
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan

RANKS, STEPS = 2, 5
WINDOWS = [[(1.0, 0)]] * STEPS
FILES, CPU, DEVICE = "optimizer in files", "optimizer on cpu", "device"


def two_groups(kind: Any, **settings: Any) -> Any:
    """The groups take turns over the parameters."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [*model.parameters()]
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
        optimizer: torch.optim.Optimizer = kind(groups, **settings)
        return optimizer

    return make


ADAMW = two_groups(torch.optim.AdamW, lr=1e-2, eps=1e-6)
SGD = two_groups(torch.optim.SGD, lr=1e-2, momentum=0.9)
RMSPROP = two_groups(torch.optim.RMSprop, lr=1e-3, eps=1e-4)
RPROP = two_groups(torch.optim.Rprop, lr=1e-3)


def sgd_of_all(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw_of_all(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def members(optimizer: Any) -> list[Any]:
    return [member for group in optimizer.param_groups for member in group["params"]]


def of_some(optimizer: Any, step: int) -> list[Any]:
    """Every third member, others in each step."""
    return members(optimizer)[step % 3 :: 3]


def scale(optimizer: Any, step: int) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.mul_(0.5)


def scale_some(optimizer: Any, step: int) -> None:
    for member in of_some(optimizer, step):
        for name in optimizer.state[member]:
            if name != "step":
                optimizer.state[member][name].mul_(2.0)


def assign(optimizer: Any, step: int) -> None:
    """One is changed after it was assigned."""
    for member in of_some(optimizer, step):
        state = optimizer.state[member]
        for name in [name for name in state if name != "step"]:
            value = torch.full_like(state[name], 0.125)
            state[name] = value
            value += 0.125


def swap(optimizer: Any, step: int) -> None:
    for state in optimizer.state.values():
        first, second = "exp_avg", "exp_avg_sq"
        # not the square alone: where a mean is near zero, Adam would divide rounding by itself
        square = state[first].square() + state[second]
        state[first], state[second] = state[second].sqrt(), square


def delete(optimizer: Any, step: int) -> None:
    for member in of_some(optimizer, step):
        if step % 2:
            del optimizer.state[member]
        else:
            optimizer.state.pop(member)
        assert member not in optimizer.state and optimizer.state.pop(member, None) is None


def empty(optimizer: Any, step: int) -> None:
    for at, member in enumerate(of_some(optimizer, step)):
        if at % 2:
            optimizer.state[member].clear()
        else:
            optimizer.state[member] = {}


def clear(optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.state.clear()
        assert not optimizer.state and not [*optimizer.state.values()]


def count_anew(optimizer: Any, step: int) -> None:
    for at, member in enumerate(of_some(optimizer, step)):
        count = optimizer.state[member]["step"]
        if at % 2:
            count.fill_(1.0 + step)
        else:
            optimizer.state[member]["step"] = torch.zeros_like(count) + 7.0


def begin(optimizer: Any, step: int) -> None:
    """Set state before the first step, and replace some later."""
    for member in of_some(optimizer, step):
        optimizer.state[member] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(member, 0.01, requires_grad=False),
            "exp_avg_sq": torch.full_like(member, 0.02, requires_grad=False),
        }


def replaced(optimizer: Any, step: int) -> None:
    if step == 2:
        kept = dict(list(optimizer.state.items())[::2])
        optimizer.state = defaultdict(dict, kept)


def freeze(optimizer: Any, step: int) -> None:
    """Through the members; hooks decay what trains."""
    for at, member in enumerate(members(optimizer)):
        member.requires_grad_(step in (0, 3) or at % 2 == step % 2)


def decay_what_trains(optimizer: Any, *_: Any) -> None:
    for member in members(optimizer):
        if member.requires_grad:
            member.mul_(0.9)


# name: optimizer, change after each step (-1: before the first), hook after steps
CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "scale": (ADAMW, scale, None),
    "scale some": (SGD, scale_some, None),
    "assign": (ADAMW, assign, None),
    "assign rmsprop": (RMSPROP, assign, None),
    "swap": (ADAMW, swap, None),
    "delete": (ADAMW, delete, None),
    "delete rprop": (RPROP, delete, None),
    "empty": (ADAMW, empty, None),
    "empty sgd": (SGD, empty, None),
    "clear": (ADAMW, clear, None),
    "count anew": (ADAMW, count_anew, None),
    "begin": (ADAMW, begin, None),
    "replaced": (ADAMW, replaced, None),
    "freeze": (ADAMW, freeze, decay_what_trains),
}
CELLS = [
    (name, stage, way)
    for at, name in enumerate(CHANGES)
    for stage, way in [(at % 4, DEVICE), (at % 3 + 1, CPU)]
]
OTHERS = [(name, (at + 2) % 4, DEVICE) for at, name in enumerate(CHANGES)]
CELLS += [(name, 3, FILES) for name in ("scale", "assign", "delete", "count anew", "freeze")]


def train(optimizer: Any, step_with: Any, change: Any, hook: Any) -> None:
    if hook is not None:
        optimizer.register_step_post_hook(hook)
    change = change if change in (begin, freeze) else _after_a_step(change)
    change(optimizer, -1)
    for step in range(STEPS):
        step_with(step)
        change(optimizer, step)


def _after_a_step(change: Any) -> Any:
    return lambda optimizer, step: None if step < 0 else change(optimizer, step)


@in_turn("name, stage, way", CELLS, OTHERS)
def test_what_a_script_does_between_steps(name: str, stage: int, way: str, tmp_path: Any) -> None:
    make, change, hook = CHANGES[name]
    if way == FILES and hook is not None:
        hook = None  # the master weights are in files, where a hook cannot write

    def run(rank: int, model: nn.Module) -> Any:
        section = offload(way, stage, tmp_path) | {"stage3_param_persistence_threshold": 0}
        engine = start(model, make(model), config_of(stage, zero_optimization=section))
        listed = [*map(id, members(engine.optimizer))]
        train(engine.optimizer, lambda step: run_steps(engine, rank, [step]), change, hook)
        assert [*map(id, members(engine.optimizer))] == listed
        return full_weights(engine)

    def told(step: int, model: nn.Module, optimizer: Any) -> None:
        change_(optimizer, step)

    change_ = change if change in (begin, freeze) else _after_a_step(change)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(model)
        if hook is not None:
            optimizer.register_step_post_hook(torch.no_grad()(hook))
        change_(optimizer, -1)
        return optimizer

    want, _ = by_hand(plain, WINDOWS, RANKS, after_step=told)
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


def _assign(member: Any) -> None:
    member.data = torch.ones(member.shape)


WRITES_TO_FILES: dict[str, Any] = {
    "in place": lambda member: member.mul_(0.5),
    "foreach": lambda member: torch._foreach_mul_([member], 0.5),
    "through .data": lambda member: member.data.fill_(0.5),
    "to .data": _assign,
    "to a slice": lambda member: member.view(-1)[1:].mul_(0.5),
    "to one element": lambda member: member.detach().view(-1)[0].fill_(0.5),
    "to a part": lambda member: member.view(-1).chunk(2)[1].fill_(0.5),
}


@in_turn("stage, write", [*zip((0, 1, 2, 3, 0, 2, 3), WRITES_TO_FILES)])
def test_members_in_files_refuse_writes(stage: int, write: str, tmp_path: Any) -> None:
    write_to, message = WRITES_TO_FILES[write], "values are in files.* write to the model's param"

    def run(rank: int, model: nn.Module) -> None:
        engine = start(
            model, ADAMW(model), config_of(stage, zero_optimization=offload(FILES, stage, tmp_path))
        )
        run_steps(engine, rank, range(1))
        member = max(members(engine.optimizer), key=torch.Tensor.numel)
        writes = torch.no_grad()(lambda *_: write_to(member))
        handle = engine.optimizer.register_step_post_hook(writes)
        with pytest.raises(PartitionError, match=message):
            run_steps(engine, rank, range(1, 2))
        handle.remove()
        with pytest.raises(PartitionError, match=message):
            writes()
        copied = pickle.loads(pickle.dumps(member))
        assert type(copied) is nn.Parameter and copied.shape == member.shape
        run_steps(engine, rank, range(2, 3))  # which the refused writes have left possible

    on_ranks(1, run)


class _OneFrozenNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.offset = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


@in_turn("way", ["all in files", "all on cpu"])
def test_members_of_one_element_in_files_refuse_writes(way: str, tmp_path: Any) -> None:
    """Also of a frozen parameter."""

    def run(rank: int, model: nn.Module) -> None:
        section = offload(way, 3, tmp_path, max_in_cpu=0)
        section["stage3_param_persistence_threshold"] = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = start(model, optimizer, config_of(3, zero_optimization=section))
        run_step(engine)
        said = "values are in files"
        for member in members(engine.optimizer):
            assert member.numel() == 1
            refused = pytest.raises(PartitionError, match=said) if "files" in way else nullcontext()
            with refused:
                member.data.mul_(0.5)
        engine.destroy()

    def run_step(engine: Any) -> None:
        engine.backward(engine(torch.ones(1)).sum())
        engine.step()

    on_ranks(1, run, build=_OneFrozenNumber)


@in_turn("stage, ranks, way", [(0, 2, DEVICE), (1, 1, CPU), (2, 2, DEVICE), (3, 2, FILES)])
def test_what_a_script_sees(stage: int, ranks: int, way: str, tmp_path: Any) -> None:
    """Of whole parameters exactly what torch shows; of parts their elements, in the order of the
    script; before the first step nothing.
    """

    def run(rank: int, model: nn.Module) -> Any:
        section = offload(way, stage, tmp_path) | {"stage3_param_persistence_threshold": 0}
        frozen = [*model.parameters()][3]
        frozen.requires_grad_(False)
        optimizer = ADAMW(model)
        engine = start(model, optimizer, config_of(stage, zero_optimization=section))
        assert len(optimizer.state) == 0 and not [*optimizer.state]
        assert [p.requires_grad for p in members(optimizer)] == [
            p.requires_grad for group in engine.group_parameters for p in group
        ]
        run_steps(engine, rank, range(2))
        state, names = optimizer.state, {id(p): n for n, p in engine.module.named_parameters()}
        assert len(state) == len(members(optimizer)) - 1 == len([*state.items()])
        assert members(optimizer)[-1] in state and 0 not in state and state.get(0) is None
        found = {}
        given = [p for group in engine.group_parameters for p in group]
        for member, parameter in zip(members(optimizer), given, strict=True):
            if parameter is frozen:
                assert member not in state
                continue
            entry = state[member]
            assert entry is state[member] and {*entry} == {"step", "exp_avg", "exp_avg_sq"}
            assert entry["exp_avg"].shape == member.shape and float(entry["step"]) == 2.0
            assert "exp_avg" in entry and len(entry) == 3 and entry.get("none") is None
            whole = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
            found[names[id(parameter)]] = (member.shape, entry["exp_avg"].reshape(-1), whole)
        copied = copy.deepcopy(optimizer.state[members(optimizer)[0]])
        moved = send_to_device(optimizer.state[members(optimizer)[0]], torch.device("cpu"))
        assert type(copied) is type(moved) is dict and torch.equal(
            copied["exp_avg"], state[members(optimizer)[0]]["exp_avg"]
        )
        buffer = io.BytesIO()
        torch.save([dict(entry) for entry in state.values()], buffer)
        return found

    per_rank = on_ranks(ranks, run)
    for name, (_, _, whole) in per_rank[0].items():
        parts = [found[name][1] for found in per_rank]
        if stage == 0 or ranks == 1:
            assert all(found[name][0] == whole.shape for found in per_rank)
            assert all(torch.equal(part, whole.reshape(-1)) for part in parts)
        else:
            assert torch.equal(torch.cat(parts), whole.reshape(-1))


FORMATS = [
    ("bf16", 2, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
    ("bf16", 3, {"bf16_optimizer_states": True}),
]


@in_turn("precision, stage, keys", FORMATS)
def test_state_in_bf16(precision: str, stage: int, keys: dict[str, Any]) -> None:
    """Halved moments are halved, on each rank; arrays of another dtype are refused."""

    def run(rank: int, model: nn.Module) -> None:
        config = config_of(stage, Plan(precision=precision), bf16={"enabled": True, **keys})
        engine = start(model, ADAMW(model), config)
        run_steps(engine, rank, range(2))
        parameter = next(model.parameters())
        before = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg").clone()
        for state in engine.optimizer.state.values():
            assert state["exp_avg"].dtype == torch.bfloat16
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            with pytest.raises(PartitionError, match=r"'exp_avg'.* in place of a tensor of torch"):
                state["exp_avg"] = state["exp_avg"].float()
        after = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert torch.equal(after, before * 0.5) and before.any()
        run_steps(engine, rank, range(2, 4))

    on_ranks(RANKS, run)


@in_turn("stage, way", [(0, DEVICE), (2, DEVICE), (2, CPU)])
def test_moments_in_8_bits_are_read_and_written_as_fp32(
    stage: int, way: str, tmp_path: Any
) -> None:
    def make(model: nn.Module) -> Any:
        return AdamW8bit(model.parameters(), lr=1e-3)

    def wide() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(7, 601), nn.Tanh(), nn.Linear(601, 1)))

    def run(rank: int, model: nn.Module) -> None:
        section = offload(way, stage, tmp_path)
        engine = start(model, make(model), config_of(stage, zero_optimization=section))
        run_steps(engine, rank, range(2))
        optimizer, parameters = engine.optimizer, [*model.parameters()]
        before = [hf_zero.safe_get_full_optimizer_state(p, "exp_avg").clone() for p in parameters]
        for at, member in enumerate(members(optimizer)):
            state = optimizer.state[member]
            assert state["exp_avg"].dtype == torch.float32
            if at % 2:
                state["exp_avg"].mul_(0.5)
            else:
                state["exp_avg"] = state["exp_avg"] * 0.5
        for parameter, value in zip(parameters, before, strict=True):
            found = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
            torch.testing.assert_close(
                found, value * 0.5, rtol=0.05, atol=float(value.abs().max()) / 50
            )
            assert value.any()
        run_steps(engine, rank, range(2, 3))

    on_ranks(RANKS, run, build=wide)


@on_each_rank(RANKS)
def test_writes_that_are_refused_change_nothing(rank: int, model: nn.Module) -> None:
    engine = start(model, ADAMW(model), config_of(2))
    run_steps(engine, rank, range(1))
    state, first = engine.optimizer.state, members(engine.optimizer)[0]
    kept = {name: value.clone() for name, value in state[first].items()}
    wrong = torch.zeros(first.numel() + 3)
    name = next(n for n, p in model.named_parameters() if p is first.parameter)
    for write in (
        lambda: state[first].update(step=torch.tensor(9.0), exp_avg=wrong),
        lambda: state.__setitem__(first, {"step": torch.tensor(9.0), "exp_avg": wrong}),
        lambda: state[first].__setitem__("exp_avg", 1.0),
        lambda: state.update({first: {"exp_avg": wrong}}),
    ):
        with pytest.raises(PartitionError, match=rf"'exp_avg'\] of this rank's part of {name} "):
            write()
    with pytest.raises(UnsupportedOptimizerError, match="keeps state 'text'"):
        state[first]["text"] = "text"
    with pytest.raises(KeyError):
        del state[object()]
    assert state[first].keys() == kept.keys()
    assert all(torch.equal(state[first][key], value) for key, value in kept.items())


@on_each_rank(RANKS)
def test_writes_between_an_update_in_the_backward_and_its_step_are_refused(
    rank: int, model: nn.Module
) -> None:
    section = {"stage": 2, "update_in_backward": True}
    engine = start(model, ADAMW(model), config_of(2, zero_optimization=section))
    run_steps(engine, rank, range(1))
    engine.backward(squared(engine, At(1, 0, rank)))
    state = engine.optimizer.state
    member = next(iter(state))
    assert float(state[member]["step"]) == 2.0
    for write in (
        lambda: state.__delitem__(member),
        lambda: state.__setitem__(member, {}),
        lambda: state[member].__delitem__("step"),
        lambda: state[member].update(step=torch.tensor(0.0)),
    ):
        with pytest.raises(PartitionError, match=r"a write to optimizer\.state comes after"):
            write()
    engine.step()
    assert float(state[member]["step"]) == 2.0
    del state[member]
    assert member not in state


class Counted(torch.optim.Optimizer):
    """With a number in its state that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for member in group["params"]:
                state = self.state[member]
                if not state:
                    state.update(count=0, average=torch.zeros_like(member))
                state["count"] += 1
                state["average"].lerp_(member.grad, 0.5)
                member.add_(state["average"], alpha=-group["lr"] / state["count"])


@in_turn("stage", [0, 2])
def test_state_with_a_plain_number(stage: int) -> None:
    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        def change(optimizer: Any, *_: Any) -> None:
            for state in [*optimizer.state.values()][::2]:
                state["average"].mul_(0.5)
                state["count"] += 1

        optimizer = Counted(model.parameters())
        optimizer.register_step_post_hook(change)
        return optimizer

    def run(rank: int, model: nn.Module) -> Any:
        engine = start(model, hooked(model), config_of(stage, elementwise_optimizers=["Counted"]))
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    want, _ = by_hand(hooked, WINDOWS, RANKS)
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def scale_members(optimizer: Any, *_: Any) -> None:
    for member in members(optimizer):
        member.mul_(0.9)


def with_hooks_in_turn(model: Any, changing: Any = nullcontext) -> torch.optim.Optimizer:
    """After each step members are scaled, parameters of the model are, and members are again."""
    optimizer: torch.optim.Optimizer = ADAMW(model)

    def scale_parameters(*_: Any) -> None:
        parameters = [*model.parameters()][::2]
        with changing(parameters):
            for parameter in parameters:
                parameter.mul_(0.8)

    for hook in (scale_members, scale_parameters, scale_members):
        optimizer.register_step_post_hook(torch.no_grad()(hook))
    return optimizer


@in_turn("stage, way", [(1, CPU), (2, DEVICE), (3, DEVICE)])
def test_a_hook_reads_what_the_one_before_has_written(stage: int, way: str, tmp_path: Any) -> None:
    want, _ = by_hand(with_hooks_in_turn, WINDOWS, RANKS)

    def run(rank: int, model: nn.Module) -> Any:
        gather = hf_zero.GatheredParameters
        optimizer = with_hooks_in_turn(model, nullcontext if stage == 2 else gather)
        config = config_of(stage, zero_optimization=offload(way, stage, tmp_path))
        engine = start(model, optimizer, config)
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


READS: dict[str, Any] = {
    "GatheredParameters": lambda engine: hf_zero.GatheredParameters(engine.module).__enter__(),
    "summon_full_params": lambda engine: hf_zero.summon_full_params(engine).__enter__(),
    "consolidated": lambda engine: dict(engine.consolidated()),
    "a forward": torch.no_grad()(lambda engine: squared(engine.eval(), At(9, 0, 0))),
}


@in_turn("name", READS)
def test_reads_of_weights_that_lack_a_write_to_members_are_refused(name: str) -> None:
    def run(rank: int, model: nn.Module) -> None:
        engine = start(model, ADAMW(model), config_of(2))
        run_steps(engine, rank, range(1))
        with torch.no_grad():
            scale_members(engine.optimizer)
        with pytest.raises(PartitionError, match=r"were written to between steps.* load a ch"):
            READS[name](engine)

    on_ranks(RANKS, run)


@on_each_rank(RANKS)
def test_a_forward_in_the_hook_that_has_written_to_members_is_refused(
    rank: int, model: nn.Module
) -> None:
    engine = start(model, ADAMW(model), config_of(2))

    def write_and_run(optimizer: Any, *_: Any) -> None:
        scale_members(optimizer)
        READS["a forward"](engine)

    engine.optimizer.register_step_post_hook(torch.no_grad()(write_and_run))
    with pytest.raises(PartitionError, match=r"written to in this hook.* register what r"):
        run_steps(engine, rank, range(1))


def unit_gradients(optimizer: Any, *_: Any) -> None:
    """A norm of each parameter's gradient, that of parts would differ."""
    for member in members(optimizer):
        if member.requires_grad and member.grad is not None:
            member.grad /= member.grad.norm() + 1e-3


def drop_some_gradients(optimizer: Any, *_: Any) -> None:
    step = optimizer.__dict__["hooked"] = optimizer.__dict__.get("hooked", -1) + 1
    for member in members(optimizer)[step % 2 :: 3]:
        member.grad = None


def new_gradients(optimizer: Any, *_: Any) -> None:
    for member in members(optimizer):
        if member.grad is not None:
            member.grad = member.grad.clamp(-1e-3, 1e-3)


def change_states_and_weights(optimizer: Any, *_: Any) -> None:
    step = optimizer.__dict__["hooked"] = optimizer.__dict__.get("hooked", -1) + 1
    for member in members(optimizer):
        member.mul_(0.9)
    if step:
        for at, state in enumerate(optimizer.state.values()):
            state["exp_avg"].mul_(0.5)
            if at % 2:
                state["step"].fill_(float(step))


def go_back(optimizer: Any, *_: Any) -> None:
    """The dicts of the groups are others after a load."""
    seen = optimizer.__dict__.setdefault("seen", [])
    seen.append(copy.deepcopy(optimizer.state_dict()))
    if len(seen) == 4:
        optimizer.load_state_dict(seen[1])


HOOKS = {
    f.__name__: f for f in (drop_some_gradients, new_gradients, change_states_and_weights, go_back)
}
IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}


@in_turn(
    "name, stage, keys",
    [
        *((name, stage, {}) for at, name in enumerate(HOOKS) for stage in (min(at, 2), 3)),
        ("unit_gradients", 0, {}),
        ("drop_some_gradients", 2, {"gradient_clipping": 0.5}),
        *((name, stage, IN_BACKWARD) for stage, name in enumerate(HOOKS)),
    ],
)
def test_hooks_before_a_step_see_the_members(name: str, stage: int, keys: dict[str, Any]) -> None:
    hook = {**HOOKS, "unit_gradients": unit_gradients}[name]

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = ADAMW(model)
        optimizer.register_step_pre_hook(torch.no_grad()(hook))
        return optimizer

    def run(rank: int, model: nn.Module) -> Any:
        zero = {"stage": stage, **keys.get("zero_optimization", {})}
        engine = start(
            model, hooked(model), config_of(stage, **{**keys, "zero_optimization": zero})
        )
        run_steps(engine, rank, range(STEPS))
        assert all(member.grad is None for member in members(engine.optimizer))
        return full_weights(engine)

    want, _ = by_hand(hooked, WINDOWS, RANKS, keys.get("gradient_clipping", 0.0))
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


class _Unused(nn.Sequential):
    """Two layers, of which a forward calls the first."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)  # type: ignore[no-any-return]


@in_turn("stage, make", [(0, sgd_of_all), (2, sgd_of_all), (3, adamw_of_all)])
def test_a_hook_before_a_step_clears_state_beside_unused_parameters(stage: int, make: Any) -> None:
    """The step has left them out of the segments that the hook joins again."""

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer, calls = make(model), []

        def clear(optimizer: Any, *_: Any) -> None:
            calls.append(optimizer)
            if len(calls) == 2:
                optimizer.state.clear()

        optimizer.register_step_pre_hook(clear)
        return optimizer  # type: ignore[no-any-return]

    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    plain = seeded(_Unused)
    optimizer = hooked(plain)
    for _ in range(STEPS):
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rank: int, model: nn.Module) -> Any:
        engine = start(model, hooked(model), config_of(stage))
        for _ in range(STEPS):
            engine.backward(engine(x).square().mean())
            engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=lambda: seeded(_Unused)):
        oracle.compare_tensors("weights", weights, plain.state_dict(), floor=oracle.ADAM_ROUNDING)


@on_each_rank(RANKS)
def test_hooks_before_a_step_in_bf16_leave_members_out(rank: int, model: nn.Module) -> None:
    keys = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = config_of(1, Plan(precision="bf16"), bf16={"enabled": True, **keys})
    engine = start(model, ADAMW(model), config)
    run_steps(engine, rank, range(1))
    optimizer = engine.optimizer
    handle = optimizer.register_step_pre_hook(drop_some_gradients)
    before = [member.clone() for member in members(optimizer)]
    run_steps(engine, rank, range(1, 2))
    for at, (member, value) in enumerate(zip(members(optimizer), before, strict=True)):
        stays = at % 3 == 0 or not member.numel()
        assert torch.equal(member, value) is stays
        count = float(optimizer.state[member]["step"])
        assert count == (1.0 if at % 3 == 0 else 2.0) or not member.numel()
    handle.remove()
    run_steps(engine, rank, range(2, 3))
    counts = {float(optimizer.state[m]["step"]) for m in members(optimizer) if m.numel()}
    assert counts <= {2.0, 3.0} and 3.0 in counts


@in_turn("keys", [(), ("bf16_optimizer_states",)])
@on_each_rank(RANKS)
def test_a_hook_before_a_step_in_bf16_that_loads_is_refused(
    rank: int, model: nn.Module, keys: tuple[str, ...]
) -> None:
    narrow = dict.fromkeys(("enabled", "bf16_master_weights_and_grads", *keys), True)
    engine = start(model, ADAMW(model), config_of(1, Plan(precision="bf16"), bf16=narrow))
    run_steps(engine, rank, range(1))
    optimizer = engine.optimizer
    optimizer.register_step_pre_hook(lambda *_: optimizer.load_state_dict(optimizer.state_dict()))
    with pytest.raises(PartitionError, match="load it before the backward, or in a hook after"):
        run_steps(engine, rank, range(1, 2))


@on_each_rank(RANKS)
def test_members_freeze_with_their_parameters(rank: int, model: nn.Module) -> None:
    engine = start(model, ADAMW(model), config_of(3))
    run_steps(engine, rank, range(1))
    first, second = members(engine.optimizer)[:2]
    assert type(first) is GroupMember and first.requires_grad
    next(p for p in model.parameters() if p is first.parameter).requires_grad_(False)
    assert not first.requires_grad and second.requires_grad
    second.requires_grad = False
    assert second.parameter is not None and not second.parameter.requires_grad
    seen = []
    engine.optimizer.register_step_post_hook(
        lambda optimizer, *_: seen.append([p.requires_grad for p in members(optimizer)][:3])
    )
    run_steps(engine, rank, range(1, 2))
    assert seen == [[False, False, True]]
    copied = copy.deepcopy(second)
    assert copied.requires_grad is False and torch.equal(copied, second)


def test_a_member_stays_over_cuts_and_a_kept_entry_is_live() -> None:
    def run(rank: int, model: nn.Module) -> None:
        engine = start(model, ADAMW(model), config_of(1))
        run_steps(engine, rank, range(1))
        optimizer = engine.optimizer
        member = next(m for m in members(optimizer) if m.numel())
        entry, listed = optimizer.state[member], [*map(id, members(optimizer))]
        for other in members(optimizer)[::2]:
            other.requires_grad_(False)
        run_steps(engine, rank, range(1, 3))
        assert [*map(id, members(optimizer))] == listed
        trains = member.requires_grad
        assert float(entry["step"]) == (3.0 if trains else 1.0)
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 0.25)
        assert (optimizer.state_dict()["state"][listed.index(id(member))]["exp_avg"] == 0.25).all()
        assert (entry["exp_avg"] == 0.25).all()

    on_ranks(RANKS, run)


@in_turn("way", [CPU, FILES])
def test_the_memory_of_members_is_that_of_the_weights(way: str, tmp_path: Any) -> None:
    """After an engine has ended, too, its members hold none."""

    def run(rank: int, model: nn.Module) -> None:
        engine = start(
            model, ADAMW(model), config_of(2, zero_optimization=offload(way, 2, tmp_path))
        )
        run_steps(engine, rank, range(1))
        listed = members(engine.optimizer)
        if way == CPU:
            for member in listed:
                whole = hf_zero.safe_get_full_fp32_param(member.parameter).reshape(-1)
                assert member.numel() in (0, whole.numel()) or member.numel() < whole.numel()
                assert not member.numel() or torch.isin(member.reshape(-1), whole).all()
        engine.destroy(gather=True)
        assert all(member.numel() == 0 for member in listed)

    on_ranks(RANKS, run, build=stack)


@on_each_rank(1)
def test_a_state_without_entries_has_none_to_pop(rank: int, model: nn.Module) -> None:
    engine = start(model, adamw_of_all(model), config_of(2))
    with pytest.raises(KeyError, match="empty"):
        engine.optimizer.state.popitem()
    engine.destroy()
