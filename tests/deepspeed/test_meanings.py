"""Semantics that DeepSpeed's scripts expect and that differ from the native calls: folders without
a checkpoint, ranks that name different places, objects beside a configuration, files of whole
weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.deepspeed import optimizers, state_dicts
from hf_zero.errors import (
    CheckpointError,
    ConfigError,
    NotBuiltError,
    PartitionError,
    TargetMismatchError,
    UnreducedGradientsError,
)
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights
from tests.helpers.stacks import by_hand, on_ranks, squared, stack
from tests.helpers.training import At, adamw

RANKS = 2


def start(model: Any, stage: int = 1, **more: Any) -> Any:
    config = config_of(stage, **more)
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


def stages() -> nn.Module:
    """A pipeline with a stage on each rank: each is alone in its mesh."""
    return deepspeed.PipelineModule([nn.Linear(4, 4) for _ in range(RANKS)], num_stages=RANKS)


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_folder_without_a_checkpoint_loads_nothing(
    tmp_path: Path, heard: list[str], pipeline: bool
) -> None:
    def run(rank: int, model: Any) -> None:
        engine = start(stages() if pipeline else model)
        assert engine.load_checkpoint(tmp_path / "none") == (None, {})
        assert engine.load_checkpoint(str(tmp_path)) == (None, {})
        with pytest.raises(CheckpointError, match="no checkpoint 'step'"):
            engine.load_checkpoint(tmp_path, tag="step")
        with pytest.raises(CheckpointError, match="no checkpoint"):
            hf_zero.Engine.load_checkpoint(engine, str(tmp_path))
        engine.save_checkpoint(tmp_path / "run", tag=7)
        path, state = engine.load_checkpoint(tmp_path / "run")
        assert path == str(tmp_path / "run" / "7") and state == {}
        (tmp_path / "damaged").mkdir(exist_ok=True)
        (tmp_path / "damaged" / "latest").write_text("gone")
        with pytest.raises(CheckpointError, match="gone"):
            engine.load_checkpoint(tmp_path / "damaged")
        with pytest.raises(NotBuiltError, match="inside GatheredParameters"):
            engine.load_checkpoint(tmp_path, custom_load_fn=print)
        engine.destroy()

    on_ranks(RANKS, run)
    assert len([line for line in heard if "load_checkpoint loads nothing" in line]) >= 2


def test_ranks_that_name_different_places(tmp_path: Path, heard: list[str]) -> None:
    for mode, what in (("warn", "folder"), ("ignore", "tag"), ("fail", "tag")):
        heard.clear()
        on_ranks(RANKS, save_in_two_places, mode, what, tmp_path / f"{mode}-{what}")
        told = any("all ranks save as rank 0 says" in line for line in heard)
        assert told == (mode == "warn"), mode


def test_stages_that_name_different_places(tmp_path: Path, heard: list[str]) -> None:
    for mode, what in (("warn", "folder"), ("fail", "tag")):
        on_ranks(RANKS, save_in_two_places, mode, what, tmp_path / mode, stages)
    assert any("all ranks save as rank 0 says" in line for line in heard)


def save_in_two_places(
    rank: int,
    model: Any,
    mode: str,
    what: str,
    top: Path,
    build: Callable[[], nn.Module] | None = None,
) -> None:
    engine = start(build() if build else model, checkpoint={"tag_validation": mode})
    place: Any = (top / f"at-{rank}", "tag") if what == "folder" else (top, f"t{rank}")
    if mode == "fail":
        with pytest.raises(TargetMismatchError, match="rank 1 wants to save as"):
            engine.save_checkpoint(*place)
    else:
        engine.save_checkpoint(*place)
        saved = top / "at-0" / "tag" if what == "folder" else top / "t0"
        assert (saved / "manifest.json").is_file()
        assert not (top / "at-1").exists() and not (top / "t1").exists()
    with pytest.raises(ConfigError, match="needs a folder"):
        engine.save_checkpoint("")
    different = "that all ranks share" if what == "folder" else "different tags"
    with pytest.raises(CheckpointError, match=different):
        hf_zero.Engine.save_checkpoint(engine, *place)
    engine.destroy()


def test_auto_means_the_default(heard_in_full: list[str]) -> None:
    """Nothing fills keys in where a script gives its configuration; a comment in it is no error."""
    sizes = "max_live_parameters max_reuse_distance param_persistence_threshold"
    keys = [f"stage3_{name}" for name in f"{sizes} prefetch_bucket_size".split()]
    keys += ["reduce_bucket_size", "sub_group_size"]
    config = {
        "_comment": "of a script",
        "zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 3,
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "autotuning": {"metric": "auto"},
        "elasticity": {"enabled": False, "micro_batch_sizes": "auto"},
    }
    model = stack()
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    assert (engine.config.precision, engine.config.gradient_clipping) == ("fp32", 1.0)
    assert engine.config.zero.param_persistence_threshold is None
    told = [said for said in heard_in_full if '"auto"' in said]
    assert len(told) == 2 and all(key in told[1] for key in keys)
    assert "bf16.enabled" in told[0] and "trains in fp32" in told[0]
    assert "stage3_prefetch_bucket_size = 50000000" in told[1] and "bf16" not in told[1]
    free = ("amp.enabled", "amp.opt_level", "autotuning.metric", "elasticity.micro_batch_sizes")
    assert all(f"{key}, " in told[1] for key in free)
    for part in ("gradients are clipped at 1.0", "'_comment'"):
        assert any(part in said for said in heard_in_full), part
    with pytest.raises(ConfigError, match="'_comment'"):
        hf_zero.initialize(model=stack(), config={"_comment": "of a script"})
    del config["_comment"]
    with pytest.raises(ConfigError, match="still 'auto'"):
        hf_zero.initialize(model=(model := stack()), optimizer=adamw(model), config=config)
    with pytest.raises(ConfigError, match="train_batch_size"):
        start(stack(), train_batch_size="auto")


def test_objects_go_before_the_configuration(heard: list[str]) -> None:
    written = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    scheduler = SimpleNamespace(step=lambda: None)
    for how in ("object", "callable"):
        model = stack()
        given: Any = adamw(model) if how == "object" else lambda p: torch.optim.AdamW(p, lr=1e-3)
        heard.clear()
        engine, optimizer, _, made = deepspeed.initialize(
            model=model, optimizer=given, lr_scheduler=scheduler, config=config_of(1, **written)
        )
        assert isinstance(optimizer, torch.optim.AdamW) and made is scheduler
        assert engine.config.scheduler is None
        for name in ("optimizer", "scheduler"):
            assert len([line for line in heard if f"configuration's {name}" in line]) == 1
        engine.destroy()
        with pytest.raises(ConfigError, match="keep one"):
            hf_zero.initialize(model=stack(), optimizer=given, config=config_of(1, **written))
    heard.clear()
    engine, optimizer, _, made = deepspeed.initialize(model=stack(), config=config_of(1, **written))
    assert isinstance(optimizer, torch.optim.SGD) and made is not None
    assert not [line for line in heard if "is used, and the configuration's" in line]
    engine.destroy()


def test_arguments_of_a_schedule_that_a_backward_has_stepped() -> None:
    """Without an update in the backward, ``step`` passes them to the schedule."""

    class Schedule:
        given: list[object] = []

        def step(self, epoch: object = None) -> None:
            self.given.append(epoch)

    for early in (False, True):
        model, schedule = stack(), Schedule()
        zero = {"stage": 1, "update_in_backward": early}
        engine = deepspeed.initialize(
            model=model,
            optimizer=adamw(model),
            lr_scheduler=schedule,
            config=config_of(1, zero_optimization=zero, gradient_clipping=0.0),
        )[0]
        engine.backward(squared(engine, At(0, 0, 0)))
        if early:
            with pytest.raises(PartitionError, match=r"^step\(lr_kwargs\) comes after a backward"):
                engine.step({"epoch": 7})
            engine.step()
        else:
            engine.step({"epoch": 7})
        assert schedule.given == ([7, None] if early else [7])
        engine.destroy()


def test_a_number_of_checkpoints_for_a_model_without_blocks(heard: list[str]) -> None:
    config = config_of(1, activation_checkpointing={"number_checkpoints": 4})
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    assert engine.config.activation_checkpointing.number == 0
    assert len([line for line in heard if "number_checkpoints = 4" in line]) == 1
    engine.destroy()
    with pytest.raises(ConfigError, match="number_checkpoints"):
        hf_zero.initialize(model=model, optimizer=adamw(model), config=config)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of two ranks, and the weights in it."""

    def run(rank: int, model: Any) -> Any:
        engine = start(model, 2, bf16={"enabled": True})
        engine.backward(squared(engine, At(0, 0, rank), torch.bfloat16))
        engine.step()
        engine.save_checkpoint(tmp_path / "run")
        weights = {n: hf_zero.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
        engine.destroy()
        return weights

    return tmp_path / "run", on_ranks(RANKS, run)[0]


def test_pickled_weights_beside_those_that_transformers_prefers_are_told(
    saved: Any, tmp_path: Path, heard: list[str]
) -> None:
    convert = deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    out = tmp_path / "out"
    convert(saved[0], out, safe_serialization=True)
    convert(saved[0], out)
    (told,) = (line for line in heard if "takes before the written pytorch_model.bin" in line)
    assert f"{out} also holds model.safetensors, which" in told
    heard.clear()
    (out / "model.safetensors").unlink()
    convert(saved[0], out)
    assert not [line for line in heard if "takes before" in line]


def test_whole_weights_are_pickled_by_default(saved: Any, tmp_path: Path) -> None:
    run, weights = saved
    cases = [("5GB", False), (None, True), (2000, False)]
    for number, (size, safe) in enumerate(cases):
        out = tmp_path / str(number)
        deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            run, out, max_shard_size=size, safe_serialization=safe
        )
        name = "model.safetensors" if safe else "pytorch_model.bin"
        files = [file for file in out.iterdir() if not file.name.startswith(".")]
        if size == 2000:
            where = json.loads((out / f"{name}.index.json").read_text())["weight_map"]
            parts = {part: _load(out / part) for part in {*where.values()}}
            assert len(parts) > 1
            held = {key: parts[part][key] for key, part in where.items()}
        else:
            assert name in {file.name for file in files}
            held = _load(out / name)
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[key], weights[key]) for key in weights)
        suffixes = {file.suffix for file in files if file.name != "config.json"}
        assert (".bin" in suffixes, ".safetensors" in suffixes) == (not safe, safe)


def _load(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".bin":
        loaded: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
        return loaded
    return load_file(file)


@pytest.mark.parametrize("fails", [False, True])
def test_of_several_that_convert_one_writes(
    saved: Any, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, the one that waits writes in its place."""
    run, weights = saved
    calls, waits = [], threading.Event()
    convert, flock = state_dicts.write_torch_files, fcntl.flock
    entered = [0]

    def counted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            other.start()
            assert waits.wait(timeout=120)  # the other has come, too
            if fails:
                raise OSError("no space")
        return convert(*args)

    def locked(descriptor: int, how: int) -> None:
        entered[0] += 1
        if entered[0] == 2:
            waits.set()
        flock(descriptor, how)

    monkeypatch.setattr(state_dicts, "write_torch_files", counted)
    monkeypatch.setattr(state_dicts.fcntl, "flock", locked)
    out, write = tmp_path / "out", state_dicts.convert_zero_checkpoint_to_fp32_state_dict
    other = threading.Thread(target=write, args=(run, out))
    with pytest.raises(OSError, match="no space") if fails else contextlib.nullcontext():
        write(run, out)
    other.join()
    assert _load(out / "pytorch_model.bin").keys() == weights.keys()
    assert not list(out.glob(".*")) and len(calls) == 1 + fails


def test_the_fp32_writer_goes_on_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with state_dicts._one_writer(tmp_path) as writes:
        assert writes
    assert not list(tmp_path.iterdir()) and "goes on without a lock" in heard[0]


def test_files_of_deepspeeds_own_checkpoints_are_found(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1, 2, 10)]
    for name in [*names, "mp_rank_00_model_states.pt"]:
        (tmp_path / name).write_text("")
    helpers = deepspeed.utils.zero_to_fp32
    assert [Path(file).name for file in helpers.get_optim_files(tmp_path)] == names
    assert Path(helpers.get_model_state_file(tmp_path, 2)).name == "mp_rank_00_model_states.pt"


@in_one_item(
    [
        ("Adam", False, {}, "FusedAdam", True),
        ("Adam", False, {"adam_w_mode": False}, "FusedAdam", False),
        ("AdamW", True, {}, "DeepSpeedCPUAdam", True),
        ("AdamW", False, {"torch_adam": True}, None, None),
        ("Lion", False, {}, "FusedLion", None),
        ("Lion", True, {}, "DeepSpeedCPULion", None),
        ("Adagrad", True, {}, "DeepSpeedCPUAdagrad", None),
        ("SGD", True, {}, None, None),
    ]
)
def test_what_a_configuration_makes_is_of_the_class_that_deepspeed_makes(case: Any) -> None:
    kind, offload, more, name, decoupled = case
    section = {"type": kind, "params": {"lr": 1e-3, **more}}
    place = {"device": "cpu" if offload else "none"}
    zero = {"stage": 1, "offload_optimizer": place}
    config = config_of(0, optimizer=section, zero_optimization=zero)
    engine, optimizer, _, _ = deepspeed.initialize(model=stack(), config=config)
    classes = [each for each in vars(optimizers).values() if isinstance(each, type)]
    own = [cls for cls in classes if cls.__module__ == optimizers.__name__]
    names = {cls.__name__ for cls in own if isinstance(optimizer, cls) and "_" not in cls.__name__}
    assert names == {name} - {None}
    assert getattr(optimizer, "adam_w_mode", None) is decoupled
    assert type(optimizer).__module__.startswith(("torch.optim", "hf_zero.optim"))
    engine.destroy()
    assert not isinstance(torch.optim.AdamW(stack().parameters()), optimizers.FusedAdam)
    assert isinstance(optimizers.FusedAdam(stack().parameters()), optimizers.FusedAdam)


def test_the_optimizer_shows_the_loss_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    engine = start(stack(), 1, fp16=fp16)
    scalers = []
    scaler = engine.optimizer.loss_scaler
    assert engine.optimizer.needs_scaler() and engine.optimizer.loss_scale_config is scaler
    for step in range(4):
        assert engine.optimizer.dynamic_loss_scale and scaler.scale_window == 2
        assert scaler.dynamic_loss_scale
        assert scaler.cur_scale == scaler.loss_scale
        scalers.append((scaler.cur_iter, scaler.loss_scale))
        engine.backward(squared(engine, At(step, 0, 0), torch.half))
        engine.step()
    assert scalers == [(step, 512.0 if step == 3 else 256.0) for step in range(4)]
    engine.destroy()
    assert not start(stack(), 1, bf16={"enabled": True}).optimizer.needs_scaler()


def test_the_arguments_of_a_script_name_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    for name in ("deepspeed_config", "deepscale_config"):
        model = stack()
        args = SimpleNamespace(**{name: str(file)})
        engine = deepspeed.initialize(args, model=model, optimizer=adamw(model))[0]
        assert engine.zero_optimization_stage() == 2
        engine.destroy()
        with pytest.raises(ConfigError, match=rf"more than one config: config, args\.{name}"):
            deepspeed.initialize(args, model=model, optimizer=adamw(model), config={})


def test_scripts_set_counters() -> None:
    """``micro_steps`` also sets the place in the accumulation window, as in DeepSpeed."""

    def run(rank: int, model: Any) -> None:
        engine = start(model, 2, gradient_accumulation_steps=3)
        for _ in range(2):
            engine.backward(squared(engine, At(0, 0, rank)))
            engine.step()
        engine.zero_grad()
        engine.micro_steps = 0
        for number in range(3):
            assert engine.global_steps == 0
            engine.backward(squared(engine, At(0, number, rank)))
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 3)
        norm = engine.get_global_grad_norm()
        assert norm > 0 and float(engine.optimizer._global_grad_norm) == norm
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, 7)
            assert getattr(engine, name) == getattr(engine.counters, name) == 7

    on_ranks(RANKS, run)


@in_one_item([0, 3])
def test_backwards_of_one_step_are_reduced_together(stage: int) -> None:
    def run(rank: int, model: Any, block: bool) -> dict[str, torch.Tensor]:
        engine = start(model, stage)
        with engine.coalesce_grad_reduction() if block else contextlib.nullcontext():
            for micro in range(3):
                engine.set_gradient_accumulation_boundary(micro == 2)
                engine.backward(squared(engine, At(0, micro, rank)))
            if block:
                with pytest.raises(AssertionError, match=r"step\(\) inside no_sync"):
                    engine.step()
                with pytest.raises(UnreducedGradientsError, match="nested inside another no_sync"):
                    engine.coalesce_grad_reduction().__enter__()
        engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want, have = (on_ranks(RANKS, run, block)[0] for block in (False, True))
    for name, value in want.items():
        torch.testing.assert_close(have[name], value, rtol=2e-5, atol=1e-6)


CLIPPED: list[tuple[dict[str, Any], float, bool, bool]] = [
    ({}, 1.0, True, False),
    ({}, 0.0, False, True),  # a ZeroConfig without the key does not clip
    ({"gradient_clipping": "auto"}, 1.0, True, True),
    ({"gradient_clipping": 0}, 0.0, False, False),
]


@in_turn("written, limit, said, native", CLIPPED)
def test_gradients_are_clipped_at_one_where_nothing_is_written(
    caplog, written, limit, said, native
):
    caplog.clear()
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, **written}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = hf_zero.ZeroConfig.from_dict(config, allow_auto=True) if native else config
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    engine.backward(10 * engine(torch.eye(2)).sum())
    engine.step()
    norm = torch.linalg.vector_norm(model.weight)
    assert engine.gradient_clipping() == limit
    torch.testing.assert_close(norm.item(), limit or 20.0)
    engine.destroy()
    assert ("gradient_clipping has no value" in caplog.text) == said
    assert deepspeed.runtime.config.DeepSpeedConfig(given).gradient_clipping == limit
    if not native:
        assert deepspeed.runtime.config.get_gradient_clipping(written) == limit


@in_turn("dtype, written", [(torch.bfloat16, False), (torch.float16, True)])
def test_a_model_in_16_bits_trains_from_master_weights(caplog, dtype, written):
    """With and without the section; steps that 16 bits cannot show are not lost."""
    caplog.clear()
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    section = {"enabled": True, "loss_scale": 1.0} if name == "fp16" else {"enabled": True}
    config = config_of(1, gradient_clipping=0, **({name: section} if written else {}))

    def run(rank: int, model: Any) -> tuple[float, dict[str, torch.Tensor]]:
        model = model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert {p.dtype for p in engine.module.parameters()} == {dtype}
        before = full_weights(engine)
        for step in range(3):
            engine.backward(squared(engine, At(step, 0, rank), dtype))
            engine.step()
        after = full_weights(engine)
        engine.destroy()
        return engine.loss_scale(), {key: after[key] - before[key] for key in after}

    for scale, moved in on_ranks(RANKS, run):
        assert scale == 1.0 and all(value.abs().max() > 0 for value in moved.values())
    assert (f"the model is in {name} and neither" in caplog.text) == (not written)
    mixed = nn.Sequential(nn.Linear(2, 2).to(dtype), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="neither bf16 nor fp16 is enabled"):
        start(mixed)


def test_the_configuration_sets_the_level_of_the_log() -> None:
    logger, read = deepspeed.utils.logger, deepspeed.runtime.config.get_log_level
    kept = [(each, each.level) for each in (logger, *logger.handlers)]
    try:
        for config, level in (({}, 20), ({"log_level": "ERROR"}, 40)):
            logger.setLevel(20)
            engine = start(stack(), **config)
            assert engine.log_level() == read(config) == config.get("log_level")
            assert logger.level == level
            engine.destroy()
        assert {handler.level for handler in logger.handlers} == {40}
        with pytest.raises(ConfigError, match="log_level"):
            hf_zero.ZeroConfig.from_dict({"log_level": "loud"})
    finally:
        for each, before in kept:
            each.setLevel(before)


def test_an_optimizer_that_is_not_known_is_an_assertion_too() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (AssertionError, TypeError):
        with pytest.raises(kind, match="Own"):
            model, config = stack(), config_of(1, zero_allow_untested_optimizer=False)
            optimizer = Own(model.parameters(), lr=0.1)
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def test_an_optimizer_that_is_not_known_trains_if_it_is_allowed_untested(heard: list[str]) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def own(model: Any) -> torch.optim.Optimizer:
        return Own(model.parameters(), lr=0.1)

    want, _ = by_hand(own, [[(1.0, 0)], [(1.0, 1)]], RANKS)

    def run(rank: int, model: Any) -> None:
        config = config_of(3, zero_allow_untested_optimizer=True)
        engine = hf_zero.initialize(model=model, optimizer=own(model), config=config)[0]
        for step in range(2):
            engine.backward(squared(engine, At(step, step, rank)))
            engine.step()
        for name, value in full_weights(engine).items():
            torch.testing.assert_close(value, want[name], atol=1e-6, rtol=1e-5)
        engine.destroy()

    on_ranks(RANKS, run)
    assert any("proves nothing" in line for line in heard)


@pytest.mark.parametrize(("first", "stage"), [(0, 3), (3, 0)])
def test_a_model_is_initialized_again(first: int, stage: int, heard: list[str]) -> None:
    """The second engine continues with the weights of the first, and with its optimizer object."""

    def train(engine: Any, rank: int, step: int) -> None:
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()

    def run(rank: int, model: Any) -> dict[str, torch.Tensor]:
        old = start(model, first)
        train(old, rank, 0)
        engine = start(model, stage)
        assert old.destroyed and engine.module is model
        with pytest.raises(PartitionError, match="destroyed"):
            old.step()
        train(engine, rank, 1)
        found = full_weights(engine)
        engine.destroy()
        return found

    def alone(rank: int, model: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            engine = start(model, 0)
            train(engine, rank, step)
            engine.destroy()
        return full_weights(engine)

    want = on_ranks(RANKS, alone)[0]
    for name, value in on_ranks(RANKS, run)[0].items():
        torch.testing.assert_close(value, want[name], rtol=1e-6, atol=1e-7)
    assert any("called again for a model" in line for line in heard)


def test_the_wrapped_optimizer_has_none_below() -> None:
    """Libraries unwrap until there is no attribute of that name."""
    engine = start(stack())
    optimizer = unwrapped = engine.optimizer
    depth = 0
    while hasattr(unwrapped, "optimizer"):
        unwrapped, depth = unwrapped.optimizer, depth + 1
    assert depth == 1 and unwrapped == optimizer and {unwrapped: 1} == {optimizer: 1}
    assert isinstance(unwrapped, torch.optim.AdamW) and isinstance(unwrapped, type(optimizer))
    with pytest.raises(AttributeError, match="an unwrapped optimizer has no attribute 'optimizer'"):
        _ = unwrapped.optimizer
    with pytest.raises(AttributeError, match="an unwrapped optimizer has no attribute 'optimizer'"):
        unwrapped.optimizer = optimizer
    called, lr = [], optimizer.param_groups[0]["lr"]
    unwrapped.register_step_post_hook(lambda *given: called.append(given[0]))
    schedule = torch.optim.lr_scheduler.LambdaLR(unwrapped, lambda step: 0.5**step)
    engine.backward(squared(engine, At(0, 0, 0)))
    unwrapped.step()
    schedule.step()
    assert called == [optimizer] and optimizer.param_groups[0]["lr"] == lr / 2
    assert unwrapped.param_groups is optimizer.param_groups and unwrapped.state is optimizer.state
    engine.destroy()
    assert not hasattr(optimizer, "optimizer")
