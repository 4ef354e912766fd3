"""Random programs of parallel training against one process: model types of transformers on ranks
that share layers, sequences, experts or nothing, at every stage, with padding, packing and
clipping. Each trains, evaluates, generates, is saved, goes back, and goes on in engines of other
worlds, stages and accumulation. ``HF_ZERO_SEEDS=N`` runs that many.
"""

import os

from hf_zero.engine import Engine
from tests.helpers.cells import runs_long
from tests.helpers.random_programs import (
    ACTS,
    Act,
    Mesh,
    Program,
    check,
    kinds,
    runnable,
)
from tests.helpers.ranks import RanksHung
from tests.helpers.shrinking import shrunk, story

FAST, ALL = 10, 400
# those of which causal_zoo.py makes no small model: layers that share weights, odd factors
NOT_BUILT = {"reformer", "zamba", "zamba2"}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        usual = ALL if runs_long(metafunc.config) else FAST
        metafunc.parametrize("seed", range(int(os.environ.get("HF_ZERO_SEEDS", usual))))


def test_as_in_one_process(seed, tmp_path):
    program = Program.drawn(seed)
    found = runnable(program)
    if found is None:
        assert program.kind in NOT_BUILT, f"{program.kind} cannot be built tiny: causal_zoo.py"
        return
    try:
        check(*found, tmp_path)
    except RanksHung:
        raise
    except AssertionError as error:
        raise AssertionError(story(found[0])) from error


def test_seeds_draw_every_model_type_and_every_act():
    programs = [Program.drawn(seed) for seed in range(ALL)]
    assert len(kinds()) <= ALL and {program.kind for program in programs} == set(kinds())
    assert set(kinds()) >= NOT_BUILT
    for some in (programs, programs[:FAST]):
        assert {act.do for program in some for act in program.life} == set(ACTS)


def test_a_failing_program_is_shrunk_to_what_it_takes(monkeypatch):
    """The seeded fault: after a load at stage 2 the norm is wrong."""
    norm, load = Engine.get_global_grad_norm, Engine.load_checkpoint

    def marked(engine, *args, **kwargs):
        engine.module.loaded = True
        return load(engine, *args, **kwargs)

    def wrong(engine):
        faulty = getattr(engine.module, "loaded", False) and engine.stage == 2
        return norm(engine) * (1.01 if faulty else 1.0)

    monkeypatch.setattr(Engine, "load_checkpoint", marked)
    monkeypatch.setattr(Engine, "get_global_grad_norm", wrong)
    acts = ("start", "step", "save", "abandon", "step", "evaluate")
    life, meshes = tuple(Act(do, 2) for do in acts), (Mesh(data=2), Mesh(data=4))
    small, text = shrunk(Program(1000, "llama", meshes, "padded left", 0.5, True, False, life))
    life = tuple(Act(do, 2) for do in ("start", "save", "abandon", "step"))
    assert small == Program(1000, "llama", meshes[:1], "plain", 0.0, False, False, life)
    assert "act 3: step" in text
    monkeypatch.setattr("tests.helpers.shrinking.shrunk", lambda program: (small, text))
    said = story(small)
    assert "HF_ZERO_SEEDS=1001 python -m pytest" in said and repr(small) in said
