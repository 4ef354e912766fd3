"""Compressed collectives over gloo's own messages, from process to process: the values are those of
the equations, and the bytes are counted as they are handed to gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_zero.ops.sign_blocks import SignBlocks
from tests.helpers import one_bit
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.models import Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.training import Plan

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
    return answers


def test_over_gloo():
    answers = run_processes(RANKS, trained_in_turn)
    one_bit.check([answer[-1][0] for answer in answers], ONE)
    for answer in answers:
        seen, sent = answer[-1]
        for state in seen[0][1].values():
            message = SignBlocks(one_bit.BLOCK).nbytes(state["layout"].chunk)
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
