"""Random programs of parallel training against one process: model types of transformers on ranks
that share layers, sequences, experts or nothing, at every stage, with padding, packing and
clipping. Each trains, evaluates, generates, is saved, goes back, and goes on in engines of other
worlds, stages and accumulation. ``HF_ZERO_SEEDS=N`` runs that many.
"""

import os

from tests.helpers.cells import runs_long
from tests.helpers.random_programs import ACTS, Program, check, kinds, runnable
from tests.helpers.ranks import RanksHung

ALL = 400
# sequences, layers, layers of experts, sequences and experts on several ranks
FAST = (3, 6, 13, 95)
# those of which causal_zoo.py makes no small model: layers that share weights, odd factors
NOT_BUILT = {"reformer", "zamba", "zamba2"}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        count = int(os.environ.get("HF_ZERO_SEEDS", ALL if runs_long(metafunc.config) else 0))
        metafunc.parametrize("seed", range(count) if count else FAST)


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
        again = f"HF_ZERO_SEEDS={seed + 1} python -m pytest -n 0 -k 'process[{seed}]' {__file__}"
        raise AssertionError(f"{again}\n{found[0]!r}\n{error}") from error


def test_seeds_draw_every_model_type_and_every_act():
    programs = [Program.drawn(seed) for seed in range(ALL)]
    assert len(kinds()) <= ALL and {program.kind for program in programs} == set(kinds())
    assert set(kinds()) >= NOT_BUILT
    for some in (programs, [programs[seed] for seed in FAST]):
        assert {act.do for program in some for act in program.life} == set(ACTS)
