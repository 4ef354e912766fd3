"""The samples that a rank sees through every loader that Accelerate and the Trainer make, those
that metrics count, and the lengths of loaders. ``--tensor 2``: two ranks share layers.
"""

import accelerate
import datasets
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration
from script import given, report
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

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
    return [batch["index"].tolist() for batch in loader]


def by_accelerate(config, make, cut=None, **chosen):
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True,
        deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(**chosen),
    )
    torch.manual_seed(7 + accelerator.process_index)
    loader = accelerator.prepare_data_loader(make(), slice_fn_for_dispatch=cut)
    found = {"read": read(loader)}
    if isinstance(make().dataset, Rows):
        found["length"] = len(loader)
    found["read again"] = read(loader)
    found["resumed"] = read(accelerate.skip_first_batches(loader, 2))
    sizes = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(sizes, [*map(len, found["read"])])
    if sizes[1:] == sizes[:-1]:  # as many samples of each rank
        found["counted"] = counted(accelerator, loader)
    return found


def counted(accelerator, loader):
    seen = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch["index"]).tolist()
    return seen


def by_trainer(out, config, data, **more):
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
            **more,
        )
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=data)
    seen = counted(trainer.accelerator, trainer.get_eval_dataloader(data))
    loader = trainer.get_train_dataloader()
    return {
        "steps": trainer.set_initial_training_values(args, loader),
        "read": read(loader),
        "resumed": read(accelerate.skip_first_batches(loader, 1)),
        "counted": seen,
    }


def main():
    args = given(tensor=1)
    config = {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": args.tensor},
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
    }
    seen = {name: by_accelerate(config, make, **chosen) for name, (make, chosen) in LOADERS.items()}
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    for name, data, more in (
        ("Trainer", Rows(), {}),
        ("Trainer, streamed", Stream(), {}),
        ("Trainer, dispatched", Rows(), {"accelerator_config": {"dispatch_batches": True}}),
    ):
        seen[name] = by_trainer(args.out, config, data, **more)
    report(args.out, seen)


if __name__ == "__main__":  # Python 3.14 imports it for the workers of loaders
    main()
