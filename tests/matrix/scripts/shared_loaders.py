"""The samples that a rank sees through every loader that Accelerate and the Trainer make, those
that metrics count, and the lengths of loaders. ``--meshes 2x1``: two ranks share layers, no ranks
share sequences.
"""

from types import SimpleNamespace

import accelerate
import datasets
import torch
import transformers
from accelerate import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from script import WORLD, given, report
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from tests.helpers.trainers import options

SAMPLES, BATCH, TOKENS = 19, 2, 4


class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "input_ids": index * TOKENS + torch.arange(TOKENS)}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Rows()[index] for index in range(SAMPLES))


def sharded():
    whole = [Rows()[index] for index in range(SAMPLES)]
    rows = datasets.Dataset.from_list([{key: row[key].tolist() for key in row} for row in whole])
    return rows.to_iterable_dataset(num_shards=4).with_format("torch")


class Lengths(BatchSampler):
    """Batches of one and of two samples."""

    def __init__(self):
        super().__init__(SequentialSampler(Rows()), BATCH, False)
        self.batch_size = None

    def __iter__(self):
        yield from ([at] if at % 3 else [at, at + 1] for at in range(SAMPLES - 1) if at % 3 < 2)

    def __len__(self):
        return len([*iter(self)])


def shuffled():
    return DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def cut_backwards(data, part, process_index=None, num_processes=None):
    """For ``slice_fn_for_dispatch``: readers take their parts from the end."""
    if part.start == 0 and part.stop == num_processes:  # what fills up the last batch
        return accelerate.utils.slice_tensors(data, part)
    width = part.stop - part.start
    at = num_processes - 1 - process_index
    return accelerate.utils.slice_tensors(data, slice(at * width, (at + 1) * width))


APART = "shuffled by ranks that are seeded apart"
# the loader, and how Accelerate shares it out
LOADERS = {
    "shuffled": (shuffled, {}),
    "shuffled by a seed": (
        lambda: DataLoader(Rows(), BATCH, shuffle=True),
        {"use_seedable_sampler": True, "data_seed": 3},
    ),
    APART: (lambda: DataLoader(Rows(), BATCH, shuffle=True), {}),
    "batches of several sizes": (
        lambda: DataLoader(Rows(), batch_sampler=Lengths()), {"even_batches": False}
    ),
    "dispatched and split": (
        lambda: DataLoader(Rows(), 2 * BATCH), {"dispatch_batches": True, "split_batches": True}
    ),
    "dispatched by a worker": (
        lambda: DataLoader(Rows(), BATCH, num_workers=1), {"dispatch_batches": True}
    ),
    "dispatched and cut by the script": (
        lambda: DataLoader(Rows(), BATCH), {"dispatch_batches": True, "cut": cut_backwards}
    ),
    "iterated and split": (
        lambda: DataLoader(Stream(), 2 * BATCH),
        {"dispatch_batches": False, "split_batches": True},
    ),
    "streamed by each rank": (lambda: DataLoader(sharded(), BATCH), {"dispatch_batches": False}),
}  # fmt: skip


def read(loader):
    seen = []
    for batch in loader:
        seen.append(batch["index"].tolist())
        if "shift_labels" in batch or "position_ids" in batch:  # a part of each sequence
            whole = batch["index"][:, None] * TOKENS + torch.arange(TOKENS)
            part = whole.gather(1, batch["position_ids"])
            assert torch.equal(batch["input_ids"], part) and part.shape[1] < TOKENS
    return seen


def for_training(accelerator, loader):
    return accelerator.deepspeed_ulysses_dl_adapter(loader, SimpleNamespace(device="cpu"))


def by_accelerate(config, parallelism, make, cut=None, **chosen):
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True,
        deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=parallelism,
        dataloader_config=DataLoaderConfiguration(**chosen),
    )
    torch.manual_seed(7 + accelerator.process_index)
    prepared = accelerator.prepare_data_loader(make(), slice_fn_for_dispatch=cut)
    loader = for_training(accelerator, prepared)
    found = {"read": read(loader)}
    if isinstance(make().dataset, Rows):
        found["length"] = len(loader)
    found["read again"] = read(loader)
    found["resumed"] = read(accelerate.skip_first_batches(loader, 2))
    sizes = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(sizes, [*map(len, found["read"])])
    if parallelism is None and sizes[1:] == sizes[:-1]:  # as many samples of each rank
        found["counted"] = counted(accelerator, loader)
    return found


def counted(accelerator, loader):
    seen = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch["index"]).tolist()
    return seen


def by_trainer(out, config, parallelism, data, **more):
    accelerate.state.AcceleratorState._reset_state()
    args = transformers.TrainingArguments(
        **options(
            out,
            use_cpu=False,
            max_steps=-1 if isinstance(data, Rows) else 3,
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=2,
            remove_unused_columns=False,
            seed=5,
            deepspeed=config,
            parallelism_config=parallelism,
            **more,
        )
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=data)
    seen = counted(trainer.accelerator, trainer.get_eval_dataloader(data))
    prepared = trainer.get_train_dataloader()
    steps = trainer.set_initial_training_values(args, prepared)
    loader = for_training(trainer.accelerator, prepared)
    return {
        "steps": steps,
        "read": read(loader),
        "resumed": read(accelerate.skip_first_batches(loader, 1)),
        "counted": seen if parallelism is None else None,
    }


def main():
    args, seen = given(meshes=["1x1"]), {}
    for mesh in args.meshes:
        tensor, sequence = map(int, mesh.split("x"))
        config = {
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": tensor},
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
        }
        parallelism = None
        if sequence > 1:
            init_parallel(ParallelDims.over(WORLD, tensor=tensor, sequence=sequence))
            parallelism = ParallelismConfig(sp_size=sequence, sp_backend="deepspeed")
        found = seen[mesh] = {
            name: by_accelerate(config, parallelism, make, **chosen)
            for name, (make, chosen) in LOADERS.items()
        }
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        for name, data, more in (
            ("Trainer", Rows(), {}),
            ("Trainer, streamed", Stream(), {}),
            ("Trainer, dispatched", Rows(), {"accelerator_config": {"dispatch_batches": True}}),
        ):
            found[name] = by_trainer(args.out, config, parallelism, data, **more)
    report(args.out, seen)


if __name__ == "__main__":  # Python 3.14 imports it for the workers of loaders
    main()
