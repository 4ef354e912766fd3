"""State that is no tensor: JSON where it is faithful, weights_only where it is not, and nothing
that executes.
"""

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint.reader import join, load_objects
from hf_zero.checkpoint.save_sharded import is_json, split
from hf_zero.errors import CheckpointError


class Custom:
    pass


class Attack:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, float("inf"), "x", [1, [2]], {"a": {"b": []}}, {}]
)
def test_faithful_in_json(value):
    assert is_json(value)
    assert split("s", {"k": value}) == ({"json": {"k": value}, "objects": []}, {})


@pytest.mark.parametrize(
    "value", [(1, 2), {1: 2}, {"a": (1,)}, {3}, torch.ones(2), OrderedDict(a=1), b"x", 1j]
)
def test_not_faithful_in_json(value):
    assert not is_json(value)
    plain, objects = split("s", {"k": value, "n": 1})
    assert plain == {"json": {"n": 1}, "objects": ["k"]}
    assert type(objects["k"]) is type(value)


@pytest.mark.parametrize("value", [Custom(), Attack(), lambda: None, {"deep": [Custom()]}, open])
def test_what_would_execute_is_refused_by_name(value):
    with pytest.raises(
        CheckpointError,
        match=r"client_state\['bad'\] .* cannot be saved without a pickle .*store numbers",
    ):
        split("client_state", {"good": 1, "bad": value})


def test_keys_must_be_strings():
    with pytest.raises(
        CheckpointError, match=r"client_state has the key 3 of type int; keys must be strings"
    ):
        split("client_state", {3: 1})


def test_an_executing_pickle_is_not_loaded(tmp_path):
    path = tmp_path / "objects.pt"
    torch.save({"client_state": {"k": Attack()}}, path)
    with pytest.raises(CheckpointError, match=r"objects\.pt cannot be loaded"):
        load_objects(path)
    path.write_bytes(pickle.dumps(Attack(), protocol=2))
    with pytest.raises(CheckpointError, match=r"objects\.pt cannot be loaded"):
        load_objects(path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\3\4 cut"])
def test_damage(tmp_path, content):
    path = tmp_path / "objects.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"objects\.pt cannot be loaded.*restore the file"):
        load_objects(path)


@pytest.mark.parametrize("content", [[1], {"client_state": 3}])
def test_another_content(tmp_path, content):
    path = tmp_path / "objects.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="does not hold what hf-zero writes"):
        load_objects(path)


def test_a_promised_key_that_is_absent():
    with pytest.raises(CheckpointError, match=r"o\.pt lacks \['k'\] of client_state"):
        join("client_state", {"json": {}, "objects": ["k"]}, {}, Path("o.pt"))
