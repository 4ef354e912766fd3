"""The estimate of each tier equals what a living engine holds there."""

from __future__ import annotations

import gc

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.planning.needs import NamedBytes, needs
from hf_zero.zero.layout import materialize
from tests.helpers.cells import fast
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, adamw

LLAMA = ARCHITECTURES["llama"]
RANKS = 2
STATE = {
    "parameters",
    "gradients",
    "master weights and moments",
    "pieces between files and the update",
    "shards between files and the device",
}


def total(parts: tuple[NamedBytes, ...]) -> int:
    return sum(part.nbytes for part in parts if part.what in STATE)


def held(rank, models, config):
    model = models[rank]
    engine = start(model, adamw(model), config)
    for step in range(2):
        engine.backward(engine(**LLAMA.batch(step, 0, rank)).loss)
        engine.step()
    if engine.updater.units:
        engine.updater.finish()
    found = engine.bytes_by_tier()
    assert sum(engine.state_bytes().values()) <= sum(found.values())
    engine.destroy()
    return found


CELLS = [
    (way, stage, precision, "fp32")
    for way in WAYS
    for stage in stages_of(way)
    for precision in ("fp32", "bf16")
]
CELLS += [("optimizer on cpu", 2, "bf16", moments) for moments in ("bf16", "int8")] + [
    ("all in files", 3, "bf16", "int8")
]


@pytest.mark.parametrize(
    "way, stage, precision, moments",
    fast(CELLS, lambda way, stage, precision, moments: precision == "bf16" or stage == 3),
)
def test_tiers_hold_what_was_estimated(way, stage, precision, moments, tmp_path):
    plan = Plan(ranks=RANKS, precision=precision, clip=1.0)
    config = config_of(
        stage, plan, zero_optimization=offload(way, stage, tmp_path, moments=moments)
    )
    models = [LLAMA.build() for _ in range(RANKS)]
    wanted = ZeroConfig.from_dict(config).resolve(RANKS)
    said = needs(planned(models[0], wanted, RANKS))
    found = run_ranks(RANKS, held, models, config)[0]
    for tier, estimated in (
        ("device", total(said.device)),
        ("ram", total(said.ram)),
        ("disk", total(said.disk)),
    ):
        assert found[tier] == pytest.approx(estimated, rel=0.1), tier


@on_each_rank(1)
def test_memory_goes_back_with_the_engine_though_the_optimizer_stays(rank, model, tmp_path):
    optimizer = adamw(model)
    engine = start(
        model, optimizer, config_of(2, zero_optimization=offload("optimizer on cpu", 2, tmp_path))
    )
    engine.backward(squared(engine, At(0, 0, rank)))
    engine.step()
    arenas = list(engine.sharded_model.placement._arenas.values())
    assert sum(arena.nbytes for arena in arenas) > 4 * 4 * sum(
        p.numel() for p in model.parameters()
    )
    engine.destroy()
    gc.collect()
    assert sum(arena.nbytes for arena in arenas) == 0
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert given == [id(p) for p in model.parameters()]  # and none of its segments


@pytest.mark.parametrize("way", ["none", "optimizer on cpu", "all in files"])
def test_memory_of_the_model_goes_back_unit_by_unit_where_the_host_needs_it(
    way, tmp_path, monkeypatch
):
    called = []
    monkeypatch.setattr(materialize, "release_freed", lambda: called.append(1))

    def run(rank, model):
        engine = start(
            model,
            adamw(model),
            config_of(
                3, zero_optimization=offload(way, 3, tmp_path) if way != "none" else {"stage": 3}
            ),
        )
        assert len(called) == (0 if way == "none" else len(engine.units))
        engine.destroy()

    on_ranks(1, run)
