"""Schedules and trackers that a training file names, looked up before the ranks start."""

from __future__ import annotations

from hf_zero.config.spelling import did_you_mean
from hf_zero.config.training_file import TrainingFile
from hf_zero.errors import ConfigError


def refuse_unknown_names(training: TrainingFile) -> None:
    """Raise ConfigError if ``training`` names a schedule of the learning rate or a tracker that
    Transformers does not have, or that cannot be made from the file's keys.
    """
    if training.lr_scheduler_type is not None:
        _refuse_schedule(training, training.lr_scheduler_type)
    trackers = training.report_to or []
    for tracker in [trackers] if isinstance(trackers, str) else trackers:
        _refuse_tracker(tracker)


def _refuse_schedule(training: TrainingFile, name: str) -> None:
    import torch
    from transformers import SchedulerType, get_scheduler

    names = [kind.value for kind in SchedulerType]
    if name not in names:
        raise ConfigError(f"lr_scheduler_type: there is no {name!r:.80}{did_you_mean(name, names)}")
    evaluates = training.eval_split or training.eval_fraction
    if name == SchedulerType.REDUCE_ON_PLATEAU and not evaluates:
        raise ConfigError(
            f"lr_scheduler_type: {name} follows the loss of evaluations, and there are none; write "
            "eval_fraction: 0.01, or eval_split"
        )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    try:
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_type: {name} needs arguments that a training file does not have "
            f"({error}); write lr_scheduler_type: cosine, or add lr_scheduler_kwargs to the script "
            "that --script prints"
        ) from error


def _refuse_tracker(name: str) -> None:
    from transformers import integrations

    trackers = integrations.INTEGRATION_TO_CALLBACK
    if name in ("all", "none"):
        return
    if name not in trackers:
        raise ConfigError(
            f"report_to: there is no tracker {name!r:.80}{did_you_mean(name, [*trackers, 'none'])}"
        )
    try:
        trackers[name]()
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().rstrip(".")
        raise ConfigError(
            f"report_to: {name} is not installed ({reason:.200}); install it, or write "
            "report_to: none"
        ) from error
