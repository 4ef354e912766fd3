"""Weights of a model in training for vLLM, sent by TRL's trainers. Imported while ``import trl``
runs.

TRL gathers the unit of each parameter for each parameter, and the whole model to merge adapters.
Here ``iter_weights`` takes the place of these gathers, at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_zero.integrations import finder

Named = tuple[str, torch.Tensor]


def engine_of(model: torch.nn.Module) -> Any:
    """Return the engine that trains ``model``; None before it is made."""
    from hf_zero.zero.layout.parameter import owner_of

    flat = next(filter(None, map(owner_of, model.parameters())), None)
    return None if flat is None or flat.retired else flat.engine()


def stream_of(engine: Any, server: bool) -> Any:
    """Return the weights as TRL sends them: each in its own dtype, with adapters merged; to a
    server from rank 0.
    """
    return engine.iter_weights(dtype=None, rank0_only=server)


def copies(stream: Any, device: torch.device) -> Iterator[list[Named]]:
    """Yield the buckets of ``stream`` in memory that the caller may keep, on the stream that is
    current when each is asked for: vLLM packs tensors later, and on streams of its own.
    """
    from hf_zero.device import kinds, streams

    if kinds.is_host(device):
        for bucket in stream:
            yield [(name, value.clone()) for name, value in bucket]
        return
    gathers, buckets = streams.current_stream(device), iter(stream)
    while True:
        here = streams.current_stream(device)
        with streams.on_stream(gathers):
            bucket = next(buckets, None)
        if bucket is None:
            return
        here.wait_stream(gathers)
        kept = [(name, value.clone()) for name, value in bucket]
        gathers.wait_stream(here)
        yield kept


def iter_in_buckets(original: Callable[..., Iterator[Named]]) -> Callable[..., Iterator[Named]]:
    """Wraps ``VLLMGeneration._iter_named_params``, by which GRPO, RLOO and others send weights. The
    first loop of a server's client, for names and shapes only, gathers nothing.
    """

    def _iter_named_params(self: Any) -> Iterator[Named]:
        engine = engine_of(self.model) if finder.chosen() else None
        if engine is None:
            yield from original(self)
            return
        stream = stream_of(engine, self.mode == "server")
        if self.mode == "server" and self._weight_metadata is None:
            for name, dtype, shape in stream.tensors:
                yield name, torch.empty(shape, dtype=dtype, device="meta")
            return
        for bucket in copies(stream, engine.device):
            yield from bucket

    return _iter_named_params


def move_in_buckets(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``OnlineDPOTrainer._move_model_to_vllm_inner``: one message to the server a bucket."""

    def _move_model_to_vllm_inner(self: Any) -> None:
        engine = engine_of(self.model) if finder.chosen() else None
        if engine is None:
            original(self)
            return
        server = self.vllm_mode == "server"
        for bucket in copies(stream_of(engine, server), engine.device):
            if server:
                infos = [
                    (name, str(value.dtype).removeprefix("torch."), list(value.shape))
                    for name, value in bucket
                ]
                self.vllm_client.update_named_params(infos, iter(bucket))
            else:
                runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
                runner.model.load_weights(bucket)

    return _move_model_to_vllm_inner
