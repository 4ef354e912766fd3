"""Trainers as scripts write them, one after another; ``--stages 2 3`` runs each of them at these
stages, none runs it plainly.

Each case trains, evaluates and predicts, and reports what the Trainer logged and gave back.
"""

import argparse
import json
import os

import torch
import transformers

from tests.helpers.models import ARCHITECTURES, VOCAB, seeded
from tests.helpers.trainers import options, weights

LENGTH = 9
OFFLOAD = {}  # sections of zero_optimization, from the command line


def rows(count, longest=LENGTH, shortest=LENGTH, labels=None):
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(count):
        size = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(3, VOCAB, (size,), generator=generator)
        made.append(
            {"input_ids": ids, "labels": ids.clone() if labels is None else ids[:labels].clone()}
        )
    return made


def padded(features):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([feature["input_ids"] for feature in features], batch_first=True, padding_value=2)
    labels = pad([feature["labels"] for feature in features], batch_first=True, padding_value=-100)
    mask = pad([torch.ones_like(feature["input_ids"]) for feature in features], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def settings(out, stage, **changes):
    """Two windows of four rows make a step: on one process one after the other, on two side by
    side.
    """
    chosen = {
        "use_cpu": stage is None,
        "gradient_accumulation_steps": 2 // int(os.environ.get("WORLD_SIZE", 1)),
        "learning_rate": 3e-3,
        "warmup_steps": 0,
    }
    zero = (
        {} if stage is None else {"deepspeed": {"zero_optimization": {"stage": stage, **OFFLOAD}}}
    )
    return options(out, **{**chosen, **zero, **changes})


def history(trainer):
    """Return the log history without the values that depend on a clock."""
    kept = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "eval_accuracy",
        "eval_length",
        "epoch",
    )
    return [
        {key: value for key, value in entry.items() if key in kept}
        for entry in trainer.state.log_history
    ]


def without_padding(generated, pad, count):
    """``count`` answers.

    Seq2SeqTrainer gives those of the rows that fill the last batch, too, whatever trains it.
    """
    return [[int(token) for token in row if token not in (pad, -100)] for row in generated[:count]]


def sequences(name, stage, out):
    """Encoder and decoder; sequences end where one of several tokens comes, so ranks generate
    for different numbers of steps.
    """
    model = seeded(MODELS[name])
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    data = rows(32, labels=5)

    def compute_metrics(answer):
        lengths = [len(row) for row in without_padding(answer.predictions, pad, 11)]
        return {"length": sum(lengths) / len(lengths)}

    ends = list(range(20, 26))
    generation = transformers.GenerationConfig(
        max_length=14, eos_token_id=ends, pad_token_id=pad, decoder_start_token_id=start
    )
    chosen = {
        "predict_with_generate": True,
        "generation_config": generation,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(**settings(out, stage, **chosen)),
        train_dataset=data,
        eval_dataset=data[:11],
        compute_metrics=compute_metrics,
    )
    found = {"before": without_padding(trainer.predict(data[:11]).predictions, pad, 11)}
    trainer.train()
    found["after"] = without_padding(trainer.predict(data[5:18]).predictions, pad, 13)
    found["beams"] = without_padding(
        trainer.predict(data[:3], num_beams=2, max_length=8).predictions, pad, 3
    )
    # The loss of the last batch is a mean with the rows that fill it.
    found["log"] = [
        {key: value for key, value in entry.items() if key != "eval_loss"}
        for entry in history(trainer)
    ]
    return trainer, found


def t5(stage, out):
    return sequences("t5", stage, out)


def bart(stage, out):
    return sequences("bart", stage, out)


def marian(stage, out):
    return sequences("marian", stage, out)


def tiny(kind, prefix):
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    }
    heads = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.0,
        "max_position_embeddings": 32,
        "init_std": 0.2,
    }
    tokens = {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    return lambda: kind(prefix(**sizes, **heads, **tokens))


MODELS = {
    "t5": ARCHITECTURES["t5"].make,
    "bart": tiny(transformers.BartForConditionalGeneration, transformers.BartConfig),
    "marian": tiny(transformers.MarianMTModel, transformers.MarianConfig),
}


def accuracy(answer):
    guesses, labels = answer.predictions[:, :-1], answer.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels >= 0].mean())}


def causal(out, stage, callbacks=(), smooth=0.1, **changes):
    data = rows(64, shortest=3)
    arguments = {
        "train_sampling_strategy": "group_by_length",
        "label_smoothing_factor": smooth,
        "eval_accumulation_steps": 1,
    }
    return transformers.Trainer(
        model=ARCHITECTURES["gpt2"].build(),
        args=transformers.TrainingArguments(**settings(out, stage, **arguments, **changes)),
        data_collator=padded,
        train_dataset=data,
        eval_dataset=rows(16),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=list(callbacks),
    )


def metrics(stage, out):
    """Batches of like lengths, smoothed labels, a metric over all rows, an evaluation before the
    first step.
    """
    trainer = causal(out, stage, eval_strategy="steps", eval_steps=2, eval_on_start=True)
    trainer.train()
    uneven = trainer.predict(rows(11, shortest=4))
    found = {
        "log": history(trainer),
        "accuracy": uneven.metrics["test_accuracy"],
        "shape": list(uneven.predictions.shape),
    }
    return trainer, {**found, "evaluated": trainer.evaluate()["eval_accuracy"]}


def stopped(stage, out):
    """A learning rate that spoils the model: training stops early, and the best model comes
    back.
    """
    spoils = {
        "learning_rate": 0.5,
        "max_steps": 12,
        "warmup_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    saves = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 2,
    }
    trainer = causal(
        out,
        stage,
        [transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        **spoils,
        **saves,
    )
    trainer.train()
    found = {
        "log": history(trainer),
        "best": trainer.state.best_metric,
        "steps": trainer.state.global_step,
    }
    found["best at"] = trainer.state.best_global_step
    return trainer, {**found, "again": trainer.evaluate()["eval_loss"]}


def model_only(stage, out):
    """Checkpoints without optimizer: the test reads them as a user would."""
    trainer = causal(
        out, stage, smooth=0.0, save_strategy="steps", save_steps=2, save_only_model=True
    )
    trainer.train()
    return trainer, {"log": history(trainer)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", nargs="*", type=int, default=[])
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--offload", type=json.loads, default={})
    args = parser.parse_args()
    OFFLOAD.update(args.offload)
    torch.set_num_threads(1)
    rank, report = int(os.environ.get("RANK", 0)), {}
    for stage in args.stages or [None]:
        for case in args.cases:
            trainer, found = globals()[case](stage, f"{args.out}/{case}-{stage}")
            found["type"] = str(trainer.accelerator.distributed_type)
            found["stage"] = trainer.deepspeed.stage if stage is not None else None
            found_weights = weights(trainer)
            if rank == 0:
                torch.save(found_weights, f"{args.out}/{case}-{stage}.pt")
            report[f"{case} {stage}"] = found
    with open(f"{args.out}/report-{rank}.json", "w") as file:
        json.dump(report, file)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
