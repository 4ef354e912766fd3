"""Sequences split among two ranks, for every causal model type of transformers: as one process
reads them, or refused by name.
"""

import pytest

from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.causal_zoo import NOT_SMALL, by_model_type, tiny
from tests.helpers.cells import in_one_item
from tests.helpers.ranks import RankFailed
from tests.helpers.sequences import Ranks, SequenceJob, packed, padded, plain, train_on_threads
from tests.helpers.training import Plan

PLAN = Plan(ranks=1, steps=1)


def with_padding_inside(at):
    """The padding token among others, which have labels, as where it ends documents."""
    batch = plain(at)
    batch["input_ids"][0, [2, 6, 9]] = 0
    batch["input_ids"][1, 12:] = 0
    return batch


BATCHES = {
    "plain": plain,
    "packed": packed,
    "padded": padded,
    "padding inside": with_padding_inside,
}
# positions behind the padding, in embeddings alone, in a table, rotary
SOON = [
    ("roberta", "padding inside"),
    ("opt", "padded"),
    ("biogpt", "padding inside"),
    ("gpt_neox", "packed"),
]
pytest_generate_tests = by_model_type((), without=NOT_SMALL)


def check(kind, batch):
    def make():
        return tiny(kind, **({"pad_token_id": 1} if kind == "roberta" else {}))

    job = SequenceJob(make, BATCHES[batch])
    found, _ = train_on_threads(job, PLAN, Ranks(2), 1)
    oracle.compare(found, oracle.run(job, PLAN))


@in_one_item(SOON)
def test_as_in_one_process(cell):
    check(*cell)


@pytest.mark.long
@pytest.mark.parametrize("batch", BATCHES)
def test_every_model_type(model_type, batch):
    try:
        check(model_type, batch)
    except RankFailed as failed:
        assert isinstance(failed.__cause__, ConfigError)
