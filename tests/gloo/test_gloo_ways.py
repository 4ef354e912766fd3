"""The engine's features over real gloo processes: ways to call a model and a slice of the matrix,
mixtures of experts, experts on several ranks, few bits, sequences that ranks share. One launch
runs many cases inside the same processes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero
from hf_zero.errors import RankMismatchError
from hf_zero.optim import ZeroOneAdam
from tests.helpers import one_bit, oracle
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.dropout import dropout_by
from tests.helpers.engines import STAGES, OnEngine, config_of, engine_opener, start, train_on_rank
from tests.helpers.models import ARCHITECTURES, Stack, seeded, tokens
from tests.helpers.processes import run_processes, say
from tests.helpers.sequences import Ranks, SequenceJob, gpt2, llama, on_rank, plain
from tests.helpers.stacks import run_steps
from tests.helpers.training import ArchitectureJob, At, Plan, Trace, merge, plain_sgd, train
from tests.helpers.ways import WAYS
from tests.parallel.expert_cases import keys, spread
from tests.ranks.test_moe import MODELS, PATTERNS, Flat, Layered, Patterned, Routed

Cell = tuple[str, int, Plan]  # job, stage, plan


# mixtures of experts: (kind of job, its name)
KINDS = {
    "model": Routed,
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
        models = {rank: job.build()}
        try:
            traces.append(train_on_rank(rank, models, job, plan, engine_opener(stage)))
        except Exception as error:
            traces.append(f"{type(error).__name__}: {error}")
            break
    return traces


def check(ranks, cells, timeout):
    answers = run_processes(ranks, train_cells, cells, timeout=timeout)
    reached = min(len(traces) for traces in answers)
    for index, (name, stage, plan) in enumerate(cells[:reached]):
        traces = [answers[rank][index] for rank in range(ranks)]
        where = f"{name!r} at stage {stage} on {ranks} processes"
        broken = [
            f"rank {rank}: {trace}" for rank, trace in enumerate(traces) if isinstance(trace, str)
        ]
        assert not broken, f"{where} failed:\n" + "\n".join(broken)
        try:
            oracle.accept(merge(traces), job_of(name), plan, stage)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
    assert reached == len(cells), f"only {reached} of {len(cells)} cells ran"


def cells_of(ranks, names, stages=STAGES):
    return [
        (name, stage, Plan(ranks=ranks, steps=3, accumulation=2))
        for name in names
        for stage in stages
    ]


def mixed_cells(ranks):
    plans = [
        Plan(ranks=ranks, steps=5, accumulation=2, precision=precision)
        for precision in ("bf16", "fp16")
    ]
    return [("bert", stage, plan) for stage in STAGES for plan in plans]


def some_cells():
    """An architecture at each stage; stages 1 and 3 in 16 bits; some ways, at stages 1 and 3 in
    turn. Threads run all of them.
    """
    cells: list[Cell] = []
    for stage, name in zip(STAGES, ARCHITECTURES):
        cells += cells_of(2, [name], stages=(stage,))
    cells += [cell for at, cell in enumerate(mixed_cells(2)) if at in (3, 6)]
    for at, name in enumerate(sorted(WAYS)[::16]):
        cells += cells_of(2, [name], stages=((1, 3)[at % 2],))
    return cells


def test_architectures_and_some_ways_on_two_processes():
    check(2, some_cells(), timeout=400)


@pytest.mark.long
def test_all_ways_and_architectures_on_two_processes():
    check(2, cells_of(2, [*ARCHITECTURES, *WAYS]) + mixed_cells(2), timeout=500)


@pytest.mark.long
def test_all_ways_and_architectures_on_three_processes():
    check(3, cells_of(3, [*ARCHITECTURES, *WAYS]) + mixed_cells(3), timeout=600)


@pytest.mark.long
def test_mixtures_of_experts():
    """On three processes each model and pattern."""
    one, other = "none on one rank in one step", "in step 2 as never before"
    two = Plan(ranks=2, steps=4, accumulation=2)
    cells = [("model", "mixtral"), ("flat", one), ("flat", other)]
    check(2, [*((cell, 3, two) for cell in cells), (("layered", one), 2, two)], timeout=300)
    kinds = [*(("model", name) for name in MODELS), *(("flat", name) for name in PATTERNS)]
    check(3, [(kind, 3, Plan(ranks=3, steps=4, accumulation=2)) for kind in kinds], timeout=400)


PLAN = Plan(ranks=2, steps=2, accumulation=2)


def train_then_part(rank):
    """Traces at stages 1 and 3; then what rank 0 is told as rank 1 ends in place of a forward."""
    job = Routed("mixtral")
    traces = [
        train_on_rank(rank, {rank: job.build()}, job, PLAN, spread(stage, 2)) for stage in (1, 3)
    ]
    model = job.build()
    engine = start(model, plain_sgd(model), config_of(1, **keys(2)))
    if rank == 1:
        engine.destroy()
        return traces, ""
    ids = tokens(0, 0, rank)
    with pytest.raises(RankMismatchError) as parted:
        engine(input_ids=ids, labels=ids)
    return traces, str(parted.value)


@pytest.mark.long
def test_experts_on_two_processes():
    answers = run_processes(2, train_then_part, timeout=300)
    for index in range(2):
        oracle.compare(
            merge([traces[index] for traces, _ in answers]),
            oracle.kept(Routed("mixtral"), PLAN),
            weight_floor=oracle.ROUNDING,
        )
    assert "expert parallelism" in answers[0][1]


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
    answers.append(local_steps(rank, sent))
    return answers


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


def test_over_gloo():
    answers = run_processes(RANKS, trained_in_turn)
    steps = [answer.pop() for answer in answers]
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
            blocks = [layout for layout, _ in layouts.values() if compressible(layout)]
            for layout in blocks:
                four = -(-layout.chunk // 32) * 16 + -(-layout.chunk // 512) * 16
                eight = -(-layout.chunk // 16) * 16 + -(-layout.chunk // 2048) * 16
                # to each other rank: up, and down, in each of two steps
                assert sent.count(four) >= 2 * (RANKS - 1) * (2 if stage == 1 else 1)
                assert (sent.count(eight) >= 2 * (RANKS - 1)) == (stage == 3)
                assert 2 * layout.chunk not in sent


SEQUENCE_RANKS = Ranks(2, 2)
JOB = SequenceJob(llama)
DROPPING = SequenceJob(partial(gpt2, resid_pdrop=0.25, embd_pdrop=0.25, attn_pdrop=0.25))
RECOMPUTED = {"activation_checkpointing": {"blocks": True}}


def trained_sequences(rank, stage):
    return on_rank(rank, {rank: JOB.build()}, JOB, PLAN, SEQUENCE_RANKS, config_of(stage, PLAN))[0]  # type: ignore[arg-type]


def loaded(rank, folder):
    """Stage 3, from files that each rank reads its own elements of."""
    config = config_of(3, PLAN, sequence_parallel_size=SEQUENCE_RANKS.sequence)
    model = hf_zero.from_pretrained(transformers.LlamaForCausalLM, folder, config)
    session = OnEngine(start(model.train(), JOB.optimizer(model), config), PLAN)
    session.memory["sequence"] = hf_zero.sequence_parallel()
    trace = train(session, JOB, PLAN, rank // SEQUENCE_RANKS.sequence)
    session.close()
    return trace


def dropped(rank):
    """With the masks of the forwards, without those of the recomputations."""
    masks: list[torch.Tensor] = []

    def draw(shape, p):
        mask = (torch.rand(shape) >= p).float()
        if torch._C._current_graph_task_id() == -1:
            masks.append(mask)
        return mask

    config = config_of(3, PLAN, **RECOMPUTED)
    torch.manual_seed(rank)
    with dropout_by(draw):
        trace = on_rank(rank, {rank: DROPPING.build()}, DROPPING, PLAN, SEQUENCE_RANKS, config)[0]  # type: ignore[arg-type]
    return trace, masks


def leaving(rank):
    """Return the error of a rank that shares sequences with one that ends instead of a forward; ""
    on the rank that ends.
    """
    sequence = hf_zero.sequence_parallel(SEQUENCE_RANKS.sequence)
    model = JOB.build()
    engine = start(model, JOB.optimizer(model), config_of(1), mpu=sequence)
    engine.train()
    if rank % 2:
        return ""
    with pytest.raises(RankMismatchError) as parted:
        engine(**sequence.shard(plain(At(0, 0, 0))))
    return str(parted.value)


def each(rank, folder):
    found: dict[str, Any] = {}
    for stage in (1, 3):
        say(f"stage {stage}")
        found[f"stage {stage}"] = trained_sequences(rank, stage)
    say("loaded")
    found["loaded in shards"] = loaded(rank, folder)
    say("dropped")
    found["dropped"] = dropped(rank)
    say("leaving")
    found["left"] = leaving(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("llama")
    seeded(llama).save_pretrained(folder)
    return run_processes(SEQUENCE_RANKS.world, each, str(folder), timeout=300.0)


@pytest.mark.long
@pytest.mark.parametrize("case", ("stage 1", "stage 3", "loaded in shards"))
def test_as_in_one_process(ranks, case):
    expected = oracle.run(JOB, PLAN)
    oracle.compare(merge([found[case] for found in ranks]), expected, weight_floor=oracle.ROUNDING)


@pytest.mark.long
def test_recomputed_dropout(ranks):
    """Each of the two batches of a step with the masks of its two ranks, one after another."""
    masks = [found["dropped"][1] for found in ranks]
    groups = [
        [torch.cat(parts, 1) for parts in zip(*masks[first : first + 2], strict=True)]
        for first in (0, 2)
    ]
    a_step = len(groups[0]) // PLAN.steps
    order = [
        mask
        for step in range(PLAN.steps)
        for group in groups
        for mask in group[step * a_step : (step + 1) * a_step]
    ]
    assert order and not torch.equal(masks[0][0], masks[1][0])
    with dropout_by(lambda shape, p: order.pop(0)):
        expected = oracle.run(DROPPING, PLAN)
    oracle.compare(merge([found["dropped"][0] for found in ranks]), expected)


@pytest.mark.long
def test_a_rank_that_leaves_is_named_with_its_axis(ranks):
    for rank, found in enumerate(ranks):
        if rank % 2 == 0:
            assert "sequence parallelism" in found["left"] and str(rank + 1) in found["left"]
