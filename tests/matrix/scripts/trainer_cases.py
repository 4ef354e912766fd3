"""Trainers as scripts write them, one after another. A case is a route to ZeRO with a stage
(``ours3``, ``ddp0``), or a training that also generates, measures, saves and stops, at each of
``--stages`` or plainly.
"""

import torch
import transformers
from script import RANK, WORLD, given, report

import hf_zero
from tests.helpers.models import ARCHITECTURES, VOCAB, seeded
from tests.helpers.trainers import logged, options, routed, weights

LENGTH = 9
WINDOW = {"gradient_accumulation_steps": 4 // WORLD}


# ---- routes ----


def state(run):
    """Return this rank's view of itself, and the results of its training."""
    engine = run.model_wrapped
    seen = {
        "kind": type(engine).__name__,
        "distributed": str(run.accelerator.distributed_type).rpartition(".")[2],
        "world": [run.args.world_size, run.accelerator.num_processes],
        "main": run.is_world_process_zero(),
        "batches": len(run.get_train_dataloader()),
        "digest": float(sum(value.double().abs().sum() for value in weights(run).values())),
    }
    for key in ("loss", "grad_norm", "eval_loss", "tokens_per_second", "memory_mib"):
        seen[key] = logged(run, key)
    if isinstance(engine, hf_zero.Engine):
        place = {"stage": engine.stage, "rank": engine.global_rank}
        seen |= {**place, "bytes": engine.state_bytes()}
    return seen


def route(name, folder):
    kind, stage = name.rstrip("0123"), int(name[-1])
    # Without use_cpu Accelerate believes each rank to be alone, until ZeRO is asked for.
    cpu = {"use_cpu": kind in ("ddp", "again", "stock") or stage < 2}
    run = routed(kind, stage, folder, **WINDOW, **cpu)
    run.train()
    return state(run)


# ---- generation, metrics, early stopping ----


def rows(count, longest=LENGTH, shortest=LENGTH, labels=None):
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(count):
        size = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(3, VOCAB, (size,), generator=generator)
        made.append({"input_ids": ids, "labels": ids[:labels].clone()})
    return made


def padded(features):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([feature["input_ids"] for feature in features], batch_first=True, padding_value=2)
    labels = pad([feature["labels"] for feature in features], batch_first=True, padding_value=-100)
    mask = pad([torch.ones_like(feature["input_ids"]) for feature in features], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def settings(out, stage, **changes):
    """Two windows of four rows make a step: one after the other, or side by side."""
    window = {"use_cpu": stage is None, "gradient_accumulation_steps": 2 // WORLD}
    zero = {} if stage is None else {"deepspeed": {"zero_optimization": {"stage": stage}}}
    return options(out, **{"learning_rate": 3e-3, "warmup_steps": 0, **window, **zero, **changes})


def history(trainer, *without):
    """Return the log history without the values that depend on a clock."""
    kept = {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_length"}
    return [
        {key: value for key, value in entry.items() if key in kept.difference(without)}
        for entry in trainer.state.log_history
    ]


def bart(stage, out):
    """Ends at one of several tokens, so that ranks generate for different numbers of steps."""
    pad, start, ends = 1, 2, list(range(20, 26))
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0,
        max_position_embeddings=32, init_std=0.2, pad_token_id=pad, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=start, forced_eos_token_id=None,
    )  # fmt: skip
    data = rows(32, labels=5)

    def answers(generated, count):
        """Seq2SeqTrainer gives those of the rows that fill the last batch, too."""
        kept = [[int(token) for token in row if token not in (pad, -100)] for row in generated]
        return kept[:count]

    def compute_metrics(answer):
        lengths = [len(row) for row in answers(answer.predictions, 11)]
        return {"length": sum(lengths) / len(lengths)}

    generation = transformers.GenerationConfig(
        max_length=14, eos_token_id=ends, pad_token_id=pad, decoder_start_token_id=start
    )
    chosen = {"predict_with_generate": True, "generation_config": generation}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = transformers.Seq2SeqTrainer(
        model=seeded(lambda: transformers.BartForConditionalGeneration(config)),
        args=transformers.Seq2SeqTrainingArguments(**settings(out, stage, **chosen, **evaluated)),
        train_dataset=data,
        eval_dataset=data[:11],
        compute_metrics=compute_metrics,
    )
    found = {"before": answers(trainer.predict(data[:11]).predictions, 11)}
    trainer.train()
    found["after"] = answers(trainer.predict(data[5:18]).predictions, 13)
    beams = trainer.predict(data[:3], num_beams=2, max_length=8)
    found["beams"] = answers(beams.predictions, 3)
    # The loss of the last batch is a mean with the rows that fill it.
    return trainer, {**found, "log": history(trainer, "eval_loss")}


def accuracy(answer):
    guesses, labels = answer.predictions[:, :-1], answer.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels >= 0].mean())}


def causal(out, stage, callbacks=(), **changes):
    """Batches of like lengths, smoothed labels, a metric over all rows."""
    alike = {"train_sampling_strategy": "group_by_length", "eval_accumulation_steps": 1}
    chosen = {**alike, "label_smoothing_factor": 0.1, **changes}
    return transformers.Trainer(
        model=ARCHITECTURES["gpt2"].build(),
        args=transformers.TrainingArguments(**settings(out, stage, **chosen)),
        data_collator=padded,
        train_dataset=rows(64, shortest=3),
        eval_dataset=rows(16),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=list(callbacks),
    )


def stopped(stage, out):
    """The rate spoils the model: training stops early, and the best model comes back."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
    each = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    spoils = {"learning_rate": 0.5, "max_steps": 12, "warmup_steps": 3, "eval_on_start": True}
    stops = [transformers.EarlyStoppingCallback(early_stopping_patience=2)]
    trainer = causal(out, stage, stops, **best, **each, **spoils)
    trainer.train()
    found = {"log": history(trainer), "best": trainer.state.best_metric}
    found |= {"steps": trainer.state.global_step, "best at": trainer.state.best_global_step}
    uneven = trainer.predict(rows(11, shortest=4))
    found["predicted"] = [uneven.metrics["test_accuracy"], *uneven.predictions.shape]
    return trainer, {**found, "again": trainer.evaluate()["eval_loss"]}


def main():
    args, seen = given(cases=[], stages=[]), {}
    for case in args.cases:
        if case[-1].isdigit():
            seen[case] = route(case, args.out / case)
            continue
        for stage in map(int, args.stages) if args.stages else [None]:
            trainer, found = globals()[case](stage, args.out / f"{case}-{stage}")
            found["type"] = str(trainer.accelerator.distributed_type)
            found["stage"] = trainer.deepspeed.stage if stage is not None else None
            found_weights = weights(trainer)
            if RANK == 0:
                torch.save(found_weights, args.out / f"{case}-{stage}.pt")
            seen[f"{case} {stage}"] = found
    report(args.out, seen)


if __name__ == "__main__":
    main()
