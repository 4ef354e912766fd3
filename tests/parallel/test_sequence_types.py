"""Sequences split among two ranks, for every causal model type of transformers: as one process
reads them, or refused by name.
"""

import pytest

from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.causal_zoo import NOT_SMALL, by_model_type, tiny
from tests.helpers.ranks import RankFailed
from tests.helpers.sequences import Ranks, SequenceJob, packed, padded, plain, train_on_threads
from tests.helpers.training import Plan

PLAN = Plan(ranks=1, steps=1)
# positions behind the padding, in embeddings alone, rotary, in a table
SOON = {"roberta", "opt", "biogpt", "llama", "gpt_neox"}


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


pytest_generate_tests = by_model_type(SOON, without=NOT_SMALL)


@pytest.mark.parametrize("batch", BATCHES)
def test_as_in_one_process(model_type, batch):
    def make():
        return tiny(model_type, **({"pad_token_id": 1} if model_type == "roberta" else {}))

    job = SequenceJob(make, BATCHES[batch])
    try:
        found, _ = train_on_threads(job, PLAN, Ranks(2), 1)
    except RankFailed as failed:
        assert isinstance(failed.__cause__, ConfigError)
        assert model_type not in SOON
        return
    oracle.compare(found, oracle.run(job, PLAN))
