"""Where shards live: what is stored is fetched, by the row's name, in the row's dtype."""

from __future__ import annotations

import pytest
import torch

from hf_zero.core.storage import ROWS, open_storage
from hf_zero.errors import NotBuiltError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_starts_at_zero_and_gives_back_what_was_stored(row: str, dtype: torch.dtype) -> None:
    storage = open_storage(row, 24, dtype, CPU)
    assert storage.dtype == dtype and storage.nbytes == 24 * dtype.itemsize
    assert storage.fetch(0, 24).tolist() == [0] * 24
    storage.store(8, torch.arange(1, 9).to(dtype))
    assert storage.fetch(0, 24).tolist() == [0] * 8 + list(range(1, 9)) + [0] * 8
    fetched = storage.fetch(7, 10)
    assert fetched.dtype == dtype and fetched.device == CPU and fetched.tolist() == [0, 1, 2]


@pytest.mark.parametrize("row", ROWS)
def test_values_are_cast_to_the_dtype_of_the_row(row: str) -> None:
    storage = open_storage(row, 4, torch.bfloat16, CPU)
    values = torch.tensor([1.0, 1.001, -3.0, 1e-3])
    storage.store(0, values)
    assert torch.equal(storage.fetch(0, 4), values.bfloat16())


@pytest.mark.parametrize("row", ROWS)
def test_what_was_fetched_can_be_changed_and_stored_in_its_place(row: str) -> None:
    storage = open_storage(row, 8, torch.float32, CPU)
    values = storage.fetch(2, 5)
    values += 4
    storage.store(2, values)
    assert storage.fetch(0, 8).tolist() == [0, 0, 4, 4, 4, 0, 0, 0]


@pytest.mark.parametrize("row", ROWS)
def test_nothing_can_be_stored_and_fetched(row: str) -> None:
    storage = open_storage(row, 0, torch.float32, CPU)
    storage.store(0, torch.empty(0))
    assert storage.fetch(0, 0).numel() == 0 and storage.nbytes == 0


def test_fetching_from_the_device_costs_nothing() -> None:
    storage = open_storage("device", 16, torch.float32, CPU)
    assert storage.fetch(4, 8).data_ptr() == storage.fetch(0, 16).data_ptr() + 16


@pytest.mark.parametrize("row", ["nvme", "cpu", "tape"])
def test_a_place_that_is_not_built_is_named_with_those_that_are(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "device", ROWS["device"])
    monkeypatch.delitem(ROWS, row, raising=False)
    with pytest.raises(NotBuiltError, match=rf"storage '{row}' is not built in this version; use one of \['device'\]"):
        open_storage(row, 8, torch.float32, CPU)
