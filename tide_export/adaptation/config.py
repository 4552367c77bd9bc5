"""Settings of early-exit training, which are also the options of `tide-export adapt`."""

from typing import Literal

from pydantic import Field

from tide_export.calibration.config import Settings, TideConfig


class AdaptConfig(Settings):
    """Settings of early-exit training (LayerSkip, https://arxiv.org/abs/2404.16710, self-distilled)."""

    dataset: str = Field("wikitext", min_length=1, description="text to train on, a SPEC as below")
    tokens: int = Field(4_000_000, ge=1, description="tokens to train on; shorter text is repeated")
    length: int = Field(256, ge=8, description="maximum tokens per sequence")
    batch: int = Field(4, ge=1, description="sequences per step")
    micro_batch: int = Field(4, ge=1, description="sequences per forward pass, at most batch; fewer need less memory")
    checkpoints: tuple[int, ...] | None = Field(
        None, description="layers after which tokens learn to exit, such as 4,8,12; overrides checkpoint_interval"
    )
    checkpoint_interval: int = Field(4, ge=1, description="layers between checkpoints at which tokens learn to exit")
    exits_per_step: int = Field(
        0, ge=0, description="checkpoints trained per step, in rotation; 0 trains all, fewer are faster"
    )
    early_weight: float = Field(1.0, ge=0.0, description="total weight of the losses of all early exits")
    depth_power: float = Field(
        0.5,
        ge=0.0,
        description="weight of a checkpoint's loss: (its layers / all layers) to this power; 0 weighs all equally",
    )
    original_weight: float = Field(
        4.0, ge=0.0, description="weight of full depth's divergence from the frozen original, which holds it to that"
    )
    label_weight: float = Field(
        0.0, ge=0.0, description="weight of full depth's next-token loss: learns the text, and changes more tokens"
    )
    layer_dropout: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="share of sequences that skip the last layer; earlier layers are skipped less, the first never",
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="train matrices of this rank beside the frozen weights (needs peft) and "
        "merge them at the end; 0 trains every weight",
    )
    learning_rate: float = Field(6e-4, gt=0.0, description="peak learning rate, between warm-up and cosine decay")
    clip: float = Field(1.0, gt=0.0, description="maximum gradient norm")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="dtype of matmuls; auto is bf16 where the device computes it fast"
    )
    held_out: str | None = Field(
        None, min_length=1, description="text to measure on, a SPEC; by default some documents of the dataset"
    )
    held_out_tokens: int = Field(8192, ge=16, description="approximate number of tokens to measure on")
    save_minutes: float = Field(5.0, ge=0.0, description="minutes between snapshots to resume from")
    seed: int = Field(0, ge=0, description="seed of the order of the text and of layer dropout")

    def exits(self, num_layers: int) -> tuple[int, ...]:
        """Returns the checkpoints of a model with `num_layers` layers.

        Raises:
            ConfigError: a checkpoint is out of range, or there is none.
        """
        points = TideConfig(checkpoints=self.checkpoints, checkpoint_interval=self.checkpoint_interval)
        return points.resolve_checkpoints(num_layers)
