"""Selection of the blocks of a model that techniques leave out."""

from __future__ import annotations

import pytest
import transformers
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.techniques.blocks import layers_of

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM"])
def test_strided_convolutions_of_speech_models_stay(kind):
    """They are layers that can be checkpointed, in a list of their own."""
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    model = getattr(transformers, f"{kind}Model")(config)
    assert [layer.stack for layer in layers_of(model, "x")] == ["encoder.layers"] * 2


def test_a_model_of_strided_convolutions_alone_is_refused():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, stride=2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ConfigError, match="Convolutions has none"):
        layers_of(Convolutions(), "progressive_layer_drop")
