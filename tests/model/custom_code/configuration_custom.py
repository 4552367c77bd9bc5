"""The config of a small model whose code lies in its folder (`--trust-remote-code`)."""

from transformers import PretrainedConfig


class CustomConfig(PretrainedConfig):
    model_type = "tide_custom"

    def __init__(
        self,
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)
