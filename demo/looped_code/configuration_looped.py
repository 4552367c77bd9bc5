"""The config of a small looped model, with the names of Ouro's (arXiv 2510.25741)."""

from transformers import PretrainedConfig


class LoopedConfig(PretrainedConfig):
    model_type = "tide_looped"

    def __init__(
        self,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        total_ut_steps=4,
        early_exit_threshold=0.6,
        gate_width=1,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.total_ut_steps = total_ut_steps
        self.early_exit_threshold = early_exit_threshold
        self.gate_width = gate_width  # 0: no gate
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)
