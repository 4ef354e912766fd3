"""The columns of a training file's dataset, checked before the ranks start."""

from __future__ import annotations

from hf_zero.config.training_file import DPO, PRETRAIN, SFT, TrainingFile
from hf_zero.errors import ConfigError
from hf_zero.launch.training_script import dataset_arguments

ALTERNATIVES = {
    SFT: ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"}, {"input_ids"}),
    DPO: ({"chosen", "rejected"},),
    PRETRAIN: ({"text"}, {"input_ids"}),
}
"""Sets of columns that a trainer of TRL reads, by task; one of them is enough."""


def refuse_unread_data(training: TrainingFile) -> None:
    """Raise ConfigError if the dataset of ``training`` is a file that cannot be loaded, or lacks
    the columns of the task. A dataset of the Hub is left to the script.
    """
    positional, named = dataset_arguments(training)
    if not named:  # a dataset of the Hub
        return
    import datasets

    try:
        data = datasets.load_dataset(*positional, split=training.split, **named)
    except Exception as error:  # pyarrow's, pandas' and datasets' errors have no common class
        cause = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(
            f"dataset: {training.dataset} cannot be loaded with split: {training.split} "
            f"({cause:.300}); mend the file, or name another"
        ) from error
    columns, mapped = data.column_names, training.columns
    for ours, theirs in mapped.items():
        if theirs not in columns:
            raise ConfigError(
                f"columns: {ours}: {training.dataset} has no column {theirs!r:.80}; name one of "
                f"{', '.join(columns)}"
            )
    read = {*mapped} if mapped else {*columns}
    if not any(needed <= read for needed in ALTERNATIVES[training.task]):
        needs = " or ".join(" and ".join(sorted(needed)) for needed in ALTERNATIVES[training.task])
        raise ConfigError(
            f"dataset: task {training.task} reads the columns {needs}, and {training.dataset} "
            f"has {', '.join(sorted(read))}; map them, as in columns: {{prompt: question}}"
        )
