"""Loops as scripts write them for Accelerate, one after another; nothing in them knows of ZeRO."""

import argparse
import contextlib
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, find_executable_batch_size, set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    get_linear_schedule_with_warmup,
)

from tests.helpers.models import ARCHITECTURES, VOCAB

LENGTH = 9


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
    """Losses over all processes of each micro-batch, norms and rates of each step.

    ``between`` runs wherever a script might.
    """
    losses, steps = [], []
    for batch in data:
        between()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            between()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                steps.append([float(norm), schedule.get_last_lr()[0]])
            else:
                between()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return {"losses": losses, "steps": steps}


def account(accelerator, model):
    """Return the properties that a script may query about itself."""
    return {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "main": accelerator.is_main_process,
        "device": accelerator.device.type,
        "parameters": type(next(accelerator.unwrap_model(model).parameters())).__name__,
        "unwrapped": type(accelerator.unwrap_model(model)).__name__,
    }


def uneven(accelerator, out):
    """Seven micro-batches in windows of three: the last window is one.

    Then a metric over 21 rows; whole weights, three ways.
    """
    model, optimizer, data, schedule = prepared(accelerator)
    found = train(accelerator, model, optimizer, data, schedule)
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
    os.makedirs(out, exist_ok=True)
    accelerator.save(whole, f"{out}/whole.pt")
    accelerator.unwrap_model(model).save_pretrained(
        f"{out}/pretrained", is_main_process=accelerator.is_main_process, state_dict=whole
    )
    accelerator.save_model(model, f"{out}/safe")
    return found


def resumed(accelerator, out):
    """Saved after the second step, gone on, gone back, gone on again; then once more in new
    objects.
    """
    accelerator.project_configuration.automatic_checkpoint_naming = False
    model, optimizer, data, schedule = prepared(accelerator, 72)
    batches = list(data)
    found = {"before": train(accelerator, model, optimizer, batches[:6], schedule)}
    accelerator.save_state(f"{out}/state")
    found["first"] = train(accelerator, model, optimizer, batches[6:], schedule)
    accelerator.load_state(f"{out}/state")
    found["again"] = train(accelerator, model, optimizer, batches[6:], schedule)
    model, optimizer, data, schedule = accelerator.free_memory(model, optimizer, data, schedule)
    model, optimizer, data, schedule = prepared(accelerator, 72)
    accelerator.load_state(f"{out}/state")
    found["anew"] = train(accelerator, model, optimizer, batches[6:], schedule)
    assert found["first"] == found["again"] == found["anew"]
    return found


def padded(items):
    """Lines of other lengths; the label says whether one is long."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([item["input_ids"][: 4 + item["label"]] for item in items], batch_first=True)
    labels = torch.tensor([item["label"] > 2 for item in items]).long()
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def classified(accelerator, out):
    """A classifier of lines with groups of weights and a warm-up, saved in the middle of an epoch,
    where it is gone back to and gone on by skipping batches.
    """
    lines = [{**row, "label": at % 6} for at, row in enumerate(rows(69))]
    data, held_out = (
        DataLoader(part, batch_size=8 // accelerator.num_processes, collate_fn=padded)
        for part in (lines[:48], lines[48:])
    )
    set_seed(7)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    # Accelerate steps the scheduler once for each process.
    schedule = get_linear_schedule_with_warmup(
        optimizer, accelerator.num_processes, 3 * accelerator.num_processes
    )
    model, optimizer, data, held_out, schedule = accelerator.prepare(
        model, optimizer, data, held_out, schedule
    )
    found = account(accelerator, model)

    def saving():
        saving.calls += 1
        if saving.calls == 9:  # before the first forward of the second window
            accelerator.save_state(f"{out}/state")

    saving.calls = 0
    found["first"] = train(accelerator, model, optimizer, data, schedule, saving)
    model.eval()
    guesses, truth = [], []
    for batch in held_out:
        with torch.no_grad():
            logits = model(**batch).logits
        logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
        guesses.append(logits)
        truth.append(labels)
    found["logits"], found["labels"] = torch.cat(guesses).tolist(), torch.cat(truth).tolist()
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        f"{out}/pretrained",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.load_state(f"{out}/state")
    model.train()
    rest = accelerator.skip_first_batches(data, 3)
    found["again"] = train(accelerator, model, optimizer, rest, schedule)
    return found


def bare(accelerator, out):
    """Train like examples without a Trainer: a model from its configuration, its embeddings
    grown.
    """
    set_seed(3)
    sizes = {"vocab_size": 40, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config)
    if model.get_input_embeddings().weight.shape[0] < 61:
        model.resize_token_embeddings(61)
    data = [{name: ids % 61 for name, ids in row.items()} for row in rows(32)]
    # a large epsilon: gradients that are zero in theory stay small instead of giving Adam a
    # direction
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model, optimizer, data = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8 // accelerator.num_processes)
    )
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    return {}


def looked_at(accelerator, out):
    """Evaluated before training, between forward and backward, in the middle of windows;
    generated from, too: bit for bit the same.
    """
    curves, weights = [], []
    for looking in (False, True):
        model, optimizer, data, schedule = prepared(accelerator, 48)
        held_out = rows(2)[accelerator.process_index % 2]

        def look(model=model, held_out=held_out):
            model.eval()
            with torch.no_grad():
                loss = model(
                    input_ids=held_out["input_ids"][None], labels=held_out["labels"][None]
                ).loss
            asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
            made = accelerator.unwrap_model(model).generate(
                held_out["input_ids"][None, :4], **asked
            )
            assert loss.isfinite() and made.shape[1] > 4
            model.train()

        curves.append(
            train(accelerator, model, optimizer, data, schedule, look if looking else lambda: None)
        )
        weights.append(accelerator.get_state_dict(model))
        model, optimizer, data, schedule = accelerator.free_memory(model, optimizer, data, schedule)
    assert curves[0] == curves[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    return curves[0]


def fitted(accelerator, out):
    """A batch size that is found: the first two do not fit, wherever in the step that shows."""
    tried = []

    @find_executable_batch_size(starting_batch_size=32, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def run(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        model, optimizer, data, schedule = prepared(accelerator, 48, batch_size)

        def between():
            between.calls += 1
            if batch_size > 8 and between.calls == batch_size // 8:
                raise RuntimeError("CUDA out of memory.")

        between.calls = 0
        return train(accelerator, model, optimizer, data, schedule, between)

    return {**run(), "tried": tried}


def refused(accelerator, out):
    """Accelerate raises for operations that it lacks for sharded models; its loaders make uneven
    inputs even.
    """
    model, optimizer, data, schedule = prepared(accelerator, 20)
    with contextlib.suppress(NotImplementedError), accelerator.join_uneven_inputs([model]):
        found = train(accelerator, model, optimizer, data, schedule)
    try:
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        found["clipped by value"] = True
    except Exception as error:
        found["clipped by value"] = str(error)
    return found


def tracked(accelerator, out):
    accelerator.init_trackers("cases", config={"rate": 1e-3})
    model, optimizer, data, schedule = prepared(accelerator, 24)
    for step, loss in enumerate(train(accelerator, model, optimizer, data, schedule)["losses"]):
        accelerator.log({"loss": loss}, step=step)
    return {
        "told": accelerator.get_tracker("notes", unwrap=True)
        if accelerator.is_main_process
        else None
    }


def with_tracker(out):
    from accelerate.tracking import GeneralTracker, on_main_process

    class NotesTracker(GeneralTracker):
        name, requires_logging_directory = "notes", False

        def __init__(self):
            super().__init__()
            self.entries = []

        @property
        def tracker(self):
            return self.entries

        def store_init_configuration(self, values):
            assert values == {"rate": 1e-3}

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.entries.append({**values, "step": step})

    return NotesTracker()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for case in args.cases:
        accelerator = Accelerator(
            gradient_accumulation_steps=1 if case == "bare" else 3,
            log_with=with_tracker(args.out) if case == "tracked" else None,
            project_config=ProjectConfiguration(project_dir=args.out),
        )
        report[case] = globals()[case](accelerator, f"{args.out}/{case}")
        report[case]["type"] = str(accelerator.distributed_type)
        if case != "bare":
            accelerator.free_memory()
    with open(os.path.join(args.out, f"report-{accelerator.process_index}.json"), "w") as file:
        json.dump(report, file)
    if "bare" not in args.cases:  # which tidies nothing
        accelerator.end_training()


if __name__ == "__main__":
    main()
