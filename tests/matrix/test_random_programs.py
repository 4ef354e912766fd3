"""Random programs of parallel training, random lives of training state and random training loops,
against one process.

Programs: model types of transformers on ranks that share layers, sequences, experts or nothing, at
every stage, with padding, packing and clipping. Each trains, evaluates, generates, is saved, goes
back, and goes on in engines of other worlds, stages and accumulation. ``HF_ZERO_SEEDS=N`` runs that
many.
"""

import os
from itertools import product

from tests.helpers import random_loops, random_scripts
from tests.helpers.cells import runs_long
from tests.helpers.random_programs import ACTS, Mesh, Program, check, kinds, runnable
from tests.helpers.random_states import ACTS as ACTS_ON_STATE
from tests.helpers.random_states import OPTIMIZERS, Act, Life, fails, shrunk
from tests.helpers.ranks import RanksHung

ALL = 400
LIVES, FAST_LIVES = 2000, 12
LOOPS, FAST_LOOPS = 300, (0, 2, 3, 4, 5)
# sequences, layers, layers of experts, sequences and experts on several ranks: the meshes of a
# seed's engines, of which rounding alone decides nothing
FAST = {
    3: [Mesh(sequence=2, data=2), Mesh(tensor=2, data=2)],
    13: [Mesh(data=4), Mesh(data=2), Mesh(data=2)],
    95: [Mesh(2, 2, 2), Mesh(2, 2), Mesh(expert=4, data=4)],
}
# those of which causal_zoo.py makes no small model: layers that share weights, odd factors
NOT_BUILT = {"reformer", "zamba", "zamba2"}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        count = int(os.environ.get("HF_ZERO_SEEDS", ALL if runs_long(metafunc.config) else 0))
        metafunc.parametrize("seed", range(count) if count else FAST)
    if "tenth" in metafunc.fixturenames:
        count = int(os.environ.get("HF_ZERO_SEEDS", LIVES if runs_long(metafunc.config) else 0))
        metafunc.parametrize("tenth", range(-(-(count or FAST_LIVES) // 10)))
    if "loop" in metafunc.fixturenames:
        count = int(os.environ.get("HF_ZERO_SEEDS", LOOPS if runs_long(metafunc.config) else 0))
        metafunc.parametrize("loop", range(count) if count else FAST_LOOPS)


def test_as_in_one_process(seed, tmp_path):
    program = Program.drawn(seed)
    found = runnable(program)
    if found is None:
        assert program.kind in NOT_BUILT, f"{program.kind} cannot be built tiny: causal_zoo.py"
        return
    try:
        meshes, rounded = check(*found, tmp_path)
    except RanksHung:
        raise
    except AssertionError as error:
        again = f"HF_ZERO_SEEDS={seed + 1} python -m pytest -n 0 -k 'process[{seed}]' {__file__}"
        raise AssertionError(f"{again}\n{found[0]!r}\n{error}") from error
    assert seed not in FAST or (meshes == FAST[seed] and not rounded), (meshes, rounded)


def test_seeds_draw_every_model_type_and_every_act():
    programs = [Program.drawn(seed) for seed in range(ALL)]
    assert len(kinds()) <= ALL and {program.kind for program in programs} == set(kinds())
    assert set(kinds()) >= NOT_BUILT
    for some in (programs, [programs[seed] for seed in FAST]):
        assert {act.do for program in some for act in program.life} == set(ACTS)


def test_state_as_in_one_process(tenth):
    """Ten lives of a small model: written, frozen, loaded from its own dicts, saved, resumed."""
    for seed in range(10 * tenth, 10 * tenth + 10):
        life = Life.drawn(seed)
        if fails(life):
            shorter = shrunk(life)
            raise AssertionError(f"Life.drawn({seed})\n{fails(shorter)}\n{shorter!r}")


def test_lives_draw_every_optimizer_and_every_act():
    lives = [Life.drawn(seed) for seed in range(10 * -(-FAST_LIVES // 10))]
    assert {life.optimizer for life in lives} == set(OPTIMIZERS)
    assert {act.do for life in lives for act in life.acts} == set(ACTS_ON_STATE)
    # an update in the backward, which clipping puts off, and experts that steps leave out, with all
    kinds = [(life.in_backward and not life.clip, life.experts > 0) for life in lives]
    assert {one for kind in kinds for one in enumerate(kind)} == {*product((0, 1), (False, True))}


def test_loops_as_in_plain_torch(loop):
    """The script of a user, with reads and writes at all points of a step."""
    drawn = random_scripts.Loop.drawn(loop)
    if error := random_loops.fails(drawn):
        shorter = random_loops.shrunk(drawn)
        raise AssertionError(f"Loop.drawn({loop})\n{error}\n{shorter!r}")


def test_loops_draw_every_optimizer_event_and_window():
    loops = [random_scripts.Loop.drawn(seed) for seed in range(LOOPS)]
    windows = [window for loop in loops for part in loop.lives for window in part.windows]
    assert {loop.optimizer for loop in loops} == set(random_scripts.OPTIMIZERS)
    assert {window.kind for window in windows} == set(random_scripts.WINDOWS)
    events = {event.do for window in windows for event in window.events}
    assert events == set(random_scripts.EVENTS)


def test_a_loop_with_other_gradients_differs(monkeypatch):
    """The comparison finds gradients that are not divided by the micro-batches."""
    plain = random_scripts.Window()
    part = random_scripts.Part(2, 1, "device", 2, (), (plain, plain))
    loop = random_scripts.Loop(0, frozenset(), 9, "SGD", "one", "none", 0.0, "fp32", (part,))
    assert not random_loops.fails(loop)
    monkeypatch.setattr(random_loops.Plain, "divisor", 1)
    assert random_loops.fails(loop).startswith("DIFFERS")


def test_a_load_from_before_the_first_step_begins_offloaded_state_anew():
    """A random life, shrunk: the step counts of parameters beside an unused one went on."""
    first = Act("start", world=2, stage=3, place="optimizer on cpu")
    acts = (first, *map(Act, ("save", "step", "load", "step")))
    assert not fails(Life(0, "AdamW", (64,), True, False, 0.0, "", acts))
