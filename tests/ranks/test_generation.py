"""Generation on several ranks: the tokens of one process, and what is gathered for them."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import ReleasedParameterError
from hf_zero.integrations.transformers import generation
from hf_zero.zero.gather.schedule import Schedule
from tests.helpers import tensor_parallel as split
from tests.helpers.caches import cache_argument
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.training import adamw, plain_sgd
from tests.parallel import expert_cases

RANKS = 2
NEW = 5
PROMPTS = torch.tensor([[5, 6, 7], [9, 4, 8]])  # a row for each rank


def asked(rank, **more):
    prompt = PROMPTS[rank : rank + 1]
    fixed = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    return {"inputs": prompt, **fixed, **more}


def built(architecture="gpt2"):
    return ARCHITECTURES[architecture].build().eval()


def plainly(architecture="gpt2", lengths=(NEW, NEW), **more):
    model = built(architecture)
    return [
        model.generate(**asked(rank, max_new_tokens=length, **more))
        for rank, length in enumerate(lengths)
    ]


def limited(limit):
    return config_of(3, zero_optimization={"stage": 3, "stage3_max_live_parameters": limit})


def gathers(engine):
    return engine.mesh.stats.counts["all_gather"]


def test_the_model_is_gathered_once_where_it_fits():
    architecture, more = "t5", {"num_beams": 2}
    want = plainly(architecture, **more)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        before = gathers(engine)
        made = engine.generate(**asked(rank, max_new_tokens=NEW, **more))  # through the engine
        assert gathers(engine) - before == len(engine.units)
        with pytest.raises(ReleasedParameterError):
            next(model.parameters()).sum()
        assert torch.equal(made, want[rank])

    on_ranks(RANKS, run, build=lambda: built(architecture))


WHOLE = {"stage": 3, "stage3_param_persistence_threshold": 1_000_000}


@in_turn("where", ["all fits", "little fits", "all is whole"])
def test_ranks_may_generate_different_numbers_of_tokens(where, monkeypatch):
    """Without room each token gathers each unit once."""
    lengths = (1, 6)
    want = plainly(lengths=lengths)
    config = {
        "all fits": config_of(3),
        "little fits": limited(1),
        "all is whole": config_of(3, zero_optimization=WHOLE),
    }[where]
    if where == "all is whole":  # transformers alone would keep the ranks in step at stage 3
        name = "transformers.generation.utils.is_deepspeed_zero3_enabled"
        monkeypatch.setattr(name, lambda: True)

    def run(rank, model):
        engine, forwards = start(model, adamw(model), config), []
        model.register_forward_hook(lambda *_: forwards.append(1))
        before = gathers(engine)
        for _ in range(2):  # recorded, then by the recorded order
            made = engine.module.generate(**asked(rank, max_new_tokens=lengths[rank]))
            assert torch.equal(made, want[rank])
        if where != "little fits":
            assert len(forwards) == 2 * lengths[rank]
        return (gathers(engine) - before) / 2 / len(engine.units)

    one, other = on_ranks(RANKS, run, build=built)
    assert one == other
    if where == "little fits":
        assert 1 < one <= max(lengths)
    else:
        assert one == (1 if where == "all fits" else 0)


def test_one_rank_without_room_decides_for_all(monkeypatch):
    free = {0: 1 << 40, 1: 0}
    monkeypatch.setattr(generation, "free_bytes", lambda device: free[dist.get_rank()])
    want = plainly()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        before = gathers(engine)
        assert torch.equal(model.generate(**asked(rank, max_new_tokens=NEW)), want[rank])
        return gathers(engine) - before > len(engine.units)

    assert on_ranks(RANKS, run, build=built) == [True, True]


@in_turn("stage, writeback", [(1, False), (3, True), (3, False)])
def test_what_is_written_inside_is_kept_with_writeback(stage, writeback, heard):
    """Also before an error."""
    del heard[:]

    def write(model):
        model.head.weight.mul_(2.0)
        # another tensor in its place
        model.blocks[0].up.weight.data = torch.ones_like(model.blocks[0].up.weight)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        before = full_weights(engine)["head.weight"]
        if stage == 3:
            with pytest.raises(KeyError), hf_zero.summon_full_params(model, writeback=True):
                model.head.weight.data.add_(1.0)
                raise KeyError("the user's own")
            before = before + 1.0
            assert torch.equal(full_weights(engine)["head.weight"], before)
        with hf_zero.summon_full_params(model, writeback=writeback), torch.no_grad():
            write(model)
        changed = writeback or stage < 3
        with hf_zero.summon_full_params(model):
            expected = before * (2.0 if changed else 1.0)
            assert torch.equal(model.head.weight, expected)
            if writeback:
                assert bool((model.blocks[0].up.weight == 1.0).all())
        if writeback:
            assert torch.equal(hf_zero.safe_get_full_fp32_param(model.head.weight), expected)

    on_ranks(RANKS, run)
    dropped = any("blocks.0.up.weight: written inside" in line for line in heard)
    assert dropped == (stage == 3 and not writeback)


@in_turn("shared, stage", [("experts", 1), ("layers", 3)])
def test_ranks_of_shared_layers_keep_together_until_the_last_has_ended(shared, stage):
    """Two groups of two ranks, one of which generates once more than the other."""
    build, keys = {
        "experts": (split.mixtral, expert_cases.keys(2)),
        "layers": (split.llama, {"tensor_parallel": {"autotp_size": 2}}),
    }[shared]
    # ranks that share layers must generate the same tokens, and as many
    lengths = (1, 6, 3, 2) if shared == "experts" else (6, 6, 3, 3)
    plain, models = [[build().eval() for _ in lengths] for _ in range(2)]
    for model in (*plain, *models):
        model.load_state_dict(plain[0].state_dict())
    prompts = [rank if shared == "experts" else rank // 2 for rank in range(len(lengths))]
    row = [asked(prompt % RANKS, max_new_tokens=length) for prompt, length in zip(prompts, lengths)]
    want = [model.generate(**each) for model, each in zip(plain, row)]

    def run(rank):
        engine = start(models[rank], plain_sgd(models[rank]), config_of(stage, **keys))
        for again in range(2 if rank < 2 or stage == 3 else 1):
            more = {"synced_gpus": False} if again and stage < 3 else {}
            assert torch.equal(engine.generate(**row[rank], **more), want[rank])
        assert "_has_unfinished_sequences" not in vars(models[rank])
        engine.destroy()

    run_ranks(len(lengths), run)


def test_a_forward_with_a_cache_has_an_order_of_gathers_of_its_own(monkeypatch):
    """Under any name of the argument, and as a whole forward where it is None."""
    model = built()
    name, kinds = cache_argument(type(model).forward), []
    engine = start(model, adamw(model), config_of(3))
    begin = Schedule.begin
    monkeypatch.setattr(
        Schedule, "begin", lambda self, kind, *more, **named: (
            kinds.append(kind), begin(self, kind, *more, **named)
        )[1],
    )  # fmt: skip
    with torch.no_grad():
        cache = engine.module(PROMPTS, **{name: None}, use_cache=True)[name]
        engine.module(PROMPTS[:, :1], **{name: cache})
    assert [kind[3:] for kind in kinds] == [(), (name,)]
    engine.destroy()
