"""Weights for other programs, state dicts of torch and generations in memory, of engines on ranks
of the device, which poses as CUDA: ``python -m tests.late.ways_out MODE JOB ...``, with RANK and so
on set.

A line of JSON a job: what was wrong (nothing, if right), what the host waited for in a loop over
the weights, and the reports.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.late import device, training

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import torch.distributed.checkpoint as dcp  # isort: skip
from torch.distributed.checkpoint import state_dict as torch_states  # isort: skip
import hf_zero  # isort: skip
from hf_zero.checkpoint import verify_all  # isort: skip
from hf_zero.distributed import world_group  # isort: skip
from hf_zero.integrations.trl.rollout_weights import copies  # isort: skip
from tests.helpers.host_syncs import HostSyncs  # isort: skip

BUCKET = 40_000  # bytes: several of a model
AT_ONCE = 3  # tensors packed on one stream: fewer than a bucket has


class Job:
    """An engine after a step, and what was found wrong with it."""

    def __init__(self, name: str, rank: int):
        self.rank, self.wrong = rank, list[str]()
        self.engine, *_ = hf_zero.initialize(
            model=training.tower(), config={**training.config(name), **training.ONCE}
        )
        self._batches = training.batches(100, rank, 2)
        self.step()

    def batch(self) -> torch.Tensor:
        return next(self._batches).pin_memory().to(self.engine.device, non_blocking=True)

    def step(self) -> None:
        self.engine.backward(self.engine(self.batch()))
        self.engine.step()

    def evaluate(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of a forward that the device has yet to run."""
        with torch.no_grad():
            loss: torch.Tensor = self.engine(self.batch() if batch is None else batch)
        return loss

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of this moment on the host, each gathered by itself."""
        named = self.engine.module.named_parameters()
        return {name: hf_zero.safe_get_full_fp32_param(p).cpu() for name, p in named}


def packed(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read ``tensors`` as vLLM packs them: on two streams in turn, which wait for nothing else."""
    beside, found = [torch.cuda.Stream(), torch.cuda.Stream()], dict[str, torch.Tensor]()
    held: list[list[torch.Tensor]] = [[], []]
    for turn in itertools.cycle((0, 1)):
        beside[turn].synchronize()
        held[turn] = []
        with torch.cuda.stream(beside[turn]):
            named = list(itertools.islice(tensors, AT_ONCE))
            held[turn] = [value for _, value in named]
            found.update({name: value * 1 for name, value in named})
        if not named:
            break
    for each in beside:
        each.synchronize()
    return found


def sent(job: Job) -> dict[str, torch.Tensor]:
    stream = job.engine.iter_weights(bucket=BUCKET, dtype=None)
    return packed(itertools.chain.from_iterable(copies(stream, job.engine.device)))


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[n].cpu(), want[n]) for n in want)


def sends_weights(job: Job) -> dict[str, int]:
    """Loops over the weights between steps and evaluations; what the host waits for in one."""
    before = sent(job)
    left = iter(job.engine.iter_weights(bucket=BUCKET, dtype=None))
    next(left)
    del left
    torch.zeros(2 * BUCKET, dtype=torch.uint8, device=job.engine.device)  # takes its memory
    job.step()
    job.evaluate()
    with HostSyncs(job.engine.device) as syncs:
        total = torch.zeros((), device=job.engine.device)
        for bucket in job.engine.iter_weights(bucket=BUCKET, dtype=None):
            for _, value in bucket:
                total += value.sum()
    job.evaluate()
    after = sent(job)
    want = job.weights()
    job.check(equal(after, want), "weights that are sent differ from those of the engine")
    job.check(not equal(before, want), "weights that were sent before a step are those after it")
    sums = sum(float(value.sum()) for value in want.values())
    job.check(
        abs(float(total) - sums) < 1e-3 * abs(sums), "a loop without copies has other weights"
    )
    return dict(syncs.of("hf_zero"))


def halved(state: dict[str, Any]) -> dict[str, Any]:
    found = {name: value.detach().clone() for name, value in state.items()}
    for value in found.values():
        value.local.mul_(0.5)
    return found


def is_under_way(job: Job) -> None:
    """A state dict is put into a model whose last forward the device has yet to run."""
    module, batch = job.engine.module, job.batch()
    want = job.evaluate(batch).item()
    state = halved(torch_states.get_model_state_dict(module))
    before = job.weights()
    loss = job.evaluate(batch)
    torch_states.set_model_state_dict(module, state)
    job.check(loss.item() == want, "a forward has computed with weights that came after it")
    half = {name: 0.5 * value for name, value in before.items()}
    job.check(equal(job.weights(), half), "the weights are not those of the state dict")


def is_saved_beside(job: Job, folder: str) -> None:
    """A state dict is saved by a thread while a step goes on, and loaded again."""
    module, optimizer = job.engine.module, job.engine.optimizer
    options = torch_states.StateDictOptions(cpu_offload=True)
    away, _ = torch_states.get_state_dict(module, optimizer, options=options)
    kinds = {value.device.type for value in away.values() if isinstance(value, torch.Tensor)}
    job.check(kinds == {"cpu"}, "states were to be on the host")
    group, want = dist.new_group(backend="gloo"), job.weights()

    def states() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), torch_states.get_state_dict(module, optimizer)))

    device.only_device(None)  # torch's thread works on device 0
    saving = dcp.async_save(states(), checkpoint_id=folder, process_group=group)
    job.step()
    saving.result()
    device.only_device(job.rank)
    job.check(not equal(job.weights(), want), "the step has changed nothing")
    whole = states()
    dcp.load(whole, checkpoint_id=folder)
    job.evaluate()
    torch_states.set_state_dict(
        module, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"]
    )
    job.check(equal(job.weights(), want), "what was saved is not what is loaded")
    job.step()


def is_kept(job: Job) -> None:
    """What this host holds of the step before is whole while the device makes the next one."""
    memory = job.engine.generations
    job.step()
    memory.wait()
    world_group.barrier()
    job.engine.backward(job.engine(job.batch()))
    problems = [text for each in verify_all(memory.folder(memory.base)) for text in each.problems]
    job.check(not problems, f"a generation is not what was saved: {problems}")
    job.check(len(memory.scan()) == 2 * 2, "the host does not hold two generations of two ranks")
    world_group.barrier()
    job.engine.step()


def run(name: str, rank: int) -> dict[str, Any]:
    job, waits = Job(name, rank), dict[str, int]()
    if name in training.IN_MEMORY:
        is_kept(job)
    else:
        waits = sends_weights(job)
        is_under_way(job)
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            is_saved_beside(job, folder[0])
            world_group.barrier()
    job.engine.destroy()
    device.synchronize_all()
    found = {"job": name, "rank": rank, "wrong": job.wrong, "waits": waits}
    del job
    gc.collect()
    return found


def main() -> None:
    rank = device.begin(sys.argv[1])
    for name in sys.argv[2:]:
        device.forget()
        row = run(name, rank)
        device.tell(**row, reports=device.reports())
    world_group.barrier()


if __name__ == "__main__":
    main()
