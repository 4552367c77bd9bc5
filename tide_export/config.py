"""Every knob of calibration and export, validated once, with TIDE's names and defaults where TIDE has them.

`TideConfig` is filled by the command line (or by a library user), read by `calibrate` and `pipeline`, and stored in the
router file and the bundle's manifest as provenance.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_export.errors import ConfigError


class TideConfig(BaseModel):
    """Calibration and export settings (TIDE: Token-Informed Depth Execution, 0.2.1, `config.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_interval: int = Field(4, ge=1, description="a checkpoint after every this many layers")
    checkpoints: tuple[int, ...] | None = Field(
        None, description="explicit checkpoints, counted in layers run; overrides checkpoint_interval"
    )
    exit_threshold: float = Field(0.85, ge=0.0, le=1.0, description="a token exits when its score is above this")
    min_layers: int = Field(8, ge=0, description="a count of layers: checkpoints before it never exit")
    max_pending: int = Field(16, ge=0, description="tokens that may wait before a segment is forced to run")
    calibration_dataset: str = Field("wikitext", min_length=1)
    calibration_samples: int = Field(2000, ge=2, description="sequences read at most")
    calibration_length: int = Field(512, ge=2, description="tokens per sequence at most")
    calibration_batch: int = Field(8, ge=1, description="sequences per forward pass")
    calibration_tokens_kept: int = Field(
        65536, ge=64, description="tokens kept per split for fitting (a uniform sample): bounds the memory"
    )
    label: Literal["agreement", "cosine"] = Field("agreement", description="what a router learns to predict")
    convergence_threshold: float = Field(0.98, gt=-1.0, lt=1.0, description="cosine label: similarity above this")
    router_bottleneck_dim: int = Field(128, ge=1)
    router_epochs: int = Field(40, ge=1)
    router_learning_rate: float = Field(1e-3, gt=0.0)
    validation_fraction: float = Field(0.2, gt=0.0, lt=1.0, description="share of documents kept for validation")
    seed: int = Field(0, ge=0)

    def resolve_checkpoints(self, num_layers: int) -> tuple[int, ...]:
        """The checkpoints of a model with `num_layers` layers, ascending; never after the last layer.

        Raises:
            ConfigError: none fits, or an explicit one lies outside 1 .. num_layers-1 or is repeated.
        """
        if self.checkpoints is None:
            found = tuple(range(self.checkpoint_interval, num_layers, self.checkpoint_interval))
            if not found:
                raise ConfigError(
                    f"checkpoint_interval {self.checkpoint_interval} leaves no checkpoint in a model of "
                    f"{num_layers} layers: use a smaller interval or --checkpoints"
                )
            return found
        if not self.checkpoints or list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise ConfigError(f"checkpoints must be distinct and ascending, not {list(self.checkpoints)}")
        if self.checkpoints[0] < 1 or self.checkpoints[-1] >= num_layers:
            raise ConfigError(
                f"checkpoints must lie in 1..{num_layers - 1} (the model has {num_layers} layers), "
                f"not {list(self.checkpoints)}"
            )
        return self.checkpoints

    @classmethod
    def from_options(cls, **options: object) -> "TideConfig":
        """A config from the options that were given (None means: not given).

        Raises:
            ConfigError: naming the first option that is out of range or unknown.
        """
        given = {name: value for name, value in options.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"option {name}: {first['msg']} (got {first.get('input')!r})") from None
