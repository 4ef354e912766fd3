"""The samples that a rank sees through every loader that Accelerate and the Trainer make, those
that metrics count, and the lengths of loaders; ``--tensor`` ranks share layers.
"""

import argparse
import json
import os
from pathlib import Path

import accelerate
import datasets
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from tests.helpers.trainers import options

SAMPLES, BATCH = 19, 2


class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"index": torch.tensor(index)}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Rows()[index] for index in range(SAMPLES))


def sharded():
    rows = datasets.Dataset.from_dict({"index": [*range(SAMPLES)]})
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


def shuffled(**more):
    return DataLoader(Rows(), BATCH, shuffle=True, **more)


def cut_backwards(data, part, process_index=None, num_processes=None):
    """For ``slice_fn_for_dispatch``: readers take their parts from the end."""
    if part.start == 0 and part.stop == num_processes:  # what fills up the last batch
        return accelerate.utils.slice_tensors(data, part)
    width = part.stop - part.start
    at = num_processes - 1 - process_index
    return accelerate.utils.slice_tensors(data, slice(at * width, (at + 1) * width))


# the loader, and how Accelerate shares it out
LOADERS = {
    "in order": (lambda: DataLoader(Rows(), BATCH), {}),
    "shuffled": (shuffled, {}),
    "shuffled by a seed": (shuffled, {"use_seedable_sampler": True, "data_seed": 3}),
    "the rest dropped": (lambda: DataLoader(Rows(), BATCH, drop_last=True), {}),
    "uneven": (lambda: DataLoader(Rows(), BATCH), {"even_batches": False}),
    "batches of several sizes": (
        lambda: DataLoader(Rows(), batch_sampler=Lengths()), {"even_batches": False}
    ),
    "by a worker": (lambda: DataLoader(Rows(), BATCH, num_workers=1), {}),
    "split": (lambda: DataLoader(Rows(), 2 * BATCH), {"split_batches": True}),
    "dispatched": (lambda: DataLoader(Rows(), BATCH), {"dispatch_batches": True}),
    "dispatched, shuffled": (shuffled, {"dispatch_batches": True}),
    "dispatched and split": (
        lambda: DataLoader(Rows(), 2 * BATCH), {"dispatch_batches": True, "split_batches": True}
    ),
    "dispatched, the rest dropped": (
        lambda: DataLoader(Rows(), BATCH, drop_last=True), {"dispatch_batches": True}
    ),
    "dispatched by a worker": (
        lambda: DataLoader(Rows(), BATCH, num_workers=1), {"dispatch_batches": True}
    ),
    "dispatched and cut by the script": (
        lambda: DataLoader(Rows(), BATCH), {"dispatch_batches": True, "cut": cut_backwards}
    ),
    "iterated": (lambda: DataLoader(Stream(), BATCH), {}),
    "iterated by each rank": (lambda: DataLoader(Stream(), BATCH), {"dispatch_batches": False}),
    "iterated and split": (
        lambda: DataLoader(Stream(), 2 * BATCH),
        {"dispatch_batches": False, "split_batches": True},
    ),
    "streamed": (lambda: DataLoader(sharded(), BATCH), {}),
    "streamed by each rank": (lambda: DataLoader(sharded(), BATCH), {"dispatch_batches": False}),
}  # fmt: skip


def read(loader):
    return [batch["index"].tolist() for batch in loader]


def by_accelerate(plugin, make, cut=None, **config):
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True,
        deepspeed_plugin=plugin(),
        dataloader_config=DataLoaderConfiguration(**config),
    )
    torch.manual_seed(7)
    loader = accelerator.prepare_data_loader(make(), slice_fn_for_dispatch=cut)
    found = {"read": read(loader)}
    if isinstance(make().dataset, Rows):
        found["length"] = len(loader)
    found["read again"] = read(loader)
    found["resumed"] = read(accelerate.skip_first_batches(loader, 2))
    sizes = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(sizes, [*map(len, found["read"])])
    if sizes[1:] == sizes[:-1]:  # metrics need as many samples of each rank
        counted = []
        for batch in loader:
            counted += accelerator.gather_for_metrics(batch["index"]).tolist()
        found["counted"] = counted
    return found


def by_trainer(out, config, data, **more):
    accelerate.state.AcceleratorState._reset_state()
    args = transformers.TrainingArguments(
        **options(
            out,
            use_cpu=config is None,
            max_steps=3,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            remove_unused_columns=False,
            seed=5,
            deepspeed=config,
            **more,
        )
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=data)
    evaluated, counted = trainer.get_eval_dataloader(data), []
    for batch in evaluated:
        counted += trainer.accelerator.gather_for_metrics(batch["index"]).tolist()
    trained = trainer.get_train_dataloader()
    return {
        "read": read(trained),
        "resumed": read(accelerate.skip_first_batches(trained, 1)),
        "counted": counted,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tensor", type=int, nargs="*", default=[1])
    given = parser.parse_args()
    report = {}
    for size in given.tensor:
        config = {
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": size},
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
        }

        def plugin(config=config):
            return accelerate.DeepSpeedPlugin(hf_ds_config=config)

        found = report[str(size)] = {
            name: by_accelerate(plugin, make, **chosen) for name, (make, chosen) in LOADERS.items()
        }
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        found["Trainer"] = by_trainer(given.out, config, Rows())
        found["Trainer, streamed"] = by_trainer(given.out, config, Stream())
        found["Trainer, dispatched"] = by_trainer(
            given.out, config, Rows(), accelerator_config={"dispatch_batches": True}
        )
    rank = os.environ.get("RANK", 0)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"report-{rank}.json").write_text(json.dumps(report))


main()
