"""A model whose samples, and a reward whose values, hang on what is said alone.

Ranks draw other random numbers than one process, so what is sampled must not hang on the state of a
generator: this model draws every token from what its row says so far. Completions then have many
lengths, and are the same for any number of ranks.
"""

from __future__ import annotations

import zlib

import torch
from transformers import LlamaForCausalLM, LogitsProcessor

GROUP = 2  # completions of a prompt
ENDS = 4.0  # how much likelier the end is than the model believes


class Drawn(LogitsProcessor):
    """A draw whose noise comes from the tokens of the row and its number in the group."""

    def __init__(self, pad, end):
        self.pad, self.end = pad, end

    def __call__(self, input_ids, scores):
        drawn = torch.full_like(scores, -torch.inf)
        for number, (row, score) in enumerate(zip(input_ids, scores)):
            said = [number % GROUP, *(token for token in row.tolist() if token != self.pad)]
            generator = torch.Generator().manual_seed(zlib.crc32(str(said).encode()))
            noise = -torch.empty(score.shape).exponential_(generator=generator).log()
            noise[self.end] += ENDS
            drawn[number, (score + noise.to(score.device)).argmax()] = 0.0
        return drawn


class DrawingLlama(LlamaForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(Drawn(self.config.pad_token_id, self.config.eos_token_id))
        return processors


class Letters:
    """Rewards vowels."""

    __name__ = "letters"

    def __call__(self, completions, **kwargs):
        return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]
