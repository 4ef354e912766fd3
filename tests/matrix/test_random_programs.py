"""Random programs of parallel training against one process: model types of transformers on ranks
that share layers, sequences, experts or nothing, at every stage, with padding, packing,
accumulation, clipping, evaluation, generation, and a checkpoint that another mesh goes on from.
"""

import pytest

from tests.helpers.random_programs import STEPS, Program, kinds, on_ranks, runnable

FAST, ALL = 10, 400
# those of which causal_zoo.py makes no small model: layers that share weights, odd factors
NOT_BUILT = {"reformer", "zamba", "zamba2"}
LOSS, NORM, WEIGHTS = 2e-4, 2e-3, 5e-3  # relative; weights: of what the training has changed


def _compare(program, part, mesh, ranks, want):
    first, last = part * STEPS, (part + 1) * STEPS
    for rank, found in enumerate(ranks):
        reader = rank // (mesh.tensor * mesh.sequence)
        for at, step in enumerate(range(first, last)):
            where = f"rank {rank} of {mesh}, step {step}"
            losses = want.losses[step][reader :: mesh.data]
            assert found.losses[at] == pytest.approx(losses, rel=LOSS), where
            assert found.norms[at] == pytest.approx(want.norms[step], rel=NORM), where
            if program.evaluates:
                evaluated = [want.evaluated[step][reader]]
                assert found.evaluated[at] == pytest.approx(evaluated, rel=LOSS), where
        if found.generated:
            assert found.generated[0] == [want.generated[0][reader]], f"rank {rank} of {mesh}"


def _compare_weights(program, got, want):
    start = program.model().state_dict()
    changes = {
        name: float((want.weights[name].float() - start[name].float()).norm()) for name in start
    }
    total = sum(change**2 for change in changes.values()) ** 0.5
    for name, change in changes.items():
        error = float((got.weights[name].float() - want.weights[name].float()).norm())
        assert error <= WEIGHTS * change + 1e-3 * WEIGHTS * total + 1e-6, (name, error, change)


@pytest.mark.parametrize(
    "seed",
    [seed if seed < FAST else pytest.param(seed, marks=pytest.mark.long) for seed in range(ALL)],
)
def test_as_in_one_process(seed, tmp_path):
    program = Program.drawn(seed)
    found = runnable(program)
    if found is None:
        assert program.kind in NOT_BUILT, f"{program.kind} cannot be built tiny: causal_zoo.py"
        return
    program, want = found
    done, _ = on_ranks(program, tmp_path)
    for part, (mesh, ranks) in enumerate(done):
        _compare(program, part, mesh, ranks, want)
    for record in done[1][1]:
        if record.weights:
            _compare_weights(program, record, want)


def test_every_model_type_has_its_seed():
    assert len(kinds()) <= ALL and {Program.drawn(seed).kind for seed in range(ALL)} == set(kinds())
    assert set(kinds()) >= NOT_BUILT
