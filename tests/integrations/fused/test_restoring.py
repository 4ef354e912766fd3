"""The state that ``hf_zero.optimize`` leaves untouched, the state that ``hf_zero.restore`` brings
back, and the reasons if nothing is replaced.
"""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama import modeling_llama

import hf_zero
from hf_zero.config.kernels import AUTO
from hf_zero.errors import KernelError
from hf_zero.integrations.fused import report
from hf_zero.integrations.fused.rotations import rotating_forward
from hf_zero.integrations.fused.sparse_attention import register_attention
from hf_zero.ops.packed_linear import adjacent
from hf_zero.zero.transaction import transaction
from tests.helpers.accelerators import play_accelerator
from tests.helpers.cells import in_one_item
from tests.integrations.fused.animals import BLOCKS, build, error, inputs, step

ALL = (*BLOCKS, "loss")


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(module.__dict__) for name, module in model.named_modules()}


def same_step(model: Any, right: Any, name: str) -> bool:
    (loss, grads), (right_loss, right_grads) = step(model, inputs(name)), step(right, inputs(name))
    assert grads.keys() == right_grads.keys()
    return torch.equal(loss, right_loss) and all(
        torch.equal(grads[key], right_grads[key]) for key in right_grads
    )


def test_no_class_is_touched_and_restoring_an_untouched_model_is_nothing() -> None:
    model = build("llama")
    assert hf_zero.restore(model) is model and attributes(model) == attributes(build("llama"))
    before = {type(module): type(module).forward for module in model.modules()}
    hf_zero.optimize(model, ALL)
    assert all(cls.forward is forward for cls, forward in before.items())
    for kernels in (*((kind,) for kind in ALL), ["norms"]):  # each in place of the one before
        hf_zero.optimize(model, kernels)
        with pytest.raises(KernelError, match=r"call hf_zero.restore\(model\) first"):
            pickle.dumps(model)
    assert {line.kernels for line in report(model).replaced} == {("norms",)}
    assert same_step(hf_zero.restore(model), build("llama"), "llama")
    pickle.dumps(model)


def test_a_model_inside_another_is_restored_and_reported_with_it() -> None:
    inner = build("llama")
    before = attributes(inner)
    hf_zero.optimize(inner, ["norms"])
    outer = nn.Sequential(inner)
    assert report(outer).replaced == report(inner).replaced != ()
    hf_zero.optimize(outer, "off")
    assert attributes(inner) == before and not report(outer).replaced
    hf_zero.optimize(inner, ["norms"])
    assert hf_zero.restore(outer) is outer and attributes(inner) == before


def test_a_copy_has_fused_kernels_of_its_own() -> None:
    sparse = {"mode": "fixed", "block": 16}  # the inputs are within one block
    model = hf_zero.optimize(build("bert"), ALL, sparse, pre_layer_norm=True)
    assert ("sparse_attention",) in {line.kernels for line in report(model).replaced}
    twin = copy.deepcopy(model)  # its q, k and v lie apart, so it multiplies by each
    right_loss, right = step(model, inputs("bert"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    hf_zero.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert twin.config._attn_implementation == "hf_zero_sparse"
    loss, grads = step(twin, inputs("bert"))
    assert report(twin).replaced and not report(model).lines
    torch.testing.assert_close(loss, right_loss, rtol=1e-5, atol=0)
    assert max(error(grads, right).values()) < 1e-5
    assert same_step(hf_zero.restore(twin), build("bert"), "bert")
    assert attributes(twin) == attributes(build("bert"))


def test_weights_are_saved_as_before(tmp_path: Path) -> None:
    model = hf_zero.optimize(build("llama-biased"), ALL)
    attention = model.model.layers[0].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert adjacent([layer.weight for layer in layers])
    assert adjacent([layer.bias for layer in layers])
    model.save_pretrained(tmp_path)
    saved, right = load_file(tmp_path / "model.safetensors"), build("llama-biased").state_dict()
    assert saved.keys() == right.keys()
    assert all(torch.equal(saved[key], right[key]) for key in right)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert "forward" not in again.model.layers[0].mlp.__dict__


def test_what_somebody_else_replaced_is_left() -> None:
    """Before, and after, where restoring would undo it."""
    model = build("llama")
    norm = model.model.norm
    norm.forward = own = lambda x: x
    hf_zero.optimize(model, ["norms"])
    assert norm.forward is own
    left = [(line.where, line.why_not) for line in report(model).left]
    assert left == [("model.norm", "something else has replaced its forward")]
    hf_zero.restore(model)
    assert norm.forward is own
    del norm.forward
    ours = hf_zero.optimize(model, ["norms"]).model.norm.forward
    norm.forward = own
    later = r"the forward of model\.norm was replaced again after hf_zero\.optimize, by a \w+ of \S"
    with pytest.raises(KernelError, match=later):
        hf_zero.restore(model)
    norm.forward = ours
    assert same_step(hf_zero.restore(model), build("llama"), "llama")


def test_code_that_is_not_known_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class LlamaRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 1

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q, k

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", LlamaRMSNorm)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    model, right = build("llama"), build("llama")
    hf_zero.optimize(model, ["norms", "rotary"])
    left = {line.what: line.why_not for line in report(model).left}
    assert left["LlamaRMSNorm"] == "it is neither an RMSNorm nor a LayerNorm"
    assert left["LlamaAttention"] == "it does not rotate the two halves of a head"
    assert same_step(model, right, "llama")


def half_turn(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half_turn(q) * sin, None if k is None else k * cos + half_turn(k) * sin


def rotate_with_a_file(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    open(os.environ["PROBED"], "w").close()
    return rotate(q, k, cos, sin)


def rotate_with_an_import(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    import shutil

    shutil.copy(__file__, os.environ["PROBED"])
    return rotate(q, k, cos, sin)


class Rotating(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rotate(q, k, cos, sin)


class WithAnAttribute(Rotating):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rotate(self.rotate(q), k, cos, sin)


class WithAFile(Rotating):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rotate_with_a_file(q, k, cos, sin)


class WithAnImport(Rotating):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rotate_with_an_import(q, k, cos, sin)


def test_a_rotation_is_replaced_where_the_kernel_takes_what_it_takes() -> None:
    forward: Any = rotating_forward(Rotating)
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    for queries, keys in ((q, k), (q, k[:1]), (q[:1], k), (q, None)):
        right = rotate(queries, keys, *angles)
        torch.testing.assert_close(forward(Rotating(), queries, keys, *angles), right)
    torch.testing.assert_close(
        forward(Rotating(), q, k, *angles.int()), rotate(q, k, *angles.int())
    )


def test_rotations_that_cannot_be_renamed_or_probed_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBED", str(tmp_path / "file"))
    for cls in (WithAnAttribute, WithAFile, WithAnImport):
        assert rotating_forward(cls) is None, cls
    assert list(tmp_path.iterdir()) == []


# Family, kernel, options, the module that is left, and why.
HEADLESS = "ViTForImageClassification"
EXPERTS = "experts run through transformers' grouped matrix products"
UPDATE = "it is the engine's update; hf_zero.initialize has it"
SUMS = "its residual sums are in forwards of whole blocks; compile: blocks fuses them"
RELU = "its activation is ReLU"
LEFT: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("gemma", "activations", {"hidden_act": "relu"}, "GemmaMLP", RELU),
    ("distilbert", "activations", {"activation": "relu"}, "FFN", RELU),
    ("mixtral", "activations", {}, "MixtralExperts", EXPERTS),
    ("gemma2", "residual", {}, "Gemma2ForCausalLM", SUMS),
    ("bert", "optimizer", {}, "optimizer", UPDATE),
    ("vit", "loss", {}, HEADLESS, f"{HEADLESS} has no output embedding"),
]


@in_one_item(LEFT)
def test_why_not(row: tuple[str, str, dict[str, Any], str, str]) -> None:
    name, kernel, options, what, why = row
    model = hf_zero.optimize(build(name, **options), [kernel])
    assert {(line.what, line.why_not) for line in report(model).left} == {(what, why)}
    assert why in str(report(model))


def test_the_table_and_the_names_of_kernels(
    heard_in_full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table counts like modules; without a GPU "auto" is what helps there."""
    model = hf_zero.optimize(build("llama"), ["norms", "qkv"])
    rows = [line.split() for line in str(report(model)).splitlines()]
    assert ["norms", "LlamaRMSNorm", "model.layers.*.input_layernorm", "2", "×"] in rows
    assert ["norms", "LlamaRMSNorm", "model.norm", "1", "×"] in rows
    assert heard_in_full[-1].startswith("fused kernels in LlamaForCausalLM:\n")
    play_accelerator(monkeypatch, count=0)
    model = hf_zero.optimize(build("bert"))
    assert {line.kernels for line in report(model).lines} == {(name,) for name in AUTO["cpu"]}
    assert not report(hf_zero.optimize(build("bert"), "off")).lines
    for given in ("norm", ["norms", "norm"]):
        with pytest.raises(KernelError, match=r"norm is not a fused kernel.*norms"):
            hf_zero.optimize(build("bert"), given)
    nested: Any = [["norms"]]
    with pytest.raises(KernelError, match=r"\['norms'\] is not a fused kernel"):
        hf_zero.optimize(build("bert"), nested)
    for off in (None, False):
        assert not report(hf_zero.optimize(build("bert"), off)).lines
    assert report(hf_zero.optimize(build("bert"), True)).lines
    wrong: Any = 3
    with pytest.raises(KernelError, match="kernels=3"):
        hf_zero.optimize(build("bert"), wrong)
    for call in (hf_zero.optimize, hf_zero.restore):
        with pytest.raises(KernelError, match="of type str"):
            call("bert")


@pytest.mark.parametrize("shared", [True, False])
def test_attention_that_another_call_has_registered_outlives_a_rollback(shared: bool) -> None:
    """Two threads of a process call ``initialize``, and one call fails."""
    registered = transformers.AttentionInterface._global_mapping

    def call() -> None:
        with transaction():
            register_attention("hf_zero_of_two", len, len)

    with pytest.raises(KeyError), ThreadPoolExecutor() as another, transaction():
        register_attention("hf_zero_of_two", len, len)
        if shared:
            another.submit(call).result()
        raise KeyError
    assert (registered.pop("hf_zero_of_two", None) is not None) is shared
