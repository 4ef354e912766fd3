"""The engine's features over real gloo processes: ways to call a model and a slice of the matrix,
mixtures of experts, experts on several ranks, few bits, messages of several units. One launch runs
many cases inside the same processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.optim import ZeroOneAdam
from tests.helpers import one_bit, oracle
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.engines import STAGES, engine_opener, start, train_on_rank
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import run_steps
from tests.helpers.training import ArchitectureJob, Plan, Trace, merge
from tests.helpers.ways import WAYS
from tests.parallel.expert_cases import spread
from tests.ranks import test_small_blocks as small_blocks
from tests.ranks.test_moe import MODELS, PATTERNS, Flat, Layered, Patterned, Routed

Cell = tuple[Any, int, Plan]  # job, stage, plan

# mixtures of experts: (kind of job, its name)
KINDS = {
    "model": Routed,
    "spread": Routed,  # over the ranks
    "layered": lambda name: Patterned(Layered, name),
    "flat": lambda name: Patterned(Flat, name),
}


def job_of(name):
    if isinstance(name, tuple):
        return KINDS[name[0]](name[1])
    return WAYS[name] if name in WAYS else ArchitectureJob(ARCHITECTURES[name])


def train_cells(rank, cells):
    """Train each cell; a cell that raises gives its error and, as the ranks may now differ, ends
    the list.
    """
    traces: list[Trace | str] = []
    for name, stage, plan in cells:
        say(f"{name} at stage {stage}, {plan}")
        job = job_of(name)
        opener = spread(stage, 2) if name[0] == "spread" else engine_opener(stage)
        try:
            traces.append(train_on_rank(rank, {rank: job.build()}, job, plan, opener))
        except Exception as error:
            traces.append(f"{type(error).__name__}: {error}")
            break
    return traces


def check(ranks, cells):
    answers = run_processes(ranks, train_cells, cells, timeout=600)
    reached = min(len(traces) for traces in answers)
    for index, (name, stage, plan) in enumerate(cells[:reached]):
        traces = [answers[rank][index] for rank in range(ranks)]
        where = f"{name!r} at stage {stage} on {ranks} processes"
        assert not any(isinstance(trace, str) for trace in traces), f"{where} failed: {traces}"
        try:
            oracle.accept(merge(traces), job_of(name), plan, stage)
            if name[0] == "spread":
                want = oracle.kept(job_of(name), plan)
                oracle.compare(merge(traces), want, weight_floor=oracle.ROUNDING)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
    assert reached == len(cells), f"only {reached} of {len(cells)} cells ran"


def plan_of(ranks, **more):
    return Plan(**{"ranks": ranks, "steps": 3, "accumulation": 2, **more})


def test_architectures_and_some_ways_on_two_processes():
    """An architecture at each stage; stages 1 and 3 in 16 bits; some ways, at stages 1 and 3 in
    turn. Threads run all of them.
    """
    plan = plan_of(2)
    cells: list[Cell] = [(name, stage, plan) for stage, name in zip(STAGES, ARCHITECTURES)]
    cells += [("bert", 1, plan_of(2, precision="fp16")), ("bert", 3, plan_of(2, precision="bf16"))]
    cells += [(name, 1 + 2 * (at % 2), plan) for at, name in enumerate(sorted(WAYS)[::16])]
    check(2, cells)


@pytest.mark.long
def test_all_ways_and_architectures_on_three_processes():
    cells = [(name, stage, plan_of(3)) for name in (*ARCHITECTURES, *WAYS) for stage in STAGES]
    for precision in ("bf16", "fp16"):
        plan = plan_of(3, steps=5, precision=precision)
        cells += [("bert", stage, plan) for stage in STAGES]
    check(3, cells)


@pytest.mark.long
def test_mixtures_of_experts():
    """On three processes each model and pattern; on two, experts that they share."""
    cells: list[Cell] = [(("layered", "none on one rank in one step"), 2, plan_of(2, steps=4))]
    check(2, [*cells, *((("spread", "mixtral"), stage, plan_of(2, steps=2)) for stage in (1, 3))])
    kinds = [*(("model", name) for name in MODELS), *(("flat", name) for name in PATTERNS)]
    check(3, [(kind, 3, plan_of(3, steps=4)) for kind in kinds])


# ---- fewer bits ----

RANKS = 3
ONE = Plan(precision="bf16")
CASES: list[tuple[int, Plan, dict[str, Any], dict[str, Any]]] = [
    (1, Plan(steps=2, precision="bf16"), {}, {"compressed_communication": {"bits": 4}}),
    (2, Plan(steps=2), GRADIENTS, {}),
    (3, Plan(steps=2, precision="bf16"), {**GRADIENTS, "zero_quantized_weights": True}, {}),
]


def trained_in_turn(rank):
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    dist.isend = counted
    answers = []
    for stage, plan, zero, more in CASES:
        say(f"stage {stage}")
        sent.clear()
        answers.append((trained(rank, seeded(Stack), stage, plan, zero, more), list(sent)))
    say("1 bit")
    sent.clear()
    answers.append((one_bit.trained(rank, seeded(Stack), ONE), list(sent)))
    say("local steps")
    return answers, local_steps(rank, sent)


def local_steps(rank, sent):
    """Return for each step: the number of messages sent to other ranks, the number of all-reduces
    over all ranks, and the weights after it.
    """
    rare = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    model, sums, all_reduce = seeded(Stack), list[int](), dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sums.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    optimizer = ZeroOneAdam(model.parameters(), **one_bit.ADAM, **rare)
    engine, seen = start(model, optimizer, one_bit.config(ONE)), []
    dist.all_reduce = counted
    for number in range(12):
        sent.clear()
        sums.clear()
        run_steps(engine, rank, [number])
        seen.append((len(sent), len(sums), [flat.full.clone() for flat in engine.flats]))
    dist.all_reduce = all_reduce
    return seen


def test_fewer_bits():
    found = run_processes(RANKS, trained_in_turn)
    answers, steps = [each for each, _ in found], [each for _, each in found]
    for number in range(4, 12):  # after the first step of the interval of 4
        seen = [each[number] for each in steps]
        for one, other in zip(seen[0][2], seen[1][2]):
            assert torch.equal(one, other)
        for sent, sums, _ in seen:
            assert (sent > 0) == (sums > 0) == (number + 1 in (8, 12)), number
    one_bit.check([answer[-1][0] for answer in answers], ONE)
    for answer in answers:
        seen, sent = answer[-1]
        for state in seen[0][1].values():
            message = one_bit.nbytes(state["layout"])
            # to each other rank, up and down, in each step after the freeze
            assert sent.count(message) >= 2 * (RANKS - 1) * (one_bit.STEPS - one_bit.FREEZE)
    for number, (stage, plan, _, _) in enumerate(CASES):
        check_gradients([answer[number][0] for answer in answers], stage, plan)
        for answer in answers:
            (_, layouts), sent = answer[number]
            for layout in [layout for layout, _ in layouts.values() if compressible(layout)]:
                four = -(-layout.chunk // 32) * 16 + -(-layout.chunk // 512) * 16
                eight = -(-layout.chunk // 16) * 16 + -(-layout.chunk // 2048) * 16
                # to each other rank: up, and down, in each of two steps
                assert sent.count(four) >= 2 * (RANKS - 1) * (2 if stage == 1 else 1)
                assert (sent.count(eight) >= 2 * (RANKS - 1)) == (stage == 3)
                assert 2 * layout.chunk not in sent


def test_a_message_of_several_units():
    """gloo sums chunks in the order of ranks."""
    answers = run_processes(3, small_blocks.values_after, (1, 3), timeout=300.0)
    small_blocks.same_bits(answers, (1, 3))
