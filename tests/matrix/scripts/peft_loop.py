"""PEFT in loops for Accelerate, as their users write them: trained, saved, resumed, loaded again
and merged, case after case.
"""

import json

import peft
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft_base import ROWS, account, adapted, arguments, base, rows, whole
from torch.utils.data import DataLoader

STEPS = 4


def train(accelerator, model, optimizer, batches, save_to=None):
    history = []
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append([accelerator.gather(loss.detach()).mean().item(), float(norm)])
        if save_to is not None and number == 1:
            accelerator.save_state(str(save_to), exclude_frozen_parameters=True)
    return history


def prepared(accelerator, model):
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6
    )
    loader = DataLoader(rows(ROWS * STEPS), batch_size=ROWS // accelerator.num_processes)
    return accelerator.prepare(model, optimizer, loader)


def save(accelerator, model, folder, **options):
    accelerator.unwrap_model(model).save_pretrained(
        folder, state_dict=accelerator.get_state_dict(model), **options
    )
    accelerator.wait_for_everyone()


@torch.no_grad()
def evaluated(accelerator, model):
    """The loss of a model that no engine trains: as it was loaded."""
    model.eval()
    batch = next(
        iter(
            accelerator.prepare_data_loader(
                DataLoader(rows(ROWS), batch_size=ROWS // accelerator.num_processes)
            )
        )
    )
    return accelerator.gather(model(**batch).loss).mean().item()


def run(accelerator, folder, path, case):
    seen = {}
    model, optimizer, loader = prepared(accelerator, adapted(path, case))
    seen["first"] = train(accelerator, model, optimizer, loader, folder / "state")
    seen["account"] = account(model)
    save(accelerator, model, folder / "adapter", is_main_process=accelerator.is_main_process)
    accelerator.load_state(str(folder / "state"))
    seen["resumed"] = train(
        accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2)
    )
    unwrapped = accelerator.unwrap_model(model)
    if case not in ("prompt", "qlora"):
        with whole(unwrapped):
            merged = unwrapped.merge_and_unload()
            torch.save(
                {name: value.clone() for name, value in merged.state_dict().items()},
                folder / f"merged-{accelerator.process_index}.pt",
            )
    del unwrapped
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)

    if case == "prompt":  # which PEFT loads for inference alone
        again = peft.PeftModel.from_pretrained(base(path, case), folder / "adapter")
        seen["again"] = [[evaluated(accelerator, again)]]
        return seen
    again = peft.PeftModel.from_pretrained(base(path, case), folder / "adapter", is_trainable=True)
    model, optimizer, loader = prepared(accelerator, again)
    seen["again"] = train(accelerator, model, optimizer, loader)
    save(accelerator, model, folder / "again")  # as scripts do that were never run on two ranks
    del again
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    return seen


if __name__ == "__main__":
    args = arguments()
    accelerator = Accelerator()
    set_seed(7)
    report = {"type": str(accelerator.distributed_type)}
    for case in args.cases.split(","):
        report[case] = run(accelerator, args.out / case, args.base, case)
    (args.out / f"report-{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()
