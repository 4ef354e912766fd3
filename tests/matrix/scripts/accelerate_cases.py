"""Loops as scripts write them for Accelerate, with one model or several, one after another; nothing
in them knows of ZeRO. A case ``NAME:3,2`` gives its two models a DeepSpeedPlugin each, of these
stages; else the launcher says what is used.
"""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration, find_executable_batch_size
from script import given, report
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.models import ARCHITECTURES, VOCAB

LENGTH, LIMIT = 9, 0.5
WIDTH, ROWS = 9, 8  # of the cases with several models


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
    """Seven micro-batches in windows of three: the last window is one; looked at before, between
    and within them. Then a metric over 21 rows; whole weights, three ways.
    """
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
    """Saved after the second step, gone on, gone back, gone on again; then once more in new
    objects.
    """
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


# ---- several models ----


class Net(nn.Module):
    def __init__(self, seed, depth=2, width=24):
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def features(accelerator, batches):
    made = torch.randn(ROWS * batches, WIDTH, generator=torch.Generator().manual_seed(11))
    return DataLoader(made, batch_size=ROWS // accelerator.num_processes)


def adam(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)


def select(accelerator, name):
    if accelerator.state.deepspeed_plugins:
        accelerator.state.select_deepspeed_plugin(name)


def step(accelerator, model, optimizer, loss, numbers):
    """One step of one model; notes its norm and its loss over all processes."""
    optimizer.zero_grad()
    accelerator.backward(loss)
    numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
    optimizer.step()
    numbers.append(accelerator.gather(loss.detach().reshape(1)).mean().item())


def adversarial(accelerator, out):
    """Two models, two optimizers, one step each in turn, clipped; by a second Accelerator, as in
    Accelerate's guide, where each model has a plugin.
    """
    several = accelerator.state.deepspeed_plugins
    other = Accelerator(gradient_accumulation_steps=1) if several else accelerator
    generator, critic, numbers = Net(1), Net(2), []
    of_generator, of_critic = adam(generator), adam(critic, 2e-2)
    slower = torch.optim.lr_scheduler.StepLR(of_generator, accelerator.num_processes, gamma=0.8)
    select(accelerator, "first")
    generator, of_generator, data, slower = accelerator.prepare(
        generator, of_generator, features(accelerator, 5), slower
    )
    select(other, "second")
    critic, of_critic, _ = other.prepare(critic, of_critic, features(accelerator, 1))
    for real in data:
        made = generator(real.roll(1, dims=-1))
        loss = (critic(real) - 1).pow(2).mean() + critic(made.detach()).pow(2).mean()
        step(other, critic, of_critic, loss, numbers)
        step(accelerator, generator, of_generator, (critic(made) - 1).pow(2).mean(), numbers)
        slower.step()
        numbers.append(slower.get_last_lr()[0])
    return {
        "losses": numbers,
        "stages": [getattr(each, "stage", 0) for each in (generator, critic)],
    }


def distilled(accelerator, out):
    """A teacher that is prepared first and never learns."""
    teacher, student, numbers = Net(3, depth=3).requires_grad_(False), Net(4), []
    optimizer = adam(student)
    select(accelerator, "second")
    teacher, _ = accelerator.prepare(teacher, features(accelerator, 1))
    select(accelerator, "first")
    student, optimizer, data = accelerator.prepare(student, optimizer, features(accelerator, 4))
    for x in data:
        with torch.no_grad():
            goal = teacher(x)
        step(accelerator, student, optimizer, (student(x) - goal).pow(2).mean(), numbers)
    return {"losses": numbers, "stages": [getattr(each, "stage", 0) for each in (student, teacher)]}


def two_halves(accelerator, out):
    """One loss through two models with an optimizer each, accumulated over three micro-batches
    with an uneven end.
    """
    encoder, decoder, numbers = Net(5), Net(6), []
    of_encoder = adam(encoder)
    of_decoder = torch.optim.SGD(decoder.parameters(), lr=0.1, momentum=0.9)
    data = features(accelerator, 7)
    encoder, of_encoder, data = accelerator.prepare(encoder, of_encoder, data)
    decoder, of_decoder = accelerator.prepare(decoder, of_decoder)
    for x in data:
        with accelerator.accumulate(encoder, decoder):
            code = encoder(x)
            loss = (decoder(code) - x).pow(2).mean() + 0.01 * code.pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                for model in (encoder, decoder):
                    numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
            for optimizer in (of_encoder, of_decoder):
                optimizer.step()
                optimizer.zero_grad()
        numbers.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return {"losses": numbers}


def plugin(stage):
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": LIMIT,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def main():
    args, seen = given(cases=[]), {}
    for case in args.cases:
        name, _, stages = case.partition(":")
        chosen = {}
        if stages:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            first, second = map(int, stages.split(","))
            chosen = {"deepspeed_plugins": {"first": plugin(first), "second": plugin(second)}}
        accelerator = Accelerator(
            gradient_accumulation_steps=1 if name in ("adversarial", "distilled") else 3,
            project_config=ProjectConfiguration(project_dir=str(args.out)),
            **chosen,
        )
        seen[case] = globals()[name](accelerator, args.out / name)
        seen[case]["type"] = str(accelerator.distributed_type)
        accelerator.free_memory()
    report(args.out, seen)


if __name__ == "__main__":
    main()
