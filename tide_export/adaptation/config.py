"""The settings of early-exit training, validated once; the options of `tide-export adapt` and their help."""

from typing import Literal

from pydantic import Field

from tide_export.config import Settings, TideConfig


class AdaptConfig(Settings):
    """Settings of early-exit training (LayerSkip, https://arxiv.org/abs/2404.16710, with self-distillation)."""

    dataset: str = Field("wikitext", min_length=1, description="text to train on, a SPEC as below")
    tokens: int = Field(4_000_000, ge=1, description="tokens to train on; shorter text is repeated")
    length: int = Field(256, ge=8, description="tokens per sequence at most")
    batch: int = Field(4, ge=1, description="sequences per step")
    micro_batch: int = Field(4, ge=1, description="sequences per forward pass, at most batch: fewer need less memory")
    checkpoints: tuple[int, ...] | None = Field(
        None, description="layers after which tokens learn to exit, such as 4,8,12; overrides checkpoint_interval"
    )
    checkpoint_interval: int = Field(4, ge=1, description="they learn to exit after every N layers")
    exits_per_step: int = Field(
        0, ge=0, description="checkpoints trained in a step, in rotation; 0 for all, fewer are faster"
    )
    early_weight: float = Field(1.0, ge=0.0, description="weight of the losses of all early exits in total")
    depth_power: float = Field(
        0.5,
        ge=0.0,
        description="a checkpoint's loss weighs (its layers / all layers) to this power; 0 weighs all alike",
    )
    full_weight: float = Field(2.0, ge=0.0, description="weight of the loss of full depth")
    label_share: float = Field(
        0.5, ge=0.0, le=1.0, description="share of next-token loss in it; the rest is divergence from the original"
    )
    layer_dropout: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="share of sequences that skip the last layer; lower layers are skipped less, the first never",
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="train matrices of this rank beside the frozen weights (needs peft) and "
        "merge them at the end; 0 trains every weight",
    )
    learning_rate: float = Field(6e-4, gt=0.0, description="peak learning rate, after a warm-up and before a cosine")
    clip: float = Field(1.0, gt=0.0, description="largest norm of a step's gradient")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="of matmuls; auto is bf16 where the device computes it fast"
    )
    held_out: str | None = Field(
        None, min_length=1, description="text to measure on, a SPEC; otherwise some documents of the dataset"
    )
    held_out_tokens: int = Field(8192, ge=16, description="tokens to measure on, about")
    save_minutes: float = Field(5.0, ge=0.0, description="time between two savings of the state to resume from")
    seed: int = Field(0, ge=0, description="of the order of the text and of layer dropout")

    def exits(self, num_layers: int) -> tuple[int, ...]:
        """Returns the checkpoints of a model with `num_layers` layers.

        Raises:
            ConfigError: none fits.
        """
        points = TideConfig(checkpoints=self.checkpoints, checkpoint_interval=self.checkpoint_interval)
        return points.resolve_checkpoints(num_layers)
