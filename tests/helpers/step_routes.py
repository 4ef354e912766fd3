"""Training scripts of each route, under an engine and plain, that call a function at points."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_zero
from hf_zero.integrations.step_points import ROUTES
from tests.helpers.engines import config_of, full_weights
from tests.helpers.plain_process import forget
from tests.helpers.ranks import run_ranks
from tests.helpers.step_accesses import (
    MICROS,
    STEPS,
    ScriptClipping,
    Session,
    batch,
    net,
    schedule,
    sgd,
    squared,
)
from tests.helpers.step_routes_of_trainers import (
    fabric,
    lightning,
    lightning_manual,
    trainer,
)

WORLD = 2
_making = threading.Lock()
At = Callable[[str, int, Session], None]  # of the point, the step and the objects of the script


def _config(stage: int, clip: float) -> dict[str, Any]:
    return config_of(
        stage, gradient_accumulation_steps=MICROS, **({"gradient_clipping": clip} if clip else {})
    )


@contextmanager
def ranks_of_accelerate(world: int) -> Iterator[None]:
    """Context in which ranks that are threads have an Accelerator each, as those of TPUs."""
    from accelerate import state

    kinds = (state.PartialState, state.AcceleratorState, state.GradientState)
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, "_shared_state", state.ThreadLocalSharedDict())
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,
        }  # the group is made: nobody listens
        for name, value in {**variables, **address}.items():
            patch.setenv(name, str(value))
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        yield


def plain_loop(
    model: nn.Module, world: int, clip: float, at: At, names: Any, ticks: int = 1
) -> dict[str, Any]:
    """``ticks``: steps of the schedule in a step."""
    optimizer = sgd(model)
    scheduler = schedule(optimizer)
    session = Session(model, optimizer, model)
    norm = 0.0

    def clip_to(limit: float) -> None:
        nonlocal norm
        grads = [p for p in model.parameters() if p.grad is not None]
        if grads:
            norm = float(nn.utils.clip_grad_norm_(grads, limit))
            session.norm = norm if limit < float("inf") else session.norm

    clipping = ScriptClipping(clip_to, clip or float("inf"))

    def point(name: str) -> None:
        if name in names:
            at(name, step, session)

    session.limit = clipping.set_limit
    for step in range(STEPS):
        point("before forward")
        for micro in range(MICROS):
            losses = [squared(model, batch(step, micro, rank)) for rank in range(world)]
            if micro == 0:
                point("after forward")
            (sum(losses) / world / MICROS).backward()
            session.held += 1
            if micro == 0:
                point("after backward in the window")
                point("after micro-batch")
        point("after the last backward")
        point("after unscale")
        if session.held == MICROS:
            clipping()
            point("after clipping")
            session.norm = norm
            optimizer.step()
            clipping.clipped = False
            point("after step")
            for _ in range(ticks):
                scheduler.step()
            point("after scheduler")
        optimizer.zero_grad()
        session.held = 0
        point("after zero_grad")
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def loop(
    model: nn.Module,
    rank: int,
    stage: int,
    clip: float,
    at: At,
    plain: bool = False,
    of: Any = hf_zero,
) -> Any:
    """``plain``: with ``loss.backward()`` and ``optimizer.step()``; ``of``: the library."""
    optimizer = sgd(model)
    engine, *_ = of.initialize(
        model=model,
        optimizer=optimizer,
        config=_config(stage, clip),
        lr_scheduler=schedule(optimizer),
    )
    session = Session(model, optimizer, engine, engine)
    session.limit = lambda limit: setattr(engine, "max_norm", limit)
    for step in range(STEPS):
        at("before forward", step, session)
        for micro in range(MICROS):
            loss = squared(engine, batch(step, micro, rank))
            if micro == 0:
                at("after forward", step, session)
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            last = micro == MICROS - 1
            at("after the last backward" if last else "after backward in the window", step, session)
            (optimizer if plain else engine).step()
            at("after scheduler" if last else "after micro-batch", step, session)
        optimizer.zero_grad()
        at("after zero_grad", step, session)
    weights = full_weights(engine)
    engine.destroy()
    return weights


def accelerate(model: nn.Module, rank: int, stage: int, clip: float, at: At) -> Any:
    """The script names the limit; without ``clip`` it does not clip."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    config = {**_config(stage, 0.0), "gradient_clipping": "auto" if clip else 0.0}
    with _making:  # it changes the environment of the process for a while
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=MICROS,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        )
    optimizer = sgd(model)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
    session = Session(model, optimizer, engine, engine)
    clipping = ScriptClipping(
        lambda limit: accelerator.clip_grad_norm_(engine.parameters(), limit), clip
    )
    session.limit = clipping.set_limit
    for step in range(STEPS):
        at("before forward", step, session)
        for micro in range(MICROS):
            last = micro == MICROS - 1
            with accelerator.accumulate(engine):
                loss = squared(engine, batch(step, micro, rank))
                if micro == 0:
                    at("after forward", step, session)
                accelerator.backward(loss)
                place = "after the last backward" if last else "after backward in the window"
                at(place, step, session)
                if accelerator.sync_gradients:
                    accelerator.unscale_gradients()
                    at("after unscale", step, session)
                    clipping()
                    at("after clipping", step, session)
                optimizer.step()
                clipping.clipped = False
                at("after step" if last else "after micro-batch", step, session)
                scheduler.step()
                if last:
                    at("after scheduler", step, session)
                optimizer.zero_grad()
        at("after zero_grad", step, session)
    weights = full_weights(engine)
    accelerator.free_memory()
    return weights


def _with_deepspeed(model: nn.Module, rank: int, stage: int, clip: float, at: At) -> Any:
    import deepspeed

    return loop(model, rank, stage, clip, at, of=deepspeed)


def _plainly(model: nn.Module, rank: int, stage: int, clip: float, at: At) -> Any:
    return loop(model, rank, stage, clip, at, plain=True)


SCRIPTS: dict[str, Callable[..., dict[str, Any]]] = {
    "loop": loop,
    "plain loop": _plainly,
    "deepspeed": _with_deepspeed,
    "accelerate": accelerate,
}
TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "trainer": trainer,
    "lightning": lightning,
    "lightning manual": lightning_manual,
    "fabric": fabric,
}


@contextmanager
def _as_a_plain_process() -> Iterator[None]:
    before = dict(os.environ)
    forget()
    try:
        yield
    finally:
        forget()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)


def under_engine(route: str, stage: int, clip: float, at: At) -> dict[str, Any]:
    """Return the weights of rank 0 after the script of ``route``: loops run on two ranks that are
    threads, trainers on one.
    """
    if route in TRAININGS:
        with _as_a_plain_process():
            return TRAININGS[route](stage, clip, at)
    models = [net() for _ in range(WORLD)]
    threads = ranks_of_accelerate(WORLD) if route == "accelerate" else nullcontext()

    def trained(rank: int) -> dict[str, Any]:
        return SCRIPTS[route](models[rank], rank, stage, clip, at)

    with threads:
        return run_ranks(WORLD, trained, timeout=60.0)[0]  # type: ignore[no-any-return]


def alone(route: str, clip: float, at: At) -> dict[str, Any]:
    """Return the weights after the same script in plain torch, over the rows of all ranks."""
    if route in TRAININGS:
        with _as_a_plain_process():
            return TRAININGS[route](None, clip, at)
    ticks = WORLD if route == "accelerate" else 1  # its schedules step once for each process
    return plain_loop(net(), WORLD, clip, at, ROUTES[route].points, ticks)
