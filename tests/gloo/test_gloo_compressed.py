"""Compressed collectives over gloo's own messages, from process to process: the values are those of
the equations, and the bytes are counted as they are handed to gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_zero.optim import ZeroOneAdam
from tests.helpers import one_bit
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.engines import start
from tests.helpers.models import Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan

RANKS = 3
ONE = Plan(precision="bf16")
CASES: list[tuple[int, Plan, dict[str, Any], dict[str, Any]]] = [
    (1, Plan(steps=2, precision="bf16"), {}, {"compressed_communication": {"bits": 4}}),
    (2, Plan(steps=2), GRADIENTS, {}),
    (3, Plan(steps=2, precision="bf16"), {**GRADIENTS, "zero_quantized_weights": True}, {}),
]


def trained_in_turn(rank: int) -> list[Any]:
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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


def local_steps(rank: int, sent: list[int]) -> list[tuple[int, int, list[torch.Tensor]]]:
    """Return for each step: the number of messages sent to other ranks, the number of all-reduces
    over all ranks, and the weights after it.
    """
    rare = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    model, sums, all_reduce = seeded(Stack), list[int](), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    optimizer = ZeroOneAdam(model.parameters(), **one_bit.ADAM, **rare)
    engine, seen = start(model, optimizer, one_bit.config(ONE)), []
    dist.all_reduce = counted
    for number in range(12):
        sent.clear()
        sums.clear()
        engine.backward(squared(engine, At(number, 0, rank), ONE.dtype))
        engine.step()
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
