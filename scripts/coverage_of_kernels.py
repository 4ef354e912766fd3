#!/usr/bin/env python
"""Count the model types of transformers in which fused kernels are active, and compare a training
step of each with the untouched model.

Every type of the auto-classes for language models is built with a tiny configuration: causal,
masked, sequence to sequence, from pictures to text, from speech to text. ``--json`` prints one
object for each type; otherwise a table of counts. ``--release`` runs another release of
Transformers, from the cache of ``scripts/releases``.
A type counts for a kernel if every module of the kind has it: modules whose class is named a norm
or an MLP, and attention layers, for the rotation and the common product of q, k and v. It counts
for the loss if its step computes no whole logits.

    python scripts/coverage_of_kernels.py --kind causal --only llama,qwen3 --release oldest
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import os
import random
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import torch

KINDS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "vision": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "speech": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}
BLOCKS = ("norms", "activations", "rotary", "qkv", "residual")
SECONDS = 60  # for a type
MEMORY = 12 << 30  # bytes of address space: a type that needs more is left out
LARGEST = 60_000_000  # parameters of a type whose configuration does not become tiny
# Sizes by the ends of their names in a configuration.
SIZES = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "d_ff": 96, "hidden_dim": 96, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "vocab_size": 128, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip
TEXT = ("text_config", "decoder")
# Further sizes of the encoders of pictures and sounds.
ENCODER_SIZES = {
    "depth": 2, "embed_dim": 64, "out_hidden_size": 64, "projection_dim": 64, "output_dim": 64,
    "encoder_layers": 2, "max_source_positions": 32,
}  # fmt: skip


def tiny_config(model_type: str) -> Any:
    """Return the configuration of ``model_type`` with small sizes; sizes that depend on others are
    computed by its class.
    """
    from transformers import AutoConfig

    own = AutoConfig.for_model(model_type)
    nested = {
        name: _sizes(getattr(own, name), SIZES if name in TEXT else SIZES | ENCODER_SIZES)
        for name in (*TEXT, *own.sub_configs)
        if hasattr(getattr(own, name, None), "to_dict")
    }
    encodes = SIZES | ENCODER_SIZES if hasattr(own, "max_source_positions") else SIZES
    text = {name: sizes for name, sizes in nested.items() if name in TEXT}
    of_own = _sizes(own, encodes)
    for sizes in (of_own | nested, of_own | text, nested, text, _sizes(own)):
        try:
            return with_sections(AutoConfig.for_model(model_type, **sizes))
        except Exception:  # two of them contradict each other
            continue
    return own


def with_sections(config: Any) -> Any:
    """Return ``config`` with sections of rotary embeddings that sum to half the width of a head."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" in rope and "vision_config" in config.sub_configs:
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def _sizes(config: Any, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, size in sizes.items():
        try:
            if type(getattr(config, name, None)) is int:
                found[name] = size
        except Exception:  # a property that differs by layer
            continue
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_start_token_id"] = 0
    return found


def build(kind: str, model_type: str) -> Any:
    import transformers

    auto = getattr(transformers, KINDS[kind][0])
    config = tiny_config(model_type)
    with torch.device("meta"):
        count = sum(each.numel() for each in auto.from_config(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"its smallest configuration has {count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = auto.from_config(config).float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases that are not 0, norms that are not 1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def media(model: Any) -> dict[str, torch.Tensor]:
    """Return random pictures or sounds for a model that cannot train on tokens alone."""
    name, config = model.main_input_name, model.config
    generator = torch.Generator().manual_seed(4)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        channels = getattr(vision, "num_channels", 3)
        shape: tuple[int, ...] = (2, channels, vision.image_size, vision.image_size)
    elif name == "input_values":
        shape = (2, 4000)
    elif name == "input_features" and hasattr(config, "num_mel_bins"):
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_features" and hasattr(config, "input_feat_per_channel"):
        shape = (2, 32, config.input_feat_per_channel * config.input_channels)
    else:
        return {}
    return {name: torch.randn(shape, generator=generator)}


def step(model: Any, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a batch."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = min(100, model.config.get_text_config().vocab_size)
    ids = torch.randint(3, vocabulary, (2, 12), generator=generator)
    more: dict[str, Any] = {"use_cache": False} if kind == "causal" else {}
    if kind in ("vision", "speech"):
        more = media(model)
        if "use_cache" in inspect.signature(model.forward).parameters:
            more["use_cache"] = False
    if kind != "speech" or model.main_input_name == "input_ids":
        more["input_ids"] = ids
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(3)
    model.zero_grad(set_to_none=True)
    loss = model(labels=ids.clone(), **more).loss
    loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(loss.detach()), {name: each.clone() for name, each in grads.items()}


def row(kind: str, model_type: str) -> dict[str, Any]:
    """Return what is fused in a type, and how far its step is from the untouched model's."""
    import hf_zero
    from hf_zero.integrations.fused import report

    made: dict[str, Any] = {"kind": kind, "type": model_type}
    try:
        model = build(kind, model_type)
        loss, grads = step(model, kind)
        again, _ = step(model, kind)
    except TimeoutError:
        raise
    except Exception as error:
        return made | {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    if abs(loss - again) > 1e-5:
        return made | {"left_out": "its loss is random"}
    hf_zero.optimize(model, ["loss"])
    try:
        made |= {"loss": whole_logits(model, kind, loss, grads)}
    except TimeoutError:
        raise
    except Exception as error:
        return made | {"right": False, "error": f"{type(error).__name__}: {error}"[:200]}
    hf_zero.optimize(model, BLOCKS)
    lines = report(model)
    fused: dict[str, set[str]] = {kernel: set() for kernel in BLOCKS}
    for line in lines.replaced:
        for kernel in line.kernels:
            fused[kernel].add(line.where)
    places: dict[str, set[str]] = {"norms": set(), "activations": set(), "attention": set()}
    for name, module in model.named_modules():
        kind_of = type(module).__name__
        if kind_of.endswith("Norm"):
            places["norms"].add(name)
        elif kind_of.endswith("MLP"):
            places["activations"].add(name)
        elif kind_of.endswith("Attention") and any(
            hasattr(child, "weight") for child in module.children()
        ):
            places["attention"].add(name)
    try:
        new_loss, new_grads = step(model, kind)
    except TimeoutError:
        raise
    except Exception as error:
        return made | {"right": False, "error": f"{type(error).__name__}: {error}"[:200]}
    off = error_of(grads, new_grads)
    right = off < 1e-4 and abs(new_loss - loss) < 1e-4
    counts = {
        kernel: [len(fused[kernel] & places[place]), len(places[place])]
        for kernel, place in {
            "norms": "norms", "activations": "activations", "rotary": "attention",
            "qkv": "attention",
        }.items()
    }  # fmt: skip
    left = sorted(
        {f"{line.what}: {line.why_not}" for line in lines.left if line.kernels != ("residual",)}
    )
    rotates = any("rotary" in name.lower() for name, _ in model.named_modules())
    return made | {"right": right, "off": off, **counts, "rotates": rotates, "left": left}


def error_of(grads: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient, in parts of its largest element and of a hundredth
    of the model's; infinity if a gradient is missing.
    """
    if new.keys() != grads.keys():
        return float("inf")
    largest = max(float(grad.abs().max()) for grad in grads.values())
    return max(
        float((new[name] - each).abs().max()) / (largest * 0.01 + float(each.abs().max()))
        for name, each in grads.items()
    )


def whole_logits(model: Any, kind: str, loss: float, grads: dict[str, torch.Tensor]) -> str:
    """Return "fused" if a step of ``model`` computes its loss without whole logits, "computed" if
    something reads them, "wrong" if loss or gradients differ, or the reason why they are not
    deferred.
    """
    from hf_zero.integrations.fused import report
    from hf_zero.ops.deferred import DeferredOutput

    left = [line.why_not for line in report(model).left if "loss" in line.kernels]
    if left:
        return left[0]
    computed = []
    plain, of_call = DeferredOutput.materialize, DeferredOutput.of_call
    made: list[Any] = []

    def materialize(tensor: Any) -> torch.Tensor:
        computed.append(tuple(tensor.shape))
        return plain(tensor)

    def noted(*args: Any) -> Any:
        made.append(args)
        return of_call(*args)

    DeferredOutput.materialize = materialize  # type: ignore[method-assign]
    DeferredOutput.of_call = noted  # type: ignore[method-assign,assignment]
    try:
        new_loss, new_grads = step(model, kind)
    finally:
        DeferredOutput.materialize = plain  # type: ignore[method-assign]
        DeferredOutput.of_call = of_call  # type: ignore[method-assign]
    if abs(new_loss - loss) > 1e-4 or error_of(grads, new_grads) > 1e-4:
        return "wrong"
    if not made:
        return "its head is not called"
    return "computed" if computed else "fused"


def rows(kinds: list[str], only: list[str]) -> Iterator[dict[str, Any]]:
    from tqdm import tqdm
    from transformers.models.auto import modeling_auto

    chosen = [
        (kind, name)
        for kind in kinds
        for name in getattr(modeling_auto, KINDS[kind][1])
        if not only or name in only
    ]
    signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for kind, name in tqdm(chosen, disable=None, file=sys.stderr):
        signal.alarm(SECONDS)
        try:
            yield row(kind, name)
        except TimeoutError:
            yield {"kind": kind, "type": name, "left_out": f"it takes more than {SECONDS} s"}
        finally:
            signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError


def table(found: list[dict[str, Any]]) -> str:
    """Return the counts as a table: types in which every module of the kind is fused, of those
    that have one.
    """
    lines = ["| kind | types that train | norms | activations | rotary | qkv | loss | wrong |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        trained = [each for each in found if each["kind"] == kind and "right" in each]
        cells = []
        for kernel in ("norms", "activations", "rotary", "qkv"):
            having = [each[kernel] for each in trained if each.get(kernel, [0, 0])[1]]
            if kernel == "rotary":
                having = [own[kernel] for own in trained if own.get("rotates") and own[kernel][1]]
            all_of = sum(fused == there for fused, there in having)
            cells.append(f"{all_of} of {len(having)} ({sum(f > 0 for f, _ in having)} in part)")
        cells.append(f"{sum(each.get('loss') == 'fused' for each in trained)} of {len(trained)}")
        wrong = [row["type"] for row in trained if not row["right"] or row["loss"] == "wrong"]
        cells.append(", ".join(wrong) or "none")
        lines.append(f"| {kind} | {len(trained)} | {' | '.join(cells)} |")
    reasons = Counter(each["left_out"] for each in found if "left_out" in each)
    lines += ["", *(f"- left out {count} ×: {reason}" for reason, count in reasons.items())]
    return "\n".join(lines)


def begin_again(given: argparse.Namespace) -> None:
    """Run this script again, without ``--release``, with that release of Transformers before the
    installed ones.
    """
    import releases

    cache = releases.overlays_below(releases.CACHE)
    (versions,) = releases.environments([f"transformers={given.release}"], cache, []).values()
    folders = [releases.overlay(name, of, cache, []) for name, of in versions.items()]
    path = os.pathsep.join([str(releases.ROOT), *map(str, folders)])
    arguments = [f"--kind={kind}" for kind in given.kind or []] + ["--json"] * given.json
    arguments.append(f"--only={given.only}")
    os.execve(
        sys.executable, [sys.executable, __file__, *arguments], os.environ | {"PYTHONPATH": path}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--only", default="", help="types, separated by commas")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--release", help="oldest, or a version of Transformers")
    given = parser.parse_args()
    if given.release:
        begin_again(given)
    import transformers

    logging.getLogger("hf_zero").setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = []
    for each in rows(given.kind or list(KINDS), [n for n in given.only.split(",") if n]):
        found.append(each)
        if given.json:
            print(json.dumps(each), flush=True)
    if not given.json:
        print(table(found))
    return (
        1 if any(each.get("right") is False or each.get("loss") == "wrong" for each in found) else 0
    )


if __name__ == "__main__":
    sys.exit(main())
