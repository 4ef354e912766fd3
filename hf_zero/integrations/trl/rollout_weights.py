"""Weights of a model in training for vLLM, sent by TRL's trainers. Imported while ``import trl``
runs.

TRL gathers the unit of each parameter for each parameter, and the whole model to merge adapters.
Here ``iter_weights`` takes the place of these gathers, at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hf_zero.engine import Engine
from hf_zero.integrations import finder
from hf_zero.integrations.seams import Original
from hf_zero.zero.layout.flat_buffer import engine_of

if TYPE_CHECKING:
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    from hf_zero.zero.access.wholes import WeightBuckets

Named = tuple[str, torch.Tensor]


def copies(stream: WeightBuckets, device: torch.device) -> Iterator[Iterator[Named]]:
    """Return the buckets of ``stream``, each a loop over copies that the caller may keep: vLLM
    packs tensors later, and on several streams in turn. Gathers run on the stream that is current
    now; each copy is made on the one that is current when it is asked for. Finish each bucket's
    loop.
    """
    from hf_zero.device import kinds, streams

    def current() -> streams.Stream | None:
        return None if kinds.is_synchronous(device) else streams.current_stream(device)

    def follow(stream: streams.Stream | None, other: streams.Stream | None) -> None:
        if stream is not None and other is not None and stream != other:
            stream.wait_stream(other)

    def copied(bucket: list[Named]) -> Iterator[Named]:
        for name, value in bucket:
            stream_here = current()
            follow(stream_here, gathers)
            copy = value.clone()
            follow(gathers, stream_here)
            yield name, copy

    gathers = current()

    def buckets() -> Iterator[Iterator[Named]]:
        remaining = iter(stream)
        while True:
            with streams.on_stream(gathers):
                bucket = next(remaining, None)
            if bucket is None:
                return
            yield copied(bucket)

    return buckets()


def iter_in_buckets(
    original: Callable[..., Iterator[Named]], self: VLLMGeneration
) -> Iterator[Named]:
    """Wraps ``VLLMGeneration._iter_named_params``, by which GRPO, RLOO and others send weights. The
    first loop of a server's client, for names and shapes only, gathers nothing.
    """
    engine = engine_of(self.model.parameters(), Engine) if finder.chosen() else None
    if engine is None:
        return original(self)
    # in their own dtypes, with adapters merged; to a server from rank 0
    stream = engine.iter_weights(dtype=None, rank0_only=self.mode == "server")
    if self.mode == "server" and self._weight_metadata is None:
        return (
            (name, torch.empty(shape, dtype=dtype, device="meta"))
            for name, dtype, shape in stream.tensors
        )
    return chain.from_iterable(copies(stream, engine.device))


def move_in_buckets(original: Original, self: OnlineDPOTrainer) -> None:
    """Wraps ``OnlineDPOTrainer._move_model_to_vllm_inner``: one message to the server a bucket."""
    model = self.model
    engine = None
    if model is not None and finder.chosen():
        engine = engine_of(model.parameters(), Engine)
    if engine is None:
        original(self)
        return
    server = self.vllm_mode == "server"
    stream = engine.iter_weights(dtype=None, rank0_only=server)
    for bucket in map(list, copies(stream, engine.device)):
        if server:
            infos = [
                (name, str(value.dtype).removeprefix("torch."), list(value.shape))
                for name, value in bucket
            ]
            self.vllm_client.update_named_params(infos, iter(bucket))
        else:
            runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
            runner.model.load_weights(bucket)
