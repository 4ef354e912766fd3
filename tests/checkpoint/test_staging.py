"""Saves whose staging memory is smaller than the file (``checkpoint.staging_bytes``): the thread
copies the rest beside the training, and what changes state waits for it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import background_saves, file_writer
from hf_zero.checkpoint import staging as staging_module
from hf_zero.checkpoint.staging import DeferredState, StagedFile, plan_in_call
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT as PAGE
from hf_zero.checkpoint.tensorfile import TensorFile, plan_file
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.ops.host_memory import HostArena
from hf_zero.optim import Adafactor, OneBitAdam
from hf_zero.optim.eight_bit import AdamW8bit
from hf_zero.zero.access import local
from tests.checkpoint.jobs import run_holds, same
from tests.checkpoint.setups import Setup, state, train
from tests.helpers.cells import in_turn
from tests.helpers.engines import full_weights, start
from tests.helpers.ranks import run_ranks
from tests.helpers.training import trainable


def adamw8(model: torch.nn.Module) -> torch.optim.Optimizer:
    return AdamW8bit(trainable(model), lr=1e-3)


def one_bit(model: torch.nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(trainable(model), lr=1e-3, freeze_step=1)


def adafactor(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Adafactor(trainable(model), lr=1e-3, relative_step=False, scale_parameter=False)


class Staging:
    """Saves in the background with the smallest memory that a rank's file can take and ``pages``
    for parts; their threads write once :attr:`go` is set, by default by the first that waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages, self.go, self.at_first_wait = 2, threading.Event(), True
        self.waits: list[str] = []  # the names of the threads that have waited for copies
        self.parts: list[int] = []
        copy, write, wait = (
            background_saves.BackgroundSaver.copy_to_host,
            background_saves.write_image,
            StagedFile._wait,
        )

        def small(saver: Any, plan: Any, tensors: Any, image: Any, deferred: Any) -> str:
            saver._staging_bytes = plan_in_call(plan, deferred()).size + self.pages * PAGE
            why = copy(saver, plan, tensors, image, deferred)
            assert why or saver.nbytes <= -(-saver._staging_bytes // PAGE) * PAGE
            return why

        def held(path: Path, parts: Iterator[memoryview], plan: Any) -> Any:
            assert self.go.wait(60)

            def counted() -> Iterator[memoryview]:
                for part in parts:
                    if len(part) < plan.size:
                        self.parts.append(len(part))
                    yield part

            return write(path, counted(), plan)

        def waiting(staged: StagedFile, copied: threading.Event) -> None:
            if not copied.is_set():
                self.waits.append(threading.current_thread().name)
            if self.at_first_wait:
                self.go.set()
            wait(staged, copied)

        monkeypatch.setattr(background_saves.BackgroundSaver, "copy_to_host", small)
        monkeypatch.setattr(background_saves, "write_image", held)
        monkeypatch.setattr(StagedFile, "_wait", waiting)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    return Staging(monkeypatch)


def content(folder: Path) -> dict[str, Any]:
    """The tensors of all rank files as bytes, and the manifest without what names the save."""
    manifest = json.loads((folder / "manifest.json").read_text())
    held: dict[str, Any] = {}
    for entry in manifest["files"]:
        with TensorFile(folder / entry["name"]) as file:
            for name, each in file.entries.items():
                out = torch.empty(each.numel, dtype=each.dtype)
                file.read_into(name, 0, out)
                held[f"{entry['name']} {name}"] = out.view(torch.uint8).numpy().tobytes()
    for key in ("save_id", "tag", "order", "digest", "files"):
        manifest.pop(key, None)
    return held | {"manifest": manifest}


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {}),
    ("bf16", {"precision": "bf16", "frozen": "wte"}),
    ("8 bits", {"precision": "bf16", "optimizer": adamw8}),
    ("host", {"precision": "bf16", "way": "optimizer on cpu"}),
    ("half on the host", {"way": "half on cpu", "frozen": "wpe"}),
]
CELLS = [(3, kind) for kind, _ in KINDS] + [(0, "fp32"), (1, "bf16"), (2, "host")]
OTHERS = [(stage, kind) for stage in (0, 1, 2) for kind, _ in KINDS if (stage, kind) not in CELLS]
CELLS += [(3, "all on the host"), (1, "one bit"), (3, "factors"), (3, "frozen")]
ALL = dict(KINDS) | {
    "all on the host": {"way": "all on cpu", "moments": "bf16"},
    "one bit": {"optimizer": one_bit},
    "factors": {"optimizer": adafactor},
    "frozen": {"frozen": "mlp"},
}


@in_turn("stage, kind", CELLS, long=OTHERS)
def test_the_checkpoint_has_the_bits_of_a_blocking_save(
    stage: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that follow at once wait, and have the bits of those after a blocking save."""
    setup = Setup(stage=stage, **ALL[kind])

    def plain(engine: Any, rank: int) -> Any:
        losses = train(engine, rank, range(2))
        engine.save_checkpoint(tmp_path, tag="blocking")
        return losses + train(engine, rank, range(2, 4)), full_weights(engine)

    def saving(engine: Any, rank: int) -> Any:
        losses = train(engine, rank, range(2))
        engine.save_checkpoint(tmp_path, tag="later", blocking=False)
        losses += train(engine, rank, range(2, 4))
        engine.wait_for_checkpoint()
        return losses, full_weights(engine)

    expected = setup.run(plain)
    staging = Staging(monkeypatch)
    for (losses, weights), (found, after) in zip(expected, setup.run(saving)):
        assert losses == found and same(weights, after)
    blocking, later = content(tmp_path / "blocking"), content(tmp_path / "later")
    assert blocking.keys() == later.keys()
    assert [name for name in blocking if blocking[name] != later[name]] == []
    assert staging.waits and max(staging.parts) <= staging.pages * PAGE


def test_the_key_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the file passes through it, at stage 3 beside the little that is copied at once."""
    setup, bound, taken = Setup(), 64 << 10, list[int]()
    take = HostArena.take

    def counting(*args: Any, **more: Any) -> torch.Tensor:
        memory = take(*args, **more)
        taken.append(memory.nbytes)
        return memory

    monkeypatch.setattr(HostArena, "take", counting)

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        config = {**setup.config, "checkpoint": {"staging_bytes": "64KiB"}}
        engine = start(models[rank], setup.optimizer(models[rank]), config)
        train(engine, rank, range(1))
        kept = state(engine)
        engine.save_checkpoint(tmp_path, blocking=False)
        train(engine, rank, range(1, 2))
        engine.load_checkpoint(tmp_path)
        assert same(state(engine), kept)
        engine.destroy()

    run_ranks(2, run, setup.models())
    sizes = [path.stat().st_size for path in tmp_path.rglob("rank-*")]
    assert min(sizes) > 2 * bound and len(taken) == 2 and max(taken) <= bound


def test_where_the_memory_is_too_small_training_waits(
    tmp_path: Path, heard_in_full: list[str]
) -> None:
    setup = Setup(stage=1)

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        config = {**setup.config, "checkpoint": {"staging_bytes": 20_000}}
        engine = start(models[rank], setup.optimizer(models[rank]), config)
        engine.save_checkpoint(tmp_path, tag="a", blocking=False)
        assert (tmp_path / "latest").read_text() == "a"
        engine.destroy()

    run_ranks(2, run, setup.models())
    (said,) = [line for line in heard_in_full if "is written while training waits" in line]
    assert "must be copied in the call" in said and "raise it to" in said


def test_a_bound_is_a_number_of_bytes() -> None:
    for wrong in (0, -1, "many", True):
        with pytest.raises(ConfigError, match=r"checkpoint\.staging_bytes"):
            ZeroConfig.from_dict({"checkpoint": {"staging_bytes": wrong}})


def safe_set(engine: Any) -> None:
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    hf_zero.safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 5.0))


def safe_set_moment(engine: Any) -> None:
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    value = torch.full(parameter.shape, 5.0)
    hf_zero.safe_set_full_optimizer_state(parameter, value, "exp_avg")


def safe_set_local(engine: Any) -> None:
    for parameter in engine.module.parameters():
        value = local.safe_get_local_optimizer_state(parameter, "exp_avg")
        assert value is not None
        local.safe_set_local_optimizer_state(parameter, value + 1, "exp_avg")


def gathered(engine: Any) -> None:
    with hf_zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for parameter in engine.module.parameters():
            parameter.data.fill_(3.0)


def assigned(engine: Any) -> None:
    engine.module.load_state_dict({n: v + 1 for n, v in engine.state_dict().items()})


def optimizer_loads(engine: Any) -> None:
    state_dict = engine.optimizer.state_dict()
    state_dict["state"] = {
        key: {name: torch.zeros_like(torch.as_tensor(value)) for name, value in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    engine.optimizer.load_state_dict(state_dict)


def forgotten(engine: Any) -> None:
    engine.optimizer.state.clear()


CHANGES: list[Callable[[Any], None]] = [
    safe_set, safe_set_moment, safe_set_local, gathered, assigned, optimizer_loads, forgotten
]  # fmt: skip
WAYS = [(3, ""), (2, "optimizer on cpu")]


@in_turn(
    "change, stage, way",
    [(change, *WAYS[at % 2]) for at, change in enumerate(CHANGES)],
    long=[(change, *WAYS[1 - at % 2]) for at, change in enumerate(CHANGES)],
)
def test_changes_of_the_state_wait(
    change: Callable[[Any], None],
    stage: int,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, staging = Setup(stage=stage, precision="bf16", way=way), Staging(monkeypatch)

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="blocking")
        engine.save_checkpoint(tmp_path, tag="later", blocking=False)
        change(engine)
        engine.wait_for_checkpoint()

    setup.run(run)
    assert staging.waits
    assert content(tmp_path / "blocking") == content(tmp_path / "later")


@pytest.mark.parametrize("then", ["load", "save", "destroy", "wait"])
def test_what_follows_waits_for_the_whole_save(then: str, tmp_path: Path, staging: Staging) -> None:
    staging.go.set()

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        engine = Setup(precision="bf16").open(models[rank])
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="blocking")
        engine.save_checkpoint(tmp_path, tag="later", blocking=False)
        if then == "load":
            engine.load_checkpoint(tmp_path, tag="blocking")
        elif then == "save":
            engine.save_checkpoint(tmp_path, tag="third")
        elif then == "wait":
            engine.wait_for_checkpoint()
        engine.destroy()

    run_ranks(2, run, Setup(precision="bf16").models())
    assert content(tmp_path / "blocking") == content(tmp_path / "later")


def test_a_full_disk_ends_the_waits(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that waits is complete, and raises on all ranks; training goes on."""
    write, writes = file_writer.DirectFile.write, threading.Semaphore(3)

    def full(file: Any, data: memoryview) -> None:
        if not writes.acquire(blocking=False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-file")
        write(file, data)

    def run(engine: Any, rank: int) -> list[float]:
        losses = train(engine, rank, range(1))
        torch.distributed.barrier()
        monkeypatch.setattr(file_writer.DirectFile, "write", full)
        torch.distributed.barrier()
        engine.save_checkpoint(tmp_path, tag="full", blocking=False)
        told = 0
        for step in range(1, 4):
            try:
                losses += train(engine, rank, range(step, step + 1))
            except CheckpointError as error:
                assert "disk is full" in str(error) and "Nothing was saved" in str(error)
                told += 1
        if not told:
            with pytest.raises(CheckpointError, match="disk is full"):
                engine.wait_for_checkpoint()
        assert engine.global_steps == 4
        return [float(each.sum()) for each in full_weights(engine).values()]

    one, other = Setup().run(run)
    assert one == other and staging.waits and not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["state", "members"])
def test_a_write_past_the_engine_fails_the_save(
    tmp_path: Path, staging: Staging, what: str
) -> None:
    """It is a script's to the optimizer's state or members of its groups; training goes on."""

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="mixed", blocking=False)
        if rank == 1 and what == "state":
            for entry in list(engine.optimizer.state.values())[-1:]:
                entry["exp_avg"].mul_(2)
        elif rank == 1:
            engine.optimizer.param_groups[0]["params"][-1].mul_(2)
        torch.distributed.barrier()
        staging.go.set()
        message = r"rank 1: a script has written to the optimizer's state of .* in place"
        with pytest.raises(CheckpointError, match=message):
            engine.wait_for_checkpoint()
        train(engine, rank, range(1, 2))
        engine.save_checkpoint(tmp_path, tag="whole", blocking=False)
        engine.wait_for_checkpoint()

    Setup().run(run)
    assert run_holds(tmp_path) == ["whole"]


def test_what_a_script_writes_by_itself_is_copied_in_the_call(
    tmp_path: Path, staging: Staging
) -> None:
    """Whole parameters in fp32 and buffers; writes to parameters with master weights wait."""

    def run(rank: int, models: list[torch.nn.Module], setup: Setup, tags: Path) -> None:
        models[rank].register_buffer("seen", torch.zeros(3))
        engine = setup.open(models[rank])
        train(engine, rank, range(1))
        engine.save_checkpoint(tags, tag="blocking")
        engine.save_checkpoint(tags, tag="later", blocking=False)
        models[rank].seen.fill_(9)
        with torch.no_grad():
            for parameter in models[rank].parameters():
                parameter.mul_(3)
        torch.rand(7)
        train(engine, rank, range(1, 2))
        engine.destroy()

    for precision in ("fp32", "bf16"):
        setup = Setup(stage=1, precision=precision, frozen="wpe")
        run_ranks(2, run, setup.models(), setup, tmp_path / precision)
        folder = tmp_path / precision
        assert content(folder / "blocking") == content(folder / "later"), precision


def test_state_in_files_is_copied_in_the_call(tmp_path: Path, staging: Staging) -> None:
    """The memory has all of it then."""
    setup = Setup(stage=3, way="all in files").at(tmp_path)

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="blocking")
        engine.save_checkpoint(tmp_path, tag="later", blocking=False)
        train(engine, rank, range(1, 2))
        staging.go.set()

    setup.run(run)
    assert not staging.waits
    assert content(tmp_path / "blocking") == content(tmp_path / "later")


def test_an_update_in_the_backward_waits(tmp_path: Path, staging: Staging) -> None:
    setup = Setup(precision="bf16")

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        config = {
            **setup.config,
            "gradient_clipping": 0.0,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 3, "update_in_backward": True},
        }
        engine = start(models[rank], setup.optimizer(models[rank]), config)
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="blocking")
        engine.save_checkpoint(tmp_path, tag="later", blocking=False)
        train(engine, rank, range(1, 2))
        engine.destroy()

    run_ranks(2, run, setup.models())
    assert staging.waits
    assert content(tmp_path / "blocking") == content(tmp_path / "later")


def test_a_save_that_fails_before_its_thread_lets_updates_go_on(
    tmp_path: Path, staging: Staging
) -> None:
    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        state_of_rank_0 = {"model": object()} if rank == 0 else {}
        with pytest.raises(CheckpointError, match="client_state"):
            engine.save_checkpoint(tmp_path, client_state=state_of_rank_0, blocking=False)
        train(engine, rank, range(1, 2))

    Setup().run(run)
    assert not staging.waits


def test_a_thread_that_cannot_start_holds_no_update(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "hf-zero save":
            raise RuntimeError("can't start new thread")
        begin(thread)

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                engine.save_checkpoint(tmp_path, blocking=False)
        engine.wait_for_checkpoint()
        background_saves.after_commit(tmp_path, lambda: removed.append("now: no save is under way"))
        train(engine, rank, range(1, 2))

    removed = list[str]()
    Setup(ranks=1).run(run)
    assert removed and not staging.waits


@pytest.mark.parametrize("way", ["", "half on cpu"])
def test_a_save_that_holds_up_the_other_ranks_is_abandoned(
    way: str, tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage takes nothing until the step is over: the save fails, and the step is right."""
    setup, staging.at_first_wait = Setup(way=way), False
    monkeypatch.setattr(staging_module, "WAITED_PART_OF_TIMEOUT", 0.0)

    def plain(engine: Any, rank: int) -> Any:
        return train(engine, rank, range(3)), full_weights(engine)

    def run(engine: Any, rank: int) -> Any:
        losses = train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="slow", blocking=False)
        losses += train(engine, rank, range(1, 2))
        weights = full_weights(engine)  # waits for offloaded updates
        torch.distributed.barrier()
        staging.go.set()
        with pytest.raises(
            CheckpointError, match=r"has waited .*; raise checkpoint\.staging_bytes"
        ):
            engine.wait_for_checkpoint()
        losses += train(engine, rank, range(2, 3))
        weights = full_weights(engine)
        engine.save_checkpoint(tmp_path, tag="whole", blocking=False)
        engine.wait_for_checkpoint()
        return losses, weights

    expected = setup.run(plain)
    for (losses, weights), (found, after) in zip(expected, setup.run(run)):
        assert losses == found and same(weights, after)
    assert staging.waits and run_holds(tmp_path) == ["whole"]


def test_threads_that_wait_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(staging_module, "time", clock)
    waits, seconds = staging_module._Waits(), []
    begin, end = waits.__enter__, waits.__exit__
    for clock.now, change in enumerate([begin, begin, end, end, lambda: None, begin, end]):
        change()
        seconds.append(waits.seconds)
    assert seconds == [0, 1, 2, 3, 3, 3, 4]


def test_a_long_wait_is_reported(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.at_first_wait, told = False, list[str]()
    monkeypatch.setattr(staging_module, "WARN_SECONDS", 0.0)

    def warn(message: str, *values: object) -> None:
        told.append(message % values)
        staging.go.set()

    monkeypatch.setattr(staging_module.logger, "warning", warn)

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, blocking=False)
        train(engine, rank, range(1, 2))

    Setup().run(run)
    assert any("for a save in the background" in each and "staging_bytes" in each for each in told)


def test_what_is_copied_is_dropped_and_the_rest_uses_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that a change frees is free then, and a step may be captured."""
    device, used = torch.device("cuda"), list[torch.device]()
    copy = file_writer.copy_to_memory

    def counted(memory: Any, plan: Any, tensors: Any, on: torch.device, start: int = 0) -> None:
        used.append(on)
        copy(memory, plan, tensors, torch.device("cpu"), start)

    monkeypatch.setattr(staging_module, "copy_to_memory", counted)
    monkeypatch.setattr(staging_module.kinds, "set_device", lambda on: None)
    monkeypatch.setattr(staging_module.streams, "side_stream", lambda on, use: None)
    moment, buffer = torch.arange(PAGE), torch.arange(2 * PAGE)
    plan = plan_file(
        [("moment", moment.dtype, [PAGE]), ("buffer", buffer.dtype, [2 * PAGE])], {}, PAGE
    )
    state = DeferredState("moment", frozenset({"moment"}), (), (moment,))
    memory = file_writer.aligned_buffer(buffer.nbytes + PAGE)
    tensors = {"moment": moment, "buffer": buffer}
    staged = StagedFile(plan, memory, device)
    staged.stage(tensors, (state,))
    end = len(plan.header) + plan.entries[0].end
    content, held = b"", []
    for part in staged.parts():
        content += bytes(part)
        held.append("moment" in staged._tensors)
        assert held[-1] == (len(content) < end)
    at_once = 1
    assert used[: at_once + held.count(True) + 1] == [device] * (at_once + held.count(True) + 1)
    assert used[at_once + held.count(True) + 1 :] == [torch.device("cpu")] * (held.count(False) - 1)
    assert content.endswith(buffer.numpy().tobytes()) and held.count(False) > 1
