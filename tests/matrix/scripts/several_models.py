"""Scripts with several models, as their users write them for Accelerate: nothing in the cases knows
of ZeRO.

A case ``NAME:3,2`` gives its two models a DeepSpeedPlugin each, of these stages; else the launcher
says what is used.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader

ROWS, WIDTH = 8, 9
LIMIT = 0.5


class Net(nn.Module):
    def __init__(self, seed, depth=2, width=24):
        super().__init__()
        set_seed(seed)
        self.enter = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.leave = nn.Linear(width, WIDTH)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def loader(accelerator, batches):
    rows = torch.randn(ROWS * batches, WIDTH, generator=torch.Generator().manual_seed(11))
    return DataLoader(rows, batch_size=ROWS // accelerator.num_processes)


def adam(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)


class Notes:
    """Losses over all processes, norms, and the weights at the end."""

    def __init__(self, accelerator, name, out):
        self.accelerator, self.name, self.out = accelerator, name, out
        self.numbers = {}

    def loss(self, key, value):
        self.numbers.setdefault(key, []).append(
            self.accelerator.gather(value.detach().reshape(1)).mean().item()
        )

    def number(self, key, value):
        self.numbers.setdefault(key, []).append(float(value))

    def weights(self, **models):
        for key, model in models.items():
            state = self.accelerator.get_state_dict(model)
            if self.accelerator.is_main_process:
                torch.save(state, f"{self.out}/{self.name}-{key}.pt")
        self.accelerator.wait_for_everyone()


def adversarial(accelerator, notes):
    """Two models, two optimizers, two schedules, one step each in turn, clipped."""
    generator, critic = Net(1), Net(2)
    of_generator, of_critic = adam(generator), adam(critic, 2e-2)
    slower = torch.optim.lr_scheduler.StepLR(of_generator, accelerator.num_processes, gamma=0.8)
    generator, of_generator, data, slower = accelerator.prepare(
        generator, of_generator, loader(accelerator, 5), slower
    )
    critic, of_critic = accelerator.prepare(critic, of_critic)
    for real in data:
        made = generator(real.roll(1, dims=-1))
        loss = (critic(real) - 1).pow(2).mean() + critic(made.detach()).pow(2).mean()
        of_critic.zero_grad()
        accelerator.backward(loss)
        notes.number("norm of the critic", accelerator.clip_grad_norm_(critic.parameters(), LIMIT))
        of_critic.step()
        notes.loss("critic", loss)
        loss = (critic(made) - 1).pow(2).mean()
        of_generator.zero_grad()
        accelerator.backward(loss)
        notes.number(
            "norm of the generator", accelerator.clip_grad_norm_(generator.parameters(), LIMIT)
        )
        of_generator.step()
        slower.step()
        notes.loss("generator", loss)
        notes.number("rate", slower.get_last_lr()[0])
    notes.weights(generator=generator, critic=critic)
    accelerator.free_memory()


def distilled(accelerator, notes):
    """A teacher that is prepared first and never learns."""
    teacher, student = Net(3, depth=3), Net(4)
    teacher.requires_grad_(False)
    optimizer = adam(student)
    teacher, _ = accelerator.prepare(teacher, loader(accelerator, 1))
    student, optimizer, data = accelerator.prepare(student, optimizer, loader(accelerator, 7))
    for x in data:
        with accelerator.accumulate(student):
            with torch.no_grad():
                goal = teacher(x)
            loss = (student(x) - goal).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(student.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        notes.loss("student", loss)
    notes.weights(student=student, teacher=teacher)
    accelerator.free_memory()


def two_halves(accelerator, notes):
    """One loss through two models with an optimizer each, accumulated over two micro-batches
    with an uneven end.
    """
    encoder, decoder = Net(5), Net(6)
    of_encoder, of_decoder = (
        adam(encoder),
        torch.optim.SGD(decoder.parameters(), lr=0.1, momentum=0.9),
    )
    encoder, of_encoder, data = accelerator.prepare(encoder, of_encoder, loader(accelerator, 7))
    decoder, of_decoder = accelerator.prepare(decoder, of_decoder)
    for x in data:
        with accelerator.accumulate(encoder, decoder):
            code = encoder(x)
            loss = (decoder(code) - x).pow(2).mean() + 0.01 * code.pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                notes.number(
                    "norm of the encoder", accelerator.clip_grad_norm_(encoder.parameters(), LIMIT)
                )
                notes.number(
                    "norm of the decoder", accelerator.clip_grad_norm_(decoder.parameters(), LIMIT)
                )
            for optimizer in (of_encoder, of_decoder):
                optimizer.step()
                optimizer.zero_grad()
        notes.loss("both", loss)
    notes.weights(encoder=encoder, decoder=decoder)
    accelerator.free_memory()


def plugin(stage):
    return DeepSpeedPlugin(
        hf_ds_config={
            "zero_optimization": {
                "stage": int(stage),
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": LIMIT,
        }
    )


def select(accelerator, name):
    if accelerator.state.deepspeed_plugins:
        accelerator.state.select_deepspeed_plugin(name)


def a_plugin_each(accelerator, notes):
    """The teacher and the student of one Accelerator each under the configuration of its own."""
    teacher, student = Net(3, depth=3).requires_grad_(False), Net(4)
    optimizer = adam(student)
    select(accelerator, "second")
    teacher, _ = accelerator.prepare(teacher, loader(accelerator, 1))
    select(accelerator, "first")
    student, optimizer, data = accelerator.prepare(student, optimizer, loader(accelerator, 4))
    for x in data:
        with torch.no_grad():
            goal = teacher(x)
        loss = (student(x) - goal).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        notes.loss("student", loss)
    notes.stages = [getattr(model, "stage", None) for model in (student, teacher)]
    accelerator.free_memory()


def an_accelerator_each(accelerator, notes):
    """Two models train as in Accelerate's guide: a second Accelerator with a plugin of its own."""
    other = Accelerator()
    generator, critic = Net(1), Net(2)
    of_generator, of_critic = adam(generator), adam(critic)
    select(accelerator, "first")
    generator, of_generator, data = accelerator.prepare(
        generator, of_generator, loader(accelerator, 5)
    )
    select(other, "second")
    critic, of_critic, _ = other.prepare(critic, of_critic, loader(accelerator, 1))
    for real in data:
        made = generator(real.roll(1, dims=-1))
        loss = (critic(real) - 1).pow(2).mean() + critic(made.detach()).pow(2).mean()
        of_critic.zero_grad()
        other.backward(loss)
        other.clip_grad_norm_(critic.parameters(), LIMIT)
        of_critic.step()
        notes.loss("critic", loss)
        loss = (critic(made) - 1).pow(2).mean()
        of_generator.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(generator.parameters(), LIMIT)
        of_generator.step()
        notes.loss("generator", loss)
    notes.stages = [getattr(model, "stage", None) for model in (generator, critic)]
    accelerator.free_memory()
    other.free_memory()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    args = parser.parse_args()
    report = {}
    for case in args.cases:
        name, _, stages = case.partition(":")
        chosen = {}
        if stages:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            first, second = stages.split(",")
            chosen = {"deepspeed_plugins": {"first": plugin(first), "second": plugin(second)}}
        accelerator = Accelerator(gradient_accumulation_steps=2, **chosen)
        notes = Notes(accelerator, name, args.out)
        globals()[name](accelerator, notes)
        report[case] = {
            **notes.numbers,
            "type": str(accelerator.distributed_type),
            "stages": getattr(notes, "stages", None),
        }
    with open(f"{args.out}/report-{accelerator.process_index}.json", "w") as file:
        json.dump(report, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
