"""Probes of the installed libraries: they hold here, and fail where a part does not act."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable

import pytest
import torch

from hf_zero.errors import ConfigError, VerificationError
from hf_zero.integrations import probes, seams
from hf_zero.integrations.fused import candidates
from hf_zero.integrations.fused.recognition import Recognition
from hf_zero.loading import LazyTensor
from hf_zero.techniques.token_cut import TokenCut
from tests.helpers.cells import in_one_item, in_turn


@in_one_item(probes.PROBES, named=lambda probe: probe.part)
def test_a_probe_holds_for_the_installed_release(probe: probes.Probe) -> None:
    """Where the table says that an earlier release lacks a part, the probe sees it."""
    if probe.expected(importlib.metadata.version(probe.library)):
        probe.run()
    else:
        with pytest.raises((ImportError, ConfigError)):
            probe.run()


def test_each_seam_has_one_and_each_library_a_range() -> None:
    held = [probe for probe in probes.PROBES if getattr(probe.run, "func", None) is probes._hold]
    assert [probe.run.args[0] for probe in held] == [*seams.SEAMS]  # type: ignore[attr-defined]
    assert {probe.library for probe in probes.PROBES} == {*seams.RELEASES}


def test_names_that_code_imports_when_it_is_called_have_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = probes.imported_names()
    users = named["accelerate.utils", "DeepSpeedSequenceParallelConfig"]
    assert users == ["hf_zero.integrations.accelerate.state:_with_shared_sequences"]
    assert {f"{module}:{name}" for module, name in named} >= {*seams.SINCE}
    assert {probe.part for probe in probes.PROBES} >= {", ".join(users)}
    source = (
        "if TYPE_CHECKING:\n    from transformers import Trainer\n"
        "def outer():\n    def inner():\n        from transformers import utils, hub\n"
        "    if True:\n        import transformers.utils\n        from torch import nn\n"
    )
    found: dict[tuple[str, str], list[str]] = {}
    probes._collect(ast.parse(source), "home", found)
    assert found == {
        ("transformers", "utils"): ["home:outer"], ("transformers", "hub"): ["home:outer"],
    }  # fmt: skip
    probes._import("transformers", "utils")
    with pytest.raises(ImportError, match="transformers has no hub"):
        probes._import("transformers", "hub")


def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCut, "arguments", lambda self, args, kwargs, *_: (args, kwargs))


def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyTensor, "__new__", lambda cls, each: torch.zeros(each.shape))


def unrecognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "verdict_on", lambda module: Recognition())


def left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.left_out, seams.SEAMS[0].target, "is gone")


@in_turn(
    "broken, number, said",
    [
        (read_at_once, 0, "has other values"),
        (uncut, 1, "returns other tokens than it gets"),
        (read_at_once, 2, "read the weights at once"),
        (unrecognized, 3, "no module of LlamaForCausalLM has activations, norms"),
        (left, 4, "add_argument is gone"),
    ],
)
def test_a_probe_fails_where_its_part_does_not_act(
    broken: Callable[[pytest.MonkeyPatch], None], number: int, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    broken(monkeypatch)
    with pytest.raises(VerificationError, match=said):
        probes.PROBES[number].run()
