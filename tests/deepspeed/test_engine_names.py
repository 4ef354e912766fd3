"""The engine under DeepSpeed's method names, on two ranks beside plain steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hf_zero.deepspeed import engine_getters
from hf_zero.deepspeed.modules import LEFT_OUT
from hf_zero.deepspeed.state_offload import KINDS, checked
from hf_zero.errors import ConfigError, NotBuiltError, PartitionError
from tests.helpers import sampled
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_grads, full_weights
from tests.helpers.models import ROWS
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, index_in, metric, section
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS = 2


def made(model: nn.Module, stage: int, plan: Plan | None = None, **more: Any) -> Any:
    config = config_of(stage, plan, **more)
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


def start(model: nn.Module, stage: int, **more: Any) -> Any:
    """An engine that does not clip, as the loop by hand."""
    return made(model, stage, **{"gradient_clipping": 0.0, **more})


@in_one_item([0, 3])
def test_backward_returns_the_loss_of_its_share_of_the_window(stage: int) -> None:
    def run(rank: int, model: Any) -> None:
        engine = start(model, stage, gradient_accumulation_steps=4)
        loss = squared(engine, At(0, 0, rank))
        assert torch.equal(engine.backward(loss), loss / 4)
        engine.step()
        loss = squared(engine, At(0, 1, rank))
        assert engine.backward(loss, scale_wrt_gas=False) is loss
        engine.destroy()

    on_ranks(RANKS, run)


def test_another_train_batch_size_is_another_window() -> None:
    windows = [[(0.5, 0), (0.5, 1)], [(1.0, 2)], [(0.5, 3), (0.5, 4)]]
    want, _ = by_hand(adamw, windows, RANKS)

    def run(rank: int, model: Any) -> None:
        engine = start(model, 3, gradient_accumulation_steps=2)
        for step, window in enumerate(windows):
            engine.set_train_batch_size(ROWS * RANKS * len(window))
            for place, (_, micro) in enumerate(window):
                engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
                if place == 0 and len(window) == 2:
                    with pytest.raises(PartitionError, match="inside an accumulation window"):
                        engine.set_train_batch_size(ROWS * RANKS)
        assert engine.global_steps == 3 and engine.train_batch_size() == 2 * ROWS * RANKS
        for name, value in full_weights(engine).items():
            torch.testing.assert_close(value, want[name], rtol=2e-5, atol=1e-6)
        with pytest.raises(ValueError, match="not a multiple"):
            engine.set_train_batch_size(ROWS * RANKS + 1)
        engine.set_train_micro_batch_size(3)
        assert engine.train_batch_size() == 3 * 2 * RANKS
        engine.destroy()

    on_ranks(RANKS, run)


def test_samples_a_second_are_of_steps_after_the_first_reading() -> None:
    def run(rank: int, model: Any) -> None:
        engine = start(model, 2, gradient_accumulation_steps=2)
        run_steps(engine, rank, range(1), micros=2)
        assert "tput_timer" not in vars(engine)
        assert engine.tput_timer.batch_size == engine.train_batch_size()
        run_steps(engine, rank, range(1, 5), micros=2)
        timer = engine.tput_timer
        assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
        assert timer.avg_samples_per_sec() == 2 * timer.batch_size / timer.total_elapsed_time
        engine.destroy()

    on_ranks(RANKS, run)


@in_one_item([0, 3])
def test_a_scaled_loss_goes_backward_by_itself(stage: int) -> None:
    plan = Plan(precision="fp16", scale=128.0)

    def run(rank: int, model: Any) -> None:
        engine = made(model, stage, plan)
        engine.backward(squared(engine, At(0, 0, rank), torch.float16))
        engine.allreduce_gradients()
        want = full_grads(engine)
        engine.zero_grad()
        loss = squared(engine, At(0, 0, rank), torch.float16)
        scaled = engine.scale(loss)
        assert torch.equal(scaled, loss * 128.0)
        scaled.backward()
        engine.allreduce_gradients()
        torch.testing.assert_close(full_grads(engine), want, rtol=2e-3, atol=1e-4)
        for wrong in (torch.ones(1), torch.ones(2, requires_grad=True)):
            with pytest.raises(AssertionError, match="scalar tensor with a graph"):
                engine.scale(wrong)
        engine.destroy()

    on_ranks(RANKS, run)


def test_whole_state_dicts_go_out_and_in() -> None:
    def run(rank: int, model: Any) -> None:
        model.blocks[0].requires_grad_(False)
        engine = start(model, 3)
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        assert state.keys() == stack().state_dict().keys()
        trained = engine.module_state_dict(exclude_frozen_parameters=True)
        assert state.keys() - trained.keys() == {n for n in state if n.startswith("blocks.0.")}
        changed = {name: value + 1 for name, value in state.items()}
        engine.load_state_dict(changed)
        torch.testing.assert_close(engine.module_state_dict(), changed)
        engine.destroy()

    on_ranks(RANKS, run)


@in_turn("stage, precision", [(0, "fp32"), (3, "bf16")])
def test_states_go_away_and_come_back_as_they_were(
    stage: int, precision: str, tmp_path: Path
) -> None:
    plan = Plan(precision=precision)

    def run(rank: int, model: Any, away: bool) -> list[dict[str, torch.Tensor]]:
        engine = made(model, stage, plan)
        seen = []
        for step in range(3):
            engine.backward(squared(engine, At(step, 0, rank), plan.dtype))
            if away and step:
                included = [None, ["optim_states"], ["lp_params", "hp_params"]][step]
                engine._states_away.send(engine, checked(included, "cpu"), False, False)
                with pytest.raises(PartitionError, match=r"call engine.reload_states\(\) first"):
                    engine.step()
                with pytest.raises(PartitionError, match="a forward while offload_states"):
                    engine(torch.ones(1))
                param = next(p for p in engine.module.parameters() if p.requires_grad)
                safe, x = deepspeed.utils, torch.ones(1)
                readers = (
                    engine.state_dict, engine.consolidated, engine.iter_weights,
                    engine.module_state_dict, engine._consolidated_16bit_state_dict,
                    partial(engine.save_16bit_model, tmp_path), partial(engine.module, x),
                    engine.optimizer.state_dict, partial(safe.safe_get_full_fp32_param, param),
                    partial(safe.safe_get_full_grad, param), partial(engine.backward, x),
                    partial(safe.safe_get_full_optimizer_state, param, "exp_avg"),
                    partial(engine.load_checkpoint, tmp_path), engine.zero_grad,
                    partial(engine.save_checkpoint, tmp_path), partial(engine.clip_gradient, 1.0),
                )  # fmt: skip
                for reader in readers:
                    with pytest.raises(PartitionError, match="while offload_states"):
                        reader()
                gathered = deepspeed.zero.GatheredParameters([param])
                if included == ["optim_states"]:
                    with gathered:
                        pass
                else:
                    with pytest.raises(PartitionError, match="GatheredParameters while off"):
                        gathered.__enter__()
                assert {s.nbytes() for s, _ in engine._states_away._away} == {0}
                engine.reload_states()
            engine.step()
            seen.append(full_weights(engine))
        engine.destroy()
        return seen

    plain, parked = (on_ranks(RANKS, run, away) for away in (False, True))
    torch.testing.assert_close(parked, plain, rtol=0, atol=0)


def test_states_that_cannot_go_are_named() -> None:
    engine = start(stack(), 1)
    engine.offload_states(include=["optim_states"])  # the device is the host
    assert not engine.changes.away
    for include, device, said in (
        (None, "nvme", "device is 'nvme'"),
        (["x"], "cpu", "is not a state"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.offload_states(include, device)
    enums = deepspeed.runtime.zero.offload_config
    assert checked(None, enums.OffloadDeviceEnum.cpu) == KINDS
    assert checked([enums.OffloadStateTypeEnum.lp_grads], "cpu") == ("lp_grads",)
    assert checked(None, "none") == ()
    engine.empty_partition_cache()
    engine.destroy()


def test_loaders_of_the_engine(tmp_path: Path) -> None:
    """One for the evaluation; one for the training draws by difficulty, in windows of four."""
    data, index = TensorDataset(torch.arange(12.0)), index_in(tmp_path)
    hard = metric(index, schedule_type="custom")
    batch = {"train_micro_batch_size_per_gpu": BATCH // 4 // RANKS, "gradient_clipping": 0.0}

    def run(rank: int, model: Any) -> Any:
        engine = start(model, 1)
        train = engine.deepspeed_io(data, batch_size=2)
        assert len(train) == 3 and train.batch_size == 2
        evaluate = engine.deepspeed_io(data, batch_size=3, route="eval")
        with pytest.raises(ConfigError, match="pass a torch Dataset"):
            engine.deepspeed_io(3, route="eval")
        with pytest.raises(AttributeError, match=r"'flops_profiler': .*enabled is false; write"):
            _ = engine.flops_profiler
        for route in ("train", "eval"):
            with pytest.raises((ConfigError, ValueError), match="0"):
                engine.deepspeed_io(data, batch_size=0, route=route)
        read = [values.tolist() for (values,) in evaluate]
        engine.destroy()
        elastic = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
        unwritten = {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}
        engine = start(model, 1, elasticity=elastic, **unwritten)
        assert len(engine.deepspeed_io(data)) == 3
        engine.destroy()

        linear = nn.Linear(4, 1)
        keys = section(hard=hard, harder=hard)
        engine = made(linear, 1, gradient_accumulation_steps=4, **batch, **keys)
        assert engine.curriculum_learning_enabled()
        with pytest.raises(ConfigError, match=r"one function was given .* hard and harder; pass"):
            engine.set_custom_curriculum_learning_schedule(sampled.at)
        engine.set_custom_curriculum_learning_schedule({"hard": sampled.at, "harder": sampled.at})
        seen: list[list[int]] = [[] for _ in range(5)]
        for rows in engine.deepspeed_io(sampled.data()):
            engine.backward(engine(rows["x"]).mean())
            seen[engine.global_steps] += rows["id"].tolist()
            engine.step()
        engine.destroy()
        return read, seen

    shares = on_ranks(RANKS, run)
    assert [read for read, _ in shares] == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]
    drawn = [sorted(one + two) for one, two in zip(shares[0][1], shares[1][1])]
    assert drawn == [sorted(step) for step in sampled.drawn(index, 5)]


def test_what_the_engine_says_about_itself() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "none"}}
    more: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": zero}
    engine = start(stack(), 2, optimizer=None, **more)
    values = {name: getattr(engine, name)() for name in engine_getters.GETTERS}
    assert values["managed_gradient_accumulation"] is True and values["autotp_size"] == 0
    assert engine.zero_offload_param() is engine.log_level() is None
    assert engine.zero_offload_optimizer().device == "none"
    assert not engine.zero_cpu_offload() and not engine.zero_use_cpu_optimizer()
    assert engine.optimizer_name() == "AdamW"
    for name, instead in LEFT_OUT["DeepSpeedEngine"].items():
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        assert str(caught.value) == f"the engine has no attribute {name!r}: {instead}"
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert engine.communication_data_type == torch.bfloat16 and engine.dist_backend == "gloo"
    assert not engine.monitor.enabled
    engine.monitor.write_events([("loss", 1.0, 1)])
    assert engine.get_wall_clock_timers() == {}
    assert engine.dp_world_size == engine.mp_world_size == engine.seq_dp_world_size == 1
    assert engine.get_data_parallel_rank() == 0 and engine.has_moe_layers is False
    assert engine.sparse_tensor_module_names == set()
    assert engine.basic_optimizer is engine.optimizer
    assert [*engine.param_names.values()] == [name for name, _ in engine.module.named_parameters()]
    assert engine.data_parallel_group is deepspeed.utils.groups.get_data_parallel_group()
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    assert not engine.inside_no_sync_ctxt and engine.mpu is None
    with pytest.raises(NotBuiltError, match="schedule"):
        engine.compile(schedule=[])
    engine.destroy()


def test_the_scheduler_is_given_the_arguments_of_the_step_that_is_applied() -> None:
    given: list[Any] = []
    scheduler = SimpleNamespace(step=lambda **arguments: given.append(arguments))
    config, model = config_of(1, gradient_accumulation_steps=2), stack()
    objects: dict[str, Any] = {"optimizer": adamw(model), "lr_scheduler": scheduler}
    engine = deepspeed.initialize(model=model, config=config, **objects)[0]
    for arguments in (None, {"epoch": 3}):
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, 0)))
            engine.step(arguments)
    assert given == [{}, {"epoch": 3}] and engine.lr_scheduler is scheduler
    engine.destroy()


@in_one_item([0, 2, 3])
def test_parts_of_parameters_are_this_ranks(stage: int) -> None:
    utils = deepspeed.utils

    def run(rank: int, model: Any) -> dict[str, Any]:
        model.blocks[0].requires_grad_(False)
        engine = start(model, stage)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert utils.safe_get_local_grad(next(iter(named.values()))) is None
        frozen = model.blocks[0].up.weight
        assert utils.safe_get_full_grad(frozen) is None
        engine.backward(squared(engine, At(0, 0, rank)))
        before = full_grads(engine)
        parts = {name: utils.safe_get_local_grad(p) for name, p in named.items()}
        for name, p in named.items():
            utils.safe_set_local_grad(p, parts[name] * 2)
        doubled = full_grads(engine)
        for name, value in before.items():
            torch.testing.assert_close(doubled[name], value * 2)
        utils.safe_update_full_grad_vectorized(model.parameters(), lambda grad, p: grad / 2)
        torch.testing.assert_close(full_grads(engine), before)
        engine.step()
        for name, p in named.items():
            own = utils.safe_get_local_fp32_param(p)
            utils.safe_set_local_fp32_param(p, own + 1)
            state = utils.safe_get_local_optimizer_state(p, "exp_avg")
            assert state.shape == own.shape
            utils.safe_set_local_optimizer_state(p, state + 3, "exp_avg")
            whole = utils.safe_get_full_optimizer_state(p, "exp_avg")
            torch.testing.assert_close(whole.mean(), before[name].mean() * 0.1 + 3)
            assert torch.equal(utils.safe_get_local_fp32_param(p), own + 1)
        with pytest.raises(PartitionError, match="that this rank keeps"):
            utils.safe_set_local_fp32_param(p, torch.ones(10_000))
        with pytest.raises(PartitionError, match="is frozen"):
            utils.safe_set_local_fp32_param(frozen, torch.ones(1))
        engine.destroy()
        return {name: len(part) for name, part in parts.items()}

    sizes = on_ranks(RANKS, run)
    whole = {name: p.numel() for name, p in stack().named_parameters()}
    shards = RANKS if stage else 1
    assert all(sum(r[name] for r in sizes[:shards]) == whole[name] for name in sizes[0])


def test_a_loop_over_all_parameters_reads_none_of_frozen_ones() -> None:
    utils = deepspeed.utils

    def run(rank: int, model: Any) -> None:
        model.blocks.requires_grad_(False)  # as under an adapter, which trains a few
        engine = start(model, 3)
        for step in range(2):
            engine.backward(squared(engine, At(step, 0, rank)))
            for name, p in model.named_parameters():
                values = [utils.safe_get_full_fp32_param(p), utils.safe_get_full_grad(p)]
                values += [utils.safe_get_local_fp32_param(p), utils.safe_get_local_grad(p)]
                if step:
                    values.append(utils.safe_get_full_optimizer_state(p, "exp_avg"))
                    values.append(utils.safe_get_local_optimizer_state(p, "exp_avg"))
                assert {value is not None for value in values} == {p.requires_grad}, name
            engine.step()
        engine.destroy()

    on_ranks(RANKS, run)
    parameter = nn.Parameter(torch.ones(2))  # of no engine
    parameter.grad = torch.ones(2)
    utils.safe_update_full_grad_vectorized([parameter], lambda grad, p: grad * 3)
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_norms_and_overflow_where_ranks_hold_other_experts() -> None:
    def run(rank: int) -> None:
        u = deepspeed.runtime.utils
        shared, expert = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        shared.grad, expert.grad = torch.tensor([4.0]), torch.tensor([3.0 * (rank == 0)])
        expert.allreduce = False
        # the norms are 5 on one rank and 4 on the other
        norm = u.clip_grad_norm_([shared, expert], max_norm=0.45)
        torch.testing.assert_close(norm, torch.tensor(4.5))
        torch.testing.assert_close(shared.grad, torch.tensor([0.4]))

        shared.grad = torch.tensor([float("inf") if rank == 0 else 1.0])
        assert u.CheckOverflow([[shared]]).check() == (rank == 0)
        both = u.CheckOverflow([[shared, expert]])
        assert both.check() and both.check_using_norm([-1 if rank else 2.0], reduce_overflow=False)
        assert not both.check([[expert]]) and not both.check_using_norm([2.0])
        assert u.CheckOverflow().check_using_norm([float("nan") if rank else 2.0])
        assert u.CheckOverflow().check_using_norm([-1], reduce_overflow=False)

    run_ranks(RANKS, run)
