"""Collectives in few bits: what ranks that are threads compute is what the equations of
helpers/compressed.py give on whole vectors, and what travels is what they say.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from tests.helpers.cells import in_turn
from tests.helpers.compressed import (
    GRADIENTS,
    by_owner,
    check_gradients,
    compressible,
    config,
    sent_bytes,
    trained,
)
from tests.helpers.engines import start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw


@in_turn(
    ("stage", "ranks", "plan", "block"),
    [
        (1, 2, Plan(), None),
        (1, 3, Plan(accumulation=2, precision="bf16"), 64),
        (2, 2, Plan(accumulation=2, clip=0.1), 64),
        (3, 2, Plan(precision="fp16", scale=16.0), 256),
        (3, 3, Plan(), 32),
        (2, 1, Plan(), 256),
    ],
)
def test_gradients_are_those_of_the_equations(stage, ranks, plan, block):
    """Bit for bit, from what autograd has left on each rank."""
    more = {"compressed_communication": {"block_size": block}}
    answers = on_ranks(ranks, trained, stage, plan, GRADIENTS, more)
    check_gradients(answers, stage, plan, block)


@in_turn(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_bytes_of_every_message(stage, precision, monkeypatch):
    """At the process group: four bits an element and a scale of 16 for each 64."""
    sent, plan, world = sent_bytes(monkeypatch), Plan(precision=precision), 2

    def run(rank, model):
        engine = start(model, adamw(model), config(stage, plan, GRADIENTS))
        sent.clear()
        dist.barrier()
        stats = engine.mesh.stats
        stats.keep_log = True
        run_steps(engine, rank, [0])
        return [(flat.layout, flat.dtype) for flat in engine.flats], list(stats.log)

    answers = on_ranks(world, run, build=lambda: seeded(lambda: Stack(3, 64)))
    flats, log = answers[0]
    chosen = [layout for layout, _ in flats if compressible(layout)]
    wanted = sorted(
        world * (-(-layout.chunk // 32) * 16 + -(-2 * -(-layout.chunk // 64) // 16) * 16)
        for layout in chosen
    )
    for rank in range(world):
        found = sorted(size for name, size in sent[rank] if name == "all_to_all_single")
        assert found == wanted
    counted = sum(size for operation, _, size in log if operation == "reduce_scatter")
    scattered = sum(size for name, size in sent[0] if name.startswith("reduce_scatter"))
    assert counted == sum(wanted) + scattered
    dense = sum(layout.padded * dtype.itemsize for layout, dtype in flats if layout in chosen)
    assert sum(wanted) <= dense * (0.27 if precision == "bf16" else 0.135)


WEIGHTS = {"zero_quantized_weights": True}


def as_gathered(flat, values, block=None):
    """Return the values that ranks compute with after ``values`` [padded] are sent in 8 bits."""
    rounded = by_owner(values.float(), flat.layout.shards, 8, block)
    return rounded.to(flat.dtype) if compressible(flat.layout, block) else values


@in_turn(("ranks", "precision"), [(2, "fp32"), (3, "bf16")])
@on_each_rank("ranks")
def test_weights_are_gathered_in_8_bits_and_kept_as_they_are(rank, model, precision):
    """Every rank, the owner too, computes with C(w); masters, ``safe_get_*`` and whole state dicts
    have full precision; a script that gathers gets the shards as they are.
    """
    plan = Plan(precision=precision)
    engine = start(model, adamw(model), config(3, plan, WEIGHTS))
    flats = {name: flat for flat in engine.flats for name in flat.layout.by_name}
    used: dict[str, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda module, args: used.update({module.weight_name: module.weight.clone()})
            )
    for name, module in model.named_modules():
        module.weight_name = f"{name}.weight"
    for number in range(3):
        shards = {flat: flat.whole_from_shards() for flat in engine.flats}
        engine.backward(squared(engine, At(number, 0, rank), plan.dtype))
        for name, weight in used.items():
            flat = flats[name]
            slot = flat.layout.by_name[name]
            want = as_gathered(flat, shards[flat])[slot.offset : slot.end]
            assert torch.equal(weight.reshape(-1), want), (number, name)
        engine.step()
    rounded = [flat for flat in engine.flats if compressible(flat.layout)]
    assert rounded and len(rounded) < len(engine.flats)
    for flat in rounded:
        whole = flat.whole_from_shards()
        assert not torch.equal(as_gathered(flat, whole), whole)
        for name, slot in flat.layout.by_name.items():
            exact, parameter = whole[slot.offset : slot.end], flat.parameters[name]
            with hf_zero.GatheredParameters([parameter]):
                assert torch.equal(parameter.detach().reshape(-1), exact)
            full = hf_zero.safe_get_full_fp32_param(parameter)
            assert torch.equal(full.reshape(-1).to(flat.dtype), exact)
    for name, value in engine.module.state_dict().items():
        slot, flat = flats[name].layout.by_name[name], flats[name]
        assert torch.equal(value.reshape(-1), flat.whole_from_shards()[slot.offset : slot.end])


@on_each_rank(2)
def test_a_write_inside_gathered_parameters_keeps_the_rest_exact(rank, model):
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    run_steps(engine, rank, [0])
    weight = model.blocks[0].up.weight
    before = hf_zero.safe_get_full_fp32_param(weight).clone()
    engine.eval()
    with torch.no_grad():  # leaves units whole, in 8 bits
        squared(engine, At(1, 0, rank))
    with hf_zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[0, 0] = 3.0
    engine.train()
    loss = squared(engine, At(1, 0, rank))  # the last block stays from here to its backward
    last = model.blocks[2].up.weight
    exact = hf_zero.safe_get_full_fp32_param(last)
    with hf_zero.GatheredParameters([last]):
        assert torch.equal(last, exact)
    engine.backward(loss)
    after = hf_zero.safe_get_full_fp32_param(weight)
    before[0, 0] = 3.0
    assert torch.equal(before, after)


@on_each_rank(2)
def test_a_script_gathers_once(rank, model):
    """The gather sends the exact values, without one in few bits before it."""
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    weight, stats = model.blocks[0].up.weight, engine.mesh.stats
    for _ in range(2):
        stats.counts.clear()
        with hf_zero.GatheredParameters([weight]):
            assert stats.counts["all_gather"] == 1


FOUR = {"compressed_communication": {"bits": 4}}


@in_turn(
    ("stage", "ranks", "plan"),
    [
        (1, 2, Plan(accumulation=2)),
        (2, 3, Plan(precision="bf16")),
        (2, 2, Plan(precision="fp16", scale=16.0, clip=0.05)),
    ],
)
def test_updates_are_differences_to_what_all_ranks_have(stage, ranks, plan):
    """xh = round(xh + C(x - xh)) bit for bit on every rank, from the masters of each step; what is
    lost once is in the next difference.
    """

    def run(rank, model):
        engine = start(model, adamw(model), config(stage, plan, **FOUR))
        steps = []
        for number in range(4):
            before = {flat.key: flat.full.clone() for flat in engine.flats}
            for micro in range(plan.accumulation):
                engine.backward(squared(engine, At(number, micro, rank), plan.dtype))
                engine.step()
            masters = {flat.key: flat.optimizer_shard.master.clone() for flat in engine.flats}
            after = {flat.key: flat.full.clone() for flat in engine.flats}
            steps.append((before, masters, after))
        return [(flat.key, flat.layout, flat.dtype) for flat in engine.flats], steps

    answers = on_ranks(ranks, run)
    flats, steps = answers[0]
    moved = 0
    for number, (before, _, after) in enumerate(steps):
        for key, layout, dtype in flats:
            for _, others in answers[1:]:
                assert torch.equal(after[key], others[number][2][key]), (number, key)
            x = torch.cat([other[number][1][key] for _, other in answers])
            xh = before[key].float()
            if compressible(layout):
                want = (xh + by_owner(x - xh, ranks, 4)).to(dtype)
                moved += int((after[key] != x.to(dtype)).sum())
                assert float((after[key].float() - x).norm()) < 0.05 * float(x.norm())
            else:
                want = x.to(dtype)
            assert torch.equal(after[key], want), (number, key)
    assert moved


def test_parameters_approach_their_masters_where_nothing_moves():
    """With a learning rate of 0 the differences that are left go down the wire, step by step."""

    def run(rank, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = start(model, optimizer, config(2, Plan(), **FOUR))
        left = []
        for number in range(6):
            optimizer.param_groups[0]["lr"] = 0.5 if number == 0 else 0.0
            run_steps(engine, rank, [number])
            flats = [flat for flat in engine.flats if flat.spec.sends_differences]
            left.append(
                sum(float((flat.shard - flat.optimizer_shard.master).norm()) for flat in flats)
            )
        return left

    for left in on_ranks(2, run):
        assert left[0] > 0 and left[-1] < left[0] * 1e-3


@on_each_rank(3)
def test_a_unit_that_is_fetched_has_the_values_of_a_gather(rank, model):
    """A rank that needs a unit out of order takes the shards of others as they are, and makes of
    them what a gather gives.
    """
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    unit = engine.units[1]
    unit.launch_gather()
    unit.finish_gather()
    gathered = [flat.full.clone() for flat in unit.sharded]
    unit.release()
    chunks = engine.mesh.all_gather_object(unit.chunk_bytes())
    unit.fill({shard: data for shard, data in enumerate(chunks) if shard != rank})
    assert all(torch.equal(flat.full, full) for flat, full in zip(unit.sharded, gathered))
    unit.release()
    assert any(flat.spec.gather_codec is not None for flat in unit.sharded)


@on_each_rank(2)
def test_a_unit_that_is_pinned_across_a_step_is_exact(rank, model):
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    with engine.gathered(engine.units[1]):
        run_steps(engine, rank, [0])
        for flat in engine.units[1].sharded:
            assert torch.equal(flat.full, flat.whole_from_shards())


@in_turn("precision, file", [("fp32", "model.safetensors"), ("bf16", "pytorch_model.bin")])
def test_whole_weights_are_written_of_the_masters(precision, file, tmp_path):
    """The weights that all ranks compute with lag behind the masters by the differences still to be
    sent.
    """
    plan = Plan(precision=precision)

    def run(rank, model):
        engine = start(model, adamw(model), config(2, plan, **FOUR))
        run_steps(engine, rank, range(2))
        engine.save_16bit_model(str(tmp_path), file)
        fp32 = engine.consolidated(torch.float32)
        masters = {name: value.to(plan.dtype) for name, value in fp32}
        lagging = {name: value.detach().clone() for name, value in model.named_parameters()}
        return masters, lagging, engine.state_dict(rank0_only=True)

    masters, lagging, whole = on_ranks(2, run)[0]
    path = tmp_path / file
    written = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    for found in (written, whole):
        assert all(torch.equal(value, found[name]) for name, value in masters.items())
    assert any(not torch.equal(value, lagging[name]) for name, value in masters.items())
