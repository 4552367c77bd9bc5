"""Every knob of calibration and export, validated once, with TIDE's names and defaults where TIDE has them.

`TideConfig` is filled by the command line (or by a library user), read by `calibrate` and `pipeline.flow`, and stored
in the router file and the bundle's manifest as provenance.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_export.errors import ConfigError


class TideConfig(BaseModel):
    """Calibration and export settings (TIDE: Token-Informed Depth Execution, 0.2.1, `config.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_interval: int = Field(4, ge=1, description="a checkpoint after every this many layers")
    checkpoints: Literal["auto"] | tuple[int, ...] | None = Field(
        None,
        description="explicit checkpoints, counted in layers run, or `auto`: few, where it pays; overrides "
        "checkpoint_interval",
    )
    exit_threshold: float = Field(0.85, ge=0.0, le=1.0, description="a token exits when its score is above this")
    min_layers: int = Field(8, ge=0, description="a count of layers: checkpoints before it never exit")
    max_pending: int = Field(16, ge=0, description="tokens that may wait before a segment is forced to run")
    compaction_threshold: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="of several sequences: where a smaller share than this needs a segment, only those run it",
    )
    exit_strategy: Literal["identity", "lens"] = Field(
        "identity", description="what leaves: the state as it is (TIDE's rule), or translated by a lens"
    )
    kv_cache_strategy: Literal["exact", "propagate"] = Field(
        "exact",
        description="skipped layers: their tokens wait and are caught up, so that the cache is exact; or they get keys "
        "and values from the exit state, so that nothing waits, and the cache is an approximation",
    )
    lens_rank: int = Field(64, ge=1, description="width of a lens; cut to half the hidden size")
    lens_tokens: int = Field(32768, ge=64, description="tokens a lens is fitted to, each epoch")
    lens_epochs: int = Field(3, ge=1)
    lens_learning_rate: float = Field(1e-3, gt=0.0)
    calibration_dataset: str = Field("wikitext", min_length=1)
    calibration_samples: int = Field(2000, ge=2, description="sequences read at most")
    calibration_length: int = Field(512, ge=2, description="tokens per sequence at most")
    calibration_batch: int = Field(8, ge=1, description="sequences per forward pass")
    calibration_tokens_kept: int | None = Field(
        None, ge=64, description="tokens kept of the training split (a uniform sample): bounds the memory"
    )
    calibration_memory: float = Field(
        2.0, gt=0.0, description="GiB of hidden states kept where calibration_tokens_kept is not given"
    )
    label: Literal["agreement", "cosine", "kl"] = Field("agreement", description="what a router learns to predict")
    convergence_threshold: float = Field(0.98, gt=-1.0, lt=1.0, description="cosine label: similarity above this")
    kl_bound: float = Field(0.1, gt=0.0, description="kl label: divergence from the full distribution below this, nats")
    class_balance: bool = Field(False, description="weigh both classes alike while fitting")
    router_bottleneck_dim: int = Field(128, ge=1)
    router_shortlist: int = Field(
        256, ge=0, description="head rows a router reads to know how sure the head is; 0: TIDE's router"
    )
    router_epochs: int = Field(20, ge=1)
    router_learning_rate: float = Field(1e-3, gt=0.0)
    validation_fraction: float = Field(0.15, gt=0.0, lt=0.5, description="share of tokens to stop and scale scores by")
    test_fraction: float = Field(0.15, gt=0.0, lt=0.5, description="share of tokens for the report alone")
    seed: int = Field(0, ge=0)

    def tokens_kept(self, hidden_size: int, states: int) -> int:
        """Tokens of the training split whose `states` hidden states are kept (the other splits keep a quarter each)."""
        if self.calibration_tokens_kept is not None:
            return self.calibration_tokens_kept
        # Beside the states one checkpoint's exits are held at a time, of all three splits: 1.5 times the training's.
        per_token = 4 * hidden_size * (states + 1) * 1.5
        return max(64, int(self.calibration_memory * 2**30 / per_token))

    def resolve_checkpoints(self, num_layers: int) -> tuple[int, ...]:
        """The checkpoints of a model with `num_layers` layers, ascending; never after the last layer.

        `auto` cannot be resolved without running the model: `calibration.placement` does it.

        Raises:
            ConfigError: none fits, or an explicit one lies outside 1 .. num_layers-1 or is repeated.
        """
        assert self.checkpoints != "auto"
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
            name, *inside = first["loc"]
            # Inside a union pydantic tells what each member would have liked; nobody asked.
            wanted = "must be auto, or a list of layer counts" if inside and name == "checkpoints" else first["msg"]
            raise ConfigError(f"option {name}: {wanted} (got {given.get(str(name), first.get('input'))!r})") from None
