"""The table of features: its rows, its order, its refusals, and a package without one of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import load_sharded
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES, TABLE, FeatureRow, loaded, provided
from hf_zero.config.feature_rows import read as read_table
from hf_zero.config.features import (
    check_combination,
    conflicts,
    reason,
    refused_values,
    switched_on,
)
from hf_zero.config.keys import KEYS
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.feature import Feature, FeatureSet, early
from hf_zero.zero.step.step_interfaces import NO_HOOKS, StepHooks
from tests.helpers.stacks import on_ranks

DOCS = Path(hf_zero.__file__).parent / "docs"
# The order in which features with an object are applied to a model and its engine.
APPLIED = """
zero_optimization.offload_optimizer
narrow_state
pipeline
parallel_axes
compressed_communication
one_bit
quantization_aware_training
float8_training
fused_modules
engine_seams
activations
compile.capture
curriculum_learning
data_efficiency.data_sampling
training_phases
quantize_training
weight_quantization
progressive_layer_drop
data_efficiency.data_routing.random_ltd
tiled_mlp
torch_state_dicts
measures
memory_check
"""

ALWAYS = [
    "narrow_state",
    "pipeline",
    "parallel_axes",
    "engine_seams",
    "activations",
    "torch_state_dicts",
    "measures",
    "memory_check",
]


def test_rows_name_what_exists() -> None:
    kinds = {row.kind for row in FEATURES.values()}
    for name, row in FEATURES.items():
        assert (DOCS / f"{row.page}.md").exists(), name
        assert {*row.keys, *row.off, *row.sets, *(r.key for r in row.refuses)} <= KEYS.keys(), name
        assert {*row.after, *row.excludes} <= FEATURES.keys() - {name}, name
        entry = tomllib.loads(TABLE.read_text())[name]
        named = {*entry.get("after", ()), *entry.get("excludes", ())}
        assert named <= FEATURES.keys() | kinds - {""}, name
        assert not (row.kind in FEATURES and row.kind != name), "a kind is no feature"
        assert all("; " in why for why in row.excludes.values()), "a reason has a remedy"
        for factory in filter(
            None, (row.make, row.extends, row.early, row.loads, *row.provides.values())
        ):
            assert callable(loaded(factory)) or ":" not in factory, name
    assert {"axes", "messages", "offload", "techniques"} <= kinds


def test_what_no_row_provides_is_refused() -> None:
    assert provided("nothing", 3) == 3
    with pytest.raises(ConfigError, match="no feature of this package provides 'nothing'; install"):
        provided("nothing")


def test_a_library_that_a_feature_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_library.py").write_text("import no_such_library.of_mine\n")
    (tmp_path / "needs_our_module.py").write_text("import hf_zero.no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    row = replace(FEATURES["float8_training"], make="needs_a_library:make")
    monkeypatch.setitem(FEATURES, row.name, row)
    settings = ZeroConfig.from_dict({"float8_training": {"recipe": "rowwise"}})
    with pytest.raises(
        ConfigError,
        match=r"^float8_training \(linear layers that multiply in float8\) needs no_such_library, "
        r"which is not installed; pip install no_such_library, or remove what",
    ):
        FeatureSet.of(settings)
    with pytest.raises(ModuleNotFoundError, match=r"hf_zero\.no_such_module"):  # a fault of ours
        row.load("needs_our_module:make")


def test_the_order_follows_from_the_table() -> None:
    applied = [name for name, row in FEATURES.items() if row.make]
    moved = {*applied} ^ {*APPLIED.split()}
    assert not moved, f"add to, or take out of, APPLIED above, in the order of the table: {moved}"
    assert applied == APPLIED.split(), "the order of the table changed: compare it with APPLIED"
    tables = tomllib.loads(TABLE.read_text())
    rows = {name: f'["{name}"]\nwords = "w"\npage = "p"\n' for name in "abc"}
    rows["a"] += 'after = ["c"]\n'
    assert [*read_table("".join(rows.values()))] == ["c", "a", "b"]
    rows["c"] += 'after = ["a"]\n'
    with pytest.raises(AssertionError, match="a > c > a"):
        read_table("".join(rows.values()))
    assert tables.keys() == FEATURES.keys()


def test_what_is_on_follows_from_keys() -> None:
    assert switched_on({}) == []
    values = {"zero_optimization.offload_param.device": "cpu", "zero_optimization.stage": 2}
    assert switched_on(values) == []
    values["zero_optimization.stage"] = 3
    assert switched_on(values) == ["zero_optimization.offload_param"]
    off = {"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": True}}}}
    assert "data_efficiency.data_routing.random_ltd" not in switched_on(
        ZeroConfig.from_dict(off).written
    )


def test_a_feature_that_is_off_has_no_object() -> None:
    features = FeatureSet.of(ZeroConfig(stage=1))
    assert [*features.by_name] == ALWAYS
    features = FeatureSet.of(ZeroConfig.from_dict({"progressive_layer_drop": {"enabled": True}}))
    assert [*features.by_name] == [*ALWAYS[:-3], "progressive_layer_drop", *ALWAYS[-3:]]
    assert all(isinstance(each, Feature) and each.name for each in features)
    assert extensions_of(ZeroConfig(stage=3)).codecs == ()


class Counting(Feature):
    """A feature that acts at two points of a step."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin_backward(self) -> None:
        self.calls.append("backward")

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        self.calls.append((number, overflow, scale))


def test_a_step_calls_the_methods_that_features_override_and_no_others() -> None:
    counting = Counting()
    hooks = FeatureSet({"none": Feature(), "counting": counting}).hooks
    assert hooks == StepHooks(
        begin_backward=(counting.begin_backward,), end_step=(counting.end_step,)
    )
    assert FeatureSet({"none": Feature()}).hooks == NO_HOOKS

    def run(rank: int, model: torch.nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine_plan = Engine.plan(model, ZeroConfig(stage=1).resolve(1), optimizer, extensions_of)
        engine = Engine(engine_plan, FeatureSet({"counting": counting}))
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        assert counting.calls == ["backward", (1, False, 1.0), "backward", (2, False, 1.0)]
        engine.destroy()
        assert engine.optimizer_step.feature_hooks == NO_HOOKS

    on_ranks(1, run, build=lambda: torch.nn.Linear(2, 2))


class Remembering(Feature):
    """A feature with state in checkpoints."""

    seen = 0

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state.get("seen", 0)


def test_a_checkpoint_with_state_of_a_feature_that_is_off_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def engine_with(**features: Feature) -> Engine:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Engine.plan(model, ZeroConfig(stage=1).resolve(1), optimizer, extensions_of)
        return Engine(plan, FeatureSet(features))

    def run(rank: int, model: torch.nn.Module) -> None:
        saving, loading = Remembering(), Remembering()
        saving.seen = 7
        engine = engine_with(remembering=saving)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        for features in ({"remembering": loading}, {}):
            engine = engine_with(**features)
            engine.load_checkpoint(str(tmp_path))
            engine.destroy()
            said = "has state of remembering, which this configuration leaves off" in caplog.text
            assert loading.seen == 7 and said is not bool(features)

    on_ranks(1, run, build=lambda: torch.nn.Linear(2, 2))


def test_state_of_a_feature_that_is_off_is_named_once_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def run(rank: int, model: torch.nn.Module) -> None:
        def begun(**features: Feature) -> Engine:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plan = Engine.plan(model, ZeroConfig(stage=1).resolve(1), optimizer, extensions_of)
            return Engine(plan, FeatureSet(features))

        saving = Remembering()
        saving.seen = 7
        engine = begun(remembering=saving)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.destroy(gather=True)
        with torch.no_grad():
            model.weight.zero_()
        engine = begun()

        def tell(text: str, *more: object) -> None:
            if "has state of" in text:
                weights = float(model.weight.detach().abs().sum())
                told.append((text, engine.global_steps, weights))

        monkeypatch.setattr(load_sharded, "log_rank0", tell)
        engine.load_checkpoint(str(tmp_path))
        assert engine.global_steps == 1 and model.weight.abs().sum() > 0
        engine.destroy()

    on_ranks(1, run, build=lambda: torch.nn.Linear(2, 2))
    ((text, steps, weights),) = told
    assert "has state of remembering, which this configuration leaves off: it is not" in text
    assert "switch it on to go on with it" in text and steps == 0 and weights == 0.0


def test_state_that_no_feature_updates_is_refused() -> None:
    offload: Any = {"offload_optimizer": {"device": "cpu"}}
    settings = ZeroConfig.from_dict({"zero_optimization": {"stage": 2, **offload}}).resolve(1)

    def run(rank: int, model: torch.nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        engine_plan = Engine.plan(model, settings, optimizer, extensions_of)
        with pytest.raises(ConfigError, match="no feature of this engine updates it there; remove"):
            Engine(engine_plan, FeatureSet())

    on_ranks(1, run, build=lambda: torch.nn.Linear(2, 2))


def test_pairs_that_exclude_each_other_are_named_with_the_reason() -> None:
    one, other = "progressive_layer_drop", "pipeline"
    assert reason(one, other) == reason(other, one) != ""
    assert reason(one, "tiled_mlp") == ""
    assert conflicts(one, [one, other, "tiled_mlp"], {}) == [f"{other}: {reason(one, other)}"]
    with pytest.raises(ConfigError) as raised:
        check_combination(["tiled_mlp", one, other], {"zero_optimization.stage": 3})
    said = str(raised.value)
    assert said.startswith(f"tiled_mlp does not go with pipeline: {reason(one, other)}. ")
    assert f"{one} does not go with pipeline: " in said and "zero_optimization.stage: 3: " in said
    assert said.count("tiled_mlp") == 1, "each pair once"


def test_pairs_are_refused_before_a_feature_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ZeroConfig.from_dict(
        {
            "quantization_aware_training": {"config": "int8_weight"},
            "float8_training": {"recipe": "rowwise"},
        }
    )
    model = torch.nn.Linear(2, 2)
    early()  # their classes are loaded before
    monkeypatch.setattr(FeatureRow, "load", lambda row, name: pytest.fail(f"{name} is made"))
    with pytest.raises(ConfigError, match="quantization_aware_training does not go with float8_tr"):
        FeatureSet.of(settings, model, torch.optim.SGD(model.parameters(), lr=0.1))


METRICS = {"seqlen_truncate": "curriculum_learning", "hard": "data_efficiency.data_sampling"}


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_on_follows_from_what_a_section_contains(metric: str) -> None:
    learning = {"enabled": True, "curriculum_metrics": {metric: {}}}
    values = {"enabled": True, "data_sampling": {"curriculum_learning": learning}}
    assert switched_on(ZeroConfig.from_dict({"data_efficiency": values}).written) == [
        METRICS[metric]
    ]
    values["enabled"] = False
    assert switched_on(ZeroConfig.from_dict({"data_efficiency": values}).written) == []
    for section in ({"enabled": False}, {"mode": "dense"}):
        assert "sparse_attention" not in switched_on({"sparse_attention": section})
    assert "sparse_attention" in switched_on({"sparse_attention": {"mode": "fixed"}})


def test_what_keys_alone_show_is_refused_by_key() -> None:
    values = {
        "quantization_aware_training.config": "int8_weight",
        "float8_training.recipe": "rowwise",
    }
    found = refused_values(values)
    assert found == {
        "quantization_aware_training.config": "quantization_aware_training does not go with "
        "float8_training: both replace the linear layers; keep one"
    }
    rows = ZeroConfig.from_dict({"quantization_aware_training": {"config": "int8_weight"},
                                 "float8_training": {"recipe": "rowwise"}}).explain()  # fmt: skip
    (row,) = (row for row in rows if row.key == "quantization_aware_training.config")
    assert "both replace the linear layers" in row.note


# The files that go with a row: all else of the package does without them.
FILES = {
    "hang_detection": ("distributed/job_detection.py",),
    "attempts": ("distributed/attempts.py",),
    "member_states": ("optim/member_states.py", "optim/pre_step_hooks.py"),
    "schedules": (),
    "meta_models": (),
    "other_jobs": (),
    "update_kernels": (),
    "stop_requests": ("zero/step/preemption.py",),
    "launch_options": ("setup/launch_options.py",),
    "offload_files": ("offload/file_tier.py",),
    "torch_state_dicts": ("checkpoint/torch_state_dict.py",),
    "checkpoint.memory": ("checkpoint/memory/generations.py",),
    "whole_tensor_optimizers": ("optim/sharded_tensors.py",),
    "compressed_communication": (),
    "one_bit": (),
    "quantize_training": (),
    "fused_modules": ("integrations/fused/feature.py",),
    "engine_seams": ("integrations/engine_seams.py",),
    "compile.capture": ("setup/step_capture.py", "zero/step/captured_step.py"),
    "progressive_layer_drop": ("techniques/layer_drop.py",),
    "data_efficiency.data_routing.random_ltd": ("techniques/token_drop.py",),
    "tiled_mlp": ("parallel/sequence/tiled_mlp.py",),
    "parallel_axes": ("parallel/axes.py",),
    "pipeline": ("parallel/pipeline/feature.py",),
    "measures": ("measures/step.py",),
    "memory_check": ("planning/memory_check.py",),
}


def without(folder: Path, *names: str) -> Path:
    """Return a copy of the package in ``folder`` without the rows ``names`` and their files."""
    source = Path(hf_zero.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "kernels", "triton_kernels")
    shutil.copytree(source, folder / "hf_zero", ignore=ignored, symlinks=True)
    shutil.copy(source.parent / "VERSION", folder)
    table = folder / "hf_zero" / "config" / "features.toml"
    first = {f"{opening}{quote}{name}{quote}{end}" for name in names for opening in ("[", "[[")
             for quote in ("", '"') for end in ("]", ".")}  # fmt: skip
    tables = re.split(r"(?m)^(?=\[)", table.read_text())
    table.write_text("".join(text for text in tables if not text.startswith(tuple(first))))
    assert tomllib.loads(table.read_text()).keys() == FEATURES.keys() - {*names}
    for file in (file for name in names for file in FILES.get(name, ())):
        (folder / "hf_zero" / file).unlink()
    return folder


def run_in(folder: Path, code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True,
        env={"PATH": "", "HOME": str(folder), "PYTHONPATH": str(folder)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_a_package_without_one_feature_works(name: str, tmp_path: Path) -> None:
    folder = without(tmp_path, name)
    for arguments in (["doctor"], ["smoke", "--ranks", "1"]):
        run_in(folder, "from hf_zero.cli import main; main()", *arguments)
