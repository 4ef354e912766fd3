"""Loops as scripts write them for Accelerate, one after another; nothing in them knows of ZeRO: the
launcher says what is used.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, find_executable_batch_size
from script import given, report
from torch.utils.data import DataLoader

from tests.helpers.models import ARCHITECTURES, VOCAB

LENGTH, LIMIT = 9, 0.5


def rows(count):
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def loader(accelerator, count, batch=8):
    return DataLoader(rows(count), batch_size=batch // accelerator.num_processes)


def prepared(accelerator, count=56, batch=8):
    model = ARCHITECTURES["llama"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step / accelerator.num_processes)
    )
    return accelerator.prepare(model, optimizer, loader(accelerator, count, batch), schedule)


def train(accelerator, model, optimizer, data, schedule, between=lambda: None):
    """Losses of micro-batches over all processes, norms and rates; ``between`` runs anywhere."""
    losses, steps = [], []
    for batch in data:
        between()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            between()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                steps.append([float(norm), schedule.get_last_lr()[0]])
            else:
                between()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return {"losses": losses, "steps": steps}


def looked_at(accelerator, model):
    """Evaluates and generates, on each rank from another row."""
    ids = rows(2)[accelerator.process_index % 2]["input_ids"][None]
    model.eval()
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.isfinite()
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
    assert accelerator.unwrap_model(model).generate(ids[:, :4], **asked).shape[1] > 4
    model.train()


def uneven(accelerator, out):
    """The last of three windows is short; looked at anywhere; a metric; weights, three ways."""
    model, optimizer, data, schedule = prepared(accelerator)
    looks = lambda: looked_at(accelerator, model)  # noqa: E731
    found = train(accelerator, model, optimizer, data, schedule, looks)
    model.eval()
    guesses, labels = [], []
    for batch in accelerator.prepare(loader(accelerator, 21)):
        with torch.no_grad(), accelerator.autocast():
            logits = model(input_ids=batch["input_ids"]).logits
        logits, truth = accelerator.gather_for_metrics((logits, batch["labels"]))
        guesses.append(logits)
        labels.append(truth)
    found["guesses"] = torch.cat(guesses).argmax(-1).tolist()
    assert torch.equal(torch.cat(labels), torch.stack([row["labels"] for row in rows(21)]))
    accelerator.wait_for_everyone()
    whole = accelerator.get_state_dict(model)
    out.mkdir(parents=True, exist_ok=True)
    accelerator.save(whole, f"{out}/whole.pt")
    main = {"is_main_process": accelerator.is_main_process, "state_dict": whole}
    accelerator.unwrap_model(model).save_pretrained(f"{out}/pretrained", **main)
    accelerator.save_model(model, f"{out}/safe")
    return found


def resumed(accelerator, out):
    """Gone on after a save, gone back, gone on again; then once more in new objects."""
    model, optimizer, data, schedule = prepared(accelerator, 72)
    batches = list(data)
    found = train(accelerator, model, optimizer, batches[:6], schedule)
    accelerator.save_state(f"{out}/state")
    first = train(accelerator, model, optimizer, batches[6:], schedule)
    accelerator.load_state(f"{out}/state")
    again = train(accelerator, model, optimizer, batches[6:], schedule)
    model, optimizer, data, schedule = accelerator.free_memory(model, optimizer, data, schedule)
    model, optimizer, data, schedule = prepared(accelerator, 72)
    accelerator.load_state(f"{out}/state")
    assert first == again == train(accelerator, model, optimizer, batches[6:], schedule)
    return {name: found[name] + first[name] for name in found}


def fitted(accelerator, out):
    """A batch size that is found: the first two do not fit, wherever in the step that shows."""
    tried = []

    @find_executable_batch_size(starting_batch_size=32, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def run(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        model, optimizer, data, schedule = prepared(accelerator, 48, batch_size)
        calls = iter(range(1, 1000))

        def between():
            if next(calls) == batch_size // 8 and batch_size > 8:
                raise RuntimeError("CUDA out of memory.")

        return train(accelerator, model, optimizer, data, schedule, between)

    return {**run(), "tried": tried}


def main():
    args, seen = given(cases=[]), {}
    for case in args.cases:
        project = ProjectConfiguration(project_dir=str(args.out))
        accelerator = Accelerator(gradient_accumulation_steps=3, project_config=project)
        seen[case] = globals()[case](accelerator, args.out / case)
        seen[case]["type"] = str(accelerator.distributed_type)
        accelerator.free_memory()
    report(args.out, seen)


if __name__ == "__main__":
    main()
